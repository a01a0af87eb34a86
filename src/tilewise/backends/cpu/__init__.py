"""The native CPU backend: FlashAttention-2 in C++ (csrc/), called through ctypes with pointers and strides.

Inside everything is fp32; on processors with AVX512_BF16 or AMX the products of bf16 inputs use their instructions, with P and dS rounded to bf16.
On AMX fp16 and fp32 are products of sums of two and three bf16 numbers, as exact as fp32's own.
Threads are torch's own, as many as torch.get_num_threads() says, and results do not depend on how many.
"""

import ctypes
from dataclasses import replace
from typing import TypeVar

import torch
from numpy import ndarray
from torch import Tensor

from tilewise.backends import Backend
from tilewise.backends.cpu import abi, native
from tilewise.backends.cpu.arguments import CPU, DTYPES, add_workspace, arguments_of, rows, set_broadcast, set_tensor
from tilewise.backends.cpu.cache import decode
from tilewise.backends.cpu.documents import bounds_of, documents_of
from tilewise.backends.cpu.native import Library, failure, library, run
from tilewise.backends.cpu.planes import TILE_N, planes_of, planes_of_sequences
from tilewise.backends.cpu.repeat import Repeat
from tilewise.masks import Documents, Full
from tilewise.problem import Call, DecodeCall, Gradients, Problem

__all__ = ["Cpu"]

# Up to so many queries, by the lanes of a vector, every key is read once for all the rows of its head, and keys are split over threads: as soon as
# the numbers of K and V that a head reads are NUMBERS_A_PAIR times the queries' square (measured: docs/cpu-notes.md).
FEW_QUERIES, FEW_QUERIES_NARROW, NUMBERS_A_PAIR = 8, 4, 64
REPEAT_BYTES = 64 << 10  # a call whose mask has larger tables takes so long that a short way saves nothing, and many such calls much memory
NARROW = ("avx2", "generic")
Lengths = TypeVar("Lengths", int, ndarray)


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
        found = library()
        args, keep = arguments_of(call, self._isa(found))
        few = self._few_queries(call, found)
        runs = abi.RUN_DECODE if few else abi.RUN_FORWARD, abi.RUN_BACKWARD
        forward, backward = (abi.ISAS[found.functions.tw_isa_of(ctypes.byref(args), run)] for run in runs)
        del keep
        way = ["few queries: every key is read once for all the rows of its head, and the keys are split over threads"] if few else []
        return [f"instruction set: {forward} forward, {backward} backward", *way]

    def forward(self, call: Call) -> tuple[Tensor, ...]:
        """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q) in fp32, and so row_max."""
        batch, seqlen_q, heads_q, _ = call.q.shape
        o = call.out if call.out is not None else torch.empty((batch, seqlen_q, heads_q, call.v.shape[3]), dtype=call.q.dtype, device=CPU)
        lse = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=CPU)
        results = (o, lse, torch.empty_like(lse)) if call.row_max else (o, lse)
        if lse.numel() == 0:
            return results
        found, documents = library(), documents_of(call)
        alone = call if documents is None else replace(call, mask=Full(), diagonal=None)  # each document has its own mask and diagonal
        args, keep = arguments_of(alone, self._isa(found))
        set_tensor(args.o, o)
        args.lse = lse.data_ptr()
        if call.row_max:
            args.row_max = results[2].data_ptr()
        if documents is not None:
            self._forward_documents(documents, call, args, results)
        elif self._few_queries(call, found):
            keep.append(add_workspace(args, found.functions.tw_decode_workspace))
            run(found.functions.tw_decode, args)
        else:
            run(found.functions.tw_forward, args)
        del keep
        return results

    def _forward_documents(self, mask: Documents, call: Call, args: abi.Args, results: tuple[Tensor, ...]) -> None:
        """The forward of packed documents, each as if it were alone, into `results`; tokens behind the last one see nothing."""
        found, bounds, keep = library(), bounds_of(mask), []
        queries, keys = bounds[:, 1] - bounds[:, 0], bounds[:, 3] - bounds[:, 2]
        few = few_queries(queries, keys, call.head_dim + call.head_dim_v, self._most_few(found))
        planes = planes_of_sequences(mask.inner, queries, keys, keep)
        end = int(bounds[-1, 1]) if len(bounds) else 0
        (o, lse, *row_max), nothing = results, -torch.inf if call.sink is None else call.sink.detach().float()[:, None]
        o[:, end:], lse[..., end:] = 0.0, nothing
        for largest in row_max:
            largest[..., end:] = -torch.inf
        status = found.functions.tw_forward_documents(
            ctypes.byref(args), len(bounds), bounds.ctypes.data, ctypes.addressof(planes), few.ctypes.data
        )
        del keep
        if status:
            raise failure(status)

    def repeat(self, call: Call) -> Repeat | None:
        """`forward` and `backward` for more calls that differ in nothing but what tensors hold; None where there is no shorter way."""
        if call.diagonal is not None or call.dropout is not None or call.row_max or 0 in (*call.q.shape, *call.k.shape):
            return None
        planes = planes_of(call.mask, call.seqlen_q, call.seqlen_k, call.batch, call.heads_q)
        if planes.nbytes > REPEAT_BYTES:
            return None
        found = library()
        return Repeat(call, planes, found, self._isa(found), self._few_queries(call, found))

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """Gradients given the forward's outputs and the gradients that reach them; the bias's only where `bias_grad` asks for it."""
        found = library()
        args, keep = arguments_of(call, self._isa(found))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=CPU) for x in (call.q, call.k, call.v))
        fp32 = {"dtype": torch.float32, "device": CPU}
        d_sink = None if call.sink is None else torch.zeros(call.heads_q, **fp32)
        d_bias = torch.zeros(call.bias.shape, **fp32) if bias_grad and call.bias is not None else None
        o, d_o, lse = rows(o), rows(d_o), lse.contiguous()
        for field, x in ((args.o, o), (args.d_o, d_o), (args.dq, dq), (args.dk, dk), (args.dv, dv)):
            set_tensor(field, x)
        args.lse = lse.data_ptr()
        if d_lse is not None:
            d_lse = d_lse.float().contiguous()
            args.d_lse = d_lse.data_ptr()
        if d_sink is not None:
            args.dsink = d_sink.data_ptr()
        if d_bias is not None:
            set_broadcast(args.dbias, d_bias)
        if call.batch and call.heads_q:
            keep.append(add_workspace(args, found.functions.tw_backward_workspace))
            run(found.functions.tw_backward, args)
        del keep
        d_bias = None if d_bias is None else d_bias.to(call.bias.dtype)
        return Gradients(dq, dk, dv, d_bias, None if d_sink is None else d_sink.to(call.sink.dtype))

    def decode(self, call: DecodeCall) -> tuple[Tensor, Tensor] | None:
        """The newest queries against a cache, plain or paged, read in place; see `cache.decode`."""
        found = library()
        return decode(found, self._isa(found), call, self.forward)

    def _isa(self, found: Library) -> int:
        return abi.ISAS.index(self._forced or (found.isa if found.forced else "auto"))

    def _few_queries(self, call: Call, found: Library) -> bool:
        """Whether lanes of a panel would stay so empty that the rows of a head are better computed key by key."""
        few = few_queries(call.seqlen_q, call.seqlen_k, call.head_dim + call.head_dim_v, self._most_few(found))
        return few and call.dropout is None and call.mask.kind != "bitmap"

    def _most_few(self, found: Library) -> int:
        return FEW_QUERIES_NARROW if (self._forced or found.isa) in NARROW else FEW_QUERIES

    @property
    def _forced(self) -> str | None:
        return None if self.isa == "auto" else self.isa


def few_queries(queries: Lengths, keys: Lengths, numbers: int, most: int) -> Lengths:
    """Which calls leave lanes of a panel so empty that the rows of a head are better computed key by key; `numbers` of K and V a key."""
    return (queries == 1) | ((queries <= most) & (keys * numbers >= NUMBERS_A_PAIR * queries**2))
