"""The public functions against each other and against the oracle: packed equals the loop, merging equals the whole, caches equal plain keys."""

import subprocess
import sys

import pytest
import torch

import tilewise as tw


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


DOCUMENTS = {
    "several": ([0, 3, 3, 10, 17], [0, 5, 6, 6, 20]),
    "one": ([0, 17], [0, 20]),
    "padding behind": ([0, 4, 9], [0, 2, 11]),
    "none": ([0], [0]),
}


@pytest.mark.parametrize("mask", [None, tw.SlidingWindow(3, 1), tw.PrefixLM(2)], ids=repr)
@pytest.mark.parametrize("cu_q, cu_k", DOCUMENTS.values(), ids=DOCUMENTS)
def test_packed_equals_the_loop_over_documents(cu_q, cu_k, mask):
    q, k, v = random(17, 4, 8).requires_grad_(), random(20, 2, 8, seed=1).requires_grad_(), random(20, 2, 5, seed=2).requires_grad_()
    slopes, sink = torch.tensor([0.5, 0.25, 0.125, 0.0]), random(4, seed=3).requires_grad_()
    options = {"causal": mask is None, "mask": mask, "alibi_slopes": slopes, "sink": sink, "softcap": 3.0, "return_lse": True}
    o, lse = tw.attention_varlen(q, k, v, torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k), **options)
    expected_o, expected_lse = torch.zeros_like(o), sink.detach()[:, None].repeat(1, 17)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        part = tw.attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **options)
        expected_o[q0:q1], expected_lse[:, q0:q1] = part[0][0], part[1][0]
    torch.testing.assert_close(o, expected_o, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)
    if len(cu_q) > 1:
        weight = random(*o.shape, seed=4)
        for a, b in zip(
            *(torch.autograd.grad((x * weight).sum(), (q, k, v, sink), retain_graph=True) for x in (o, expected_o)), strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_documents_mask_equals_packed():
    q, k, v = random(2, 9, 4, 8), random(2, 9, 2, 8, seed=1), random(2, 9, 2, 8, seed=2)
    cu = [0, 4, 9]
    o = tw.attention(q, k, v, mask=tw.Documents(cu, inner=tw.Causal()))
    packed = [tw.attention_varlen(q[b], k[b], v[b], torch.tensor(cu), torch.tensor(cu), causal=True) for b in range(2)]
    torch.testing.assert_close(o, torch.stack(packed), atol=1e-13, rtol=1e-13)


def test_merging_parts_of_the_keys_equals_the_whole():
    q, k, v = (
        random(2, 6, 4, 8).requires_grad_(),
        random(2, 12, 2, 8, seed=1).requires_grad_(),
        random(2, 12, 2, 5, seed=2).requires_grad_(),
    )
    whole = tw.attention(q, k, v, return_lse=True)
    parts = [tw.attention(q, k[:, i:j], v[:, i:j], return_lse=True) for i, j in ((0, 5), (5, 5), (5, 12))]
    merged = tw.merge(*zip(*parts, strict=True))
    for got, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-13, rtol=1e-13)
    for a, b in zip(*(torch.autograd.grad(o.square().sum() + lse.sum(), (q, k, v)) for o, lse in (merged, whole)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_merging_empty_rows():
    o = torch.full((1, 3, 2, 4), torch.nan)
    empty = torch.full((1, 2, 3), -torch.inf)
    got, lse = tw.merge([o, o], [empty, empty])
    assert (got == 0).all() and (lse == -torch.inf).all()
    good, good_lse = random(1, 3, 2, 4).requires_grad_(), random(1, 2, 3).requires_grad_()
    got, lse = tw.merge([o.double(), good], [empty.double(), good_lse])
    assert torch.equal(got, good) and torch.equal(lse, good_lse)
    (got.sum() + lse.sum()).backward()
    torch.testing.assert_close(good.grad, torch.ones_like(good))
    torch.testing.assert_close(good_lse.grad, torch.ones_like(good_lse))


def test_merge_packed_and_dtypes():
    outputs, lses = [random(7, 2, 4, seed=n).bfloat16() for n in range(3)], [random(2, 7, seed=n).float() for n in range(3)]
    o, lse = tw.merge(outputs, lses)
    weight = torch.softmax(torch.stack(lses), 0).transpose(1, 2)[..., None]
    torch.testing.assert_close(o, (weight * torch.stack(outputs)).sum(0).bfloat16())
    torch.testing.assert_close(lse, torch.logsumexp(torch.stack(lses), 0))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("mask", [None, tw.SlidingWindow(4, 0)], ids=repr)
def test_decode_reads_the_cache_and_nothing_else(tokens, mask):
    lengths = [12, 3, 0, 7]
    q, k, v = random(4, tokens, 4, 8), random(4, 12, 2, 8, seed=1), random(4, 12, 2, 5, seed=2)
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = torch.nan, torch.inf
    slopes = torch.rand(4, 4)
    options = {"mask": mask, "alibi_slopes": slopes, "return_lse": True}
    o, lse = tw.decode(q, k, v, cache_seqlens=torch.tensor(lengths), **options)
    for b, length in enumerate(lengths):
        options["alibi_slopes"] = slopes[b]
        expected = tw.attention(q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length], causal=True, **options)
        assert torch.equal(o[b : b + 1], expected[0]) and torch.equal(lse[b : b + 1], expected[1])


def test_decode_through_a_page_table_equals_the_plain_cache():
    lengths, page = torch.tensor([11, 4, 0]), 4
    k, v = random(3, 12, 2, 8), random(3, 12, 2, 5, seed=1)
    table = torch.tensor([[5, 2, 7], [0, -1, 99], [-3, -3, -3]])
    pages_k, pages_v = torch.full((8, page, 2, 8), torch.nan, dtype=k.dtype), torch.full((8, page, 2, 5), torch.nan, dtype=k.dtype)
    for b, length in enumerate(lengths.tolist()):
        for t in range(length):
            pages_k[table[b, t // page], t % page], pages_v[table[b, t // page], t % page] = k[b, t], v[b, t]
    q = random(3, 2, 4, 8, seed=5)
    got = tw.decode(q, pages_k, pages_v, cache_seqlens=lengths, page_table=table)
    assert torch.equal(got, tw.decode(q, k, v, cache_seqlens=lengths))


@pytest.mark.parametrize("batch", [1, 3])
def test_decode_cuts_a_dense_mask_to_each_sequence(batch):
    q, k, v = random(3, 1, 4, 8), random(3, 9, 2, 8, seed=1), random(3, 9, 2, 5, seed=2)
    shown = torch.rand(batch, 4, 1, 9, generator=torch.Generator().manual_seed(0)) > 0.5
    lengths = [9, 4, 6]
    got = tw.decode(q, k, v, cache_seqlens=torch.tensor(lengths), mask=tw.Dense(shown), alibi_slopes=torch.rand(1, 4))
    assert got.shape == (3, 1, 4, 5)
    got = tw.decode(q, k, v, cache_seqlens=torch.tensor(lengths), mask=tw.Dense(shown))
    for b, n in enumerate(lengths):
        mask = tw.Dense(shown[min(b, batch - 1), None, ..., :n])
        assert torch.equal(got[b : b + 1], tw.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], mask=mask))


def test_decode_defaults_and_no_sequences():
    q, k, v = random(2, 1, 4, 8), random(2, 6, 2, 8), random(2, 6, 2, 5)
    assert torch.equal(tw.decode(q, k, v), tw.decode(q, k, v, cache_seqlens=6))
    o, lse = tw.decode(q[:0], k[:0], v[:0], return_lse=True)
    assert o.shape == (0, 1, 4, 5) and lse.shape == (0, 4, 1)


def test_causal_with_a_mask_is_their_intersection():
    q, k, v = random(1, 6, 2, 4), random(1, 6, 2, 4, seed=1), random(1, 6, 2, 4, seed=2)
    assert torch.equal(tw.attention(q, k, v, causal=True, mask=tw.SlidingWindow(2, 2)), tw.attention(q, k, v, mask=tw.SlidingWindow(2, 0)))


def test_dropout_follows_torch_seed_and_explicit_seed():
    q, k, v = random(1, 9, 2, 4), random(1, 9, 2, 4, seed=1), random(1, 9, 2, 4, seed=2)
    draws = []
    for _ in range(2):
        torch.manual_seed(1)
        draws.append([tw.attention(q, k, v, dropout_p=0.5) for _ in range(2)])
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1]) and not torch.equal(draws[0][0], draws[0][1])
    seeded = [tw.attention(q, k, v, dropout_p=0.5, dropout_seed=7, dropout_offset=n) for n in (0, 0, 1)]
    assert torch.equal(seeded[0], seeded[1]) and not torch.equal(seeded[0], seeded[2])


def test_explain_draws_no_random_number():
    q = random(1, 4, 2, 8)
    before = torch.get_rng_state()
    tw.explain(q, q, q, dropout_p=0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_explain_names_the_backend_the_tiles_and_the_others():
    q, k, v = (random(2, 300, heads, 8).float() for heads in (4, 2, 2))
    why = tw.explain(q, k, v, causal=True)
    assert why.backend == next(name for name, reasons in why.reasons.items() if not reasons) and set(why.reasons) == {
        "hopper",
        "triton",
        "cpu",
        "tiled",
        "reference",
    }
    assert "asked for by name" in why.reasons["reference"][0]
    assert why.pairs == 2 * 4 * 300 * 301 // 2 and why.flops == 4 * 8 * why.pairs
    text = str(why)
    assert f"backend: {why.backend}" in text and "passed over: reference" in text and "skipped" in text and "GFLOP" in text
    named = tw.explain(q, k, v, backend="reference")
    assert named.backend == "reference" and named.tiles is None and "another backend was asked for" in named.reasons["tiled"][0]
    strided = tw.explain(q.transpose(2, 3).contiguous().transpose(2, 3), k, v)
    assert any("q is copied" in note for note in strided.notes)


def test_public_names_are_documented():
    for name in tw.__all__:
        assert getattr(tw, name).__doc__, name


def test_import_is_light():
    code = (
        "import sys, torch, time; before = set(sys.modules); t = time.process_time(); import tilewise; spent = time.process_time() - t;"
        "heavy = {'matplotlib', 'rich', 'triton', 'cutlass', 'transformers', 'flash_attn', 'torch._inductor', 'torch._dynamo', 'sympy'};"
        "found = heavy & sys.modules.keys() - before; print(spent, found); assert spent < 1.5 and not found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_first_call_imports_nothing_heavy():
    code = (
        "import sys, torch, tilewise as tw; x = torch.ones(1, 8, 2, 16, requires_grad=True); before = set(sys.modules);"
        "tw.attention(x, x, x, causal=True).sum().backward();"
        "tw.decode(x.detach()[:, :1], x.detach(), x.detach(), cache_seqlens=torch.tensor([5], dtype=torch.int32));"
        "found = {'sympy', 'torch._dynamo', 'torch._inductor', 'torch.fx.experimental.symbolic_shapes'} & sys.modules.keys() - before;"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_several_gpus_need_no_import_of_their_own():
    """`tw.distributed` is there after `import tilewise`, which alone does not import torch.distributed's machinery."""
    code = (
        "import sys, tilewise as tw; assert 'tilewise.distributed' not in sys.modules; assert tw.distributed.plan and not hasattr(tw, 'x')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
