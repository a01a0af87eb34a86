"""The Hopper backend's backward pass on a GPU: the cases that it covers, random problems, hidden NaN, closed forms, repeated runs."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hopper_problems import LENGTHS, NEEDS_HOPPER, ONE_BAND, beyond_one_band, drawing, held, held_each_way, same_bits

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward import call as gradients
from tilewise.backends.hopper.backward import plan
from tilewise.backends.hopper.backward.config import LONG, TILES
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Dense, Documents, FirstKeys, Full, PrefixTree, SlidingWindow
from tilewise.problem import Call
from tilewise.sm90.jit import tensors_of
from tilewise.testing import conformance
from tilewise.testing.cases import QUICK, Case, make, random_mask, upstream

pytestmark = NEEDS_HOPPER

SMALLER = ((72, 40), (8, 8), (104, 104), (40, 72))
DIMS = (*TILES, *SMALLER)


@pytest.mark.parametrize("mask", ONE_BAND, ids=repr)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_cases(mask, dims):
    for turn, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        heads_q, heads_k = ((4, 2), (3, 3), (8, 1))[turn % 3]
        sizes = {
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "heads_q": heads_q,
            "heads_k": heads_k,
            "head_dim": dims[0],
            "head_dim_v": dims[1],
        }
        case = Case(batch=2, mask=mask, dtype=("bf16", "fp16")[turn % 2], lse_grad=turn % 3 == 1, **sizes)
        held(case)
        held(case, seed=1, run=conformance.run_case)


@pytest.mark.parametrize("mask", [*ONE_BAND, Documents((0, 20, 64), (0, 30, 64), inner=Causal()), None], ids=repr)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_keys_of_one_block(mask, dims):
    """Whose consumers write dQ themselves; with tiles of queries that see nothing, and hidden NaN. Masks: those, or any that need tables."""
    lengths = ((64, 64),) if isinstance(mask, Documents) else ((1, 1), (300, 77), (1000, 128), (64, 128), (700, 3))
    for turn, (seqlen_q, seqlen_k) in enumerate(lengths):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 4, "heads_k": (4, 2, 1)[turn % 3]}
        sizes |= {"head_dim": dims[0], "head_dim_v": dims[1], "dtype": ("bf16", "fp16")[turn % 2], "lse_grad": turn % 3 == 1}
        for each in [mask] if mask else beyond_one_band(seqlen_q, seqlen_k):
            held_each_way(Case(batch=2, mask=each, **sizes))


@pytest.mark.parametrize("seqlen_k", [77, 128])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_many_runs_of_keys_of_one_block_have_the_same_bits(dims, seqlen_k):
    """Thread blocks share its walk, without a mask."""
    torch.manual_seed(0)
    sizes = (3000, 8, dims[0]), (seqlen_k, 4, dims[0]), (seqlen_k, 4, dims[1])
    q, k, v = (torch.randn(2, *size, device="cuda").bfloat16() for size in sizes)
    for mask in (Full(), Causal("top_left"), Dense(torch.rand(3000, seqlen_k, generator=torch.Generator().manual_seed(3)) < 0.3)):
        same_bits(Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True), runs=100)


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(500, 0), Documents([0, 300, 4096], inner=Causal())], ids=repr)
@pytest.mark.parametrize("seqlen_k", [96, 4096])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_memory_is_one_dQ_in_fp32(dims, seqlen_k, mask):
    """Beside inputs, outputs and statistics; also where blocks of keys are shared. Less where all keys are one block's, and heads fill their tiles:
    parts of its dK and dV are of whole tiles.
    """
    if isinstance(mask, Documents) and seqlen_k < 4096:
        mask = Documents([0, 300, 4096], [0, 50, 96], inner=Causal())
    sizes = (4096, dims[0]), (seqlen_k, dims[0]), (seqlen_k, dims[1])
    q, k, v = (
        torch.randn(4, seqlen, 17, dim, device="cuda").bfloat16()[: 1 if isinstance(mask, Documents) else 4] for seqlen, dim in sizes
    )
    call = Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True)
    taken = beside_gradients(call)
    assert taken <= dq_and_statistics(call)
    if not (sums := plan.config_of(call).sums) and dims in TILES:
        assert taken < dq_and_statistics(call) // 2
    assert "summed up in fp32" in "".join(gradients.lines(call)) or not sums


@pytest.mark.parametrize("changes", [{}, {"softcap": 5.0, "alibi": "h"}], ids=["plain", "changed"])
@pytest.mark.parametrize("dims", [(8, 64), (40, 40), (40, 96), (64, 128), (136, 128), (200, 200)], ids=str)
def test_sums_of_heads_smaller_than_tiles(dims, changes):
    """They lie side by side, without what tiles have beyond a head; some warpgroups may have nothing of it."""
    for turn, mask in enumerate(
        (Full(), Causal(), SlidingWindow(200, 9), Documents((0, 300, 1100), inner=Causal()), random_mask(1100, 1100))
    ):
        sizes = {"seqlen_q": 1100, "seqlen_k": 1100, "heads_q": 2, "heads_k": 1, "head_dim": dims[0], "head_dim_v": dims[1]}
        held_each_way(Case(batch=1, mask=mask, dtype=("bf16", "fp16")[turn % 2], **sizes, **changes))


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(500, 0), Documents([0, 3000, 8192], inner=Causal())], ids=repr)
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_an_overflow_ends_soon(dims, mask):
    """An ordinary thing in fp16 training. All that is not finite is looked at again, pair by pair, for hidden numbers; that it is so by right has to
    be found out at a row's first pairs: all pairs take 900 to 2,500 times as long as numbers do, the first ones up to 150 times (H100).
    """
    q, k, v = (torch.randn(1, 8192, 8, dim, device="cuda").half() for dim in (dims[0], dims[0], dims[1]))
    call = Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True)
    o, lse = Hopper().forward(call)
    upstream = torch.randn_like(o)
    lost, number = torch.full_like(o, torch.nan), upstream.clone()
    number[:, 7000, :, 3] = torch.inf
    usual, longer = (
        min(milliseconds(lambda d_o=d_o: gradients.backward(call, o, lse, d_o, None)) for _ in range(3)) for d_o in (upstream, lost)
    )
    assert longer < 400 * usual
    d_q, d_k, d_v, *_ = gradients.backward(call, o, lse, lost, None)
    assert all(x.isnan().all() for x in (d_q, d_k, d_v))
    d_q, d_k, d_v, *_ = gradients.backward(call, o, lse, number, None)
    seen = ~d_k.isfinite().any(-1)
    assert 0 < seen.sum() < seen.numel() and d_k[~seen].isfinite().all()
    assert d_q[:, 7000].isnan().all() and d_q.isnan().sum() == d_q[:, 7000].numel()
    others = [i for i in range(dims[1]) if i != 3]
    assert torch.equal(d_v[..., 3].isfinite(), ~seen) and d_v[..., others].isfinite().all()


def milliseconds(work) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=repr)
@pytest.mark.parametrize("seqlen_k", [96, 1024])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_memory_with_a_bias_is_one_dQ_in_fp32(dims, seqlen_k, mask):
    """Its own gradient among what is asked for."""
    q, k, v = (
        torch.randn(2, *size, device="cuda").bfloat16() for size in ((1024, 8, dims[0]), (seqlen_k, 8, dims[0]), (seqlen_k, 8, dims[1]))
    )
    for shape in (1, 1, 1024), (2, 8, 1024), (1, 1, 1):
        bias = torch.randn(*shape, seqlen_k, device="cuda").bfloat16()
        call = Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True, bias=bias)
        assert beside_gradients(call) <= dq_and_statistics(call)


def beside_gradients(call: Call) -> int:
    """Bytes that the backward pass takes beside what it returns, at its peak; with a bias: that without its gradient, or with it."""
    o, lse = Hopper().forward(call)
    d_o, taken = torch.randn_like(o), []
    for bias_grad in {False, call.bias is not None}:
        gradients.backward(call, o, lse, d_o, None, bias_grad)  # compiled, and its tables made
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        found = gradients.backward(call, o, lse, d_o, None, bias_grad)
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        taken.append(peak - before - sum(x.numel() * x.element_size() for x in found if x is not None))
    return max(taken)


def dq_and_statistics(call: Call) -> int:
    rows = call.batch * call.heads_q * -(-call.seqlen_q // 80) * 80
    counters_and_tables = 1 << 20
    return rows * (4 * call.head_dim + 2 * 4) + counters_and_tables


@pytest.mark.parametrize("part", range(4))
def test_quick_cases_that_it_covers(part):
    ran = 0
    for case in QUICK[part::4]:
        try:
            held(case, run=conformance.run_case)
            ran += 1
        except UnsupportedError:
            continue
    assert ran > 8


@pytest.mark.parametrize("seed", range(8))
def test_random_problems(seed):
    draw = drawing(seed)
    for _ in range(12):
        group, heads_k = draw(1, 5), draw(1, 4)
        window = SlidingWindow(draw(0, 200), draw(0, 200), align=("bottom_right", "top_left")[draw(0, 2)])
        case = Case(
            batch=draw(1, 4),
            seqlen_q=draw(1, 800),
            seqlen_k=draw(1, 800),
            heads_q=group * heads_k,
            heads_k=heads_k,
            head_dim=8 * draw(1, 17),
            mask=(Full(), Causal(), window)[draw(0, 3)],
            dtype=("bf16", "fp16")[draw(0, 2)],
            scale=(None, 0.5, -0.3)[draw(0, 3)],
            lse_grad=draw(0, 2) == 1,
        )
        held(case, seed=draw(0, 1 << 20))


STEPS = [(*what, fields) for what, each in LONG.items() for _, fields in each]


@pytest.mark.parametrize(("dims", "mask_kind", "fields"), [step for step in STEPS if step[1] in ("full", "causal")], ids=str)
def test_schedules_of_long_sequences(dims, mask_kind, fields, monkeypatch):
    """On short ones, whose edges are everywhere."""
    monkeypatch.setattr(plan, "AT_HAND", 1)
    monkeypatch.setattr(plan, "ONE_BLOCK", 0)
    mask = {"full": Full(), "causal": Causal()}[mask_kind]
    plain = plan.config_of
    monkeypatch.setattr(plan, "config_of", lambda call: plain(call).but(**fields))
    for turn, (seqlen_q, seqlen_k) in enumerate((*LENGTHS, (900, 1300))):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 4, "heads_k": 4 >> turn % 3}
        smaller = 8 * (turn % 2 and "dq_transposed" not in fields)
        sizes |= {"head_dim": dims[0] - smaller, "head_dim_v": dims[1] - 8 * (turn % 2)}
        case = Case(batch=2, mask=mask, dtype=("bf16", "fp16")[turn % 2], lse_grad=turn % 3 == 1, **sizes)
        held(case)
        held(case, seed=1, run=conformance.run_case)
        held(replace(case, dtype="bf16"), run=conformance.run_spoiled)


@pytest.mark.parametrize(("dims", "mask_kind", "fields"), [step for step in STEPS if "finishes" in step[2]], ids=str)
def test_dq_finished_by_later_blocks(dims, mask_kind, fields, monkeypatch):
    """On short sequences, of so many heads that some of dQ is complete when later blocks look for it: right, and the same bits as without."""
    plain, order, compiled, given = plan.config_of, plan._order, gradients.jit.compiled, []
    monkeypatch.setattr(plan, "_order", lambda *of: (*order(*of)[:-1], 150))

    def recording(launch, *of):
        kernel = compiled(launch, *of)
        return (lambda *args: (given.append(args), kernel(*args))[1]) if launch == gradients.LAUNCH else kernel

    monkeypatch.setattr(gradients.jit, "compiled", recording)
    persistent = mask_kind != "causal"  # there with one block of keys a thread block, too, as long sequences have it
    for seqlen_q, seqlen_k, heads_k in ((500, 500, 16), (330, 410, 8), (129, 700, 4)):
        packs = Documents((0, seqlen_q // 3, seqlen_q), (0, seqlen_k // 3, seqlen_k), inner=Causal())
        mask = {"full": Full(), "causal": Causal(), "band": SlidingWindow(150, 0), "varlen": packs}[mask_kind]
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 16, "heads_k": heads_k, "head_dim": dims[0] - 8}
        case = Case(batch=96 // heads_k, mask=mask, dtype="bf16", **sizes)
        for finishes in (True, False):
            monkeypatch.setattr(
                plan,
                "config_of",
                lambda call, finishes=finishes: plain(call).but(**fields | {"persistent": persistent, "finishes": finishes}),
            )
            held(case, run=conformance.run_spoiled)
            inputs = torch.Generator("cuda").manual_seed(0)
            shapes = ((seqlen_q, 16), (seqlen_k, heads_k), (seqlen_k, heads_k), (seqlen_q, 16))
            q, k, v, d_o = (torch.randn(96 // heads_k, *shape, dims[0], device="cuda", generator=inputs).bfloat16() for shape in shapes)
            call = Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True)
            o, lse = Hopper().forward(call)
            found = gradients.backward(call, o, lse, d_o, None)
            turns = next(x for x in tensors_of(given[-1]) if x.dtype == torch.int32 and x.dim() == 4)
            assert bool((turns < 0).any()) == finishes
            if finishes:
                first = found
        assert all(torch.equal(x, y) for x, y in zip(first[:3], found[:3], strict=True))


@pytest.mark.parametrize("mask", [Causal(), Causal("top_left"), SlidingWindow(150, 20), SlidingWindow(1, 0)], ids=repr)
@pytest.mark.parametrize(
    ("dims", "seqlens"), [((64, 64), (700, 900)), ((128, 128), (1100, 500)), ((96, 96), (300, 300)), ((72, 40), (129, 2000))], ids=str
)
def test_heads_of_a_group_apart(dims, seqlens, mask, monkeypatch):
    """As where a group's walks read much: each head by thread blocks of its own. Hidden memory is poisoned, and every run gives the same bits."""
    for name in ("CACHE", "WINDOW_CACHE"):
        monkeypatch.setattr(plan, name, 0)
    for heads_q, heads_k, dtype in ((6, 2, "bf16"), (8, 1, "fp16")):
        sizes = {"seqlen_q": seqlens[0], "seqlen_k": seqlens[1], "head_dim": dims[0], "head_dim_v": dims[1]}
        case = Case(batch=3, heads_q=heads_q, heads_k=heads_k, mask=mask, dtype=dtype, lse_grad=True, **sizes)
        call, (d_o, d_lse) = make(case, 0, device="cuda", grad=True), upstream(case, 0, device="cuda")
        assert plan.config_of(call).block_per_q_head
        held(case)
        held(case, run=conformance.run_spoiled)
        o, lse = Hopper().forward(call)
        first, *others = (gradients.backward(call, o, lse, d_o, d_lse)[:3] for _ in range(4))
        assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_a_scale_of_zero():
    for mask in (Full(), SlidingWindow(20, 30)):
        held(Case(seqlen_q=150, seqlen_k=210, head_dim=128, mask=mask, dtype="bf16", scale=0.0), run=conformance.run_case)


@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(50, 0)], ids=repr)
def test_a_hidden_nan_reaches_nobody(mask, dims):
    case = Case(seqlen_q=300, seqlen_k=300, head_dim=dims[0], head_dim_v=dims[1], mask=mask, dtype="bf16")
    held(case, run=conformance.run_spoiled)
    held(case, run=conformance.run_overflown)


@pytest.mark.parametrize("mask", ONE_BAND, ids=repr)
def test_a_sink(mask):
    for seqlen_q, seqlen_k in ((300, 200), (65, 129), (45, 0)):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": 64}
        case = Case(mask=mask, dtype="bf16", sink=True, wide=seqlen_q > 100, lse_grad=seqlen_q < 100, **sizes)
        held(case, run=conformance.run_case)
        held(case)


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(70, 20), Documents([0, 70, 210, 300], inner=Causal())], ids=repr)
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_more_blocks_of_keys_than_run_at_a_time(mask, dims, monkeypatch):
    """A persistent thread block takes several."""
    monkeypatch.setattr(plan, "AT_HAND", 1)
    sizes = {"batch": 8, "seqlen_q": 300, "seqlen_k": 300, "heads_q": 24, "heads_k": 24, "head_dim": dims[0], "head_dim_v": dims[1]}
    for dtype in ("bf16", "fp16"):
        held(Case(mask=mask, dtype=dtype, **sizes))
    held(Case(mask=mask, dtype="bf16", **sizes), run=conformance.run_spoiled)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1100, 1100), (1030, 2300)])
def test_heads_side_by_side(seqlen_q, seqlen_k, monkeypatch):
    """Several sections of heads, the last one of fewer, and blocks of keys that are shared in the last wave."""
    monkeypatch.setattr(plan, "AT_HAND", 1)
    sizes = {"batch": 2, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 35, "heads_k": 35, "head_dim": 64}
    for dtype in ("bf16", "fp16"):
        held(Case(mask=Full(), dtype=dtype, **sizes))


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=repr)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128)], ids=str)
def test_several_streams(dims, mask):
    """Kernels that hold a part of the machine each: blocks wait for earlier ones, and later ones find no room. The same bits as alone."""
    torch.manual_seed(0)
    size, streams = 1500, [torch.cuda.Stream(priority=priority) for priority in (0, -1, 0, -1)]
    q, k, d_o = (torch.randn(1, size, 16, d, device="cuda", dtype=torch.bfloat16) for d in (dims[0], dims[0], dims[1]))
    v, others = torch.randn_like(d_o), torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
    call = Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True)
    o, lse = Hopper().forward(call)
    alone = gradients.backward(call, o, lse, d_o, None)[:3]
    torch.cuda.synchronize()
    for _ in range(25):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.mm(others, others.T)  # a part of the multiprocessors come free later
                found.append(gradients.backward(call, o, lse, d_o, None)[:3])
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for each in found for x, y in zip(each, alone, strict=True))


SHARED_GPU = """
import time, torch
from tilewise.backends.hopper import Hopper
from tilewise.masks import Causal
from tilewise.problem import Call
from tilewise.sm90.jit import tensors_of
q, k, v, d_o = (torch.randn(2, 700, 12, 256, device="cuda", dtype=torch.bfloat16) for _ in range(4))
call, backend = Call(q=q, k=k, v=v, mask=Causal(), scale=0.06, grad=True), Hopper()
o, lse = backend.forward(call)
first, until = backend.backward(call, o, lse, d_o, None), time.monotonic() + 10
while time.monotonic() < until:
    found = [backend.backward(call, o, lse, d_o, None) for _ in range(20)]
    torch.cuda.synchronize()
assert all(torch.equal(x, y) for each in found for x, y in zip(first[:3], each[:3]))
"""


def test_processes_that_share_the_gpu():
    """Blocks are interrupted anywhere, and their warps go on at different times."""
    others = [subprocess.Popen([sys.executable, "-c", SHARED_GPU]) for _ in range(4)]
    try:
        assert [each.wait(timeout=100) for each in others] == [0] * len(others)
    finally:
        for each in others:
            each.kill()


def test_a_single_key_is_copied():
    conformance.one_key_is_copied(Hopper(), device="cuda")


def test_memory_laid_out_otherwise():
    for layout in ("bhsd", "sliced", "expanded", "inner"):
        held(Case(seqlen_q=140, seqlen_k=140, head_dim=64, mask=Causal(), dtype="bf16", layout=layout), run=conformance.run_case)


def _inputs(heads_k=2, seqlen=900):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, seqlen, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, heads_k, heads_k))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), torch.randn_like(q)


def test_autograd_takes_it():
    q, k, v, d_o = _inputs()
    assert "hopper" in str(tw.explain(q, k, v, causal=True)).splitlines()[0]
    found = torch.autograd.grad(tw.attention(q, k, v, causal=True), (q, k, v), d_o)
    expected = torch.autograd.grad(tw.attention(q, k, v, causal=True, backend="tiled"), (q, k, v), d_o)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(300, 0)], ids=repr)
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_many_runs_have_the_same_bits(mask, dims):
    """Many blocks a head, more of them than the machine runs at a time, and heads that share keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1500, heads, dim, device="cuda").bfloat16() for heads, dim in ((8, dims[0]), (4, dims[0]), (4, dims[1])))
    same_bits(Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True), runs=1000 if dims == (128, 128) else 100)


@pytest.mark.parametrize(
    ("dims", "heads", "seqlen"),
    [
        ((128, 128), (16, 4), 4096),
        ((128, 128), (16, 8), 4096),
        ((128, 128), (16, 16), 4096),
        ((128, 128), (16, 16), 16384),
        ((64, 64), (16, 16), 4096),
        ((192, 128), (16, 16), 4096),
    ],
)
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=repr)
def test_many_runs_of_long_sequences_have_the_same_bits(dims, heads, seqlen, mask):
    """With more under way than the L2 cache holds, where what was written last may still be on its way when the next one's turn comes."""
    torch.manual_seed(0)
    sizes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
    q, k, v = (torch.randn(16384 // seqlen, seqlen, *size, device="cuda").bfloat16() for size in sizes)
    same_bits(Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True), runs=150)


@pytest.mark.parametrize("mask", [PrefixTree.group(1100, [500] * 6), SlidingWindow(200, 0) | FirstKeys(130)], ids=repr)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_keys_that_most_queries_see(dims, mask):
    """Their walks are the longest, and most other blocks add to tiles of theirs; of heads that ascend and others that descend."""
    for heads_q, heads_k, batch in ((16, 4, 1), (12, 12, 3)):
        sizes = {"seqlen_q": 4100, "seqlen_k": 4100, "heads_q": heads_q, "heads_k": heads_k, "batch": batch}
        held(Case(**sizes, head_dim=dims[0], head_dim_v=dims[1], mask=mask, dtype="bf16"))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4100, heads, dim, device="cuda").bfloat16() for heads, dim in ((32, dims[0]), (8, dims[0]), (8, dims[1])))
    same_bits(Call(q=q, k=k, v=v, mask=mask, scale=dims[0] ** -0.5, grad=True), runs=100)


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(50, 0)], ids=repr)
def test_a_batch_beyond_what_a_grid_holds(mask):
    """It comes in parts, each with an order of its own: every sequence gets what it gets by itself, but for the order of its sums."""
    torch.manual_seed(0)
    q, k, v, d_o = (torch.randn(plan.MOST + 21, 130, 1, 64, device="cuda").bfloat16() for _ in range(4))

    def of(part):
        call = Call(q=q[part], k=k[part], v=v[part], mask=mask, scale=0.125, grad=True)
        return gradients.backward(call, *Hopper().forward(call), d_o[part], None)[:3]

    whole = of(slice(None))
    for part in (slice(0, 9), slice(plan.MOST - 9, plan.MOST + 5), slice(plan.MOST + 5, None)):
        for x, y in zip(whole, of(part), strict=True):
            torch.testing.assert_close(x[part], y, rtol=2**-7, atol=2**-10)


@pytest.mark.parametrize("dim", [128, 160, 192, 256])
@pytest.mark.parametrize("mask", [Full(), SlidingWindow(300, 0)], ids=repr)
def test_keys_that_no_query_looks_at(dim, mask):
    """Scores that lie far apart, and few queries: most keys have tiny probabilities only, and gradients as exact as others."""
    held(Case(batch=2, seqlen_q=5, seqlen_k=300, heads_q=2, heads_k=1, head_dim=dim, mask=mask, dtype="bf16", scale=0.7))
