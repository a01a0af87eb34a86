"""`tilewise warmup --backend triton`: what is compiled ahead is what calls launch."""

import pytest
import torch

pytest.importorskip("triton")

from dataclasses import replace

import tilewise as tw
from tilewise.backends.eight_bits import RECIPES
from tilewise.backends.triton import Triton, append, bound, decode, merging, targets, warmup
from tilewise.cli import grammar
from tilewise.masks import Causal, ChunkedCausal, Documents, Full, SlidingWindow
from tilewise.problem import AppendCall
from tilewise.testing.cases import Case, make, upstream

SIZES = {"batch": 2, "seqlen_q": 45, "seqlen_k": 70, "heads_q": 4, "heads_k": 2}
CASES = [
    Case(**SIZES, head_dim=64, mask=Causal(), dtype="bf16"),
    Case(**SIZES, head_dim=72, head_dim_v=40, mask=SlidingWindow(20, 4), dtype="fp16", lse_grad=True),
    # lengths that no other test has: what is found for them here, by kernels that do not run, is kept for all equal masks
    Case(**SIZES, head_dim=64, mask=Documents([0, 4, 45], [0, 21, 70], inner=Causal()), dtype="bf16", sink=True),
    Case(**SIZES, head_dim=288, mask=ChunkedCausal(11), dtype="bf16", softcap=3.0, alibi="h"),
    Case(**SIZES, head_dim=64, mask=Full(), dtype="fp32", bias="hq", dropout=0.2),
]


@pytest.fixture
def launched(monkeypatch):
    """The kernels that calls on CPU tensors launch, in place of launching them."""
    if targets.interpreted():
        pytest.skip("in the interpreter nothing is compiled")
    found = []
    monkeypatch.setattr(bound, "launcher", lambda kernel, target: found.append(kernel) or (lambda programs, arguments: None))
    monkeypatch.setattr(Triton, "why_not", lambda self, problem: [])
    return found


@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "forward"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_calls_launch_what_was_compiled(case, grad, launched):
    call, (d_o, d_lse) = make(case, 0, "cpu", grad=grad), upstream(case, 0, "cpu")
    o, lse = Triton().forward(call)
    if grad:
        Triton().backward(call, o, lse, d_o, d_lse, bias_grad=call.bias is not None)
    extras = tuple(name for name in warmup.EXTRAS if getattr(case, name))
    dims = case.head_dim, case.head_dim if case.head_dim_v is None else case.head_dim_v
    cell = warmup.Cell(*dims, call.q.dtype, bound.kind_of(case.mask), extras, grad, group=call.group)
    ready = warmup.kernels(cell, targets.of_device(torch.device("cpu")))
    assert launched and not set(launched) - set(ready)
    names = {kernel.name for kernel in warmup.of_attention(cell, targets.of_device(torch.device("cpu")))}
    assert grad or names <= {kernel.name for kernel in launched}


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("page", [None, 16, 64, 256])
@pytest.mark.parametrize("dims", [(64, 64), (96, 40), (320, 512), (576, 512)], ids=str)
def test_decode_launches_what_was_compiled(dims, page, queries, monkeypatch):
    if targets.interpreted():
        pytest.skip("in the interpreter nothing is compiled")
    found, dtype = [], torch.bfloat16
    for module in (append, decode, merging):
        monkeypatch.setattr(module, "launcher", lambda kernel, target: found.append(kernel) or (lambda programs, arguments: None))
    monkeypatch.setattr(Triton, "why_not", lambda self, problem: [])
    lengths = torch.tensor([300, 9], dtype=torch.int32)
    for capacity, scores in ((256, {}), (4096, {"softcap": 2.0, "sink": torch.zeros(16)})):
        shape = (2, capacity) if page is None else (2 * capacity // page, page)
        table = None if page is None else torch.arange(shape[0], dtype=torch.int32).view(2, -1)
        caches = [torch.zeros(*shape, 8, dim, dtype=dtype) for dim in dims]
        k, v = (torch.zeros(2, queries, 8, dim, dtype=dtype) for dim in dims)
        q = torch.zeros(2, queries, 16, dims[0], dtype=dtype)
        for v_cache in [caches[1], *([caches[0][..., : dims[1]]] if dims[0] > dims[1] else [])]:  # and values that are columns of keys
            tw.decode(q, caches[0], v_cache, cache_seqlens=lengths.clamp(max=100), page_table=table, backend="triton", **scores)
        absent = dict.fromkeys(("cache_batch_idx", "cu_seqlens", "rotary_cos", "rotary_sin", "rotary_first"))
        new = {"k_cache": caches[0], "v_cache": caches[1], "k": k, "v": v, "cache_seqlens": lengths, "page_table": table}
        Triton().append(AppendCall(**new, **absent, interleaved=False))
        cell = warmup.Cell(*dims, dtype, "band", tuple(scores), group=2)
        assert found and not set(found) - set(warmup.kernels(cell, targets.of_device(torch.device("cpu"))))
        assert {kernel.name for kernel in found} >= {"decode", "append"}
        found.clear()


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.id)
def test_calls_in_eight_bits_launch_what_was_compiled(case, precision, launched):
    call = replace(make(case, 0, "cpu", grad=False), precision=precision)
    Triton().forward(call)
    extras = tuple(name for name in warmup.EXTRAS if getattr(case, name))
    cell = warmup.Cell(call.head_dim, call.head_dim_v, call.q.dtype, bound.kind_of(case.mask), extras, False, precision, call.group)
    ready = warmup.kernels(cell, targets.of_device(torch.device("cpu")))
    assert not set(launched) - set(ready)
    of_ends = [kernel for kernel in ready if dict(kernel.constants).get("ENDS")]  # for lengths that are on the device
    assert set(ready) - set(launched) <= set(of_ends) and bool(of_ends) == (cell.mask == "varlen")


def test_tiles_in_eight_bits_are_the_targets_own():
    """The quantiser knows a tile's keys."""
    cell, tiles = warmup.Cell(128, 128, torch.bfloat16, "band", precision="int8"), set()
    for arch in targets.COMPILED:
        of_tiles = [kernel for kernel in warmup.kernels(cell, targets.Target(arch)) if kernel.name in ("forward", "quantise_k")]
        found = {kernel.name: dict(kernel.constants)["TILE_N"] for kernel in of_tiles}
        assert found["quantise_k"] == found["forward"]
        tiles.add(found["forward"])
    assert len(tiles) > 1


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--arch", "sm_3"], "arch must be one of"),
        (["--arch", "sm_80", "--head-dim", "600"], "600"),
        (["--arch", "sm_80", "--groups", "1,x"], "groups must be"),
        (["--arch", "sm_80", "--clear"], "clear"),
        (["--arch", "sm_80", "--precision", "int8,int4"], "int8,int4"),
        (["--arch", "sm_80", "--precision", "int8", "--dtype", "fp32"], "quantises bf16 and fp16"),
        (["--arch", "sm_80", "--precision", "int8", "--extras", "sink,dropout"], "cannot be combined with dropout"),
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
    assert "gfx942" in out and all(name in out for name in ("forward", "prepare", "dkdv", "dq", "CAREFUL"))


def test_the_list_in_eight_bits(capsys):
    """With what 16 bits need for gradients, or without."""
    words = [
        "warmup",
        "--backend",
        "triton",
        "--arch",
        "sm_80",
        "--list",
        "--head-dim",
        "64",
        "--dtype",
        "bf16",
        "--groups",
        "4",
        "--precision",
        "int8",
    ]
    assert grammar.main(words) == 0 and grammar.main([*words, "--forward"]) == 0
    both, forward = capsys.readouterr().out.split("Triton's kernels for")[1:]
    names = "forward", "CAREFUL", "centres", "quantise_q", "quantise_k", "largest_values", "quantise_v"
    assert all(name in text for name in names for text in (both, forward)) and "dkdv" in both and "dkdv" not in forward


def test_hoppers_list_in_eight_bits(capsys):
    words = ["warmup", "--list", "--head-dim", "64", "--dtype", "bf16", "--mask", "full"]
    assert grammar.main([*words, "--forward", "--precision", "int8_qk"]) == 0
    assert "quantiser" in capsys.readouterr().out
    assert grammar.main([*words, "--precision", "int9"]) == 2
    assert "int9" in capsys.readouterr().err
