"""tools/biases.py on a CPU: its cells, that results are compared, and what a row says."""

import importlib
from pathlib import Path

import pytest
import torch

from tilewise.bench.sets import Workload
from tilewise.bench.store import load
from tilewise.masks import Causal, Full


@pytest.fixture
def biases(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("biases")


def small(biases, direction, mask, shape, grad):
    sizes = {"batch": 2, "seqlen_q": 20, "heads_q": 2, "head_dim": 16}
    return [biases.Cell(Workload(name="biases", mask=mask, dtype=torch.bfloat16, direction=direction, **sizes), shape, grad)]


def test_cells(biases):
    assert not any(cell.grad for cell in biases.cells("fwd"))
    for cell in biases.cells("bwd"):
        of, (batch, heads, seqlen_q, seqlen_k) = cell.workload, cell.shape
        assert batch in (1, of.batch) and heads in (1, of.heads_q) and seqlen_q in (1, of.seqlen_q) and seqlen_k == of.seqlen_k


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("shape", [(1, 2, 20, 20), (2, 1, 1, 20)], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=repr)
def test_rows(biases, monkeypatch, tmp_path, direction, mask, shape):
    monkeypatch.setattr(biases, "cells", lambda direction: small(biases, direction, mask, shape, grad=direction != "fwd"))
    biases.main(
        ["--device", "cpu", "--direction", direction, "--sdpa", "math,cudnn", "--budget", "0.01", "--out", str(tmp_path / "rows.jsonl")]
    )
    rows = {row.impl: row for row in load(tmp_path / "rows.jsonl")}
    assert rows.keys() == {"tilewise", "tilewise, no bias", "sdpa:math", "sdpa:cudnn"}
    assert rows["sdpa:cudnn"].reason and rows["sdpa:cudnn"].median_s is None  # there is none for CPUs
    for name in "tilewise", "tilewise, no bias", "sdpa:math":
        assert rows[name].median_s > 0 and rows[name].case["bias"] == "x".join(map(str, shape))


def test_results_that_differ_are_not_timed(biases, monkeypatch):
    monkeypatch.setattr(biases, "cells", lambda direction: small(biases, direction, Full(), (1, 2, 20, 20), grad=False))
    monkeypatch.setattr(biases, "CLOSE", -1.0)
    with pytest.raises(SystemExit, match="results differ"):
        biases.main(["--device", "cpu", "--direction", "fwd", "--sdpa", "math"])
