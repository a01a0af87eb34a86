"""FlashAttention 2, 3 and 4 of Dao-AILab's packages, and FlashAttention-3 as vLLM builds it: attention, packed documents, e4m3, decode.

FlashAttention-3 takes a latent cache (MLA) in two parts, as its users do: the columns with a position as K, those that are V as V, and the part of Q
that meets the latter as `qv`.
"""

import importlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.bench.peers.contender import Eight, no_latent, not_here, quantised_ahead
from tilewise.bench.sets import Attend, Caches, Cell, Workload
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Full, SlidingWindow

LIBRARY = "TILEWISE_FA3_LIBRARY"  # the environment variable that names the file, `_vllm_fa3_C.abi3.so` of vLLM's wheel
SINK = "s_aux"  # of vLLM's operator, in the inputs' dtype
FIXED = {"attention_chunk": 0, "is_rotary_interleaved": True, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}  # of vLLM's operators


def _wrong(name: str, workload: Workload) -> list[str]:
    """Why no FlashAttention takes the workload."""
    wrong = [] if workload.dtype in (torch.float16, torch.bfloat16) else [f"{name} takes fp16 and bf16 only"]
    if _window(workload) is None and workload.documents is None:
        wrong.append("only full, causal and window masks and packed documents can be expressed in its arguments")
    return wrong


def _window(workload: Workload, unbounded: int | None = -1) -> tuple[bool, int | None, int | None] | None:
    """(causal, left, right) of masks that can be said so, with `unbounded` for a side without an end."""
    mask = workload.mask
    if mask in (Full(), Causal()):
        return mask == Causal(), unbounded, unbounded
    if isinstance(mask, SlidingWindow) and mask.align == "bottom_right" and mask.offset == 0:
        left, right = (unbounded if side is None else side for side in (mask.left, mask.right))
        return right == 0, left, right
    return None


def _first(result) -> Tensor:
    """O: some versions return the LSE with it."""
    return result[0] if isinstance(result, tuple) else result


@dataclass(frozen=True)
class FlashAttention:
    """Dao-AILab's kernels, where they are installed. `unbounded` is how this generation writes a window without an end.

    `has`: what it takes of `Workload.changes`, in both directions. FlashAttention-4 would also take a score_mod in its own DSL that reads a bias, and
    gives no gradient of it.
    """

    name: str
    module: str
    unbounded: int | None
    has: tuple[str, ...] = ("scale", "softcap")

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        return not_here(self.name, self.module, device) + _wrong(self.name, workload) + workload.lacking(*self.has)

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        module, packed = importlib.import_module(self.module), workload.documents
        given = {"softmax_scale": workload.scale, "softcap": workload.softcap or None}
        options: dict[str, object] = {name: value for name, value in given.items() if value is not None}
        if packed:
            *starts, options["causal"] = packed
            for side, cu_seqlens in zip("qk", starts, strict=True):
                options[f"cu_seqlens_{side}"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
                options[f"max_seqlen_{side}"] = _longest(cu_seqlens)
        else:
            said = _window(workload, self.unbounded)
            assert said is not None  # or why_not had said so
            options["causal"], *window = said
            if window != [self.unbounded] * 2:
                options["window_size"] = tuple(window)
        function = module.flash_attn_varlen_func if packed else module.flash_attn_func

        def attend(*qkv: Tensor, sink: Tensor | None = None, alibi_slopes: Tensor | None = None) -> Tensor:
            extras = {"learnable_sink": sink, "alibi_slopes": alibi_slopes}
            extras = {name: x for name, x in extras.items() if x is not None}
            if not packed:
                return _first(function(*qkv, **options, **extras))
            tokens = (x.flatten(0, 1) for x in qkv)  # autograd would fill zeros and copy for x[0], a third of a backward pass
            return _first(function(*tokens, **options, **extras))[None]

        return attend


def _longest(cu_seqlens) -> int:
    return max(end - start for start, end in itertools.pairwise(cu_seqlens))


@dataclass(frozen=True)
class FlashAttentionDecode:
    """Dao-AILab's kernels on caches. `pages`: a page is a multiple of this many tokens."""

    name: str
    module: str
    pages: int

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        pages = [f"it takes pages of multiples of {self.pages} tokens"] if cell.page % self.pages else []
        return not_here(self.name, self.module, device) + pages + ([] if self.name == "fa3" else no_latent(cell))

    def prepare(self, caches: Caches) -> Callable[[int], Tensor]:
        function, options = getattr(self, f"_{self.name}")(importlib.import_module(self.module), caches)
        q, copies, latent = _in_parts(caches)
        return lambda copy: _first(function(q, *copies[copy], causal=True, **latent, **options))

    def _fa2(self, module, caches: Caches) -> tuple[Callable, dict]:
        return module.flash_attn_with_kvcache, {"cache_seqlens": caches.seqlens, "block_table": caches.table}

    def _fa3(self, module, caches: Caches) -> tuple[Callable, dict]:
        cell = caches.cell
        head_dim, head_dim_v = _widths(cell)
        sizes = cell.batch, cell.new, caches.capacity, cell.heads_q, cell.heads_k, head_dim
        options = {"page_size": cell.page} if cell.page else {}
        options |= {"headdim_v": head_dim_v} if cell.latent else {}
        metadata = module.get_scheduler_metadata(*sizes, caches.seqlens, cell.dtype, causal=True, **options)
        given = {"cache_seqlens": caches.seqlens, "page_table": caches.table, "scheduler_metadata": metadata}
        return module.flash_attn_with_kvcache, given

    def _fa4(self, module, caches: Caches) -> tuple[Callable, dict]:
        return module.flash_attn_varlen_func, {"seqused_k": caches.seqlens, "page_table": caches.table}


def _widths(cell: Cell) -> tuple[int, int]:
    """Of K and V, as FlashAttention-3 is told them."""
    return (cell.head_dim - cell.head_dim_v, cell.head_dim_v) if cell.head_dim_v is not None else (cell.head_dim, cell.head_dim)


def _in_parts(caches: Caches) -> tuple[Tensor, list[tuple[Tensor, Tensor]], dict[str, Any]]:
    """Q, K and V of every copy, and what else FlashAttention-3 is told of a latent cache."""
    cell, q = caches.cell, caches.q
    if cell.head_dim_v is None:
        return q, caches.copies, {}
    parts = [(k[..., cell.head_dim_v :], v) for k, v in caches.copies]
    q, qv = (x.contiguous() for x in (q[..., cell.head_dim_v :], q[..., : cell.head_dim_v]))
    return q, parts, {"qv": qv, "softmax_scale": cell.head_dim**-0.5}


@dataclass(frozen=True)
class VllmFlashAttention3:
    """FlashAttention-3's forward from the library that vLLM ships, for machines without Dao-AILab's own package.

    The environment variable LIBRARY names it. It takes packed sequences only; `in_eight_bits`: on e4m3 tensors.
    """

    name: str = "fa3:vllm"
    in_eight_bits: bool = False

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        backward = [f"{self.name} has no backward"] if workload.grad else []
        reasons = without_library(self.name, device) + _wrong(self.name, workload) + backward
        return reasons + workload.lacking("scale", "softcap", "sink")

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        attend, group = packed(library().fwd.default, workload, device), workload.heads_q // workload.heads_k

        def of_heads_k(x: Eight) -> dict[str, Tensor]:
            return {"q_descale": x.scales[0][:, ::group], "k_descale": x.scales[1], "v_descale": x.scales[2]}

        return quantised_ahead(lambda x: attend(x.q, x.k, x.v, **of_heads_k(x)), per="tensor") if self.in_eight_bits else attend


@dataclass(frozen=True)
class VllmFlashAttention3Decode:
    """The same library on caches, with its scheduler's metadata made ahead."""

    name: str = "fa3:vllm"

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        return without_library(self.name, device)

    def prepare(self, caches: Caches) -> Callable[[int], Tensor]:
        operators, cell = library(), caches.cell
        q, copies, latent = _in_parts(caches)
        head_dim, head_dim_v = _widths(cell)
        on = {"dtype": torch.int32, "device": caches.q.device}
        fixed = {
            "cu_seqlens_q": torch.arange(cell.batch + 1, **on) * cell.new,
            "seqused_k": caches.seqlens,
            "max_seqlen_q": cell.new,
            "max_seqlen_k": caches.capacity,
            "page_table": caches.table,
            "batch_size": cell.batch,
            "num_heads": cell.heads_q,
            "num_heads_k": cell.heads_k,
            "headdim": head_dim,
            "headdim_v": head_dim_v,
            "qkv_dtype": cell.dtype,
            "page_size": cell.page or None,
            "max_seqlen_k_new": 0,
            "softmax_scale": cell.head_dim**-0.5,
            "is_causal": True,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "has_softcap": False,
            "num_splits": 0,
        }
        ahead, operator = operators.get_scheduler_metadata.default, operators.fwd.default
        fixed["scheduler_metadata"] = ahead(*_arguments(ahead, fixed))
        if latent:
            fixed[_name_of_qv(operator)] = latent["qv"].flatten(0, 1)
        rest, q = _arguments(operator, fixed)[3:], q.flatten(0, 1)
        return lambda copy: operator(q, *copies[copy], *rest)[0].view(*caches.q.shape[:3], head_dim_v)


def _name_of_qv(operator) -> str:
    """Dao-AILab says qv, vLLM q_v."""
    found = [each.name for each in operator._schema.arguments if each.name in ("qv", "q_v")]
    if not found:
        raise UnsupportedError("this build of FlashAttention-3 takes no latent cache: its operator has no qv")
    return found[0]


def without_library(name: str, device: torch.device) -> list[str]:
    """Sentences that say why vLLM's library cannot run there."""
    reasons = [f"{name} runs on CUDA devices only"] if device.type != "cuda" else []
    if not Path(os.environ.get(LIBRARY) or "/nowhere/at/all").is_file():
        reasons.append(f"the environment variable {LIBRARY} does not name the library of vLLM's wheel, _vllm_fa3_C.abi3.so")
    return reasons


def library():
    """The namespace of its operators."""
    _load(os.environ[LIBRARY])
    return torch.ops._vllm_fa3_C


@cache
def _load(path: str) -> None:
    torch.ops.load_library(path)


def packed(operator, workload: Workload, device: torch.device) -> Attend:
    """`operator`, a forward on packed sequences with FlashAttention-3's names of arguments, as a contender on batches."""
    if workload.documents:
        *starts, is_causal = workload.documents
        left = right = -1
    else:
        starts = [range(0, (workload.batch + 1) * seqlen, seqlen) for seqlen in (workload.seqlen_q, workload.seqlen_k)]
        window = _window(workload)
        assert window is not None  # or why_not had said so
        is_causal, left, right = window
    cu_seqlens = [torch.tensor(list(each), dtype=torch.int32, device=device) for each in starts]
    fixed = {
        "cu_seqlens_q": cu_seqlens[0],
        "cu_seqlens_k": cu_seqlens[1],
        "max_seqlen_q": _longest(starts[0]),
        "max_seqlen_k": _longest(starts[1]),
        "softmax_scale": workload.softmax_scale,
        "is_causal": is_causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": workload.softcap,
        "num_splits": 1,
    }
    names = [each.name for each in operator._schema.arguments]
    if workload.sink and SINK not in names:
        raise UnsupportedError(f"this build of FlashAttention-3 has no sink: its operator takes no {SINK}")
    arguments = _arguments(operator, fixed)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **descales: Tensor) -> Tensor:
        tokens, given = (x.flatten(0, 1) for x in (q, k, v)), list(arguments)
        for name, x in descales.items() if sink is None else (*descales.items(), (SINK, sink)):
            given[names.index(name)] = x
        return operator(*tokens, *given[3:])[0].unflatten(0, (workload.batch, workload.seqlen_q))

    return attend


def _arguments(operator, fixed: dict[str, object]) -> list[object]:
    """What to pass for each argument of the operator's schema: versions differ in which they have."""
    return [_argument(each, FIXED | fixed) for each in operator._schema.arguments]


def _argument(wanted, fixed: dict[str, object]) -> object:
    if wanted.name in fixed:
        return fixed[wanted.name]
    if wanted.has_default_value():
        return wanted.default_value
    if wanted.name in ("q", "k", "v") or str(wanted.type).startswith("Optional"):
        return None
    raise UnsupportedError(f"this build of FlashAttention-3 wants {wanted.name} ({wanted.type}), which is not known here")
