"""Appending on a GPU: torch's bits, alone and on the way to decode, in graphs and behind kernels that are not done yet."""

import itertools
from dataclasses import replace

import pytest
import torch
from append_problems import CASES, AppendCase, by_torch, made, same
from decode_problems import DecodeCase, held, with_rotary
from decode_problems import made as made_decode
from hopper_problems import NEEDS_HOPPER

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.decode import append_call

pytestmark = NEEDS_HOPPER

DTYPES, INDICES = (torch.bfloat16, torch.float16), (torch.int32, torch.int64)


def written(call):
    ends = Hopper().append(call)
    assert ends is not None, append_call.why_not(call)
    return ends


def checked(case: AppendCase, monkeypatch):
    call = made(case, device="cuda")
    want = by_torch(call, monkeypatch)
    ends = written(call)
    torch.cuda.synchronize()
    assert same(call.k_cache, want[0]) and same(call.v_cache, want[1])
    more = torch.tensor(case.new)
    assert torch.equal(ends.cpu().long(), (torch.tensor(case.lengths) + more).clamp(-(2**31) + 1, 2**31 - 1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, monkeypatch):
    for dtype, index in itertools.product(DTYPES if case.dtype in DTYPES else (case.dtype,), INDICES):
        checked(replace(case, dtype=dtype, index=index), monkeypatch)


@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (72, 40), (128, 128), (192, 128), (256, 256), (576, 512)], ids=str)
@pytest.mark.parametrize("page", [0, 1, 5, 16, 64])
def test_dims_and_pages(dims, page, monkeypatch):
    for rotary, interleaved in ((0, False), (dims[0], False), (dims[0] // 2, True)):
        for new in (1, 4, (3, 0, 9, 1, 0, 2)):
            checked(
                AppendCase(lengths=(5, 0, 75, 78, 33, -2), new=new, dims=dims, page=page, rotary=rotary, interleaved=interleaved, heads=3),
                monkeypatch,
            )


@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_tables(table, interleaved, monkeypatch):
    for rotary, first in itertools.product((2, 20, 64), (False, True)):
        checked(
            AppendCase(lengths=(5, 0, 75, 130), new=3, capacity=140, rotary=rotary, interleaved=interleaved, table=table, first=first),
            monkeypatch,
        )


def test_prompts(monkeypatch):
    """Many tokens, of which some blocks are far beyond the first."""
    checked(AppendCase(lengths=(5, 700), new=3000, capacity=4000, page=16, heads=8, dims=(128, 128), rotary=128), monkeypatch)
    checked(AppendCase(lengths=(0, 5, 700, 1), new=(3000, 0, 1, 999), capacity=4000, heads=8, dims=(128, 128), rotary=128), monkeypatch)


def cached(lengths, new, page, heads=(8, 2), dims=(128, 128)):
    """A decode call whose last `new` tokens are not in the caches yet, and these."""
    call = made_decode(DecodeCase(lengths=lengths, queries=new, heads=heads, dims=dims, page=page), device="cuda")
    fresh = [torch.empty(len(lengths), new, heads[1], dim, dtype=call.q.dtype, device="cuda") for dim in dims]
    for b, n in enumerate(lengths):
        for i, position in enumerate(range(n - new, n)):
            for x, cache in zip(fresh, (call.k_cache, call.v_cache), strict=True):
                slot = (b, position) if not page else (int(call.page_table[b, position // page]), position % page)
                x[b, i] = cache[slot]
                cache[slot] = float("nan")
    return call, fresh


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("new", [1, 4])
def test_decode_sees_what_it_appends(new, page, index):
    call, fresh = cached((300, 17, 4097), new, page)
    words = {"page_table": call.page_table.to(index)} if page else {}
    o, lse = tw.decode(
        call.q, call.k_cache, call.v_cache, k=fresh[0], v=fresh[1], cache_seqlens=(call.seqlens - new).to(index), return_lse=True, **words
    )
    held(call, o, lse)


@pytest.mark.parametrize("page", [0, 16])
def test_eight_bits_by_the_public_calls(page):
    """New keys are quantised, appended and attended, all of it on the GPU."""
    call, fresh = cached((300, 17, 4097), 2, page)
    words = {"page_table": call.page_table} if page else {}
    caches = [x.nan_to_num(0.0).to(torch.float8_e4m3fn) for x in (call.k_cache, call.v_cache)]
    k, v = (x.to(torch.float8_e4m3fn) for x in fresh)
    scale, lengths = torch.tensor(0.25, device="cuda"), call.seqlens - 2

    def step():
        return tw.decode(call.q, *caches, k=k, v=v, cache_seqlens=lengths, k_scale=scale, v_scale=scale, return_lse=True, **words)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, lse = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = [x.to(call.q.dtype) * 0.25 for x in caches]
    held(replace(call, k_cache=exact[0], v_cache=exact[1]), o, lse)


@pytest.mark.parametrize("page", [0, 16])
def test_a_graph_of_many_steps(page):
    """Step after step one token longer, each seen at once by the launch behind, which may begin before the tokens are written."""
    steps, new, (batch, heads_q, heads_k, dim) = 200, 1, (3, 8, 2, 128)
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(steps, batch, new, h, dim, generator=draw, dtype=torch.bfloat16, device="cuda") for h in (heads_q, heads_k, heads_k)
    )
    lengths = torch.tensor([1, 100, 1000], dtype=torch.int32, device="cuda")
    shape = (batch, 1280) if not page else (batch * 80, page)
    caches = [torch.randn(*shape, heads_k, dim, generator=draw, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    table = torch.randperm(batch * 80, device="cuda").int().view(batch, 80)
    words = {"page_table": table} if page else {}

    def walk(seqlens):
        found = []
        for i in range(steps):
            found.append(tw.decode(q[i], *caches, k=k[i], v=v[i], cache_seqlens=seqlens, **words))
            seqlens += 1
        return found

    kept = [x.clone() for x in caches]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        walk(lengths.clone())
    torch.cuda.synchronize()
    for x, before in zip(caches, kept, strict=True):
        x.copy_(before)
    graph, seqlens = torch.cuda.CUDAGraph(), lengths.clone()
    with torch.cuda.graph(graph):
        found = walk(seqlens)
    graph.replay()
    torch.cuda.synchronize()
    for x, before in zip(caches, kept, strict=True):
        x.copy_(before)
    for i in range(steps):
        tw.append(*caches, k[i], v[i], cache_seqlens=lengths + i, **words)
        torch.cuda.synchronize()
        assert torch.equal(found[i], tw.decode(q[i], *caches, cache_seqlens=lengths + i + 1, **words))


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128), (256, 256), (96, 96)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_that_are_rotated_on_their_way(dims, interleaved):
    """As if they had been before, bit for bit."""
    for half, table, queries in ((dims[0] // 2, torch.float32, 4), (16, torch.bfloat16, (3, 0, 30)), (8, torch.float16, 1)):
        case = DecodeCase(lengths=(300, 1, 5000), queries=queries, heads=(8, 2), dims=dims, page=16)
        call, rotated = with_rotary(made_decode(case, device="cuda"), half, interleaved, table)
        found, expected = (Hopper().decode(each) for each in (call, rotated))
        assert found is not None and expected is not None
        held(rotated, *found)
        assert all(map(torch.equal, found, expected))


def test_nothing_is_read_on_the_host():
    call, fresh = cached((300, 17, 4097), 1, 16)
    tables = {name: torch.randn(5000, 64, device="cuda") for name in ("rotary_cos", "rotary_sin")}
    lengths = call.seqlens - 1

    def step():
        tw.decode(call.q, call.k_cache, call.v_cache, k=fresh[0], v=fresh[1], cache_seqlens=lengths, page_table=call.page_table, **tables)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    launched = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 2, [event.name for event in launched]  # that which appends, and that which decodes


@pytest.mark.parametrize("dims", [(576, 512), (64, 64)], ids=str)
def test_append_is_one_launch_whatever_is_attended(dims):
    """Also for heads that no kernel attends to."""
    call = made(AppendCase(lengths=(5, 0, 33), new=2, page=16, dims=dims, rotary=64, index=torch.int64), device="cuda")
    words = {name: getattr(call, name) for name in ("cache_seqlens", "page_table", "rotary_cos", "rotary_sin")}
    tw.append(call.k_cache, call.v_cache, call.k, call.v, **words)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        tw.append(call.k_cache, call.v_cache, call.k, call.v, **words)
        torch.cuda.synchronize()
    launched = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 1, [event.name for event in launched]


def test_wild_offsets_fault_nowhere():
    call = made(AppendCase(lengths=(5, 0, 75), new=(1, 2, 7)), device="cuda")
    for cu in ([0, 5, 2, 6], [-4, 100, 101, 102], [0, 2, 2**31 - 1, -5]):
        written(replace(call, cu_seqlens=torch.tensor(cu, dtype=torch.int32, device="cuda")))
    torch.cuda.synchronize()


def test_caches_that_no_kernel_writes_are_torchs():
    odd = torch.full((3 * 80 * 2 * 64 + 1,), 7.0, dtype=torch.bfloat16, device="cuda")[1:].view(3, 80, 2, 64)
    k = torch.randn(3, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    tw.append(odd, odd.clone(), k, k, cache_seqlens=4)
    assert torch.equal(odd[:, 4:6], k) and (odd[:, :4] == 7.0).all()
