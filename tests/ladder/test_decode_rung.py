"""A rung for decoding without a GPU: what it says to tensors that it cannot serve, and how many pieces it makes."""

import pytest
import torch

from tilewise.errors import ShapeError, UnsupportedError
from tilewise.ladder import DECODE_RUNGS, RUNGS, VARIANTS
from tilewise.ladder.decode_rung import _counters
from tilewise.sm90 import jit


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


Q, CACHE, LENGTHS = bf16(2, 8, 128), bf16(2, 300, 2, 128), torch.tensor([3, 300], dtype=torch.int32)


def test_names():
    assert list(DECODE_RUNGS) == ["d1", "d2"] and not DECODE_RUNGS.keys() & (RUNGS | VARIANTS).keys()
    assert all(name == rung.name and rung.title for name, rung in DECODE_RUNGS.items())


@pytest.mark.parametrize(
    "given, error, message",
    [
        ((Q[0], CACHE, CACHE, LENGTHS), ShapeError, "q must have 3 dimensions (batch, heads_q, head_dim), got 2 with shape (8, 128)"),
        ((Q, CACHE[0], CACHE, LENGTHS), ShapeError, "k_cache must have 4 dimensions (batch, capacity, heads_k, head_dim), got 3"),
        ((Q, CACHE, CACHE[:, :5], LENGTHS), ShapeError, "v_cache has shape (2, 5, 2, 128), but k_cache has shape (2, 300, 2, 128)"),
        ((Q, CACHE, CACHE, LENGTHS[:1]), ShapeError, "lengths has batch 1, but q has batch 2; they must be equal"),
        ((Q, CACHE, CACHE, LENGTHS[None]), ShapeError, "lengths must have 1 dimensions (batch), got 2 with shape (1, 2)"),
        ((Q, CACHE, CACHE, LENGTHS.long()), ShapeError, "lengths must be int32, got int64; convert it with lengths.to(...)"),
        ((Q, CACHE.float(), CACHE.float(), LENGTHS), ShapeError, "k_cache is torch.float32, but q is torch.bfloat16"),
        ((bf16(2, 7, 128), CACHE, CACHE, LENGTHS), ShapeError, "q has heads_q=7 and k has heads_k=2; heads_q must be a multiple of heads_k"),
        ((Q.float(), CACHE.float(), CACHE.float(), LENGTHS), UnsupportedError, "it takes bfloat16 only, and the tensors are torch.float32"),
        ((Q[..., :64], CACHE[..., :64], CACHE[..., :64], LENGTHS), UnsupportedError, "it takes head_dim 128, and this is 64"),
        ((bf16(2, 130, 128), CACHE, CACHE, LENGTHS), UnsupportedError, "it takes up to 64 query heads of a key head, and these are 65"),
        ((Q, CACHE, CACHE, LENGTHS), UnsupportedError, "it runs on a Hopper GPU, and the tensors are on cpu: move them to 'cuda'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", DECODE_RUNGS)
def test_bad_tensors(name, given, error, message):
    with pytest.raises(error) as raised:
        DECODE_RUNGS[name](*given)
    assert message in str(raised.value)


def test_counters_are_kept_and_grow():
    device = torch.device("cpu")
    first = _counters(2, 3, device)
    assert _counters(1, 2, device).data_ptr() == first.data_ptr() and first.shape == (2, 3)
    assert _counters(5, 1000, device).shape == (5, 1000) and not _counters(5, 1000, device).any()


@pytest.mark.skipif(bool(jit.why_no_compiler()), reason="; ".join(jit.why_no_compiler()))
def test_pieces_are_as_many_as_keep_multiprocessors_busy():
    rung = DECODE_RUNGS["d1"]
    assert rung.splits(Q, CACHE, 132) == 5  # tiles of 64 keys
    assert rung.splits(Q, bf16(2, 8192, 2, 128), 132) == 33
    assert rung.splits(Q, bf16(2, 8192, 2, 128), 3) == 1
    assert [each.counts for each in DECODE_RUNGS.values()] == [False, True]


@pytest.mark.parametrize("name", DECODE_RUNGS)
@pytest.mark.skipif(bool(jit.why_no_compiler()), reason="; ".join(jit.why_no_compiler()))
def test_nothing_to_read(name):
    o, lse = DECODE_RUNGS[name].run(Q, CACHE[:, :0], CACHE[:, :0], LENGTHS, 1.0, 1)
    assert not o.any() and (lse == -torch.inf).all()
