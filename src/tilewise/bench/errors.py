"""How wrong each contender is, beside whether it passed: the RMS error of O and of the gradients against fp64, on the inputs that are timed.

It is taken on all rows of one key head with its query heads, whose fp64 results come from pieces of consecutive queries. RMS is relative to
that of the reference; where the terms that it adds up cancel (dQ of a softmax that is all or nothing), to what they would come to otherwise.
Where results are not finite by right the error is that of the others, and what is finite must be so in the same places.
"""

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import reference
from tilewise.bench.gate import Sample, mask_on
from tilewise.bench.impls import Attend
from tilewise.bench.workloads import Inputs, Workload
from tilewise.problem import Call
from tilewise.testing import tolerance

PIECE = 1 << 22  # elements of a score matrix; in fp64 a piece makes about ten of it
CANCELLED = 1e-6  # of the terms


class Errors(NamedTuple):
    """`rms` by output; one that is finite nowhere is left out. `places`: NaN and infinities are exactly where fp64 has them."""

    rms: dict[str, float]
    places: bool


class Exact:
    """The fp64 results on one key head of a workload's inputs, computed once, for the first contender that asks."""

    def __init__(self, workload: Workload, seed: int, device: torch.device):
        self.workload, self.seed, self.device = workload, seed, device
        group = workload.heads_q // workload.heads_k
        self.batch, self.head_k = slice(workload.batch - 1, workload.batch), slice(workload.heads_k - 1, workload.heads_k)
        self.heads_q = slice(workload.heads_q - group, workload.heads_q)

    def errors(self, attend: Attend, heads_first: bool = False) -> Errors:
        """Run the workload once, with its backward pass where it has one."""
        q, k, v, d_o = self.workload.inputs(self.seed, self.device, heads_first)
        if self.workload.grad:
            o = attend(q, k, v)
            o, *gradients = o.detach(), *torch.autograd.grad(o, (q, k, v), d_o)
        else:
            with torch.no_grad():
                o, *gradients = (attend(q, k, v),)
        parts = dict(zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=False))
        rms, places = {}, True
        for name, whole in parts.items():
            got = whole[self.batch, :, self.heads_q if name in ("o", "dq") else self.head_k]
            want, size = self.results[name]
            error = _rms((got.double() - want)[got.isfinite() & want.isfinite()])
            if math.isfinite(error) and size > 0.0:
                rms[name] = error / size
            places = places and _same_places(got, want.to(got.dtype))
        return Errors(rms, places)

    @cached_property
    def results(self) -> dict[str, tuple[Tensor, float]]:
        """By output: what it should be, and the size that errors are relative to."""
        with torch.no_grad():
            sums, squares = self._sums(Inputs(*(x.detach() for x in self.workload.inputs(self.seed, self.device))))
        found = {}
        for name, ref in sums.items():
            size, terms = _rms(ref[ref.isfinite()]), _rms(squares[name][squares[name].isfinite()].sqrt())
            size, terms = (x if math.isfinite(x) else 0.0 for x in (size, terms))
            found[name] = ref, terms if size < CANCELLED * terms else size
        return found

    def _sums(self, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The results, and the sums of the squares of the terms that they add up."""
        k, v = (x[self.batch, :, self.head_k] for x in (inputs.k, inputs.v))
        rows: dict[str, list[Tensor]] = {name: [] for name in ("o", "o2", "dq", "dq2")}
        columns = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in (("dk", k), ("dv", v), ("dk2", k), ("dv2", v))}
        step = max(1, PIECE // (self.workload.seqlen_k * (self.heads_q.stop - self.heads_q.start)))
        for start in range(0, self.workload.seqlen_q, step):
            piece = range(start, min(start + step, self.workload.seqlen_q))
            q, d_o = (x[self.batch, piece.start : piece.stop, self.heads_q] for x in (inputs.q, inputs.d_o))
            mask = mask_on(self.workload, Sample(self.batch, self.head_k, [piece]), self.heads_q)
            call = Call(q=q, k=k, v=v, mask=mask, scale=self.workload.head_dim**-0.5, grad=self.workload.grad)
            o, lse = reference.eager(call)
            d_o = d_o if self.workload.grad else None
            o_terms, _, terms = tolerance.magnitudes(call, o, lse, d_o, None)
            rows["o"].append(o)
            rows["o2"].append(o_terms.square())
            if d_o is None:
                continue
            grads = reference.differentiate(call, reference.linearise(call, lse), reference.delta(call, o, lse, d_o, None), d_o)
            rows["dq"].append(grads.q)
            rows["dq2"].append(terms.q.square())
            for name, part in (("dk", grads.k), ("dv", grads.v), ("dk2", terms.k.square()), ("dv2", terms.v.square())):
                columns[name] += part
        found = {name: torch.cat(parts, 1) for name, parts in rows.items() if parts} | (columns if self.workload.grad else {})
        names = [name for name in ("o", "dq", "dk", "dv") if name in found]
        return {name: found[name] for name in names}, {name: found[name + "2"] for name in names}


def _rms(x: Tensor) -> float:
    """NaN of nothing. The largest number is taken out first, so that squares neither exceed fp64 nor vanish."""
    if x.numel() == 0:
        return math.nan
    largest = float(x.abs().max())
    return largest * float((x / largest).square().mean().sqrt()) if largest > 0.0 else 0.0


def _same_places(got: Tensor, want: Tensor) -> bool:
    special = ~(got.isfinite() & want.isfinite())
    return bool(((got == want) | (got.isnan() & want.isnan()))[special].all())
