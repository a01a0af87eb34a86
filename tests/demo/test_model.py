"""The model is the same whatever computes its attention, looks only backwards, and learns."""

import torch

from tilewise.demo.model import GPTConfig, as_text, build, rotary_angles, rotate, sdpa_attention, tilewise_attention, write

SMALL = GPTConfig(layers=2, context=48)


def test_same_seed_gives_the_same_weights_and_leaves_the_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, two = build(SMALL, tilewise_attention, 3), build(SMALL, sdpa_attention, 3)
    assert torch.equal(torch.rand(1), expected)
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_both_attentions_give_the_same_loss_and_gradients():
    tokens = torch.randint(256, (2, 49), generator=torch.Generator().manual_seed(0))
    models = [build(SMALL, attention, 0) for attention in (tilewise_attention, sdpa_attention)]
    losses = [model.loss(tokens[:, :-1], tokens[:, 1:]) for model in models]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_byte_never_sees_the_future():
    model = build(SMALL, tilewise_attention, 0)
    tokens = torch.randint(256, (1, 48), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 30:] = 0
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :30], after[0, :30])
    assert not torch.allclose(before[0, 30:], after[0, 30:])


def test_rotation_keeps_lengths_and_makes_scores_depend_on_distance_alone():
    angles = rotary_angles(SMALL)
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    rotated = rotate(x.expand(1, 48, 1, 64), angles)[0, :, 0]
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm().expand(48))
    scores = rotated @ rotated.T
    torch.testing.assert_close(scores[10, 4], scores[40, 34], rtol=1e-4, atol=1e-4)


def test_text_is_written_after_a_prompt_longer_than_the_context_too():
    """The same seed writes the same; only the last `context` bytes are seen; bytes that are no text have a mark in their place."""
    model, prompt = build(SMALL, tilewise_attention, 0), torch.randint(256, (100,), generator=torch.Generator().manual_seed(1))
    text = write(model, prompt, 20)
    assert text == write(model, prompt[-SMALL.context :], 20) == write(build(SMALL, sdpa_attention, 0), prompt, 20)
    assert text != write(model, prompt, 20, seed=1) and write(model, prompt, 0) == ""
    assert as_text(torch.tensor([65, 0, 10, 0xFF, 0xC3, 0xA4])) == "A\N{REPLACEMENT CHARACTER}\n\N{REPLACEMENT CHARACTER}\u00e4"
