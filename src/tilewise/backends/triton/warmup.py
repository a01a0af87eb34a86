"""Kernels compiled ahead of time into Triton's cache, for a GPU that need not be here: `tilewise warmup --backend triton`."""

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import torch

from tilewise.backends.triton.append import Appender
from tilewise.backends.triton.bound import BY_NUMBERS, Bound, finding
from tilewise.backends.triton.config import MOST_DIM, decodes
from tilewise.backends.triton.decode import Decoder, Shares
from tilewise.backends.triton.eight_bits import Quantiser
from tilewise.backends.triton.kernels import bias as bias_kernels
from tilewise.backends.triton.launch import Kernel, compiled
from tilewise.backends.triton.targets import Target
from tilewise.masks import Causal, Full
from tilewise.problem import AppendCall, Call, DecodeCall, Dropout

HEADS_K = 8  # of a cache to which `append` writes; the other kernels are for any number
PAGES = None, 16, 256  # tokens: the cache is one piece, a tile's keys are of several pages, or of one
QUERIES = 1, 2, 16  # of a sequence: one, a few, and a prompt in pieces
BATCHES = 1, 2  # sequences: the second stands for up to 128, whose keys programs share out by lengths
CAPACITIES = 256, 1 << 14  # tokens, of which several programs share the second
ABSENT = dict.fromkeys(("cu_seqlens_q", "cache_batch_idx", "leftpad", "tree", "split")) | {
    "shared_prefix": 0,
    "mask": Causal(),
    "scale": 1.0,
}
EXTRAS = "softcap", "bias", "alibi", "sink", "dropout"  # what changes scores and probabilities; a bias and a sink are of the call's dtype
BIASES = (False, True, True), (True, True, True)  # whether it differs by batch entry, head and query


class Cell(NamedTuple):
    """What the kernels of a call depend on; lengths are none of it."""

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    mask: str  # `bound.kind_of`
    extras: tuple[str, ...] = ()  # of EXTRAS
    grad: bool = False
    precision: str | None = None  # the recipe in 8 bits; without grad, since gradients are those of 16 bits
    group: int = 1  # query heads of a key head


class Outcome(NamedTuple):
    """What became of one kernel; `reason` says why it failed."""

    kernel: Kernel
    seconds: float
    reason: str = ""


def kernels(cell: Cell, target: Target) -> list[Kernel]:
    """Those that calls of that kind, and of decode, launch there, for tensors that lie at multiples of 16 bytes."""
    return of_attention(cell, target) + of_decode(cell, target)


def of_attention(cell: Cell, target: Target) -> list[Kernel]:
    if max(cell.head_dim, cell.head_dim_v) > 2 * MOST_DIM:
        return []
    bound, found = _bound(cell, target), []
    wide = [{}, bound.biased][: 2 if bound.biased else 1]  # a bias with rows of any length, and of multiples of 16
    for bound.biased in wide:
        found += [kernel for purpose in ("forward", "dkdv", "dq")[: 3 if cell.grad else 1] for kernel in bound.kernels(purpose, cell.mask)]
    if isinstance(bound.quantiser, Quantiser):
        for unread in (False, True)[: 2 if cell.mask == "varlen" else 1]:
            bound.quantiser.unread = unread
            found += bound.quantiser.kernels()
    if cell.mask == "varlen":
        found += [finding(by_keys) for by_keys in (False, True)[: 2 if cell.grad else 1]]
    if cell.grad:
        found += [bound.preparing(d_lse) for d_lse in (False, True)]
    if cell.grad and "bias" in cell.extras:
        for each, biased in itertools.product(BIASES, wide):
            by: dict[str, object] = dict(zip(("EACH_BATCH", "EACH_HEAD", "EACH_ROW"), each, strict=True))
            found.append(bound.kernel(bias_kernels.dbias, bound.config_of("dq", cell.mask), cell.mask, True, by | biased))
    return list(dict.fromkeys(found))


def of_decode(cell: Cell, target: Target) -> list[Kernel]:
    """Of decode and append: contiguous caches and pages in the cell's dtype, up to 128 sequences, of each one new token or several, index tensors of
    int32. None where decode does not cover the kind.
    """
    dtype, heads, dims = cell.dtype, cell.group, (cell.head_dim, cell.head_dim_v)
    if cell.mask not in BY_NUMBERS or cell.precision is not None or {"bias", "dropout"} & set(cell.extras) or not decodes(dtype, *dims):
        return []

    def anywhere(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(1, dtype=dtype, device="cpu").expand(shape)

    changes: dict = {"softcap": 1.0, "alibi_slopes": anywhere(1, heads, dtype=torch.float32), "sink": anywhere(heads, dtype=torch.float32)}
    changes = {name: x for name, x in changes.items() if name.removesuffix("_slopes") in cell.extras}
    found = []
    for batch, page, capacity in itertools.product(BATCHES, PAGES, CAPACITIES):
        lengths = anywhere(batch, dtype=torch.int32)
        places = (batch, capacity) if page is None else (capacity // page, page)
        table = None if page is None else anywhere(batch, places[0], dtype=torch.int32)
        for queries in QUERIES:
            k_cache = anywhere(*places, 1, dims[0])
            v_cache = k_cache[..., : dims[1]] if dims[0] > dims[1] else anywhere(*places, 1, dims[1])
            given = {"q": anywhere(batch, queries, heads, dims[0]), "k_cache": k_cache, "v_cache": v_cache, "page_table": table}
            call = DecodeCall(seqlens=lengths, max_seqlen_q=queries, **given, **ABSENT, **changes)
            decoder = Decoder(call, Shares(call, target=target))
            found += [decoder.kernel(True, latent) for latent in (False, decoder.latent)]
            found += [decoder.merge()] if decoder.split else []
        k_cache, v_cache, k, v = (anywhere(*where, HEADS_K, dim) for where in (places, (batch, 1)) for dim in dims)
        new = AppendCall(
            k_cache=k_cache, v_cache=v_cache, k=k, v=v, cache_seqlens=lengths, page_table=table, cache_batch_idx=None,
            cu_seqlens=None, rotary_cos=None, rotary_sin=None, rotary_first=None, interleaved=False,
        )  # fmt: skip
        found.append(Appender(new, target).kernel(True))
    return list(dict.fromkeys(found))


def warm(cells: Iterable[Cell], target: Target, processes: int | None = None) -> Iterator[Outcome]:
    """Compile what is not in Triton's cache, up to `processes` at once (default: one a core); each outcome as it comes."""
    places: dict[Kernel, tuple[Cell, int]] = {}
    for cell in cells:
        for i, kernel in enumerate(kernels(cell, target)):
            places.setdefault(kernel, (cell, i))
    if not places:
        return
    workers = min(processes or os.cpu_count() or 1, len(places))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            asked = {pool.submit(_compile, *place, target): kernel for kernel, place in places.items()}
            for future in as_completed(asked):
                yield Outcome(asked[future], *future.result())
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(cell: Cell, place: int, target: Target) -> tuple[float, str]:
    """Seconds, and why it failed; in a process of its own, to which kernels cannot be sent."""
    start = time.perf_counter()
    try:
        compiled(kernels(cell, target)[place], target)
    except Exception as error:  # of the compiler, which has many; said in the table
        return time.perf_counter() - start, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return time.perf_counter() - start, ""


def _bound(cell: Cell, target: Target) -> Bound:
    """A bound call of that kind, for the target, on CPU tensors that hold nothing."""
    one = torch.empty(1, 1, 16, 16, dtype=cell.dtype, device="cpu")
    q, k, v = (
        torch.empty(1, 16, heads, dim, dtype=cell.dtype, device="cpu")
        for heads, dim in ((cell.group, cell.head_dim), (1, cell.head_dim), (1, cell.head_dim_v))
    )
    call = Call(
        q=q,
        k=k,
        v=v,
        mask=Full(),
        scale=1.0,
        softcap=1.0 if "softcap" in cell.extras else 0.0,
        bias=one.expand(1, cell.group, 16, 16) if "bias" in cell.extras else None,
        alibi_slopes=torch.empty(1, cell.group, dtype=torch.float32, device="cpu") if "alibi" in cell.extras else None,
        sink=torch.empty(cell.group, dtype=cell.dtype, device="cpu") if "sink" in cell.extras else None,
        dropout=Dropout(0.5, 0, 0) if "dropout" in cell.extras else None,
        grad=cell.grad,
        precision=cell.precision,
    )
    return Bound(call, target=target)
