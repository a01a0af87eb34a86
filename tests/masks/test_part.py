"""Part: rows and heads of a mask, against rows and heads of its matrix."""

import pickle

import pytest
import torch

import tilewise as tw
from tilewise.masks import parse

ROWS = [(), ((0, 20),), ((0, 3), (3, 4), (10, 20)), ((5, 5), (19, 20))]
MASKS = [
    tw.Causal(),
    tw.SlidingWindow(4, 1) | tw.FirstKeys(2),
    tw.Documents([0, 7, 20], [0, 9, 25], inner=tw.Causal()),
    tw.Dense(torch.rand(20, 25, generator=torch.Generator().manual_seed(0)) < 0.5),
    tw.Full() - tw.Full(),
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_rows(mask, rows):
    whole = mask.dense(20, 25)
    part = tw.Part(mask, 20, rows)
    expected = torch.cat([whole[:0], *(whole[first:last] for first, last in rows)])
    assert part.length == len(expected) and torch.equal(part.dense(len(expected), 25), expected)
    assert part.pairs(len(expected), 25, heads=3) == 3 * expected.sum()
    assert torch.equal(part.transpose().dense(25, len(expected)), expected.T)
    tensors: list[torch.Tensor] = []
    assert parse(part.text(tensors), tensors) == part and pickle.loads(pickle.dumps(part)) == part
    assert part.kind == ("bitmap" if mask.kind == "bitmap" else "runs")


@pytest.mark.parametrize("keys", [(0, 25, 25), (0, 9, 25), (8, 25, 25), (8, 19, 25), (24, 25, 25)])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_keys(mask, keys):
    """Of some keys alone, counted from the first of them."""
    first, last, _ = keys
    whole, rows = mask.dense(20, 25)[:, first:last], ROWS[2]
    part = tw.Part(mask, 20, rows, keys=keys)
    expected = torch.cat([whole[begin:end] for begin, end in rows])
    assert torch.equal(part.dense(len(expected), last - first), expected)
    assert part.pairs(len(expected), last - first) == expected.sum()
    tensors: list[torch.Tensor] = []
    assert parse(part.text(tensors), tensors) == part and pickle.loads(pickle.dumps(part)) == part
    with pytest.raises(tw.ShapeError, match="keys=.* the call has seqlen_k 26"):
        part.dense(len(expected), 26)


def test_dropout_knows_no_keys():
    q = torch.zeros(1, 8, 1, 16)
    with pytest.raises(tw.UnsupportedError, match="dropout counts the pairs of a whole call"):
        tw.attention(q, q, q, mask=tw.Part(tw.Causal(), 8, [(0, 8)], keys=(8, 16, 20)), dropout_p=0.5)


def test_heads():
    masks = [tw.Causal(), tw.SlidingWindow(3, 0), tw.Full()]
    mask = tw.PerHead({(0, 1): masks[0], (1, 4): masks[1], (4, 6): masks[2]})
    part = tw.Part(mask, 9, [(2, 6)], (3, 5, 6))
    assert part.extent == (1, 2) and not part.alike
    expected = torch.stack([each.dense(9, 9)[2:6] for each in (masks[1], masks[2])])
    assert torch.equal(part.dense(4, 9)[0], expected)
    assert part.pairs(4, 9, heads=2) == expected.sum()
    alike = tw.Part(tw.Causal(), 9, [(2, 6)], (3, 5, 6))
    assert alike.alike and torch.equal(alike.dense(4, 9), tw.Causal().dense(9, 9)[2:6])
    by_batch = tw.Part(tw.Padding([3, 9]), 9, [(0, 2)])
    assert by_batch.extent == (2, 1) and by_batch.pairs(2, 9, batch=2) == 2 * (3 + 9)


def test_in_expressions():
    part = tw.Part(tw.Causal(), 20, ROWS[2])
    expected = tw.Causal().dense(20, 25)[[0, 1, 2, 3, *range(10, 20)]]
    first = tw.FirstKeys(3).dense(14, 25)
    assert torch.equal((part & tw.FirstKeys(3)).dense(14, 25), expected & first)
    assert torch.equal((~part | tw.FirstKeys(3)).dense(14, 25), ~expected | first)
    assert torch.equal(tw.Part(tw.Part(tw.Causal(), 20, ((5, 15),)), 10, ((2, 4),)).dense(2, 25), tw.Causal().dense(20, 25)[7:9])
    assert torch.equal(tw.PerHead({(0, 1): part, (1, 2): tw.Full()}).dense(14, 25)[0, 0], expected)


WRONG = [
    (lambda: tw.Part("mask", 9, []), ValueError, "Part: mask must be a mask"),
    (lambda: tw.Part(tw.Full(), -1, []), ValueError, "Part: seqlen_q must be an integer, 0 or more"),
    (lambda: tw.Part(tw.Full(), 9, [(0, 10)]), tw.ShapeError, r"Part: rows must ascend, be apart and end at 9 at most, got \(0, 10\)"),
    (lambda: tw.Part(tw.Full(), 9, [(4, 6), (5, 7)]), tw.ShapeError, "Part: rows must ascend"),
    (lambda: tw.Part(tw.Full(), 9, [(6, 5)]), tw.ShapeError, r"rows\[0\] must be a half-open range"),
    (lambda: tw.Part(tw.Full(), 9, [(0, 5)], (2, 2, 4)), ValueError, r"Part: heads must be \(first, last, all\)"),
    (lambda: tw.Part(tw.PerHead({(0, 3): tw.Full()}), 9, [(0, 5)], (0, 2, 4)), tw.ShapeError, "the mask is made for heads 3, but"),
    (
        lambda: tw.Documents([0, 5, 9], inner=tw.Part(tw.Full(), 9, [(0, 9)])).pairs(9, 9),
        tw.ShapeError,
        "Part: its rows|of a whole call, not of a document",
    ),
    (lambda: tw.Part(tw.Full(), 9, [(0, 5)]).pairs(6, 9), tw.ShapeError, "Part: its rows are 5 queries, the call has seqlen_q 6"),
    (lambda: tw.Part(tw.Full(), 9, [(0, 5)], (0, 2, 4)).pairs(5, 9, heads=3), tw.ShapeError, "are 2, the call has heads 3"),
]


@pytest.mark.parametrize(("make", "error", "words"), WRONG)
def test_wrong_arguments(make, error, words):
    with pytest.raises(error, match=words):
        make()
