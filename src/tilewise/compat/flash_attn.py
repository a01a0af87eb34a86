"""The seven functions of `flash_attn` 2.8, computed by tilewise: `from tilewise.compat import flash_attn`, in place of `import flash_attn`.

Signatures, layouts and results are the peer's: (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim); masks align bottom right.
LSE is natural, (batch, heads, seqlen_q) or (heads, total_q), with +inf for rows that see no key. On top of the peer: CPUs, fp32 and fp64, any
head_dim and page size, gradients of LSE.

Arguments of all functions:
    dropout_p: probability with which a weight is dropped, drawn from torch's generator.
    softmax_scale: None is head_dim ** -0.5.    causal: bottom right; the right window is then 0.
    window_size: (left, right) keys around the query's own, negative for unbounded.
    softcap: bound on the scores; 0 or less for none.
    alibi_slopes: (heads,) or (batch, heads).    deterministic: gradients that are bit-identical from run to run.
    return_attn_probs: return (out, softmax_lse, S_dmask), where S_dmask is empty; not together with dropout.
    max_seqlen_q, max_seqlen_k, num_splits: not needed; they change no result.

Errors: ArgumentError, which is a ShapeError and a RuntimeError; UnsupportedError, which is a RuntimeError too.
"""

from typing import Any

import torch
from torch import Tensor

from tilewise.compat import _kvcache, bert_padding, rotary
from tilewise.compat import _translate as translate
from tilewise.compat._refusals import translate_errors
from tilewise.errors import ShapeError, UnsupportedError, check_number, check_tensor
from tilewise.problem import Extras
from tilewise.runtime import bound_call, call_cache

__version__ = "2.8.4+tilewise"
__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "rotary",
]

FRONTEND = "flash_attn"  # of call_cache.Options
SCALE = {"scale": "softmax_scale"}
PAGES = {**SCALE, "page_table": "block_table"}


@translate_errors(**SCALE)
def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Any:
    """Attention of q (batch, seqlen_q, heads, head_dim) to k, v (batch, seqlen_k, heads_k, head_dim)."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    extras, usual = Extras(None, alibi_slopes), return_attn_probs is False
    if usual and (known := call_cache.find(q, k, v, options, extras)) is not None:
        return known(q, k, v, extras)
    given = translate.options(causal, window_size, softmax_scale, softcap, alibi_slopes=alibi_slopes)
    how = _how(dropout_p, deterministic, return_attn_probs)
    results = _results(translate.attend(q, k, v, given, **how))
    if usual:
        call_cache.bind_as("", q, k, v, options, extras, (q, k, v, translate.core_options(given, **how), extras))
    return results


@translate_errors(**SCALE)
def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Any:
    """`flash_attn_func` with kv (batch, seqlen_k, 2, heads_k, head_dim)."""
    given = translate.options(causal, window_size, softmax_scale, softcap, alibi_slopes=alibi_slopes)
    how = _how(dropout_p, deterministic, return_attn_probs)
    k, v = translate.unpacked("kv", kv, ("batch", "seqlen_k", "2", "heads_k", "head_dim"))
    return _results(translate.attend(q, k, v, given, **how))


@translate_errors(**SCALE)
def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Any:
    """`flash_attn_func` with qkv (batch, seqlen, 3, heads, head_dim)."""
    given = translate.options(causal, window_size, softmax_scale, softcap, alibi_slopes=alibi_slopes)
    how = _how(dropout_p, deterministic, return_attn_probs)
    q, k, v = translate.unpacked("qkv", qkv, ("batch", "seqlen", "3", "heads", "head_dim"))
    return _results(translate.attend(q, k, v, given, **how))


@translate_errors(**PAGES, k_cache="k", v_cache="v", cache_seqlens="length of cu_seqlens_k")
def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
) -> Any:
    """Attention of packed sequences: q (total_q, heads, head_dim), k, v (total_k, heads_k, head_dim), cu_seqlens (batch + 1,).

    block_table: (batch, max_blocks); k, v are then (blocks, page_size, heads_k, head_dim), and cu_seqlens_k says the lengths.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    extras, usual = Extras(None, alibi_slopes, None, None, cu_seqlens_q, cu_seqlens_k), return_attn_probs is False and block_table is None
    if usual and (known := call_cache.find(q, k, v, options, extras)) is not None:
        try:
            return known(q, k, v, extras)
        except ShapeError:  # the long way has an answer where sequences begin above 0
            pass
    given = translate.options(causal, window_size, softmax_scale, softcap, alibi_slopes=alibi_slopes)
    how = _how(dropout_p, deterministic, return_attn_probs)
    if block_table is not None:
        cache = paged(k, v, cu_seqlens_k, block_table)
        if not how["dropout_p"] and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
            return _results(_kvcache.attend(q, cache, None, None, given, cu_seqlens_q=cu_seqlens_q), how["with_lse"])
        k, v, cu_seqlens_k = cache.packed()
    lengths = translate.Packed(cu_seqlens_q), translate.Packed(cu_seqlens_k)
    results = _results(translate.attend_packed(q, k, v, *lengths, given, **how))
    if usual:
        call_cache.bind_as(bound_call.PACKED, q, k, v, options, extras, (q, k, v, translate.core_options(given, **how), extras))
    return results


@translate_errors(**SCALE)
def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Any:
    """`flash_attn_varlen_func` with kv (total_k, 2, heads_k, head_dim)."""
    k, v = translate.unpacked("kv", kv, ("total_k", "2", "heads_k", "head_dim"))
    given = translate.options(causal, window_size, softmax_scale, softcap, alibi_slopes=alibi_slopes)
    how = _how(dropout_p, deterministic, return_attn_probs)
    lengths = translate.Packed(cu_seqlens_q), translate.Packed(cu_seqlens_k)
    found = translate.attend_packed(q, k, v, *lengths, given, **how)
    return _results(found)


@translate_errors(**SCALE)
def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Any:
    """`flash_attn_varlen_func` with qkv (total, 3, heads, head_dim)."""
    q, k, v = translate.unpacked("qkv", qkv, ("total", "3", "heads", "head_dim"))
    given = translate.options(causal, window_size, softmax_scale, softcap, alibi_slopes=alibi_slopes)
    how = _how(dropout_p, deterministic, return_attn_probs)
    lengths = translate.Packed(cu_seqlens)
    found = translate.attend_packed(q, k, v, lengths, lengths, given, **how)
    return _results(found)


@translate_errors(**PAGES, leftpad="cache_leftpad")
def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
) -> Any:
    """Attention of q (batch, seqlen_q, heads, head_dim) to a cache, to which k, v (batch, seqlen_new, heads_k, head_dim) are first appended in place.

    k_cache, v_cache: (batch_cache, capacity, heads_k, head_dim), or with block_table (blocks, page_size, heads_k, head_dim).
    cache_seqlens: tokens in the cache before k is appended, an int or (batch,); it is not advanced. None is the whole capacity.
    cache_batch_idx: (batch,), each sequence's row of the cache. cache_leftpad: (batch,), where each sequence begins in its row.
    rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2): new keys are rotated from position cache_seqlens on; queries likewise with causal or a
        window, else all at cache_seqlens. rotary_interleaved: pairs are (2 d, 2 d + 1).

    Returns out, or with return_softmax_lse (out, softmax_lse). No gradients, as the peer.
    """
    given = translate.options(causal, window_size, softmax_scale, softcap, alibi_slopes=alibi_slopes)
    check_tensor("q", q, ("batch", "seqlen_q", "heads", "head_dim"))
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k: it says where the new keys go")
    places = {"page_table": block_table, "batch_idx": cache_batch_idx, "leftpad": cache_leftpad}
    cache = _kvcache.Cache.of(k_cache, v_cache, q.shape[0], cache_seqlens, **places)
    turned = _kvcache.Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, k)
    out, lse = _kvcache.attend(q, cache, k, v, given, rotary=turned)
    return (out, translate.positive_infinity(lse)) if return_softmax_lse else out


def paged(k: Tensor, v: Tensor, cu_seqlens_k: Tensor, page_table: Tensor) -> _kvcache.Cache:
    """Pages (pages, page_size, heads_k, head_dim) with sequences as long as cu_seqlens_k says."""
    check_tensor("cu_seqlens_k", cu_seqlens_k, ("batch + 1",), _kvcache.INDEX_DTYPES)
    return _kvcache.Cache.of(k, v, cu_seqlens_k.shape[0] - 1, cu_seqlens_k.diff(), page_table=page_table)


def _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic) -> call_cache.Options:
    """The options of a call that returns O alone."""
    causal, mask = translate.visible(causal, window_size)
    if isinstance(softmax_scale, Tensor):  # its value may change
        softmax_scale = float(softmax_scale)
    return call_cache.Options(causal, softmax_scale, softcap, dropout_p, bool(deterministic), None, None, mask, False, FRONTEND)


def _how(dropout_p: float, deterministic, return_attn_probs) -> dict[str, Any]:
    """What every function here passes on."""
    check_number("dropout_p", dropout_p, 0.0, 1.0, high_open=True)
    if return_attn_probs and dropout_p > 0.0:
        raise UnsupportedError(
            "return_attn_probs=True with dropout_p > 0 is not supported, for S_dmask is the whole score matrix; take dropout_p=0.0 to get LSE alone"
        )
    return {"dropout_p": dropout_p, "deterministic": bool(deterministic), "with_lse": bool(return_attn_probs)}


def _results(found: tuple[Tensor, Tensor | None], with_lse: bool = True) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    out, lse = found
    return out if lse is None or not with_lse else (out, translate.positive_infinity(lse), out.new_empty(0))
