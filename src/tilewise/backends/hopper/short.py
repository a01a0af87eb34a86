"""What calls like one before have in common on Hopper, forward and backward: where they run, and outputs that take little time to allocate."""

import math
from collections.abc import Callable, Sequence
from threading import get_ident

import torch
from torch import Tensor

from tilewise.views import allocator

# torch.cuda's functions of these names, without the objects that they make; only a torch with CUDA has them.
current_device = getattr(torch._C, "_cuda_getDevice", None)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
DEFAULT_STREAM = 0  # which cannot be captured
ALIGNED = 64  # elements: shared tensors begin at multiples of these
TABLE_BYTES = 256 << 10  # of the tables of a mask, which a bound call holds: calls with larger ones take long, and are not kept


def as_operand(bundle: tuple, on_gpu: bool) -> object:
    """A bundle as the kernel's function takes it in the least time, for more than one call; it keeps its tensors' memory."""
    if not on_gpu:
        return bundle
    import tvm_ffi

    def converted(x):
        if isinstance(x, tuple):
            return tuple(map(converted, x))
        return tvm_ffi.from_dlpack(x) if isinstance(x, Tensor) else x

    return tvm_ffi.convert(converted(bundle))


def by_stream(device: int | None, make: Callable[[int | None], object], keeps: bool = True) -> Callable[[], object]:
    """What `make(stream)` gave for this thread and the current stream of the device, which is the current one. Launches of one stream follow each
    other, but two threads may take turns within a call of several. A CUDA graph may be replayed on any stream, so what it captures gets its own from
    `make(None)`, as everybody does where nothing is kept.
    """
    kept = {}

    def found() -> object:
        stream = current_stream(device)
        if not keeps or (stream != DEFAULT_STREAM and capturing()):
            return make(None)
        owner = stream, get_ident()
        if owner not in kept:
            kept[owner] = make(stream)
        return kept[owner]

    return found


_SHARED: dict[tuple, Tensor] = {}


def shared(name: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, stream: int) -> list[Tensor]:
    """Contiguous tensors on the device, which is the current one, that all who ask by this name on this thread and stream have in common: for what a
    call leaves for its own next launch, or for nobody. Not for a graph that is captured: it may run when the memory was given back.
    """
    sizes = [-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in shapes]
    owner = name, device, stream, get_ident()
    kept = _SHARED.get(owner)
    if kept is None or kept.numel() < sum(sizes):
        kept = _SHARED[owner] = torch.empty(1 << (sum(sizes) - 1).bit_length(), dtype=dtype, device=device)
    parts = kept[: sum(sizes)].split(sizes)
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def tables(shapes: Sequence[tuple[int, ...]], device: torch.device, current: bool) -> Callable[[], list[Tensor]]:
    """What makes int32 tensors of these shapes on the device; `current`: which is the current one whenever they are made."""
    if not current:
        return lambda: [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]
    empty, layouts = allocator(device), [(shape, strides(shape), torch.int32) for shape in shapes]
    return lambda: [empty(*layout) for layout in layouts]


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod([max(size, 1) for size in shape[axis + 1 :]]) for axis in range(len(shape)))
