"""Caches of flash_attn 2 and 3: appending in place, rotary positions, rows and pages, padding; held to the oracle by sequence, the rest NaN."""

import pytest
import torch
from peer_oracle import call_of, check, randn

import tilewise as tw
from tilewise.compat import _translate, flash_attn, flash_attn_3

HEADS, DIM, CAPACITY, BATCH = (4, 2), 32, 23, 3
LENGTHS = torch.tensor([9, 0, 17], dtype=torch.int32)
LEFTPAD = torch.tensor([3, 0, 16], dtype=torch.int32)
ROWS = torch.tensor([4, 0, 2], dtype=torch.int32)
PAGE = 5
ANGLES = torch.rand(64, 8, generator=torch.Generator().manual_seed(3)) * 6.0


def turned(x: torch.Tensor, positions, interleaved: bool) -> torch.Tensor:
    """x (seqlen, heads, dim) whose first 16 dimensions are rotated, as complex numbers in fp64."""
    first = x[..., :16].double()
    pairs = first.unflatten(-1, (8, 2)) if interleaved else first.unflatten(-1, (2, 8)).transpose(-1, -2)
    z = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.polar(torch.ones(8, dtype=torch.float64), ANGLES[positions].double())[:, None]
    pairs = torch.view_as_real(z)
    first = (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)
    return torch.cat((first.to(x.dtype), x[..., 16:]), -1)


class Case:
    """A cache with NaN wherever nothing may be read, what every sequence holds in it, and the arguments that say so."""

    def __init__(self, layout: str, dtype: torch.dtype = torch.float32):
        self.lengths, self.first = LENGTHS.clone(), torch.zeros_like(LEFTPAD)
        shape = (BATCH + 2 if "rows" in layout else BATCH, CAPACITY)
        self.words, self.table = {}, None
        rows, paged = torch.arange(BATCH), "pages" in layout
        if "rows" in layout:
            self.words["cache_batch_idx"] = ROWS
            rows = ROWS.long()
        if "pad" in layout:
            self.words["cache_leftpad"] = self.first = LEFTPAD
        if paged:
            shape = (26, PAGE)
            self.table = torch.randperm(26, generator=torch.Generator().manual_seed(1), dtype=torch.int32)[:25].reshape(5, 5)
            self.table = self.table if "rows" in layout else self.table[:BATCH]
        self.k, self.v = (torch.full((*shape, HEADS[1], DIM), torch.nan, dtype=dtype) for _ in range(2))
        self.slots = [
            (self.table[rows[b], torch.arange(25) // PAGE].long(), torch.arange(25) % PAGE) if paged else (rows[b], torch.arange(CAPACITY))
            for b in range(BATCH)
        ]
        for seed, cache in ((11, self.k), (12, self.v)):
            for b in range(BATCH):
                span = slice(int(self.first[b]), int(self.lengths[b]))
                cache[self._at(b, span)] = randn(span.stop - span.start, HEADS[1], DIM, seed=seed + 10 * b, dtype=dtype)

    def _at(self, b: int, span: slice):
        return tuple(index[span] if index.dim() else index for index in self.slots[b])

    def sequence(self, cache: torch.Tensor, b: int, more: int = 0) -> torch.Tensor:
        return cache[self._at(b, slice(int(self.first[b]), int(self.lengths[b]) + more))][None]


SCORES = {
    "full": ({}, tw.Full(), {}),
    "causal": ({"causal": True}, tw.Causal(), {}),
    "window": ({"window_size": (4, 1), "softcap": 3.0}, tw.SlidingWindow(4, 1), {"softcap": 3.0}),
}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("rotary", [None, False, True], ids=["", "halves", "interleaved"])
@pytest.mark.parametrize("layout", ["plain", "rows", "pad", "rows pad", "pages", "rows pad pages"])
def test_appending(layout, rotary, scores):
    options, mask, fields = SCORES[scores]
    case, new = Case(layout), 4
    q, k, v = randn(BATCH, new, HEADS[0], DIM, seed=5), randn(BATCH, new, HEADS[1], DIM, seed=6), randn(BATCH, new, HEADS[1], DIM, seed=7)
    words = dict(case.words) | options
    if rotary is not None:
        words |= {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin(), "rotary_interleaved": rotary}
    before = case.k.clone(), case.v.clone()
    lengths = case.lengths.clone()
    o, lse = flash_attn.flash_attn_with_kvcache(
        q, case.k, case.v, k, v, cache_seqlens=lengths, block_table=case.table, return_softmax_lse=True, **words
    )
    assert torch.equal(lengths, LENGTHS), "cache_seqlens must not advance"
    for b in range(BATCH):
        at = range(int(lengths[b]), int(lengths[b]) + new)
        one = q[b] if rotary is None else turned(q[b], list(at) if options.get("causal") or scores == "window" else [at[0]] * new, rotary)
        keys = k[b] if rotary is None else turned(k[b], list(at), rotary)
        torch.testing.assert_close(case.k[case._at(b, slice(at.start, at.stop))], keys)
        assert torch.equal(case.v[case._at(b, slice(at.start, at.stop))], v[b])
        call = call_of(one[None], case.sequence(case.k, b, new), case.sequence(case.v, b, new), mask, **fields)
        if rotary is None:
            check(call, o[b : b + 1], _translate.negative_infinity(lse[b : b + 1]))
        else:  # q and the keys were rotated in another arithmetic
            torch.testing.assert_close(o[b : b + 1], tw.attention(call.q, call.k, call.v, mask=mask, **fields), atol=2e-5, rtol=2e-5)
        for cache in (case.k, case.v, *before):
            cache[case._at(b, slice(at.start, at.stop))] = 0.0
    for cache, kept in zip((case.k, case.v), before, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), kept.nan_to_num(7.0)), "only the new tokens' slots are written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["plain", "rows", "pad", "rows pad", "pages", "rows pad pages"])
def test_reading(layout, dtype):
    """More queries than some sequences have keys: rows that see none have O = 0 and LSE = +inf, in the peer's third generation -inf."""
    case = Case(layout, dtype)
    q, slopes = randn(BATCH, 3, HEADS[0], DIM, seed=5, dtype=dtype), torch.tensor([0.5, 0.1, 0.0, 0.2])
    words = case.words | {"cache_seqlens": LENGTHS, "causal": True, "return_softmax_lse": True}
    o, lse = flash_attn.flash_attn_with_kvcache(q, case.k, case.v, block_table=case.table, alibi_slopes=slopes, **words)
    third, third_lse = flash_attn_3.flash_attn_with_kvcache(q, case.k, case.v, page_table=case.table, **words)
    for b in range(BATCH):
        k, v = case.sequence(case.k, b), case.sequence(case.v, b)
        check(call_of(q[b : b + 1], k, v, tw.Causal(), alibi_slopes=slopes), o[b : b + 1], _translate.negative_infinity(lse[b : b + 1]))
        check(call_of(q[b : b + 1], k, v, tw.Causal()), third[b : b + 1], third_lse[b : b + 1])
    assert (lse[1] == torch.inf).all() and (third_lse[1] == -torch.inf).all() and (o[1] == 0).all()


def test_lengths_for_all_and_none():
    case = Case("plain")
    k, v, q = case.k.nan_to_num(0.5), case.v.nan_to_num(0.5), randn(BATCH, 2, HEADS[0], DIM)
    check(call_of(q, k, v, tw.Full()), flash_attn.flash_attn_with_kvcache(q, k, v))
    check(call_of(q, k[:, :6], v[:, :6], tw.Causal()), flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=6, causal=True))


def test_a_strided_cache_is_written_in_place():
    both = torch.zeros(BATCH, 2, HEADS[1], CAPACITY, DIM)
    k_cache, v_cache = (x.transpose(1, 2) for x in both.unbind(1))
    q, k = randn(BATCH, 1, HEADS[0], DIM), randn(BATCH, 1, HEADS[1], DIM)
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=LENGTHS, cache_leftpad=LEFTPAD)
    assert (
        all(torch.equal(both[b, :, :, LENGTHS[b]], k[b, 0].expand(2, -1, -1)) for b in range(BATCH))
        and both.count_nonzero() == 2 * k.numel()
    )


def test_it_compiles_whole():
    q, k, table = randn(BATCH, 1, HEADS[0], DIM), randn(BATCH, 1, HEADS[1], DIM), torch.arange(6, dtype=torch.int32).reshape(BATCH, 2)
    eager, compiled = (tuple(randn(6, 16, HEADS[1], DIM, seed=seed) for seed in (1, 2)) for _ in range(2))

    def function(k_cache, v_cache):
        tables = {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin()}
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, k, cache_seqlens=LENGTHS, block_table=table, causal=True, **tables
        )

    expected = function(*eager)
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(*compiled), expected)
    assert all(map(torch.equal, eager, compiled))


def test_no_gradient_is_asked_for():
    """As the peer: parameters may want gradients, the cache gives none."""
    case = Case("plain")
    q = randn(BATCH, 1, HEADS[0], DIM).requires_grad_()
    assert not flash_attn.flash_attn_with_kvcache(q, case.k, case.v, q[:, :, :2] * 2, q[:, :, :2], cache_seqlens=LENGTHS).requires_grad


@pytest.mark.parametrize("rotary", [None, True, False], ids=["", "interleaved", "halves"])
@pytest.mark.parametrize("layout", ["plain", "rows pad", "pages", "rows pad pages"])
def test_packed_queries_and_keys(layout, rotary):
    """FlashAttention-3: q packed by cu_seqlens_q, new keys by cu_seqlens_k_new, rotated from rotary_seqlens on."""
    case = Case(layout)
    cu_q, cu_new = torch.tensor([0, 3, 4, 8], dtype=torch.int32), torch.tensor([0, 2, 5, 5], dtype=torch.int32)
    q, k, v = randn(8, HEADS[0], DIM, seed=5), randn(5, HEADS[1], DIM, seed=6), randn(5, HEADS[1], DIM, seed=7)
    words, start = dict(case.words), torch.tensor([20, 1, 7], dtype=torch.int32)
    if rotary is not None:
        words |= {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin(), "rotary_interleaved": rotary, "rotary_seqlens": start}
    o, lse = flash_attn_3.flash_attn_with_kvcache(
        q,
        case.k,
        case.v,
        k,
        v,
        cache_seqlens=LENGTHS,
        page_table=case.table,
        cu_seqlens_q=cu_q,
        cu_seqlens_k_new=cu_new,
        max_seqlen_q=4,
        causal=True,
        return_softmax_lse=True,
        **words,
    )
    assert o.shape == q.shape and lse.shape == (HEADS[0], 8)
    for b in range(BATCH):
        (q0, q1), (n0, n1) = (cu[b : b + 2].tolist() for cu in (cu_q, cu_new))
        one, keys, first = q[q0:q1], k[n0:n1], int(start[b])
        if rotary is not None:
            one, keys = turned(one, list(range(first, first + q1 - q0)), rotary), turned(keys, list(range(first, first + n1 - n0)), rotary)
        torch.testing.assert_close(case.k[case._at(b, slice(int(LENGTHS[b]), int(LENGTHS[b]) + n1 - n0))], keys)
        k_all, v_all = case.sequence(case.k, b, n1 - n0), case.sequence(case.v, b, n1 - n0)
        if rotary is None:
            check(call_of(one[None], k_all, v_all, tw.Causal()), o[None, q0:q1], lse[None, :, q0:q1])
        else:
            torch.testing.assert_close(o[None, q0:q1], tw.attention(one[None], k_all, v_all, causal=True), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("layout", ["plain", "pages"])
def test_two_parts_of_scores(layout):
    """qv: scores are q k + qv v, as MLA absorbs its projections."""
    case = Case(layout)
    q, qv = randn(BATCH, 2, HEADS[0], DIM, seed=5), randn(BATCH, 2, HEADS[0], DIM, seed=6)
    o, lse = flash_attn_3.flash_attn_with_kvcache(
        q, case.k, case.v, qv=qv, cache_seqlens=LENGTHS, page_table=case.table, causal=True, return_softmax_lse=True
    )
    for b in range(BATCH):
        k, v = case.sequence(case.k, b), case.sequence(case.v, b)
        call = call_of(torch.cat((q, qv), -1)[b : b + 1], torch.cat((k, v), -1), v, tw.Causal())
        check(call, o[b : b + 1], lse[b : b + 1])


Q, CACHE = torch.zeros(2, 1, 4, 32), torch.zeros(2, 8, 2, 32)
TABLE = torch.zeros(2, 1, dtype=torch.int32)


def call(**words):
    arguments = {"q": Q, "k_cache": CACHE, "v_cache": CACHE} | words
    return lambda: flash_attn.flash_attn_with_kvcache(**arguments)


NEW = {"k": torch.ones(2, 1, 2, 32), "v": torch.ones(2, 1, 2, 32)}
TURN = {"rotary_cos": torch.zeros(8, 8), "rotary_sin": torch.zeros(8, 8)}
WRONG = {
    "full": (
        call(**NEW, cache_seqlens=8),
        r"cache_seqlens\[0\] is 9 with the new tokens, but the cache holds between 0 and 8 tokens a sequence; make it larger",
    ),
    "long": (call(cache_seqlens=torch.tensor([3, 9])), r"cache_seqlens\[1\] is 9, but the cache holds between 0 and 8"),
    "pages": (call(cache_seqlens=9, block_table=TABLE), r"cache_seqlens\[0\] is 9, .* block_table has 1 pages of 8 tokens a sequence"),
    "no page": (call(cache_seqlens=3, block_table=TABLE + 2), r"block_table"),
    "no page to write": (
        call(**NEW, cache_seqlens=3, block_table=TABLE - 1),
        r"block_table\[0\] names pages \[-1\], but k_cache has pages 0..1",
    ),
    "row": (call(cache_batch_idx=torch.tensor([0, 2])), r"cache_batch_idx must be between 0 and 1, got \[0, 2\]"),
    "pad": (
        call(cache_seqlens=3, cache_leftpad=torch.tensor([0, 4])),
        r"cache_leftpad \[0, 4\] is beyond the lengths of the sequences, \[3, 3\]",
    ),
    "where": (call(**NEW), "cache_seqlens must be given with k"),
    "half": (call(k=NEW["k"], cache_seqlens=3), "v is missing: k and v are appended together"),
    "rotary alone": (call(**TURN), "rotary_cos needs new keys k and v"),
    "rotary half": (call(**NEW, cache_seqlens=3, rotary_cos=TURN["rotary_cos"]), "rotary_cos and rotary_sin must both be given"),
    "rotary_dim": (
        call(**NEW, cache_seqlens=3, rotary_cos=torch.zeros(8, 3), rotary_sin=torch.zeros(8, 3)),
        "rotary_dim must be a multiple of 16",
    ),
    "short tables": (
        call(**NEW, cache_seqlens=3, rotary_cos=torch.zeros(3, 8), rotary_sin=torch.zeros(3, 8)),
        "cos and sin have 3 positions, but x reaches position 3",
    ),
    "dtype": (call(k=NEW["k"].double(), v=NEW["v"], cache_seqlens=3), "k is torch.float64, but k_cache is torch.float32"),
    "batch": (call(k_cache=CACHE[:1], v_cache=CACHE[:1]), "k_cache has batch 1, but q has batch 2"),
    "slopes": (call(**NEW, cache_seqlens=3, alibi_slopes=torch.ones(3)), "alibi_slopes has heads_q 3, but q has heads_q"),
    "slopes of sequences": (
        call(**NEW, cache_seqlens=3, alibi_slopes=torch.ones(3, Q.shape[2])),
        "alibi_slopes has batch 3, but q has batch 2",
    ),
    "padding": (call(**NEW, cache_seqlens=3, cache_leftpad=torch.tensor([0, -1])), "leftpad must not be negative"),
    "much padding": (call(**NEW, cache_seqlens=3, cache_leftpad=torch.tensor([99, 0])), "leftpad .* is beyond the lengths"),
    "row of pages": (
        call(block_table=TABLE, cache_batch_idx=torch.tensor([0, 2])),
        r"cache_batch_idx must be between 0 and 1, got \[0, 2\]",
    ),
}


@pytest.mark.parametrize("call, words", WRONG.values(), ids=WRONG)
def test_refusals(call, words):
    with pytest.raises(RuntimeError, match=words) as caught:
        call()
    assert str(caught.value).startswith("tilewise.compat.flash_attn.flash_attn_with_kvcache: ")
    assert CACHE.count_nonzero() == 0


HEADS_OF_QUERIES, CU = torch.zeros(3, 4, 32), torch.tensor([0, 1, 3], dtype=torch.int32)
EIGHT = CACHE.to(torch.float8_e4m3fn)
WRONG_OF_THE_THIRD = {
    "bounds": ({"cu_seqlens_q": [0, 1, 3]}, "cu_seqlens_q must be a torch.Tensor of shape"),
    "bounds beyond": ({"cu_seqlens_q": CU + 1}, r"cu_seqlens_q must start at 0, .* got \[1, 2, 4\]"),
    "no bounds": ({"cu_seqlens_q": CU[:0]}, r"cu_seqlens_q must have batch \+ 1 entries"),
    "new bounds": ({"cu_seqlens_k_new": CU.float()}, "cu_seqlens_k_new must be int32 or int64, got float32"),
    "heads": ({"q": HEADS_OF_QUERIES[:, :3]}, "q has heads_q=3 and k has heads_k=2"),
    "head_dim": ({"q": HEADS_OF_QUERIES[..., :24]}, "k_cache has head_dim 32, but q has head_dim 24"),
    "first positions": ({"rotary_seqlens": CU[:1]}, "rotary_seqlens has batch 1, but q has batch 2"),
    "no first positions": ({"rotary_seqlens": 3}, "rotary_seqlens must be a torch.Tensor"),
    "tables": ({"rotary_sin": ANGLES[:9]}, r"rotary_sin has shape .*9, 8.*, but rotary_cos has shape"),
    "qv's heads": ({"qv": HEADS_OF_QUERIES[:, :2]}, "qv has shape before head_dim .*3, 2.*, but q has shape before head_dim .*3, 4"),
    "qv": ({"qv": [1.0]}, "qv must be a torch.Tensor"),
    "a sink's heads": ({"s_aux": torch.ones(3)}, "s_aux has heads_q 3, but q has"),
    "padding": ({"cache_leftpad": torch.tensor([0, 9])}, "leftpad .* is beyond the lengths"),
    "bounds of nothing": ({"cu_seqlens_q": torch.tensor(0)}, "cu_seqlens_q must have"),
    "q_descale": ({"q": HEADS_OF_QUERIES.to(EIGHT.dtype), "q_descale": torch.ones(3, 2)}, "q_descale has batch 3, but q has batch 2"),
    "heads of q_descale": (
        {"q": HEADS_OF_QUERIES.to(EIGHT.dtype), "q_descale": torch.ones(2, 1)},
        "q_descale has heads_k 1, but k_cache has",
    ),
    "v_descale": (
        {
            "q": HEADS_OF_QUERIES.to(EIGHT.dtype),
            "k_cache": EIGHT,
            "v_cache": EIGHT,
            "v_descale": torch.ones(3, 2),
        },
        "v_descale has batch 3, but q has batch 2",
    ),
}


@pytest.mark.parametrize("changes, words", WRONG_OF_THE_THIRD.values(), ids=WRONG_OF_THE_THIRD)
def test_refusals_of_the_third_generation(changes, words):
    """In its own words, and before anything is appended."""
    given = {"q": HEADS_OF_QUERIES, "k_cache": CACHE, "v_cache": CACHE.clone(), "k": torch.ones(3, 2, 32), "v": torch.ones(3, 2, 32)}
    given |= {"cache_seqlens": torch.tensor([1, 2]), "cu_seqlens_q": CU, "cu_seqlens_k_new": CU, "causal": True}
    if "v_descale" in changes:
        given |= {name: torch.ones(3, 2, 32).to(EIGHT.dtype) for name in "kv"}
    given |= {} if "v_descale" in changes else {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin()}
    with pytest.raises(RuntimeError, match=words) as caught:
        flash_attn_3.flash_attn_with_kvcache(**given | changes)
    assert str(caught.value).startswith("tilewise.compat.flash_attn_3.flash_attn_with_kvcache: ")
    assert CACHE.count_nonzero() == 0 and EIGHT.float().count_nonzero() == 0


def test_pages_of_one_sequence_may_be_shared():
    """Decoding with a common prefix: sequences read the same pages."""
    case = Case("plain")
    k, v = case.k.nan_to_num(0.3), case.v.nan_to_num(0.3)
    q = randn(BATCH, 1, HEADS[0], DIM)
    o = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=20, block_table=torch.zeros(BATCH, 1, dtype=torch.int32), causal=True)
    check(call_of(q, k[:1, :20].expand(BATCH, -1, -1, -1), v[:1, :20].expand(BATCH, -1, -1, -1), tw.Causal()), o)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window_size": (5, 0), "s_aux": torch.linspace(-1, 2, HEADS[0])}, {"softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("pages", [0, 4])
def test_shares_of_ranks(options, pages):
    """vLLM's words for a cache of which each rank holds every world-th token: all ranks' results, combined, are those of the whole cache."""
    world, lengths = 3, torch.tensor([17, 2, 0, 23], dtype=torch.int32)
    q, k, v = (randn(4, n, h, DIM, seed=n) for n, h in ((2, HEADS[0]), (24, HEADS[1]), (24, HEADS[1])))
    results = []
    for rank in range(world):
        mine, words = [x[:, rank::world].clone() for x in (k, v)], {}
        held = (lengths - rank + world - 1) // world
        for x in mine:
            x[torch.arange(8) >= held[:, None]] = torch.nan
        if pages:
            words["page_table"] = torch.arange(8, dtype=torch.int32).view(4, 2)
            mine = [x.reshape(8, pages, *x.shape[2:]) for x in mine]
        words |= {"cp_world_size": world, "cp_rank": rank, "cp_tot_seqused_k": lengths, "return_softmax_lse": True}
        results.append(flash_attn_3.flash_attn_with_kvcache(q, *mine, cache_seqlens=held, **words, **options))
    stacked = [torch.stack(each) for each in zip(*results, strict=True)]
    o, lse = flash_attn_3.flash_attn_combine(stacked[0], stacked[1].transpose(2, 3))
    plain = {{"s_aux": "sink", "window_size": "mask"}.get(name, name): x for name, x in options.items()}
    if "mask" in plain:
        plain["mask"] = tw.SlidingWindow(*plain["mask"])
    want, want_lse = tw.decode(q, k, v, cache_seqlens=lengths, return_lse=True, **{"causal": False} | plain)
    torch.testing.assert_close(o, want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.transpose(1, 2), want_lse, rtol=2e-6, atol=2e-6)


def test_bad_shares():
    q, k = randn(2, 1, 4, 16), randn(2, 8, 4, 16)
    tokens = torch.tensor([9, 3], dtype=torch.int32)

    def call(**words):
        return flash_attn_3.flash_attn_with_kvcache(q, k, k, **{"cache_seqlens": torch.tensor([5, 2], dtype=torch.int32)} | words)

    with pytest.raises(ValueError, match="cp_tot_seqused_k must be given with cp_world_size"):
        call(cp_world_size=2)
    with pytest.raises(ValueError, match=r"cache_seqlens are \[5, 2\], but of cp_tot_seqused_k \[9, 3\] tokens rank 1 of 2 holds \[4, 1\]"):
        call(cp_world_size=2, cp_rank=1, cp_tot_seqused_k=tokens)
    with pytest.raises(ValueError, match="cp_rank must be below cp_world_size"):
        call(cp_world_size=2, cp_rank=2, cp_tot_seqused_k=tokens)
    with pytest.raises(tw.UnsupportedError, match="k is not supported with cp_world_size"):
        call(k=q, v=q, cp_world_size=2, cp_tot_seqused_k=tokens)
    with pytest.raises(TypeError, match="unexpected keyword argument 'cp_size'"):
        call(cp_size=2)
