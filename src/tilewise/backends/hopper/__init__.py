"""The Hopper backend: forward and backward passes on an H100 or H200 by kernels in NVIDIA's CuTe DSL.

The DSL is imported when the first kernel is compiled. Without it prebuilt kernels run (sm90/prebuilt.py). Where they do not do, or there is no such
GPU, `why_not` says so.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends import Backend, BoundDecode
from tilewise.backends.hopper import coverage, entries, forecast, packing, warmup, widths
from tilewise.backends.hopper.backward import call as backward
from tilewise.backends.hopper.bound import Bound
from tilewise.backends.hopper.decode import append_call, pools
from tilewise.backends.hopper.decode import call as decode
from tilewise.backends.hopper.decode.bound import in_bits
from tilewise.backends.hopper.eight_bits import call as eight_bits
from tilewise.backends.hopper.forward import call as forward
from tilewise.backends.hopper.forward import plan as forward_plan
from tilewise.backends.tables import documents
from tilewise.machine.sheets import H100, machine_for
from tilewise.masks import Mask
from tilewise.problem import AppendCall, Call, DecodeCall, Gradients, Problem
from tilewise.sm90 import helpers, jit, prebuilt

__all__ = ["Hopper"]


class Hopper(Backend):
    """The kernels of the ladder's end, for every shape that they cover."""

    name = "hopper"
    eight_bits = True
    keeps_row_max = True

    def why_not(self, problem: Problem) -> list[str]:
        """Sentences that say why this backend cannot run the problem; empty when it can."""
        if wrong := coverage.refused(problem):
            return wrong
        if missing := jit.why_no_compiler():
            return _why_not_prebuilt(problem, missing) or prebuilt.why_no_gpu(problem.capability)
        return jit.why_not_here(problem.capability)

    def why_not_decode(self, problem: Problem) -> list[str]:
        if not coverage.latent(problem):
            return self.why_not(problem)
        if jit.why_no_compiler():
            return prebuilt.why_no_gpu(problem.capability)  # what prebuilt kernels there are, `decode` knows
        return jit.why_not_here(problem.capability)

    def reads(self, problem: Problem) -> bool:
        return bool(coverage.refused(problem))

    def reads_decode(self, problem: Problem, mask: Mask, page_size: int | None, in_keys: bool) -> bool:
        return coverage.cuts_sequences(problem, mask, page_size, in_keys)

    def missing(self, problem: Problem) -> str:
        """What keeps a Hopper GPU that is here from running the problem: no compiler, and no prebuilt kernels."""
        if coverage.refused(problem) or prebuilt.why_no_gpu(problem.capability):
            return ""
        return "; ".join(self.why_not(problem))

    def tile(self, call: Call) -> tuple[int, int]:
        """(tile_m, tile_n) of the kernel."""
        config_of = eight_bits.config_of if call.problem.eight_bits else forward_plan.config_of
        config = config_of(coverage.launched(call))
        return config.tile_m, config.tile_n

    def describe(self) -> str:
        if jit.why_no_compiler():
            return "" if prebuilt.why_not() or prebuilt.why_no_gpu() else f"prebuilt CuTe DSL kernels for {jit.ARCH}"
        return "" if jit.why_not_here() else f"CuTe DSL kernels for {jit.ARCH}"

    def details(self, call: Call) -> list[str]:
        """The kernel's configuration and what may be expected of it, in sentences."""
        if not widths.fits(call):
            wider = widths.of_call(call)
            dims = f"{call.head_dim} and {call.head_dim_v} to {wider.head_dim} and {wider.head_dim_v}"
            return [f"padding: zeros behind head_dim and head_dim_v, from {dims}, in copies of q, k and v", *self.details(wider)]
        if call.problem.eight_bits:
            return [f"tile: {' x '.join(map(str, self.tile(call)))}"]
        if folded := entries.fold(call):
            return ["padding: the entries of the batch are packed documents, whose lengths stay on the GPU", *self.details(folded)]
        packed, machine = packing.pack(call), machine_for(call.q.device) or H100
        gradients = backward.lines(call, machine.sms) if call.grad else []
        if packed is None:
            return [*forecast.lines(forward_plan.config_of(call), call, machine), *gradients]
        shared = "packing: the query heads of a group are rows of one tile, and read their keys once"
        return [shared, *forecast.lines(forward_plan.config_of(packed), packed, machine), *gradients]

    def bind(self, call: Call) -> Bound | None:
        """None where kernels are given another call in its place, in which tensors are copied or lengths read."""
        if coverage.launched(call) is not call:
            return None
        _check(call)
        return _bind(call)

    def forward(self, call: Call) -> tuple[Tensor, ...]:
        """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q) in fp32, and so row_max."""
        _check(call)
        fitting = widths.of_call(call)
        folded = None if call.problem.eight_bits else entries.fold(fitting)
        inner = folded or fitting
        o, *statistics = _bind(inner).results(inner)
        if folded:
            o, statistics = entries.unfold(call, o), [entries.unfold_rows(call, x) for x in statistics]
        return (o if fitting is call else o[..., : call.head_dim_v]), *statistics

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """See backward/call.py."""
        fitting = widths.of_call(call)
        o, d_o = widths.padded(o), widths.padded(d_o)
        if folded := entries.fold(fitting):
            rows = (x.flatten(0, 1)[None] for x in (o, d_o))
            o, d_o, lse, d_lse = *rows, *map(entries.fold_rows, (lse, d_lse))
            found = entries.unfold_gradients(call, backward.backward(folded, o, lse, d_o, d_lse, bias_grad))
        else:
            found = backward.backward(fitting, o, lse, d_o, d_lse, bias_grad)
        return found if fitting is call else widths.cut(call, found)

    def bind_decode(self, call: DecodeCall) -> BoundDecode | None:
        """Lengths and pages are read on the GPU; None where the kernel does not cover the call."""
        return decode.bound(call)

    def decode(self, call: DecodeCall) -> tuple[Tensor, Tensor] | None:
        """Index tensors in int64 may have to be converted, where a prebuilt kernel takes int32 alone."""
        found = super().decode(call)
        if found is None and (narrow := call.in_int32()) is not call:
            found = super().decode(narrow)
        return found

    def check_decode(self, call: DecodeCall) -> None:
        if call.page_table is not None and decode.bound(call) is not None:
            pools.readable(in_bits(call.k_cache), in_bits(call.v_cache), paged=True)

    def bind_append(self, call: AppendCall) -> Callable[[tuple, Tensor | None], Tensor | None] | None:
        """By one launch; None where the kernel does not cover the call."""
        return append_call.bound(call)

    def kernels(self, call: Call) -> list[jit.Kernel]:
        """Every kernel that the call launches."""
        return coverage.kernels(call)


def _check(call: Call) -> None:
    """Raise for what a kernel would not notice."""
    documents.check(call.mask, call.seqlen_q, call.seqlen_k)
    entries.check(call.mask, call.seqlen_k)
    if call.grad:
        backward.check(call)


def _bind(call: Call) -> Bound:
    """Of a call that the kernels take as it is; those of its gradients are begun to be compiled."""
    of_gradients = replace(call, precision=None) if call.problem.eight_bits else call
    with torch.cuda.device(call.q.device):  # where tables are made
        if call.grad:
            helpers.begin(*backward.ahead(of_gradients))
        return eight_bits.bind(call) if call.problem.eight_bits else forward.bind(call, _bind_gradients)


def _bind_gradients(call: Call) -> backward.Bound | backward.WithoutKeys:
    with torch.cuda.device(call.q.device):
        return backward.bind(call)


def _why_not_prebuilt(problem: Problem, missing: list[str]) -> list[str]:
    """Sentences that say why kernels of the prebuilt package do not do, where the compiler is `missing`."""
    if refused := prebuilt.why_not():
        return [*missing, refused]
    lacks = [kernel for kernel in warmup.of_problem(problem) if not prebuilt.entry(kernel.launch, kernel.config, jit.arch())]
    if not lacks:
        return []
    extras = [name for name in warmup.EXTRAS if getattr(problem, name)]
    of = f"{problem.mask} masks of head_dim {problem.head_dim}/{problem.head_dim_v} in {problem.dtype}{' with ' * bool(extras)}{', '.join(extras)}"
    return [*missing, f"{prebuilt.DISTRIBUTION} lacks {len(lacks)} kernel{'s' * (len(lacks) > 1)} for {of}"]
