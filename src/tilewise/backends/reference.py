"""The oracle: attention by the textbook formula on the whole score matrix, in fp64.

    S = scale Q K^T;  S = softcap tanh(S / softcap);  S += bias - slope |i + diagonal - j|;  S = -inf where hidden
    P = softmax([S, sink]) without its last column;  LSE = log(sum(exp([S, sink])));  O = dropout(P) V

`eager` is the formula in differentiable torch operations, at any precision: in fp64 it is the reference, in the input's dtype it is the
naive implementation that the tolerance measures by. `Reference` is the same as a backend, with the backward pass written out.

What the mask hides never enters a product, so that NaN or inf there cannot leak as 0 * NaN. Hence two products in place of matmul, each
one's gradient made of the other: `pair_products` (rows times rows, at visible pairs only) and `weigh` (sums of rows over visible pairs).
Inside, the query heads that share a key head are folded into its rows, so that K and V are never repeated:
q is (batch, heads_k, group * seqlen_q, head_dim).
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Backend, philox
from tilewise.backends.eight_bits import exact
from tilewise.errors import EIGHT_BITS
from tilewise.problem import Call, Gradients, Problem

INF = float("inf")

TERMS = 128  # over 4,096 in one sum fp64 was 7e-16 off on values of size 1, over 32 sums of 128 1e-16 (AMD EPYC, MKL, 2026-11)


class Reference(Backend):
    """The fp64 oracle as a backend. It takes every problem; its memory grows with seqlen_q * seqlen_k."""

    name = "reference"
    by_name = "it keeps the whole score matrix in fp64, so it runs only when asked for by name"
    eight_bits = True  # it computes what they stand for, and what `precision` would round, in fp64
    keeps_row_max = True

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def tile(self, call: Call) -> None:
        return None

    @torch.no_grad()
    def forward(self, call: Call) -> tuple[Tensor, ...]:
        """O in q's dtype, or call.out_dtype, LSE and the rows' largest scores in fp32 (fp64 for fp64), all rounded from fp64."""
        statistics = lse_dtype(call.q.dtype)
        given = exact(call) if call.q.dtype in EIGHT_BITS else call
        o, lse = eager(given)
        largest = (row_max(given).to(statistics),) if call.row_max else ()
        return o.to(call.out_dtype or call.q.dtype), lse.to(statistics), *largest

    @torch.no_grad()
    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """Gradients by hand from the caller's `o` and `lse`, rounded from fp64 to the dtypes of the inputs."""
        exact = differentiate(call, linearise(call, lse), delta(call, o, lse, d_o, d_lse), d_o)
        inputs = (call.q, call.k, call.v, call.bias if bias_grad else None, call.sink)
        return Gradients._make(None if x is None or g is None else g.to(x.dtype) for g, x in zip(exact, inputs, strict=True))

    def backward_autograd(self, call: Call, d_o: Tensor, d_lse: Tensor | None = None) -> Gradients:
        """Gradients by torch's autograd, in fp64 and unrounded, the bias's included."""
        return autograd(call, d_o, d_lse, torch.float64)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the row statistics for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(call: Call, dtype: torch.dtype) -> Call:
    """The same call with q, k, v, bias and sink in `dtype`."""
    return replace(
        call,
        q=call.q.to(dtype),
        k=call.k.to(dtype),
        v=call.v.to(dtype),
        bias=None if call.bias is None else call.bias.to(dtype),
        sink=None if call.sink is None else call.sink.to(dtype),
    )


def eager(call: Call, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads_q, head_dim_v) and LSE (batch, heads_q, seqlen_q), both in `dtype` and differentiable."""
    call = cast(call, dtype)
    scores = visible_scores(call)
    logits = torch.cat([scores.s, sink_column(call, scores.s)], dim=-1)
    top = logits.detach().amax(-1, keepdim=True)
    empty = top == -INF
    logits, top = logits.masked_fill(empty, 0.0), top.masked_fill(empty, 0.0)
    lse = (top + (logits - top).exp().sum(-1, keepdim=True).log()).masked_fill(empty, -INF)
    p = logits.softmax(-1)[..., :-1].masked_fill(~scores.visible, 0.0)
    keep = dropout_factor(call)
    p = p if keep is None else p * keep
    return unfold(call, Weigh.apply(p, call.v.transpose(1, 2), scores.visible)), lse.reshape(call.batch, call.heads_q, call.seqlen_q)


def row_max(call: Call, dtype: torch.dtype = torch.float64) -> Tensor:
    """The largest visible score of each row, (batch, heads_q, seqlen_q) in `dtype`; NaN where a visible score is NaN or +inf."""
    s = visible_scores(cast(call, dtype)).s
    largest = torch.nn.functional.pad(s, (1, 0), value=-INF).amax(-1)  # NaN where a score is
    return largest.masked_fill(largest == INF, torch.nan).reshape(call.batch, call.heads_q, call.seqlen_q)


def autograd(call: Call, d_o: Tensor, d_lse: Tensor | None, dtype: torch.dtype) -> Gradients:
    """Gradients of `eager` by torch's autograd, computed and returned in `dtype`, the bias's included."""
    call = cast(call, dtype)
    tensors = {name: getattr(call, name) for name in Gradients._fields}
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
    with torch.enable_grad():
        o, lse = eager(replace(call, **leaves), dtype)
        reach = [(o, d_o.to(dtype))] + ([] if d_lse is None else [(lse, d_lse.to(dtype))])
        grads = torch.autograd.grad([y for y, _ in reach], list(leaves.values()), [g for _, g in reach])
    found = dict(zip(leaves, grads, strict=True))
    return Gradients._make(map(found.get, Gradients._fields))


class Scores(NamedTuple):
    """Scores before the softmax, each (batch, heads_k, group * seqlen_q, seqlen_k)."""

    s: Tensor  # -inf where hidden
    visible: Tensor  # bool; a row with all visible scores at -inf sees nothing
    chain: Tensor | None  # d s / d (scale q.k), where softcap makes it other than 1


def visible_scores(call: Call) -> Scores:
    """Scores in the dtype of `call`, differentiable in q, k and bias."""
    visible = visibility(call)
    scores = _scores(call, visible)
    live = ~(scores.s == -INF).all(-1, keepdim=True)
    return scores if (visible <= live).all() else _scores(call, visible & live)


def _scores(call: Call, visible: Tensor) -> Scores:
    s, chain = PairProducts.apply(fold(call, call.q), call.k.transpose(1, 2), visible) * call.scale, None
    if call.softcap > 0.0:
        inner = s / call.softcap
        s, chain = call.softcap * torch.tanh(inner), inner.detach().cosh() ** -2  # of which 1 - tanh^2 has nothing left near the cap
    if call.bias is not None:
        s = s + _per_pair(call, call.bias).masked_fill(~visible, 0.0)
    if call.alibi_slopes is not None:
        s = s + _per_pair(call, alibi(call)).to(s.dtype)
    return Scores(s.masked_fill(~visible, -INF), visible, chain)


def visibility(call: Call) -> Tensor:
    """Which pairs the mask shows: bool (batch, heads_k, group * seqlen_q, seqlen_k)."""
    shown = torch.zeros(call.batch, call.heads_q, call.seqlen_q, call.seqlen_k, dtype=torch.bool, device="cpu")
    for plane in call.mask.planes(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q):
        batch, heads = (slice(r.start, r.stop, r.step) for r in (plane.batch, plane.heads))
        shown[batch, heads] = torch.from_numpy(plane.region.dense())
    return _per_pair(call, shown.to(call.q.device))


def alibi(call: Call) -> Tensor:
    """-slope |i + diagonal[i] - j| in fp64: (batch or 1, heads_q, seqlen_q, seqlen_k)."""
    assert call.alibi_slopes is not None
    device, new = call.q.device, {"dtype": torch.int64, "device": call.q.device}
    diagonal = call.seqlen_k - call.seqlen_q if call.diagonal is None else call.diagonal.to(device)
    position = torch.arange(call.seqlen_q, **new) + diagonal
    distance = (position[:, None] - torch.arange(call.seqlen_k, **new)).abs()
    return -call.alibi_slopes.double()[..., None, None] * distance


def dropout_factor(call: Call) -> Tensor | None:
    """What dropout multiplies each probability by (0 or 1 / (1 - p)): (batch, heads_k, group * seqlen_q, seqlen_k) in q's dtype."""
    if call.dropout is None:
        return None
    batch, heads = range(call.batch), range(call.heads_q)
    kept = philox.keep(call.dropout, batch, heads, 0, call.seqlen_q, 0, call.seqlen_k, call.heads_q, call.q.device)
    return _per_pair(call, kept).to(call.q.dtype) * philox.keep_scale(call.dropout.p)


class Linear(NamedTuple):
    """Everything that the gradients are linear in d_o and delta through: the forward pass at one point."""

    p: Tensor  # before dropout, 0 where hidden
    visible: Tensor
    keep: Tensor | None  # dropout_factor
    chain: Tensor | None  # of softcap
    sink: Tensor | None  # the sink's probability (batch, heads_k, group * seqlen_q, 1)
    scale: float

    def squared(self) -> "Linear":
        """Every coefficient squared: `differentiate` then gives the sum of the squares of the terms that make up each gradient."""
        keep, chain, sink = (None if x is None else x * x for x in (self.keep, self.chain, self.sink))
        return Linear(self.p * self.p, self.visible, keep, chain, sink, self.scale**2)


def linearise(call: Call, lse: Tensor, dtype: torch.dtype = torch.float64) -> Linear:
    """Recompute P = exp(S - LSE) in `dtype` from the forward's `lse` (batch, heads_q, seqlen_q)."""
    call = cast(call, dtype)
    scores, lse = visible_scores(call), _per_row(call, lse)
    base = lse.masked_fill(lse == -INF, 0.0)
    p = (scores.s - base).clamp(max=0.0).exp().masked_fill(~scores.visible, 0.0)  # a large LSE is rounded to below its scores
    sink = None if call.sink is None else (sink_column(call, scores.s) - base).clamp(max=0.0).exp()
    return Linear(p, scores.visible, dropout_factor(call), scores.chain, sink, call.scale)


def delta(call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """delta_i = rowsum(dO_i * O_i) - dLSE_i in `dtype`, (batch, heads_k, group * seqlen_q, 1); 0 for rows that see nothing.

    FlashAttention-2 (Dao 2023), section 3.1.2, Algorithm 2 line 4; the second term is the gradient that reaches LSE itself.
    """
    call = cast(call, dtype)
    blind = ~visibility(call).any(-1, keepdim=True)
    row = fold(call, d_o.to(dtype) * o.to(dtype)).sum(-1, keepdim=True).masked_fill(blind, 0.0)
    if d_lse is None:
        return row
    return row - _per_row(call, d_lse).masked_fill(_per_row(call, lse) == -INF, 0.0)


def differentiate(call: Call, at: Linear, delta: Tensor, d_o: Tensor) -> Gradients:
    """All gradients in the dtype of the forward pass `at`, from delta and d_o; the bias's and the sink's only where `call` has them."""
    call = cast(call, at.p.dtype)
    q, k, v, d_o = fold(call, call.q), call.k.transpose(1, 2), call.v.transpose(1, 2), fold(call, d_o.to(at.p.dtype))
    seen_by = at.visible.mT
    p = at.p if at.keep is None else at.p * at.keep
    d_v = weigh(p.mT, d_o, seen_by)  # dV = dropout(P)^T dO
    d_p = pair_products(d_o, v, at.visible)  # dP = dO V^T, through dropout
    d_p = d_p if at.keep is None else d_p * at.keep
    d_s = (at.p * (d_p - delta)).masked_fill(~at.visible, 0.0)  # dS = P (dP - delta)
    d_qk = (d_s if at.chain is None else d_s * at.chain) * at.scale
    d_q = weigh(d_qk, k, at.visible)  # dQ = scale dS K
    d_k = weigh(d_qk.mT, q, seen_by)  # dK = scale dS^T Q, summed over the group by the fold
    rows = (call.batch, call.heads_q, call.seqlen_q)
    d_bias = None if call.bias is None else d_s.reshape(*rows, call.seqlen_k).sum_to_size(call.bias.shape)
    d_sink = None if at.sink is None else -(at.sink * delta).reshape(rows).sum((0, 2))  # the sink's value is 0, so its dP is 0
    return Gradients(unfold(call, d_q), d_k.transpose(1, 2), d_v.transpose(1, 2), d_bias, d_sink)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, in fp64 as the sum of products of TERMS terms: a CPU's matrix product may add up an element's terms one after another."""
    if a.dtype != torch.float64 or a.shape[-1] <= TERMS:
        return a @ b
    return sum((x @ y for x, y in zip(a.split(TERMS, -1), b.split(TERMS, -2), strict=True)), start=a.new_zeros(()))


def pair_products(a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
    """a_i . b_j at the visible pairs, 0 elsewhere: a (..., m, d), b (..., n, d), visible (..., m, n)."""
    return product(a, b.mT).masked_fill(~visible, 0.0)


def weigh(weights: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """Sum over visible j of weights_ij rows_j: weights (..., m, n), 0 where hidden; rows (..., n, d), anything where hidden."""
    bad = ~rows.isfinite().all(-1)  # (..., n)
    if not bad.any():
        return product(weights, rows)
    total = product(weights, rows.masked_fill(bad[..., None], 0.0))
    for j in bad.flatten(0, -2).any(0).nonzero().flatten().tolist():
        read = (visible[..., j] & bad[..., j, None])[..., None]
        total = total + (weights[..., j, None] * rows[..., None, j, :]).masked_fill(~read, 0.0)
    return total


class PairProducts(torch.autograd.Function):
    """`pair_products`, differentiable."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, visible)
        return pair_products(a, b, visible)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, visible = ctx.saved_tensors
        grad = grad.masked_fill(~visible, 0.0)
        return weigh(grad, b, visible), weigh(grad.mT, a, visible.mT), None


class Weigh(torch.autograd.Function):
    """`weigh`, differentiable."""

    @staticmethod
    def forward(ctx, weights: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
        ctx.save_for_backward(weights, rows, visible)
        return weigh(weights, rows, visible)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, rows, visible = ctx.saved_tensors
        return pair_products(grad, rows, visible), weigh(weights.mT, grad, visible.mT), None


def fold(call: Call, x: Tensor) -> Tensor:
    """(batch, seqlen_q, heads_q, d) as (batch, heads_k, group * seqlen_q, d)."""
    return x.transpose(1, 2).reshape(call.batch, call.heads_k, call.group * call.seqlen_q, x.shape[-1])


def unfold(call: Call, x: Tensor) -> Tensor:
    """The inverse of `fold`."""
    return x.reshape(call.batch, call.heads_q, call.seqlen_q, x.shape[-1]).transpose(1, 2)


def _per_row(call: Call, x: Tensor) -> Tensor:
    """(batch, heads_q, seqlen_q) as (batch, heads_k, group * seqlen_q, 1) in q's dtype."""
    return x.to(call.q.dtype).reshape(call.batch, call.heads_k, call.group * call.seqlen_q, 1)


def _per_pair(call: Call, x: Tensor) -> Tensor:
    """(batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k) as (batch, heads_k, group * seqlen_q, seqlen_k)."""
    whole = x.expand(call.batch, call.heads_q, call.seqlen_q, call.seqlen_k)
    return whole.reshape(call.batch, call.heads_k, call.group * call.seqlen_q, call.seqlen_k)


def sink_column(call: Call, s: Tensor) -> Tensor:
    """The sink as one more column of the scores: (batch, heads_k, group * seqlen_q, 1), -inf without a sink."""
    if call.sink is None:
        return s.new_full((*s.shape[:-1], 1), -INF)
    column = call.sink.to(s.dtype)[:, None, None].expand(call.batch, call.heads_q, call.seqlen_q, 1)
    return column.reshape(*s.shape[:-1], 1)
