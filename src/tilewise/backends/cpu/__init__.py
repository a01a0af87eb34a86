"""The native CPU backend: FlashAttention-2 in C++ (csrc/), called through ctypes with pointers and strides.

Inside everything is fp32; on processors with AVX512_BF16 or AMX the products of bf16 inputs use their instructions, with P and dS rounded to bf16.
On AMX, products of fp16 and fp32 are those of sums of two and three bf16 values, as exact as fp32's own.
Threads are torch's own, as many as torch.get_num_threads() says, and results do not depend on how many.
"""

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends import Backend, BoundDecode
from tilewise.backends.cpu import abi, cache, native
from tilewise.backends.cpu.arguments import DTYPES, in_order, in_rows
from tilewise.backends.cpu.bound import Bound
from tilewise.backends.cpu.native import Library, library
from tilewise.backends.cpu.planes import TILE_N
from tilewise.backends.cpu.ways import FEW_QUERIES, FEW_QUERIES_NARROW
from tilewise.problem import Call, DecodeCall, Gradients, Problem

__all__ = ["Cpu"]

NARROW = ("avx2", "generic")


class Cpu(Backend):
    """The native kernel. `isa` forces one instruction set ("amx", "avx512_bf16", "avx512", "avx2", "generic"); by default the best one runs."""

    name = "cpu"
    keeps_row_max = True

    def __init__(self, isa: str | None = None) -> None:
        if isa is not None and isa not in abi.ISAS:
            raise ValueError(f"isa must be one of {', '.join(map(repr, abi.ISAS))} or None, got {isa!r}")
        self.isa = isa

    def why_not(self, what: Problem) -> list[str]:
        """Sentences that say why this backend cannot run the problem; empty when it can."""
        if what.device != "cpu":
            return [f"it computes on the CPU, the tensors are on {what.device}"]
        reasons = what.mixed if what.dtype in DTYPES else [f"it computes fp32, bf16 and fp16, not {what.dtype}"]
        if missing := native.problem():
            reasons.append(missing)
        elif self.isa not in (None, "auto", *library().isas):
            reasons.append(f"instruction set {self.isa!r} is not available here; there are {', '.join(library().isas)}")
        return reasons

    def missing(self, problem: Problem) -> str:
        """Why the kernel is not here, where it would compute the problem."""
        ours = problem.device == "cpu" and problem.dtype in DTYPES and not problem.mixed
        return native.problem() or "" if ours else ""

    def tile(self, call: Call) -> tuple[int, int]:
        """(queries, keys) by which the kernel looks a mask up; within them it crops to the panel in hand."""
        return abi.ROW_BLOCK, TILE_N

    def describe(self) -> str:
        """The instruction set that runs, and how threads are had; for `explain` and `doctor`."""
        found = library()
        return f"{self._forced or found.isa} ({'torch' if found.shared_pool else 'own'} threads: {torch.get_num_threads()})"

    def details(self, call: Call) -> list[str]:
        """The instruction set that this call's kernels use, which for small calls need not be the best one; for `explain`."""
        found, bound = library(), self._bound(in_rows(replace(call, grad=True)))
        args, keep = bound.arguments(call.extras)
        runs = abi.RUN_DECODE if args.few else abi.RUN_FORWARD, abi.RUN_BACKWARD
        forward, backward = (abi.ISAS[found.functions.tw_isa_of(ctypes.byref(args), run)] for run in runs)
        way = []
        if args.few:
            way = ["few queries: every key is read once for all the rows of its head, and the keys are split over threads"]
        elif args.documents:
            way = ["documents: each is computed as if it were called alone, and has the bits of that"]
        del keep
        return [f"instruction set: {forward} forward, {backward} backward", *way]

    def bind(self, call: Call) -> Bound:
        """`forward` and `backward` for more calls that differ in nothing but what tensors hold."""
        return self._bound(in_rows(call))

    def forward(self, call: Call) -> tuple[Tensor, ...]:
        """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q) in fp32, and so row_max."""
        call = in_rows(call)
        return self._bound(replace(call, grad=False)).results(call)

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """Contiguous gradients given the forward's outputs and the gradients that reach them; the bias's only where `bias_grad` asks for it."""
        call, found = in_rows(call), library()
        bound = Bound(call, found, self._isa(found), None, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"))
        d_lse = None if d_lse is None else d_lse.float()
        return Gradients(
            *bound.backward(call.q, call.k, call.v, o, in_order(lse), d_o, d_lse, call.extras, bias_grad and call.bias is not None)
        )

    def _bound(self, call: Call) -> Bound:
        found = library()
        return Bound(call, found, self._isa(found), self._most_few(found))

    def bind_decode(self, call: DecodeCall) -> BoundDecode | None:
        """The newest queries against a cache, plain or paged, read in place; see cache.py."""
        found = library()
        return cache.bind(found, self._isa(found), call, self.forward)

    def _isa(self, found: Library) -> int:
        return abi.ISAS.index(self._forced or (found.isa if found.forced else "auto"))

    def _most_few(self, found: Library) -> int:
        return FEW_QUERIES_NARROW if (self._forced or found.isa) in NARROW else FEW_QUERIES

    @property
    def _forced(self) -> str | None:
        return None if self.isa == "auto" else self.isa
