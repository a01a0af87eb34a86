"""lab/instruments/fp8.py without a GPU: tunings, and the kernels that are compiled ahead."""

import argparse
import importlib
from pathlib import Path

import pytest

pytest.importorskip("cutlass")


@pytest.fixture
def fp8(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "lab/instruments")
    return importlib.import_module("fp8")


def test_tunings(fp8):
    assert fp8.tuning_from("in turns: pingpong=True, cluster=2") == ("in turns", {"pingpong": True, "cluster": 2})
    with pytest.raises(argparse.ArgumentTypeError, match=r"'pingpang' is no choice of eight_bits\.config\.Config"):
        fp8.tuning_from("in turns: pingpang=True")


def test_kernels_compiled_ahead(fp8, monkeypatch):
    monkeypatch.setattr(fp8, "CELLS", fp8.CELLS[:1])
    usual, more = ({config for _, _, config in fp8.kernels(tunings)} for tunings in ([], [("two", {"kv_stages": 2})]))
    assert usual < more and {each.kv_stages for each in more - usual} == {2}
