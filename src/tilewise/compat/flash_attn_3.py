"""The functions of `flash_attn_interface` (FlashAttention-3), computed by tilewise: `from tilewise.compat import flash_attn_3`.

As `tilewise.compat.flash_attn`, but: no dropout, ALiBi or kvpacked; with return_attn_probs they return (out, softmax_lse), in which rows that see no
key have -inf.

Further arguments:
    qv: a second part of the queries, (..., heads, head_dim_v): scores are `q k^T + qv v^T`.
    attention_chunk: queries see only keys of their own chunk of this many; 0 for none.
    seqused_q, seqused_k: (batch,), how many tokens of each packed sequence count.
    q_descale, k_descale, v_descale: (batch, heads_k), what q, k and v in float8_e4m3fn are multiplied by; out is then bf16. None: 1. With a cache,
        q is taken to bf16 first.
    num_splits, pack_gqa, sm_margin, scheduler_metadata: how the peer's kernels run; they change no result, and nothing here.
"""

from typing import Any

import torch
from torch import Tensor

from tilewise import decoding
from tilewise.compat import _descale, _kvcache
from tilewise.compat import _translate as translate
from tilewise.compat._refusals import translate_errors
from tilewise.compat.rotary import split_heads
from tilewise.errors import DTYPES, EIGHT_BITS, check_like, check_size, check_tensor, check_words
from tilewise.merge import merge

__version__ = "3.0.0+tilewise"
__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

OF_VLLM = "cp_world_size", "cp_rank", "cp_tot_seqused_k", "s_aux"
DESCALES = {f"{x}_scale": f"{x}_descale" for x in "qkv"}


@translate_errors(scale="softmax_scale", **DESCALES)
def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
) -> Any:
    """Attention of q (batch, seqlen_q, heads, head_dim) to k (batch, seqlen_k, heads_k, head_dim), v (..., head_dim_v)."""
    given = translate.options(causal, window_size, softmax_scale, softcap, chunk=attention_chunk)
    scales = _descale.scales(q, k, q_descale, k_descale, v_descale, qv)
    out, lse = _descale.forward_only(
        translate.attend, q, k, v, given, qv=qv, deterministic=bool(deterministic), with_lse=bool(return_attn_probs), **scales
    )
    return (out, lse) if return_attn_probs else out


@translate_errors(scale="softmax_scale", **DESCALES)
def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
) -> Any:
    """`flash_attn_func` with qkv (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, num_heads_q + 2 heads_k, head_dim)."""
    given = translate.options(causal, window_size, softmax_scale, softcap, chunk=attention_chunk)
    if num_heads_q is None:
        q, k, v = translate.unpacked("qkv", qkv, ("batch", "seqlen", "3", "heads", "head_dim"), (*DTYPES, *EIGHT_BITS))
    else:
        q, k, v = split_heads(qkv, num_heads_q)
    scales = _descale.scales(q, k, q_descale, k_descale, v_descale)
    out, lse = _descale.forward_only(
        translate.attend, q, k, v, given, deterministic=bool(deterministic), with_lse=bool(return_attn_probs), **scales
    )
    return (out, lse) if return_attn_probs else out


@translate_errors(scale="softmax_scale", **DESCALES)
def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
) -> Any:
    """Attention of packed sequences: q (total_q, heads, head_dim), k, v (total_k, heads_k, ...), cu_seqlens (batch + 1,). Rows not in use are 0."""
    given = translate.options(causal, window_size, softmax_scale, softcap, chunk=attention_chunk)
    lengths = translate.Packed(cu_seqlens_q, seqused_q), translate.Packed(cu_seqlens_k, seqused_k)
    scales = _descale.scales(q, k, q_descale, k_descale, v_descale, qv)
    more = {"qv": qv, "deterministic": bool(deterministic), "with_lse": bool(return_attn_probs)}
    out, lse = _descale.forward_only(translate.attend_packed, q, k, v, *lengths, given, **more, **scales)
    return (out, lse) if return_attn_probs else out


OF_CACHE = {"leftpad": "cache_leftpad", "cu_seqlens": "cu_seqlens_k_new", "rotary_first": "rotary_seqlens", "cp_world": "cp_world_size"}


@translate_errors(scale="softmax_scale", sink="s_aux", **OF_CACHE, **DESCALES)
def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
    **of_vllm,
) -> Any:
    """`tilewise.compat.flash_attn.flash_attn_with_kvcache`, and what is new here.

    cu_seqlens_q: (batch + 1,); q is then packed, (total_q, heads, head_dim). cu_seqlens_k_new: likewise k and v.
    page_table: (batch, max_pages), pages of any size. rotary_seqlens: (batch,), the position of the first new token, in place of cache_seqlens.
    of_vllm: words of vLLM's build alone. cp_world_size, cp_rank: the cache holds every cp_world_size-th token of a sequence, from token cp_rank on.
        cp_tot_seqused_k: (batch,), tokens of the whole sequences: causal and window_size go by their positions; cache_seqlens is of those here.
        Nothing is appended then. s_aux: (heads,), sinks, counted by rank 0 alone, so that `merge` of all ranks' results counts them once.

    Returns out, or with return_softmax_lse (out, softmax_lse). No gradients, as the peer.
    """
    check_words("flash_attn_with_kvcache", {name: x for name, x in of_vllm.items() if name not in OF_VLLM}, dict.fromkeys(OF_VLLM))
    given = translate.options(causal, window_size, softmax_scale, softcap, chunk=attention_chunk, sink=of_vllm.get("s_aux"))
    axes = ("batch", "seqlen_q", "heads", "head_dim") if cu_seqlens_q is None else ("total_q", "heads", "head_dim")
    check_tensor("q", q, axes, (*DTYPES, *EIGHT_BITS))
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k: it says where the new keys go")
    batch = decoding.batch_of_queries(q, cu_seqlens_q)
    places = {"page_table": page_table, "batch_idx": cache_batch_idx, "leftpad": cache_leftpad}
    cache = _kvcache.Cache.of(k_cache, v_cache, batch, cache_seqlens, **places, k_scale=k_descale, v_scale=v_descale)
    cache = cache.of_rank(of_vllm.get("cp_rank", 0), of_vllm.get("cp_world_size", 1), of_vllm.get("cp_tot_seqused_k"))
    q = _descale.wide_queries(q, k_cache, q_descale, cu_seqlens_q)
    rotary = _kvcache.Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, k, rotary_seqlens)
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new}
    out, lse = _kvcache.attend(q, cache, k, v, given, rotary=rotary, qv=qv, **packed)
    return (out, lse) if return_softmax_lse else out


@translate_errors()
def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Attention over all keys from that over parts of them.

    out_partial: (parts, batch, seqlen, heads, head_dim) fp32; lse_partial: (parts, batch, seqlen, heads) fp32, -inf for rows that saw no key.
    out: where the result is written, None for a new tensor. out_dtype: of that, None for out_partial's.

    Returns out (batch, seqlen, heads, head_dim) and LSE (batch, seqlen, heads).
    """
    check_tensor("out_partial", out_partial, ("parts", "batch", "seqlen", "heads", "head_dim"))
    check_tensor("lse_partial", lse_partial, ("parts", "batch", "seqlen", "heads"), (torch.float32, torch.float64))
    check_size("lse_partial", "shape", lse_partial.shape, out_partial.shape[:-1], "out_partial without head_dim")
    found, lse = merge(list(out_partial), list(lse_partial.transpose(2, 3)))
    if out is None:
        return found.to(out_partial.dtype if out_dtype is None else out_dtype), lse.transpose(1, 2)
    check_size("out", "shape", out.shape, found.shape, "out_partial without parts")
    check_like("out", out, found, same_dtype=False, other="out_partial")
    return out.copy_(found), lse.transpose(1, 2)


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """What `flash_attn_with_kvcache` takes as scheduler_metadata: here nothing is planned ahead, so an empty int32 tensor."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device if isinstance(cache_seqlens, Tensor) else None)
