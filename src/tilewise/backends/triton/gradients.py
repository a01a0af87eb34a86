"""The gradients of a bound call: `prepare`, `dkdv`, `dq`, and those of a bias and a sink."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tilewise.backends.triton.config import ROWS, SMALL
from tilewise.backends.triton.kernels import backward, repair
from tilewise.backends.triton.kernels import bias as bias_kernels
from tilewise.backends.triton.launch import on
from tilewise.errors import check_memory
from tilewise.problem import gradient_like


class Gradients:
    """The gradients of a bound call."""

    def __init__(self, bound, keys, queries) -> None:
        """bound: `bound.Bound`; keys, queries: its `bound.Visible` of dkdv's tiles, by keys, and of dq's."""
        self.bound, self.dkdv, self.dq = bound, bound.config_of("dkdv"), bound.config_of("dq")
        self.keys, self.queries = keys, queries

    def __call__(self, q, k, v, o, lse, d_o, d_lse, extras, bias_grad) -> tuple[Tensor | None, ...]:
        """See `Bound.backward`."""
        bound, call = self.bound, self.bound.like
        bias, slopes, sink, rng, *packed = extras
        d_o = d_o if d_o.stride(-1) == 1 else d_o.contiguous()
        o = o if o.stride(-1) == 1 else o.contiguous()
        check_memory(q=q, k=k, v=v, o=o, lse=lse, dO=d_o)
        wide = torch.float32 if call.wide_keys else q.dtype
        of_inputs = (q, q.dtype), (k, wide), (v, wide)
        d_q, d_k, d_v = (torch.empty_like(gradient_like(x), dtype=dtype, device=x.device) for x, dtype in of_inputs)
        delta = torch.empty_like(lse)
        sizes = {"seqlen_q": call.seqlen_q, "seqlen_k": call.seqlen_k, "heads": bound.heads, "lse": lse, "delta": delta, "sink": sink}
        pairs = bound.batch * bound.heads
        m_tiles = -(-call.seqlen_q // ROWS)
        with on(bound.device):
            if pairs * m_tiles:
                operands = {"o": o, "d_o": d_o}
                run = bound.run(backward.prepare, SMALL, "", operands, D_LSE=d_lse is not None, SINK=sink is not None, **bound.widths)
                d_lse = None if d_lse is None else d_lse.float().contiguous()
                run(m_tiles * pairs, bound.arguments(operands, None, None, None) | sizes | {"m_tiles": m_tiles, "d_lse": d_lse})
            n_tiles = -(-call.seqlen_k // self.dkdv.tile_n)
            if pairs * n_tiles:
                operands = {"q": q, "k": k, "v": v, "d_o": d_o, "d_k": d_k, "d_v": d_v}
                arguments = bound.arguments(operands, bias, slopes, rng) | sizes | {"n_tiles": n_tiles} | self.keys.of(*packed[:2])
                programs = n_tiles * (pairs // call.group)
                bound.run(backward.dkdv, self.dkdv, self.keys.kind, operands)(programs, arguments)
                bound.run(repair.repair_columns, self.dkdv, self.keys.kind, operands, **bound.widths)(programs, arguments)
            m_tiles = -(-call.seqlen_q // self.dq.tile_m)
            if pairs * m_tiles:
                operands = {"q": q, "k": k, "v": v, "d_o": d_o, "d_q": d_q}
                arguments = bound.arguments(operands, bias, slopes, rng) | sizes | {"m_tiles": m_tiles} | self.queries.of(*packed[:2])
                bound.run(backward.dq, self.dq, self.queries.kind, operands)(m_tiles * pairs, arguments)
                bound.repair_rows(self.dq, self.queries, {"q": q, "k": k, "v": v, "d_o": d_o, "x": d_q}, arguments, m_tiles)
            d_bias = self.of_bias(q, k, v, d_o, sizes, extras) if bias_grad else None
        d_sink = None if sink is None else _of_sink(sink, lse, delta)
        return d_q, d_k, d_v, d_bias, d_sink

    def of_bias(self, q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, sizes: Mapping, extras: tuple[Tensor | None, ...]) -> Tensor:
        """dBias, shaped as the bias, from what the others take, LSE and delta in `sizes` among it."""
        bound, (bias, slopes, _, rng, *packed) = self.bound, extras
        d_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
        each = {"EACH_BATCH": bias.shape[0] > 1, "EACH_HEAD": bias.shape[1] > 1, "EACH_ROW": bias.shape[2] > 1}
        m_tiles, n_tiles = -(-bound.like.seqlen_q // self.dq.tile_m), -(-bound.like.seqlen_k // self.dq.tile_n)
        programs = n_tiles * (m_tiles if each["EACH_ROW"] else 1) * bias.shape[0] * bias.shape[1]
        if programs:
            operands = {"q": q, "k": k, "v": v, "d_o": d_o}
            more = {"d_bias": d_bias, "batch": bound.batch, "m_tiles": m_tiles, "n_tiles": n_tiles}
            arguments = bound.arguments(operands, bias, slopes, rng) | sizes | more | self.queries.of(*packed[:2])
            bound.run(bias_kernels.dbias, self.dq, self.queries.kind, operands, **each)(programs, arguments)
        return d_bias


def _of_sink(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink's probability is exp(sink - LSE), and dS = P (dP - delta) of a dP of 0; a row that nothing reaches, its sink included, gives 0."""
    p = torch.exp(sink.float()[:, None] - lse)
    d_s = torch.where(lse == -math.inf, 0.0, p * delta)
    return d_s.sum((0, 2)).neg_().to(sink.dtype)
