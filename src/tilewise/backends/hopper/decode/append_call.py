"""Appending on Hopper, seen from torch: what the kernel of append.py covers, and what it takes."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.backends.hopper import short
from tilewise.backends.hopper.decode.bound import kept
from tilewise.backends.hopper.decode.operands import New, Places, RotaryTables
from tilewise.backends.hopper.stand_ins import StandIns
from tilewise.problem import AppendCall
from tilewise.sm90 import jit, prebuilt

LAUNCH = "tilewise.backends.hopper.decode.append:launch"  # by name, so that a kernel from the cache needs no DSL
STORED = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
TABLES = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True, kw_only=True)
class Appending:
    """What a kernel is compiled for; of what a call may lack the dtype, or None."""

    dtype: torch.dtype  # int8 for all of 8 bits
    seqlens: torch.dtype = torch.int32
    pages: torch.dtype | None = None
    entries: torch.dtype | None = None
    cu_seqlens: torch.dtype | None = None
    rotary: torch.dtype | None = None
    first: torch.dtype | None = None
    interleaved: bool = False
    share: bool = False


def bound(call: AppendCall) -> "Appender | None":
    """What writes calls like this one; None where no kernel covers them."""
    return kept(_key(call), lambda: None if why_not(call) else Appender(call, jit.compiled(LAUNCH, arguments, config_of(call))))


def why_not(call: AppendCall) -> list[str]:
    """Sentences that say why the kernel does not cover calls like this one; empty where it does."""
    dims, size = (call.k.shape[-1], call.v.shape[-1]), call.k.itemsize
    wrong = []
    if any(x.dtype not in STORED or x.dtype != y.dtype or x.itemsize != size for x, y in ((call.k, call.k_cache), (call.v, call.v_cache))):
        wrong.append("it writes bf16, fp16 and 8 bits, k and v of one size, as they are")
    elif call.rotary_cos is not None and size == 1:
        wrong.append("it rotates nothing of 8 bits")
    if any(dim % (jit.BYTES // size) for dim in dims):
        wrong.append(f"it takes head_dim and head_dim_v that are multiples of {jit.BYTES // size}, not {dims[0]} and {dims[1]}")
    if call.rotary_cos is not None and (call.rotary_cos.dtype not in TABLES or call.rotary_cos.dtype != call.rotary_sin.dtype):
        wrong.append(f"it takes rotary tables of one dtype, bf16, fp16 or fp32, not {call.rotary_cos.dtype} and {call.rotary_sin.dtype}")
    if (
        0 in call.k_cache.shape
        or 0 in call.v_cache.shape
        or call.k.numel() == 0
        or (call.rotary_cos is not None and 0 in call.rotary_cos.shape)
    ):
        wrong.append("there is nothing to write, nowhere to write it, or nothing in a rotary table")
    if not wrong and jit.why_no_compiler() and not prebuilt.entry(LAUNCH, config_of(call), jit.arch()):
        wrong.append(prebuilt.why_no_kernel(LAUNCH, config_of(call)))
    return wrong


def config_of(call: AppendCall) -> Appending:
    def dtype(x: Tensor | None) -> torch.dtype | None:
        return None if x is None else x.dtype

    return Appending(
        dtype=call.k.dtype if call.k.itemsize > 1 else torch.int8,
        seqlens=call.cache_seqlens.dtype,
        pages=dtype(call.page_table),
        entries=dtype(call.cache_batch_idx),
        cu_seqlens=dtype(call.cu_seqlens),
        rotary=dtype(call.rotary_cos),
        first=dtype(call.rotary_first) if call.rotary_cos is not None else None,
        interleaved=call.interleaved and call.rotary_cos is not None,
        share=call.share is not None,
    )


def shipped(dtype: torch.dtype) -> list[jit.Kernel]:
    """For contiguous caches and pages, with and without rotary tables in fp32 and in the caches' dtype."""
    kinds = itertools.product((None, torch.int32), (None, torch.float32, dtype))
    return [jit.Kernel(LAUNCH, arguments, Appending(dtype=dtype, pages=pages, rotary=rotary)) for pages, rotary in kinds]


def arguments(config: Appending) -> list:
    """Stand-ins for the launch's operands."""
    made = StandIns(config)
    return [*map(made, (New, Places, RotaryTables if config.rotary else None))]


class Appender:
    """Calls as `Backend.bind_append` has them, on whichever stream is current."""

    def __init__(self, call: AppendCall, kernel: Callable) -> None:
        """kernel(New, Places, Turn or None) writes a call, packed tokens as one entry's."""
        self.kernel, self.device = kernel, call.k.device.index
        self.in_eight_bits, self.packed, self.share = call.k.itemsize == 1, call.cu_seqlens is not None, call.share
        ends, empty = ((call.cache_seqlens.shape[0],), (1,), torch.int32), short.allocator(call.k.device)
        self.ends = short.by_stream(self.device, lambda stream: empty(*ends))

    def __call__(self, given: tuple, first: Tensor | None = None) -> Tensor | None:
        """None where the caches do not lie as the kernel wants them."""
        if short.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(given, first)
        of_k, of_v, k, v, seqlens, pages, entries, cu_seqlens, cos, sin = given
        caches = of_k, of_v
        if self.in_eight_bits:
            of_k, of_v, k, v = (x.view(torch.int8) for x in (of_k, of_v, k, v))
        if self.packed:
            k, v = k.unsqueeze(0), v.unsqueeze(0)
        places = seqlens, pages, entries, cu_seqlens if self.packed else None, self.ends(), self.share
        turn = None if cos is None else (cos, sin, first)
        try:
            self.kernel((of_k, of_v, k, v), places, turn)
        except ValueError:  # where one is not laid out as the kernel wants it: its function looks, before it launches anything
            if not (jit.in_place(of_k) and jit.in_place(of_v)):
                return None  # they are written in place, so a copy will not do
            places = Places(*(x.contiguous() if isinstance(x, Tensor) else x for x in places))
            turn = None if turn is None else RotaryTables(*(x if x is None else x.contiguous() for x in turn))
            self.kernel(New(*map(jit.aligned, (of_k, of_v, k, v))), places, turn)
        torch.autograd.graph.increment_version(caches)
        return places[4]


def _key(call: AppendCall) -> tuple:
    """What a kernel depends on, and whether there is one."""
    k, v, cos = call.k, call.v, call.rotary_cos
    others = call.cache_seqlens, call.page_table, call.cache_batch_idx, call.cu_seqlens, cos, call.rotary_sin, call.rotary_first
    dtypes = tuple(None if x is None else x.dtype for x in (k, v, call.k_cache, call.v_cache, *others))
    empty = 0 in call.k_cache.shape or 0 in k.shape or 0 in v.shape or (cos is not None and 0 in cos.shape)
    return dtypes, k.device, k.shape[-1], v.shape[-1], call.cache_seqlens.shape, empty, call.interleaved, call.share
