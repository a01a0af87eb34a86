"""flash_attn's functions: signatures of the peer, the oracle's values and gradients, empty rows, dropout, and errors of both families."""

import importlib
import inspect
import json
from pathlib import Path

import pytest
import torch
from peer_oracle import call_of, check, qkv, randn

import tilewise as tw
from tilewise.compat import _translate, flash_attn, flash_attn_passes
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.testing import poison

SIGNATURES = json.loads((Path(__file__).parent / "signatures.json").read_text())  # of the peer's source
NAMES = [(module, name) for module, names in SIGNATURES.items() for name in names]
CU_Q, CU_K = torch.tensor([0, 7, 7, 20, 33], dtype=torch.int32), torch.tensor([0, 9, 12, 12, 40], dtype=torch.int32)
SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.3], [0.1, 0.0, 0.7, 0.2], [0.4, 0.3, 0.2, 0.1], [0.6, 0.05, 0.15, 0.9]])

WORDS = {  # the peer's arguments, and what they mean
    "full": ({}, tw.Full(), {}),
    "causal": ({"causal": True}, tw.Causal(), {}),
    "window": ({"window_size": (3, 2)}, tw.SlidingWindow(3, 2), {}),
    "left": ({"window_size": (torch.tensor(4), torch.tensor(-1))}, tw.SlidingWindow(4, None), {}),
    "right 0": ({"window_size": (-1, 0)}, tw.Causal(), {}),
    "causal window": ({"causal": True, "window_size": torch.tensor([5, 9])}, tw.SlidingWindow(5, 0), {}),
    "softcap": ({"softcap": 2.0, "causal": True, "softmax_scale": 0.7}, tw.Causal(), {"softcap": 2.0, "scale": 0.7}),
    "alibi": ({"alibi_slopes": SLOPES[0], "deterministic": True}, tw.Full(), {"alibi_slopes": SLOPES[0]}),
    "no softcap": ({"softcap": -1.0}, tw.Full(), {}),
}


@pytest.mark.parametrize("module, name", NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_signatures_are_the_peers(module, name):
    function = importlib.import_module(f"tilewise.compat.{module}")
    for part in name.split("."):
        function = getattr(function, part)
    parameters = [
        each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD
    ]  # an older peer's words
    assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    assert [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in parameters] == SIGNATURES[module][name]


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("dtype, dims", [(torch.float32, (16, 16)), (torch.bfloat16, (59, 59))], ids=["fp32", "bf16 d59"])
def test_batches(words, dtype, dims):
    options, mask, fields = WORDS[words]
    leaves = q, k, v = qkv(2, 9, 13, dims=dims, dtype=dtype)
    with poison.memory():
        o, lse, s_dmask = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert s_dmask.numel() == 0 and lse.dtype == torch.float32 and torch.equal(flash_attn.flash_attn_func(q, k, v, **options), o)
    check(call_of(*leaves, mask, **fields), o, lse, leaves)


@pytest.mark.parametrize("words", WORDS)
def test_packed_tensors(words):
    options, mask, fields = WORDS[words]
    q, k, v = qkv(2, 11, 11, heads=(4, 4))
    kv, all_three = torch.stack((k, v), 2).detach().requires_grad_(), torch.stack((q, k, v), 2).detach().requires_grad_()
    call = call_of(q, k, v, mask, **fields)
    for o, leaf in (
        (flash_attn.flash_attn_kvpacked_func(q, kv, **options), kv),
        (flash_attn.flash_attn_qkvpacked_func(all_three, **options), all_three),
    ):
        (got,) = torch.autograd.grad(o, leaf, randn(*o.shape, seed=9))
        expected = torch.autograd.grad(flash_attn.flash_attn_func(q, k, v, **options), (q, k, v), randn(*o.shape, seed=9))
        torch.testing.assert_close(got, torch.stack(expected[-got.shape[2] :], 2))
        check(call, o)


@pytest.mark.parametrize("words", WORDS)
def test_packed_sequences(words):
    options, mask, fields = WORDS[words]
    leaves = qkv(1, 35, 40)  # two rows belong to no sequence
    q, k, v = (x[0] for x in leaves)
    with poison.memory():
        o, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 13, torch.tensor(28), **options, return_attn_probs=True)
    assert (lse[:, 33:] == torch.inf).all() and (o[33:] == 0).all()
    if "alibi_slopes" in fields:
        fields = fields | {"diagonal": torch.tensor([2] * 7 + [-8] * 13 + [7] * 15)}
    call = call_of(*leaves, tw.Documents(CU_Q, CU_K, inner=mask), **fields)
    check(call, o[None], _translate.negative_infinity(lse)[None], leaves)


def test_packed_sequences_in_packed_tensors():
    x = randn(33, 3, 4, 16).requires_grad_()
    expected = flash_attn.flash_attn_varlen_func(*x.unbind(1), CU_Q, CU_Q, 13, 13, causal=True)
    whole = flash_attn.flash_attn_varlen_qkvpacked_func(x, CU_Q, 13, causal=True)
    parts = flash_attn.flash_attn_varlen_kvpacked_func(x[:, 0], x[:, 1:], CU_Q, CU_Q, 13, 13, causal=True)
    for got in (whole, parts):
        assert torch.equal(got, expected)
        torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), x, retain_graph=True)[0] for o in (got, expected)))


@pytest.mark.parametrize("causal", [False, True])
def test_slopes_by_sequence(causal):
    """(batch, heads) slopes of packed sequences: as many calls, and rows behind them."""
    q, k, v = (x.detach()[0].requires_grad_() for x in qkv(1, 35, 40))
    o, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 13, 28, causal=causal, alibi_slopes=SLOPES, return_attn_probs=True)
    d_o = randn(*o.shape, seed=9)
    grads = torch.autograd.grad(o, (q, k, v), d_o)
    mask = tw.Causal() if causal else tw.Full()
    for n, (q0, q1, k0, k1) in enumerate(zip(CU_Q, CU_Q[1:], CU_K, CU_K[1:], strict=False)):
        one = tuple(x.detach()[None, a:b].clone().requires_grad_() for x, a, b in ((q, q0, q1), (k, k0, k1), (v, k0, k1)))
        call = call_of(*one, mask, alibi_slopes=SLOPES[n])
        check(call, o[None, q0:q1], _translate.negative_infinity(lse)[None, :, q0:q1])
        alone = torch.autograd.grad(tw.attention(*one, causal=causal, alibi_slopes=SLOPES[n]), one, d_o[None, q0:q1])
        for got, expected, (a, b) in zip(grads, alone, ((q0, q1), (k0, k1), (k0, k1)), strict=True):
            torch.testing.assert_close(got[a:b], expected[0])
    assert (o[33:] == 0).all() and (lse[:, 33:] == torch.inf).all()


def test_pages_of_packed_sequences():
    pages, size = 9, 8
    k, v = randn(pages, size, 2, 16, seed=1).requires_grad_(), randn(pages, size, 2, 16, seed=2).requires_grad_()
    table = torch.tensor(
        [[4, 2, 0, 0], [7, 99, 99, 99], [-1, -1, -1, -1], [8, 1, 3, 5]], dtype=torch.int32
    )  # those not reached may be anything
    q = randn(33, 4, 16).requires_grad_()
    o = flash_attn.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 13, 28, causal=True, block_table=table)
    flat = [torch.cat([x[table[b].clamp(0, 8).long()].flatten(0, 1)[: CU_K[b + 1] - CU_K[b]] for b in range(4)]) for x in (k, v)]
    expected = flash_attn.flash_attn_varlen_func(q, *flat, CU_Q, CU_K, 13, 28, causal=True)
    assert torch.equal(o, expected)
    for got, wanted in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected)), strict=True):
        torch.testing.assert_close(got, wanted)
    with torch.no_grad():  # read where they lie, as `decode` does
        read, alone = (
            flash_attn.flash_attn_varlen_func(q, *kv, CU_Q, CU_K, 13, 28, causal=True, return_attn_probs=True, block_table=where)
            for kv, where in (((k, v), table), (flat, None))
        )
    for got, wanted in zip(read[:2], alone[:2], strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(RuntimeError, match=r"block_table\[3\] names pages \[9, 2, 4, 6\], but k has pages 0..8"):
        flash_attn.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 13, 28, block_table=table + 1)


@pytest.mark.parametrize("seqlen_k", [0, 3])
def test_empty_rows(seqlen_k):
    q, k, v = qkv(1, 5, seqlen_k)
    o, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[..., : 5 - seqlen_k] == torch.inf).all() and lse[..., 5 - seqlen_k :].isfinite().all() and (o[:, : 5 - seqlen_k] == 0).all()
    grads = torch.autograd.grad(o.sum() + lse[..., 5 - seqlen_k :].sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads) and (grads[0][:, : 5 - seqlen_k] == 0).all()


def test_dropout_draws_from_torchs_generator():
    q, k, v = qkv(2, 40, 40)
    torch.manual_seed(5)
    one, two = (flash_attn.flash_attn_func(q, k, v, dropout_p=0.3) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(one, tw.attention(q, k, v, dropout_p=0.3)) and not torch.equal(one, two)


def test_head_dims_of_caches_are_padded_where_the_device_asks(monkeypatch):
    """With zeros, to a multiple; the result and its shape are those of the head dims given."""
    monkeypatch.setitem(_translate.HEAD_DIM_MULTIPLE, "cpu", 8)
    leaves = q, k, v = qkv(2, 9, 13, dims=(59, 59))
    o = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True)
    assert o.shape == q.shape
    check(call_of(*leaves, tw.Causal()), o)


def test_it_compiles_whole():
    q, k, v = qkv(2, 9, 13)

    def function(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), return_attn_probs=True)[:2]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(q, k, v), function(q, k, v), strict=True):
        assert torch.equal(got, expected)


Q = randn(2, 5, 4, 8)
BOUNDS = torch.tensor([0, 5], dtype=torch.int32)
WRONG = {
    "heads": (
        lambda: flash_attn.flash_attn_func(Q, Q[:, :, :3], Q[:, :, :3]),
        "flash_attn.flash_attn_func: q has heads_q=4 and k has heads_k=3",
    ),
    "head_dim": (lambda: flash_attn.flash_attn_func(Q, Q[..., :7], Q), "k has head_dim 7, but q has head_dim 8"),
    "dims": (lambda: flash_attn.flash_attn_func(Q[0], Q, Q), "q must have 4 dimensions"),
    "scale": (lambda: flash_attn.flash_attn_func(Q, Q, Q, softmax_scale=float("nan")), "softmax_scale must be a finite number"),
    "window": (
        lambda: flash_attn.flash_attn_func(Q, Q, Q, window_size=3),
        r"window_size must be two integers \(left, right\), -1 for unbounded, got 3",
    ),
    "half a window": (lambda: flash_attn.flash_attn_func(Q, Q, Q, window_size=(1.5, 2)), r"window_size must be .*, got \(1.5, 2\)"),
    "window of tensors": (lambda: flash_attn.flash_attn_func(Q, Q, Q, window_size=(BOUNDS, 1)), "window_size must be two integers"),
    "no dropout": (lambda: flash_attn.flash_attn_func(Q, Q, Q, None, return_attn_probs=True), "dropout_p must be a number, got NoneType"),
    "dropout": (lambda: flash_attn.flash_attn_func(Q, Q, Q, dropout_p=1.0), r"dropout_p must be a finite number in \[0, 1\), got 1.0"),
    "kv": (lambda: flash_attn.flash_attn_kvpacked_func(Q, Q), "kv must have 5 dimensions"),
    "kv of three": (
        lambda: flash_attn.flash_attn_kvpacked_func(Q, torch.stack((Q, Q, Q), 2)),
        r"kv must be \(batch, seqlen_k, 2, heads_k, head_dim\), which holds k and v, got shape \(2, 5, 3, 4, 8\)",
    ),
    "qkv of two": (
        lambda: flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack((Q[0], Q[0]), 1), torch.tensor([0, 5]), 5),
        r"qkv must be \(total, 3, heads, head_dim\), which holds q and k and v, got shape \(5, 2, 4, 8\)",
    ),
    "short table": (
        lambda: flash_attn.flash_attn_varlen_func(
            Q[0], Q, Q, torch.tensor([0, 5]), torch.tensor([0, 7]), 5, 7, block_table=torch.tensor([[1]], dtype=torch.int32)
        ),
        r"length of cu_seqlens_k\[0\] is 7, but the cache holds .* block_table has 1 pages of 5 tokens",
    ),
    "slopes": (lambda: flash_attn.flash_attn_func(Q, Q, Q, alibi_slopes=torch.ones(3)), "alibi_slopes has heads_q 3, but q has heads_q 4"),
    "cu": (
        lambda: flash_attn.flash_attn_varlen_func(Q[0], Q[0], Q[0], torch.tensor([0, 3, 2]), torch.tensor([0, 5, 5]), 5, 5),
        "cu_seqlens_q must not decrease",
    ),
    "cu lengths": (
        lambda: flash_attn.flash_attn_varlen_func(Q[0], Q[0], Q[0], torch.tensor([0, 3, 5]), torch.tensor([0, 5]), 5, 5),
        "cu_seqlens_k has length 2, but cu_seqlens_q has length 3",
    ),
    **{
        f"cu, {name}": (
            lambda bounds=bounds: flash_attn.flash_attn_varlen_func(Q[0], Q[0], Q[0], bounds, bounds, 5, 5),
            "cu_seqlens_q must be a torch.Tensor",
        )
        for name, bounds in (("a list", [0, 5]), ("none", None))
    },
    "on meta": (
        lambda: flash_attn.flash_attn_varlen_func(*(x.to("meta") for x in (Q[0], Q[0], Q[0], BOUNDS, BOUNDS)), 5, 5),
        "is on the meta device",
    ),
    "packed slopes": (
        lambda: flash_attn.flash_attn_varlen_func(Q[0], Q[0], Q[0], torch.tensor([0, 5]), torch.tensor([0, 5]), 5, 5, alibi_slopes=SLOPES),
        "alibi_slopes has documents 4, but cu_seqlens_q has documents 1",
    ),
}


@pytest.mark.parametrize("call, words", WRONG.values(), ids=WRONG)
def test_errors_are_of_both_families(call, words):
    for family in (RuntimeError, ValueError, ShapeError):
        with pytest.raises(family, match=words) as caught:
            call()
    assert str(caught.value).startswith("tilewise.compat.flash_attn.flash_attn_")


def test_s_dmask_is_refused():
    with pytest.raises(
        UnsupportedError, match=r"flash_attn_func: return_attn_probs=True with dropout_p > 0 .* take dropout_p=0.0"
    ) as caught:
        flash_attn.flash_attn_func(Q, Q, Q, dropout_p=0.1, return_attn_probs=True)
    assert isinstance(caught.value, RuntimeError)


REPEATED = {
    "plain": {},
    "scale": {"softmax_scale": 0.3, "softcap": 2.0},
    "no softcap": {"softcap": -1.0, "causal": 1},
    "window": {"window_size": [3, 2]},
    "causal window": {"causal": True, "window_size": (3, 5)},
    "slopes": {"alibi_slopes": SLOPES[0], "deterministic": True},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", REPEATED.values(), ids=REPEATED)
def test_calls_like_one_before(options, packed, monkeypatch):
    """The same bits by whichever way, and other options in between are not mistaken for these."""
    others = [{}, {"causal": True}, {"window_size": (3, 5)}, {"causal": True, "window_size": (3, 2)}, {"softmax_scale": 0.7}]

    def run(options):
        leaves = qkv(1, 33, 33)
        given = [x.squeeze(0) for x in leaves] if packed else leaves
        attend = flash_attn.flash_attn_varlen_func if packed else flash_attn.flash_attn_func
        o = attend(*given, *((CU_Q, CU_Q, 13, 13) if packed else ()), **options)
        return o, *torch.autograd.grad(o, leaves, randn(*o.shape))

    def seeded(options):
        torch.manual_seed(0)
        return run(options)

    flash_attn.call_cache.forget()
    for each in (options, *others, options, *others):
        short = seeded(each)
        with monkeypatch.context() as patched:
            patched.setattr(flash_attn.call_cache, "find", lambda *_: None)
            assert all(map(torch.equal, short, seeded(each)))
    if not packed:
        monkeypatch.setattr(_translate, "attend", None)
        assert all(map(torch.equal, seeded(options), seeded(options)))  # indeed without it
    with pytest.raises(ShapeError, match="window_size"):
        run(options | {"window_size": 3})


def test_repeated_calls_draw_and_return_anew():
    """Dropout's numbers are others each time, LSE is returned by the call that asks for it, and bad input gets its error behind good."""
    q, k, v = qkv(1, 9, 9)
    plain = [flash_attn.flash_attn_func(q, k, v) for _ in range(3)]
    assert torch.equal(plain[0], plain[2]) and len(flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)) == 3
    drawn = [flash_attn.flash_attn_func(q, k, v, 0.5) for _ in range(3)]
    assert not any(torch.equal(a, b) for a, b in ((drawn[0], drawn[1]), (drawn[1], drawn[2])))
    torch.manual_seed(3)
    again = flash_attn.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(3)
    assert torch.equal(again, flash_attn.flash_attn_func(q, k, v, 0.5))
    scale = torch.tensor(0.3)
    for value in (0.3, 0.3, 0.7):
        scale.fill_(value)
        right = flash_attn.flash_attn_func(q, k, v, softmax_scale=float(scale))
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, softmax_scale=scale), right)
    for bad in ({"softmax_scale": "0.5"}, {"softcap": None, "alibi_slopes": SLOPES[0][:3]}, {"dropout_p": 1.5}):
        with pytest.raises(ShapeError):
            flash_attn.flash_attn_func(q, k, v, **bad)
    with pytest.raises(UnsupportedError, match="return_attn_probs"):
        flash_attn.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)


@pytest.mark.parametrize("front", [(3, 0), (0, 5), (3, 5)], ids=str)
@pytest.mark.parametrize("slopes", [None, SLOPES[0], SLOPES], ids=["", "alibi", "alibi by sequence"])
def test_sequences_that_begin_above_0(front, slopes):
    """As the same sequences alone: rows before the first and behind the last are empty, and have no gradient, nor have such keys."""
    rows, keys = front
    alone = [x.detach()[0].requires_grad_() for x in qkv(1, 35, 40)]
    wide = [
        torch.cat((torch.full((n, *x.shape[1:]), 7.0), x.detach())).requires_grad_() for n, x in zip((rows, keys, keys), alone, strict=True)
    ]
    words = {"causal": True, "alibi_slopes": slopes, "return_attn_probs": True}
    expected = flash_attn.flash_attn_varlen_func(*alone, CU_Q, CU_K, 13, 28, **words)
    for _ in range(3):  # a call that is remembered, too
        flash_attn.flash_attn_varlen_func(*wide, CU_Q, CU_K, 13, 28, causal=True, alibi_slopes=slopes)
        got = flash_attn.flash_attn_varlen_func(*wide, CU_Q + rows, CU_K + keys, 13, 28, causal=True, alibi_slopes=slopes)
        assert torch.equal(got[rows:], expected[0]) and not got[:rows].any()
    o, lse, _ = flash_attn.flash_attn_varlen_func(*wide, CU_Q + rows, CU_K + keys, 13, 28, **words)
    assert torch.equal(o, got) and torch.equal(lse[:, rows:], expected[1]) and (lse[:, :rows] == torch.inf).all()
    d_o = randn(*o.shape, seed=9)
    grads = torch.autograd.grad(o, wide, d_o)
    for a, b, n in zip(grads, torch.autograd.grad(expected[0], alone, d_o[rows:]), (rows, keys, keys), strict=True):
        assert torch.equal(a[n:], b) and not a[:n].any()
    into = [torch.full_like(x, torch.nan) for x in wide]
    tail = 0.0, 16**-0.5, True, -1, -1, 0.0, slopes, True
    passed = d_o, *(x.detach() for x in wide), o.detach(), lse.detach(), *into
    flash_attn_passes._flash_attn_varlen_backward(*passed, CU_Q + rows, CU_K + keys, 13, 28, *tail)
    for a, b in zip(into, grads, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(RuntimeError, match="cu_seqlens_q reaches position 36, but q has 35 tokens"):
        flash_attn.flash_attn_varlen_func(*alone, CU_Q + 3, CU_K, 13, 28)
    with pytest.raises(RuntimeError, match=r"cu_seqlens_q must begin with 0"):
        flash_attn.flash_attn_varlen_func(*alone, CU_Q - 1, CU_K, 13, 28)


def test_packed_tensors_and_pages_that_begin_above_0():
    x = randn(38, 3, 4, 16).requires_grad_()
    cu = CU_Q + 5
    expected = flash_attn.flash_attn_varlen_qkvpacked_func(x[5:], CU_Q, 13, causal=True)
    for o in (
        flash_attn.flash_attn_varlen_qkvpacked_func(x, cu, 13, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(x[:, 0], x[:, 1:], cu, cu, 13, 13, causal=True),
    ):
        assert torch.equal(o[5:], expected) and not o[:5].any()
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (o, expected)))
    q, pages = randn(9, 4, 16), randn(6, 8, 2, 16, seed=2)
    table, ends = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32), torch.tensor([0, 9, 22], dtype=torch.int32)
    rows = torch.tensor([0, 4, 7], dtype=torch.int32)
    words = {"causal": True, "block_table": table, "return_attn_probs": True}
    o, lse, _ = flash_attn.flash_attn_varlen_func(q[2:], pages, pages, rows, ends, 4, 13, **words)
    got, got_lse, _ = flash_attn.flash_attn_varlen_func(q, pages, pages, rows + 2, ends + 3, 4, 13, **words)
    assert torch.equal(got[2:], o) and torch.equal(got_lse[:, 2:], lse) and not got[:2].any() and (got_lse[:, :2] == torch.inf).all()
