"""Padded batches as packed documents give what they give as they are, by the oracle; and which calls are so folded."""

import pytest
import torch

from tilewise.backends.hopper import entries, widths
from tilewise.backends.reference import Reference
from tilewise.backends.tables.documents import by_rows
from tilewise.masks import Causal, Dense, DeviceDocuments, FirstKeys, Full, Padding, SlidingWindow
from tilewise.testing.cases import Case, make

SHAPE = {"batch": 2, "seqlen_q": 14, "seqlen_k": 19, "heads_q": 4, "heads_k": 2, "head_dim": 8, "dtype": "fp32"}
FOLDED = [
    (lambda of: Padding(of(19, 7)) & Causal()),
    (lambda of: Padding(of(19, 0)) & Causal("top_left", 3) & SlidingWindow(5, None)),
    (lambda of: Padding(None, of(0, 10)) & (SlidingWindow(3, 2) & Full())),
    (lambda of: Padding(start=of(19, 10), inner=Causal())),
    (lambda of: Padding(of(0, 10), of(5, 6), Causal())),
    (lambda of: Causal() & Padding(of(19, 1))),
    (lambda of: Padding(of(4)) & Causal()),
]
APART = [
    (Padding((4, 9), (1, 2)) & Causal(), {}),
    (Padding((4, 9)) - Causal(), {}),
    (Padding((4, 9)) & FirstKeys(3), {}),
    (Padding((4, 9)) & Padding((3, 10)), {}),
    (Padding((4, 9)) & Dense(torch.ones(1, 19, dtype=torch.bool)), {}),
    (Padding((4, 9)), {"bias": "h"}),
    (Padding((4, 9)), {"alibi": "bh"}),
    (Padding((4, 9)), {"dropout": 0.3}),
    (Padding((4, 9)), {"seqlen_k": 0}),
    (Causal(), {}),
]


@pytest.mark.parametrize("kind", [lambda *x: x, lambda *x: torch.tensor(x, dtype=torch.int64)], ids=["list", "tensor"])
@pytest.mark.parametrize("mask", range(len(FOLDED)))
@pytest.mark.parametrize("alibi", [None, "h"])
def test_folded_calls(mask, kind, alibi, monkeypatch):
    monkeypatch.setattr(entries, "FEWEST", 1)
    call = make(Case(**SHAPE, mask=FOLDED[mask](kind), alibi=alibi, sink=True), grad=True)
    folded = entries.fold(call)
    assert (
        folded is not None
        and folded.batch == 1
        and by_rows(folded.mask)
        and isinstance(folded.mask, DeviceDocuments) == (call.mask.source is None)
    )
    reference = Reference()
    o, lse = reference.forward(call)
    found, found_lse = reference.forward(folded)
    torch.testing.assert_close(entries.unfold(call, found), o)
    torch.testing.assert_close(entries.unfold_rows(call, found_lse), lse)
    torch.testing.assert_close(entries.fold_rows(lse), found_lse)
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
    want = reference.backward(call, o, lse, d_o, d_lse)
    got = reference.backward(folded, found, found_lse, d_o.flatten(0, 1)[None], entries.fold_rows(d_lse))
    for x, y in zip(entries.unfold_gradients(call, got), want, strict=True):
        assert (x is None and y is None) or torch.allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("mask, change", APART, ids=repr)
def test_what_is_not_folded(mask, change, monkeypatch):
    monkeypatch.setattr(entries, "FEWEST", 1)
    if change.get("seqlen_k") == 0:
        mask = Padding((0, 0))
    assert entries.fold(make(Case(**SHAPE | {"mask": mask} | change))) is None


def test_few_queries_are_not_folded():
    assert entries.fold(make(Case(**SHAPE, mask=Padding((4, 9))))) is None


def test_lengths_of_a_list_are_found_once(monkeypatch):
    monkeypatch.setattr(entries, "FEWEST", 1)
    one, two = (entries.fold(make(Case(**SHAPE, mask=Padding((4, 9)) & Causal()), seed)).mask for seed in range(2))
    assert one is two


@pytest.mark.parametrize("dims", [(8, 24), (7, 24), (8, 3), (61, 59)], ids=str)
def test_head_dims_are_padded_and_cut(dims):
    call = make(Case(**SHAPE | {"head_dim": dims[0], "head_dim_v": dims[1]}, mask=Causal()), grad=True)
    wider = widths.of_call(call)
    assert widths.fits(wider) and wider.scale == call.scale and (wider is call) == widths.fits(call)
    reference = Reference()
    o, lse = reference.forward(call)
    found, found_lse = reference.forward(wider)
    torch.testing.assert_close(found_lse, lse)
    torch.testing.assert_close(found[..., : dims[1]], o)
    assert (found[..., dims[1] :] == 0).all()
    d_o = torch.randn_like(o)
    want = reference.backward(call, o, lse, d_o, None)
    got = widths.cut(call, reference.backward(wider, widths.padded(o), lse, widths.padded(d_o), None))
    for x, y in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(x, y)
