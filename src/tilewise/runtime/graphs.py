"""What a CUDA graph can hold. A call that reads values on the host, such as a dense mask's, cannot be captured, and a graph would go on with the
values of its capture. So each operator has a twin, which torch.compile leaves out of its graphs (mode="reduce-overhead"; op.py).

Before torch.compile captures a call it runs it once, with all memory of the thread from the pool of its graphs, where nothing may stay that is no
output. But what is made at a first call (tables, counters, memory that a stream's launches share) stays. So that run is another thread's.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from tilewise import masks
from tilewise.errors import EIGHT_BITS
from tilewise.runtime import cache_values
from tilewise.sm90 import jit, prebuilt

ROW = 16  # bytes, of which rows of 8 bits and of caches have to be multiples
LARGEST_HEAD = 256  # of the kernels
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def _constant(function: Callable) -> Callable:
    """Traced calls take what it returns as it is then. `torch.compiler.assume_constant_result` imports torch's compiler, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def reads(q: Tensor, v: Tensor, mask: str, mask_tensors: list[Tensor], backend: str | None, drawn: bool = False) -> bool:
    """Whether the call would read values on the host, of tensors that may be fake. drawn: whether it has random numbers, which a graph would repeat.

    Only kernels for Hopper read none; of masks, those read none that hold no tensor, or packed documents' ends alone.
    """
    if not q.is_cuda:
        return False  # there are no such graphs
    rows = q.shape[-1] % ROW == 0 and v.shape[-1] % ROW == 0 and v.dtype == torch.float8_e4m3fn
    served = q.dtype in SIXTEEN_BITS or (q.dtype in EIGHT_BITS and rows)
    kernel = served and max(q.shape[-1], v.shape[-1]) <= LARGEST_HEAD and backend in (None, "hopper") and is_hopper(q.device.index)
    return not kernel or drawn or bool(mask_tensors and not mask.startswith("Unread("))


def decode_reads(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: str, mask_tensors: list[Tensor], backend: str | None, check: bool
) -> bool:
    """Likewise of decode, whose kernel takes rows of whole multiples of 16 bytes and masks of one band: other sequences are cut on the host."""
    if reads(q, v_cache, mask, mask_tensors, backend):
        return True
    if not q.is_cuda:
        return False
    multiple = ROW // k_cache.dtype.itemsize
    unloaded = q.shape[-1] % multiple > 0 or v_cache.shape[-1] % multiple > 0
    return unloaded or checks(q, check) or not is_band(mask)


def checks(x: Tensor, check: bool) -> bool:
    """Whether index tensors beside x on a GPU are read, to be checked."""
    return x.is_cuda and (check or _always())


@_constant
def _always() -> bool:
    return cache_values.always()


@_constant
def is_band(mask: str) -> bool:
    """Whether a mask that holds no tensor is one band on the bottom right diagonal."""
    from tilewise.backends.hopper.decode.window import window_of

    return window_of(masks.parse(mask, [])) is not None


@_constant
def is_hopper(index: int | None) -> bool:
    """Whether GPU number `index`, or the current one, has kernels of its own, and they can be compiled or are there."""
    if not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability(index)
    return not jit.why_not_here(capability) or not (prebuilt.why_not() or prebuilt.why_no_gpu(capability))


def run_outside_pool(run: Callable[[tuple], tuple[Tensor | None, ...]], given: tuple) -> tuple:
    """`run(given)`, of operands whose first one is a tensor, without gradients. Where torch.compile prepares a CUDA graph it is another thread's, and
    the results are copied to where they belong.
    """
    device = given[0].device
    if not preparing(device):
        return run(given)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    infers = torch.is_inference_mode_enabled()

    def there() -> tuple[Tensor | None, ...]:
        with torch.inference_mode(infers), torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch.cuda.stream(stream):
            return run(given)

    return tuple(x if x is None else x.clone() for x in _thread().submit(there).result())


def preparing(device: torch.device) -> bool:
    """Whether the run may be one of which torch.compile then makes a CUDA graph."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if device.type != "cuda" or trees is None or torch.cuda.is_current_stream_capturing():
        return False
    managers = "tree_manager_containers"
    if not (hasattr(trees.local, managers) or torch._C._is_key_in_tls(managers)):  # a thread that makes no graphs
        return False
    manager = trees.get_manager(device.index, create_if_none_exists=False)
    return manager is not None and manager.in_warmup


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "tilewise")
