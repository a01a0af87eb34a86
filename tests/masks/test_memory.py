"""Masks that are others in every step: what is kept of them is bounded by its bytes, not by how many there were."""

import gc
import weakref

import pytest
import torch

import tilewise as tw
from tilewise.masks import constructors as masks
from tilewise.masks import mask as expression
from tilewise.masks import text as mask_text
from tilewise.masks.bands import Bands
from tilewise.runtime import call_cache

DOCUMENTS = 2000


@pytest.fixture
def bounded(monkeypatch):
    """Empty caches, small enough to be full after a few masks."""
    monkeypatch.setattr(expression, "_BANDS", expression.Recent(256, 1 << 20, expression._band_bytes, expression._drop))
    monkeypatch.setattr(masks, "_LONG", masks.Recent(1024, 1 << 18, lambda mask: masks.A_CHARACTER * len(mask.source)))
    masks._plain.cache_clear()
    mask_text._tree.cache_clear()
    call_cache.forget()
    yield
    call_cache.forget()


def packed(step: int, long: bool = True) -> tw.Documents:
    ends = range(DOCUMENTS + step, 0, -1)  # one token a document, but for the first
    starts = [0, *(2 * DOCUMENTS - end for end in ends)]
    return tw.Documents(starts if long else starts[:3], inner=tw.Causal())


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_documents_of_every_step(backend, bounded, monkeypatch):
    regions = weakref.WeakSet()
    of = Bands.of.__func__
    monkeypatch.setattr(Bands, "of", classmethod(lambda cls, *x, **y: (made := of(cls, *x, **y), regions.add(made))[0]))
    q = torch.randn(1, 2 * DOCUMENTS, 1, 8).requires_grad_()
    for step in range(12):
        tw.attention(q, q, q, mask=packed(step), backend=backend).sum().backward()
    gc.collect()
    # Tables of 2000 bands are 96 kB, and counted four times over; the mask within the documents may be there, too.
    assert len(expression._BANDS.values) <= 3 and len(regions) <= 3
    assert sum(expression._band_bytes(planes) for planes in expression._BANDS.values.values()) <= 1 << 20
    assert sum(masks.A_CHARACTER * len(mask.source) for mask in masks._LONG.values.values()) <= 1 << 18
    assert mask_text._tree.cache_info().currsize == 0 and masks._plain.cache_info().currsize == 0
    assert not call_cache._KNOWN


def test_a_long_mask_is_read_once(bounded, monkeypatch):
    read = []
    evaluate = masks.evaluate
    monkeypatch.setattr(masks, "evaluate", lambda text, *rest: read.append(text) or evaluate(text, *rest))
    text = packed(0).source
    assert len(text) > mask_text.SHORT and masks.parse(text) is masks.parse(text) and read == [text]


def test_short_masks_are_repeated(bounded):
    q = torch.randn(1, 2 * DOCUMENTS, 1, 8)
    tw.attention(q, q, q, mask=packed(0, long=False))
    assert len(call_cache._KNOWN) == 1


def test_a_short_text_with_large_tables_is_not_repeated(bounded):
    q = torch.randn(1, 2 * DOCUMENTS, 1, 8)
    tw.attention(q, q, q, mask=tw.ChunkedCausal(1))
    assert not call_cache._KNOWN
