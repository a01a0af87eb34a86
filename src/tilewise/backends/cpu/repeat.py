"""A call whose arguments were prepared once, for more tensors of the same shapes, strides and dtype."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, get_num_threads

from tilewise.backends.cpu import abi
from tilewise.backends.cpu.arguments import plain, rows, workspace
from tilewise.backends.cpu.native import Library, failure
from tilewise.backends.cpu.planes import Planes
from tilewise.errors import check_memory
from tilewise.problem import Call


class Repeat:
    """Forward and backward of q, k and v like those of `call`, which has no other tensors."""

    def __init__(self, call: Call, planes: Planes, library: Library, isa: int, few: bool) -> None:
        batch, seqlen_q, heads_q, _ = call.q.shape
        self.planes = planes
        self.args = plain(rows(call.q), rows(call.k), rows(call.v), call.scale, call.softcap, isa)
        self.args.planes, self.args.plane_of = self.planes.planes, self.planes.plane_of
        args, o_shape, self.lse_shape = self.args, (batch, seqlen_q, heads_q, call.head_dim_v), (batch, heads_q, seqlen_q)
        self.new_o = _maker(o_shape, call.q)
        self.new_dq, self.new_dk, self.new_dv = (_maker(x.shape, x) for x in (call.q, call.k, call.v))
        made = ((args.o, o_shape), (args.d_o, o_shape), (args.dq, call.q.shape), (args.dk, call.k.shape), (args.dv, call.v.shape))
        for field, (_, seqlen, heads, dim) in made:  # contiguous
            field.batch, field.seq, field.head = seqlen * heads * dim, heads * dim, dim
        self.address, self.few, self.functions = ctypes.addressof(args), few, library.functions
        self.run, self.run_back = library.functions.tw_repeat, library.functions.tw_repeat_backward
        self.workspace_bytes: dict[int, int] = {}  # of the backward, by number of threads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """O, and LSE where it is wanted."""
        o = self.new_o(q)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32) if with_lse else None
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not (at_q and at_k and at_v):
            check_memory(q=q, k=k, v=v)
        at_lse = None if lse is None else lse.data_ptr()
        if status := self.run(self.address, self.few, get_num_threads(), at_q, at_k, at_v, o.data_ptr(), at_lse):
            raise failure(status)
        return o, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV from what `forward` returned and dO."""
        d_o = d_o.contiguous()
        dq, dk, dv = self.new_dq(q), self.new_dk(k), self.new_dv(v)
        threads = get_num_threads()
        size = self.workspace_bytes.get(threads)
        if size is None:
            args = abi.Args.from_buffer_copy(self.args)
            args.threads = threads
            self.workspace_bytes[threads] = size = self.functions.tw_backward_workspace(ctypes.byref(args))
        memory, start = workspace(size)
        inputs = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), d_o.data_ptr()
        if 0 in inputs:
            check_memory(q=q, k=k, v=v, o=o, lse=lse, dO=d_o)
        if status := self.run_back(self.address, threads, *inputs, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), start):
            raise failure(status)
        del memory
        return dq, dk, dv


def _maker(shape: tuple[int, ...], like: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes a contiguous tensor of this shape from one that is strided as `like`; empty_like takes 1 us, new_empty 2."""
    return torch.empty_like if like.shape == shape and like.is_contiguous() else lambda x: x.new_empty(shape)
