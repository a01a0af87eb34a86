"""A forward pass by a kernel and arguments that were found once, for more tensors of the same shapes, strides and dtype."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends.hopper import packing, short
from tilewise.backends.hopper.operands import Work
from tilewise.backends.tables.keeping import hold
from tilewise.errors import check_memory
from tilewise.problem import Call
from tilewise.sm90.jit import aligned, in_place, strided, tensors_of

KEPT_BYTES = 1 << 16  # a larger LSE that is not returned is allocated anew; its kernel takes longer than that
TENSORS = "q", "k", "v", "bias", "alibi_slopes", "sink", "q_scale", "k_scale", "v_scale", "out"


class Bound:
    """Attention of tensors like those of `call`, on whichever stream is current; the tensors' device need not be.

    What a kernel writes other than O is kept, one a stream: launches of one stream follow each other. A CUDA graph may be replayed on any stream,
    so what it captures gets its own.
    """

    def __init__(
        self,
        call: Call,
        kernel: Callable,
        workspace: Callable[[], Work | tuple[()]],
        *,
        rest: Sequence,
        made: Callable[..., Sequence] | None = None,
        ahead: Callable | None = None,
        packed: Call | None = None,
        gradients: Callable | None = None,
        kept: bool = True,
    ) -> None:
        """`kernel((q, k, v, o, lse), workspace(), *rest)` computes the call, on `aligned` operands; `gradients(call)` are those of such calls,
        None where nobody asks for them.

        made: what makes more of `rest`, first `operands.Scores`, of the call's other tensors (`problem.Extras`), where there are any. ahead: what is
        launched first, of packed documents: called with the stream, or None for a graph's, it gives what comes before `rest`, and a function of
        cu_seqlens_q and cu_seqlens_k that writes it. packed: the call as the kernel takes it, where it is another one (packing.py). kept: as
        `backends.Bound` has it.
        """
        batch, seqlen_q, heads_q, _ = call.q.shape
        self.kernel, self.rest, self.workspace, self.made, self.ahead = kernel, tuple(rest), workspace, made, ahead
        self.like, self.gradients, self.kept = replace(call, **dict.fromkeys(TENSORS)), gradients, kept
        self.device = call.q.device.index
        shape, lse_shape = (batch, seqlen_q, heads_q, call.head_dim_v), (batch, heads_q, seqlen_q)
        self.empty = short.allocator(call.q.device)
        dtype = call.out_dtype or call.q.dtype
        self.o, self.lse = (shape, short.strides(shape), dtype), (lse_shape, short.strides(lse_shape), torch.float32)
        self.packed, self.o_heads_first = None if packed is None else packing.Views(call, packed), self.o
        if packed is None:
            apart, token, head, one = short.strides((batch, heads_q, seqlen_q, call.head_dim_v))
            self.o_heads_first = shape, (apart, head, token, one), dtype
        self.copies = not all(map(strided, ((packed or call).q, (packed or call).k, (packed or call).v)))
        self.keeps = kept and 4 * math.prod(lse_shape) <= KEPT_BYTES
        self.back: Callable | None = None  # what `gradients` gave, found at the first gradient
        self.at_hand = short.by_stream(self.device, self._begin)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor | None, ...], with_lse: bool, heads_first: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `backends.Bound`. O does not lie as heads_first asks where heads are packed."""
        if short.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.forward(q, k, v, extras, with_lse, heads_first)
        if not (q.data_ptr() and k.data_ptr() and v.data_ptr()):
            check_memory(q=q, k=k, v=v)
        lse, rest, first = self.at_hand()
        if with_lse or lse is None:
            lse = self.empty(*self.lse)
        o = self.empty(*(self.o_heads_first if heads_first else self.o))
        if first is not None:
            first(extras[4], extras[5])
        if self.made is not None:
            rest = *rest, *self.made(*extras)
        self._compute((q, k, v, o, lse), rest, with_lse)
        return o, lse

    def results(self, call: Call) -> tuple[Tensor, ...]:
        """As `Backend.forward`, of the bound call itself; O is its `out` where the kernel can write there."""
        extras = call.extras
        with torch.cuda.device(call.q.device):
            _, rest, first = self.at_hand()
            lse, o = self.empty(*self.lse), call.out
            if o is None or not in_place(o) or self.packed is not None:
                o = self.empty(*self.o)
            if first is not None:
                first(extras.cu_seqlens_q, extras.cu_seqlens_k, True)  # their mask was checked
            if self.made is not None:
                rest = *rest, *self.made(*extras)
            if not call.row_max:
                self._compute((call.q, call.k, call.v, o, lse), rest, True)
                return o, lse
            row_max = of_rows = self.empty(*self.lse)
            if self.packed is not None:
                of_rows = torch.empty(self.packed.lse, dtype=torch.float32, device=row_max.device)
            rest = [each._replace(row_max=of_rows) if hasattr(each, "row_max") else each for each in rest]
            self._compute((call.q, call.k, call.v, o, lse), rest, True)
            if self.packed is not None:
                packing.put_statistic(call, row_max, of_rows)
        return o, lse, row_max

    def _compute(self, tensors: tuple[Tensor, ...], rest: Sequence, with_lse: bool) -> None:
        if self.packed is not None:
            self.packed.compute(lambda *views: self._launch(views, rest), *tensors, with_lse)
        else:
            self._launch(tensors, rest)

    def _launch(self, tensors: tuple[Tensor, ...], rest: Sequence) -> None:
        if not self.copies:
            try:
                return self.kernel(tensors, *rest)
            except (
                ValueError
            ):  # where one does not begin at a multiple of 16 bytes: the kernel's function looks, before it launches anything
                pass
        q, k, v, o, lse = tensors
        self.kernel((aligned(q), aligned(k), aligned(v), o, lse), *rest)
        return None

    def backward(self, *operands) -> tuple[Tensor | None, ...]:
        """See `backends.Bound`; operands: as there."""
        back = self.back
        if back is None:
            q, k, v, *_, (bias, slopes, sink, *_), _ = operands
            back = self.gradients(replace(self.like, q=q, k=k, v=v, bias=bias, alibi_slopes=slopes, sink=sink))
            if back.kept:
                self.back = back
        return back(*operands)

    def _begin(self, stream: int | None) -> tuple:
        """LSE, what the kernel takes after the tensors, and what runs first."""
        lse, seen, first = self.empty(*self.lse) if self.keeps else None, (), None
        if self.ahead is not None:
            *seen, first = self.ahead(stream)
        rest = self.workspace(), *seen, *self.rest
        if stream is None:
            hold(self.rest)
            return lse, rest, first
        return lse, tuple(short.as_operand(each, any(x.is_cuda for x in tensors_of(each))) for each in rest), first
