"""Appending seen from torch: what the kernel covers, and calls with their kernel and scalars found once."""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.triton import config as configs
from tilewise.backends.triton.bound import on, wide
from tilewise.backends.triton.decode import DTYPES, in_rows, ranks, strides, tables
from tilewise.backends.triton.kernels import append as kernels
from tilewise.backends.triton.launch import Kernel, launcher
from tilewise.backends.triton.tape import ALIGNED, Tapes
from tilewise.backends.triton.targets import Target, interpreted, of_device
from tilewise.errors import EIGHT_BITS
from tilewise.problem import AppendCall

ELEMENTS = 2048  # of a program, of keys and values each
EXACT = configs.Config(1, 1, 4, 1, fused=False)  # the bits of torch, which rounds products and sums one by one


def why_not(call: AppendCall) -> list[str]:
    """Sentences that say why the kernel does not cover calls like this one; empty where it does."""
    reasons = []
    both = (call.k, call.k_cache), (call.v, call.v_cache)
    if any(x.dtype not in (*DTYPES, *EIGHT_BITS) or x.dtype != y.dtype or x.itemsize != call.k.itemsize for x, y in both):
        reasons.append("it writes fp32, bf16, fp16 and 8 bits, k and v of one size, as they are")
    cos, sin = call.rotary_cos, call.rotary_sin
    if cos is not None and sin is not None and not {call.k.dtype, cos.dtype, sin.dtype} <= set(DTYPES):
        reasons.append(f"it rotates fp32, bf16 and fp16 by tables of these, not {call.k.dtype} by {cos.dtype}")
    if any(x is not None and 0 in x.shape for x in (call.k, call.v, call.k_cache, call.v_cache, call.rotary_cos)):
        reasons.append("there is nothing to write, nowhere to write it, or nothing in a rotary table")
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in (call.k_cache, call.v_cache)):
        reasons.append("it writes rows of caches that are contiguous")
    return reasons


def bind(call: AppendCall) -> "Appender | None":
    """As `Backend.bind_append`."""
    return None if why_not(call) else Appender(call)


class Appender:
    """Calls as `Backend.bind_append` has them, on whichever stream is current. target: a GPU other than the call's."""

    def __init__(self, call: AppendCall, target: Target | None = None) -> None:
        self._launchers: dict[bool, Callable] = {}
        self.tapes = Tapes()
        self.packed, self.device, self.target = call.cu_seqlens is not None, call.k.device, target or of_device(call.k.device)
        self.bits, (*tokens, heads, dim), dim_v = call.k.dtype in EIGHT_BITS, call.k.shape, call.v.shape[-1]
        batch, whole = call.cache_seqlens.shape[0], [configs.power(each) for each in (dim, dim_v)]
        at_once = min(1 << (heads - 1).bit_length(), max(ELEMENTS // max(whole), 1))
        blocks, page_size = -(-heads // at_once), call.k_cache.shape[1]
        self.programs = blocks * (tokens[0] if self.packed else batch * tokens[1])
        self.numbers = {
            "batch": batch, "new": 0 if self.packed else tokens[1], "heads": heads, "blocks": blocks, "steps": batch.bit_length() + 1,
            "capacity": page_size * (1 if call.page_table is None else call.page_table.shape[1]), "page_size": page_size,
            "entries": call.k_cache.shape[0],
        }  # fmt: skip
        turns = call.rotary_cos is not None
        constants = {
            "PACKED": self.packed, "PAGED": call.page_table is not None, "ENTRIES": call.cache_batch_idx is not None,
            "FIRSTS": turns and call.rotary_first is not None, "ROTARY": "" if not turns else "interleaved" if call.interleaved else "half",
            "HEADS": at_once, "DIM": whole[0], "COLUMNS": dim if dim != whole[0] else 0, "V_DIM": whole[1],
            "V_COLUMNS": dim_v if dim_v != whole[1] else 0, "EMULATED": interpreted(), **ranks(call.share),
        }  # fmt: skip
        self.constants = tuple(constants.items())
        typed = {"lengths": call.cache_seqlens, "starts": call.cu_seqlens, "firsts": call.rotary_first, "pages": call.page_table,
                 "entry_of": call.cache_batch_idx, "cos": call.rotary_cos, "sin": call.rotary_sin}  # fmt: skip
        stored = {name: torch.int8 if self.bits else x.dtype for name, x in (("k", call.k), ("v", call.v))}
        dtypes = {"q": torch.float32, **stored, "k_cache": stored["k"], "v_cache": stored["v"]}
        self.dtypes = tuple((dtypes | {name: x.dtype for name, x in typed.items() if x is not None}).items())

    def __call__(self, given: tuple, first: Tensor | None = None) -> Tensor | None:
        """Each sequence's tokens then."""
        k_cache, v_cache, k, v, lengths, pages, entry_of, starts, cos, sin = given
        caches, k, v = (k_cache, v_cache), in_rows(k), in_rows(v)
        if self.bits:
            k, v, k_cache, v_cache = (x.view(torch.int8) for x in (k, v, k_cache, v_cache))
        ends = torch.empty(self.numbers["batch"], dtype=torch.int32, device=self.device)
        operands: dict[str, Tensor | None] = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "ends": ends}
        for name, x in (("lengths", lengths), ("starts", starts), ("firsts", first), ("entry_of", entry_of)):
            operands[name] = None if x is None else x.contiguous()
        operands |= {name: None if x is None else in_rows(x) for name, x in (("pages", pages), ("cos", cos), ("sin", sin))}
        with on(self.device):
            self.tapes.run("append", operands, (), lambda: self._launch(operands))
        torch.autograd.graph.increment_version(caches)
        return ends

    def _launch(self, operands: dict) -> None:
        k, v, pages = operands["k"], operands["v"], operands["pages"]
        arguments = self.numbers | operands
        for name in ("k", "v"):
            arguments |= strides(name, operands[name][None] if self.packed else operands[name], "batch", "row", "head")
        for name in ("k_cache", "v_cache"):
            arguments |= strides(name, operands[name], "page", "row", "head")
        if pages is not None:
            arguments["pages_batch"] = pages.stride(0)
        if operands["cos"] is not None and operands["sin"] is not None:
            arguments |= tables(operands["cos"], operands["sin"])
        aligned = all(x.data_ptr() % ALIGNED == 0 and wide(x) for x in (k, v, operands["k_cache"], operands["v_cache"]))
        self._launcher(aligned)(self.programs, arguments)

    def _launcher(self, aligned: bool) -> Callable:
        if aligned not in self._launchers:
            self._launchers[aligned] = launcher(self.kernel(aligned), self.target)
        return self._launchers[aligned]

    def kernel(self, aligned: bool) -> Kernel:
        return Kernel(kernels.append, self.constants, self.dtypes, EXACT, aligned)
