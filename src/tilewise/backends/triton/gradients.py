"""The gradients of a bound call: `prepare`, `dkdv`, `dq`, and those of a bias and a sink."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tilewise.backends import OfInputs
from tilewise.backends.triton.config import ROWS, SMALL
from tilewise.backends.triton.kernels import backward
from tilewise.backends.triton.kernels import bias as bias_kernels
from tilewise.backends.triton.launch import on
from tilewise.backends.triton.tape import scratch
from tilewise.errors import check_memory
from tilewise.problem import gradient_like


class Gradients:
    """The gradients of a bound call."""

    def __init__(self, bound, keys, queries) -> None:
        """bound: `bound.Bound`; keys, queries: its `bound.Visible` of dkdv's tiles, by keys, and of dq's."""
        self.bound, self.dkdv, self.dq = bound, bound.config_of("dkdv"), bound.config_of("dq")
        self.keys, self.queries = keys, queries
        like = bound.like
        wide = torch.float32 if like.wide_keys else like.q.dtype
        meta = (gradient_like(like.q), like.q.dtype), (gradient_like(like.k), wide), (gradient_like(like.v), wide)
        self.layouts = [(x.shape, x.stride(), dtype) for x, dtype in meta]  # of dQ, dK and dV

    def __call__(self, q, k, v, o, lse, d_o, d_lse, extras, bias_grad) -> OfInputs:
        """See `Bound.backward`."""
        bound = self.bound
        d_o = d_o if d_o.stride(-1) == 1 else d_o.contiguous()
        o = o if o.stride(-1) == 1 else o.contiguous()
        d_q, d_k, d_v = (torch.empty_strided(shape, stride, dtype=dtype, device=bound.device) for shape, stride, dtype in self.layouts)
        delta = torch.empty_like(lse)
        d_bias = torch.empty(extras[0].shape, dtype=extras[0].dtype, device=bound.device) if bias_grad else None
        d_lse = None if d_lse is None else d_lse.float().contiguous()
        read, written = {"q": q, "k": k, "v": v, "o": o, "d_o": d_o}, {"d_q": d_q, "d_k": d_k, "d_v": d_v}
        given = {**read, **written, "lse": lse, "delta": delta, "d_lse": d_lse, "d_bias": d_bias}
        with on(bound.device):
            bound.tapes.run(
                ("backward", o.stride(), d_o.stride(), d_lse is None, bias_grad),
                {**given, **bound.of_extras(extras)},
                (*self.keys.arguments.values(), *self.queries.arguments.values()),
                lambda: self._launch(given, extras),
            )
        sink = extras[2]
        d_sink = None if sink is None else _of_sink(sink, lse, delta)
        return d_q, d_k, d_v, d_bias, d_sink

    def _launch(self, given: Mapping[str, Tensor], extras: tuple[Tensor | None, ...]) -> None:
        """Launch all of the backward pass. given: what it reads and writes, by name."""
        check_memory(**{{"d_o": "dO"}.get(name, name): given[name] for name in ("q", "k", "v", "o", "lse", "d_o")})
        bound, call, (bias, slopes, sink, rng, *packed) = self.bound, self.bound.like, extras
        sizes = {"seqlen_q": call.seqlen_q, "seqlen_k": call.seqlen_k, "heads": bound.heads, "sink": sink}
        sizes |= {name: given[name] for name in ("lse", "delta")}
        pairs, inputs = bound.batch * bound.heads, {name: given[name] for name in ("q", "k", "v", "d_o")}
        m_tiles = -(-call.seqlen_q // ROWS)
        rows = max(m_tiles, 1) * ROWS  # tables list a tile for keys that nobody sees, even where there are no queries
        sizes["statistics"] = scratch((bound.batch, bound.heads, 2, rows), torch.float32, bound.device)
        if pairs * m_tiles:
            operands, d_lse = {name: given[name] for name in ("o", "d_o")}, given["d_lse"]
            run = bound.run(backward.prepare, SMALL, "", operands, D_LSE=d_lse is not None, SINK=sink is not None)
            run(m_tiles * pairs, bound.arguments(operands, None, None, None) | sizes | {"m_tiles": m_tiles, "d_lse": d_lse})
        n_tiles = -(-call.seqlen_k // self.dkdv.tile_n)
        if pairs * n_tiles:
            operands = inputs | {name: given[name] for name in ("d_k", "d_v")}
            arguments = bound.arguments(operands, bias, slopes, rng) | sizes | {"n_tiles": n_tiles} | self.keys.of(*packed[:2])
            programs = n_tiles * (pairs // call.group)
            bound.twice(backward.dkdv, self.dkdv, self.keys, operands, **bound.of_bias(bias))(programs, arguments)
        m_tiles = -(-call.seqlen_q // self.dq.tile_m)
        if pairs * m_tiles:
            operands = inputs | {"d_q": given["d_q"]}
            arguments = bound.arguments(operands, bias, slopes, rng) | sizes | {"m_tiles": m_tiles} | self.queries.of(*packed[:2])
            bound.twice(backward.dq, self.dq, self.queries, operands, **bound.of_bias(bias))(m_tiles * pairs, arguments)
        if given["d_bias"] is not None:
            self._of_bias(inputs, given["d_bias"], sizes, extras)

    def _of_bias(self, operands: Mapping[str, Tensor], d_bias: Tensor, sizes: Mapping, extras: tuple[Tensor | None, ...]) -> None:
        """Write dBias, shaped as the bias, from what the others take, LSE and delta in `sizes` among it."""
        bound, (bias, slopes, _, rng, *packed) = self.bound, extras
        batch, heads, rows, _ = d_bias.shape
        each = {"EACH_BATCH": batch > 1, "EACH_HEAD": heads > 1, "EACH_ROW": rows > 1}
        m_tiles, n_tiles = -(-bound.like.seqlen_q // self.dq.tile_m), -(-bound.like.seqlen_k // self.dq.tile_n)
        programs = n_tiles * (m_tiles if rows > 1 else 1) * batch * heads if rows else 0
        if programs:
            more = {"d_bias": d_bias, "batch": bound.batch, "m_tiles": m_tiles, "n_tiles": n_tiles}
            arguments = bound.arguments(operands, bias, slopes, rng) | sizes | more | self.queries.of(*packed[:2])
            each |= bound.of_bias(bias)
            bound.run(bias_kernels.dbias, self.dq, self.queries.kind, operands, **each)(programs, arguments)


def _of_sink(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink's probability is exp(sink - LSE), and dS = P (dP - delta) of a dP of 0; a row that nothing reaches, its sink included, gives 0."""
    p = torch.exp(sink.float()[:, None] - lse)
    d_s = torch.where(lse == -math.inf, 0.0, p * delta)
    return d_s.sum((0, 2)).neg_().to(sink.dtype)
