"""`tilewise warmup --backend triton`: what is compiled ahead is what calls launch."""

import pytest
import torch

pytest.importorskip("triton")

from tilewise.backends.triton import Triton, bound, targets, warmup
from tilewise.cli import grammar
from tilewise.masks import Causal, ChunkedCausal, Documents, Full, SlidingWindow
from tilewise.testing.cases import Case, make, upstream

SIZES = {"batch": 2, "seqlen_q": 45, "seqlen_k": 70, "heads_q": 4, "heads_k": 2}
CASES = [
    Case(**SIZES, head_dim=64, mask=Causal(), dtype="bf16"),
    Case(**SIZES, head_dim=72, head_dim_v=40, mask=SlidingWindow(20, 4), dtype="fp16", lse_grad=True),
    Case(**SIZES, head_dim=64, mask=Documents([0, 3, 45], [0, 20, 70], inner=Causal()), dtype="bf16", sink=True),
    Case(**SIZES, head_dim=288, mask=ChunkedCausal(11), dtype="bf16", softcap=3.0, alibi="h"),
    Case(**SIZES, head_dim=64, mask=Full(), dtype="fp32", bias="hq", dropout=0.2),
]


@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "forward"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_calls_launch_what_was_compiled(case, grad, monkeypatch):
    if targets.interpreted():
        pytest.skip("in the interpreter nothing is compiled")
    launched = []
    monkeypatch.setattr(bound, "launcher", lambda kernel, target: launched.append(kernel) or (lambda programs, arguments: None))
    monkeypatch.setattr(Triton, "why_not", lambda self, problem: [])
    call, (d_o, d_lse) = make(case, 0, "cpu", grad=grad), upstream(case, 0, "cpu")
    o, lse = Triton().forward(call)
    if grad:
        Triton().backward(call, o, lse, d_o, d_lse, bias_grad=call.bias is not None)
    extras = tuple(name for name in warmup.EXTRAS if getattr(case, name))
    dims = case.head_dim, case.head_dim if case.head_dim_v is None else case.head_dim_v
    cell = warmup.Cell(*dims, call.q.dtype, bound.kind_of(case.mask), extras, grad, call.group)
    ready = warmup.kernels(cell, targets.of_device(torch.device("cpu")))
    assert launched and not set(launched) - set(ready)
    assert grad or {kernel.name for kernel in ready} <= {kernel.name for kernel in launched}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--arch", "sm_3"], "arch must be one of"),
        (["--arch", "sm_80", "--head-dim", "600"], "600"),
        (["--arch", "sm_80", "--groups", "1,x"], "groups must be"),
        (["--arch", "sm_80", "--clear"], "clear"),
    ],
)
def test_what_is_refused(words, what, capsys):
    assert grammar.main(["warmup", "--backend", "triton", *words]) == 2
    assert what in capsys.readouterr().err


def test_hopper_has_neither_arch_nor_groups(capsys):
    for words in (["--arch", "sm_89"], ["--groups", "4"]):
        assert grammar.main(["warmup", "--list", *words]) == 2
        assert f"{words[0][2:]} goes with --backend triton" in capsys.readouterr().err


def test_the_list(capsys):
    assert (
        grammar.main(
            ["warmup", "--backend", "triton", "--arch", "gfx942", "--list", "--head-dim", "64", "--dtype", "bf16", "--groups", "4"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "gfx942" in out and all(name in out for name in ("forward", "prepare", "dkdv", "dq", "repair_rows", "repair_columns"))
