"""The two error types, and the checks that every public function runs before any work.

Every message names the argument, what was given, what is expected and, where there is one, the way out.
"""

import math
import sys
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import TracerWarning  # pyright: ignore[reportPrivateImportUsage]  (torch documents it, and does not list it)

from tilewise.tangents import has_tangent

# Sizes are tensors under torch.jit.trace, which warns of every comparison that they decide something. Here they decide about errors alone.
warnings.filterwarnings("ignore", category=TracerWarning, module=r"tilewise\.(errors|api|decoding)$")

NOT_IN_EIGHT_BITS = "numbers of 8 bits and their scales have no gradient (16-bit tensors with precision= have one)"
MADE_OF_MEMORY = (Tensor, torch.nn.Parameter)  # subclasses keep their elements where they like
_ELSEWHERE = tuple(map(torch._C._dispatch_key_parse, ("ZeroTensor", "Functionalize")))  # and so do these
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)  # elements that a scale goes with


_CAUSAL = "causal=True (bottom right where the lengths differ; mask=tilewise.Causal('top_left') is SDPA's)"
_MASK = "mask=tilewise.Dense(...) for a bool tensor (True: visible), bias= for numbers to add"
_DROPOUT, _SCALE, _SOFTCAP, _SINK = "dropout_p=", "scale=", "softcap=", "sink="
_WINDOW = "mask=tilewise.SlidingWindow(left, right), which counts the keys before and after a query's own"
_GROUPS = "nothing: heads_q may be a multiple of heads_k as it is"
_LSE = "return_lse=True"
WORDS = {  # what others call arguments, and what does that here
    "is_causal": _CAUSAL, "use_causal_mask": _CAUSAL,
    "attn_mask": _MASK, "attention_mask": _MASK, "custom_mask": _MASK, "key_padding_mask": "mask=tilewise.Padding(lengths)",
    "attn_bias": "bias=", "block_mask": "mask=tilewise.blockmask.from_flex(block_mask)",
    "score_mod": "bias=, alibi_slopes= or softcap=, or tilewise.compat.flex.flex_attention",
    "dropout": _DROPOUT, "attn_dropout": _DROPOUT, "attention_dropout": _DROPOUT, "p": _DROPOUT,
    "softmax_scale": _SCALE, "sm_scale": _SCALE, "scaling": _SCALE, "attn_scale": _SCALE, "qk_scale": _SCALE,
    "window_size": _WINDOW, "sliding_window": _WINDOW, "local_window_size": _WINDOW, "window_left": _WINDOW, "window_right": _WINDOW,
    "window": _WINDOW, "attention_chunk": "mask=tilewise.Chunks(...)",
    "enable_gqa": _GROUPS, "pack_gqa": _GROUPS, "num_key_value_groups": _GROUPS,
    "logits_soft_cap": _SOFTCAP, "soft_cap": _SOFTCAP, "logit_softcap": _SOFTCAP, "attn_logit_softcapping": _SOFTCAP,
    "alibi": "alibi_slopes=", "sinks": _SINK, "s_aux": _SINK, "learnable_sink": _SINK,
    "q_descale": "q_scale=", "k_descale": "k_scale=", "v_descale": "v_scale=",
    "return_attn_probs": _LSE, "return_softmax_lse": _LSE, "need_weights": _LSE,
    "max_seqlen_q": "nothing: lengths are found from cu_seqlens_q", "max_seqlen_k": "nothing: lengths are found from cu_seqlens_k",
    "block_table": "page_table=", "seqlens_k": "cache_seqlens= of decode", "num_splits": "nothing, or split= of decode",
}  # fmt: skip
_said: set[str] = set()  # warnings that are given once


class ShapeError(ValueError):
    """An argument has the wrong shape, dtype, device, layout or length."""


class UnsupportedError(NotImplementedError):
    """The problem is well posed, but nothing here can compute it (or the backend asked for cannot)."""


def check_tensor(name: str, x: object, axes: tuple[str, ...], dtypes: tuple[torch.dtype, ...] = DTYPES, memory: bool = True) -> None:
    """Refuse what is not a dense, strided tensor that holds data, has the named axes and one of `dtypes`.

    Whether it has memory is left to the operators where not `memory`: for what reaches them as it is.
    """
    if not isinstance(x, Tensor):
        raise ShapeError(f"{name} must be a torch.Tensor of shape ({', '.join(axes)}), got {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        layout = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        way_out = "attention_varlen for packed sequences" if x.is_nested else f"{name}.to_dense()"
        raise ShapeError(f"{name} must be a dense strided tensor, got {layout}; use {way_out}")
    if x.is_meta:
        raise ShapeError(f"{name} is on the meta device, which holds no data; trace shapes with torch.compile or torch.export instead")
    if memory and not is_compiling() and _freed(x):
        check_memory(**{name: x})
    if x.dim() != len(axes):
        raise ShapeError(f"{name} must have {len(axes)} dimensions ({', '.join(axes)}), got {x.dim()} with shape {tuple(x.shape)}")
    if x.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ShapeError(f"{name} must be {expected}, got {str(x.dtype).removeprefix('torch.')}; convert it with {name}.to(...)")


def check_words(function: str, unknown: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """TypeError, as Python's, for keywords that the public `function` has not; it says which of the `known` ones are meant."""
    for name in unknown:
        word = WORDS.get(name, "")
        ours, is_keyword, _ = word.partition("=")
        meant = word and (not is_keyword or ours in known or not ours.isidentifier())
        way_out = f"{name}= is {word} here" if meant else f"it takes {', '.join(known)}"
        raise TypeError(f"{function}() got an unexpected keyword argument '{name}': {way_out}")


def warn_of_heads_first(q: Tensor, k: Tensor) -> None:
    """Warn once where a user's q and k have more heads than tokens, as SDPA's (batch, heads, seqlen, head_dim) read here."""
    if is_compiling() or "heads first" in _said or not (q.shape[2] > q.shape[1] and k.shape[2] > k.shape[1]):
        return
    if sys._getframe(2).f_globals.get("__name__", "").startswith("tilewise."):  # our drop-ins, which know their layout
        return
    _said.add("heads first")
    warnings.warn(
        f"q {tuple(q.shape)} and k {tuple(k.shape)} have more heads than tokens: tilewise reads (batch, seqlen, heads, head_dim). If they are "
        "(batch, heads, seqlen, head_dim), as SDPA has them, pass q.transpose(1, 2) and so on, or call "
        "tilewise.compat.sdpa.scaled_dot_product_attention. This is said once",
        stacklevel=3,
    )


def check_memory(**tensors: Tensor | None) -> None:
    """Refuse a tensor that gave its memory back and has only its shape left."""
    for name, x in tensors.items():
        if x is not None and _freed(x):
            raise ShapeError(
                f"{name} of shape {tuple(x.shape)} has no memory: its storage was resized to 0, as sharded training does with weights that it does "
                "not hold; gather it before the call, and keep it until the gradient is there"
            )


def check_capture(x: Tensor, what: str, way_out: str) -> None:
    """Refuse what reads x or such tensors on the host, where a CUDA graph is being captured."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{what} reads values on the host, which a CUDA graph that is being captured cannot hold; {way_out}")


def _freed(x: Tensor) -> bool:
    try:
        return (
            type(x) in MADE_OF_MEMORY and x.data_ptr() == 0 and x.numel() > 0 and not any(map(torch._C._dispatch_keys(x).has, _ELSEWHERE))
        )
    except RuntimeError:  # it never had any
        return False


def check_like(name: str, x: Tensor, q: Tensor, same_dtype: bool = True, other: str = "q") -> None:
    """Refuse a tensor on another device than q's (called `other` in the message), or of another dtype."""
    if x.device != q.device:
        raise ShapeError(f"{name} is on {x.device}, but {other} is on {q.device}; move it with {name}.to({other}.device)")
    if same_dtype and x.dtype != q.dtype:
        raise ShapeError(f"{name} is {x.dtype}, but {other} is {q.dtype}; convert it with {name}.to({other}.dtype)")


def check_size(name: str, axis: str, got: int | torch.Size, expected: int | torch.Size, source: str) -> None:
    if got != expected:
        raise ShapeError(f"{name} has {axis} {got}, but {source} has {axis} {expected}; they must be equal")


def check_heads(heads_q: int, heads_k: int) -> None:
    if 0 in (heads_q, heads_k) or heads_q % heads_k != 0:
        raise ShapeError(
            f"q has heads_q={heads_q} and k has heads_k={heads_k}; heads_q must be a multiple of heads_k, and not 0 "
            "(each key head serves a whole group)"
        )


def check_head_dim(head_dim: int, head_dim_v: int) -> None:
    if head_dim == 0 or head_dim_v == 0:
        raise ShapeError(f"head_dim={head_dim} (q, k) and head_dim_v={head_dim_v} (v) must be at least 1")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, packed: bool = False) -> None:
    """q, k, v of one call: (batch, seqlen, heads, dim), or (total, heads, dim) where sequences are packed."""
    lead = (("total_q",), ("total_k",)) if packed else (("batch", "seqlen_q"), ("batch", "seqlen_k"))
    dtypes = DTYPES if isinstance(q, Tensor) and q.dtype in DTYPES else (*DTYPES, *EIGHT_BITS)
    check_tensor("q", q, (*lead[0], "heads_q", "head_dim"), dtypes, memory=packed)
    check_tensor("k", k, (*lead[1], "heads_k", "head_dim"), dtypes, memory=packed)
    check_tensor("v", v, (*lead[1], "heads_k", "head_dim_v"), dtypes, memory=packed)
    check_like("k", k, q)
    check_like("v", v, q, same_dtype=dtypes is DTYPES)
    if not packed:
        check_size("k", "batch", k.shape[0], q.shape[0], "q")
        check_size("v", "batch", v.shape[0], q.shape[0], "q")
    check_size("v", lead[1][-1], v.shape[-3], k.shape[-3], "k")
    check_size("v", "heads_k", v.shape[-2], k.shape[-2], "k")
    check_size("k", "head_dim", k.shape[-1], q.shape[-1], "q")
    check_heads(q.shape[-2], k.shape[-2])
    check_head_dim(q.shape[-1], v.shape[-1])


def check_local(tensors: Mapping[str, Tensor | None], function: str = "attention") -> None:
    """Refuse a distributed tensor: torch knows no rule by which the results of the public `function` are distributed."""
    for name, x in tensors.items():
        if type(x).__name__ == "DTensor":
            raise UnsupportedError(
                f"{name} is a DTensor, which {function} does not take; call it on the local parts: "
                f"torch.distributed.tensor.experimental.local_map(tilewise.{function}, ...), which works for parts of the batch and of the heads"
            )


def check_number(name: str, x: float, low: float = -math.inf, high: float = math.inf, high_open: bool = False) -> None:
    """Refuse what is not a finite real number in [low, high] (or [low, high) where `high_open`)."""
    if type(x) not in (float, int) and (isinstance(x, bool) or not isinstance(x, Real | torch.SymFloat | torch.SymInt)):
        raise ValueError(f"{name} must be a number, got {type(x).__name__} {x!r}")
    if type(x) is int:
        x = float(x) if abs(x) < 2**1000 else math.inf
    finite = -math.inf < x < math.inf  # in this form torch.compile can trace it for a symbolic number
    if not (finite and low <= x and (x < high if high_open else x <= high)):
        interval = (
            f" in [{low:g}, {high:g}{')' if high_open else ']'}" if math.isfinite(high) else f" >= {low:g}" if math.isfinite(low) else ""
        )
        raise ValueError(f"{name} must be a finite number{interval}, got {x}")


def check_softmax_scale(scale: float, softcap: float, computed_in: torch.dtype) -> None:
    """Refuse a scale beyond the dtype that it is computed in; also one so small, alone or over its softcap, that processors may take it for 0."""
    held = torch.finfo(computed_in)
    check_number("scale", scale, low=-held.max, high=held.max)
    least = held.tiny * max(softcap, 1.0)
    if -least < scale < least and scale != 0:
        over = " over the softcap" if softcap > 1.0 else ""
        raise ValueError(f"scale{over} must be 0 or at least {held.tiny:g} in magnitude, got {scale:g}{over and f' over {softcap:g}'}")


def check_flag(name: str, x: bool) -> None:
    if not isinstance(x, bool):
        raise ValueError(f"{name} must be True or False, got {type(x).__name__} {x!r}")


def check_bias(bias: Tensor, q: Tensor, seqlen_k: int) -> None:
    """bias of 2 to 4 dimensions that broadcasts to (batch, heads_q, seqlen_q, seqlen_k), in q's dtype or fp32."""
    check_bias_tensor(bias, q, ("batch or 1", "heads_q or 1", "seqlen_q or 1", "seqlen_k or 1"))
    batch, seqlen_q, heads_q, _ = q.shape
    sizes = (("batch", batch), ("heads_q", heads_q), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k))
    for got, (axis, size) in zip(bias.shape, sizes[4 - bias.dim() :], strict=True):
        if got != 1 and got != size:
            raise ShapeError(f"bias has {axis} {got}, expected {size} or 1 (broadcast); its shape is {tuple(bias.shape)}")


def check_bias_tensor(bias: Tensor, q: Tensor, axes: tuple[str, str, str, str]) -> None:
    """Refuse a bias that has not the last 2, 3 or all of `axes`, or another dtype than q's or fp32; sizes are not looked at."""
    dims = bias.dim() if isinstance(bias, Tensor) and bias.layout == torch.strided and not bias.is_nested else 4
    if dims not in (2, 3, 4):
        shape = tuple(bias.shape)
        raise ShapeError(f"bias must have 2, 3 or 4 dimensions, the last of ({', '.join(axes)}), got {dims} with shape {shape}")
    check_tensor("bias", bias, axes[4 - dims :], memory=False)
    check_like("bias", bias, q, same_dtype=bias.dtype != torch.float32)


def check_bias_of_documents(bias: Tensor, q: Tensor, documents: int) -> None:
    """bias of packed documents of lengths that are not known yet: the last 2 to 4 of (documents or 1, heads_q or 1, queries or 1, keys or 1)."""
    check_bias_tensor(bias, q, ("documents or 1", "heads_q or 1", "max_seqlen_q or 1", "max_seqlen_k or 1"))
    sizes = (("documents", documents), ("heads_q", q.shape[-2]))
    for got, (axis, size) in zip(bias.shape[:-2], sizes[4 - bias.dim() :], strict=True):
        if got != 1 and got != size:
            raise ShapeError(f"bias has {axis} {got}, expected {size} or 1 (broadcast); its shape is {tuple(bias.shape)}")


def check_scale(name: str, scale: Tensor, x: Tensor, tile: int | None, documents: int | None) -> None:
    """The scale of x (batch, tokens, heads, dim) in 8 bits: (), (batch, heads), (batch, heads, tokens) or, with a tile, (batch, heads, tiles).

    Of a batch of 1 that is packed documents, the second may be (documents, heads).
    """
    of, (batch, tokens, heads, _) = name[0], x.shape
    last = "tokens" if tile is None else f"tokens, or of {tile}"
    dims = scale.dim() if isinstance(scale, Tensor) and not scale.is_nested else 0
    if dims not in (0, 2, 3):
        raise ShapeError(f"{name} must be (), (batch, heads) or (batch, heads, {last}), got shape {tuple(scale.shape)}")
    check_tensor(name, scale, ("batch", "heads", last)[:dims])
    check_like(name, scale, x, same_dtype=False, other=of)
    check_no_grad(name, scale, NOT_IN_EIGHT_BITS)
    if documents is not None and dims == 2 and scale.shape[0] != 1:
        check_size(name, "documents", scale.shape[0], documents, "cu_seqlens_q")
        batch = documents
    for axis, got, expected in zip(("batch", "heads"), scale.shape[:2], (batch, heads), strict=False):
        check_size(name, axis, got, expected, of)
    if dims == 3 and scale.shape[2] != tokens and (tile is None or scale.shape[2] != -(-tokens // tile)):
        tiles = "" if tile is None else f", or one for each of its {-(-tokens // tile)} x {tile}"
        raise ShapeError(f"{name} has {scale.shape[2]} scales a head, but {of} has {tokens} tokens; it must have one for each{tiles}")


def check_out(out: Tensor, shape: tuple[int, ...], q: Tensor, gradient: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse an `out` of another shape or device than the result's, or none of its dtypes, in which elements share memory, or where a gradient is
    wanted.
    """
    axes = ("batch", "seqlen_q", "heads_q", "head_dim_v") if len(shape) == 4 else ("total_q", "heads_q", "head_dim_v")
    check_tensor("out", out, axes)
    if gradient or out.requires_grad:
        which = "an input requires grad" if gradient else "it requires grad itself"
        raise ValueError(f"out takes no part in a gradient, but {which}; call under torch.no_grad(), or leave out= away")
    if out.dtype not in dtypes or out.device != q.device or tuple(out.shape) != shape:
        found = f"{tuple(out.shape)} {out.dtype} on {out.device}"
        kinds = " or ".join(map(str, dtypes))
        raise ShapeError(f"out must be {shape} {kinds} on {q.device}, as the result is, got {found}; allocate it with torch.empty")
    if (out.shape[-1] > 1 and out.stride(-1) != 1) or meets_itself(out):
        raise ShapeError(
            f"out has strides {tuple(out.stride())} for shape {shape}; its last dimension must be contiguous, and no two numbers may share memory"
        )


def meets_itself(x: Tensor) -> bool:
    """Whether elements of x may share memory: whether a step along one dimension does not pass over all that lies in smaller steps."""
    if x.is_contiguous():  # as caches mostly are: the rest takes 5 us
        return False
    steps = [(step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]  # unsorted: symbols, where it is traced
    reach = [sum([step * (size - 1) for j, (step, size) in enumerate(steps) if j != i and step <= far]) for i, (far, _) in enumerate(steps)]
    return any([step <= inner for (step, _), inner in zip(steps, reach, strict=True)])


def check_apart(name: str, x: Tensor, others: Mapping[str, Tensor], what: str = "read while it is written") -> None:
    """Refuse a tensor that shares memory with others, which are `what`; tensors that take turns in one buffer are apart."""
    for other, y in others.items():
        if x.device == y.device and _meet(x, y):
            raise ShapeError(f"{name} shares memory with {other}, which is {what}; pass a tensor of its own")


def _meet(x: Tensor, y: Tensor) -> bool:
    """Whether elements of the two may lie at the same address."""
    if not (x.numel() and y.numel()):
        return False
    whole = sum(each.element_size() * max(each.stride(), default=1) * max(each.shape, default=1) for each in (x, y))
    start = min(x.data_ptr(), y.data_ptr())
    far = whole + abs(x.data_ptr() - y.data_ptr())
    periods = {step * x.element_size() for step, size in zip(x.stride(), x.shape, strict=True) if size > 1}
    return all(_slots_meet(_slot(x, start, period), _slot(y, start, period)) for period in (*periods, far))


def _slot(x: Tensor, start: int, period: int) -> tuple[int, int] | None:
    """The bytes [begin, end) that x takes of every `period` bytes from `start` on, as q takes of a projection's rows; None where it is irregular."""
    steps = [(step * x.element_size(), size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    begin = (x.data_ptr() - start) % period
    end = begin + x.element_size() + sum(step * (size - 1) for step, size in steps if step < period)
    return None if end > period or any(step % period for step, _ in steps if step >= period) else (begin, end)


def _slots_meet(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return one is None or other is None or (one[0] < other[1] and other[0] < one[1])


def check_no_grad(name: str, x: Tensor, reason: str) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name} requires grad, but {reason}; pass {name}.detach()")


def check_no_tangent(name: str, x: Tensor, reason: str) -> None:
    """Refuse a tensor of forward-mode differentiation: its tangent would be lost."""
    if has_tangent(x):
        raise ValueError(f"{name} has a forward-mode tangent, but {reason}; pass torch.autograd.forward_ad.unpack_dual({name}).primal")


def check_alibi(slopes: Tensor, q: Tensor, batch: int, heads_q: int, documents: int | None = None) -> None:
    """alibi_slopes (heads_q,) or (batch, heads_q); of packed documents (documents, heads_q)."""
    first, number = ("batch", batch) if documents is None else ("documents", documents)
    check_tensor("alibi_slopes", slopes, (first, "heads_q") if isinstance(slopes, Tensor) and slopes.dim() == 2 else ("heads_q",))
    check_like("alibi_slopes", slopes, q, same_dtype=False)
    check_no_grad("alibi_slopes", slopes, "ALiBi slopes have no gradient here")
    check_size("alibi_slopes", "heads_q", slopes.shape[-1], heads_q, "q")
    if slopes.dim() == 2 and slopes.shape[0] != 1:
        check_size("alibi_slopes", first, slopes.shape[0], number, "q" if documents is None else "cu_seqlens_q")


def check_sink(sink: Tensor, q: Tensor, heads_q: int) -> None:
    """sink (heads_q,): one logit a head."""
    check_tensor("sink", sink, ("heads_q",), memory=False)
    check_like("sink", sink, q, same_dtype=False)
    check_size("sink", "heads_q", sink.shape[0], heads_q, "q")
