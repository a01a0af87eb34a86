"""The decode kernel on a GPU: lengths, pages, groups, masks, poisoned caches, CUDA graphs, streams, the same bits every time, and its host's way."""

import time
from dataclasses import replace

import pytest
import torch
from decode_problems import INDICES, DecodeCase, by_kernel, held, made, with_eight_bits, with_int64
from hopper_problems import NEEDS_HOPPER

from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.decode import bound, prefix, workspace
from tilewise.backends.hopper.decode import call as decoding
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.testing import tolerance

pytestmark = NEEDS_HOPPER

RAGGED = (0, 1, 15, 16, 17, 63, 64, 65, 128, 129, 1000, 4097)
DIMS = ((128, 128), (64, 64), (96, 96), (192, 128), (256, 256), (72, 40), (8, 8), (104, 104), (160, 160), (128, 64))
BIG = {"dims": (128, 128), "heads": (8, 2)}


def run(call):
    found = Hopper().decode(call)
    assert found is not None, decoding.why_not(call)
    return found


def checked(case: DecodeCase, seed: int = 0):
    call = made(case, seed, "cuda")
    found = run(call)
    held(call, *found)
    assert all(map(torch.equal, found, run(call)))
    assert not any(counters.any() for _, counters in workspace._KEPT.values())
    return call, found


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("page", [0, 16, 64])
def test_dims(dims, page):
    for dtype in (torch.bfloat16, torch.float16):
        checked(DecodeCase(lengths=RAGGED, heads=(6, 2), dims=dims, page=page, dtype=dtype))


@pytest.mark.parametrize("page", [0, 1, 2, 5, 8, 12, 16, 24, 48, 64, 128, 256, 1024])
def test_pages(page):
    checked(DecodeCase(lengths=RAGGED, page=page, **BIG))
    checked(DecodeCase(lengths=RAGGED, page=page, heads=(8, 1), dims=(64, 64)))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (12, 4), (8, 1), (32, 1), (64, 1), (128, 1), (15, 3), (64, 8)], ids=str)
def test_groups(heads):
    for queries in (1, 2, 4, 16):
        checked(DecodeCase(lengths=(5, 300, 1500, 0), heads=heads, dims=(128, 128), queries=queries))


@pytest.mark.parametrize(
    "mask", [Causal(), Full(), Causal(offset=-3), SlidingWindow(100, 0), SlidingWindow(1000, 0), SlidingWindow(70, 5)], ids=repr
)
@pytest.mark.parametrize("queries", [1, 5, 40, (1, 3, 0, 40, 7)], ids=str)
def test_masks(mask, queries):
    for page in (0, 16):
        checked(DecodeCase(lengths=(1, 64, 200, 1000, 3000), queries=queries, mask=mask, page=page, **BIG))


CHUNKS = [1024, (700, 1, 0, 1, 300), (1, 1, 1, 513, 2)]


@pytest.mark.parametrize(
    "mask", [Causal(), Full(), Causal(offset=-3), SlidingWindow(100, 0), SlidingWindow(1000, 0), SlidingWindow(70, 5)], ids=repr
)
@pytest.mark.parametrize("queries", CHUNKS, ids=str)
def test_chunks(mask, queries):
    """Many tokens of a sequence: each unit of rows goes over the keys that it sees."""
    lengths = (5000, 64, 200, 1000, 3000) if isinstance(queries, int) else (5000, 64, 200, 1000, 700)
    for page, heads in ((0, (8, 2)), (16, (4, 4)), (64, (6, 1)), (5, (8, 1))):
        checked(DecodeCase(lengths=lengths, queries=queries, mask=mask, page=page, heads=heads, dims=(128, 128)))


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (72, 40)], ids=str)
def test_chunks_of_all_dims(dims):
    for changes in ({}, {"softcap": 9.0, "alibi": True, "sink": True}, {"split": 300}, {"dtype": torch.float16, "leftpad": (100, 0, 5)}):
        checked(
            DecodeCase(
                lengths=(3000, 100, 900), queries=(700, 1, 300), heads=(8, 2), dims=dims, page=64 * ("leftpad" not in changes), **changes
            )
        )


@pytest.mark.parametrize(
    "tuning",
    [{"q_in_smem": False}, {"kv_stages": 3, "q_in_smem": False}, {"overlap": False}],
    ids=str,
)
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(300, 0)], ids=str)
def test_chunks_with_and_without_overlap(mask, tuning):
    """The same bits with Q in registers, and one tile after the other."""
    call, found = checked(DecodeCase(lengths=(6000, 300, 4000), queries=(700, 1, 300), page=64, mask=mask, **BIG))
    assert decoding.config_of(call).overlap
    for _ in range(5):
        assert all(map(torch.equal, found, by_kernel(call, tile_n=128, **tuning)))


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(300, 0)], ids=str)
def test_chunks_in_pieces_of_a_fixed_size(mask):
    """The same bits however rows are cut, and alone."""
    call, (o, lse) = checked(DecodeCase(lengths=(6000, 300, 4000), queries=(700, 1, 300), page=16, split=64, mask=mask, **BIG))
    narrow = {"consumers": 1, "overlap": False}
    for others in (narrow, narrow | {"causal_tiles": False}, {"causal_tiles": False}, {"overlap": False}, {"consumers": 1}):
        assert all(map(torch.equal, (o, lse), by_kernel(call, **others)))
    for b, (first, last) in enumerate(((0, 700), (700, 701), (701, 1001))):
        entry = {name: getattr(call, name)[b : b + 1] for name in ("seqlens", "page_table")}
        cu = torch.tensor([0, last - first], dtype=torch.int32, device="cuda")
        alone = run(replace(call, q=call.q[first:last], cu_seqlens_q=cu, max_seqlen_q=last - first, **entry))
        assert torch.equal(alone[0], o[first:last]) and torch.equal(alone[1], lse[:, first:last])


@pytest.mark.parametrize(
    "changes", [{"softcap": 5.0}, {"alibi": True}, {"sink": True}, {"softcap": 9.0, "alibi": True, "sink": True}], ids=str
)
def test_changes_of_the_scores(changes):
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        checked(DecodeCase(lengths=RAGGED, queries=3, heads=(8, 2), dims=dims, page=64, **changes))
    checked(DecodeCase(lengths=(70_000,), queries=1, heads=(16, 1), dims=(128, 128), **changes))


def test_the_first_tokens_left_out_and_entries_elsewhere():
    checked(DecodeCase(lengths=(70, 3, 500, 0, 4000), queries=2, leftpad=(5, 3, 200, 0, 3999), entries=True, **BIG))
    checked(DecodeCase(lengths=(70, 3, 500, 0), queries=2, leftpad=(5, 3, 200, 0), page=32, **BIG))


@pytest.mark.parametrize("queries", [7, 3, 20])
def test_trees(queries):
    for page in (0, 4, 16):
        checked(DecodeCase(lengths=(70, 3, 0, 200, 5000), queries=queries, tree=7, page=page, **BIG))


@pytest.mark.parametrize("page", [0, 4, 16])
@pytest.mark.parametrize("split", [64, 300, 1024])
def test_pieces_of_a_fixed_size(split, page):
    """A sequence has the same bits alone, in any batch, padded and in a graph."""
    call, (o, lse) = checked(DecodeCase(lengths=(3, 6000, 129, 4097), queries=2, page=page, split=split, **BIG))
    for b in range(4):
        entry = {name: getattr(call, name)[b : b + 1] for name in ("q", "seqlens")}
        if page:
            entry["page_table"] = call.page_table[b : b + 1]
        else:
            entry |= {"k_cache": call.k_cache[b : b + 1], "v_cache": call.v_cache[b : b + 1]}
        alone = run(replace(call, **entry))
        assert torch.equal(alone[0], o[b : b + 1]) and torch.equal(alone[1], lse[b : b + 1])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run(call)
    graph.replay()
    assert all(map(torch.equal, captured, (o, lse)))


@pytest.mark.parametrize("queries", [1, 2, (1, 0, 5, 40, 3)], ids=str)
def test_prefix_of_all(queries, monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    for page in (0, 16):
        for extra in ({}, {"split": 128}, {"sink": True}):
            case = DecodeCase(lengths=(1500, 1024, 1030, 4000, 20), queries=queries, prefix=1024, page=page, **extra, **BIG)
            call, _ = checked(case)
            assert prefix.pays(call)


@pytest.mark.parametrize(
    ("batch", "length", "heads"), [(1, 131_072, (32, 1)), (1, 33_000, (32, 8)), (1, 1024, (32, 8)), (3, 20_000, (4, 4))], ids=str
)
def test_units_in_many_blocks(batch, length, heads):
    checked(DecodeCase(lengths=(length,) * batch, heads=heads, dims=(128, 128)))


@pytest.mark.parametrize("heads", [(32, 1), (64, 1), (16, 8), (3, 1)], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (72, 40), (256, 256)], ids=str)
def test_pieces_are_added_up(dims, heads):
    """However many there are, and by whichever blocks: what fp64 says, and the same bits again."""
    for lengths, queries in (((1024,), 1), ((8192,), 2), ((33_000,), 1), ((700, 0, 5000), (3, 1, 1))):
        call = made(DecodeCase(lengths=lengths, queries=queries, heads=heads, dims=dims, page=16), device="cuda")
        for numbers in (1 << 20, 4096, 256):
            found = by_kernel(call, decoding.Cut(elements_per_extra_tile=numbers))
            held(call, *found)
            for polls in (0, 1, 32, 10_000):
                for _ in range(3):
                    assert all(map(torch.equal, found, by_kernel(call, decoding.Cut(elements_per_extra_tile=numbers, polls=polls))))
            assert not any(counters.any() for _, counters in workspace._KEPT.values())


@pytest.mark.parametrize("split", [64, 300])
def test_pieces_of_a_fixed_size_are_added_up_in_groups(split):
    for pieces in ({"most_pieces": 4, "group": 5}, {"most_pieces": 4, "group": 16}, {"most_pieces": 1 << 20}):
        call = made(DecodeCase(lengths=(9000, 300, 4000), queries=16, page=16, split=split, **BIG), device="cuda")
        found = by_kernel(call, **pieces)
        held(call, *found)
        for polls in (0, 32, 10_000):
            assert all(map(torch.equal, found, by_kernel(call, decoding.Cut(polls=polls), **pieces)))
        assert not any(counters.any() for _, counters in workspace._KEPT.values())


MANY_PIECES = DecodeCase(lengths=(33_000,), queries=4, heads=(32, 1), dims=(128, 128))  # as many as multiprocessors, of 128 rows
ONE_TILE = decoding.Cut(elements_per_extra_tile=1 << 20, rows=128)


def test_blocks_share_a_unit_however_long_they_wait():
    """Launch after launch the same bits, and counters at 0."""
    call = made(MANY_PIECES, device="cuda")
    found = by_kernel(call, ONE_TILE)
    held(call, *found)
    for polls in (0, 1, 2, 4, 8, 32, 10_000):
        for _ in range(50):
            assert all(map(torch.equal, found, by_kernel(call, ONE_TILE._replace(polls=polls))))
        assert not any(counters.any() for _, counters in workspace._KEPT.values())


def test_blocks_of_launches_on_two_streams_wait_for_their_own():
    """Neither launch may have all multiprocessors: blocks leave, and nothing stands still."""
    calls = [made(MANY_PIECES, seed, "cuda") for seed in range(2)]
    want = [by_kernel(call, ONE_TILE) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    for polls in (0, 8, 32, 10_000):
        torch.cuda.synchronize()
        found = [[] for _ in calls]
        for _ in range(100):
            for stream, call, each in zip(streams, calls, found, strict=True):
                with torch.cuda.stream(stream):
                    each.append(by_kernel(call, ONE_TILE._replace(polls=polls)))
        torch.cuda.synchronize()
        for each, expected in zip(found, want, strict=True):
            assert all(torch.equal(x, y) for got in each for x, y in zip(got, expected, strict=True))
        assert not any(counters.any() for _, counters in workspace._KEPT.values())


def test_blocks_share_units_of_a_graph_whose_lengths_change():
    """Of many pieces of many rows, of few, and of one; each replay has the bits of a fresh call."""
    call = made(DecodeCase(lengths=(33_000,) * 4, queries=4, heads=(32, 1), dims=(128, 128)), device="cuda")
    changed = replace(call, seqlens=call.seqlens.clone())
    run(changed)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run(changed)
    for lengths in (
        (33_000, 33_000, 100, 9000),
        (33_000, 0, 0, 0),
        (5, 4, 70, 300),
        (64, 33_000, 1, 8000),
        (20_000, 20_001, 19_999, 20_000),
    ) * 20:
        changed.seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert all(map(torch.equal, captured, run(changed)))
    held(changed, *captured)


@pytest.mark.parametrize("heads", [(8, 1), (12, 3), (16, 8), (32, 32), (40, 40), (48, 48)], ids=str)
def test_columns_of_key_heads(heads):
    """Whether the key heads of the same tokens are side by side or not, and with cuts in a fixed place: what fp64 says, and the same bits again."""
    for lengths, split in (((9000,), None), ((40, 0, 3000, 2000, 1, 700), None), ((5000, 300), 512)):
        call = made(DecodeCase(lengths=lengths, heads=heads, dims=(64, 64), page=16, split=split), device="cuda")
        found = [by_kernel(call, decoding.Cut(aligned)) for aligned in (True, False, True, False)]
        for each, again in zip(found[:2], found[2:], strict=True):
            held(call, *each)
            assert all(map(torch.equal, each, again))
        if split:
            assert all(map(torch.equal, *found[:2]))


WAYS = (0, 4, None)  # `Cut.solo_speedup_x4`


def of_shares(batch: int, longest: int, spread: float, empty: bool) -> tuple[int, ...]:
    """Lengths down to (1 - spread) longest, one of them 0 if that is wanted."""
    draw = torch.Generator().manual_seed(batch + longest)
    lengths = (longest * (1 - spread * torch.rand(batch, generator=draw))).int().tolist()
    return (*lengths[:-1], 0 if empty else longest)


@pytest.mark.parametrize(
    ("batch", "longest"), [(2, 9000), (5, 5000), (16, 1000), (33, 700), (64, 1024), (100, 640), (140, 500), (256, 300)], ids=str
)
@pytest.mark.parametrize(("heads", "queries"), [((8, 1), 1), ((32, 1), 4), ((8, 2), 3), ((8, 2), "ragged")], ids=str)
def test_shares_of_whole_units(batch, longest, heads, queries):
    """Equal, as chosen, and as if blocks were no faster alone: what fp64 says, and the same bits again."""
    for spread, empty in ((0.0, False), (0.1, True), (1.0, True)):
        rows = tuple(i * 7 % 4 for i in range(batch)) if queries == "ragged" else queries
        case = DecodeCase(lengths=of_shares(batch, longest, spread, empty), queries=rows, heads=heads, dims=(128, 128), page=64)
        call = made(case, device="cuda")
        for alone in WAYS:
            cut = decoding.Cut(solo_speedup_x4=alone)
            found = by_kernel(call, cut)
            held(call, *found)
            for _ in range(3):
                assert all(map(torch.equal, found, by_kernel(call, cut)))
            assert not any(counters.any() for _, counters in workspace._KEPT.values())


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256), (576, 512)], ids=str)
def test_whole_units_of_all_dims(dims):
    latent = dims == (576, 512)
    for lengths in ((700,) * 64, (3000, 0, 2900, 3000), tuple(range(0, 1000, 30))):
        for more in ({}, {"mask": SlidingWindow(400, 0)}, {"sink": True, "leftpad": tuple(n // 3 for n in lengths)}):
            call = made(DecodeCase(lengths=lengths, heads=(8, 1), dims=dims, latent=latent, **more), device="cuda")
            for alone in WAYS:
                held(call, *by_kernel(call, decoding.Cut(solo_speedup_x4=alone)))


def test_a_graph_whose_lengths_change_the_shares():
    """Whole units and equal shares, one after the other: each replay has the bits of a fresh call, and is right."""
    batch, most = 64, 2048
    call = made(DecodeCase(lengths=(most,) * batch, heads=(32, 1), dims=(128, 128), page=64), device="cuda")
    static = replace(call, seqlens=torch.ones_like(call.seqlens))
    run(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = run(static)
    ways = [of_shares(batch, n, spread, empty) for n in (most, 1024, 64) for spread, empty in ((0.0, False), (0.05, True), (1.0, True))]
    ways += [(most,) * few + (1,) * (batch - few) for few in (1, 3, 20)] + [(0,) * batch, (most, *(0,) * (batch - 1))]
    for _ in range(20):
        for lengths in ways:
            static.seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
            o.fill_(torch.nan)
            graph.replay()
            assert all(map(torch.equal, (o, lse), run(static)))
    for lengths in ways:
        static.seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        held(static, o, lse)


@pytest.mark.parametrize("page", [0, 5, 16, 64])
def test_indices_in_int64(page):
    """As in int32, one by one and all, with what does not fit there clamped, and without a launch that converts them."""
    for queries, more in (((3, 1, 0, 30, 1), {}), (2, {"leftpad": (5, 3, 200, 0, 3999)} | ({} if page else {"entries": True}))):
        call = made(DecodeCase(lengths=(70, 3, 500, 0, 4000), queries=queries, page=page, **more, **BIG), device="cuda")
        found = run(call)
        for names in (INDICES, *((name,) for name in INDICES)):
            assert all(map(torch.equal, found, run(with_int64(call, names))))
        wide = with_int64(call)
        shorter = replace(wide, seqlens=torch.where(wide.seqlens < 10, -(1 << 40), wide.seqlens))
        held(shorter.in_int32(), *run(shorter))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(wide)
        torch.cuda.synchronize()
    launched = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 1, [event.name for event in launched]


E4M3, INT8 = torch.float8_e4m3fn, torch.int8
EIGHT_DIMS = ((128, 128), (64, 64), (96, 96), (192, 128), (256, 256), (80, 48), (16, 16))


def as_exact(given, exact):
    """The bits of a cache in q's dtype that holds what the given one stands for."""
    found = run(given)
    held(exact, *found)
    assert all(map(torch.equal, found, run(given)))
    config = decoding.config_of(given)
    alike = by_kernel(exact, decoding.Cut(rows=config.tile_m, solo_speedup_x4=config.solo_speedup_x4), tile_n=config.tile_n)
    assert all(map(torch.equal, found, alike))
    assert not any(counters.any() for _, counters in workspace._KEPT.values())
    return found


@pytest.mark.parametrize("dims", EIGHT_DIMS, ids=str)
@pytest.mark.parametrize("page", [0, 4, 16, 64, 256])
def test_caches_of_eight_bits(dims, page):
    for kinds, scales, dtype in (
        ((E4M3, E4M3), (None, None), torch.bfloat16),
        ((E4M3, E4M3), ("token", "token"), torch.bfloat16),
        ((E4M3, E4M3), ("head", "all"), torch.float16),
        ((INT8, E4M3), ("token", "head"), torch.float16),
        ((INT8, INT8), ("all", "token"), torch.bfloat16),
    ):
        call = made(DecodeCase(lengths=RAGGED, heads=(6, 2), dims=dims, page=page, dtype=dtype), device="cuda")
        as_exact(*with_eight_bits(call, kinds, scales))


@pytest.mark.parametrize("case", [
    DecodeCase(lengths=(70, 3, 500, 0, 4000), queries=2, leftpad=(5, 3, 200, 0, 3999), entries=True, **BIG),
    DecodeCase(lengths=(5, 300, 1500, 0), queries=(3, 0, 40, 1), mask=SlidingWindow(100, 0), page=16, **BIG),
    DecodeCase(lengths=(70, 3, 0, 200, 5000), queries=7, tree=7, page=16, **BIG),
    DecodeCase(lengths=RAGGED, queries=3, page=64, softcap=9.0, alibi=True, sink=True, **BIG),
    DecodeCase(lengths=(3, 6000, 129, 4097), queries=2, page=16, split=300, **BIG),
    DecodeCase(lengths=(33_000,), heads=(32, 1), dims=(128, 128)),
    DecodeCase(lengths=(3000, 17, 4097), queries=4, heads=(64, 8), dims=(256, 256), page=5),
], ids=str)  # fmt: skip
def test_eight_bits_of_every_kind_of_call(case):
    for scales in ((None, None), ("head", "head"), ("token", "token")):
        as_exact(*with_eight_bits(made(case, device="cuda"), (E4M3, E4M3), scales))


def test_eight_bits_with_scales_of_sequences():
    for kinds in ((E4M3, E4M3), (INT8, INT8)):
        as_exact(*with_eight_bits(made(DecodeCase(lengths=(300, 0, 5000), **BIG), device="cuda"), kinds, ("sequence", "sequence")))


def test_a_prefix_in_eight_bits(monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    for scales in ((None, None), ("head", "all"), ("token", "token")):
        call = made(DecodeCase(lengths=(1500, 1024, 1030, 4000, 20), prefix=1024, page=16, **BIG), device="cuda")
        given, exact = with_eight_bits(call, (E4M3, E4M3), scales)
        if scales[0] == "token":  # so that all sequences have the prefix's scales too
            given = replace(given, page_table=torch.cat((given.page_table[:1, :64].expand(5, -1), given.page_table[:, 64:]), 1))
            exact = replace(exact, page_table=given.page_table)
        assert prefix.pays(given)
        held(exact, *run(given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_that_are_no_powers_of_two(dtype):
    """Those of heads are not rounded on the way: what is lost is what q's dtype loses anyway."""
    batch, n, (heads, heads_k) = 3, 3000, (8, 2)
    given, _ = with_eight_bits(made(DecodeCase(lengths=(n,) * batch, dtype=dtype, **BIG), device="cuda"), (E4M3, E4M3), (None, None))
    scales = [torch.rand(batch, heads_k, device="cuda") * 0.1 + 0.01 for _ in range(2)]
    o, _ = run(replace(given, k_scale=scales[0], v_scale=scales[1], scale=1.0))

    def formula(kind: torch.dtype):
        k, v = ((x.float() * s[:, None, :, None]).double().to(kind) for x, s in zip((given.k_cache, given.v_cache), scales, strict=True))
        q = given.q.to(kind).unflatten(2, (heads_k, heads // heads_k))[:, 0]
        p = torch.einsum("bhgd,bnhd->bhgn", q, k).softmax(-1)
        return torch.einsum("bhgn,bnhd->bhgd", p, v).flatten(1, 2)[:, None]

    tolerance.check("o", o, formula(torch.float64), formula(dtype))


@pytest.mark.parametrize("page", [0, 16])
def test_eight_bits_in_a_graph_with_other_lengths(page):
    given, exact = with_eight_bits(
        made(DecodeCase(lengths=(4000, 3000, 17, 2500), page=page, **BIG), device="cuda"), (E4M3, E4M3), ("token", "token")
    )
    static = replace(given, seqlens=torch.ones_like(given.seqlens))
    run(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(static)
    static.seqlens.copy_(given.seqlens)
    for _ in range(20):
        graph.replay()
        held(exact, *found)


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("wild", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_pages_of_eight_bits_that_do_not_exist(wild, page):
    call, _ = with_eight_bits(made(DecodeCase(lengths=(300, 300), page=page, **BIG), device="cuda"), (E4M3, INT8), ("token", "token"))
    o, lse = run(call)
    table = call.page_table.clone()
    table[0, 3] = wild
    spoiled, of_spoiled = run(replace(call, page_table=table))
    torch.cuda.synchronize()
    assert torch.equal(spoiled[1], o[1]) and torch.equal(of_spoiled[1], lse[1])
    assert spoiled.isfinite().all() and not torch.equal(spoiled[0], o[0])


@pytest.mark.parametrize("batch", [31, 32, 33, 100, 257, 1000])
def test_batches(batch):
    draw = torch.Generator().manual_seed(batch)
    lengths = tuple(torch.randint(0, 150, (batch,), generator=draw).tolist())
    checked(DecodeCase(lengths=lengths, heads=(4, 2), dims=(64, 64), page=16))


def test_lengths_beyond_the_cache_and_below_nothing():
    call = made(DecodeCase(lengths=(100, 100, 100), **BIG), device="cuda")
    call = replace(call, seqlens=torch.tensor([100_000, -5, 100], dtype=torch.int32, device="cuda"))
    held(call, *run(call))


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("wild", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_pages_that_do_not_exist(wild, page):
    """They are read as zeros, without a fault, and nobody else's result changes."""
    call = made(DecodeCase(lengths=(300, 300), page=page, **BIG), device="cuda")
    o, lse = run(call)
    table = call.page_table.clone()
    table[0, 3] = wild
    spoiled, of_spoiled = run(replace(call, page_table=table))
    torch.cuda.synchronize()
    assert torch.equal(spoiled[1], o[1]) and torch.equal(of_spoiled[1], lse[1])
    assert spoiled.isfinite().all() and not torch.equal(spoiled[0], o[0])


def test_a_page_that_sequences_share():
    call = made(DecodeCase(lengths=(128, 128), page=64, **BIG), device="cuda")
    table = call.page_table.clone()
    table[1] = table[0]
    call = replace(call, page_table=table)
    held(call, *run(call))


@pytest.mark.parametrize("page", [0, 16])
def test_graph_captured_at_short_lengths(page):
    """And replayed at long ones, with other pages: as a fresh call, bit for bit."""
    call = made(DecodeCase(lengths=(4000, 3000, 17, 2500), page=page, **BIG), device="cuda")
    lengths, static = call.seqlens, replace(call, seqlens=torch.ones_like(call.seqlens), q=call.q.clone())
    run(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = run(static)
    draw = torch.Generator().manual_seed(0)
    for turn in range(50):
        now = lengths if turn == 0 else (lengths.cpu() * torch.rand(4, generator=draw)).int().cuda()
        static.seqlens.copy_(now)
        static.q.normal_()
        graph.replay()
        want = run(replace(static, seqlens=now))
        assert torch.equal(o, want[0]) and torch.equal(lse, want[1])
    held(static, o, lse)


def test_graph_captured_before_any_call():
    bound._KEPT.clear()
    workspace._RESERVES.clear()
    call = made(DecodeCase(lengths=(4000, 30), **BIG), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = run(call)
    for _ in range(3):
        graph.replay()
        held(call, o, lse)


def test_two_streams():
    calls = [made(DecodeCase(lengths=(9000, 3000 + i), heads=(8, 2), dims=(128, 128)), i, "cuda") for i in range(2)]
    want = [run(call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(call))
        torch.cuda.synchronize()
        for got, expected in zip(found, want, strict=True):
            assert all(map(torch.equal, got, expected))


def test_growing_lengths():
    """Replay after replay the same bits as a fresh call."""
    call = made(DecodeCase(lengths=(3000, 2000, 1000), page=16, **BIG), device="cuda")
    grown = replace(call, seqlens=torch.ones_like(call.seqlens))
    run(grown)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        o, lse = run(grown)
    for _ in range(990):
        grown.seqlens.add_(1)
        graph.replay()
        want = run(grown)
        assert torch.equal(o, want[0]) and torch.equal(lse, want[1])


@pytest.mark.slow
def test_a_cache_of_more_than_two_to_the_31_numbers():
    pages, page, heads = 70_000, 64, 8
    k, v = (torch.empty(pages, page, heads, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    call = made(DecodeCase(lengths=(640, 100), page=page, heads=(8, 8), dims=(64, 64)), device="cuda")
    table = call.page_table.clamp(0, call.k_cache.shape[0] - 1) + (pages - call.k_cache.shape[0])
    k[-call.k_cache.shape[0] :], v[-call.v_cache.shape[0] :] = call.k_cache, call.v_cache
    large = replace(call, k_cache=k, v_cache=v, page_table=table.int())
    assert k.numel() > 2**31
    assert all(map(torch.equal, run(large), run(call)))


def test_tensors_that_do_not_lie_as_the_kernel_wants_them():
    call = made(DecodeCase(lengths=(100, 70), **BIG), device="cuda")
    want = run(call)
    apart = torch.empty(call.q.numel() + 1, dtype=call.q.dtype, device="cuda")[1:].view(call.q.shape)
    apart.copy_(call.q)
    strided = torch.zeros(*call.k_cache.shape, 2, dtype=call.k_cache.dtype, device="cuda")[..., 0]
    strided.copy_(call.k_cache)
    for changed in (replace(call, q=apart), replace(call, k_cache=strided), replace(call, seqlens=call.seqlens.repeat_interleave(2)[::2])):
        assert all(map(torch.equal, run(changed), want))


def test_nothing_is_read_on_the_host():
    call = made(DecodeCase(lengths=(300, 17), page=16, **BIG), device="cuda")
    run(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_repeated_call_takes_the_host_little_time():
    call = made(DecodeCase(lengths=(64,), **BIG), device="cuda")
    least = float("inf")
    for _ in range(30):
        run(call)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            run(call)
        least = min(least, (time.perf_counter() - begin) / 100)
    assert least < 40e-6
