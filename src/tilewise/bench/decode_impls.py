"""Contenders for decoding: tilewise.decode, the ladder's rungs, torch's SDPA, FlashAttention and FlashInfer where they are installed.

As in impls.py: `why_not` says in sentences what a contender lacks, `prepare` does once what its users do once (plans, metadata), and returns
`attend(copy) -> O` (batch, new, heads_q, head_dim) with one copy of the caches.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilewise.bench import gpu_impls
from tilewise.bench.decode_cells import Caches, Cell
from tilewise.bench.impls import installed
from tilewise.ladder import DECODE_RUNGS, DecodeRung

Attend = Callable[[int], Tensor]
CONTENDERS = "tilewise,sdpa:cudnn,sdpa:flash,fa2,fa3,fa3:vllm,fa4,flashinfer,flashinfer:xqa"
FLASHINFER_WORKSPACE = 256 << 20  # bytes, twice what its examples take


class DecodeImpl(Protocol):
    name: str

    def why_not(self, cell: Cell, device: torch.device) -> list[str]: ...

    def prepare(self, caches: Caches) -> Attend: ...


@dataclass(frozen=True)
class Tilewise:
    """`tilewise.decode`, with its own choice of backend or the one named."""

    backend: str | None = None

    @property
    def name(self) -> str:
        return "tilewise" if self.backend is None else f"tilewise:{self.backend}"

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        return []

    def prepare(self, caches: Caches) -> Attend:
        import tilewise

        options = {
            "cache_seqlens": caches.seqlens,
            "page_table": caches.table,
            "shared_prefix": caches.cell.prefix,
            "backend": self.backend,
        }
        return lambda copy: tilewise.decode(caches.q, *caches.copies[copy], **options)


@dataclass(frozen=True)
class OnLadder:
    """A rung of the ladder's branch for decoding: contiguous caches, one new token."""

    rung: DecodeRung

    @property
    def name(self) -> str:
        return self.rung.name

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        wrong = ["the ladder takes contiguous caches only"] if cell.page else []
        wrong += ["the ladder takes one new token only"] if cell.new > 1 else []
        return wrong + ([f"{self.name} runs on a Hopper GPU"] if device.type != "cuda" else [])

    def prepare(self, caches: Caches) -> Attend:
        q = caches.q.squeeze(1)
        return lambda copy: self.rung(q, *caches.copies[copy], caches.seqlens).unsqueeze(1)


@dataclass(frozen=True)
class Sdpa:
    """torch's SDPA, one of its kernels: contiguous caches that are full, and one new token, so that it needs no mask."""

    kernel: str  # "cudnn", "flash", "math"

    @property
    def name(self) -> str:
        return f"sdpa:{self.kernel}"

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        wrong = ["it takes contiguous caches only"] if cell.page else []
        wrong += ["it takes one new token only, as it has no causal mask at the bottom right"] if cell.new > 1 else []
        return wrong + ([f"torch has no {self.kernel} kernel on a CPU"] if device.type == "cpu" and self.kernel == "cudnn" else [])

    def prepare(self, caches: Caches) -> Attend:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        kernel = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}[self.kernel]
        grouped = caches.cell.heads_q != caches.cell.heads_k

        def attend(copy: int) -> Tensor:
            with sdpa_kernel([kernel]):
                q, k, v = (x.transpose(1, 2) for x in (caches.q, *caches.copies[copy]))
                return scaled_dot_product_attention(q, k, v, enable_gqa=grouped).transpose(1, 2)

        return attend


@dataclass(frozen=True)
class FlashAttention:
    """Dao-AILab's kernels. `pages`: a page is a multiple of so many tokens."""

    name: str
    module: str
    pages: int

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        wrong = [f"{self.name} runs on CUDA devices only"] if device.type != "cuda" else []
        wrong += [] if installed(self.module) else [f"{self.module} is not installed"]
        return wrong + ([f"it takes pages of multiples of {self.pages} tokens"] if cell.page % self.pages else [])

    def prepare(self, caches: Caches) -> Attend:
        return {"fa2": self._second, "fa3": self._third, "fa4": self._fourth}[self.name](importlib.import_module(self.module), caches)

    def _second(self, module, caches: Caches) -> Attend:
        given = {"cache_seqlens": caches.seqlens, "block_table": caches.table, "causal": True}
        return lambda copy: module.flash_attn_with_kvcache(caches.q, *caches.copies[copy], **given)

    def _third(self, module, caches: Caches) -> Attend:
        cell = caches.cell
        sizes = cell.batch, cell.new, _capacity(caches), cell.heads_q, cell.heads_k, cell.head_dim
        paged = {"page_size": cell.page} if cell.page else {}
        metadata = module.get_scheduler_metadata(*sizes, caches.seqlens, cell.dtype, causal=True, **paged)
        given = {"cache_seqlens": caches.seqlens, "page_table": caches.table, "causal": True, "scheduler_metadata": metadata}
        return lambda copy: module.flash_attn_with_kvcache(caches.q, *caches.copies[copy], **given)

    def _fourth(self, module, caches: Caches) -> Attend:
        given = {"seqused_k": caches.seqlens, "page_table": caches.table, "causal": True}

        def attend(copy: int) -> Tensor:
            result = module.flash_attn_varlen_func(caches.q, *caches.copies[copy], **given)
            return result[0] if isinstance(result, tuple) else result

        return attend


@dataclass(frozen=True)
class FlashAttention3OfVllm:
    """FlashAttention-3 from the library that vLLM ships (gpu_impls.py), with its scheduler's metadata made ahead."""

    name: str = "fa3:vllm"

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        return gpu_impls.without_library(self.name, device)

    def prepare(self, caches: Caches) -> Attend:
        operators, cell = gpu_impls.library(), caches.cell
        on = {"dtype": torch.int32, "device": caches.q.device}
        fixed = {
            "cu_seqlens_q": torch.arange(cell.batch + 1, **on) * cell.new,
            "seqused_k": caches.seqlens,
            "max_seqlen_q": cell.new,
            "max_seqlen_k": _capacity(caches),
            "page_table": caches.table,
            "batch_size": cell.batch,
            "num_heads": cell.heads_q,
            "num_heads_k": cell.heads_k,
            "headdim": cell.head_dim,
            "headdim_v": cell.head_dim,
            "qkv_dtype": cell.dtype,
            "page_size": cell.page or None,
            "max_seqlen_k_new": 0,
            "softmax_scale": cell.head_dim**-0.5,
            "is_causal": True,
            "window_size_left": -1,
            "window_size_right": -1,
            "attention_chunk": 0,
            "softcap": 0.0,
            "has_softcap": False,
            "is_rotary_interleaved": True,
            "num_splits": 0,
            "sm_margin": 0,
            "cp_world_size": 1,
            "cp_rank": 0,
        }
        ahead = operators.get_scheduler_metadata.default
        fixed["scheduler_metadata"] = ahead(*[gpu_impls.argument(each, fixed) for each in ahead._schema.arguments])
        operator = operators.fwd.default
        rest = [gpu_impls.argument(each, fixed) for each in operator._schema.arguments][3:]
        q = caches.q.flatten(0, 1)
        return lambda copy: operator(q, *caches.copies[copy], *rest)[0].view(caches.q.shape)


@dataclass(frozen=True)
class FlashInfer:
    """FlashInfer on pages: its decode for one new token, its prefill for more; planned once, as for all layers of a model."""

    name: str = "flashinfer"

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        wrong = [f"{self.name} runs on CUDA devices only"] if device.type != "cuda" else []
        wrong += [] if installed("flashinfer") else ["flashinfer is not installed"]
        return wrong + ([] if cell.page else ["it takes pages only"])

    def prepare(self, caches: Caches) -> Attend:
        module, cell, device = importlib.import_module("flashinfer"), caches.cell, caches.q.device
        assert caches.table is not None  # or why_not had said so
        used = [-(-length // cell.page) for length in cell.lengths]
        on = {"dtype": torch.int32, "device": device}
        starts = torch.tensor([0, *used], **on).cumsum(0, dtype=torch.int32)
        indices = torch.cat([caches.table[b, :n] for b, n in enumerate(used)])
        last = torch.tensor([length - (n - 1) * cell.page for length, n in zip(cell.lengths, used, strict=True)], **on)
        workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
        sizes, types = (cell.heads_q, cell.heads_k, cell.head_dim, cell.page), {"q_data_type": cell.dtype, "kv_data_type": cell.dtype}
        if cell.new == 1:
            tensor_cores = cell.heads_q // cell.heads_k >= 4  # as its documentation has it
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
            wrapper.plan(starts, indices, last, *sizes, **types)
        else:
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(torch.arange(cell.batch + 1, **on) * cell.new, starts, indices, last, *sizes, causal=True, **types)
        q = caches.q.flatten(0, 1)
        return lambda copy: wrapper.run(q, caches.copies[copy]).view(caches.q.shape)


@dataclass(frozen=True)
class Xqa:
    """FlashInfer's XQA kernels of TensorRT-LLM: pages, one new token."""

    name: str = "flashinfer:xqa"

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        return FlashInfer(self.name).why_not(cell, device) + (["it is called with one new token only"] if cell.new > 1 else [])

    def prepare(self, caches: Caches) -> Attend:
        function = importlib.import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
        workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=caches.q.device)
        places = workspace, caches.table, caches.seqlens, _capacity(caches)
        q, scale = caches.q.flatten(0, 1), caches.cell.head_dim**-0.5
        return lambda copy: function(q, caches.copies[copy], *places, bmm1_scale=scale, bmm2_scale=1.0, kv_layout="NHD").view(
            caches.q.shape
        )


def _capacity(caches: Caches) -> int:
    return caches.copies[0][0].shape[1] * (1 if caches.table is None else caches.table.shape[1])


def known() -> dict[str, DecodeImpl]:
    """Every contender by name, whether or not it can run here."""
    from tilewise.runtime.dispatch import backends

    everyone: list[DecodeImpl] = [
        Tilewise(),
        *(Tilewise(backend.name) for backend in backends()),
        *(OnLadder(rung) for rung in DECODE_RUNGS.values()),
        *(Sdpa(kernel) for kernel in ("cudnn", "flash", "math")),
        FlashAttention("fa2", "flash_attn", 256),
        FlashAttention("fa3", "flash_attn_interface", 1),
        FlashAttention3OfVllm(),
        FlashAttention("fa4", "flash_attn.cute", 1),
        FlashInfer(),
        Xqa(),
    ]
    return {impl.name: impl for impl in everyone}


def find(names: str = CONTENDERS) -> list[DecodeImpl]:
    """The contenders of a comma-separated list; ValueError for a name that `known` does not have."""
    everyone, wanted = known(), list(dict.fromkeys(name.strip() for name in names.split(",")))
    if missing := [name for name in wanted if name not in everyone]:
        raise ValueError(f"impl is {', '.join(map(repr, missing))}; for the set decode it must be among {', '.join(everyone)}")
    return [everyone[name] for name in wanted]
