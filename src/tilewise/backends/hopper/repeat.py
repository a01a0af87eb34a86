"""A call whose kernel and arguments were found once, for more tensors of the same shapes, strides and dtype."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends.hopper.operands import Work
from tilewise.backends.tables.keeping import hold
from tilewise.errors import check_memory
from tilewise.problem import Call
from tilewise.sm90.jit import aligned, tensors_of

# torch.cuda's functions of these names, without the objects that they make; only a torch with CUDA has them.
current_device = getattr(torch._C, "_cuda_getDevice", None)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
DEFAULT_STREAM = 0  # which cannot be captured
KEPT_BYTES = 1 << 16  # a larger LSE that nobody asked for is allocated anew; its kernel takes longer than that


class Repeat:
    """Attention of q, k and v like those of `call`, which has no other tensors, on whichever stream is current; the tensors' device need not be.

    What a kernel writes beside O is kept, one a stream: launches of one stream follow each other. A CUDA graph may be replayed on any stream,
    so what it captures gets its own.
    """

    def __init__(self, call: Call, kernel: Callable, rest: Sequence, workspace: Callable[[], Work], gradients: Callable) -> None:
        """`kernel((q, k, v, o, lse), workspace(), *rest)` computes the call, on `aligned` operands; `gradients` is Hopper.backward."""
        batch, seqlen_q, heads_q, _ = call.q.shape
        self.kernel, self.rest, self.workspace = kernel, tuple(rest), workspace
        self.like, self.gradients = replace(call, q=None, k=None, v=None), gradients
        self.device = call.q.device.index
        shape, lse_shape = (batch, seqlen_q, heads_q, call.head_dim_v), (batch, heads_q, seqlen_q)
        self.empty = _allocator(call.q.device)
        self.o, self.lse = (shape, _strides(shape), call.q.dtype), (lse_shape, _strides(lse_shape), torch.float32)
        self.keeps = 4 * math.prod(lse_shape) <= KEPT_BYTES
        self.kept: dict[int, tuple[Tensor | None, tuple]] = {}  # by stream: LSE, and what the kernel takes after the tensors

    def forward(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor]:
        """O and LSE, which may be looked at only where it is wanted."""
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.forward(q, k, v, with_lse)
        if not (q.data_ptr() and k.data_ptr() and v.data_ptr()):
            check_memory(q=q, k=k, v=v)
        stream = current_stream(self.device)
        kept = self.kept.get(stream) if stream == DEFAULT_STREAM or not capturing() else None
        lse, rest = kept or self._begin()
        if with_lse or lse is None:
            lse = self.empty(*self.lse)
        o = self.empty(*self.o)
        try:
            self.kernel((q, k, v, o, lse), *rest)
        except ValueError:  # where one does not begin at a multiple of 16 bytes: the kernel's function looks, before it launches anything
            self.kernel((aligned(q), aligned(k), aligned(v), o, lse), *rest)
        return o, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV from what `forward` returned and a contiguous dO: the long way, which takes longer than Python."""
        return self.gradients(replace(self.like, q=q, k=k, v=v), o, lse, d_o, None)[:3]

    def _begin(self) -> tuple[Tensor | None, tuple]:
        """What a stream keeps, or a graph gets."""
        lse = self.empty(*self.lse) if self.keeps else None
        rest = self.workspace(), *self.rest
        if capturing():
            hold(self.rest)
            return lse, rest
        fresh = lse, tuple(map(as_operand, rest))
        self.kept[current_stream(self.device)] = fresh
        return fresh


def as_operand(bundle: tuple) -> object:
    """A bundle as the kernel's function takes it with least ado, for more than one call; it keeps its tensors' memory."""
    if not any(x.is_cuda for x in tensors_of(bundle)):
        return bundle
    import tvm_ffi

    def converted(x):
        if isinstance(x, tuple):
            return tuple(map(converted, x))
        return tvm_ffi.from_dlpack(x) if isinstance(x, Tensor) else x

    return tvm_ffi.convert(converted(bundle))


def _allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What makes a tensor of a shape, strides and dtype on the current device: for CUDA, 1 us faster than torch.empty, as compiled programs do it."""
    found = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    fast = getattr(found, f"_empty_strided_{device.type}", None)
    return fast or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
