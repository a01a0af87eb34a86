"""A call whose kernel and arguments were found once, for more tensors of the same shapes, strides and dtype."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tilewise.hopper.compile import aligned
from tilewise.problem import Call

# torch.cuda's functions of these names, without the objects that they make; only a torch with CUDA has them.
current_device = getattr(torch._C, "_cuda_getDevice", None)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
KEPT_BYTES = 1 << 16  # a larger LSE that nobody asked for is allocated anew; its kernel takes longer than that


class Repeat:
    """Attention of q, k and v like those of `call`, which has no other tensors, on whichever stream is current; the tensors' device need not be.

    What a kernel writes beside O is kept, one a stream: launches of one stream follow each other. A CUDA graph may be replayed on any stream,
    so what it captures gets its own.
    """

    def __init__(
        self, call: Call, kernel: Callable, rest: Sequence, workspace: Callable[[], tuple[Tensor, ...]], gradients: Callable
    ) -> None:
        """`kernel(q, k, v, o, lse, *workspace(), *rest)` computes the call, on `aligned` operands; `gradients` is Hopper.backward."""
        batch, seqlen_q, heads_q, _ = call.q.shape
        self.kernel, self.rest, self.workspace = kernel, tuple(rest), workspace
        self.like, self.gradients = replace(call, q=None, k=None, v=None), gradients
        self.device = call.q.device.index
        self.new_o = _maker((batch, seqlen_q, heads_q, call.head_dim_v), call.q)
        self.lse_like = torch.empty(1, dtype=torch.float32, device=call.q.device).expand(batch, heads_q, seqlen_q)
        self.keeps = self.lse_like.numel() * self.lse_like.itemsize <= KEPT_BYTES
        self.kept: dict[int, tuple[Tensor | None, tuple]] = {}  # LSE and what the kernel takes after it, by stream

    def forward(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor]:
        """O and LSE, which may be looked at only where it is wanted."""
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.forward(q, k, v, with_lse)
        kept = None if capturing() else self.kept.get(current_stream(self.device))
        lse, rest = self._begin() if kept is None else kept
        if with_lse or lse is None:
            lse = torch.empty_like(self.lse_like)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            q, k, v = aligned(q), aligned(k), aligned(v)
        o = self.new_o(q)
        self.kernel(q, k, v, o, lse, *rest)
        return o, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV from what `forward` returned and a contiguous dO: the long way, which takes longer than Python."""
        return self.gradients(replace(self.like, q=q, k=k, v=v), o, lse, d_o, None)[:3]

    def _begin(self) -> tuple[Tensor | None, tuple]:
        """What a stream keeps, or a graph gets."""
        fresh = torch.empty_like(self.lse_like) if self.keeps else None, (*self.workspace(), *self.rest)
        if not capturing():
            self.kept[current_stream(self.device)] = fresh
        return fresh


def _maker(shape: tuple[int, ...], like: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes a contiguous tensor of this shape from one that is strided as `like`."""
    if like.shape != shape:
        return lambda x: x.new_empty(shape)
    return torch.empty_like if like.is_contiguous() else partial(torch.empty_like, memory_format=torch.contiguous_format)
