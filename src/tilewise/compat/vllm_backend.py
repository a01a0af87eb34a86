"""What vLLM calls where it attends by tilewise (compat/vllm.py): the backend's answers, what a batch is, and one layer's attention.

Written for vLLM 0.26. A layer's cache is one tensor (blocks, heads_k, block, 2 * head_dim), keys and values side by side, in the order of memory that
vLLM chooses (NHD or HND), of 8 bits as bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
from vllm.v1.attention.backend import (  # pyright: ignore[reportMissingImports]
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import get_kv_cache_layout  # pyright: ignore[reportMissingImports]

from tilewise.compat.vllm_chunks import Chunks
from tilewise.decoding import append, decode
from tilewise.errors import UnsupportedError
from tilewise.masks import Mask, SlidingWindow
from tilewise.varlen import attention_varlen

BLOCK = 16  # tokens, of which a block has a multiple
PREFERRED = 64  # tokens of a block on a GPU
WIDEST = 256
E4M3 = "fp8", "fp8_e4m3"
CACHES = "auto", "float16", "bfloat16", *E4M3
MEMORY = {  # the order of dimensions in memory, without and with a dimension of layers in front
    "NHD": ((0, 2, 1, 3), (1, 0, 3, 2, 4)),
    "HND": ((0, 1, 2, 3), (1, 2, 0, 3, 4)),
}
SPLIT = 256  # keys of a piece, where a sequence's bits are to be its own


def why_not(head_size: int, dtype: torch.dtype | None, cache_dtype: str | None, attn_type: str = AttentionType.DECODER) -> str | None:
    """A sentence where tilewise does not serve such layers; dtype None is not known yet."""
    if head_size % 8 or head_size > WIDEST:
        return f"tilewise takes head sizes that are multiples of 8, up to {WIDEST}, not {head_size}"
    if attn_type != AttentionType.DECODER:
        return f"tilewise serves decoder layers here, not {attn_type}; their own backends do"
    if cache_dtype is not None and cache_dtype not in CACHES:
        return f"tilewise reads caches of 16 bits and of e4m3 with a scale a layer ({', '.join(CACHES)}), not {cache_dtype}"
    if cache_dtype in E4M3 and head_size % 16 and not current_platform.is_cpu():
        return f"tilewise reads caches of e4m3 in pieces of 16 bytes, which a head size of {head_size} is no multiple of; leave kv_cache_dtype out"
    if dtype == torch.float32 and not current_platform.is_cpu():
        return "tilewise serves float32 on CPUs alone; load the model in bfloat16 or float16"
    return None


class Backend(AttentionBackend):
    """The answers that vLLM chooses a backend by."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"  # a member of vLLM's enumeration

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
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Where nobody has asked for a size. The copy engine fetches as many tokens at a time as lie in a block."""
        return default_block_size if current_platform.is_cpu() else max(default_block_size, PREFERRED)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return MEMORY[get_kv_cache_layout()][include_num_layers_dimension]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, *others, device_capability=None, **more) -> str | None:
        capability = device_capability or (others[-1] if others else None)
        if capability is not None and (capability.major, capability.minor) != (9, 0):
            return f"tilewise decodes on GPUs of compute capability 9.0 (H100, H200), not {capability.major}.{capability.minor}"
        return why_not(head_size, dtype, kv_cache_dtype)


@dataclass
class Metadata:
    """A batch, as every layer of a kind sees it; tensors are vLLM's own, which graphs that were captured go on reading."""

    num_actual_tokens: int
    query_start_loc: Tensor  # (sequences + 1,) int32
    seq_lens: Tensor  # (sequences,) int32, with the new tokens; 0 for those that are padding
    block_table: Tensor  # (sequences, blocks) int32
    slot_mapping: Tensor  # (tokens,) int64, -1 for padding
    uniform: int  # queries of every sequence, 0 where they differ
    shared_prefix: int
    interleave: int  # tokens of a sequence in a row that one rank holds, where ranks share caches
    chunks: Chunks | None = None


def uniform_queries(starts: Tensor, tokens: int) -> int:
    """The queries of every sequence, 0 where they differ. starts: (sequences + 1,), on the CPU; tokens may be padded, and be as many by chance."""
    lengths = starts.diff()
    most = int(lengths.max()) if lengths.numel() else 0
    return most if lengths.numel() * most == tokens and bool((lengths == most).all()) else 0


class Builder(AttentionMetadataBuilder):
    """From what vLLM knows of a batch to `Metadata`."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(vllm_config.model_config, "rswa_window", None) is not None:
            raise UnsupportedError("tilewise has no reference sliding windows (R-SWA) in vLLM; choose another attention_backend")
        self.interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError("tilewise serves causal layers in vLLM; choose another attention_backend for this model")
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            uniform=uniform_queries(common.query_start_loc_cpu, common.num_actual_tokens),
            shared_prefix=common_prefix_len,
            interleave=self.interleave,
            chunks=None if current_platform.is_cpu() else Chunks.of(common),
        )

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        chunks = metadata.chunks and replace(metadata.chunks, block_table=blk_table, _places=None)
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping, chunks=chunks)


class Impl(AttentionImpl):
    """Attention of one layer. Where ranks share caches (decode context parallelism), vLLM sets `dcp_world_size` and `dcp_rank`."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True
    supports_quant_query_input = False
    dcp_world_size, dcp_rank = 1, 0

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        if sentence := why_not(head_size, None, kv_cache_dtype, attn_type):  # on CPUs vLLM asks no backend
            raise UnsupportedError(sentence)
        if wrong := [name for name, x in others.items() if not (x is None or x is False or (isinstance(x, int) and x == -1))]:
            raise UnsupportedError(f"tilewise does not know {', '.join(wrong)} of this layer; choose another attention_backend")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type, self.kv_sharing_target_layer_name = kv_cache_dtype, attn_type, kv_sharing_target_layer_name
        mask: Mask | None = None if sliding_window is None else SlidingWindow(sliding_window - 1, 0)
        self.options: dict[str, Any] = {"mask": mask, "scale": self.scale, "softcap": float(logits_soft_cap or 0.0)}
        self.options["split"] = SPLIT if envs.VLLM_BATCH_INVARIANT else None
        self.sinks, self.alibi_slopes = (
            sinks,
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu"),
        )
        self._of: Tensor | None = None  # the cache that these are views of
        self._caches: tuple[Tensor, Tensor] | None = None
        self._ready = False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write `output` (tokens, heads, head_dim) of `query`, the newest tokens of the batch's sequences; their keys are in the cache already."""
        if attn_metadata is None:  # vLLM measures how much memory the rest takes
            return output.fill_(0)
        batch, tokens = attn_metadata, attn_metadata.num_actual_tokens
        if not self._ready:
            self._place(query.device)
        k_cache, v_cache = self._views(kv_cache)
        words = {"cache_seqlens": batch.seq_lens, "page_table": batch.block_table, "shared_prefix": batch.shared_prefix, **self.options}
        if self.kv_cache_dtype in E4M3:
            words |= {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        q, out = query[:tokens], output[:tokens]
        if self._may_copy and batch.chunks is not None and (copied := batch.chunks.copied(kv_cache)) is not None:
            options = {name: x for name, x in self.options.items() if name not in ("mask", "split")}
            attention_varlen(q, *copied, batch.query_start_loc, batch.chunks.ends, causal=True, out=out, **options)
        elif self.dcp_world_size > 1:
            ranks = {"cp_rank": self.dcp_rank, "cp_world": self.dcp_world_size, "cp_interleave": batch.interleave}
            _across_ranks(q, out, lambda q, part: _attend(q, k_cache, v_cache, part, batch, **words, **ranks, return_lse=True)[1])
        else:
            _attend(q, k_cache, v_cache, out, batch, **words)
        return output

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write the new keys and values (tokens, heads_k, head_dim) where `slot_mapping` says."""
        if kv_cache.numel() == 0:
            return
        tokens = slot_mapping.shape[0]
        if key.is_cuda:
            from vllm._custom_ops import reshape_and_cache_flash  # pyright: ignore[reportMissingImports]

            k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)  # as vLLM's kernel wants them, 8 bits as bytes
            scales = self.kv_cache_dtype, layer._k_scale, layer._v_scale
            reshape_and_cache_flash(key[:tokens], value[:tokens], k_cache, v_cache, slot_mapping, *scales)
            return
        k_cache, v_cache = self._views(kv_cache)
        key, value = key[:tokens], value[:tokens]
        if self.kv_cache_dtype in E4M3:
            key, value = _e4m3(key, layer._k_scale), _e4m3(value, layer._v_scale)
        append(k_cache, v_cache, key, value, slots=slot_mapping)

    @property
    def _may_copy(self) -> bool:
        """Whether keys of long chunks are copied out of their pages: not of windows, 8 bits, ranks, nor where a sequence's bits are its own."""
        plain = self.options["mask"] is None and self.options["split"] is None
        return plain and self.dcp_world_size <= 1 and self.kv_cache_dtype not in E4M3

    def _views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (blocks, block, heads_k, head_dim) of the layer's cache, made once."""
        if self._of is not kv_cache or self._caches is None:
            numbers = kv_cache.view(torch.float8_e4m3fn) if self.kv_cache_dtype in E4M3 else kv_cache
            k_cache, v_cache = numbers.transpose(1, 2).split(self.head_size, dim=-1)
            self._of, self._caches = kv_cache, (k_cache, v_cache)
        return self._caches

    def _place(self, device: torch.device) -> None:
        """Sinks and slopes in fp32 where the queries are: at the first batch, which comes before any graph is captured."""
        sink, slopes = (None if x is None else x.to(device, torch.float32) for x in (self.sinks, self.alibi_slopes))
        if self.dcp_world_size > 1:
            sink, slopes = (None if x is None else _group().all_gather(x.contiguous(), 0) for x in (sink, slopes))
        self.options |= {"sink": sink, "alibi_slopes": slopes}
        self._ready = True


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, batch: Metadata, **words: Any) -> Any:
    """`decode` of a batch's queries (tokens, heads, head_dim) into `out`, and what it returns."""
    if batch.uniform:
        each = batch.seq_lens.shape[0], batch.uniform
        return decode(q.unflatten(0, each), k_cache, v_cache, out=out.unflatten(0, each), **words)
    return decode(q, k_cache, v_cache, cu_seqlens_q=batch.query_start_loc, out=out, **words)


def _across_ranks(q: Tensor, out: Tensor, attend: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Write `out` of this rank's heads, where each rank holds a share of every sequence's keys: all ranks' heads meet the keys that lie here, and
    what they get is summed over ranks in fp32, weighted by LSE. attend: writes its second argument, and returns LSE (..., heads, tokens).
    """
    group = _group()
    q = group.all_gather(q.contiguous(), 1)
    part = torch.empty(*q.shape[:2], out.shape[2], dtype=torch.float32, device=q.device)
    lse = attend(q, part).transpose(-1, -2).reshape(part.shape[:2])
    weight = (lse - group.all_gather(lse[None].contiguous(), 0).logsumexp(0)).exp().nan_to_num(0.0)  # nan: no rank has a key
    out.copy_(group.reduce_scatter(part * weight[..., None], 1))


def _group() -> Any:
    """vLLM's group of the ranks that share caches."""
    from vllm.distributed.parallel_state import get_dcp_group  # pyright: ignore[reportMissingImports]

    return get_dcp_group()


def _e4m3(x: Tensor, scale: Tensor) -> Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
