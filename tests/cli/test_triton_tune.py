"""`tilewise tune --backend triton`: what it would compile, and its rows; timing needs a GPU."""

import pytest
import torch

from tilewise.backends.triton import bound, targets
from tilewise.backends.triton import config as configs
from tilewise.cli import grammar

pytest.importorskip("triton")

from tilewise.backends.triton import tune as tuning
from tilewise.bench.store import append, load
from tilewise.cli import triton_tune
from tilewise.masks import Causal, Documents, Full, SlidingWindow

JOB = tuning.Job("dq", torch.bfloat16, 128, masks=(Full(), Causal()))
IN_INT8 = tuning.Job("forward", torch.bfloat16, 64, masks=(Full(), Documents([0, 40, 90])), precisions=("int8", "int8_qk"))
CONFIG = configs.Config(64, 32, 4, 2)


def test_dry_run(capsys):
    assert grammar.main(["tune", "--backend", "triton", "--dry-run", "--head-dim", "128", "--mask", "causal", "--most", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.count(" w") == 5 for line in lines)
    assert lines[0].startswith("forward, head_dim 128, bfloat16, 8192 tokens: 5 configurations: ")


def test_dry_run_in_eight_bits(capsys):
    assert grammar.main(["tune", "--backend", "triton", "--dry-run", "--head-dim", "128", "--precision", "int8,int8_qk"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("forward, head_dim 128, bfloat16, int8, int8_qk, 8192 tokens: ")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--backend", "triton", "--precision", "fp8"], "e4m3 is held in fp16"),
        (["--backend", "triton", "--precision", "int8,"], "int8, int8_qk"),
        (["--backend", "triton", "--precision", "int8", "--dtype", "fp32"], "not fp32"),
        (["--precision", "int8"], "goes with --backend triton"),
    ],
)
def test_precisions_that_are_refused(words, what, capsys):
    assert grammar.main(["tune", "--dry-run", *words]) == 2
    assert what in capsys.readouterr().err


def test_uneven_head_dims_are_refused(capsys):
    assert grammar.main(["tune", "--backend", "triton", "--dry-run", "--head-dim", "192/128"]) == 2
    assert "192/128" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert grammar.main(["tune", "--backend", "triton"]) == 3
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.skipif(targets.interpreted(), reason="in the interpreter nothing is compiled")
@pytest.mark.parametrize("job", [IN_INT8, *(IN_INT8._replace(purpose=name, precisions=(None,)) for name in tuning.PASSES)], ids=str)
def test_all_that_depends_on_tiles_is_compiled_ahead(job, monkeypatch):
    launched = []
    monkeypatch.setattr(bound, "launcher", lambda kernel, target: launched.append(kernel) or (lambda programs, arguments: None))
    small = job._replace(seqlen=90, hidden=job.head_dim)
    for call in small.calls("cpu"):
        tuning.passes(small, CONFIG, call)()
    ahead = {kernel for kernels in tuning.kernels(job, CONFIG, "cpu") for kernel in kernels}
    depend = {kernel for kernel in launched if kernel.config in (CONFIG, bound.once(CONFIG)) or kernel.name == "quantise_k"}
    assert len(depend) >= 4 and depend <= ahead  # a pass, and the same CAREFUL, for two kinds of masks
    assert job is not IN_INT8 or ahead <= set(launched)


@pytest.mark.parametrize(("numbers", "others"), [(tuning.SPILLED_BYTES, 0), (tuning.SPILLED_BYTES // 4, 1)])
def test_what_spills_has_nothing_else_compiled(numbers, others, monkeypatch):
    """But for the configuration that ships, which is timed all the same."""

    class Loaded:
        n_spills = numbers

        def _init_handles(self) -> None:
            pass

    built = []
    monkeypatch.setattr(tuning, "kernels", lambda job, config, device: (["pass"], ["repair"]))
    monkeypatch.setattr(tuning, "compiled", lambda kernel, target: built.append(kernel) or Loaded())
    monkeypatch.setattr(tuning, "_target", lambda: targets.Target("sm_90"))
    assert tuning._compile(JOB, CONFIG).wrong == ("" if others else f"{numbers} numbers spilled")
    assert built == ["pass", "repair"][: 1 + others]
    tuning._compile(JOB, tuning.shipped(JOB))
    assert built[1 + others :] == ["pass", "repair"]


def test_rows_in_eight_bits(tmp_path):
    found = tuning.Found(CONFIG, 2e-3, [4e-3, 1e-3, 2e-3, 3e-3])
    append(tmp_path / "rows.jsonl", triton_tune._rows(IN_INT8, found, {"device": "a GPU"}))
    rows = load(tmp_path / "rows.jsonl")
    assert [row.impl for row in rows] == [f"triton[forward {name} 64x32 w4 s2]" for name in ("int8", "int8", "int8_qk", "int8_qk")]
    assert [row.median_s for row in rows] == found.seconds and len({row.case["mask"] for row in rows}) == 2


def test_the_line_for_the_table(monkeypatch):
    """Of tiles of int8, under the key that calls in 8 bits look up."""
    monkeypatch.setattr(tuning, "_target", lambda: targets.Target("sm_90"))
    assert tuning.row(IN_INT8, CONFIG, "timed").startswith('    ("sm90", "forward", 1, 64): (Config(')
    line = tuning.row(IN_INT8._replace(masks=(SlidingWindow(5, 0),)), CONFIG, "timed").strip().rstrip(",")
    assert eval(line, vars(configs))[:7] == ("sm90", "forward", 1, 0, 64, "plain", ("window",))
    assert tuning.shipped(IN_INT8) == configs.TABLE["sm90", "forward", 1, 64][0]


def test_rows(tmp_path):
    """A row a mask, of the whole backward pass."""
    found = tuning.Found(CONFIG, 2e-3, [4e-3, 1e-3])
    append(tmp_path / "rows.jsonl", triton_tune._rows(JOB, found, {"device": "a GPU"}))
    full, causal = load(tmp_path / "rows.jsonl")
    assert (full.impl, full.median_s, full.case["direction"]) == ("triton[dq 64x32 w4 s2]", 4e-3, "bwd")
    assert causal.case["mask"] == "Causal()" and 0.4 < causal.flops / full.flops < 0.6
