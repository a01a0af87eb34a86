"""lab/instruments/hard_search.py on a CPU: specs are reproducible, finite unless NaN is asked for, and what is slow is found."""

import importlib
import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tilewise.bench.sets import Workload

SMALL = Workload(name="w", batch=1, seqlen_q=64, heads_q=1, head_dim=8, dtype=torch.float16)
CPU = torch.device("cpu")


@pytest.fixture
def search(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "lab/instruments")
    return importlib.import_module("hard_search")


def test_candidates_are_a_function_of_seed_and_number(search):
    worst = [search.Spec(q=3.0), search.Spec(k=2.0)]
    for number in range(20):
        one, again, other = (search.candidate(seed, number, worst, False) for seed in (7, 7, 8))
        assert one == again and one != other and one.nan_rows == 0.0
    assert any(search.candidate(7, number, worst, True).nan_rows for number in range(20))
    assert {search.candidate(7, 1, worst, False).q, search.candidate(7, 1, worst, False).k} & {3.0, 2.0}


def test_inputs_are_reproducible_and_finite(search):
    trial = search.Trial(SMALL, CPU)
    for number in range(60):
        spec = search.candidate(3, number, [search.Spec()], False)
        one, again = trial.inputs(spec), trial.inputs(spec)
        assert all(torch.equal(x, y) and x.isfinite().all() for x, y in zip(one, again, strict=True))
    assert trial.inputs(search.Spec(nan_rows=0.3)).v.isnan().any()
    normal = trial.inputs(search.Spec())
    assert torch.equal(normal.q, SMALL.inputs(2).q)


def test_what_the_fields_do(search):
    trial = search.Trial(SMALL, CPU)
    normal = trial.inputs(search.Spec())
    assert torch.allclose(trial.inputs(search.Spec(q=2.0)).q, 4 * normal.q)
    sizes = {profile: search.Spec(profile=profile, growth=3.0, block=16)._along(64) for profile in search.PROFILES}
    assert sizes["causal_tiles"][-1] == sizes["falling"][0] == sizes["steps"][-1] == sizes["saw"].max() == 8 and (sizes["flat"] == 1).all()
    jump = search.Spec(jump=5.0, jump_at=0.5, jump_keys=2)._along(64)
    assert jump.tolist() == [1.0] * 32 + [32.0] * 2 + [1.0] * 30
    shifted = trial.inputs(search.Spec(shift=30.0, alternate=True, block=32))
    tiles = (torch.einsum("qd,kd->qk", shifted.q[0, :, 0].float(), shifted.k[0, :, 0].float()) * 8**-0.5).unflatten(1, (2, 32)).mean((0, 2))
    assert tiles[0] > 20 and tiles[1] < -20


def test_the_slow_is_found_and_varied(search):
    def attend(q, k, v):
        time.sleep(0.002 if k.abs().max() > 100 else 0.0002)
        return v

    trial = search.Trial(SMALL, CPU, attend)
    found, tried = trial.search(0, 0.5, False, sample_s=0.0)
    assert tried >= search.TOGETHER and found[0][0] > 3 and [slower for slower, _ in found] == sorted((s for s, _ in found), reverse=True)
    rows = trial.rows([spec for _, spec in found[:2]] + [search.Spec()], 0.01)
    assert rows[0]["slower"] > 3 > rows[-1]["slower"] and rows[-1]["spec"] == asdict(search.Spec())


def test_what_is_found_is_stored_and_replayed(search, tmp_path, capsys):
    out = tmp_path / "new" / "worst.jsonl"
    cell = ["--device", "cpu", "--seqlen", "32", "--heads", "1", "--head-dim", "16", "--dtype", "fp32", "--budget", "0.001"]
    search.main([*cell, "--seconds", "0.01", "--keep", "3", "--direction", "bwd", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3 and rows[0]["case"]["direction"] == "bwd" and rows[0]["environment"]["torch"] == torch.__version__
    assert [asdict(spec) for spec in search.stored(out)] == [row["spec"] for row in rows]
    assert "tried; the worst, timed again:" in capsys.readouterr().out
    search.main([*cell, "--replay", str(out)])
    assert len(capsys.readouterr().out.splitlines()) == 3
