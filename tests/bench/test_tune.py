"""The search for tiles: which kernels it considers, what it takes from the compiler's remarks, and whom it chooses."""

import math
import os
from contextlib import nullcontext
from dataclasses import fields, replace
from importlib import import_module

import pytest
import torch

from tilewise.backends.hopper import forecast, short
from tilewise.backends.hopper.forward import config, plan
from tilewise.backends.tiled import Tiled
from tilewise.bench import tune
from tilewise.bench.runner import run
from tilewise.bench.sets import Workload
from tilewise.bench.store import Row
from tilewise.cli import grammar
from tilewise.masks import Causal, SlidingWindow
from tilewise.problem import Call
from tilewise.sm90 import cache, jit

BF16 = torch.bfloat16


def shipped(dims=(128, 128), mask_kind="causal"):
    return config.configure(BF16, *dims, mask_kind)


@pytest.mark.parametrize("mask_kind", ["full", "causal", "band"])
@pytest.mark.parametrize("dims", config.TILES, ids=str)
def test_shapes_fit(dims, mask_kind):
    found, refused = tune.shapes(shipped(dims, mask_kind))
    assert found[0] == shipped(dims, mask_kind) and len(set(found)) == len(found) > 2
    kept = {each.name for each in fields(config.Config)} - set(tune.SHAPES)
    for each in found[1:]:
        assert forecast.smem_bytes(each) <= each.shared_bytes and tune.registers(each) <= each.registers[1]
        assert all(getattr(each, name) == getattr(found[0], name) for name in kept)
    assert len(found) + refused.total() == math.prod(map(len, tune.SHAPES.values())) and all(count > 0 for count in refused.values())


def test_manners_of_the_best():
    leaders = [shipped(), replace(shipped(), tile_n=96)]
    found = tune.manners(leaders)
    assert set(leaders) <= set(found) and len(set(found)) == len(found) == 2 * math.prod(map(len, tune.choices().values())) / math.prod(
        map(len, tune.SHAPES.values())
    )


def test_manners_fit():
    """Two stages for Q do not, beside keys of 256."""
    found = tune.manners([shipped((256, 256), "full")])
    assert found and all(each.q_stages == 1 and not tune.why_not(each) for each in found)


@pytest.mark.parametrize("dims", config.TILES, ids=str)
def test_what_ships_is_worth_compiling(dims):
    for mask_kind in ("full", "causal"):
        assert tune.why_not(shipped(dims, mask_kind)) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tile_m": 320}, "registers are handed out for 2 or 3 computing warpgroups"),
        ({"tile_n": 256}, "the operands do not fit the shared memory"),
        ({"tile_n": 256, "kv_stages": 1}, "the sums do not fit the registers"),
    ],
)
def test_why_not(changes, sentence):
    assert sentence in tune.why_not(replace(shipped(), **changes))


def test_larger_tiles_come_first_where_the_limit_is_the_same():
    found, _ = tune.shapes(shipped())
    sizes = [each.tile_m * each.tile_n for each in found[1:]]
    assert sizes[0] == max(sizes)


REMARK = """remark[ptxas info]: ptxas output: ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas         .     {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {used} registers, used 1 barriers
{more}"""


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({}, []),
        ({"stores": 8, "loads": 12}, ["20 bytes are spilled"]),
        ({"stack": 16}, ["16 bytes are spilled"]),
        ({"more": "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized"}, ["serialised"]),
        ({"more": "(C7508) ... (C7508)", "loads": 4}, ["4 bytes", "(C7508)"]),
    ],
)
def test_remarks(values, wrong):
    used, found = tune.judge(REMARK.format(**{"stack": 0, "stores": 0, "loads": 0, "used": 168, "more": ""} | values))
    assert used == 168 and len(found) == len(wrong)
    assert all(part in sentence for part, sentence in zip(wrong, found, strict=True))


def test_silence_is_no_praise():
    assert tune.judge("") == (0, ["the compiler said nothing of registers"])


def row(impl, seqlen, rate, **more):
    return Row(impl=impl, name="tune", case={"seqlen_q": seqlen}, clock="events", flops_per_s=rate, **more)


def test_rank_is_by_the_geometric_mean_and_wants_every_case():
    rows = [row("a", 1, 100.0), row("a", 2, 100.0), row("b", 1, 50.0), row("b", 2, 400.0), row("c", 1, 900.0)]
    rows += [row("c", 2, None, passed=False, reason="missed the tolerance"), row("d", 1, 90.0), row("d", 2, 90.0)]
    ranked = tune.rank(rows)
    assert [name for name, _ in ranked] == ["b", "a", "d"]
    scores = dict(ranked)
    assert scores["b"] == pytest.approx((50 / 900) ** 0.5) and scores["a"] == pytest.approx((100 / 900 * 100 / 400) ** 0.5)
    assert tune.rank([]) == [] and tune.rank([row("a", 1, None)]) == []


def test_survivors_have_what_ships_among_them():
    ranked = [(name, 1.0) for name in "abcdefgh"]
    assert tune.survivors(ranked, "h", most=3) == ["a", "b", "c", "h"]
    assert tune.survivors(ranked, "b", most=3) == ["a", "b", "c"] and tune.survivors(ranked, "z", most=2) == ["a", "b"]


def test_literal():
    name = tune.Contender(shipped()).name
    environment = {"device": "NVIDIA H100", "date": "2026-11-21T10:00:00+00:00"}
    said = tune.literal(shipped(), [row(name, 1024, 512.4e12, environment=environment), row("other", 1024, 1e12)])
    assert (
        said.startswith("(128, 128): {'causal': any_length(tile_m=128, tile_n=128, cluster=2)},")
        and "NVIDIA H100, 2026-11-21: TFLOP/s at 1024: 512" in said
    )
    assert "kv_stages=3" in tune.literal(replace(shipped(), kv_stages=3), []) and "kv_stages" not in said


def test_searches_are_by_kernel():
    def workload(seqlen, head_dim, mask):
        return Workload(name="x", batch=1, seqlen_q=seqlen, heads_q=1, head_dim=head_dim, mask=mask, dtype=BF16)

    cells = [
        (256, 64, Causal()),
        (512, 64, Causal()),
        (512, 64, SlidingWindow(5, 0)),
        (512, 64, SlidingWindow(9, 0)),
        (512, 128, Causal()),
    ]
    found = tune.searches(workload(*cell) for cell in cells)
    assert [len(search.workloads) for search in found] == [2, 2, 1]
    big = tune.sized(workload(2048, 128, Causal()))
    assert (big.batch, big.heads_q, big.heads_k, big.seqlen_k) == (8, 16, 16, 2048)


def test_outputs_of_libraries_are_caught(capfd):
    result, said = tune._with_output(lambda: os.write(1, b"to 1, ") + os.write(2, b"to 2\n"))
    assert result == 11 and said == "to 1, to 2\n" and capfd.readouterr().out == ""
    with pytest.raises(ZeroDivisionError):
        tune._with_output(lambda: 1 / 0)
    print("again")
    assert capfd.readouterr().out == "again\n"


def test_a_compiled_candidate_is_kept_and_a_bad_one_is_not(kept, exported, monkeypatch):
    good, spilled, broken = (replace(shipped((64, 64), "full"), tile_n=n) for n in (96, 112, 64))

    def build(launch, arguments, config, options):
        assert options == tune.REMARKS
        if config is broken:
            raise RuntimeError("no such instruction\nand more")
        os.write(2, REMARK.format(stack=0, stores=0, loads=4 * (config is spilled), used=168, more="").encode())
        return exported

    monkeypatch.setattr(jit, "build", build)
    found = [tune._compile(each) for each in (good, spilled, broken)]
    assert [each.wrong for each in found] == [(), ("4 bytes are spilled or on a stack",), ("RuntimeError: no such instruction",)]
    assert found[0].registers == 168 and len(cache.entries()) == 1


@pytest.mark.slow
def test_processes_compile_candidates(kept):
    candidates = [replace(shipped((64, 64), "full"), tile_n=n) for n in (96, 112)]
    found = {each.config: each for each in tune.compile_all(candidates, 2)}
    assert set(found) == set(candidates) and all(each.registers > 0 for each in found.values())
    assert len(cache.entries()) == sum(not each.wrong for each in found.values())


def test_the_command_without_a_gpu(capsys, monkeypatch):
    assert grammar.main(["tune", "--dry-run", "--head-dim", "128", "--mask", "causal", "--most", "5"]) == 0
    said = capsys.readouterr().out
    assert "(128, 128) 'causal', bfloat16: 5 shapes" in said and "the operands do not fit the shared memory" in said
    monkeypatch.setattr(jit, "why_not_here", lambda: ["torch sees no GPU here"])
    assert grammar.main(["tune"]) == 3
    assert "torch sees no GPU here. Without one, --dry-run lists the candidates" in capsys.readouterr().err


def test_the_commands_table_and_choice(kept, capsys, monkeypatch, tmp_path):
    """Everything but the compiler and the GPU: the shipped kernel, a better one, one that spills, one that is wrong."""
    monkeypatch.setenv("COLUMNS", "250")  # so that no cell of a table is folded
    base = shipped((64, 64), "full")
    todo = [base, *(replace(base, tile_n=n) for n in (96, 112, 80))]
    rates = {128: 100e12, 96: 200e12, 80: None}
    monkeypatch.setattr(jit, "why_not_here", list)
    monkeypatch.setattr(tune, "shapes", lambda found: (todo, {}))
    monkeypatch.setattr(tune, "manners", list)
    monkeypatch.setattr(tune, "compile_all", lambda todo, processes: [
        tune.Compiled(each, 3.0, 168, ("8 bytes are spilled or on a stack",) if each.tile_n == 112 else ()) for each in todo
    ])  # fmt: skip

    def measure(search, configs, budget_s, keep=None):
        rows = [
            row(tune.Contender(each).name, 1024, rates[each.tile_n], reason=None if rates[each.tile_n] else "missed the tolerance: o")
            for each in configs
        ]
        if keep:
            keep(rows)
        return rows

    monkeypatch.setattr(tune, "measure", measure)
    out = tmp_path / "rows" / "tune.jsonl"
    assert grammar.main(["tune", "--head-dim", "64", "--mask", "full", "--seqlen", "1024", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert (
        "(64, 64): {'full': any_length(tile_m=192, tile_n=96, kv_stages=3, pingpong=True, dynamic=False, q_stages=2)}," in said
        and "8 bytes are spilled" in said
        and "missed the tolerance" in said
    )
    assert len(out.read_text().splitlines()) == 2
    rates[128] = None  # what ships is wrong
    assert grammar.main(["tune", "--head-dim", "64", "--mask", "full", "--seqlen", "1024", "--out", str(out)]) == 1


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(9, 0)], ids=repr)
def test_a_contender_runs_its_own_configuration(mask, monkeypatch):
    ran, backend = [], import_module("tilewise.backends.hopper.forward.call")

    def compiled(launch, arguments, config):
        def kernel(tensors, *_):
            q, k, v, o, _ = tensors
            ran.append(config)
            o.copy_(Tiled().forward(Call(q=q, k=k, v=v, mask=mask, scale=q.shape[-1] ** -0.5))[0])

        return kernel

    monkeypatch.setattr(jit, "compiled", compiled)
    monkeypatch.setattr(backend, "_counter", lambda device: None)
    monkeypatch.setattr(plan, "num_sms", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(short, "current_stream", lambda device: 0)
    workload = Workload(name="x", batch=1, seqlen_q=40, heads_q=2, head_dim=64, mask=mask, dtype=BF16)
    candidate = replace(shipped((64, 64), "causal"), tile_n=96)
    (found,) = run([workload], [tune.Contender(candidate)], budget_s=0.01, memory=False)
    assert found.passed and set(ran) == {candidate} and "tile_n=96" in found.impl
