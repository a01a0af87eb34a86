"""A call whose arguments were prepared once, for more tensors of the same shapes, strides and dtype."""

import ctypes

import torch
from torch import Tensor

from tilewise.backends.cpu.arguments import plain, rows
from tilewise.backends.cpu.native import Library, failure
from tilewise.backends.cpu.planes import planes_of
from tilewise.problem import Call


class Repeat:
    """The forward of q, k and v like those of `call`, which has no other tensors."""

    def __init__(self, call: Call, library: Library, isa: int, few: bool) -> None:
        batch, seqlen_q, heads_q, _ = call.q.shape
        self.planes = planes_of(call.mask, seqlen_q, call.seqlen_k, batch, heads_q)
        self.args = plain(rows(call.q), rows(call.k), rows(call.v), call.scale, call.softcap, isa)
        self.args.planes, self.args.plane_of = self.planes.planes, self.planes.plane_of
        self.o_shape, self.lse_shape = (batch, seqlen_q, heads_q, call.head_dim_v), (batch, heads_q, seqlen_q)
        self.args.o.head, self.args.o.seq = call.head_dim_v, heads_q * call.head_dim_v
        self.args.o.batch = seqlen_q * self.args.o.seq
        self.address, self.few, self.function = ctypes.addressof(self.args), few, library.functions.tw_repeat

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
        o = q.new_empty(self.o_shape)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32) if return_lse else None
        threads, lse_address = torch.get_num_threads(), None if lse is None else lse.data_ptr()
        status = self.function(self.address, self.few, threads, q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse_address)
        if status:
            raise failure(status)
        return o if lse is None else (o, lse)
