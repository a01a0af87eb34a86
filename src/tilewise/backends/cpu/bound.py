"""A call that has given the kernel its arguments once; what is left is to say where its tensors lie."""

import ctypes
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, get_num_threads

from tilewise.backends import OfInputs
from tilewise.backends.cpu import abi
from tilewise.backends.cpu.arguments import CPU, add_dropout, add_tensors, in_order, plain, rows, set_broadcast, set_tensor, workspace
from tilewise.backends.cpu.native import Library, failure
from tilewise.backends.cpu.planes import nbytes
from tilewise.backends.cpu.ways import choose_backward, choose_forward, whole_queries
from tilewise.errors import check_memory
from tilewise.masks import DeviceDocuments
from tilewise.problem import Call, gradient_like

# Of a mask's tables: a call with larger ones takes so long that to keep it saves nothing, and many such calls take much memory.
KEPT_BYTES = 64 << 10
Maker = Callable[[Tensor], Tensor]  # of a new tensor, from one that lies as that of the call that was bound


class Bound:
    """See `backends.Bound`. Rows of q, k and v are contiguous.

    most: as `choose_forward` has it; None where only gradients are asked for. gradient: what says, on the meta device, how an input's gradient lies.
    """

    def __init__(self, call: Call, library: Library, isa: int, most: int | None, gradient: Maker = gradient_like) -> None:
        batch, seqlen_q, heads_q, _ = call.q.shape
        self.args, self.lse_shape = plain(call.q, call.k, call.v, call.scale, call.softcap, isa), (batch, heads_q, seqlen_q)
        self.args.whole_q = whole_queries(call)
        self.tables, self.gradient = [] if most is None else choose_forward(self.args, call, most), gradient
        self.like = replace(
            call, **{name: _on_meta(getattr(call, name)) for name in ("q", "k", "v")}, bias=None, alibi_slopes=None, sink=None, out=None
        )
        self.changed = call.dropout is not None or call.diagonal is not None
        o = torch.empty((batch, seqlen_q, heads_q, call.head_dim_v), dtype=call.q.dtype, device="meta")
        self.new_o = _maker(o, call.q)
        self.new_gradients: tuple[Maker, Maker, Maker] | None = None
        for field in (self.args.o, self.args.d_o):
            field.batch, field.seq, field.head, _ = o.stride()
        self.address, self.functions = ctypes.addressof(self.args), library.functions
        self.run, self.run_back = library.functions.tw_repeat, library.functions.tw_repeat_backward
        if 0 in self.lse_shape:
            self.run = _nothing
        if 0 in (batch, heads_q):
            self.run_back = _nothing
        self.workspace_bytes: dict[tuple, int] = {}  # of the backward, by number of threads, and what else is asked for
        if call.grad:
            self._prepare_backward()

    @property
    def kept(self) -> bool:
        """Not where the call depends on what tensors hold, or its mask's tables are large."""
        reads = self.like.diagonal is not None or isinstance(self.like.mask, DeviceDocuments)
        return not reads and nbytes(self.tables) <= KEPT_BYTES

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor | None, ...], with_lse: bool, heads_first: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """O, always contiguous, and LSE where it is wanted."""
        o = self.new_o(q)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32) if with_lse or self.args.documents else None
        args, keep = self.arguments(extras)
        self._run(args, q, k, v, o, lse)
        del keep
        return o, lse

    def results(self, call: Call) -> tuple[Tensor, ...]:
        """As `Backend.forward`, of the bound call itself."""
        o = self.new_o(call.q) if call.out is None else call.out
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=CPU)
        args, keep = self.arguments(call.extras)
        set_tensor(args.o, o)
        row_max = [torch.empty_like(lse)] if call.row_max else []
        for each in row_max:
            args.row_max = each.data_ptr()
        self._run(args, call.q, call.k, call.v, o, lse)
        del keep
        return o, lse, *row_max

    def _run(self, args: abi.Args, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None) -> None:
        at_q, at_k, at_v, at_lse = q.data_ptr(), k.data_ptr(), v.data_ptr(), None if lse is None else lse.data_ptr()
        if not (at_q and at_k and at_v):
            check_memory(q=q, k=k, v=v)
        address = self.address if args is self.args else ctypes.addressof(args)
        if status := self.run(address, get_num_threads(), at_q, at_k, at_v, o.data_ptr(), at_lse):
            raise failure(status)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        d_o: Tensor,
        d_lse: Tensor | None,
        extras: tuple[Tensor | None, ...],
        bias_grad: bool,
    ) -> OfInputs:
        """dQ, dK, dV, dBias and dSink from what `forward` returned, dO and dLSE."""
        new_dq, new_dk, new_dv = self.new_gradients or self._prepare_backward()
        (bias, _, sink, *_), (args, keep), o = extras, self.arguments(extras), o.contiguous()
        d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=CPU) if bias_grad and bias is not None else None
        d_sink = None if sink is None else torch.zeros(sink.shape, dtype=torch.float32, device=CPU)
        turned = not d_o.is_contiguous()
        if turned or (d_lse, d_bias, d_sink) != (None, None, None):
            args = args if args is not self.args else abi.Args.from_buffer_copy(args)
            if turned:
                d_o = rows(d_o)
                set_tensor(args.d_o, d_o)
            if d_lse is not None:
                d_lse = in_order(d_lse)
                args.d_lse = d_lse.data_ptr()
            if d_bias is not None:
                set_broadcast(args.dbias, d_bias)
            if d_sink is not None:
                args.dsink = d_sink.data_ptr()
        dq, dk, dv = new_dq(q), new_dk(k), new_dv(v)
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
        address = self.address if args is self.args else ctypes.addressof(args)
        if status := self.run_back(address, threads, *inputs, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), start):
            raise failure(status)
        del memory, keep
        d_bias = None if bias is None or d_bias is None else d_bias.to(bias.dtype)
        return dq, dk, dv, d_bias, None if sink is None or d_sink is None else d_sink.to(sink.dtype)

    def _prepare_backward(self) -> tuple[Maker, Maker, Maker]:
        self.tables = [*self.tables, *choose_backward(self.args, self.like)]
        q, k, v = self.like.q, self.like.k, self.like.v
        dq, dk, dv = self.gradient(q), self.gradient(k), self.gradient(v)
        if self.like.wide_keys:
            self.args.wide = 1
            dk, dv = dk.float(), dv.float()
        for field, x in ((self.args.dq, dq), (self.args.dk, dk), (self.args.dv, dv)):
            field.batch, field.seq, field.head, _ = x.stride()
        self.new_gradients = found = _maker(dq, q), _maker(dk, k), _maker(dv, v)
        return found

    def arguments(self, extras: tuple[Tensor | None, ...]) -> tuple[abi.Args, list]:
        """The kernel's arguments with the call's other tensors, and what must stay alive while it runs."""
        bias, slopes, sink, rng, *_ = extras
        if bias is slopes is sink is None and not self.changed:
            return self.args, []
        check_memory(bias=bias, alibi_slopes=slopes, sink=sink)
        args, keep = add_tensors(abi.Args.from_buffer_copy(self.args), bias, slopes, sink)
        if self.like.dropout is not None:
            keep.append(add_dropout(args, self.like.dropout if rng is None else self.like.dropout.drawn_by(rng)))
        if self.like.diagonal is not None:
            keep.append(diagonal := self.like.diagonal.long().contiguous())
            args.diagonal = diagonal.data_ptr()
        return args, keep


def _nothing(*_given: object) -> int:
    """In place of a kernel that has no element to compute."""
    return 0


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _maker(made: Tensor, like: Tensor) -> Maker:
    """What makes a tensor that lies as `made` from one that lies as `like`; empty_like takes 1 us, new_empty_strided 2."""
    shape, strides = made.shape, made.stride()
    same = like.shape == shape and like.stride() == strides and like.dtype == made.dtype  # so that it is dense
    return torch.empty_like if same else lambda x: x.new_empty_strided(shape, strides, dtype=made.dtype)
