"""The five functions of `flash_attn_2_cuda`, FlashAttention-2's compiled extension, for those who call it and not what lies around it.

Arguments are by place, those of `tilewise.compat.flash_attn_passes` in the extension's order. `out_` is written, too, where it is given; the slot of
a generator has to be None.
"""

from tilewise.compat import _translate as translate
from tilewise.compat import flash_attn, flash_attn_passes
from tilewise.compat._refusals import refuse, translate_errors

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

GENERATOR = {"unused_generator_compat": "random numbers are drawn from torch's generator; pass None"}


@translate_errors()
def fwd(
    q,
    k,
    v,
    out_,
    alibi_slopes_,
    p_dropout,
    softmax_scale,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    return_softmax,
    unused_generator_compat,
):
    """[out, softmax_lse (batch, heads, seqlen_q), S_dmask (empty), rng_state] of `_flash_attn_forward`."""
    refuse({"unused_generator_compat": unused_generator_compat}, GENERATOR)
    window = window_size_left, window_size_right
    found = flash_attn_passes._flash_attn_forward(
        q, k, v, p_dropout, softmax_scale, is_causal, *window, softcap, alibi_slopes_, return_softmax
    )
    return _written(found, out_)


@translate_errors()
def varlen_fwd(
    q,
    k,
    v,
    out_,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    leftpad_k_,
    block_table_,
    alibi_slopes_,
    max_seqlen_q,
    max_seqlen_k,
    p_dropout,
    softmax_scale,
    zero_tensors,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    return_softmax,
    unused_generator_compat,
    num_splits=0,
):
    """[out, softmax_lse (heads, total_q), S_dmask (empty), rng_state] of `_flash_attn_varlen_forward`."""
    refuse({"unused_generator_compat": unused_generator_compat}, GENERATOR)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    scores = p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes_
    cache = block_table_, leftpad_k_, seqused_k
    found = flash_attn_passes._flash_attn_varlen_forward(q, k, v, *lengths, *scores, return_softmax, *cache, zero_tensors, num_splits)
    return _written(found, out_)


@translate_errors()
def bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq_,
    dk_,
    dv_,
    alibi_slopes_,
    p_dropout,
    softmax_scale,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    deterministic,
    unused_generator_compat,
    rng_state,
):
    """[dq, dk, dv, softmax_d (batch, heads, seqlen_q)] of `_flash_attn_backward`; gradients are written where dq_, dk_ and dv_ are given."""
    refuse({"unused_generator_compat": unused_generator_compat}, GENERATOR)
    grads = flash_attn_passes.places((q, k, v), (dq_, dk_, dv_))
    scores = p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes_
    delta = flash_attn_passes._flash_attn_backward(dout, q, k, v, out, softmax_lse, *grads, *scores, deterministic, rng_state)
    return [*grads, delta]


@translate_errors()
def varlen_bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq_,
    dk_,
    dv_,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes_,
    max_seqlen_q,
    max_seqlen_k,
    p_dropout,
    softmax_scale,
    zero_tensors,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    deterministic,
    unused_generator_compat,
    rng_state,
):
    """[dq, dk, dv, softmax_d (heads, total_q)] of `_flash_attn_varlen_backward`, likewise."""
    refuse({"unused_generator_compat": unused_generator_compat}, GENERATOR)
    grads = flash_attn_passes.places((q, k, v), (dq_, dk_, dv_))
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    scores = p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes_
    passed = dout, q, k, v, out, softmax_lse, *grads
    delta = flash_attn_passes._flash_attn_varlen_backward(*passed, *lengths, *scores, deterministic, rng_state, zero_tensors)
    return [*grads, delta]


@translate_errors(
    cache_seqlens="seqlens_k_",
    k_cache="kcache",
    v_cache="vcache",
    cache_batch_idx="cache_batch_idx_",
    cache_leftpad="leftpad_k_",
    block_table="block_table_",
)
def fwd_kvcache(
    q,
    kcache,
    vcache,
    k_,
    v_,
    seqlens_k_,
    rotary_cos_,
    rotary_sin_,
    cache_batch_idx_,
    leftpad_k_,
    block_table_,
    alibi_slopes_,
    out_,
    softmax_scale,
    is_causal,
    window_size_left,
    window_size_right,
    softcap,
    is_rotary_interleaved,
    num_splits,
):
    """[out, softmax_lse (batch, heads, seqlen_q)] of `flash_attn_with_kvcache`."""
    places = seqlens_k_, cache_batch_idx_, leftpad_k_, block_table_
    window = window_size_left, window_size_right
    scores = softmax_scale, is_causal, window, softcap, is_rotary_interleaved, alibi_slopes_
    found = flash_attn.flash_attn_with_kvcache(
        q, kcache, vcache, k_, v_, rotary_cos_, rotary_sin_, *places, *scores, num_splits, return_softmax_lse=True
    )
    return _written(found, out_)


def _written(found: tuple, out) -> list:
    """The results, the first of them in `out`, where that is given."""
    return [translate.into(found[0], out, "out_"), *found[1:]]
