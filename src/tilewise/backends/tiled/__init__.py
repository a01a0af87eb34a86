"""The derivation as a backend for any torch device: FlashAttention-2 forward and backward, on the tiles that the mask leaves visible.

Equation numbers are those of docs/algorithm.md. Nothing of size seqlen_q x seqlen_k exists: one score tile lives at a time, and what
outlives it is O(seqlen). Differences of scores are exponents, never scores themselves: however large they are, the maximum's is exactly 0.
The queries of a group's heads are interleaved, and one matrix product serves them all against the only copy of K and V.
"""

import math

import torch
from torch import Tensor

from tilewise.backends import Backend
from tilewise.backends.eight_bits import TILE
from tilewise.backends.tiled import eight_bits
from tilewise.backends.tiled.parts import ALL, Block, Predicate, cut, default_tile, parts
from tilewise.backends.tiled.products import accumulate, care
from tilewise.backends.tiled.scores import Scores
from tilewise.errors import EIGHT_BITS, check_capture
from tilewise.problem import Call, Gradients, Problem

_EXCESS = 1e-2  # how far s may be above LSE: more than rounding makes of it where |s| < 1e4, so that a clamp changes nothing there
CAPTURE = "kernels on a Hopper GPU, which take bf16 and fp16, read none"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Tiled(Backend):
    """FlashAttention-2 in torch operations. `tile_m` and `tile_n` fix the tile; by default it follows the lengths.

    In 8 bits P is rounded tile by tile, so tile_n changes results: the emulation of a kernel with other tiles than TILE keys asks for its own.
    """

    name = "tiled"
    eight_bits = True
    keeps_row_max = True

    def __init__(self, tile_m: int | None = None, tile_n: int | None = None) -> None:
        self.tile_m, self.tile_n = tile_m, tile_n

    def why_not(self, problem: Problem) -> list[str]:
        """Sentences that say why this backend cannot run `problem`; empty when it can."""
        wrong = [f"in 8 bits it has no {name}" for name in ("bias", "dropout") if problem.eight_bits and getattr(problem, name)]
        if problem.dtype in EIGHT_BITS:
            return wrong
        return problem.mixed + wrong if problem.dtype in _DTYPES else [f"it computes fp64, fp32, bf16 and fp16, not {problem.dtype}"]

    def tile(self, call: Call) -> tuple[int, int]:
        """(tile_m, tile_n) that `call` is cut into."""
        tile_m, tile_n = default_tile(call)
        return self.tile_m or tile_m, self.tile_n or (TILE if call.problem.eight_bits else tile_n)

    def forward(self, call: Call) -> tuple[Tensor, ...]:
        """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q), fp32 (fp64 for fp64 inputs), and so row_max."""
        check_capture(call.q, "backend 'tiled'", CAPTURE)
        if call.problem.eight_bits:
            return eight_bits.forward(call, self.tile(call))
        dtype = _compute_dtype(call)
        o = call.q.new_zeros((*call.q.shape[:3], call.head_dim_v))
        lse = call.q.new_full((call.batch, call.heads_q, call.seqlen_q), -math.inf, dtype=dtype)
        row_max = lse.clone() if call.row_max else None
        if call.sink is not None:
            lse.copy_(call.sink[:, None])  # a row without keys has the sink alone in its denominator
        needed = care(call)
        for part in parts(call, self.tile(call)):
            scores = Scores(part, dtype, needed)
            v = part.pack(part.keys(call.v), dtype)
            o_part, lse_part = part.queries(o), part.statistics(lse)
            for block in part.query_blocks(dtype):
                tile_o, tile_lse, tile_max = _forward_rows(scores, v, block)
                o_part[:, :, block.start : block.stop] = tile_o
                lse_part[:, :, block.start : block.stop] = tile_lse
                if row_max is not None and tile_max is not None:
                    part.statistics(row_max)[:, :, block.start : block.stop] = tile_max
        return (o, lse) if row_max is None else (o, lse, row_max)

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """Gradients given the forward's outputs and the gradients that reach them; the bias's only where `bias_grad` asks for it."""
        check_capture(call.q, "backend 'tiled'", CAPTURE)
        dtype = _compute_dtype(call)
        inputs = (call.q, call.k, call.v, call.bias if bias_grad else None, call.sink)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in inputs[:3])
        d_bias, d_sink = (x if x is None else torch.zeros(x.shape, dtype=dtype, device=x.device) for x in inputs[3:])
        needed = care(call, d_o)
        for part in parts(call, self.tile(call)):
            scores = Scores(part, dtype, needed)
            v = part.pack(part.keys(call.v), dtype)
            rows = Rows(scores, o, lse, d_o, d_lse)
            if d_sink is not None:
                part.per_head(d_sink).add_(rows.d_sink)
            outputs = part.queries(dq), None if d_bias is None else part.pairs(d_bias)
            dk_part, dv_part = part.keys(dk), part.keys(dv)
            for block in part.key_blocks(dtype):
                columns = slice(block.start, block.stop)
                tile_dk, tile_dv = _backward_columns(scores, v[:, columns], rows, block, outputs)
                dk_part[:, :, columns] += tile_dk
                dv_part[:, :, columns] += tile_dv
        dq.mul_(call.scale)
        dk.mul_(call.scale)
        found = zip(Gradients._fields, (dq, dk, dv, d_bias, d_sink), inputs, strict=True)
        wide = ("k", "v") if call.wide_keys else ()
        return Gradients._make(x if x is None or like is None or name in wide else x.to(like.dtype) for name, x, like in found)


def _forward_rows(scores: Scores, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """O (batch, heads_k, queries, group, head_dim_v), LSE and the largest score (batch, heads_k, queries, group) of one block of queries."""
    span = block.start, block.stop
    rows = scores.q[:, scores.rows(*span)]
    # m starts finite, so that rows without a visible key meet exp(-inf), not exp(inf - inf).
    m = rows.new_full((*rows.shape[:2], 1), torch.finfo(scores.dtype).min)
    l, acc_o = torch.zeros_like(m), rows.new_zeros((*rows.shape[:2], v.shape[-1]))
    for j0, j1, predicate in block.steps:
        s, _ = scores.tile(*span, j0, j1, predicate)
        m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))  # Eq. 11
        p = scores.exp(s.sub_(m_new))  # Eq. 12
        rescale = scores.exp(m - m_new)  # Eq. 13
        l.mul_(rescale).add_(p.sum(dim=-1, keepdim=True))  # Eq. 14
        keep = scores.keep(*span, j0, j1)
        if keep is not None:
            p.mul_(keep)
        accumulate(acc_o.mul_(rescale), p, v[:, j0:j1], _visible(scores, predicate))  # Eq. 16
        m = m_new
    wide = _statistics_dtype(l.device)
    m, l, acc_o = (scores.split(m).to(wide) * scores.unit), scores.split(l).to(wide), scores.split(acc_o)
    if scores.exact:
        acc_o.masked_fill_(l == 0.0, 0.0)  # 0 times NaN, where all scores are -inf
    row_max = None
    if scores.call.row_max:  # a row that sees nothing still has the m that it started with
        row_max = torch.where(l.isnan(), l, m).masked_fill(l == 0.0, -math.inf).squeeze(-1)
    if scores.call.sink is not None:
        sink = scores.part.per_head(scores.call.sink).to(wide)[:, None, :, None]
        m_new = torch.maximum(m, sink).clamp_(min=torch.finfo(scores.dtype).min)  # no difference of infinities
        rescale = torch.exp(m - m_new)
        m, l, acc_o = m_new, l * rescale + torch.exp(sink - m_new), acc_o * rescale.to(acc_o.dtype)  # Eq. 33
    lse = m + l.log()  # Eq. 18
    return acc_o.div_(l.masked_fill(l == 0.0, 1.0).to(acc_o.dtype)), lse.squeeze(-1), row_max  # Eq. 17


class Rows:
    """What the backward knows of each query of a part, packed (lanes, queries * group, ...): Q, dO, LSE / unit, delta.

    dead: which see nothing, or only scores of -inf, where hidden values need care, else None.
    """

    def __init__(self, scores: Scores, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None) -> None:
        part, sink = scores.part, scores.call.sink
        wide = _statistics_dtype(o.device)
        lse = part.statistics(lse)[..., None].to(wide)
        self.q, self.d_o = scores.q, part.pack(part.queries(d_o), scores.dtype)
        nothing, self.dead = lse == -math.inf, None
        if scores.exact:  # with a sink, LSE does not tell
            self.dead = part.pack(nothing, torch.bool) if sink is None else scores.all_hidden()
            self.q, self.d_o = (x.masked_fill(self.dead, 0.0) for x in (self.q, self.d_o))
        delta = (scores.split(self.d_o).to(wide) * part.queries(o)).sum(dim=-1, keepdim=True)  # Eq. 23
        if d_lse is not None:
            delta -= part.statistics(d_lse)[..., None]  # Eq. 28
        delta.masked_fill_(nothing, 0.0)
        if sink is not None:
            below = (part.per_head(sink)[:, None, :, None] - lse).clamp_(max=0.0)  # a large LSE may be rounded to below its sink
            p_sink = torch.exp(below).masked_fill_(nothing, 0.0)
            self.d_sink = -(p_sink * delta).sum(dim=(0, 2, 4))  # Eq. 34
        # exp(s - inf) is 0 for every score, -inf included
        shift = part.pack(lse.masked_fill(nothing, math.inf) / scores.unit, wide)
        self.lse = shift.to(scores.dtype)
        # Rounding the shift multiplies a row of P by a known factor. Every gradient is linear in (dO, delta), which therefore undo it.
        error = (self.lse - shift).masked_fill_(part.pack(nothing, torch.bool), 0.0)
        excess = _EXCESS / scores.unit
        factor = scores.exp(error.clamp_(-excess, excess)).to(scores.dtype)
        self.d_o = self.d_o * factor
        self.delta = part.pack(delta, scores.dtype) * factor

    def hidden(self, queries: slice, visible: Tensor | None) -> Tensor | None:
        """The pairs of a tile that count for nothing; None: all count."""
        hidden = None if visible is None else ~visible
        if self.dead is None:
            return hidden
        return self.dead[:, queries] if hidden is None else self.dead[:, queries] | hidden


def _backward_columns(scores: Scores, v: Tensor, rows: Rows, block: Block, outputs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """dK / scale and dV of one block of keys, (batch, heads_k, keys, dim). Adds dQ / scale and dbias to `outputs`."""
    span = block.start, block.stop
    k = scores.k[:, slice(*span)]
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dq, d_bias = outputs
    for i0, i1, predicate in block.steps:
        queries = scores.rows(i0, i1)
        q, d_o = rows.q[:, queries], rows.d_o[:, queries]
        visible = _visible(scores, predicate)
        visible_t, hidden = None if visible is None else visible.mT, rows.hidden(queries, visible)
        s, slope = scores.tile(i0, i1, *span, predicate, slope=True)
        s.sub_(rows.lse[:, queries])
        p = scores.exp(s.clamp_(max=_EXCESS / scores.unit) if scores.steep else s)  # Eq. 24
        if hidden is not None:
            p.masked_fill_(hidden, 0.0)
        dp = torch.bmm(d_o, v.mT, out=scores.buffer("dp", *p.shape[1:]))  # Eq. 21
        keep = scores.keep(i0, i1, *span)
        if keep is None:
            accumulate(dv, p.mT, d_o, visible_t)  # Eq. 20
        else:
            dp.mul_(keep)
            accumulate(dv, keep.mul_(p).mT, d_o, visible_t)  # Eq. 36
        ds = dp.sub_(rows.delta[:, queries]).mul_(p)  # Eq. 25
        if hidden is not None:
            ds.masked_fill_(hidden, 0.0)
        if d_bias is not None:
            target = cut(d_bias, ALL, ALL, slice(i0, i1), ALL, slice(*span))
            target += scores.split(ds).sum_to_size(target.shape)  # Eq. 32
        if slope is not None:
            ds.mul_(slope)  # Eq. 30
        accumulate(dk, ds.mT, q, visible_t)  # Eq. 27
        tile_dq = torch.zeros_like(q)
        accumulate(tile_dq, ds, k, visible)  # Eq. 26
        if rows.dead is not None:
            tile_dq.masked_fill_(rows.dead[:, queries], 0.0)
        dq[:, :, i0:i1] += scores.split(tile_dq)
    return dk.view(*scores.lanes, *dk.shape[1:]), dv.view(*scores.lanes, *dv.shape[1:])


def _visible(scores: Scores, predicate: Predicate | None) -> Tensor | None:
    """The predicate for packed rows where hidden values need care, else None."""
    return predicate.visible.repeat_interleave(scores.width, dim=0) if predicate is not None and scores.exact else None


def _statistics_dtype(device: torch.device) -> torch.dtype:
    """For the few operations on row statistics that pass their rounding on to every gradient. Apple's GPUs have no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _compute_dtype(call: Call) -> torch.dtype:
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32
