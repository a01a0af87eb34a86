"""What SGLang calls where it attends by tilewise (compat/sglang.py): what a batch is, and one layer's attention.

Written for SGLang 0.5.17. Its pool holds a layer's keys and values apart, each (slots, heads_k, head_dim), and `req_to_token` names the slot of each
token of a request; slots come in whole pages. A sliding window may have a pool of its own, with slots of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # pyright: ignore[reportMissingImports]
from sglang.srt.layers.radix_attention import AttentionType  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.memory_pool import KVWriteLoc  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tilewise.decoding import decode
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Mask, SlidingWindow
from tilewise.varlen import attention_varlen

SPLIT = 256  # keys of a piece, where a sequence's bits are to be its own
WIDTH = 64  # tokens of the narrowest table outside of graphs; wider ones are powers of two, so that few shapes occur
EIGHT_BITS = torch.float8_e4m3fn


def why_not(runner: Any) -> str | None:
    """A sentence where tilewise does not serve what this runner holds, before its first batch."""
    arguments, model = runner.server_args, runner.model_config
    if arguments.speculative_algorithm is not None:
        return "tilewise does not verify drafts in SGLang: leave speculative_algorithm out, or choose another attention backend"
    if model.is_encoder_decoder:
        return "tilewise does not serve models with an encoder in SGLang; choose another attention backend"
    if getattr(model, "is_local_attention_model", False):
        return "tilewise has no attention by chunks (irope) in SGLang; choose another attention backend for this model"
    if getattr(runner, "prefill_aware_swa", False):
        return "tilewise has no window that keeps the prompt in SGLang; choose another attention backend for this model"
    if getattr(arguments, "attn_cp_size", 1) > 1 or getattr(arguments, "dcp_size", 1) > 1:
        return "tilewise does not share one sequence among GPUs in SGLang: set the context-parallel sizes to 1"
    if runner.kv_cache_dtype not in (torch.float32, torch.bfloat16, torch.float16, EIGHT_BITS):
        return f"tilewise reads caches of 16 bits and of e4m3 with a scale a layer, not of {runner.kv_cache_dtype}"
    if getattr(runner, "kv_cache_dtype_str", "auto") == "mxfp8":
        return "tilewise reads caches of e4m3 with a scale a layer, not of mxfp8"
    return None


@dataclass
class Metadata:
    """A batch, as every layer sees it."""

    lengths: Tensor  # (requests,) int32 tokens in the cache, with the new ones
    table: Tensor  # (requests, pages) int32
    window_table: Tensor | None  # the same in the pool of the windows, where there is one
    window_slots: Tensor | None  # (tokens,) where the new tokens go in that pool
    starts: Tensor | None  # (requests + 1,) int32 first query of each request; None: a query each
    tokens: int  # queries, without padding


class Backend(AttentionBackend):
    """Attention of all layers of one model runner."""

    needs_cpu_seq_lens = True  # for the width of a table outside of graphs

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if sentence := why_not(runner):
            raise UnsupportedError(sentence)
        self.pool, self.page = runner.token_to_kv_pool, runner.page_size
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self.device, self.latent = runner.device, runner.use_mla_backend
        self.most = runner.model_config.context_len
        self.windows = getattr(self.pool, "swa_layer_nums", 0) > 0
        self.split = SPLIT if runner.server_args.enable_deterministic_inference else None
        self.forward_metadata: Metadata | None = None
        self.kept: Metadata | None = None  # what graphs read: the tensors of the largest batch
        self.options: dict[Any, dict[str, Any]] = {}  # by layer: what does not change from batch to batch

    # What a batch is.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        requests, starts, tokens = forward_batch.batch_size, None, forward_batch.batch_size
        if not forward_batch.forward_mode.is_decode_or_idle():
            starts = torch.zeros(requests + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
            tokens = sum(forward_batch.extend_seq_lens_cpu)
        lengths = forward_batch.seq_lens_cpu
        longest = self.most if lengths is None else max(int(lengths.max()) if requests else 0, WIDTH)
        table = self._table(forward_batch, min(1 << (longest - 1).bit_length(), self.req_to_token.shape[1]))
        self.forward_metadata = Metadata(
            lengths=forward_batch.seq_lens.to(torch.int32),
            table=self._pages(table),
            window_table=self._pages(self._in_windows(table)) if self.windows else None,
            window_slots=self._in_windows(forward_batch.out_cache_loc) if self.windows else None,
            starts=starts,
            tokens=tokens,
        )

    def _table(self, batch: Any, width: int) -> Tensor:
        """(requests, pages) slot of the first token of each page of the batch's requests."""
        return self.req_to_token[batch.req_pool_indices, : width : self.page]

    def _in_windows(self, slots: Tensor) -> Tensor:
        return self.pool.translate_loc_from_full_to_swa(slots)

    def _pages(self, slots: Tensor) -> Tensor:
        return (slots if self.page == 1 else slots // self.page).to(torch.int32)

    # Graphs: the same tensors for every batch of one token a request, filled anew before each.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pages = -(-self.most // self.page)
        ints = {"dtype": torch.int32, "device": self.device}
        self.kept = Metadata(
            lengths=torch.ones(max_bs, **ints),
            table=torch.zeros(max_bs, pages, **ints),
            window_table=torch.zeros(max_bs, pages, **ints) if self.windows else None,
            window_slots=torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device) if self.windows else None,
            starts=None,
            tokens=max_bs,
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise UnsupportedError("tilewise is captured in SGLang's graphs of decode alone; leave graphs of whole prompts off")
        kept, requests, batch = self.kept, forward_batch.batch_size, forward_batch
        if kept is None:
            raise UnsupportedError("SGLang asked for a graph before init_cuda_graph_state")
        slots = self._table(batch, self.most)
        now = Metadata(
            lengths=kept.lengths[:requests], table=kept.table[:requests], window_table=None, window_slots=None, starts=None, tokens=requests
        )
        now.lengths.copy_(batch.seq_lens[:requests])
        now.table[:, : slots.shape[1]].copy_(self._pages(slots))
        if kept.window_table is not None and kept.window_slots is not None:
            window = self._in_windows(slots)
            now.window_table, now.window_slots = kept.window_table[:requests], kept.window_slots[:requests]
            now.window_table[:, : slots.shape[1]].copy_(self._pages(window))
            now.window_slots.copy_(self._in_windows(batch.out_cache_loc[:requests]))
        self.forward_metadata = now

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # One layer.

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **others)

    forward_extend = forward_decode

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        batch: Any,
        save: bool,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """(tokens, heads_q * head_dim_v) of q (tokens, heads_q * head_dim), after k and v are written into the pool where they are to be."""
        if wrong := [name for name, x in others.items() if x is not None]:
            raise UnsupportedError(f"tilewise does not know {', '.join(wrong)} of this layer; choose another attention backend")
        now = self.forward_metadata
        if now is None:
            raise UnsupportedError("SGLang asked for attention before init_forward_metadata")
        words = self._options(layer)
        if sinks is not None:
            words = words | {"sink": sinks.to(torch.float32)}
        heads, dim, dim_v = layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim
        queries = q.reshape(-1, heads, q.shape[-1] if q.dim() == 3 else q.shape[-1] // heads)
        if q_rope is not None:
            queries = torch.cat([queries, q_rope.reshape(queries.shape[0], heads, -1)], dim=-1)
        if k is not None and v is not None and save:
            self._write(k, v, k_rope, layer, batch, now)
        given = getattr(batch, "_attn_output", None)
        out = q.new_empty(queries.shape[0], heads * dim_v) if given is None else given.view(-1, heads * dim_v)
        if now.tokens < queries.shape[0]:
            out[now.tokens :] = 0
        queries, o = queries[: now.tokens], out[: now.tokens].view(-1, heads, dim_v)
        if (
            self.latent and k is not None and v is not None and not save and now.starts is not None
        ):  # a whole prompt, before it is made latent
            k, v = k.view(-1, layer.tp_k_head_num, dim)[: now.tokens], v.view(-1, layer.tp_v_head_num, dim_v)[: now.tokens]
            words = {"mask": words["mask"] or Causal(), "scale": words["scale"], "softcap": words["softcap"]}
            o.copy_(attention_varlen(queries, k, v, now.starts, now.starts, **words))
            return out
        k_cache, v_cache = (
            x.view(-1, self.page, *x.shape[1:])
            for x in (self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id))
        )
        windowed = now.window_table is not None and layer.sliding_window_size is not None and layer.sliding_window_size > -1
        words = words | {"page_table": now.window_table if windowed else now.table, "cache_seqlens": now.lengths}
        if k_cache.dtype == EIGHT_BITS:
            words |= {"k_scale": self._scale(layer.k_scale), "v_scale": self._scale(layer.v_scale)}
        if now.starts is None:
            decode(queries.unsqueeze(1), k_cache, v_cache, out=o.unsqueeze(1), **words)
        else:
            decode(queries, k_cache, v_cache, cu_seqlens_q=now.starts, out=o, **words)
        return out

    def _write(self, k: Tensor, v: Tensor, k_rope: Tensor | None, layer: Any, batch: Any, now: Metadata) -> None:
        if k_rope is not None:
            self.pool.set_mla_kv_buffer(layer, batch.out_cache_loc, k, k_rope)
        elif self.latent:
            self.pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        else:
            place = KVWriteLoc(batch.out_cache_loc, now.window_slots)
            self.pool.set_kv_buffer(layer, place, k, v, layer.k_scale, layer.v_scale)

    def _options(self, layer: Any) -> dict[str, Any]:
        found = self.options.get(layer)
        if found is None:
            found = self.options[layer] = options_of(layer) | {"split": self.split}
        return found

    def _scale(self, scale: Tensor | None) -> Tensor:
        if scale is None:
            return torch.ones((), dtype=torch.float32, device=self.device)
        return scale.reshape(()) if scale.numel() == 1 else scale


def options_of(layer: Any) -> dict[str, Any]:
    """What `decode` is told of a layer whatever the batch is. UnsupportedError in a sentence for what tilewise does not serve."""
    wrong = None
    if layer.is_cross_attention or layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
        wrong = "layers that see an encoder, or images both ways"
    elif layer.pos_encoding_mode != "NONE":
        wrong = f"pos_encoding_mode={layer.pos_encoding_mode}"
    elif layer.logit_cap and layer.logit_capping_method != "tanh":
        wrong = f"logit_capping_method={layer.logit_capping_method}"
    elif getattr(layer, "xai_temperature_len", -1) > 0:
        wrong = "temperatures by position"
    if wrong:
        raise UnsupportedError(f"tilewise does not serve {wrong} in SGLang; choose another attention backend for this model")
    causal = layer.attn_type != AttentionType.ENCODER_ONLY
    # Keys before a query: SGLang has subtracted the query itself.
    window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
    mask: Mask | None = None if window < 0 else SlidingWindow(window, 0 if causal else window)
    return {"mask": mask, "causal": causal, "scale": float(layer.scaling), "softcap": float(layer.logit_cap or 0.0)}
