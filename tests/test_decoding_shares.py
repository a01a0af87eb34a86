"""decode and append where the caches hold a rank's share of every sequence: all ranks' results, merged, are held to the oracle of the whole."""

import math
from dataclasses import replace

import decode_shares
import pytest
import torch
from decode_problems import DecodeCase, made, with_eight_bits, with_int64, with_rotary

import tilewise as tw
from tilewise.masks import Causal, ChunkedCausal, Dense, FirstKeys, Full, PrefixLM, SlidingWindow
from tilewise.problem import Share
from tilewise.rotary import rotated

CHANGES = {"softcap": 5.0, "alibi": True, "sink": True}
CASES = [  # case, world, interleave, tokens of a page
    (DecodeCase(lengths=(0, 1, 63, 130, 7), dtype=torch.float32), 3, 1, 0),
    (DecodeCase(lengths=(70, 2, 300, 9), queries=4, heads=(6, 2), sink=True, softcap=4.0), 2, 16, 16),
    (
        DecodeCase(lengths=(70, 2, 300, 9), queries=(3, 1, 0, 20), heads=(6, 2), mask=SlidingWindow(40, 0), dtype=torch.float16, sink=True),
        4,
        3,
        7,
    ),
    (DecodeCase(lengths=(90, 40), queries=30, dims=(40, 24), **CHANGES), 2, 5, 0),
    (DecodeCase(lengths=(70, 3, 0, 40), queries=2, leftpad=(5, 3, 0, 20), entries=True, mask=Causal(offset=-2)), 3, 4, 0),
    (DecodeCase(lengths=(70, 3, 0, 100), queries=7, tree=7, dtype=torch.float32), 2, 1, 0),
    (DecodeCase(lengths=(33, 150), queries=3, mask=PrefixLM(4) & SlidingWindow(60, 0), dtype=torch.float64), 2, 8, 16),
    (DecodeCase(lengths=(33, 150), queries=2, mask=Full(), alibi=True, dtype=torch.float64), 5, 2, 0),
    (DecodeCase(lengths=(70, 2, 300), queries=(3, 1, 9), mask=FirstKeys(5) | SlidingWindow(30, 0), sink=True), 3, 4, 16),  # several bands
    (DecodeCase(lengths=(70, 150), queries=4, mask=ChunkedCausal(40), dtype=torch.float32), 2, 1, 0),
    (DecodeCase(lengths=(2100, 1), split=64), 2, 1, 0),
    (DecodeCase(lengths=(5, 9), queries=2, dtype=torch.float32), 8, 16, 0),  # most ranks hold nothing
]


def by_public(backend=None):
    """decode, as its caller has it."""

    def compute(call):
        cos, sin, interleaved = call.rotary or (None, None, False)
        rank, world, interleave = call.share
        return tw.decode(
            call.q, call.k_cache, call.v_cache, cache_seqlens=call.seqlens, page_table=call.page_table, cu_seqlens_q=call.cu_seqlens_q,
            cache_batch_idx=call.cache_batch_idx, leftpad=call.leftpad, tree=call.tree, split=call.split, mask=call.mask, causal=False,
            softcap=call.softcap, alibi_slopes=None if call.alibi_slopes is None else call.alibi_slopes[0], sink=call.sink,
            k_scale=call.k_scale, v_scale=call.v_scale, rotary_cos=cos, rotary_sin=sin, interleaved=interleaved, backend=backend,
            cp_rank=rank, cp_world=world, cp_interleave=interleave, return_lse=True,
        )  # fmt: skip

    return compute


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize(("case", "world", "interleave", "page"), CASES, ids=str)
def test_cases(case, world, interleave, page, backend):
    if case.dtype == torch.float64 and backend == "cpu":
        pytest.skip("the CPU's kernels take no fp64")
    decode_shares.check(made(case), by_public(backend), world, interleave, page)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_eight_bits_and_rotary(index):
    """Scales by token lie as the share; queries are turned to their positions in the whole sequence."""
    call = made(DecodeCase(lengths=(70, 1, 200, 0), queries=2, dtype=torch.float32))
    eight, exact = with_eight_bits(call, (torch.float8_e4m3fn, torch.int8), ("token", "head"))
    eight = replace(eight, seqlens=eight.seqlens.to(index))
    decode_shares.check(eight, by_public(), 3, 4, 16, exact=exact)
    turned, exact = with_rotary(call, 16, True)
    decode_shares.check(turned, by_public(), 2, 1, 0, exact=exact)


def test_a_dense_mask_spans_all_ranks():
    call, world = made(DecodeCase(lengths=(70, 30), queries=3, dtype=torch.float32)), 2
    shown = torch.rand(2, 4, 3, 70, generator=torch.Generator().manual_seed(1)) < 0.5
    shown[..., 0] = True

    def compute(each):
        spanned = torch.zeros(*shown.shape[:3], world * each.k_cache.shape[1], dtype=torch.bool)
        spanned[..., :70] = shown[..., : spanned.shape[-1]]
        return by_public()(replace(each, mask=Dense(spanned)))

    decode_shares.check(replace(call, mask=Dense(shown)), compute, world, 1)


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4)])
def test_new_tokens_are_written_by_those_who_hold_them(world, interleave, page):
    """decode with k and v gives what it gives where they lie there already, and leaves the caches so; append writes the same."""
    case = DecodeCase(lengths=(21, 9, 40), queries=5, dtype=torch.float32)
    call, exact = with_rotary(made(case), 16, False)
    new = torch.Generator().manual_seed(3)
    k, v = (torch.randn(3, 5, 2, 64, generator=new) for _ in "kv")
    positions = call.seqlens[:, None] - 5 + torch.arange(5)
    cos, sin, _ = call.rotary
    turned = rotated(k, cos, sin, positions, interleaved=False)
    k_cache, v_cache = call.k_cache.clone(), call.v_cache.clone()
    for b, n in enumerate(case.lengths):
        k_cache[b, n - 5 : n], v_cache[b, n - 5 : n] = turned[b], v[b]
    whole = replace(call, k_cache=k_cache, v_cache=v_cache)

    def compute(each):
        rank = each.share
        want = each.k_cache.clone(), each.v_cache.clone()
        of_k, of_v = each.k_cache.clone(), each.v_cache.clone()
        for b, n in enumerate(case.lengths):  # what is to be written is NaN before
            for j in range(rank.held(n - 5), rank.held(n)):
                at = (b, j) if each.page_table is None else (int(each.page_table[b, j // page]), j % page)
                of_k[at] = of_v[at] = math.nan
        words = {"cache_seqlens": each.seqlens - 5, "page_table": each.page_table, "rotary_cos": cos, "rotary_sin": sin}
        words |= {"cp_rank": rank.rank, "cp_world": world, "cp_interleave": interleave}
        alone = of_k.clone(), of_v.clone()
        tw.append(*alone, k, v, **words)
        found = tw.decode(each.q, of_k, of_v, k=k, v=v, return_lse=True, check=True, **words)
        for mine in ((of_k, of_v), alone):
            for x, y in zip(mine, want, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        return found

    decode_shares.check(whole, compute, world, interleave, page, exact=replace(exact, k_cache=k_cache, v_cache=v_cache))


def test_packed_documents_in_pages():
    """attention_varlen with a page table is decode."""

    def compute(each):
        rank, world, interleave = each.share
        return tw.attention_varlen(
            each.q, each.k_cache, each.v_cache, each.cu_seqlens_q, seqused_k=each.seqlens, page_table=each.page_table, causal=True,
            cp_rank=rank, cp_world=world, cp_interleave=interleave, return_lse=True,
        )  # fmt: skip

    call = made(DecodeCase(lengths=(70, 2, 33), queries=(30, 1, 0), dtype=torch.float32))
    decode_shares.check(call, compute, 2, 4, 8)
    with pytest.raises(tw.UnsupportedError, match="cp_world needs page_table="):
        tw.attention_varlen(call.q, call.q, call.q, torch.tensor([0, 36]), torch.tensor([0, 36]), cp_world=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("queries", [2, (3, 1, 0, 20)])
@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_what_is_to_be_merged_need_not_be_rounded(backend, queries, dtype):
    """An `out` in fp32: what the CPU's kernels had before they rounded it."""
    call = made(DecodeCase(lengths=(70, 2, 300, 9), queries=queries, sink=True, dtype=dtype))
    words = {"cache_seqlens": call.seqlens, "cu_seqlens_q": call.cu_seqlens_q, "sink": call.sink, "backend": backend}
    plain = tw.decode(call.q, call.k_cache, call.v_cache, **words)
    out = torch.full(plain.shape, math.nan)
    assert tw.decode(call.q, call.k_cache, call.v_cache, out=out, **words) is out and torch.equal(out.to(dtype), plain)
    assert torch.equal(out, plain.float()) is (backend == "tiled")
    with pytest.raises(tw.ShapeError, match="out must be"):
        tw.decode(call.q.float(), call.k_cache.float(), call.v_cache.float(), out=out.to(dtype), **words)


def test_a_world_of_one_is_no_share():
    call = made(DecodeCase(lengths=(70, 2), dtype=torch.float32))
    words = {"cache_seqlens": call.seqlens, "return_lse": True}
    plain = tw.decode(call.q, call.k_cache, call.v_cache, **words)
    assert all(map(torch.equal, plain, tw.decode(call.q, call.k_cache, call.v_cache, cp_interleave=16, **words)))


def test_under_torch_compile():
    call = decode_shares.of_rank(made(DecodeCase(lengths=(70, 2, 33), queries=2, dtype=torch.float32)), Share(1, 2, 4))

    def decode(q, k, v, n):
        return tw.decode(q, k, v, cache_seqlens=n, cp_rank=1, cp_world=2, cp_interleave=4)

    given = call.q, call.k_cache, call.v_cache, call.seqlens
    assert torch.equal(decode(*given), torch.compile(decode, fullgraph=True, backend="aot_eager")(*given))


BAD = {
    "cp_rank must be below cp_world": {"cp_rank": 2, "cp_world": 2},
    "cp_rank must be an integer": {"cp_rank": -1, "cp_world": 2},
    "cp_world must be an integer": {"cp_world": 0},
    "cp_interleave must be an integer": {"cp_interleave": 1.5},
    "fit 32 bits": {"cp_world": 1 << 20, "cp_interleave": 1 << 20},
    "cache_seqlens must be given with cp_world": {"cp_world": 2, "cache_seqlens": None},
    "of which rank 1 of 2 holds 71": {"cp_rank": 1, "cp_world": 2, "cache_seqlens": 142},
    "sink": {"cp_rank": 1, "cp_world": 2, "sink": torch.zeros(3)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    call = made(DecodeCase(lengths=(70, 2), dtype=torch.float32))
    with pytest.raises((ValueError, tw.ShapeError), match=message):
        tw.decode(call.q, call.k_cache, call.v_cache, **{"cache_seqlens": 12} | BAD[message])


def test_slots_know_no_ranks():
    cache = torch.zeros(2, 4, 1, 16)
    with pytest.raises(tw.ShapeError, match="slots says where each token goes, so cp_world"):
        tw.append(cache, cache.clone(), torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), slots=torch.zeros(1, dtype=torch.int32), cp_world=2)


def test_indices_in_int64():
    call = with_int64(made(DecodeCase(lengths=(70, 2, 20), queries=(3, 0, 1), dtype=torch.float32)))
    decode_shares.check(call, by_public(), 3, 2, 4)
