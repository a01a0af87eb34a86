"""The six functions of `sageattention` 2.2, computed by tilewise: `from tilewise.compat import sageattention`, in place of `import sageattention`.

`sageattn` and the two of `pv_fp8` round P V to 8 bits ("int8" of `tilewise.attention`); the two of `pv_fp16` and `sageattn_varlen` keep it in 16
("int8_qk"). Either way keys and values are centred and q and k rotated first, so outliers and a V far from 0 do no harm. Where 8 bits do not pay
(2,048 keys or fewer, head_dim up to 64, no kernel for them on the device) and where they cannot be (values to add to the scores, fp32), all is in
the inputs' own dtype, which is more exact. On top of the peer: masks, gradients (those of 16 bits), any head_dim, head_dim_v and device.

Arguments of all functions:
    tensor_layout: "HND", (batch, heads, seqlen, head_dim), or "NHD", (batch, seqlen, heads, head_dim); of all tensors and of the result.
    is_causal: query i sees keys 0 .. i.    sm_scale: None is head_dim ** -0.5.
    return_lse: also return LSE (batch, heads_q, seqlen_q), natural, fp32.
    attn_mask: bool (True: visible) or values to add, what broadcasts to (batch, heads_q, seqlen_q, seqlen_k).
    precision (by keyword, tilewise's own): "int8", "int8_qk", "fp8" or None, whether it pays or not.
    qk_quant_gran, pv_accum_dtype, smooth_k, smooth_v, quantization_backend: how the peer quantises; they change nothing here.

Errors: ArgumentError, which is a ShapeError and a RuntimeError; UnsupportedError for dropout and for keywords that are not known.
"""

from typing import Any

from torch import Tensor

from tilewise.api import attention
from tilewise.compat._attn_mask import BOTTOM_RIGHT, TOP_LEFT, mask_and_bias
from tilewise.compat._paying import paying
from tilewise.compat._refusals import translate_errors
from tilewise.errors import UnsupportedError, check_qkv
from tilewise.varlen import attention_varlen

__version__ = "2.2.0+tilewise"
__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_varlen",
]

EIGHT, SIXTEEN = "int8", "int8_qk"  # of P V
OURS = {"scale": "sm_scale", "bias": "attn_mask"}
HOW = {"qk_quant_gran", "pv_accum_dtype", "smooth_k", "smooth_v", "quantization_backend"}
LAYOUTS = "HND", "NHD"


@translate_errors(**OURS)
def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, attn_mask=None, **kwargs) -> Any:
    """Attention of q (batch, heads_q, seqlen_q, head_dim) to k, v (batch, heads_k, seqlen_k, ...)."""
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, EIGHT, {**kwargs, "attn_mask": attn_mask})


@translate_errors(**OURS)
def sageattn_qk_int8_pv_fp8_cuda(
    q,
    k,
    v,
    tensor_layout="HND",
    is_causal=False,
    qk_quant_gran="per_thread",
    sm_scale=None,
    pv_accum_dtype="fp32+fp16",
    smooth_k=True,
    smooth_v=False,
    return_lse=False,
    **kwargs,
) -> Any:
    """As `sageattn`."""
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, EIGHT, kwargs)


@translate_errors(**OURS)
def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q,
    k,
    v,
    tensor_layout="HND",
    is_causal=False,
    qk_quant_gran="per_thread",
    sm_scale=None,
    pv_accum_dtype="fp32+fp32",
    smooth_k=True,
    return_lse=False,
    **kwargs,
) -> Any:
    """As `sageattn`."""
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, EIGHT, kwargs)


@translate_errors(**OURS)
def sageattn_qk_int8_pv_fp16_cuda(
    q,
    k,
    v,
    tensor_layout="HND",
    is_causal=False,
    qk_quant_gran="per_thread",
    sm_scale=None,
    pv_accum_dtype="fp32",
    smooth_k=True,
    smooth_v=False,
    return_lse=False,
    **kwargs,
) -> Any:
    """As `sageattn`, with P V in the inputs' dtype."""
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, SIXTEEN, kwargs)


@translate_errors(**OURS)
def sageattn_qk_int8_pv_fp16_triton(
    q,
    k,
    v,
    tensor_layout="HND",
    quantization_backend="triton",
    is_causal=False,
    sm_scale=None,
    smooth_k=True,
    return_lse=False,
    **kwargs,
) -> Any:
    """As `sageattn`, with P V in the inputs' dtype."""
    return _attend(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, SIXTEEN, kwargs)


@translate_errors(**OURS)
def sageattn_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal=False, sm_scale=None, smooth_k=True, **kwargs
) -> Any:
    """Attention of packed sequences: q (total_q, heads_q, head_dim), k, v (total_k, heads_k, ...), cu_seqlens (batch + 1,); P V in the inputs' dtype.

    max_seqlen_q, max_seqlen_k: not needed.
    """
    scale, precision, mask = _asked(kwargs, sm_scale, SIXTEEN)
    if mask is not None:
        raise UnsupportedError("attn_mask cannot be given for packed sequences; call tilewise.attention_varlen with mask=")
    inner = None
    if is_causal:
        inner = BOTTOM_RIGHT if cu_seqlens_k is cu_seqlens_q else TOP_LEFT
    precision = precision if "precision" in kwargs else paying(precision, q, k, v)
    return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, mask=inner, scale=scale, precision=precision)


def _attend(q: Tensor, k: Tensor, v: Tensor, layout: str, causal: bool, sm_scale: float | None, with_lse: bool, recipe: str, kwargs: dict):
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"tensor_layout must be 'HND' or 'NHD', got {layout!r:.100}")
    scale, precision, attn_mask = _asked(kwargs, sm_scale, recipe)
    if layout == "HND":
        q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x for x in (q, k, v))
    mask, bias = None, None
    if attn_mask is not None:
        if causal:
            raise ValueError("attn_mask must be None where is_causal is True; write the causal part into attn_mask")
        check_qkv(q, k, v)
        mask, bias = mask_and_bias(attn_mask, q, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), f"{__name__}.sageattn")
    elif causal:
        mask = BOTTOM_RIGHT if q.shape[1] == k.shape[1] else TOP_LEFT
    precision = precision if "precision" in kwargs else paying(precision, q, k, v, bias)
    result = attention(q, k, v, mask=mask, bias=bias, scale=scale, precision=precision, return_lse=with_lse)
    o, *lse = result if isinstance(result, tuple) else (result,)
    o = o.transpose(1, 2) if layout == "HND" else o
    return (o, *lse) if with_lse else o


def _asked(kwargs: dict[str, Any], sm_scale: float | None, recipe: str) -> tuple[float | None, str | None, Any]:
    """(scale, precision, attn_mask), from what goes by keyword alone: also words of torch's function, in the place of which `sageattn` is put."""
    if unknown := kwargs.keys() - HOW - {"attn_mask", "dropout_p", "enable_gqa", "precision", "scale"}:
        raise UnsupportedError(
            f"{', '.join(sorted(unknown))} is not known; leave it out, or call tilewise.attention, which says what it takes"
        )
    if kwargs.get("dropout_p"):
        raise UnsupportedError(f"dropout_p must be 0, got {kwargs['dropout_p']}; tilewise.attention has dropout")
    if sm_scale is not None and kwargs.get("scale") not in (None, sm_scale):
        raise ValueError(f"sm_scale is {sm_scale}, and by torch's word it is {kwargs['scale']}; give one of them")
    return sm_scale if sm_scale is not None else kwargs.get("scale"), kwargs.get("precision", recipe), kwargs.get("attn_mask")
