"""The text is real, and a batch depends on nothing but the seed and the step."""

import pytest
import torch

from tilewise.demo import data


def test_corpus_is_english_text():
    text = data.corpus()
    assert text.dtype == torch.uint8 and len(text) > 400_000
    words = bytes(text.tolist()).decode().lower().split()
    assert words.count("the") > 2_000


def test_split_keeps_every_byte_once():
    text = data.corpus()
    training, held_out = data.split(text)
    assert torch.equal(torch.cat([training, held_out]), text)
    assert 0.09 < len(held_out) / len(text) < 0.11


def test_batch_is_a_function_of_seed_and_step():
    text = data.corpus()
    sizes = {"batch": 3, "context": 64}
    torch.manual_seed(1)
    first = data.batch_at(text, 5, seed=0, **sizes)
    torch.manual_seed(2)
    again = data.batch_at(text, 5, seed=0, **sizes)
    assert torch.equal(first.inputs, again.inputs)
    assert first.inputs.shape == first.targets.shape == (3, 64)
    assert torch.equal(first.inputs[:, 1:], first.targets[:, :-1])
    for step, seed in ((6, 0), (5, 1)):
        assert not torch.equal(first.inputs, data.batch_at(text, step, seed=seed, **sizes).inputs)


def test_context_longer_than_the_text_is_refused():
    with pytest.raises(ValueError, match="context is 100, but the text holds 100 bytes; a context below 100"):
        data.batch_at(torch.zeros(100, dtype=torch.uint8), 0, batch=1, context=100, seed=0)
