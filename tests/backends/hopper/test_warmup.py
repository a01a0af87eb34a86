"""Filling the cache ahead of time: which kernels, and what becomes of them."""

import itertools
from dataclasses import replace

import pytest
import torch
from decode_problems import DecodeCase, made, with_eight_bits, with_rotary

from tilewise.backends.hopper import warmup
from tilewise.backends.hopper.backward import call as gradients
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward import plan
from tilewise.backends.hopper.backward.repair.config import RepairConfig
from tilewise.backends.hopper.backward.sink import call as sink_gradient
from tilewise.backends.hopper.decode import append_call
from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode import config as decode_config
from tilewise.backends.hopper.forward import config
from tilewise.cli import grammar
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Documents, Full, PrefixLM, SlidingWindow
from tilewise.problem import Problem
from tilewise.sm90 import cache, jit

BF16 = torch.bfloat16
CELL = warmup.Cell(64, 64, BF16, SlidingWindow(1, 0))  # of one kernel, whatever the length


def test_each_kernel_once():
    windows = [warmup.Cell(dim, dim, BF16, SlidingWindow(left, 0)) for dim in (64, 128) for left in (1, 100)]
    assert [kernel.config.head_dim for kernel in warmup.kernels(windows)] == [64, 128]
    narrow = [warmup.Cell(dim, 40, BF16, SlidingWindow(1, 0)) for dim in (40, 48, 64)]  # all on the tiles of (64, 64)
    assert len(warmup.kernels(narrow)) == 1


def test_all_plain_kernels_that_ship():
    masks, dtypes = (Full(), Causal(), SlidingWindow(1, 0), SlidingWindow(1 << 20, 0)), (BF16, torch.float16)
    found = warmup.kernels(warmup.Cell(*dims, dtype, mask) for dims in config.TILES for dtype in dtypes for mask in masks)
    ships = {each for dtype in dtypes for each in config.shipped(dtype) if each.mask_kind in ("full", "causal", "band")}
    assert len(found) == len(ships) and {kernel.config for kernel in found} == ships


@pytest.mark.parametrize("dims", list(config.TILES))
def test_a_full_mask_gets_the_tiles_that_its_lengths_cost_least(dims):
    lengths = (1, 77, 128, 197, 256, 257, 384, 577, 729, 1024, 1025, 4096)
    for seqlen_q, seqlen_k in itertools.product(lengths, lengths):
        chosen = config.configure(BF16, *dims, "full", seqlen_q, seqlen_k)
        choices = [each for each in config.TILES[dims]["full"] if each.takes(seqlen_q, seqlen_k)]
        alike = [each for each in choices if each.most_queries == choices[0].most_queries]
        least = min(alike, key=lambda each: each.work(seqlen_q, seqlen_k))
        assert (chosen.tile_m, chosen.tile_n, chosen.cluster) == (
            least.fields["tile_m"],
            least.fields["tile_n"],
            least.fields.get("cluster", 1),
        )


def test_kernels_that_change_scores_and_masks_of_many_bands():
    plain, soft, two = (warmup.kernels([CELL._replace(extras=extras)])[0].config for extras in ((), ("softcap",), ("alibi", "sink")))
    assert soft == replace(plain, softcap=True, tile_m=soft.tile_m, tile_n=soft.tile_n, cluster=soft.cluster, dynamic=True, from_zero=False)
    assert two.alibi and two.sink and not two.softcap and two.bias is None
    assert warmup.kernels([CELL._replace(extras=("bias",))])[0].config.bias is BF16
    runs, rows = (warmup.kernels([CELL._replace(mask=mask)]) for mask in (PrefixLM(3), Documents([0, 3, 5], inner=Causal())))
    assert [kernel.config.mask_kind for kernel in runs] == ["tiles"] and "varlen" in [
        getattr(kernel.config, "mask_kind", "") for kernel in rows
    ]
    assert all(len(warmup.describe(kernel)) == 4 for kernel in (*runs, *rows))


def test_the_backward_pass_where_there_is_one(monkeypatch):
    masks = (Full(), Causal(), SlidingWindow(1, 0))
    cells = [warmup.Cell(*dims, BF16, mask, grad=True) for dims in config.TILES for mask in masks]
    forward, both = (warmup.kernels([cell._replace(grad=grad) for cell in cells]) for grad in (False, True))
    names = {warmup.describe(kernel)[0] for kernel in both}
    assert set(forward) <= set(both) and names == {"forward", "backward", "repair"}
    covered = [dims for dims in config.TILES if backward_config.tile_dims(*dims)]
    ways = itertools.product(covered, ("full", "causal", "band"), backward_config.lengths())
    few = backward_config.ONE_BLOCK
    ships = {backward_config.configure(BF16, *dims, mask_kind, seqlen, seqlen <= few) for dims, mask_kind, seqlen in ways}
    apart = {plan.block_per_q_head(each) for each in ships if each.mask_kind in ("causal", "band") and each.staged and not each.lean}
    assert len(ships) > 3 * len(backward_config.TILES) and len(apart) > 6
    repairs = {RepairConfig.of(each) for each in ships if each.repairs}
    assert {each.config for each in both} - {each.config for each in forward} == ships | apart | repairs
    assert 2 * len(repairs) < len([each for each in ships if each.repairs])
    monkeypatch.setattr(gradients, "why_not", lambda problem: ["it has no backward pass for that"])
    assert warmup.kernels(cells) == forward


def test_the_gradient_of_a_sink():
    """In the call's dtype, and in fp32; of one kind for all that changes scores."""
    cells = [CELL._replace(mask=mask, extras=extras, grad=True) for mask in (Full(), Causal()) for extras in (("sink",), ("sink", "alibi"))]
    found = [kernel.config for kernel in warmup.kernels(cells) if kernel.launch == sink_gradient.LAUNCH]
    assert [config.dtype for config in found] == [BF16, torch.float32]


def test_kernels_that_decode():
    """They are what calls of every size and page ask for, each once, whatever the mask; and what appends for them."""
    masks = (Full(), Causal(), SlidingWindow(9, 0), PrefixLM(3))
    found = warmup.of_decode(warmup.Cell(*dims, BF16, mask) for dims in ((64, 40), (128, 128), (256, 256)) for mask in masks)
    for dims, page, length in itertools.product(((64, 64), (128, 128), (256, 256)), (0, 16, 64, 256), (9, 1 << 14)):
        call = made(DecodeCase(lengths=(9,), capacity=length, dims=dims, heads=(4, 4), page=page))
        (kernel,) = decoding.kernels(call)
        assert kernel in found
    shipped = {each for dims in ((64, 64), (128, 128), (256, 256)) for each in decode_config.shipped(BF16, *dims)}
    shipped |= {config for _, _, config in append_call.shipped(BF16)}
    assert (
        len(found) == len(shipped)
        and {kernel.config for kernel in found} == shipped
        and {warmup.describe(each)[0] for each in found} == {"decode", "append"}
    )
    assert not warmup.of_decode([CELL._replace(mask=PrefixLM(3)), CELL._replace(extras=("bias",)), CELL._replace(head_dim=300)])
    (changed, *_) = warmup.of_decode([CELL._replace(extras=("softcap", "sink"))])
    assert changed.config.softcap and changed.config.sinks and not changed.config.sink


SERVERS = {
    "tokens": DecodeCase(lengths=(9, 5, 70), queries=(1, 1, 1), page=16, capacity=1 << 15),
    "tokens of a small cache": DecodeCase(lengths=(9, 5, 70), queries=(1, 1, 1), page=16),
    "many tokens, few of each": DecodeCase(lengths=(300,) * 40, queries=(1,) * 40, page=128, capacity=1 << 15),
    "a chunk among tokens": DecodeCase(lengths=(900, 5, 70), queries=(600, 1, 1), page=64, capacity=1 << 15),
    "a chunk": DecodeCase(lengths=(900,), queries=600, capacity=1 << 15),
    "a chunk in pages": DecodeCase(lengths=(900,), queries=600, page=16, capacity=1 << 15),
}


@pytest.mark.parametrize("case", SERVERS.values(), ids=SERVERS)
def test_kernels_that_decode_for_servers(case):
    """Their calls find what they need in what is compiled ahead; with rotary tables and caches of 8 bits, too."""
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        found = warmup.of_decode([warmup.Cell(*dims, BF16, Full())])
        call = made(replace(case, dims=dims, heads=(8, 2)))
        ragged = {} if call.cu_seqlens_q is None else {"max_seqlen_q": call.q.shape[0]}  # as a server's, whose host knows no more
        call = replace(call, **ragged)
        calls = [call]
        if call.cu_seqlens_q is not None:
            calls.append(with_eight_bits(call, (torch.float8_e4m3fn,) * 2, ("head", "all"))[0])
        for each in calls:
            (kernel,) = decoding.kernels(each)
            assert kernel in found, kernel.config


def test_kernels_that_decode_with_rotary_tables_and_latent_caches():
    found = warmup.of_decode(warmup.Cell(*dims, BF16, Full()) for dims in ((64, 64), (128, 128), (576, 512)))
    for dims, dtype, page in itertools.product(((64, 64), (128, 128)), (BF16, torch.float32), (0, 16, 64)):
        call = made(DecodeCase(lengths=(9,), capacity=1 << 15, dims=dims, page=page))
        call, _ = with_rotary(call, dims[0] // 2, False, dtype)
        assert decoding.kernels(call)[0] in found
    for queries, page in ((1, 0), (1, 64), ((1, 2), 16)):
        call = made(DecodeCase(lengths=(9, 5), dims=(576, 512), heads=(16, 1), queries=queries, page=page, latent=True))
        assert decoding.kernels(call)[0] in found


def test_kernels_in_eight_bits():
    """Of a problem with a recipe: the quantiser and the forward pass of every length, and none in 16 bits but for gradients."""
    problem = Problem(device="cuda", dtype=BF16, head_dim=128, head_dim_v=128, group=1, mask="band", precision="int8")
    found = warmup.of_problem(problem)
    names = [warmup.describe(kernel)[0] for kernel in found]
    assert names.count("quantiser") == 1 and set(names) == {"quantiser", "eight_bits"}
    assert {(kernel.config.mask_kind, kernel.config.cluster, kernel.config.pingpong) for kernel in found if hasattr(kernel.config, "mask_kind")} == {
        ("full", 1, False), ("full", 2, False), ("causal", 1, False), ("causal", 1, True), ("band", 1, False),
    }  # fmt: skip
    of_gradients = warmup.of_problem(replace(problem, grad=True))
    assert {"backward", "forward"} <= {
        warmup.describe(kernel)[0] for kernel in of_gradients
    }  # which begin with the forward pass in 16 bits
    assert set(warmup.of_problem(replace(problem, precision=None, grad=True))) < set(of_gradients)
    found = warmup.of_problem(replace(problem, head_dim=256, head_dim_v=256))
    assert {kernel.config.pieces for kernel in found if hasattr(kernel.config, "mask_kind")} == {1, 2}  # few keys and many


def test_extras_from_text():
    assert warmup.extras_from("") == [()]
    assert warmup.extras_from("softcap,alibi+sink+alibi") == [("softcap",), ("alibi", "sink")]
    with pytest.raises(ValueError, match="extras is 'soft'; it takes softcap, bias, alibi, sink"):
        warmup.extras_from("soft")


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (warmup.Cell(512, 512, BF16, Full()), "no kernel for head_dim 512/512"),
        (warmup.Cell(64, 64, torch.float32, Full()), "bf16 and fp16"),
    ],
)
def test_what_the_backend_does_not_cover_is_refused(cell, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        warmup.kernels([cell])


def test_what_is_there_is_not_compiled_again(kept, exported, monkeypatch):
    (kernel,) = warmup.kernels([CELL])
    cache.store(cache.entry(kernel.launch, kernel.config, jit.arch()), exported)
    monkeypatch.setattr(warmup, "ProcessPoolExecutor", None)
    (outcome,) = warmup.warm([kernel])
    assert outcome.state == "cached" and outcome.bytes == cache.entries()[0].stat().st_size


def test_outcomes_of_compiling(kept, exported, monkeypatch):
    (kernel,) = warmup.kernels([CELL])
    monkeypatch.setattr(jit, "build", lambda *_, **__: exported)
    assert warmup._compile(kernel).state == "compiled" and len(cache.entries()) == 1

    def fail(*_, **__):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(jit, "build", fail)
    assert warmup._compile(kernel).reason == "RuntimeError: out of registers"
    monkeypatch.setattr(jit, "build", lambda *_, **__: exported)
    monkeypatch.setattr(cache, "store", lambda *_: False)
    cache.clear()
    assert warmup._compile(kernel).state == "failed"


@pytest.mark.slow
def test_processes_compile_and_the_next_run_finds_all(kept, capsys):
    command = ["warmup", "--head-dim", "64", "--dtype", "bf16", "--mask", "window:1", "--processes", "2"]
    expected = len(warmup.kernels([CELL._replace(grad=True)])) + len(warmup.of_decode([CELL]))
    for state in ("compiled", "cached"):
        assert grammar.main(command) == 0
        said = capsys.readouterr().out
        assert said.count(state) == expected > 1 and f"{cache.folder()}: {expected} kernels" in said


def test_the_command_lists_and_clears(kept, exported, capsys):
    (kernel,) = warmup.kernels([CELL])
    assert grammar.main(["warmup", "--forward", "--list", "--head-dim", "64,192/128", "--dtype", "bf16"]) == 0
    said = capsys.readouterr().out
    cells = [warmup.Cell(*dims, BF16, mask) for dims in ((64, 64), (192, 128)) for mask in (Full(), Causal(), SlidingWindow(1, 0))]
    assert (
        said.count("forward") == len(warmup.kernels(cells))
        and said.count("decode") + said.count("append") == len(warmup.of_decode(cells)) > 9
        and "192/128" in said
        and not cache.entries()
    )
    cache.store(cache.entry(kernel.launch, kernel.config, jit.arch()), exported)
    assert grammar.main(["warmup", "--clear"]) == 0 and not cache.entries()
    assert f"removed: 1 kernels from {kept}" in capsys.readouterr().out


def test_a_kernel_that_fails_makes_the_command_fail(kept, capsys, monkeypatch):
    (kernel,) = warmup.kernels([CELL])
    monkeypatch.setattr(warmup, "warm", lambda todo, processes: [warmup.Outcome(kernel, "failed", 1.0, reason="out of registers")])
    assert grammar.main(["warmup", "--head-dim", "64"]) == 1
    assert "bfloat16 mask_kind=band" in (said := capsys.readouterr().out) and "out of registers" in said


def test_without_a_cache_there_is_nothing_to_fill(monkeypatch, capsys):
    monkeypatch.setattr(jit, "why_no_compiler", list)
    monkeypatch.setenv("TILEWISE_CACHE", "0")
    for command in (["warmup"], ["warmup", "--clear"]):
        assert grammar.main(command) == 3
        assert "kept: the cache is off, because TILEWISE_CACHE is '0'" in capsys.readouterr().err


def test_without_the_dsl_nothing_compiles(monkeypatch, capsys):
    monkeypatch.setattr(jit, "why_no_compiler", lambda: ["cutlass is not installed"])
    assert grammar.main(["warmup"]) == 3 and "cutlass is not installed" in capsys.readouterr().err
