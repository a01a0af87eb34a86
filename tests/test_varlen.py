"""attention_varlen with keys in pages: decode by another name, forward only."""

from itertools import pairwise

import pytest
import torch

import tilewise as tw
from tilewise import varlen
from tilewise.masks import SlidingWindow

PAGE, BOUNDS, LENGTHS = 4, [0, 3, 3, 4, 9], [10, 5, 1, 16]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ints(numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


@pytest.fixture
def paged():
    """q (9, 4, 8), pools of 12 pages whose unused tokens are NaN, and the other arguments."""
    tables = [[7, 0, 5, 99], [3, 9, -4, 99], [1, 99, 99, 99], [2, 11, 4, 8]]
    pools = [torch.full((12, PAGE, 2, dim), torch.nan) for dim in (8, 6)]
    for b, (table, length) in enumerate(zip(tables, LENGTHS, strict=True)):
        for i in range(length):
            for pool, seed in zip(pools, (1, 2), strict=True):
                pool[table[i // PAGE], i % PAGE] = drawn(2, pool.shape[3], seed=100 * b + 10 * i + seed)
    return drawn(9, 4, 8), *pools, {"cu_seqlens_q": ints(BOUNDS), "seqused_k": ints(LENGTHS), "page_table": ints(tables)}


def packed_keys(pool, table, lengths):
    return torch.cat([pool[row[: -(-n // PAGE)].long()].flatten(0, 1)[:n] for row, n in zip(table, lengths.tolist(), strict=True)])


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"mask": SlidingWindow(3, 0), "softcap": 2.0, "scale": 0.3},
    "slopes and sink": {"causal": True, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]), "sink": torch.tensor([0.5, -1.0, 0.0, 2.0])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_it_is_attention_to_the_same_keys_packed(options, dtype, paged):
    q, k, v, where = paged
    where = {name: x.to(dtype) for name, x in where.items()}
    o, lse = tw.attention_varlen(q, k, v, **where, **options, return_lse=True)
    keys, values = (packed_keys(pool, where["page_table"], where["seqused_k"]) for pool in (k, v))
    bounds = torch.cat((torch.zeros(1, dtype=dtype), where["seqused_k"].cumsum(0).to(dtype)))
    wanted, of_wanted = tw.attention_varlen(q, keys, values, where["cu_seqlens_q"], bounds, **options, return_lse=True)
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(lse, of_wanted)


def test_it_has_decodes_bits(paged):
    q, k, v, where = paged
    same = {"cu_seqlens_q": where["cu_seqlens_q"], "cache_seqlens": where["seqused_k"], "page_table": where["page_table"]}
    out = torch.empty(9, 4, 6)
    assert tw.attention_varlen(q, k, v, **where, causal=True, out=out) is out
    assert torch.equal(out, tw.decode(q, k, v, **same))
    by_place = tw.attention_varlen(q, k, v, where["cu_seqlens_q"], None, seqused_k=where["seqused_k"], page_table=where["page_table"])
    assert torch.equal(by_place, tw.decode(q, k, v, **same, causal=False))


def test_pages_of_8_bits(paged):
    """With their scales, as decode takes them."""
    q, k, v, where = paged
    k, v, scale = (20.0 * k).to(torch.int8), (20.0 * v).to(torch.int8), torch.tensor(0.05)
    same = {"cu_seqlens_q": where["cu_seqlens_q"], "cache_seqlens": where["seqused_k"], "page_table": where["page_table"]}
    expected = tw.decode(q, k, v, **same, k_scale=scale, v_scale=scale)
    assert torch.equal(tw.attention_varlen(q, k, v, **where, causal=True, k_scale=scale, v_scale=scale), expected)


def test_a_prompt_in_chunks_is_the_prompt(paged):
    """Chunked prefill of two prompts, each time as many tokens as there is room for."""
    lengths, dim = [13, 6], 8
    prompts = [[drawn(n, heads, dim, seed=10 * n + heads) for heads in (4, 2, 2)] for n in lengths]
    pools = torch.full((2, 8, PAGE, 2, dim), torch.nan)
    table, done, found = ints([[6, 1, 3, 0], [2, 5, 7, 4]]), [0, 0], [[], []]
    for chunk in ((5, 0), (4, 3), (4, 3)):
        new = [[x[a : a + n] for x in prompt] for prompt, a, n in zip(prompts, done, chunk, strict=True)]
        q, k, v = (torch.cat(each) for each in zip(*new, strict=True))
        cu = ints([0, chunk[0], sum(chunk)])
        tw.append(pools[0], pools[1], k, v, cache_seqlens=ints(done), page_table=table, cu_seqlens=cu)
        done = [a + n for a, n in zip(done, chunk, strict=True)]
        o = tw.attention_varlen(q, pools[0], pools[1], cu, seqused_k=ints(done), page_table=table, causal=True)
        for each, (a, b) in zip(found, pairwise(cu.tolist()), strict=True):
            each.append(o[a:b])
    for prompt, pieces in zip(prompts, found, strict=True):
        torch.testing.assert_close(torch.cat(pieces), tw.attention(*(x[None] for x in prompt), causal=True)[0])


def test_what_is_refused(paged):
    q, k, v, where = paged
    lengths = where["seqused_k"]
    for error, told, given in (
        (tw.ShapeError, "cu_seqlens_k and page_table exclude each other: how many tokens .* is seqused_k", {"cu_seqlens_k": ints(BOUNDS)}),
        (tw.ShapeError, "seqused_k must be given with page_table: how many tokens each document has", {"seqused_k": None}),
        (tw.ShapeError, "seqused_k has documents 2, but cu_seqlens_q has documents 4; they must be equal", {"seqused_k": lengths[:2]}),
        (tw.ShapeError, "seqused_k must", {"seqused_k": lengths.float()}),
        (tw.ShapeError, "cu_seqlens_q must", {"cu_seqlens_q": None}),
        (tw.ShapeError, r"cache_seqlens\[0\] is 17, but the cache holds between 0 and 16 tokens", {"seqused_k": ints([17, 5, 1, 16])}),
        (tw.ShapeError, r"page_table\[0\] names pages", {"page_table": where["page_table"] + 5}),
        (tw.UnsupportedError, "bias cannot be given with page_table; attend to packed keys, with cu_seqlens_k", {"bias": drawn(1, 16)}),
        (tw.UnsupportedError, "dropout_p and return_max_logits cannot be given with page_table", {"dropout_p": 0.5, "return_max_logits": True}),
        (ValueError, "deterministic must be", {"deterministic": 1}),
        (ValueError, "return_lse must be", {"return_lse": 1}),
    ):  # fmt: skip
        with pytest.raises(error, match=told):
            tw.attention_varlen(q, k, v, **where | given)
    with pytest.raises(tw.ShapeError, match=r"k must have 4 dimensions \(pages, page_size, heads_k, head_dim\), got 3"):
        tw.attention_varlen(q, k[0], v, **where)
    with pytest.raises(tw.ShapeError, match="cu_seqlens_k must"):
        tw.attention_varlen(q, drawn(5, 2, 8), drawn(5, 2, 8), where["cu_seqlens_q"])


@pytest.mark.parametrize("place", range(3))
def test_it_has_no_gradient(place, paged):
    tensors, where = list(paged[:3]), paged[3]
    plain = tw.attention_varlen(*tensors, **where)
    tensors[place] = tensors[place].clone().requires_grad_()
    told = f"{'qkv'[place]} requires grad, but keys in pages are for inference and have no gradient; pass {'qkv'[place]}.detach()"
    with pytest.raises(ValueError, match=told):
        tw.attention_varlen(*tensors, **where)
    with torch.no_grad():
        assert torch.equal(tw.attention_varlen(*tensors, **where), plain)


def test_it_compiles_once_for_all_lengths(paged):
    torch._dynamo.reset()
    q, k, v, where = paged
    traced = []

    def counting(graph, inputs):
        traced.append(1)
        return graph.forward

    run = torch.compile(lambda n: tw.attention_varlen(q, k, v, **where | {"seqused_k": n}, causal=True), fullgraph=True, backend=counting)
    for lengths in (LENGTHS, [4, 4, 1, 9]):
        assert torch.equal(run(ints(lengths)), tw.attention_varlen(q, k, v, **where | {"seqused_k": ints(lengths)}, causal=True))
    assert traced == [1]


def test_batch_invariant_pages_are_split(paged, monkeypatch):
    q, k, v, where = paged
    plain, given = tw.attention_varlen(q, k, v, **where), []
    monkeypatch.setattr(varlen, "decode", lambda *args, **words: (given.append(words["split"]), tw.decode(*args, **words))[1])
    for flag, split in ((True, varlen.SPLIT), (False, None)):
        assert torch.equal(tw.attention_varlen(q, k, v, batch_invariant=flag, **where), plain) and given.pop() == split
    with pytest.raises(ValueError, match="batch_invariant must be True or False, got int 1"):
        tw.attention_varlen(q, k, v, batch_invariant=1, **where)
