"""Closures read as masks, against transformers' own evaluation pair by pair."""

import random

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed: pip install 'transformers>=5'")

from transformers import masking_utils as hf

import tilewise as tw
from tilewise.compat import hf_masks
from tilewise.compat.hf_masks import Frame
from tilewise.masks import Full

BATCH = 3


def dense(function, frame: Frame, padding=None) -> torch.Tensor:
    """What transformers itself says, bool (BATCH, seqlen_q, seqlen_k)."""
    return hf.sdpa_mask(BATCH, *frame, function, padding, allow_is_causal_skip=False)[:, 0]


def read(function, frame: Frame, padding=None) -> list[tw.Mask] | None:
    return hf_masks.by_row(hf_masks.read(function), None if padding is None else padding.numpy(), BATCH, frame)


def as_said(masks: list[tw.Mask], frame: Frame) -> torch.Tensor:
    return torch.stack([mask.dense(*frame[:2]) for mask in masks]).expand(BATCH, -1, -1)


def padded(draw: random.Random, length: int) -> torch.Tensor:
    """bool (BATCH, length): padding on the left, on the right, in the middle, or everywhere."""
    seen = torch.ones(BATCH, length, dtype=torch.bool)
    for row in seen:
        a, b = sorted(draw.choices(range(length + 1), k=2))
        if (how := draw.randrange(5)) < 4:
            row[[slice(0), slice(a), slice(b, None), slice(a, b)][how]] = False
        else:
            row[:] = draw.random() < 0.7
    return seen


def leaf(draw: random.Random, length: int):
    ids = torch.tensor([[draw.randrange(-1, 4) for _ in range(length)] for _ in range(BATCH)]).sort(dim=1).values
    makers = [
        lambda: hf.causal_mask_function,
        lambda: hf.bidirectional_mask_function,
        lambda: hf.sliding_window_overlay(draw.randrange(1, 9)),
        lambda: hf.sliding_window_bidirectional_overlay(draw.randrange(6)),
        lambda: hf.chunked_overlay(draw.randrange(1, 9), torch.tensor([draw.randrange(4) for _ in range(BATCH)])),
        lambda: hf.blockwise_overlay(ids[:, torch.tensor(draw.sample(range(length), length))] if draw.random() < 0.5 else ids),
        lambda: hf.packed_sequence_mask_function(ids + 1),
        lambda: hf.sliding_window_causal_mask_function(draw.randrange(1, 9)),
    ]
    return draw.choice(makers)()


def tree(draw: random.Random, length: int, depth: int = 2):
    if depth == 0 or draw.random() < 0.3:
        return leaf(draw, length)
    combine = draw.choice((hf.and_masks, hf.or_masks))
    return combine(*(tree(draw, length, depth - 1) for _ in range(draw.randrange(1, 4))))


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("seed", range(80))
def test_random_trees(seed):
    draw = random.Random(seed)
    for _ in range(5):
        frame = Frame(draw.randrange(1, 14), draw.randrange(1, 14), draw.randrange(6), draw.randrange(4))
        length = max(frame.seqlen_q + frame.q_offset, frame.seqlen_k + frame.k_offset)
        function, padding = tree(draw, length), draw.choice((None, padded(draw, length)))
        want, found = dense(function, frame, padding), hf_masks.read(function)
        keys = hf_masks.keys_seen(found, None if padding is None else padding.numpy(), frame)
        assert not want[:, :, keys:].any()
        cut = frame._replace(seqlen_k=keys)
        masks = read(function, cut, padding)
        assert torch.equal(as_said(masks, cut), want[:, :, :keys]), (masks, frame)
        alone = hf_masks.padded(found, None if padding is None else padding.numpy(), cut)
        if alone is not None:
            assert torch.equal(alone.dense(*cut[:2])[:, 0], want[:, :, :keys]), (alone, frame)
        if len(masks) > 1:
            whole = hf_masks.folded(masks, *cut[:2]).dense(BATCH * cut.seqlen_q, BATCH * keys)
            assert torch.equal(whole, torch.block_diag(*want[:, :, :keys].int()).bool())


def test_the_trees_have_what_they_should():
    """Each kind of closure, rows that differ, and keys that are cut off, are among those above."""
    kinds, different, cut = set(), 0, 0
    for seed in range(80):
        draw = random.Random(seed)
        frame = Frame(draw.randrange(1, 14), draw.randrange(1, 14), draw.randrange(6), draw.randrange(4))
        length = max(frame.seqlen_q + frame.q_offset, frame.seqlen_k + frame.k_offset)
        function = tree(draw, length)
        found = hf_masks.read(function)
        kinds |= {kind for kind in hf_masks.CAPTURED if found.has(kind)}
        different += len(read(function, frame)) > 1
        cut += hf_masks.keys_seen(found, None, frame) < frame.seqlen_k
    assert kinds == set(hf_masks.CAPTURED) - {hf_masks.REMAPPED} and different > 10 and cut > 5


def test_padding_at_the_ends_is_structure():
    """One mask for the batch, where the entries differ by nothing else; on one side it says so, because a GPU then needs no tables."""
    frame, tree = Frame(4, 6, 2), hf_masks.read(hf.sliding_window_causal_mask_function(3))
    window = tw.SlidingWindow(2, 0)

    def of(*rows: str) -> tw.Mask | None:
        return hf_masks.padded(tree, np.array([[c == "x" for c in row] for row in rows]), frame)

    assert of("xxxxxx", "xx----", "------") == window & tw.Padding([6, 2, 0])
    assert of("xxxxxx", "--xxxx", "------") == window & tw.Padding(start=[0, 2, 6])
    assert of("-xxx--", "--xxxx", "------") == window & tw.Padding([3, 4, 0], [1, 2, 6])
    assert of("xx-xxx", "xxxxxx", "xxxxxx") is None and of("xxxx--", "xxxx--", "xxxx--") is None
    by_sequence = hf_masks.read(hf.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1]] * 3)))
    assert hf_masks.padded(by_sequence, np.array([[True] * 5 + [False], [True] * 6, [True] * 6]), frame) is None


def positions(*lengths: int, start: int = 0) -> torch.Tensor:
    return torch.cat([torch.arange(start if n == 0 else 0, (start if n == 0 else 0) + length) for n, length in enumerate(lengths)])


@pytest.mark.parametrize("chunk", (None, 4))
@pytest.mark.parametrize("window", (None, 3))
@pytest.mark.parametrize("blocks", (False, True))
def test_packed(window, chunk, blocks):
    rows = torch.stack([positions(5, 7), positions(1, 1, 10, start=3), positions(12, start=2)])
    function = hf.causal_mask_function if window is None else hf.sliding_window_causal_mask_function(window)
    if chunk:
        function = hf.and_masks(hf.chunked_overlay(chunk, torch.zeros(BATCH, dtype=torch.int64)), function)
    function = hf.remap_positions_for_packed_sequence(function, rows)
    if blocks:
        function = hf.or_masks(function, hf.blockwise_overlay(torch.tensor([[-1, -1, 0, 0, 0, 1, 1, 1, -1, 2, 2, 2]]).expand(BATCH, -1)))
    function = hf.and_masks(function, hf.packed_sequence_mask_function(hf.find_packed_sequence_indices(rows)))
    masks = read(function, Frame(12, 12))
    assert torch.equal(as_said(masks, Frame(12, 12)), dense(function, Frame(12, 12)))
    assert blocks or all(isinstance(mask, tw.Documents) for mask in masks)
    whole = hf_masks.folded(masks, 12, 12)
    assert torch.equal(whole.dense(36, 36), torch.block_diag(*dense(function, Frame(12, 12)).int()).bool())
    assert blocks or isinstance(whole, tw.Documents)


def test_positions_alone_have_no_structure():
    """Without packed sequences beside them, pairs of any two sequences may see each other."""
    rows = torch.stack([positions(5, 7)] * BATCH)
    assert read(hf.remap_positions_for_packed_sequence(hf.causal_mask_function, rows), Frame(12, 12)) is None
    jumps = hf.and_masks(
        hf.remap_positions_for_packed_sequence(hf.causal_mask_function, rows), hf.packed_sequence_mask_function(torch.zeros(BATCH, 12))
    )
    assert read(jumps, Frame(12, 12)) is None


def test_unknown_closures_are_not_read():
    def ours(batch_idx, head_idx, q_idx, kv_idx):
        return kv_idx <= q_idx

    for function in (ours, hf.and_masks(hf.causal_mask_function, ours), hf.or_masks(hf.and_masks(ours))):
        assert hf_masks.read(function) is None
    assert hf_masks.read(hf.sliding_window_causal_mask_function(3), known={"and_masks", "causal_mask_function"}) is None
    assert hf_masks.read(hf.add_offsets_to_mask_function(hf.causal_mask_function, 1, 2)) is None


def test_too_many_blocks_have_no_structure(monkeypatch):
    monkeypatch.setattr(hf_masks, "MOST_BLOCKS", 4)
    ids = torch.tensor([[0, 1, 0, 1, 0, 1]]).expand(BATCH, -1)
    assert read(hf.blockwise_overlay(ids), Frame(6, 6)) is None
    assert read(hf.causal_mask_function, Frame(6, 6), torch.tensor([[True, False] * 5]).expand(BATCH, -1)[:, :10]) is not None
    assert read(hf.causal_mask_function, Frame(6, 10), torch.tensor([[True, False] * 5]).expand(BATCH, -1)) is None


@pytest.mark.parametrize("seqlen_q", (1, 3, 6))
@pytest.mark.parametrize("seqlen_k", (1, 3, 6))
def test_between(seqlen_q, seqlen_k):
    ends = [None, *range(-8, 9)]
    place = np.arange(seqlen_k)[None] - np.arange(seqlen_q)[:, None]
    for lo in ends:
        for hi in ends:
            mask = hf_masks.between(lo, hi, Frame(seqlen_q, seqlen_k))
            want = (place >= (-99 if lo is None else lo)) & (place <= (99 if hi is None else hi))
            assert np.array_equal(mask.dense(seqlen_q, seqlen_k).numpy(), want), (lo, hi, mask)


def test_between_says_it_shortly():
    frame = Frame(5, 9, q_offset=4)
    assert hf_masks.between(None, 4, frame) == tw.Causal() and hf_masks.between(None, 0, frame) == tw.Causal("top_left")
    assert hf_masks.between(2, 4, frame) == tw.SlidingWindow(2, 0) and hf_masks.between(-2, 1, frame) == tw.SlidingWindow(2, 1, "top_left")
    assert hf_masks.between(None, 8, frame) == hf_masks.between(-4, None, frame) == Full()
