"""A call whose arguments were prepared once, for more tensors of the same shapes, strides and dtype."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, get_num_threads

from tilewise.backends.cpu import abi
from tilewise.backends.cpu.arguments import CPU, add_tensors, in_order, plain, rows, set_broadcast, workspace
from tilewise.backends.cpu.native import Library, failure
from tilewise.backends.cpu.planes import nbytes
from tilewise.backends.cpu.ways import choose_backward, choose_forward
from tilewise.errors import check_memory
from tilewise.problem import Call, gradient_like


class Repeat:
    """Forward and backward of tensors like those of `call`, each in the way that `call` itself goes (ways.py). most: as `choose_forward` has it."""

    def __init__(self, call: Call, library: Library, isa: int, most: int) -> None:
        batch, seqlen_q, heads_q, _ = call.q.shape
        self.args = plain(rows(call.q), rows(call.k), rows(call.v), call.scale, call.softcap, isa)
        self.kept = [*choose_forward(self.args, call, most), *choose_backward(self.args, call)]
        args, o_shape, self.lse_shape = self.args, (batch, seqlen_q, heads_q, call.head_dim_v), (batch, heads_q, seqlen_q)
        o = torch.empty(o_shape, dtype=call.q.dtype, device="meta")
        gradients = [gradient_like(x) for x in (call.q, call.k, call.v)]
        self.new_o = _maker(o, call.q)
        self.new_dq, self.new_dk, self.new_dv = map(_maker, gradients, (call.q, call.k, call.v))
        for field, x in zip((args.o, args.d_o, args.dq, args.dk, args.dv), (o, o, *gradients), strict=True):
            field.batch, field.seq, field.head, _ = x.stride()
        self.address, self.functions = ctypes.addressof(args), library.functions
        self.run, self.run_back = library.functions.tw_repeat, library.functions.tw_repeat_backward
        self.workspace_bytes: dict[tuple, int] = {}  # of the backward, by number of threads, and what else is asked for

    @property
    def nbytes(self) -> int:
        """Of the mask's tables."""
        return nbytes(self.kept)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, beside: tuple[Tensor | None, ...], with_lse: bool, heads_first: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """O, always contiguous, and LSE where it is wanted. beside: the tensors of `repeats.Beside`."""
        o = self.new_o(q)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32) if with_lse or self.args.documents else None
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not (at_q and at_k and at_v):
            check_memory(q=q, k=k, v=v)
        at_lse, (args, keep) = None if lse is None else lse.data_ptr(), self._with(beside)
        if status := self.run(self._address(args), get_num_threads(), at_q, at_k, at_v, o.data_ptr(), at_lse):
            raise failure(status)
        del keep
        return o, lse

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        d_o: Tensor,
        d_lse: Tensor | None,
        beside: tuple[Tensor | None, ...],
        bias_grad: bool,
    ) -> tuple[Tensor | None, ...]:
        """dQ, dK, dV, dBias and dSink from what `forward` returned, dO and dLSE."""
        o, d_o, (bias, _, sink, *_) = o.contiguous(), d_o.contiguous(), beside
        args, keep = self._with(beside)
        d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=CPU) if bias_grad else None
        d_sink = None if sink is None else torch.zeros(sink.shape, dtype=torch.float32, device=CPU)
        if (d_lse, d_bias, d_sink) != (None, None, None):
            args = args if args is not self.args else abi.Args.from_buffer_copy(args)
            if d_lse is not None:
                d_lse = in_order(d_lse)
                args.d_lse = d_lse.data_ptr()
            if d_bias is not None:
                set_broadcast(args.dbias, d_bias)
            if d_sink is not None:
                args.dsink = d_sink.data_ptr()
        dq, dk, dv = self.new_dq(q), self.new_dk(k), self.new_dv(v)
        threads = get_num_threads()
        kind = threads, d_lse is None, bias_grad
        size = self.workspace_bytes.get(kind)
        if size is None:
            sized = abi.Args.from_buffer_copy(args)
            sized.threads = threads
            self.workspace_bytes[kind] = size = self.functions.tw_backward_workspace(ctypes.byref(sized))
        memory, start = workspace(size)
        inputs = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), d_o.data_ptr()
        if 0 in inputs:
            check_memory(q=q, k=k, v=v, o=o, lse=lse, dO=d_o)
        if status := self.run_back(self._address(args), threads, *inputs, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), start):
            raise failure(status)
        del memory, keep
        return dq, dk, dv, None if d_bias is None else d_bias.to(bias.dtype), None if d_sink is None else d_sink.to(sink.dtype)

    def _with(self, beside: tuple[Tensor | None, ...]) -> tuple[abi.Args, list]:
        """The kernel's arguments with the call's other tensors, and what must stay alive while it runs."""
        bias, slopes, sink, *_ = beside
        if bias is slopes is sink is None:
            return self.args, []
        check_memory(bias=bias, alibi_slopes=slopes, sink=sink)
        return add_tensors(abi.Args.from_buffer_copy(self.args), bias, slopes, sink)

    def _address(self, args: abi.Args) -> int:
        return self.address if args is self.args else ctypes.addressof(args)


def _maker(made: Tensor, like: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes a tensor that lies as `made` from one that lies as `like`; empty_like takes 1 us, new_empty_strided 2."""
    shape, strides = made.shape, made.stride()
    same = like.shape == shape and like.stride() == strides  # so that it is dense
    return torch.empty_like if same else lambda x: x.new_empty_strided(shape, strides)
