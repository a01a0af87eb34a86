"""What vLLM calls where latent heads (MLA) attend by tilewise (compat/vllm.py): single tokens and short chunks against the latent cache.

Written for vLLM 0.26: its base classes write the cache, make prompts' keys and compute these; here is what they leave to a backend. A layer's cache
is (blocks, block, kv_lora_rank + rope), of which the first kv_lora_rank columns are the values, too.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from vllm.model_executor.layers.attention.mla_attention import (  # pyright: ignore[reportMissingImports]
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf  # pyright: ignore[reportMissingImports]

from tilewise.compat.vllm_backend import BLOCK, SPLIT, uniform_queries
from tilewise.decoding import decode
from tilewise.errors import UnsupportedError

CACHES = "auto", "float16", "bfloat16"
SHORT = 512  # new tokens of a sequence that go against the latent cache in place of keys made of it, as vLLM has it for FlashAttention 3


class Backend(MLACommonBackend):
    """The answers that vLLM chooses a backend by."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHES)

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA"  # a member of vLLM's enumeration

    @staticmethod
    def get_impl_cls() -> type["Impl"]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type["Builder"]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK)]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return (capability.major, capability.minor) == (9, 0)


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    query_start_loc: Tensor  # (sequences + 1,) int32
    uniform: int  # queries of every sequence, 0 where they differ


class Builder(MLACommonMetadataBuilder):
    """From what vLLM knows of a batch to `DecodeMetadata`, within vLLM's own."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = SHORT

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, MLACommonMetadata)

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> DecodeMetadata:
        return DecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            uniform=uniform_queries(query_start_loc_cpu, num_decode_tokens),
        )


class Impl(MLACommonImpl):
    """Attention of one layer."""

    can_return_lse_for_decode = False  # so vLLM refuses decode context parallelism

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"tilewise serves decoder layers of MLA, not {attn_type}; choose another attention_backend")
        if kv_cache_dtype not in CACHES:
            raise UnsupportedError(
                f"tilewise reads latent caches of 16 bits ({', '.join(CACHES)}), not {kv_cache_dtype}; leave kv_cache_dtype out"
            )
        changed = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        if wrong := [name for name, x in changed.items() if x]:
            raise UnsupportedError(f"tilewise has no {', '.join(wrong)} with MLA in vLLM; choose another attention_backend")
        given = head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type
        super().__init__(num_heads, *given, kv_sharing_target_layer_name, **mla_args)
        self.supports_quant_query_input = False
        self.split = SPLIT if envs.VLLM_BATCH_INVARIANT else None

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens, heads, kv_lora_rank), and no LSE, of queries in absorbed form: (tokens, heads, kv_lora_rank + rope), or these two apart."""
        batch: DecodeMetadata = attn_metadata.decode
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        cache = kv_c_and_k_pe_cache.unsqueeze(2)
        values = cache[..., : self.kv_lora_rank]
        words = {"cache_seqlens": batch.seq_lens, "page_table": batch.block_table, "scale": self.scale, "split": self.split}
        if batch.uniform:
            each = queries.unflatten(0, (batch.seq_lens.shape[0], batch.uniform))
            return decode(each, cache, values, **words).flatten(0, 1), None
        return decode(queries, cache, values, cu_seqlens_q=batch.query_start_loc, **words), None
