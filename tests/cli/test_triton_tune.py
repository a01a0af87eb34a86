"""`tilewise tune --backend triton`: what it would compile, and its rows; timing needs a GPU."""

import pytest
import torch

from tilewise.backends.triton import config as configs
from tilewise.cli import grammar

pytest.importorskip("triton")

from tilewise.backends.triton import tune as tuning
from tilewise.bench.store import append, load
from tilewise.cli import triton_tune
from tilewise.masks import Causal, Full

JOB = tuning.Job("dq", torch.bfloat16, 128, masks=(Full(), Causal()))


def test_dry_run(capsys):
    assert grammar.main(["tune", "--backend", "triton", "--dry-run", "--head-dim", "128", "--mask", "causal", "--most", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.count(" w") == 5 for line in lines)
    assert lines[0].startswith("forward, head_dim 128, bfloat16, 8192 tokens: 5 configurations: ")


def test_uneven_head_dims_are_refused(capsys):
    assert grammar.main(["tune", "--backend", "triton", "--dry-run", "--head-dim", "192/128"]) == 2
    assert "192/128" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert grammar.main(["tune", "--backend", "triton"]) == 3
    assert "--dry-run" in capsys.readouterr().err


def test_rows(tmp_path):
    """A row a mask, of the whole backward pass."""
    found = tuning.Found(configs.Config(64, 32, 4, 2), 2e-3, [4e-3, 1e-3])
    append(tmp_path / "rows.jsonl", triton_tune._rows(JOB, found, {"device": "a GPU"}))
    full, causal = load(tmp_path / "rows.jsonl")
    assert (full.impl, full.median_s, full.case["direction"]) == ("triton[dq 64x32 w4 s2]", 4e-3, "bwd")
    assert causal.case["mask"] == "Causal()" and 0.4 < causal.flops / full.flops < 0.6
