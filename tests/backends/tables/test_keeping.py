"""How long tables of masks live: as long as their mask is kept, or for ever where a CUDA graph reads them."""

import gc
import weakref

import pytest
import torch

from tilewise.backends.tables import keeping
from tilewise.backends.tables.runs import tables
from tilewise.masks import PrefixLM
from tilewise.masks.mask import KEPT


@pytest.fixture
def graphs(monkeypatch):
    """What they keep."""
    monkeypatch.setattr(keeping, "_OF_GRAPHS", kept := {})
    return kept


@pytest.mark.parametrize("captured", [False, True])
def test_a_graph_keeps_the_tables_it_reads(monkeypatch, graphs, captured):
    def found():
        return tables(PrefixLM(3).planes(300, 300), 1, 1, 128, 128, torch.device("cpu"))

    gc.disable()
    try:
        made = weakref.ref(found())
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        assert found() is made() and (id(made()) in graphs) == captured
        for n in range(KEPT):
            PrefixLM(1000 + n).planes(300, 300)
        assert (made() is not None) == captured
    finally:
        gc.enable()


def test_what_is_made_is_made_once(graphs):
    memo = {}
    assert keeping.kept(memo, "a", lambda: [1]) is keeping.kept(memo, "a", lambda: [2]) and memo == {"a": [1]} and not graphs
