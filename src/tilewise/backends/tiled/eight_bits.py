"""The arithmetic of backends/eight_bits.py in torch operations: what a call in 8 bits gives on any device, and what kernels are held to.

Only keys have tiles. The sums of one tile are fp32's, in torch's order, which is all that tile_m and the cut into parts change.
"""

import math

import torch
from torch import Tensor

from tilewise.backends import eight_bits
from tilewise.backends.eight_bits import P_SCALE, Quantised
from tilewise.backends.tiled.parts import Block, Part, Step, parts
from tilewise.backends.tiled.products import accumulate
from tilewise.problem import Call, in_fp32

_LOG2_E, _LN_2 = math.log2(math.e), math.log(2.0)


@torch.no_grad()
def forward(call: Call, tile: tuple[int, int]) -> tuple[Tensor, ...]:
    """O in call.out_dtype or q's, LSE and, with `call.row_max`, the rows' largest scores, (batch, heads_q, seqlen_q) fp32."""
    given = eight_bits.operands_of(call)
    fp32 = {"dtype": torch.float32, "device": call.q.device}
    o = torch.zeros((*call.q.shape[:3], call.head_dim_v), dtype=call.out_dtype or call.q.dtype, device=call.q.device)
    lse = torch.full((call.batch, call.heads_q, call.seqlen_q), -math.inf, **fp32)
    if call.sink is not None:
        lse.copy_(call.sink[:, None])  # a row without keys has the sink alone in its denominator
    row_max = torch.full(lse.shape, -math.inf, **fp32)
    for part in parts(call, tile):
        rows = Rows(part, given)
        for block in part.query_blocks(torch.float32):
            found = rows.forward(block)
            for whole, x in zip((part.queries(o), part.statistics(lse), part.statistics(row_max)), found, strict=True):
                whole[:, :, block.start : block.stop] = x
    return (o, lse, row_max) if call.row_max else (o, lse)


class Rows:
    """The queries of one part, packed (lanes, queries * group, ...), and its keys (lanes, keys, ...)."""

    def __init__(self, part: Part, given: Quantised) -> None:
        call = self.call = part.call
        queries = part.queries(given.q)
        self.part, self.lanes, self.width = part, queries.shape[:2], queries.shape[3]
        self.q = part.pack(queries, torch.float32)
        self.k, self.v = (part.pack(part.keys(x), torch.float32) for x in (given.k, given.v))
        self.row_factor = self._of_rows(given.q_scale) * given.factor
        self.key_scale = self._of_keys(given.k_scale)
        if given.key_nan is not None:
            self.key_scale = self.key_scale.masked_fill(self._lanes(given.key_nan), torch.nan)
        self.value_scale = None if given.v_scale is None else self._of_keys(given.v_scale)
        self.shift = torch.zeros_like(self.q[..., :1]) if given.shift is None else self._of_rows(given.shift)
        self.softcap, self.p_dtype = in_fp32(call.softcap), given.v.dtype
        eight = given.v.dtype == eight_bits.E4M3
        self.centre = None if given.v_centre is None else self._lanes(given.v_centre)[:, None]
        self.unit = torch.ones_like(self.v[:, :1]) if given.v_channel is None else self._lanes(given.v_channel)[:, None]
        self.unit = self.unit / P_SCALE if eight else self.unit
        self.eight, self.finite = eight, bool(self.v.isfinite().all())

    def _lanes(self, x: Tensor) -> Tensor:
        """(lanes, ...) of x (batch, heads_k, ...)."""
        return x[self.part.batch, self.part.heads_k].flatten(0, 1)

    def _of_rows(self, scale: Tensor | None) -> Tensor:
        """(lanes, queries * group, 1)."""
        whole = self.call.batch, self.call.heads_q, self.call.seqlen_q
        each = self.q.new_ones(whole) if scale is None else eight_bits.spread(scale, whole[2]).expand(whole)
        return self.part.statistics(each).flatten(2).flatten(0, 1)[..., None]

    def _of_keys(self, scale: Tensor | None) -> Tensor:
        """(lanes, keys)."""
        whole = self.call.batch, self.call.heads_k, self.call.seqlen_k
        return self._lanes(self.q.new_ones(whole) if scale is None else eight_bits.spread(scale, whole[2]).expand(whole))

    def forward(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """O (batch, heads_k, queries, group, head_dim_v), LSE and the largest score (batch, heads_k, queries, group) of one block of queries."""
        rows = slice(block.start * self.width, block.stop * self.width)
        q = self.q[:, rows]
        m = q.new_full((*q.shape[:2], 1), torch.finfo(torch.float32).min)  # finite: exp(-inf - m) is 0
        l, acc_o = torch.zeros_like(m), q.new_zeros((*q.shape[:2], self.v.shape[-1]))
        for step in reversed(block.steps):
            s = self._scores(rows, block, step)  # in powers of two
            m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))  # Eq. 11
            p = torch.exp2(s - m_new)  # Eq. 12
            rescale = torch.exp2(m - m_new)  # Eq. 13
            l = l * rescale + p.sum(dim=-1, keepdim=True)  # Eq. 14
            acc_o = acc_o * rescale + self._product(p, step)  # Eq. 16
            m = m_new
        return self._finished(m, l, acc_o, rows, block)

    def _scores(self, rows: slice, block: Block, step: Step) -> Tensor:
        """log2(e) times the scores, without the row's shift where there is no softcap; -inf where hidden."""
        keys, call = slice(step.start, step.stop), self.call
        unit = 1.0 if self.softcap else _LOG2_E
        s = torch.bmm(self.q[:, rows], self.k[:, keys].mT) * (self.row_factor[:, rows] * unit * self.key_scale[:, None, keys])
        if self.softcap:
            s = torch.tanh((s + self.shift[:, rows]) / self.softcap) * (self.softcap * _LOG2_E)  # Eq. 29
        if call.alibi_slopes is not None:
            self._split(s).sub_(self._alibi(call.alibi_slopes, block, step))
        if step.predicate is not None:
            self._split(s).masked_fill_(~step.predicate.visible[:, None], -math.inf)  # Eq. 19
        return s

    def _product(self, p: Tensor, step: Step) -> Tensor:
        """P V of one tile, P rounded to what it is multiplied in."""
        keys, most = slice(step.start, step.stop), None
        visible = None if step.predicate is None else step.predicate.visible.repeat_interleave(self.width, dim=0)
        if self.eight:
            p = p * P_SCALE
            if self.value_scale is not None:
                scale, first = self.value_scale[:, None], step.start - step.start % self.part.tile_n  # a step may be less than its tile
                scale, whole = scale[..., keys], scale[..., first : first + self.part.tile_n]
                most = whole.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
                most = most.masked_fill(most == 0.0, 1.0)
                p = p * (scale / most)
                p = p if visible is None else p.masked_fill(~visible, 0.0)
            p = eight_bits.e4m3(p).float()
        else:
            p = p.to(self.p_dtype).float()
        product = p.new_zeros((*p.shape[:2], self.v.shape[-1]))
        accumulate(product, p, self.v[:, keys], None if self.finite else visible)
        return product if most is None else product * most

    def _finished(self, m: Tensor, l: Tensor, acc_o: Tensor, rows: slice, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        m = m * _LN_2 if self.softcap else m * _LN_2 + self.shift[:, rows]
        empty, total, part = l == 0.0, l, self.part
        row_max = torch.where(l.isnan(), l, m).masked_fill(empty, -math.inf)
        m = m.masked_fill(empty, torch.finfo(torch.float32).min)
        if self.call.sink is not None:
            sink = part.per_head(self.call.sink).float()[None, :, None].expand(*self.lanes, block.stop - block.start, -1).reshape(m.shape)
            m_new = torch.maximum(m, sink).clamp_(min=torch.finfo(torch.float32).min)  # no difference of infinities
            rescale = torch.exp(m - m_new)
            m, l, acc_o = m_new, l * rescale, acc_o * rescale
            total = l + torch.exp(sink - m_new)  # Eq. 33
        lse = m + total.log()  # Eq. 18
        weight = total.masked_fill(total == 0.0, 1.0)
        o = acc_o / weight * self.unit  # Eq. 17
        if self.centre is not None:
            o = o + self.centre * (l / weight)
        o = o.masked_fill(empty, 0.0)
        return self._split(o), self._split(lse)[..., 0], self._split(row_max)[..., 0]

    def _split(self, x: Tensor) -> Tensor:
        """A view (batch, heads_k, queries, group, columns) of packed rows (lanes, queries * group, columns)."""
        return x.view(*self.lanes, -1, self.width, x.shape[-1])

    def _alibi(self, slopes: Tensor, block: Block, step: Step) -> Tensor:
        """log2(e) slope |i + diagonal - j|: (batch or 1, heads_k, queries, group, keys)."""
        call, on = self.call, {"dtype": torch.int64, "device": self.q.device}
        diagonal = call.seqlen_k - call.seqlen_q if call.diagonal is None else call.diagonal[block.start : block.stop]
        i, j = torch.arange(block.start, block.stop, **on), torch.arange(step.start, step.stop, **on)
        slopes = slopes if slopes.shape[0] == 1 else slopes[self.part.batch]
        slopes = self.part.per_head(slopes)[:, :, None, :, None] * _LOG2_E
        return slopes * ((i + diagonal)[:, None] - j).abs()[:, None].float()
