"""What calls like one before have in common on Hopper, forward and backward: where they run, and outputs that are allocated with little ado."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# torch.cuda's functions of these names, without the objects that they make; only a torch with CUDA has them.
current_device = getattr(torch._C, "_cuda_getDevice", None)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
# A part of a tensor's memory, of its dtype: (tensor, shape, strides, first), as compiled programs have it, in a quarter of the time of as_strided.
part = getattr(_guards, "_reinterpret_tensor", None) or (
    lambda x, shape, strides, first: x.as_strided(shape, strides, x.storage_offset() + first)
)
DEFAULT_STREAM = 0  # which cannot be captured
LEAST_UNREAD = 1 << 14  # numbers
REPEAT_BYTES = 256 << 10  # of a mask's tables: a repeated call keeps them, and calls with larger ones take long


def as_operand(bundle: tuple, on_gpu: bool) -> object:
    """A bundle as the kernel's function takes it with least ado, for more than one call; it keeps its tensors' memory."""
    if not on_gpu:
        return bundle
    import tvm_ffi

    def converted(x):
        if isinstance(x, tuple):
            return tuple(map(converted, x))
        return tvm_ffi.from_dlpack(x) if isinstance(x, Tensor) else x

    return tvm_ffi.convert(converted(bundle))


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What makes a tensor of a shape, strides and dtype on the current device: for CUDA, 1 us faster than torch.empty, as compiled programs do it."""
    fast = getattr(_guards, f"_empty_strided_{device.type}", None)
    return fast or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


_UNREAD: dict[tuple, Tensor] = {}


def unread(shape: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """fp32, contiguous, on the device, which is the current one: what launches on that stream write and nobody reads is all in one place.

    Not for a graph that is captured: it may run after the place was given back.
    """
    numbers = math.prod(shape)
    kept = _UNREAD.get((device, stream))
    if kept is None or kept.numel() < numbers:
        kept = _UNREAD[device, stream] = torch.empty(max(numbers, LEAST_UNREAD), dtype=torch.float32, device=device)
    return kept[:numbers].view(shape)


def tables(shapes: Sequence[tuple[int, ...]], device: torch.device, current: bool) -> Callable[[], list[Tensor]]:
    """What makes int32 tensors of these shapes on the device; `current`: which is the current one whenever they are made."""
    if not current:
        return lambda: [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]
    empty, layouts = allocator(device), [(shape, strides(shape), torch.int32) for shape in shapes]
    return lambda: [empty(*layout) for layout in layouts]


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
