"""tilewise as an implementation of torch's flash attention, driven through torch's own dispatcher: here on the CPU's key in place of CUDA's."""

import pytest
import torch
from torch_operators import check_signature, kernels, normal

import tilewise as tw
from tilewise.compat import torch_flash
from tilewise.errors import UnsupportedError
from tilewise.problem import Call
from tilewise.testing import tolerance

aten = torch.ops.aten
varlen = pytest.importorskip("torch.nn.attention.varlen")
IMPLEMENTED = [kernel for kernel in torch_flash.KERNELS if hasattr(aten, kernel.__name__)]
NAMES = [kernel.__name__ for kernel in IMPLEMENTED]
PAGED = pytest.mark.skipif(
    "_flash_attention_forward_no_dropout_inplace" not in NAMES, reason="torch before 2.13 has no pages or seqused_k there"
)


@pytest.fixture
def on_cpu():
    """aten's flash operators on CPU tensors, as activating makes them on CUDA's."""
    registered = torch_flash.Kernels("CPU")
    yield
    registered.remove()


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in IMPLEMENTED if "inplace" not in kernel.__name__], ids=lambda kernel: kernel.__name__
)
def test_signatures_are_those_of_the_operators(kernel):
    check_signature(kernel, getattr(aten, kernel.__name__).default)


def test_activating_and_removing_leaves_torch_as_it_was():
    attention = torch.nn.attention
    names, before = attention.list_flash_attention_impls(), kernels(NAMES)
    handle = torch_flash.register()
    assert kernels(NAMES) == before and set(attention.list_flash_attention_impls()) == {*names, "tilewise"}
    attention.activate_flash_attention_impl("tilewise")
    try:
        assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in NAMES)
        assert attention.current_flash_attention_impl() == "tilewise"
        attention.restore_flash_attention_impl()
        assert kernels(NAMES) == before
        attention.activate_flash_attention_impl("tilewise")
    finally:
        handle.remove()
        handle.remove()
    assert kernels(NAMES) == before and attention.list_flash_attention_impls() == names
    assert attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_name_registered_twice(order):
    names = torch.nn.attention.list_flash_attention_impls()
    handles = [torch_flash.register() for _ in range(2)]
    for place in order:
        assert "tilewise" in torch.nn.attention.list_flash_attention_impls()
        handles[place].remove()
    assert torch.nn.attention.list_flash_attention_impls() == names


def test_a_name_that_torch_knows_gets_its_meaning_back():
    from torch.nn.attention import _registry

    before = dict(_registry._FLASH_ATTENTION_IMPLS)
    handle = torch_flash.register("FA3")
    assert _registry._FLASH_ATTENTION_IMPLS["FA3"] is not before["FA3"]
    handle.remove()
    assert before == _registry._FLASH_ATTENTION_IMPLS


def flash(q, k, v, causal, scale):
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("contiguous", [False, True], ids=["(b, s, h, d)", "(b, h, s, d)"])
def test_sdpa_is_within_tolerance_of_the_oracle(contiguous, causal, dtype, on_cpu):
    sizes = ((6, 77), (2, 131), (2, 131))
    q, k, v = (normal(2, length, heads, 40, dtype=dtype, seed=seed) for seed, (heads, length) in enumerate(sizes))
    leaves = [(x.transpose(1, 2).contiguous() if contiguous else x.transpose(1, 2)).requires_grad_() for x in (q, k, v)]
    results = flash(*leaves, causal, 0.2)
    o, lse, cum_q, cum_k, max_q, max_k = results[:6]
    assert len(results) == 9 and cum_q is cum_k is None and (max_q, max_k) == (77, 131)
    assert o.stride() == torch.empty_like(leaves[0]).stride()
    d_o = normal(*o.shape, dtype=dtype, seed=3)
    o.backward(d_o)
    call = Call(q=q, k=k, v=v, mask=tw.Causal() if causal else tw.Full(), scale=0.2, grad=True)
    expect = tolerance.expected(call, d_o.transpose(1, 2))
    tolerance.check_outputs(call, o.detach().transpose(1, 2), lse.detach(), expect)
    for name, x in zip("qkv", leaves, strict=True):
        assert x.grad.stride() == torch.empty_like(x).stride()
        tolerance.hold(f"d{name}", x.grad.transpose(1, 2), getattr(expect, name))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_programs_find_the_layouts_that_they_were_told(backend, on_cpu):
    torch._dynamo.reset()

    def step(q, k, v):
        return flash(q, k, v, True, None)[0] * 2.0

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        leaves = [
            normal(*(2, 4, 33, 16), dtype=torch.float32, seed=seed).permute(order).contiguous().permute(order).requires_grad_()
            for seed in range(3)
        ]
        results = []
        for function in (step, compiled):
            o = function(*leaves)
            results.append([o, *torch.autograd.grad(o, leaves, torch.ones_like(o))])
        for want, got in zip(*results, strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()


def packed():
    cu_q, cu_k = torch.tensor([0, 5, 5, 20], dtype=torch.int32), torch.tensor([0, 7, 12, 33], dtype=torch.int32)
    leaves = [
        normal(length, heads, 16, dtype=torch.float32, seed=seed).requires_grad_()
        for seed, (length, heads) in enumerate(((20, 4), (33, 2), (33, 2)))
    ]
    return leaves, cu_q, cu_k


def call_varlen(q, k, v, cu_q, cu_k, **options):
    """torch's varlen_attn; 2.11 has no enable_gqa, and takes grouped heads as they are."""
    if "enable_gqa" in varlen.varlen_attn.__kwdefaults__:
        options["enable_gqa"] = True
    return varlen.varlen_attn(q, k, v, cu_q, cu_k, 15, 21, **options)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (3, 2)])
def test_varlen_attn_is_attention_varlen(window, on_cpu):
    leaves, cu_q, cu_k = packed()
    o, lse = call_varlen(*leaves, cu_q, cu_k, window_size=window, return_aux=varlen.AuxRequest(lse=True))
    mask = tw.SlidingWindow(*(None if size < 0 else size for size in window))
    want, want_lse = tw.attention_varlen(*leaves, cu_q, cu_k, mask=mask, return_lse=True)
    assert torch.equal(o, want) and torch.equal(lse, want_lse)
    for a, b in zip(*(torch.autograd.grad(x, leaves, torch.ones_like(x)) for x in (o, want)), strict=True):
        assert torch.equal(a, b)


@PAGED
def test_varlen_attn_leaves_unused_keys_out(on_cpu):
    (q, k, v), cu_q, cu_k = packed()
    q, k, v = (x.detach() for x in (q, k, v))
    used = torch.tensor([4, 5, 20], dtype=torch.int32)
    for start, end, next_start in zip(cu_k.tolist(), (cu_k[:-1] + used).tolist(), cu_k.tolist()[1:], strict=False):
        k[end:next_start], v[end:next_start] = torch.nan, torch.nan
        assert start < end
    o = call_varlen(q, k, v, cu_q, cu_k, window_size=(-1, 0), seqused_k=used)
    for n, length in enumerate(used.tolist()):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n] + length)
        torch.testing.assert_close(o[rows], tw.attention(q[None, rows], k[None, keys], v[None, keys], causal=True)[0])
    out = torch.full_like(q, torch.nan)
    varlen.varlen_attn_out(out, q, k, v, cu_q, cu_k, 15, 21, window_size=(-1, 0), enable_gqa=True, seqused_k=used)
    assert torch.equal(out, o)


@PAGED
def test_varlen_attn_reads_pages(on_cpu):
    keys, values = (normal(6, 8, 2, 16, dtype=torch.float32, seed=seed) for seed in (1, 2))
    table, used = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32), torch.tensor([9, 16], dtype=torch.int32)
    q = normal(4, 4, 16, dtype=torch.float32)
    cu_q = torch.tensor([0, 1, 4], dtype=torch.int32)
    options = {
        "window_size": (-1, 0),
        "enable_gqa": True,
        "seqused_k": used,
        "block_table": table,
        "return_aux": varlen.AuxRequest(lse=True),
    }
    o, lse = varlen.varlen_attn(q, keys, values, cu_q, None, 3, 16, **options)
    for n in range(2):
        k, v = (x[table[n].long()].flatten(0, 1)[None, : used[n]] for x in (keys, values))
        rows = slice(*cu_q[n : n + 2].tolist())
        want, want_lse = tw.attention(q[None, rows], k, v, causal=True, return_lse=True)
        torch.testing.assert_close(o[rows], want[0])
        torch.testing.assert_close(lse[:, rows], want_lse[0])
    with pytest.raises(UnsupportedError, match="block_table needs cum_seq_q, .* and seqused_k, how many keys each has; got None"):
        varlen.varlen_attn(q, keys, values, cu_q, None, 3, 16, **(options | {"seqused_k": None}))


def test_the_dense_form_has_windows_and_alibi():
    q, k, v = (normal(2, 9, 4, 8, seed=seed) for seed in range(3))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
    got = torch_flash._flash_attention_forward(
        q, k, v, None, None, 9, 9, 0.0, False, False, window_size_left=3, window_size_right=-1, alibi_slopes=slopes
    )
    want = tw.attention(q, k, v, mask=tw.SlidingWindow(3, None), alibi_slopes=slopes, return_lse=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


X, ENDS = torch.zeros(1, 4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
DENSE = (X, X, X, None, None, 4, 4)
REFUSED = {
    "dropout": (
        lambda: torch_flash._scaled_dot_product_flash_attention(X, X, X, 0.1),
        r"dropout_p must be 0, got 0.1; .*restore_flash_attention_impl\(\)",
    ),
    "debug mask": (lambda: torch_flash._flash_attention_forward(*DENSE, 0.0, False, True), "return_debug_mask must be False"),
    "splits": (
        lambda: torch_flash._flash_attention_forward(*DENSE, 0.0, False, False, num_splits=1),
        "num_splits must be None or 0, got 1: .*leave num_splits out",
    ),
    "used": (
        lambda: torch_flash._flash_attention_forward(*DENSE, 0.0, False, False, seqused_k=ENDS[1:]),
        "seqused_k goes with cum_seq_q .*tilewise.decode",
    ),
    "alibi": (
        lambda: torch_flash._flash_attention_forward(X[0], X[0], X[0], ENDS, ENDS, 4, 4, 0.0, False, False, alibi_slopes=torch.ones(2)),
        "alibi_slopes with cum_seq_q is not passed on; call tilewise.attention_varlen",
    ),
    "starts": (
        lambda: torch_flash._flash_attention_forward(X[0], X[0], X[0], ENDS, None, 4, 4, 0.0, False, False),
        "cum_seq_k must say where .*got None",
    ),
}


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_argument_and_the_way_out(call, message):
    with pytest.raises(UnsupportedError, match=message):
        call()


def test_calls_like_one_before_go_the_short_way_back(on_cpu, monkeypatch):
    leaves = [normal(2, 33, 4, 16, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3)]

    def step():
        o = flash(*(x.transpose(1, 2) for x in leaves), True, None)[0]
        return [o, *torch.autograd.grad(o, leaves, normal(*o.shape, dtype=torch.float32, seed=4))]

    want = step()
    torch_flash.call_cache.forget()
    monkeypatch.setattr(torch_flash.call_cache, "gradients", lambda *operands: None)
    for a, b in zip(step(), want, strict=True):
        assert torch.equal(a, b)
    monkeypatch.undo()
    monkeypatch.setattr(torch_flash, "_gradients", lambda *operands: pytest.fail("not cached"))
    for a, b in zip(step(), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_the_short_way_of_sdpa(on_cpu, monkeypatch, heads_first, causal):
    """Forward and back without checks, the same bits and layouts, for other tensors than the first, inside of no_grad and outside."""

    def fresh(seed):
        x = [normal(2, 4, 33, 16, dtype=torch.float32, seed=seed + n) for n in range(3)]
        return [(y if heads_first else y.transpose(1, 2).contiguous().transpose(1, 2)).requires_grad_() for y in x]

    def step(leaves):
        with torch.no_grad():
            plain = flash(*leaves, causal, 0.25)[0]
        o = flash(*leaves, causal, 0.25)[0]
        return [plain, o, *torch.autograd.grad(o, leaves, normal(*o.shape, dtype=torch.float32, seed=4))]

    torch_flash.call_cache.forget()
    step(fresh(0))
    leaves = fresh(5)
    with monkeypatch.context() as patched:
        patched.setattr(torch_flash, "attention", None)
        patched.setattr(torch_flash, "_gradients", None)
        short = step(leaves)
    monkeypatch.setattr(torch_flash.call_cache, "find", lambda *_: None)
    for a, b in zip(short, step(leaves), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
