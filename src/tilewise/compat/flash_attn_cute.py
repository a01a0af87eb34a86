"""The two functions of `flash_attn.cute` (FlashAttention-4), computed by tilewise: `from tilewise.compat import flash_attn_cute`.

Both always return (out, lse); lse is None unless return_lse, and has -inf for rows that see no key (the sink's logit where there is one). Windows are
(left, right) with None for unbounded.

Arguments other than those of `tilewise.compat.flash_attn` and `tilewise.compat.flash_attn_3`:
    learnable_sink: (heads,), one more logit in each row's denominator; differentiable.
    num_splits, pack_gqa, min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata: how the peer's kernels run; not needed.
    score_mod, mask_mod, their tensors and block_sparse_tensors are programs and tables for the peer's kernels, and refused.
"""

from typing import Any

from torch import Tensor

from tilewise.compat import _kvcache
from tilewise.compat import _translate as translate
from tilewise.compat._refusals import refuse, translate_errors
from tilewise.errors import ShapeError, check_tensor

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

NAMES = {"scale": "softmax_scale", "sink": "learnable_sink"}
SCORES = "it is a program for the peer's kernels; call tilewise.attention with softcap=, bias= or alibi_slopes="
MASKS = "build the mask of tilewise.Band, Documents, PrefixLM, ... (or tilewise.Dense) and call tilewise.attention(mask=...)"
WAYS_OUT = {
    "gather_kv_indices": "select the keys before the call, or hide the others: tilewise.attention(mask=tilewise.Dense(...))",
    "score_mod": SCORES,
    "score_mod_bwd": SCORES,
    "mask_mod": MASKS,
    "aux_tensors": "only score_mod and mask_mod read it; leave it None",
    "aux_scalars": "only score_mod and mask_mod read it; leave it None",
    "block_sparse_tensors": MASKS,
    "block_sparse_tensors_bwd": MASKS,
}


@translate_errors(**NAMES)
def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
) -> Any:
    """Attention of q (batch, seqlen_q, heads, head_dim) to k (batch, seqlen_k, heads_k, head_dim), v (..., head_dim_v).

    LSE is (batch, heads, seqlen_q), with qv (batch, seqlen_q, heads).
    """
    mods = {"gather_kv_indices": gather_kv_indices, "score_mod": score_mod, "score_mod_bwd": score_mod_bwd, "mask_mod": mask_mod}
    mods |= {"block_sparse_tensors": block_sparse_tensors, "block_sparse_tensors_bwd": block_sparse_tensors_bwd}
    refuse(mods | {"aux_tensors": aux_tensors or None, "aux_scalars": aux_scalars or None}, WAYS_OUT)
    given = translate.options(causal, _window(causal, window_size), softmax_scale, softcap, sink=learnable_sink)
    out, lse = translate.attend(q, k, v, given, qv=qv, deterministic=bool(deterministic))
    return out, _lse(lse, qv, return_lse)


@translate_errors(**NAMES)
def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
) -> Any:
    """Attention of sequences of their own lengths.

    q: packed (total_q, heads, head_dim) with cu_seqlens_q (batch + 1,), or (batch, seqlen_q, heads, head_dim) without; seqused_q (batch,) says how
        many tokens of each count. Rows that do not are 0.
    k, v: likewise, or with page_table (batch, max_pages) pages (pages, page_size, heads_k, ...), of which seqused_k says the tokens.

    LSE is (heads, total_q) or (batch, heads, seqlen_q); with qv its heads come last.
    """
    mods = {"gather_kv_indices": gather_kv_indices, "score_mod": score_mod, "score_mod_bwd": score_mod_bwd, "mask_mod": mask_mod}
    refuse(
        mods | {"block_sparse_tensors": block_sparse_tensors, "aux_tensors": aux_tensors or None, "aux_scalars": aux_scalars or None},
        WAYS_OUT,
    )
    given = translate.options(causal, _window(causal, window_size), softmax_scale, softcap, sink=learnable_sink)
    batched = cu_seqlens_q is None
    check_tensor("q", q, ("batch", "seqlen_q", "heads", "head_dim") if batched else ("total_q", "heads", "head_dim"))
    shape = q.shape[:2]
    given = translate.with_scale(given, q, qv)
    of_q = translate.Packed.of_batch(q, seqused_q) if batched else translate.Packed(cu_seqlens_q, seqused_q)
    if page_table is not None:
        if seqused_k is None:
            raise ShapeError("seqused_k must be given with page_table: it says how many tokens each sequence has")
        k, v, cu_seqlens_k = _kvcache.Cache.of(k, v, of_q.cu_seqlens.shape[0] - 1, seqused_k, page_table=page_table).packed()
        of_k = translate.Packed(cu_seqlens_k)
    elif cu_seqlens_k is None:
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x, ("batch", "seqlen_k", "heads_k", "head_dim"))
        of_k = translate.Packed.of_batch(k, seqused_k)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    else:
        of_k = translate.Packed(cu_seqlens_k, seqused_k)
    flat_q, flat_qv = q.flatten(0, 1) if batched else q, qv.flatten(0, 1) if batched and qv is not None else qv
    out, lse = translate.attend_packed(flat_q, k, v, of_q, of_k, given, qv=flat_qv, deterministic=bool(deterministic))
    if batched:
        out, lse = out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
    return out, _lse(lse, qv, return_lse)


def _window(causal: bool, window_size) -> tuple[int | None, int | None]:
    """The window as (left, right), None for unbounded. Bounds with a negative sum are none, as the peer has it; else they must not be negative."""
    left, right = translate.window(window_size, "None")
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        return None, 0 if causal else None
    if (left or 0) < 0 or (right or 0) < 0:
        raise ShapeError(
            f"window_size must have no negative bound beside another, got {tuple(window_size)}; use tilewise.Band for a shifted one"
        )
    return left, right


def _lse(lse: Tensor, qv: Tensor | None, return_lse: bool) -> Tensor | None:
    if not return_lse:
        return None
    return lse if qv is None else lse.transpose(-1, -2)
