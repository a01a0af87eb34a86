"""Caches as the copy engine takes them: pages where they lie, or not at all. A cache of one batch is copied, if need be."""

from torch import Tensor

from tilewise.errors import ShapeError
from tilewise.sm90 import jit


def readable(k_cache: Tensor, v_cache: Tensor, *, paged: bool) -> tuple[Tensor, Tensor]:
    """The caches, or copies where they are not paged; ShapeError for a pool of pages that would have to be copied whole in every call."""
    if paged:
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            _check(name, cache)
    return jit.aligned(k_cache), jit.aligned(v_cache)


def _check(name: str, cache: Tensor) -> None:
    if jit.in_place(cache):
        return
    found = f"strides {tuple(cache.stride())} for shape {tuple(cache.shape)}"
    if jit.strided(cache):
        found = f"an address {cache.data_ptr() % jit.BYTES} bytes behind a multiple of {jit.BYTES}"
    raise ShapeError(
        f"{name} has {found}, but with a page table it is read where it lies: its last dimension must be contiguous, and its address and other "
        f"strides multiples of {jit.BYTES} bytes; allocate the pool so, once, for a copy would be of all pages in every call"
    ) from None
