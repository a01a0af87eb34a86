"""What ranks do around attention: tokens in and out, cross-attention, checkpointing, DTensors, and failures that end with a sentence."""

import distributed_behaviours
import pytest
import ranks


def test_around_attention():
    results = ranks.run(distributed_behaviours.everything, 3)
    assert all(isinstance(each, list) for each in results), next(each["error"] for each in results if isinstance(each, dict))
    assert len(results[0]) == 11


@pytest.mark.slow
def test_a_transformers_model_under_fsdp2():
    pytest.importorskip("transformers")
    for each in ranks.run(distributed_behaviours.in_transformers, 2):
        assert each == ["logits", "gradients"], each["error"]


def test_a_killed_rank_ends_the_others_with_a_message():
    *others, last = ranks.run(distributed_behaviours.one_is_killed, 3, timeout=15.0)
    assert last is None
    for each in others:
        seconds, _, message = each.partition(" s: ")
        assert float(seconds) < 30 and "another rank of the group has ended" in message, each
