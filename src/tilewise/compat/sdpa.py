"""torch's `scaled_dot_product_attention`: a function with its signature, in its place (`patch`), or under it on CPUs (`override_cpu`).

Shapes are torch's, (..., heads, seqlen, head_dim). One result differs from some of torch's own kernels: a row that sees no key gives 0 and passes
no gradient, where the mathematical kernel of older versions gives NaN.
"""

import itertools
import threading
import warnings
from functools import lru_cache
from operator import is_ as operator_is

import torch
from torch import Tensor
from torch._C._nn import scaled_dot_product_attention as TORCHS

from tilewise.api import attention, operands
from tilewise.compat._attn_mask import TOP_LEFT, is_causal_bias, mask_and_bias
from tilewise.compat._overrides import overridable, renew_tables, scripted_as
from tilewise.compat._refusals import ArgumentError, translate_errors
from tilewise.errors import MADE_OF_MEMORY, ShapeError, UnsupportedError
from tilewise.masks import Full
from tilewise.problem import Extras
from tilewise.runtime import bound_call, call_cache, operator
from tilewise.runtime.call_cache import Options

FRONTEND, FRONTEND_GQA = "sdpa", "sdpa gqa"  # of call_cache.Options, the latter with enable_gqa
LAYER = "tilewise.compat.sdpa.scaled_dot_product_attention"


@overridable(TORCHS, but=is_causal_bias)
@translate_errors(q="query", k="key", v="value", bias="attn_mask")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by tilewise.

    Args:
        query: (..., heads_q, seqlen_q, head_dim), at least 2-D, fp32, bf16, fp16 or fp64; batch dimensions and heads broadcast.
        key: (..., heads_k, seqlen_k, head_dim).  value: (..., heads_k, seqlen_k, head_dim_v).
        attn_mask: broadcasts to (..., heads_q, seqlen_q, seqlen_k): bool, True where visible; or values to add, in query's dtype or fp32, which
            have a gradient where they require one, and hide a pair where they are -inf; or torch's CausalBias.
        dropout_p: applied whenever it is above 0, as torch does; the random numbers are tilewise's.
        is_causal: query i sees the keys j <= i (top left, also where the lengths differ); excludes attn_mask.
        scale: None is head_dim ** -0.5.
        enable_gqa: heads_q may be a multiple of heads_k; nothing is repeated in memory.

    Returns:
        (..., heads_q, seqlen_q, head_dim_v) in query's dtype, laid out in memory as (..., seqlen_q, heads_q, head_dim_v).

    Raises:
        ArgumentError (a ShapeError and a RuntimeError, as torch's): tensors that do not fit together, or nested ones; attn_mask with is_causal; what
            tilewise.attention refuses.

    On the meta device torch's own function says the result's shape.
    """
    if query.is_meta:
        return TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    frontend = FRONTEND_GQA if enable_gqa else FRONTEND
    options, extras = Options(is_causal, scale, 0.0, dropout_p, False, None, None, None, False, frontend), Extras(attn_mask)
    added = attn_mask is None or (type(attn_mask) in MADE_OF_MEMORY and attn_mask.dtype is not torch.bool)
    if added and (known := call_cache.find(query, key, value, options, extras)) is not None:
        o = known(query, key, value, extras)
        assert isinstance(o, Tensor)  # since no LSE is asked for
        return o
    given = query, key, value
    if is_causal and attn_mask is not None:
        raise _two_masks(attn_mask)
    lead = None
    nested = query.is_nested or key.is_nested or value.is_nested
    if nested or not (query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]):
        query, key, value, lead, dropped = _batched(query, key, value)
    if not query.shape[1] == key.shape[1] == value.shape[1]:
        query, key, value = _with_heads(query, key, value, enable_gqa)
    if query.shape[3] == 0:  # scores of no products are 0
        query, key = (torch.nn.functional.pad(x, (0, 1)) for x in (query, key))
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    causal, mask, bias = False, None, None
    if attn_mask is not None:
        batch = (query.shape[0],) if lead is None else lead
        mask, bias = mask_and_bias(attn_mask, query, (*batch, query.shape[1], seqlen_q, seqlen_k), LAYER)
    elif is_causal:
        causal, mask = (True, None) if seqlen_q == seqlen_k else (False, TOP_LEFT)
    if 0 in (query.shape[1], value.shape[3]):  # nothing to compute
        o = query @ key.mT @ value
    else:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        o = attention(q, k, v, causal=causal, mask=mask, scale=scale, bias=bias, dropout_p=dropout_p).transpose(1, 2)
        as_given = all(map(operator_is, given, (query, key, value))) and (
            attn_mask is None or (bias is not None and bias.shape == attn_mask.shape)
        )
        if added and as_given:
            call = q, k, v, options._replace(causal=causal, mask=mask, frontend=""), Extras(bias)
            call_cache.bind_as(bound_call.BHSD, *given, options, extras, call)
    if lead is None:
        return o
    o = o.unflatten(0, lead)
    return o.flatten(0, dropped) if dropped else o


def _two_masks(attn_mask: object) -> ArgumentError:
    """The error of a mask together with is_causal: a ValueError and a RuntimeError, with torch's words, for torch raises either."""
    theirs = "Explicit attn_mask should not be set when is_causal=True"
    if is_causal_bias(attn_mask):
        theirs = "CausalBias should not be used with causal=True"
    return ArgumentError(
        f"{LAYER}: attn_mask must be None where is_causal is True ({theirs}); write the causal part into attn_mask, or leave it out"
    )


def _batched(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...], int]:
    """The tensors with one batch dimension, the batch dimensions that it stands for, and how many dimensions of size 1 were put in front."""
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if x.is_nested or x.dim() < 2:
            found = "a nested tensor" if x.is_nested else f"shape {tuple(x.shape)}"
            raise ShapeError(
                f"{LAYER}: {name} must be a dense tensor (..., heads, seqlen, head_dim), got {found}; pack sequences for tilewise.attention_varlen"
            )
    missing = 4 - max(x.dim() for x in tensors.values())
    full = [x[(None,) * (4 - x.dim())] if x.dim() < 4 else x for x in tensors.values()]
    lead = _broadcast([x.shape[:-3] for x in full])
    if lead is None:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ShapeError(f"{LAYER}: the batch dimensions (all but the last three) do not broadcast: {shapes}")
    q, k, v = (x if x.dim() == 4 and x.shape[:1] == lead else x.expand(*lead, *x.shape[-3:]).flatten(0, -4) for x in full)
    return q, k, v, lead, max(missing, 0)


def _broadcast(shapes: list[torch.Size]) -> tuple[int, ...] | None:
    """The shape that all broadcast to, or None: torch.broadcast_shapes raises an error that torch's compiler does not catch."""
    rank = max(map(len, shapes))
    full = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    whole = [next((size for size in sizes if size != 1), 1) for sizes in zip(*full, strict=True)]
    fits = all(got == 1 or got == size for shape in full for got, size in zip(shape, whole, strict=True))
    return tuple(whole) if fits else None


def _with_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors with heads that tilewise takes: as many for keys as for values, of which those of queries are a multiple."""
    heads_q, heads_k, heads_v = query.shape[1], key.shape[1], value.shape[1]
    most = max(heads_q, heads_k, heads_v)
    if enable_gqa and heads_k > 0 < heads_v and heads_q % heads_k == 0 == heads_q % heads_v:
        most = heads_q
    elif any(heads != 1 and heads != most for heads in (heads_q, heads_k, heads_v)):
        raise ShapeError(
            f"{LAYER}: query has {heads_q} heads, key {heads_k} and value {heads_v}; they must be equal or 1, or with enable_gqa=True those of query "
            "a multiple of the others'"
        )
    query = query.expand(-1, most, -1, -1)
    if heads_k == heads_v and most % heads_k == 0:
        return query, key, value
    key, value = (x.repeat_interleave(most // x.shape[1], dim=1) for x in (key, value))
    return query, key, value


class Patch:
    """What `patch` did; `remove()`, or the end of a `with`, undoes it."""

    def __init__(self) -> None:
        functional = torch.nn.functional
        with _lock:
            if not _patches:
                if functional.scaled_dot_product_attention is not TORCHS:
                    raise RuntimeError(_replaced("before tilewise.compat.sdpa.patch()", "or patch before that is put in place"))
                _before.update(fast=torch.backends.mha.get_fastpath_enabled())
                scripted_as(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
                functional.scaled_dot_product_attention = scaled_dot_product_attention
                torch.backends.mha.set_fastpath_enabled(False)
                renew_tables()
            _patches.append(self)

    def remove(self) -> None:
        """Put torch's function back once the last patch is removed; a second call does nothing. RuntimeError where someone else replaced ours."""
        functional = torch.nn.functional
        with _lock:
            if self not in _patches:
                return
            if len(_patches) == 1:
                if functional.scaled_dot_product_attention is not scaled_dot_product_attention:
                    raise RuntimeError(_replaced("after tilewise.compat.sdpa.patch()", "then remove()"))
                functional.scaled_dot_product_attention = TORCHS
                torch.backends.mha.set_fastpath_enabled(_before["fast"])
                renew_tables()
            _patches.remove(self)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


_patches: list[Patch] = []
_before: dict[str, bool] = {}  # what the first patch found
_lock = threading.RLock()


def _replaced(when: str, way_out: str) -> str:
    found = torch.nn.functional.scaled_dot_product_attention
    name = f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', type(found).__name__)}"
    return f"torch.nn.functional.scaled_dot_product_attention was replaced {when}; undo that first, {way_out} (found: {name})"


def patch() -> Patch:
    """Bind `torch.nn.functional.scaled_dot_product_attention` to ours, until the returned handle's `remove()` or the end of a `with patch():`.

    This reaches whoever looks the function up in torch.nn.functional when it is called: most models, torch.nn.MultiheadAttention with
    need_weights=False and torch.nn.TransformerEncoderLayer, with its fused inference path off meanwhile. It misses a
    `from torch.nn.functional import ...` made before, and C++, also that of torch.jit.script. Patch before compiling. What overrides torch's function
    (`__torch_function__`, torch.fx) overrides ours. RuntimeError where someone else replaced the function before.
    """
    return Patch()


class CpuOverride:
    """What `override_cpu` did; `remove()`, or the end of a `with`, undoes it."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", "CPU")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")  # which is what was asked for
            self._library.impl("_scaled_dot_product_flash_attention_for_cpu", cpu_forward)
            self._library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", cpu_backward)

    def remove(self) -> None:
        """Give the operators back to torch; a second call does nothing."""
        if self._library is not None:
            self._library._destroy()
            self._library = None
            _override.clear()

    def __enter__(self) -> "CpuOverride":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


_override: list[CpuOverride] = []


def override_cpu() -> CpuOverride:
    """Run the operators under torch's SDPA on CPUs with tilewise, until the returned handle's `remove()` or the end of a `with override_cpu():`.

    This reaches every call that torch's dispatcher sends to its flash kernel, from Python, C++ and compiled programs: 4-D, without dropout, equal
    head dimensions, no gradient of attn_mask. RuntimeError where it is on already.
    """
    if _override:
        raise RuntimeError("tilewise.compat.sdpa.override_cpu() is on already; remove() the handle that it returned first")
    _override.append(CpuOverride())
    return _override[0]


def cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: O laid out as query, and LSE (batch, heads, seqlen_q) laid out as its fake kernel says."""
    with torch.no_grad():  # autograd is above this
        o, lse, _ = operator.attend(_cpu_operands(query, key, value, dropout_p, is_causal, attn_mask, scale))
    return laid_out_as(o.transpose(1, 2), query), lse.transpose(1, 2).contiguous().transpose(1, 2)


def cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten::_scaled_dot_product_flash_attention_for_cpu_backward`: gradients of query, key and value."""
    given = _cpu_operands(query, key, value, dropout_p, is_causal, attn_mask, scale)._replace(grad=True)
    with torch.no_grad():
        d_q, d_k, d_v = operator.differentiate(out.transpose(1, 2), logsumexp, grad_out.transpose(1, 2), given)[:3]
    return d_q.transpose(1, 2), d_k.transpose(1, 2), d_v.transpose(1, 2)


def _cpu_operands(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> operator.Operands:
    if dropout_p > 0.0:
        raise UnsupportedError(
            "aten::_scaled_dot_product_flash_attention_for_cpu (tilewise): dropout_p must be 0; torch sends dropout elsewhere"
        )
    mask, bias = (TOP_LEFT if is_causal else Full()), None
    if attn_mask is not None:
        sizes = (*query.shape[:3], key.shape[2])
        dense, bias = mask_and_bias(attn_mask, query, sizes, "aten::_scaled_dot_product_flash_attention_for_cpu (tilewise)")
        mask = mask if dense is None else mask & dense
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options = {"dropout": (0.0, None, 0), "softcap": 0.0, "alibi_slopes": None, "sink": None, "deterministic": False, "backend": None}
    return operands(q, k, v, mask, scale=scale, bias=bias, **options)


def laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides of `torch.empty_like(like)`, which is of x's shape; x itself where it has them.

    Compiled programs rely on what torch's fake kernels say.
    """
    strides, others = x.stride(), like.stride()
    return x if strides == others or _same_order(strides, others) else torch.empty_like(like).copy_(x)


@lru_cache(1024)
def _same_order(strides: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether dimensions that descend by the others descend by the strides."""
    order = [strides[dim] for dim in sorted(range(len(others)), key=others.__getitem__, reverse=True)]
    return all(a >= b for a, b in itertools.pairwise(order))
