"""The native CPU backend: FlashAttention-2 in C++ (csrc/), called through ctypes with pointers and strides.

Inside everything is fp32; on processors with AVX512_BF16 or AMX the products of bf16 inputs use their instructions, with P and dS rounded to bf16.
On AMX fp16 and fp32 are products of sums of two and three bf16 numbers, as exact as fp32's own.
Threads are torch's own, as many as torch.get_num_threads() says, and results do not depend on how many.
"""

import ctypes

import torch
from torch import Tensor

from tilewise.backends import Backend, BoundDecode
from tilewise.backends.cpu import abi, cache, native
from tilewise.backends.cpu.arguments import CPU, DTYPES, add_workspace, arguments_of, in_order, rows, set_broadcast, set_tensor
from tilewise.backends.cpu.native import Library, library, run
from tilewise.backends.cpu.planes import TILE_N
from tilewise.backends.cpu.repeat import Repeat
from tilewise.backends.cpu.ways import FEW_QUERIES, FEW_QUERIES_NARROW, choose_backward, choose_forward, documents_of
from tilewise.problem import Call, DecodeCall, Gradients, Problem

__all__ = ["Cpu"]

REPEAT_BYTES = 64 << 10  # a call whose mask has larger tables takes so long that a short way saves nothing, and many such calls much memory
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
        found = library()
        args, keep = arguments_of(call, self._isa(found))
        keep += choose_forward(args, call, self._most_few(found)) + choose_backward(args, call)
        runs = abi.RUN_DECODE if args.few else abi.RUN_FORWARD, abi.RUN_BACKWARD
        forward, backward = (abi.ISAS[found.functions.tw_isa_of(ctypes.byref(args), run)] for run in runs)
        way = []
        if args.few:
            way = ["few queries: every key is read once for all the rows of its head, and the keys are split over threads"]
        elif args.documents:
            way = ["documents: each is computed as if it were called alone, and has the bits of that"]
        del keep
        return [f"instruction set: {forward} forward, {backward} backward", *way]

    def forward(self, call: Call) -> tuple[Tensor, ...]:
        """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q) in fp32, and so row_max."""
        batch, seqlen_q, heads_q, _ = call.q.shape
        o = call.out if call.out is not None else torch.empty((batch, seqlen_q, heads_q, call.v.shape[3]), dtype=call.q.dtype, device=CPU)
        lse = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=CPU)
        results = (o, lse, torch.empty_like(lse)) if call.row_max else (o, lse)
        if lse.numel() == 0:
            documents_of(call)  # which looks whether they fit, as for any other call
            return results
        found = library()
        args, keep = arguments_of(call, self._isa(found))
        keep += choose_forward(args, call, self._most_few(found))
        set_tensor(args.o, o)
        args.lse = lse.data_ptr()
        if call.row_max:
            args.row_max = results[2].data_ptr()
        run(found.functions.tw_forward, args)
        del keep
        return results

    def repeat(self, call: Call) -> Repeat | None:
        """`forward` and `backward` for more calls that differ in nothing but what tensors hold; None where there is no shorter way."""
        if call.diagonal is not None or call.dropout is not None or call.row_max or 0 in (*call.q.shape, *call.k.shape):
            return None
        found = library()
        made = Repeat(call, found, self._isa(found), self._most_few(found))
        return made if made.nbytes <= REPEAT_BYTES else None

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """Gradients given the forward's outputs and the gradients that reach them; the bias's only where `bias_grad` asks for it."""
        found = library()
        args, keep = arguments_of(call, self._isa(found))
        keep += choose_backward(args, call)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=CPU) for x in (call.q, call.k, call.v))
        fp32 = {"dtype": torch.float32, "device": CPU}
        d_sink = None if call.sink is None else torch.zeros(call.heads_q, **fp32)
        d_bias = torch.zeros(call.bias.shape, **fp32) if bias_grad and call.bias is not None else None
        o, d_o, lse = rows(o), rows(d_o), in_order(lse)
        for field, x in ((args.o, o), (args.d_o, d_o), (args.dq, dq), (args.dk, dk), (args.dv, dv)):
            set_tensor(field, x)
        args.lse = lse.data_ptr()
        if d_lse is not None:
            d_lse = in_order(d_lse.float())
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
