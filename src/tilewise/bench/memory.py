"""Peak extra memory of one call: how far above the level before it the process (or the GPU's allocator) climbs while it runs.

On a GPU, torch's caching allocator counts exactly. On Linux the kernel keeps the resident set's high-water mark (VmHWM), which writing 5 to
/proc/self/clear_refs resets; so the mark after the call, less the resident set before it, is the peak, native buffers included.
Nowhere else is there a peak that can be reset, and the answer is None: a number that is not one.
"""

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Setting a threshold stops glibc adapting it, so what is put back is where it ends up by itself once a program has freed large blocks.
_SETTLED_MMAP, _SETTLED_TRIM = 32 << 20, 64 << 20
_MEASURING_MMAP = 64 << 10

_one_at_a_time = threading.Lock()


def peak_extra_bytes(fn: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, int | None]:
    """Run `fn()` once; its result, and the peak of memory beyond what was in use before, in bytes (None where it cannot be measured).

    The result counts: it is alive at the peak. Call `fn` once beforehand, so that what a first call loads and caches does not count.
    On a CPU the figure is the whole process's, in pages actually touched, good to about 1 MB: no other thread may be busy.
    """
    device = torch.device(device)
    with _one_at_a_time:
        if device.type == "cuda":
            return _peak_cuda(fn, device)
        if device.type == "cpu":
            return _peak_resident(fn)
    return fn(), None


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Memory that new tensors could take now: the GPU's free memory, or Linux's estimate for this machine; None elsewhere."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return _kilobytes(_MEMINFO, "MemAvailable")
    except OSError:
        return None


def _peak_cuda(fn: Callable[[], T], device: torch.device) -> tuple[T, int]:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def _peak_resident(fn: Callable[[], T]) -> tuple[T, int | None]:
    with _large_blocks_mapped():
        gc.collect()
        _trim_heap()
        if not _reset_peak():
            return fn(), None
        before = _kilobytes(_STATUS, "VmRSS")
        result = fn()
        return result, max(0, _kilobytes(_STATUS, "VmHWM") - before)


def _reset_peak() -> bool:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _kilobytes(file: Path, field: str) -> int:
    """The field of a /proc file with lines `name: number kB`, in bytes."""
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{file} has no {field} line")


@contextlib.contextmanager
def _large_blocks_mapped() -> Iterator[None]:
    """Have malloc map every large block by itself, so that freeing one returns it to the system at once and the next use counts again."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _MEASURING_MMAP)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _SETTLED_MMAP)
        mallopt(_M_TRIM_THRESHOLD, _SETTLED_TRIM)


def _trim_heap() -> None:
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no handle for "the running program"
        return None
