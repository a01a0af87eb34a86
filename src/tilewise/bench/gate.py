"""Correctness gates speed: before an implementation is timed, its result on fresh inputs must pass the repository's tolerance.

A small workload is checked whole. Of a large one, as its fp64 score matrix would not fit, one key head of one batch entry is checked, with
all the query heads that read it and rows from the start, the middle and the end. Gradients are exact on such a sample when dO is zero
everywhere else: no other row then contributes to dK and dV. The implementation always computes the whole workload. Where inputs are not finite
0 in dO does not silence a row with an O of NaN: of a sample of rows dK and dV are not checked then, but `Exact` looks where they are finite.

`Exact` says how wrong a contender is, not only whether it passed: the RMS error of O and of the gradients against fp64, on the inputs that are timed.
It is taken on all rows of one key head with its query heads; fp64 results come from pieces of consecutive queries. RMS is relative to
that of the reference; where the terms that it adds up cancel (dQ of a softmax that is all or nothing), to what they would come to otherwise.
Where results are not finite by right the error is that of the others, and what is finite must be so in the same places.
"""

import math
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import reference
from tilewise.bench.sets import Attend, Caches, Inputs, Workload
from tilewise.masks import Causal, Dense, Mask
from tilewise.masks.bitmap import Bitmap
from tilewise.problem import Call
from tilewise.testing import eight_bits, tolerance

LARGEST_SCORES = 1 << 22  # elements of one score matrix the check may build; in fp64 it builds about twenty
PIECE = 1 << 22  # elements of a score matrix; in fp64 a piece makes about ten of it
CANCELLED = 1e-6  # of the terms
MOST_SEQUENCES = 3  # of a batch that decodes


class Sample(NamedTuple):
    """What is checked: batch entries, key heads, and pieces of consecutive query rows."""

    batch: slice
    heads_k: slice
    rows: list[range]


class Gate:
    """What every contender on one workload must reach; what is right is computed once, for the first of them."""

    def __init__(self, workload: Workload, seed: int, device: torch.device):
        self.workload, self.seed, self.device = workload, seed, device
        self.sample = sample_of(workload)
        new = {"dtype": torch.int64, "device": "cpu"}
        self.indices = torch.cat([torch.arange(piece.start, piece.stop, **new) for piece in self.sample.rows]).to(device)
        group = workload.heads_q // workload.heads_k
        self.heads_q = slice(self.sample.heads_k.start * group, self.sample.heads_k.stop * group)

    @property
    def whole(self) -> bool:
        """Whether all rows of what is checked are."""
        return self.sample.rows == [range(self.workload.seqlen_q)]

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.sample.batch, :, self.heads_q].index_select(1, self.indices)

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.sample.batch, :, self.sample.heads_k]

    def of_extra(self, name: str, x: Tensor) -> Tensor:
        """The sample of a bias, with axes of size 1 kept, or of a sink: or of their gradients, as dO is zero outside of the sample."""
        if name == "sink":
            return x[self.heads_q]
        places = (self.sample.batch, self.heads_q)
        x = x[tuple(slice(None) if size == 1 else place for size, place in zip(x.shape, places, strict=False))]
        return x if x.shape[2] == 1 else x.index_select(2, self.indices)

    @cached_property
    def call(self) -> Call:
        inputs, extras = self.workload.inputs(self.seed, self.device), self.workload.extras(self.seed, self.device)
        given = {name: self.of_extra(name, x.detach()) for name, x in extras.items() if name != "alibi_slopes"}
        if self.workload.alibi:  # as a bias, for the rows of a sample are not where a call of that many rows has them
            given["bias"] = self.workload.alibi_bias(self.indices, self.heads_q)
        return Call(
            q=self.of_queries(inputs.q.detach()),
            k=self.of_keys(inputs.k.detach()),
            v=self.of_keys(inputs.v.detach()),
            mask=mask_on(self.workload, self.sample, self.heads_q),
            scale=self.workload.softmax_scale,
            softcap=self.workload.softcap,
            bias=given.get("bias"),
            sink=given.get("sink"),
            grad=self.workload.grad,
        )

    @cached_property
    def want(self) -> tolerance.Expected:
        d_o = self.workload.inputs(self.seed, self.device).d_o
        return tolerance.expected(self.call, self.of_queries(d_o)) if self.workload.grad else tolerance.expected(self.call)

    @cached_property
    def want_in_eight_bits(self) -> tolerance.Expected:
        return eight_bits.expected(self.call)

    def verify(self, attend: Attend, heads_first: bool = False, in_eight_bits: bool = False) -> float:
        """Run the workload once and check it; the largest error of O against fp64. Raises AssertionError beyond the tolerance.

        in_eight_bits: by that of a contender which rounds Q, K, V and P to 8 bits, and may give O in either 16-bit dtype.
        """
        want = self.want_in_eight_bits if in_eight_bits else self.want
        inputs, extras = self.workload.inputs(self.seed, self.device, heads_first), self.workload.extras(self.seed, self.device)
        _poison_freed_memory((*inputs, *(x for x in extras.values() if x.requires_grad)))
        if not self.workload.grad:
            with torch.no_grad():
                o = self.of_queries(attend(*inputs[:3], **extras))
            o = o.to(self.workload.dtype) if in_eight_bits else o
            tolerance.hold("o", o, want.o)
            return _error(o, want.o.ref)
        d_o = inputs.d_o
        if self.workload.finite:
            d_o = torch.zeros_like(inputs.d_o)
            d_o[self.sample.batch, self.indices, self.heads_q] = self.of_queries(inputs.d_o)
        o, gradients = _run(attend, inputs, extras, d_o)
        parts = {"q": self.of_queries, "k": self.of_keys, "v": self.of_keys}
        parts |= {name: partial(self.of_extra, name) for name in extras if name != "alibi_slopes"}
        o = self.of_queries(o)
        results = [("o", o, want.o)]
        results += [(f"d{name}", parts[name](gradient), getattr(want, name)) for name, gradient in gradients.items()]
        for name, got, yardstick in results if self.workload.finite or self.whole else results[:2]:
            tolerance.hold(name, got, yardstick)
        return _error(o, want.o.ref)


def verify(attend: Attend, workload: Workload, seed: int, device: torch.device) -> float:
    """`Gate.verify` of one contender."""
    return Gate(workload, seed, device).verify(attend)


def sample_of(workload: Workload, largest: int = LARGEST_SCORES) -> Sample:
    """The whole workload where its score matrices have at most `largest` elements; else one key head, and as many rows as that allows."""
    everything = range(workload.seqlen_q)
    if workload.shape.all_pairs <= largest:
        return Sample(slice(0, workload.batch), slice(0, workload.heads_k), [everything])
    last_batch, last_head = slice(workload.batch - 1, workload.batch), slice(workload.heads_k - 1, workload.heads_k)
    group = workload.heads_q // workload.heads_k
    rows = max(3, largest // (group * workload.seqlen_k))
    if rows >= workload.seqlen_q:
        return Sample(last_batch, last_head, [everything])
    piece = rows // 3
    starts = (0, (workload.seqlen_q - piece) // 2, workload.seqlen_q - piece)
    return Sample(last_batch, last_head, [range(start, start + piece) for start in starts])


def _poison_freed_memory(inputs: Iterable[Tensor]) -> None:
    """Leave NaN in free blocks of the outputs' sizes, which are what an implementation that allocates its outputs is handed next."""
    blocks = [torch.full_like(x, torch.nan) for x in inputs for _ in range(2)]
    del blocks


def _run(attend: Attend, inputs: Inputs, extras: dict[str, Tensor], d_o: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """O, and the gradients by the names of what they are of."""
    o = attend(*inputs[:3], **extras)
    by_name = {**dict(zip("qkv", inputs, strict=False)), **{name: x for name, x in extras.items() if x.requires_grad}}
    return o.detach(), dict(zip(by_name, torch.autograd.grad(o, list(by_name.values()), d_o), strict=True))


def mask_on(workload: Workload, sample: Sample, heads_q: slice) -> Mask:
    """The workload's mask on the sample; as a dense tensor unless the sample is everything."""
    if sample.rows == [range(workload.seqlen_q)] and workload.mask.extent == (1, 1):
        return workload.mask
    planes = workload.mask.planes(workload.seqlen_q, workload.seqlen_k, workload.batch, workload.heads_q)
    heads = [
        [next(plane.region for plane in planes if b in plane.batch and h in plane.heads) for h in range(heads_q.start, heads_q.stop)]
        for b in range(sample.batch.start, sample.batch.stop)
    ]
    same = len({id(region) for row in heads for region in row}) == 1
    heads = [heads[0][:1]] if same else heads
    return Dense(torch.stack([torch.stack([_rows(region, sample.rows) for region in row]) for row in heads]))


def _rows(region, pieces: list[range]) -> Tensor:
    if isinstance(region, Bitmap):
        whole = torch.from_numpy(region.dense())
        return torch.cat([whole[piece.start : piece.stop] for piece in pieces])
    frames = (region.rows(piece.start, piece.stop).shift(-piece.start, 0, seqlen_q=len(piece)) for piece in pieces)
    return torch.cat([torch.from_numpy(frame.dense()) for frame in frames])


def _error(got: Tensor, ref: Tensor) -> float:
    difference = (got.double() - ref).abs()
    difference = difference[difference.isfinite()]
    return float(difference.max()) if difference.numel() else 0.0


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
            o_terms, _, terms = tolerance.magnitudes(call, o, lse, d_o if self.workload.grad else None, None)
            rows["o"].append(o)
            rows["o2"].append(o_terms.square())
            if terms is None:
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


class DecodeGate:
    """What every contender must reach on a sample of a batch that decodes: of the shortest, the longest and the last sequence, a key head with the
    query heads that read it."""

    def __init__(self, caches: Caches) -> None:
        self.caches, cell = caches, caches.cell
        by_length = sorted(range(cell.batch), key=lambda b: cell.lengths[b])
        self.sequences = list(dict.fromkeys((by_length[-1], by_length[0], cell.batch - 1)))[:MOST_SEQUENCES]
        group = cell.heads_q // cell.heads_k
        self.heads_k = slice(cell.heads_k - 1, cell.heads_k)
        self.heads_q = slice(cell.heads_q - group, cell.heads_q)
        self.want = [tolerance.expected(self._call(b)).o for b in self.sequences]

    def _call(self, b: int) -> Call:
        k, v = self.caches.keys(0, b, self.heads_k)
        return Call(q=self.caches.q[b : b + 1, :, self.heads_q], k=k[None], v=v[None], mask=Causal(), scale=self.caches.cell.head_dim**-0.5)

    def verify(self, attend: Callable[[int], Tensor]) -> float:
        """The largest error; AssertionError beyond the tolerance."""
        shape = (*self.caches.q.shape[:3], self.caches.copies[0][1].shape[-1])
        poison = self.caches.q.new_full(shape, torch.nan)  # what an output is likely to be allocated on
        del poison
        o, worst = attend(0), 0.0
        if o.shape != shape:
            raise AssertionError(f"O is {tuple(o.shape)}, not {shape}")
        for b, want in zip(self.sequences, self.want, strict=True):
            got = o[b : b + 1, :, self.heads_q]
            tolerance.hold("o", got, want)
            worst = max(worst, float((got.double() - want.ref).abs().max()))
        return worst
