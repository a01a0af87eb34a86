"""FlashInfer's kernels for decoding from pages."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.bench.peers.contender import no_latent, not_here
from tilewise.bench.sets import Caches, Cell

WORKSPACE = 256 << 20  # bytes, twice what its examples take


@dataclass(frozen=True)
class FlashInfer:
    """FlashInfer on pages: its decode for one new token, its prefill for more; planned once, as for all layers of a model."""

    name: str = "flashinfer"

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        return not_here(self.name, "flashinfer", device) + no_latent(cell) + ([] if cell.page else ["it takes pages only"])

    def prepare(self, caches: Caches) -> Callable[[int], Tensor]:
        module, cell, device = importlib.import_module("flashinfer"), caches.cell, caches.q.device
        assert caches.table is not None  # or why_not had said so
        used = [-(-length // cell.page) for length in cell.lengths]
        on = {"dtype": torch.int32, "device": device}
        starts = torch.tensor([0, *used], **on).cumsum(0, dtype=torch.int32)
        indices = torch.cat([caches.table[b, :n] for b, n in enumerate(used)])
        last = torch.tensor([length - (n - 1) * cell.page for length, n in zip(cell.lengths, used, strict=True)], **on)
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
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

    def prepare(self, caches: Caches) -> Callable[[int], Tensor]:
        function = importlib.import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=caches.q.device)
        places = workspace, caches.table, caches.seqlens, caches.capacity
        q, scale = caches.q.flatten(0, 1), caches.cell.head_dim**-0.5
        return lambda copy: function(q, caches.copies[copy], *places, bmm1_scale=scale, bmm2_scale=1.0, kv_layout="NHD").view(
            caches.q.shape
        )
