"""What a CUDA graph can hold. A call that reads values on the host, such as a dense mask's, cannot be captured, and a graph would go on with the
values of its capture. So each operator has a twin, which torch.compile leaves out of its graphs (mode="reduce-overhead"; op.py).

Before torch.compile captures a call it runs it once, with all memory of the thread from the pool of its graphs, where nothing may stay that is no
output. But what is made at a first call (tables, counters, memory that a stream's launches share) stays. So that run is another thread's.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilewise import masks
from tilewise.errors import UnsupportedError
from tilewise.problem import Problem
from tilewise.runtime import cache_values
from tilewise.runtime.dispatch import choose


def _constant(function: Callable) -> Callable:
    """Traced calls take what it returns as it is then. `torch.compiler.assume_constant_result` imports torch's compiler, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def reads(given: Any) -> bool:
    """Whether a call of attention, by the operands of its operator, would read values on the host, of tensors that may be fake.

    Random numbers are drawn there, which a graph would repeat. Of masks, those need not be read that hold no tensor, or packed documents' ends alone.
    """
    q, mask = given.q, given.mask
    if not q.is_cuda:
        return False  # there are no such graphs
    if given.rng is not None or given.by_document or ("#" in mask and not mask.startswith("DeviceDocuments(")):
        return True
    fields = {name: getattr(given, name) for name in ("grad", "deterministic", "row_max", "precision", "out_dtype")}
    fields |= {"bias": given.bias is not None, "alibi": given.alibi_slopes is not None, "sink": given.sink is not None}
    if given.softcap > 0.0:  # which by itself may be a symbol, too
        fields["softcap"] = True
    return _backend_reads(q.device.index, given.backend, mask, **fields, **_heads(q, given.k, given.v))


def decode_reads(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mask: str,
    mask_tensors: list[Tensor],
    backend: str | None,
    check: bool,
    paged: bool = False,
) -> bool:
    """Likewise of decode."""
    if not q.is_cuda:
        return False
    if mask_tensors or checks(q, check):
        return True
    # A fake tensor's memory has no address. Caches that are apart have rows of lengths of their own.
    heads = _heads(q, k_cache, v_cache)
    in_keys = heads["head_dim_v"] < heads["head_dim"] and _plain(v_cache.stride(1)) == _plain(k_cache.stride(1))
    cache = _plain(k_cache.shape[1]) if paged else None, in_keys
    return _backend_reads(q.device.index, backend, mask, cache, **heads)


def _heads(q: Tensor, k: Tensor, v: Tensor) -> dict:
    """Fields of `Problem`."""
    dims = {"head_dim": _plain(q.shape[-1]), "head_dim_v": _plain(v.shape[-1])}
    return dims | {"dtype": q.dtype, "k_dtype": k.dtype, "v_dtype": v.dtype}


def _plain(size: int) -> int:
    """A number, of which the graph then is, where torch.compile may have a symbol."""
    return len(range(size))


def checks(x: Tensor, check: bool) -> bool:
    """Whether index tensors that come with x on a GPU are read, to be checked."""
    return x.is_cuda and (check or _always())


@_constant
def _always() -> bool:
    return cache_values.always()


@_constant
def _backend_reads(index: int | None, name: str | None, mask: str, cache: tuple[int | None, bool] | None = None, **fields) -> bool:
    """What the backend says that is chosen on GPU number `index`, or the current one. cache: of decode, page_size and in_keys."""
    seen = None if "#" in mask else masks.parse(mask, [])
    capability = torch.cuda.get_device_capability(index) if torch.cuda.is_available() else None
    problem = Problem(device="cuda", capability=capability, group=1, mask="runs" if seen is None else seen.kind, **fields)
    try:
        if cache is None:
            return choose(problem, name).reads(problem)
        assert seen is not None
        return choose(replace(problem, k_dtype=None, v_dtype=None), name, decodes=True).reads_decode(problem, seen, *cache)
    except (UnsupportedError, ValueError):
        return True  # the call says why, when it runs


def run_outside_pool(run: Callable[[tuple], tuple[Tensor | None, ...]], given: tuple) -> tuple:
    """`run(given)`, of operands that begin with a tensor, without gradients. Where torch.compile prepares a CUDA graph it is another thread's, and
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
