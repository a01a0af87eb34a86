"""The forward and backward passes of `flash_attn_interface` (FlashAttention-3), for those who write their own autograd around them.

Arguments are those of `tilewise.compat.flash_attn_3`, windows two numbers, the cache's under the pass's own names. LSE has -inf for rows that see no
key. What earlier releases call `window_size`, `causal` (of the backward pass) and `out` is taken, too.
"""

from typing import Any

import torch

from tilewise import api
from tilewise.compat import _translate as translate
from tilewise.compat import flash_attn_3
from tilewise.compat._refusals import translate_errors
from tilewise.compat.flash_attn_functions import maybe_contiguous, round_multiple
from tilewise.compat.flash_attn_passes import operands, places, write, write_packed
from tilewise.errors import UnsupportedError, check_qkv

__all__ = ["FlashAttnFunc", "FlashAttnQKVPackedFunc", "FlashAttnVarlenFunc", "_flash_attn_backward", "_flash_attn_forward"]
__all__ += ["maybe_contiguous", "round_multiple"]

OF_CACHES = {
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "seqused_k",
    "cache_batch_idx": "kv_batch_idx",
    "cache_leftpad": "leftpad_k",
    "leftpad": "leftpad_k",
    "cu_seqlens": "cu_seqlens_k_new",
    "rotary_seqlens": "seqlens_rotary",
    "rotary_first": "seqlens_rotary",
}


@translate_errors(scale="softmax_scale", **OF_CACHES, **flash_attn_3.DESCALES)
def _flash_attn_forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    qv=None,
    out_=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
    **earlier,
):
    """out, softmax_lse and two empty tensors, of whichever function has these arguments; differentiable where there is no cache.

    k_new, v_new: appended to k, v, which are then a cache, as with page_table, kv_batch_idx, leftpad_k or rotary tables. out_: written, too.
    """
    earlier = _earlier(earlier, "window_size", "out")
    window = earlier.get("window_size", (window_size_left, window_size_right))
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    scores = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window,
        "attention_chunk": attention_chunk,
        "softcap": softcap,
    }
    cache = {"cache_batch_idx": kv_batch_idx, "cache_leftpad": leftpad_k, "page_table": page_table, "rotary_cos": rotary_cos}
    cache |= {"rotary_sin": rotary_sin, "rotary_seqlens": seqlens_rotary, "cu_seqlens_k_new": cu_seqlens_k_new}
    given = [name for name, x in {"k": k_new, "v": v_new, **cache}.items() if x is not None]
    if given:
        for name, x in {"cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q}.items():
            if x is not None:
                raise UnsupportedError(f"{name} is not supported with {given[0]}; a cache's tokens are counted by seqused_k")
        more = {
            "cache_seqlens": seqused_k,
            "cu_seqlens_q": cu_seqlens_q,
            "rotary_interleaved": rotary_interleaved,
            "return_softmax_lse": True,
        }
        found = flash_attn_3.flash_attn_with_kvcache(q, k, v, k_new, v_new, qv, **cache, **more, **descales, **scores)
    elif cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None:
        found = flash_attn_3.flash_attn_func(q, k, v, qv=qv, return_attn_probs=True, **descales, **scores)
    else:
        (q,), of_q, shape = translate.flattened((q,), cu_seqlens_q, seqused_q)
        qv = qv if qv is None or shape is None else qv.flatten(0, 1)
        (k, v), of_k, _ = translate.flattened((k, v), cu_seqlens_k, seqused_k)
        lengths = of_q.cu_seqlens, of_k.cu_seqlens, max_seqlen_q, max_seqlen_k, of_q.used, of_k.used
        out, lse = flash_attn_3.flash_attn_varlen_func(q, k, v, *lengths, qv=qv, return_attn_probs=True, **descales, **scores)
        found = (out, lse) if shape is None else (out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1))
    out, lse = found
    nothing = torch.empty(0, dtype=torch.float32, device=out.device)
    return translate.into(out, earlier.get("out", out_), "out_"), lse, nothing, nothing.clone()


@translate_errors(scale="softmax_scale", seqused_q="sequed_q", seqused_k="sequed_k")
def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    sequed_q=None,
    sequed_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dq=None,
    dk=None,
    dv=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
    **earlier,
):
    """Write dq, dk, dv, 0 for what is not in use; returns rowsum(dout out), (batch, heads, seqlen_q) or (heads, total_q) fp32.

    With earlier releases' `window_size` or `causal` returns what those do, (dq, dk, dv, rowsum(dout out)).
    """
    words = _earlier(earlier, "window_size", "causal")
    window = words.get("window_size", (window_size_left, window_size_right))
    given = translate.options(words.get("causal", is_causal), window, softmax_scale, softcap)
    grads = places((q, k, v), (dq, dk, dv))
    if cu_seqlens_q is cu_seqlens_k is sequed_q is sequed_k is None:
        check_qkv(q, k, v)
        write((dout, out, softmax_lse), grads, operands(q, k, v, api.combine(given.causal, given.mask), given, deterministic=deterministic))
    else:
        (flat_q, flat_dout, flat_out), of_q, shape = translate.flattened((q, dout, out), cu_seqlens_q, sequed_q)
        (flat_k, flat_v), of_k, _ = translate.flattened((k, v), cu_seqlens_k, sequed_k)
        check_qkv(flat_q, flat_k, flat_v, packed=True)
        lse = softmax_lse if shape is None else softmax_lse.transpose(0, 1).flatten(1)
        write_packed((flat_dout, flat_out, lse), (flat_q, flat_k, flat_v), (of_q, of_k), grads, given, 0.0, None, deterministic)
    delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    return (*grads, delta) if words else delta


def _earlier(given: dict[str, Any], *words: str) -> dict[str, Any]:
    """The arguments given under names of earlier releases, which are `words`."""
    for name in given:
        if name not in words:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    return {name: x for name, x in given.items() if x is not None}


class FlashAttnFunc:
    """`apply` is `flash_attn_func`, arguments by place; nothing else of an autograd function is here."""

    apply = staticmethod(flash_attn_3.flash_attn_func)


class FlashAttnQKVPackedFunc:
    """`apply` is `flash_attn_qkvpacked_func`, likewise."""

    apply = staticmethod(flash_attn_3.flash_attn_qkvpacked_func)


class FlashAttnVarlenFunc:
    """`apply` is `flash_attn_varlen_func`, likewise, with seqused_q and seqused_k before max_seqlen_q and max_seqlen_k."""

    @staticmethod
    def apply(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, *rest):
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        return flash_attn_3.flash_attn_varlen_func(q, k, v, *lengths, *rest)
