"""tilewise in place of torch's scaled_dot_product_attention: its signature and results, and what patching leaves behind."""

import pytest
import torch
import torch.nn.attention.bias
import torch.nn.functional as F
from torch import nn
from torch_operators import check_signature, kernels, normal

import tilewise as tw
from tilewise.compat import sdpa
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.problem import Call
from tilewise.testing import tolerance

ours = sdpa.scaled_dot_product_attention
CPU_OPERATORS = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")


def test_signatures_are_torchs():
    check_signature(ours, torch.ops.aten.scaled_dot_product_attention.default)
    for name, function in zip(CPU_OPERATORS, (sdpa.cpu_forward, sdpa.cpu_backward), strict=True):
        check_signature(function, getattr(torch.ops.aten, name).default)


SHAPES = {  # query, key, value, options
    "top left": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), {"is_causal": True}),
    "more queries than keys": ((2, 4, 9, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"is_causal": True, "scale": 0.3}),
    "square": ((1, 2, 33, 72), (1, 2, 33, 72), (1, 2, 33, 72), {"is_causal": True}),
    "grouped": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), {"enable_gqa": True}),
    "grouped apart": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 3, 7, 6), {"enable_gqa": True}),
    "one key head": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6), {}),
    "one query head": ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), {}),
    "one key batch": ((3, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 6), {}),
    "two batch dimensions": ((2, 3, 4, 5, 8), (3, 4, 7, 8), (2, 1, 4, 7, 6), {}),
    "no batch": ((4, 5, 8), (4, 7, 8), (4, 7, 6), {"is_causal": True}),
    "no heads": ((5, 8), (7, 8), (7, 6), {}),
    "length 1": ((2, 4, 1, 8), (2, 4, 7, 8), (2, 4, 7, 8), {}),
}
MASKS = [(5, 7), (1, 7), (5, 1), (4, 5, 7), (2, 1, 1, 7), (1, 4, 5, 1), (2, 4, 5, 7)]
MASKED = {
    f"{kind} mask {shape}": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), {"attn_mask": (kind, shape)})
    for kind in ("bool", "float")
    for shape in MASKS
}
MASKED |= {
    "float mask (7,)": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), {"attn_mask": ("float", (7,))}),
    "float mask, two batch dimensions": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6), {"attn_mask": ("float", (3, 1, 5, 7))}),
    "bool mask, two batch dimensions": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6), {"attn_mask": ("bool", (3, 1, 5, 1))}),
    "bool mask, no batch": ((4, 5, 8), (4, 7, 8), (4, 7, 6), {"attn_mask": ("bool", (4, 5, 7))}),
    "float mask, no heads": ((5, 8), (7, 8), (7, 6), {"attn_mask": ("float", (5, 7))}),
}


@pytest.mark.parametrize("query, key, value, options", [*SHAPES.values(), *MASKED.values()], ids=[*SHAPES, *MASKED])
def test_results_and_gradients_are_torchs(query, key, value, options):
    leaves = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate((query, key, value))]
    options = dict(options)
    if "attn_mask" in options:
        kind, shape = options["attn_mask"]
        mask = normal(*shape, seed=3)
        if kind == "bool":
            mask = mask > -0.5
            mask[..., 0] = True
        else:
            leaves.append(mask.requires_grad_())
        options["attn_mask"] = mask
    results = []
    for function in (F.scaled_dot_product_attention, ours):
        o = function(*leaves[:3], **options)
        results.append([o, *torch.autograd.grad(o, leaves, normal(*o.shape, seed=4))])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
def test_results_are_within_tolerance_of_the_oracle(kind, dtype):
    q, k, v = (
        normal(2, heads, length, 40, dtype=dtype, seed=seed).requires_grad_()
        for seed, (heads, length) in enumerate(((6, 77), (2, 131), (2, 131)))
    )
    shown, bias = normal(2, 1, 77, 131, seed=3) > 0, normal(6, 77, 131, dtype=dtype, seed=4).requires_grad_()
    mask = {"causal": tw.Causal("top_left"), "bool": tw.Dense(shown), "float": tw.Full()}[kind]
    options = {"causal": {"is_causal": True}, "bool": {"attn_mask": shown}, "float": {"attn_mask": bias}}[kind]
    o = ours(q, k, v, enable_gqa=True, **options)
    d_o = normal(*o.shape, dtype=dtype, seed=5)
    o.backward(d_o)
    plain = [x.detach().transpose(1, 2) for x in (q, k, v)]
    call = Call(
        q=plain[0], k=plain[1], v=plain[2], mask=mask, scale=40**-0.5, bias=bias.detach()[None] if kind == "float" else None, grad=True
    )
    expect = tolerance.expected(call, d_o.transpose(1, 2))
    tolerance.hold("o", o.detach().transpose(1, 2), expect.o)
    for name, x in (("q", q), ("k", k), ("v", v)):
        tolerance.hold(f"d{name}", x.grad.transpose(1, 2), getattr(expect, name))
    if kind == "float":
        tolerance.hold("dbias", bias.grad[None], expect.bias)


def test_a_row_that_sees_nothing_is_zero_and_hidden_nan_stays_hidden():
    q, k, v = (normal(1, 2, 6, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    shown = torch.ones(6, 6, dtype=torch.bool).tril()
    shown[2] = False
    shown[:, 5] = False
    for x in (k, v):
        x[:, :, 5] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = ours(*leaves, attn_mask=shown)
    o.sum().backward()
    assert not o[:, :, 2].any() and o.isfinite().all()
    for x in leaves:
        assert x.grad[:, :, :5].isfinite().all()
    assert not leaves[0].grad[:, :, 2].any() and not leaves[2].grad[:, :, 5].any()


def test_minus_infinity_hides():
    q, k, v = (normal(1, 2, 6, 8, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3))
    shown = torch.ones(6, 6, dtype=torch.bool).tril()
    shown[2] = False
    added = torch.zeros(6, 6).masked_fill(~shown, -torch.inf).requires_grad_()
    by_bool, by_float = ours(q, k, v, attn_mask=shown), ours(q, k, v, attn_mask=added)
    torch.testing.assert_close(by_float, by_bool)
    assert not by_float[:, :, 2].any()
    gradient = torch.autograd.grad(by_float, added, torch.ones_like(by_float))[0]
    assert gradient.isfinite().all() and not gradient[~shown].any() and gradient[4, :5].any()


def test_causal_bias_of_torch():
    bias = pytest.importorskip("torch.nn.attention.bias")
    q, k, v = normal(2, 4, 5, 8), normal(2, 4, 7, 8, seed=1), normal(2, 4, 7, 8, seed=2)
    for made in (bias.causal_upper_left(5, 7), bias.causal_lower_right(5, 7)):
        torch.testing.assert_close(ours(q, k, v, made), F.scaled_dot_product_attention(q, k, v, made), atol=1e-12, rtol=1e-12)
    with pytest.raises(ShapeError, match="attn_mask is a CausalBias of 5 x 6, but the scores are 5 x 7"):
        ours(q, k, v, bias.causal_upper_left(5, 6))


def test_dropout_is_that_of_attention():
    q, k, v = (normal(2, 4, 9, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    torch.manual_seed(3)
    got = ours(q, k, v, dropout_p=0.4)
    torch.manual_seed(3)
    want = tw.attention(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.4).transpose(1, 2)
    assert torch.equal(got, want) and not torch.equal(got, ours(q, k, v))


def test_autocast_takes_a_mask_in_either_dtype():
    q, k, v = (normal(2, 4, 9, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    mask = normal(9, 9, dtype=torch.float32, seed=3)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (mask, mask.bfloat16()):
            o = ours(q, k, v, attn_mask=given)
            assert o.dtype == torch.bfloat16
            torch.testing.assert_close(o.float(), ours(q.bfloat16(), k.bfloat16(), v.bfloat16(), attn_mask=given).float())


@pytest.mark.parametrize("sizes", [(0, 4, 5, 8), (2, 4, 0, 8), (2, 4, 5, 0), (0, 0, 0, 0), (2, 0, 5, 8), (3, 5, 0)])
def test_sizes_of_zero_are_torchs(sizes):
    """Of heads and head_dim too: scores of no products are 0, and their weights equal."""
    q, k = (torch.zeros(sizes, dtype=torch.float64, device="cpu", requires_grad=True) for _ in range(2))
    v = normal(*sizes[:-1], 3, seed=2).requires_grad_()
    got, want = ours(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    for grad, x in zip(torch.autograd.grad(got.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == x.shape and grad.isfinite().all()


X = torch.zeros(2, 4, 5, 8)
REFUSED = {
    "mask and causal": (
        lambda: ours(X, X, X, torch.ones(5, 5) > 0, is_causal=True),
        ValueError,
        r"attn_mask must be None where is_causal is True \(Explicit attn_mask should not be set",
    ),
    "mask and causal, as torch": (lambda: ours(X, X, X, torch.ones(5, 5) > 0, is_causal=True), RuntimeError, "attn_mask must be None"),
    "torch's causal mask and causal": (
        lambda: ours(X, X, X, torch.nn.attention.bias.causal_lower_right(5, 5), is_causal=True),
        ValueError,
        "is_causal is True .CausalBias should not be used with causal=True",
    ),
    "mask's shape": (
        lambda: ours(X, X, X, torch.zeros(5, 6)),
        ShapeError,
        r"attn_mask of shape \(5, 6\) does not broadcast to \(..., heads, seqlen_q, seqlen_k\) \(2, 4, 5, 5\)",
    ),
    "mask's dtype": (
        lambda: ours(X, X, X, torch.ones(5, 5, dtype=torch.int64)),
        ShapeError,
        r"attn_mask must be torch.bool.*write attn_mask != 0",
    ),
    "mask's kind": (
        lambda: ours(X, X, X, tw.Causal()),
        ShapeError,
        "attn_mask must be a torch.Tensor or None, got Causal; .*tilewise.attention",
    ),
    "heads": (lambda: ours(X, X[:, :2], X[:, :2]), ShapeError, "query has 4 heads, key 2 and value 2; .*enable_gqa=True"),
    "groups": (lambda: ours(X, X[:, :3], X[:, :3], enable_gqa=True), ShapeError, "query has 4 heads, key 3"),
    "batch": (lambda: ours(X, X[:, None].expand(2, 3, 4, 5, 8), X), ShapeError, "the batch dimensions .* do not broadcast: query"),
    "one dimension": (lambda: ours(X[0, 0, 0], X, X), ShapeError, r"query must be a dense tensor .*, got shape \(8,\); .*attention_varlen"),
    "dtypes": (
        lambda: ours(X, X.double(), X),
        RuntimeError,  # as torch raises
        r"^tilewise.compat.sdpa.scaled_dot_product_attention: key is torch.float64, but query is torch.float32; .* key.to\(query.dtype\)",
    ),
    "dropout": (
        lambda: ours(X, X, X, dropout_p=1.5),
        RuntimeError,
        r"^tilewise.compat.sdpa.*: dropout_p must be a finite number in \[0, 1\)",
    ),
    "nested": (
        lambda: ours(torch.nested.nested_tensor([X[0], X[1]]), X, X),
        ShapeError,
        "(query|q) must be a dense .*tensor.* got a nested tensor; .*attention_varlen",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("call, error, message", REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_argument_and_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("options", ({}, {"is_causal": True}, {"attn_mask": torch.ones(5, 7, dtype=torch.bool, device="meta")}), ids=str)
def test_on_the_meta_device_there_are_shapes(options):
    q = torch.randn(2, 4, 5, 8, device="meta", requires_grad=True)
    k, v = torch.randn(2, 4, 7, 8, device="meta"), torch.randn(2, 4, 7, 3, device="meta")
    o = ours(q, k, v, **options)
    assert o.is_meta and o.shape == (2, 4, 5, 3) and o.dtype == q.dtype
    o.sum().backward()
    assert q.grad.shape == q.shape
    with pytest.raises(RuntimeError):
        ours(q, k[..., :6], v)


SHORT = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, more keys": {"is_causal": True, "seqlen_k": 9},
    "grouped": {"enable_gqa": True, "heads_k": 2, "scale": 0.3},
    "one key head": {"heads_k": 1},
    "added": {"attn_mask": (2, 4, 6, 6)},
    "added to all": {"attn_mask": (1, 1, 6, 6)},
    "added by one row": {"attn_mask": (2, 1, 1, 6)},
    "added, fewer dimensions": {"attn_mask": (6, 6)},
    "added by key": {"attn_mask": (2, 4, 6, 1)},
    "bool": {"attn_mask": (2, 1, 6, 6), "visible": True},
    "three dimensions": {"batch": ()},
}


def steps(x):
    """Strides along what has more than one number."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("options", SHORT.values(), ids=SHORT)
def test_calls_like_one_before(options, heads_first, monkeypatch):
    """The same bits for O and gradients, by whichever way; O may be changed in place, and other calls in between are not mistaken for this one."""
    options = dict(options)
    batch, heads_k, seqlen_k = options.pop("batch", (2,)), options.pop("heads_k", 4), options.pop("seqlen_k", 6)
    mask, visible = options.pop("attn_mask", None), options.pop("visible", False)

    def tensor(*sizes):
        x = torch.randn(*batch, *sizes)
        return (x if heads_first else x.transpose(-3, -2).contiguous().transpose(-3, -2)).requires_grad_()

    def fresh():
        attn_mask = None if mask is None else torch.rand(mask) > 0.3 if visible else torch.randn(mask, requires_grad=True)
        return tensor(4, 6, 8), tensor(heads_k, seqlen_k, 8), tensor(heads_k, seqlen_k, 8), attn_mask, torch.randn(*batch, 4, 6, 8)

    def attend(q, k, v, attn_mask, _):
        return sdpa.scaled_dot_product_attention(q, k, v, attn_mask, **options)

    def run(given):
        o = attend(*given)
        grads = torch.autograd.grad(o, [x for x in given[:4] if x is not None and x.requires_grad], given[4])
        with torch.no_grad():
            return [o, attend(*given).mul_(1.0), *grads]

    sdpa.call_cache.forget()
    run(fresh())
    for _ in range(2):
        given = fresh()
        short = run(given)
        with monkeypatch.context() as patched:
            patched.setattr(sdpa.call_cache, "find", lambda *_: None)
            long = run(given)
        assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))
        assert all(steps(a) == steps(b) for a, b in zip(short[:2], long, strict=False))
    o = attend(*given)
    assert o.mul_(2.0).requires_grad and torch.equal(o, 2.0 * short[0])
    if set(options) <= {"is_causal"} and mask is None and batch == (2,) and heads_k == 4:
        monkeypatch.setattr(sdpa, "attention", None)
        assert torch.equal(run(given)[0], short[0])  # indeed without it


def test_gradients_lie_as_the_leaves():
    """Whatever the order of their dimensions, each in its own, so that autograd need not copy them."""
    for _ in range(3):
        q, k, v = x = [torch.randn(2, 4, 6, 8), torch.randn(2, 6, 4, 8).transpose(1, 2), torch.randn(4, 2, 6, 8).transpose(0, 1)]
        grads = torch.autograd.grad(sdpa.scaled_dot_product_attention(*(each.requires_grad_() for each in x)), x, torch.ones(2, 4, 6, 8))
    assert [grad.stride() for grad in grads] == [each.stride() for each in (q, k, v)]


def counted(monkeypatch):
    """How often attention was called."""
    calls = []

    def attention(*args, **options):
        calls.append(options)
        return tw.attention(*args, **options)

    monkeypatch.setattr(sdpa, "attention", attention)
    monkeypatch.setattr(sdpa.call_cache, "find", lambda *_: None)  # a cached call would not be counted
    return calls


@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:Support for mismatched key_padding_mask", "ignore:The PyTorch API of nested tensors"
)
@pytest.mark.parametrize("train", [True, False])
def test_patch_reaches_torchs_own_modules(train, monkeypatch):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(24, 4, batch_first=True).train(train)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True), 2).train(train)
    x, padding = normal(2, 9, 24, dtype=torch.float32), torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True

    def run():
        square = nn.Transformer.generate_square_subsequent_mask(9)
        return [
            attention(x, x, x, need_weights=False, key_padding_mask=padding)[0],
            encoder(x, src_key_padding_mask=padding)[~padding],
            encoder(x, mask=square, is_causal=True),
        ]

    want, calls = run(), counted(monkeypatch)
    with sdpa.patch():
        got = run()
    assert len(calls) == 5
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)


def test_removing_a_patch_restores_everything():
    before, fast = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    first = sdpa.patch()
    with sdpa.patch():
        assert F.scaled_dot_product_attention is ours and not torch.backends.mha.get_fastpath_enabled()
        first.remove()
        first.remove()
        assert F.scaled_dot_product_attention is ours
    assert F.scaled_dot_product_attention is before and torch.backends.mha.get_fastpath_enabled() is fast


def test_a_patch_over_ours_is_not_overwritten():
    before, patch = F.scaled_dot_product_attention, sdpa.patch()
    try:
        F.scaled_dot_product_attention = before
        with pytest.raises(RuntimeError, match=r"was replaced after tilewise.compat.sdpa.patch\(\); undo that first"):
            patch.remove()
    finally:
        F.scaled_dot_product_attention = ours
        patch.remove()
    assert F.scaled_dot_product_attention is before


def looked_up(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_patched_functions_compile_whole():
    torch._dynamo.reset()
    with sdpa.patch():
        compiled = torch.compile(looked_up, backend="aot_eager", fullgraph=True, dynamic=True)
        for length in (9, 17, 33):
            q, k, v = (normal(2, 4, length, 8, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3))
            mask = normal(length, length) > -1
            results = []
            for function in (looked_up, compiled):
                o = function(q, k, v, mask)
                results.append([o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))])
            for want, got in zip(*results, strict=True):
                assert torch.equal(got, want)


def test_override_cpu_runs_under_torchs_function():
    leaves = [normal(2, 4, 33, 16, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3)]
    mask = normal(2, 1, 33, 33, dtype=torch.float32, seed=3)
    calls = ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask > -1}, {"scale": 0.2})

    def run(function):
        outputs = [function(*leaves, **options) for options in calls]
        return [x for o in outputs for x in (o, *torch.autograd.grad(o, leaves, torch.ones_like(o)))]

    torchs, own, before = run(F.scaled_dot_product_attention), run(ours), kernels(CPU_OPERATORS)
    with sdpa.override_cpu():
        assert kernels(CPU_OPERATORS) != before
        got = run(F.scaled_dot_product_attention)
        with pytest.raises(RuntimeError, match="is on already; remove"):
            sdpa.override_cpu()
    for a, b, c in zip(got, own, torchs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)  # the same kernel, in another layout
        torch.testing.assert_close(a, c, atol=5e-6, rtol=5e-6)
    assert any(not torch.equal(a, c) for a, c in zip(got, torchs, strict=True))
    assert kernels(CPU_OPERATORS) == before
    for a, c in zip(run(F.scaled_dot_product_attention), torchs, strict=True):
        assert torch.equal(a, c)


@pytest.mark.slow
def test_override_cpu_under_inductor():
    torch._dynamo.reset()
    with sdpa.override_cpu():
        compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), fullgraph=True)
        for leaves in (
            [normal(2, 4, 33, 16, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3)],
            [normal(2, 33, 4, 16, dtype=torch.float32, seed=seed).transpose(1, 2).requires_grad_() for seed in range(3)],
        ):
            results = []
            for function in (compiled, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)):
                o = function(*leaves)
                results.append([o, *torch.autograd.grad(o, leaves, torch.ones_like(o))])
            for got, want in zip(*results, strict=True):
                assert torch.equal(got, want) and got.stride() == want.stride()


def test_the_cpu_operators_refuse_dropout():
    with pytest.raises(UnsupportedError, match="dropout_p must be 0; torch sends dropout elsewhere"):
        sdpa.cpu_forward(X, X, X, 0.5)


def test_layouts_are_those_of_empty_like():
    for like in (normal(2, 4, 5, 8), normal(2, 5, 4, 8).transpose(1, 2), normal(2, 5, 3, 4, 8)[:, :, 1].transpose(1, 2)):
        for x in (normal(2, 5, 4, 8).transpose(1, 2), normal(2, 4, 5, 8)):
            got = sdpa.laid_out_as(x, like)
            assert torch.equal(got, x) and got.stride() == torch.empty_like(like).stride()
