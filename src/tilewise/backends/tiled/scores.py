"""Score tiles of the `tiled` backend, with everything the contract puts between q.k and the softmax."""

import math

import torch
from torch import Tensor

from tilewise.backends import philox
from tilewise.backends.tiled.parts import ALL, Part, Predicate, cut
from tilewise.backends.tiled.products import Care
from tilewise.problem import in_fp32

_LOG2_E = math.log2(math.e)
_LEAST_UNIT = 1e-6  # an LSE is divided by it


class Scores:
    """Score tiles of one part, (lanes, queries * group, keys)."""

    def __init__(self, part: Part, dtype: torch.dtype, care: Care) -> None:
        call = part.call
        self.part, self.call, self.dtype, self.exact, self.steep = part, call, dtype, care.exact, care.steep
        # Where nothing but the mask follows q.k, the scale is left to the exponential, which multiplies anyway: a tile holds score / unit.
        bare = not call.softcap and call.bias is None and call.alibi_slopes is None and call.scale > _LEAST_UNIT
        self.unit = call.scale if bare else 1.0
        self.softcap, most = in_fp32(call.softcap), torch.finfo(dtype).max
        self.factor = min(max(call.scale / (self.softcap or 1.0), -most), most)  # 0 times infinity is no score
        q = part.queries(call.q)
        self.lanes = q.shape[:2]  # (batch, heads_k)
        self.width = q.shape[3]  # query heads a lane serves
        self.q = part.pack(q, dtype)
        self.k = part.pack(part.keys(call.k), dtype)
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """An uninitialised (lanes, rows, columns), the same memory for every tile."""
        size = self.q.shape[0] * rows * columns
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self.q.new_empty(size)
        return self._buffers[name][:size].view(-1, rows, columns)

    def rows(self, i0: int, i1: int) -> slice:
        """Where queries [i0, i1) lie in packed rows."""
        return slice(i0 * self.width, i1 * self.width)

    def split(self, x: Tensor) -> Tensor:
        """A view (batch, heads_k, queries, group, columns) of packed rows (lanes, queries * group, columns)."""
        return x.view(*self.lanes, -1, self.width, x.shape[-1])

    def exp(self, x: Tensor) -> Tensor:
        """exp(unit * x), in the memory of x."""
        return x.mul_(self.unit * _LOG2_E).exp2_()  # Eq. 37

    def tile(self, i0: int, i1: int, j0: int, j1: int, predicate: Predicate | None, slope: bool = False) -> tuple[Tensor, Tensor | None]:
        """Scores / unit of queries [i0, i1) and keys [j0, j1), -inf where hidden; with `slope`, also the softcap's derivative."""
        q = self.q[:, self.rows(i0, i1)]
        softcap, derivative = self.softcap, None
        s = self.buffer("scores", q.shape[1], j1 - j0)
        torch.bmm(q, self.k[:, j0:j1].mT, out=s)
        if self.unit == 1.0:
            s.mul_(self.factor)  # Eq. 1
        if softcap:
            if slope:  # of which 1 - tanh^2 has nothing left near the cap
                derivative = torch.cosh(s, out=self.buffer("slope", *s.shape[1:])).pow_(-2)  # Eq. 30
            s.tanh_().mul_(softcap)  # Eq. 29
        pairs = self.split(s)
        if self.call.bias is not None:
            pairs.add_(cut(self.part.pairs(self.call.bias), ALL, ALL, slice(i0, i1), ALL, slice(j0, j1)))
        if self.call.alibi_slopes is not None:
            pairs.addcmul_(*self._alibi(self.call.alibi_slopes, i0, i1, j0, j1), value=-1.0)
        if predicate is not None and self.exact:
            pairs.masked_fill_(~predicate.visible[:, None], -math.inf)  # Eq. 19
            if derivative is not None:
                self.split(derivative).masked_fill_(~predicate.visible[:, None], 0.0)
        elif predicate is not None:
            pairs.add_(predicate.hide[:, None])  # Eq. 19
        return s, derivative

    def all_hidden(self) -> Tensor:
        """Which packed rows (lanes, queries * group, 1) have no score but -inf."""
        hidden = torch.ones_like(self.q[..., :1], dtype=torch.bool)
        for start, stop, steps in self.part.query_blocks(self.dtype):
            for j0, j1, predicate in steps:
                s, _ = self.tile(start, stop, j0, j1, predicate)
                hidden[:, self.rows(start, stop)] &= (s == -math.inf).all(dim=-1, keepdim=True)
        return hidden

    def keep(self, i0: int, i1: int, j0: int, j1: int) -> Tensor | None:
        """What dropout multiplies the probabilities of a tile with, 0 or 1 / (1 - p); None without dropout."""
        dropout, part = self.call.dropout, self.part
        if dropout is None:
            return None
        h, g = (torch.arange(x.start, x.stop, dtype=torch.int64, device="cpu") for x in (part.heads_k, part.group))
        heads = (h[:, None] * self.call.group + g).flatten()
        batch = range(part.batch.start, part.batch.stop)
        kept = philox.keep(dropout, batch, heads, i0, i1, j0, j1, self.call.heads_q, self.q.device)
        kept = kept.unflatten(1, (-1, self.width)).transpose(2, 3).reshape(self.q.shape[0], -1, j1 - j0)
        return kept.to(self.dtype).mul_(philox.keep_scale(dropout.p))

    def _alibi(self, slopes: Tensor, i0: int, i1: int, j0: int, j1: int) -> tuple[Tensor, Tensor]:
        """Slopes (batch or 1, heads_k, 1, group, 1) and distances (queries, 1, keys)."""
        diagonal = self.call.seqlen_k - self.call.seqlen_q if self.call.diagonal is None else self.call.diagonal[i0:i1]
        i, j = (torch.arange(a, b, dtype=torch.int64, device=self.q.device) for a, b in ((i0, i1), (j0, j1)))
        distance = ((i + diagonal)[:, None] - j).abs_().to(self.dtype)
        slopes = cut(self.part.per_head(slopes), self.part.batch).to(self.dtype)
        return slopes[:, :, None, :, None], distance[:, None]
