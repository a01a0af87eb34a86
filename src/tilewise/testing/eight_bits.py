"""The one tolerance for kernels in 8 bits: their naive formula has Q, K, V and P rounded to e4m3, each by one scale a tensor.

P of a row is 256 where its score is the largest, so that e4m3 has room for those down to 2^-17 of it; the denominator adds up P as it was before
rounding. A kernel with finer scales is held to the same. `summed` is what tensor cores make of a product in 8 bits, for what a tolerance cannot tell.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends import reference
from tilewise.problem import Call
from tilewise.testing import tolerance

E4M3 = torch.float8_e4m3fn
LARGEST, LARGEST_P = torch.finfo(E4M3).max, 256.0
DEPTH, FRACTION = 32, 13  # products that one instruction adds up; bits behind the leading one that it keeps


def rounded(x: Tensor, unit: float | Tensor = 1.0) -> Tensor:
    """x to the nearest multiple of `unit` that e4m3 has, in fp64; beyond 448 of them it is 448."""
    return (x.double() / unit).clamp(-LARGEST, LARGEST).float().to(E4M3).double() * unit


def by_one_scale(x: Tensor) -> Tensor:
    """x rounded with its largest number at 448."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    return rounded(x, largest / LARGEST or 1.0)


@torch.no_grad()
def naive(call: Call) -> tuple[Tensor, Tensor]:
    """O and LSE as `reference.eager` has them, in fp64 but for the rounding to e4m3. Without dropout."""
    call = reference.cast(replace(call, q=by_one_scale(call.q), k=by_one_scale(call.k), v=by_one_scale(call.v)), torch.float64)
    scores = reference.visible_scores(call)
    top = scores.s.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    p = (scores.s - top).exp().masked_fill(~scores.visible, 0.0)
    l = p.sum(-1, keepdim=True) + (reference.sink_column(call, scores.s) - top).exp()
    weights = rounded(p, 1 / LARGEST_P) / l.masked_fill(l == 0.0, 1.0)
    o = reference.unfold(call, reference.weigh(weights, call.v.transpose(1, 2), scores.visible))
    return o, (top + l.log()).reshape(call.batch, call.heads_q, call.seqlen_q)


@torch.no_grad()
def expected(call: Call) -> tolerance.Expected:
    """The yardsticks of a forward pass in 8 bits. `call`: as it was before rounding, in the dtype of the output.

    A score that is a row's only one, or nearly, has errors that are chance. What they can be taken for at least is the unit roundoff, a sixteenth,
    once for each of what was rounded: Q and K for LSE, and P and V besides for O of few rows.
    """
    want, (o, lse) = tolerance.expected(call), naive(call)
    unit = torch.finfo(E4M3).eps / 2
    few = want.o.roundoff > 0.0
    return replace(
        want,
        o=replace(want.o, naive_error=(o - want.o.ref).abs(), roundoff=math.sqrt(4) * unit if few else 0.0),
        lse=replace(want.lse, naive_error=(lse - want.lse.ref).abs().nan_to_num(nan=0.0), roundoff=math.sqrt(2) * unit),
    )


def check_outputs(call: Call, o: Tensor, lse: Tensor) -> float:
    """As `tolerance.check_outputs`."""
    want = expected(call)
    return max(tolerance.hold("o", o, want.o), tolerance.check_lse("lse", lse, want.lse))


def summed(p: Tensor, v: Tensor, depth: int = DEPTH, fraction: int = FRACTION) -> Tensor:
    """P V (rows, head_dim) of p (rows, keys) and v (keys, head_dim), fp64, as tensor cores of Hopper are said to add it up: `depth` products and the
    sum so far at a time, of which each keeps `fraction` bits behind the leading one of the largest, and loses the rest.
    """
    found = p.new_zeros(p.shape[0], v.shape[1])
    for a, b in zip(p.split(depth, 1), v.split(depth, 0), strict=True):
        terms = torch.cat((a[:, :, None] * b, found[:, None]), 1)
        step = torch.exp2(torch.frexp(terms.abs().amax(1, keepdim=True)).exponent.double() - 1 - fraction)
        found = ((terms / step).trunc() * step).sum(1)
    return found
