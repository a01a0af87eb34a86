"""The public functions: their contract, their checks, and the one operator that they all call.

Nothing here depends on a length or reads a tensor's values, so torch.compile traces it once for every length; what needs values (cu_seqlens, a dense
mask's size) is checked by the operator, before any work.
"""

from collections.abc import Mapping
from typing import Literal, Never, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilewise import errors
from tilewise.backends.eight_bits import RECIPES, TILE
from tilewise.errors import ShapeError
from tilewise.keywords import AttentionOptions
from tilewise.masks import Causal, Full, Mask, Part, PerHead
from tilewise.problem import Extras, one_sink
from tilewise.runtime import call_cache, op, operator
from tilewise.runtime.call_cache import Options
from tilewise.runtime.explain import Explanation, describe
from tilewise.runtime.plain import needs_dispatch

INDEX_DTYPES = (torch.int32, torch.int64)
IN_EIGHT_BITS_OUT = (torch.bfloat16, torch.float16, torch.float32)  # what O of 8-bit tensors may be


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], return_max_logits: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_max_logits: bool = False, **options: Unpack[AttentionOptions]
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Mask | Mapping[tuple[int, int], Mask] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    deterministic: bool = False,
    precision: str | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    out: Tensor | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Exact attention, `O = softmax(mask(s)) V` with `s = softcap * tanh(scale * Q K^T / softcap) + bias + alibi` (docs/algorithm.md, Eq. 1-3).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp32, bf16, fp16 or fp64; or float8_e4m3fn or int8, as `quantise` makes them (then v is float8_e4m3fn
            or of 16 bits, O bf16, and there is no bias, dropout or gradient).
        k: (batch, seqlen_k, heads_k, head_dim), q's dtype and device; heads_q is a multiple of heads_k, and query head h reads
            key head h // (heads_q // heads_k).
        v: (batch, seqlen_k, heads_k, head_dim_v).
        causal: query i sees key j iff j <= i + seqlen_k - seqlen_q (bottom right). With `mask`, both must allow a pair.
        mask: a mask of `tilewise.masks`, or a mapping of half-open head ranges to masks, such as `{(0, 4): Causal(), (4, 8): SlidingWindow(127, 0)}`.
        scale: multiplies the scores, a normal number of fp32 (fp64 for fp64 inputs), as scale / softcap must be, or 0; None is head_dim ** -0.5.
        softcap: bound on the scaled score, at most 1e30; 0 for none. However small it is, it is a bound: no score then counts for more than another.
        bias: (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k or 1), (heads_q or 1, seqlen_q or 1, seqlen_k or 1) or (seqlen_q or 1,
            seqlen_k or 1), q's dtype or fp32; differentiable, with a gradient of its own shape.
        alibi_slopes: (heads_q,) or (batch, heads_q); adds `-slope * |i + seqlen_k - seqlen_q - j|` (ALiBi, Press et al. 2022), by the call's lengths
            whatever the mask (`attention_varlen` counts within each document). No gradient.
        sink: (heads_q,), one more logit in each row's denominator, with no value, or (tokens, heads_q) for several; differentiable. The LSE includes
            them.
        dropout_p: probability in [0, 1) with which a pair's weight is dropped; the LSE is that of the undropped row.
        dropout_seed: key of the random numbers (Philox-4x32-10), in [0, 2**63); None draws one from torch's generator
            (inside torch.compile from the compiled program's, which differs from eager).
        dropout_offset: a second number that tells draws apart, in [0, 2**32): the same seed with another offset drops other pairs.
        deterministic: only backends with gradients that are bit-identical from run to run.
        precision: "fp8", "int8" or "int8_qk" quantises bf16 or fp16 inputs on the way: Q K^T in e4m3 or int8, P V in e4m3 or, "int8_qk", the inputs'
            dtype. It is less exact (docs/guide/eight-bits.md), and faster where a backend has kernels for it; not with a bias or dropout. Gradients
            are straight-through: those of the call without it, for which the backward pass computes O once more. None quantises nothing.
        q_scale, k_scale, v_scale: what elements of 8-bit q, k and v are multiplied by, above 0 as `quantise` makes them (nobody looks, and kernels
            count on it); None is 1. By their dimensions: () the whole tensor; (batch, heads) each head; (batch, heads, tokens) each token; of k and v
            also (batch, heads_k, ceil(seqlen_k / 128)), each 128 keys. A v of 16 bits has none.
        backend: a backend by name; it runs there or raises. None chooses (see `explain`).
        return_lse: also return the logarithm of each row's softmax denominator.
        return_max_logits: also return, last, each head's largest score, as QK-clip wants it (MuonClip, Kimi Team 2025).
        out: where O is written, shaped and typed as it, its last dimension contiguous; returned in place of a new tensor. It must share no memory
            with an input, and takes no part in a gradient. Of 8-bit inputs it may be bf16, fp16 or fp32.

    Returns:
        O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype (bf16 for inputs of 8 bits), and with `return_lse` LSE (batch, heads_q, seqlen_q),
        natural logarithm, fp32 (fp64 for fp64 inputs), differentiable. A row that sees no key gives O = 0, LSE = -inf (the sink's logit where there
        is one), zero gradients.
        With `return_max_logits` also (batch, heads_q), fp32 (fp64 for fp64 inputs), without gradient: the largest of the scores s (after scale,
        softcap, bias and ALiBi) among the pairs that the mask allows, the sink not among them, dropout or not; -inf for a head that sees no pair, NaN
        for one of which a visible score is NaN or +inf, as a clip by infinity would zero the weights without a word.

    Raises:
        ShapeError: a tensor of the wrong shape, dtype, device or layout.
        ValueError: a number, flag or name out of its range.
        UnsupportedError: no backend, or not the one asked for, can run this.
        TypeError: another keyword; the sentence says what a peer's (is_causal, attn_mask, softmax_scale, ...) is called here.

    A UserWarning, once, where q and k have more heads than tokens: SDPA's layout has heads first.
    """
    if unknown:
        errors.check_words("attention", unknown, attention.__kwdefaults__ or {})
    sink = one_sink(sink)
    options = Options(causal, scale, softcap, dropout_p, deterministic, backend, precision, mask, return_lse)
    tensors, extras = (q, k, v), Extras(bias, alibi_slopes, sink, None, None, None, q_scale, k_scale, v_scale)
    usual = return_max_logits is False and out is None
    if usual and (known := call_cache.find(q, k, v, options, extras)) is not None:
        if known.draws:
            extras = extras._replace(rng=operator.random_state(dropout_seed, dropout_offset))
        return known(q, k, v, extras)
    q, k, v, bias = autocast(q, k, v, bias)
    errors.check_qkv(q, k, v)
    errors.warn_of_heads_first(q, k)
    check_returns(return_lse, return_max_logits)
    given = operands(
        q,
        k,
        v,
        combine(causal, mask),
        scale=scale,
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        dropout=(dropout_p, dropout_seed, dropout_offset),
        deterministic=deterministic,
        backend=backend,
    )
    if return_max_logits:
        given = given._replace(row_max=True)
    if q.dtype in errors.EIGHT_BITS or not precision is q_scale is k_scale is v_scale is None:
        given = eight_bits(given, precision, (q_scale, k_scale, v_scale), out)
    if out is not None:
        check_out(out, given)
    if usual and (known := call_cache.bind(*tensors, options, given, extras)) is not None:
        return known(*tensors, extras._replace(rng=given.rng))
    o, lse, row_max = operator.attend(given, out)
    if return_max_logits:
        assert row_max is not None
        largest = _largest(row_max)
        return (o, lse, largest) if return_lse else (o, largest)
    return (o, lse) if return_lse else o


def explain(q: Tensor, k: Tensor, v: Tensor, **options) -> Explanation:
    """Which backend and tile configuration `attention(q, k, v, **options)` would use, and why the others were passed over; computes nothing.

    q, k, v and every option are those of `attention`.

    Returns:
        An `Explanation`; print it, or read its fields (backend, reasons, tiles, flops, bytes, ...).

    Raises:
        ShapeError, ValueError, UnsupportedError: as `attention` would.
    """
    known = attention.__kwdefaults__ or {}
    if unknown := options.keys() - known.keys():
        meant = "".join(f" ({name}= is {errors.WORDS[name]} here)" for name in sorted(unknown) if name in errors.WORDS)
        raise ValueError(f"explain got unknown options {sorted(unknown)}{meant}; it takes those of attention: {', '.join(known)}")
    wanted = known | options
    check_returns(wanted["return_lse"], wanted["return_max_logits"])
    seed = 0 if wanted["dropout_seed"] is None else wanted["dropout_seed"]  # nothing is drawn from torch's generator
    dropout = wanted["dropout_p"], seed, wanted["dropout_offset"]
    q, k, v, wanted["bias"] = autocast(q, k, v, wanted["bias"])
    errors.check_qkv(q, k, v)
    names = ("scale", "softcap", "bias", "alibi_slopes", "sink", "deterministic", "backend")
    mask = combine(wanted["causal"], wanted["mask"])
    given = operands(q, k, v, mask, dropout=dropout, **{name: wanted[name] for name in names})
    copied = [name for name, x in (("q", q), ("k", k), ("v", v)) if _last_dim_strided(x)]
    given = eight_bits(given, wanted["precision"], (wanted["q_scale"], wanted["k_scale"], wanted["v_scale"]), wanted["out"])
    return describe(operator.call_of(given._replace(row_max=wanted["return_max_logits"])), given.backend, copied)


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    dropout: tuple[float, int | None, int],
    scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    deterministic: bool,
    backend: str | None,
    bias: Tensor | None = None,
) -> operator.Operands:
    """Check what is not q, k, v or the mask, and arrange everything for the operator."""
    batch, _, heads_q, _ = q.shape
    errors.check_number("softcap", softcap, low=0.0, high=1e30)
    if scale is not None:
        errors.check_softmax_scale(scale, softcap, torch.float64 if q.dtype == torch.float64 else torch.float32)
    dropout_p, seed, offset = dropout
    errors.check_number("dropout_p", dropout_p, low=0.0, high=1.0, high_open=True)
    if dropout_p > 0.0 and isinstance(mask, Part) and mask.keys is not None:
        raise errors.UnsupportedError(
            f"dropout counts the pairs of a whole call, of which {mask!r:.100} has a part of the keys; leave keys= out"
        )
    errors.check_flag("deterministic", deterministic)
    if backend is not None and not isinstance(backend, str):
        raise ValueError(f"backend must be a backend's name or None, got {type(backend).__name__} {backend!r}")
    if bias is not None:
        errors.check_bias(bias, q, k.shape[1])
        bias = _spread(bias, k.shape[1])
    if alibi_slopes is not None:
        errors.check_alibi(alibi_slopes, q, batch, heads_q)
        alibi_slopes = _by_entry(alibi_slopes)
    if sink is not None:
        errors.check_sink(sink, q, heads_q)
    mask_tensors: list[Tensor] = []
    q, k, v = in_rows("q", q), in_rows("k", k), in_rows("v", v)
    return operator.Operands(
        q=q,
        k=k,
        v=v,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        diagonal=None,
        rng=operator.random_state(seed, offset) if dropout_p > 0.0 else None,
        mask=mask.text(mask_tensors),
        mask_tensors=mask_tensors,
        scale=None if scale is None else float(scale),
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        deterministic=deterministic,
        grad=operator.gradients_on() and any(x is not None and x.requires_grad for x in (q, k, v, bias, sink)),
        row_max=False,
        by_document=False,
        precision=None,
        out_dtype=None,
        backend=backend,
    )


def eight_bits(
    given: operator.Operands,
    precision: str | None,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    out: Tensor | None,
    documents: int | None = None,
) -> operator.Operands:
    """The same operands multiplied in 8 bits where that is asked for, all that concerns it checked. O is in the dtype of `out`, or bf16.

    documents: how many there are, where they are packed; they have no scales by tile, since tiles would not end where documents do.
    """
    q, k, v = given.q, given.k, given.v
    named = {"q_scale": scales[0], "k_scale": scales[1], "v_scale": scales[2]}
    if precision is not None and (not isinstance(precision, str) or precision not in RECIPES):
        raise ValueError(f"precision must be one of {', '.join(map(repr, RECIPES))} or None, got {precision!r}")
    for (name, scale), x in zip(named.items(), (q, k, v), strict=True):
        if scale is not None and x.dtype not in errors.EIGHT_BITS:
            raise ShapeError(f"{name} is for tensors of 8 bits, but {name[0]} is {x.dtype}; leave it out, or quantise {name[0]}")
    if q.dtype not in errors.EIGHT_BITS:
        if precision is None:
            return given
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise ShapeError(
                f"precision={precision!r} quantises bfloat16 and float16, but q is {q.dtype}; leave it out, or convert q, k and v"
            )
    elif precision is not None:
        raise ValueError(f"precision={precision!r} quantises tensors of 16 bits, but q is {q.dtype} already; leave precision out")
    what = f"precision={precision!r}" if precision is not None else f"q in {q.dtype}"
    ways_out = {"bias": "use a mask, alibi_slopes or softcap", "dropout_p": "leave dropout out"}
    for name, there in (("bias", given.bias is not None), ("dropout_p", given.dropout_p > 0.0)):
        if there:
            raise errors.UnsupportedError(
                f"{name} cannot be combined with {what}; {ways_out[name]}, or pass q, k and v in 16 bits, unquantised"
            )
    if precision is not None:
        return given._replace(precision=precision)
    if v.dtype not in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        raise ShapeError(
            f"v must be float8_e4m3fn, or bfloat16 or float16, beside q in {q.dtype}, got {v.dtype}; tilewise.quantise(v, 'fp8') makes it"
        )
    for name, x in (("q", q), ("k", k), ("v", v), ("sink", given.sink)):
        if x is not None:
            errors.check_no_grad(name, x, errors.NOT_IN_EIGHT_BITS)
    for (name, scale), x in zip(named.items(), (q, k, v), strict=True):
        if scale is not None:
            errors.check_scale(name, scale, x, None if name == "q_scale" or documents is not None else TILE, documents)
            named[name] = scale.float()
    out_dtype = out.dtype if isinstance(out, Tensor) and out.dtype in IN_EIGHT_BITS_OUT else torch.bfloat16
    return given._replace(out_dtype=out_dtype, grad=False, **named)


def check_out(out: Tensor, given: operator.Operands, packed: bool = False) -> None:
    """Refuse an `out` that O of these operands cannot be written to."""
    shape = (*given.q.shape[packed:-1], given.v.shape[-1])
    dtypes = IN_EIGHT_BITS_OUT if given.q.dtype in errors.EIGHT_BITS else (given.q.dtype,)
    errors.check_out(out, shape, given.q, gradient=given.grad, dtypes=dtypes)
    inputs = {name: x for name, x in op.named(given).items() if x is not None}
    if not operator.traced() and not needs_dispatch((out, *inputs.values())):
        errors.check_apart("out", out, inputs)


def check_returns(return_lse: bool, return_max_logits: bool) -> None:
    errors.check_flag("return_lse", return_lse)
    errors.check_flag("return_max_logits", return_max_logits)


def documents(
    given: operator.Operands,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    inner: Mask,
    *,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_k: Tensor | None = None,
    apart: bool = False,
) -> operator.Operands:
    """The same tensors as packed sequences, with `inner` for their mask, and what else `attention_varlen` takes; all checked but cu_seqlens.

    apart: whether each document is a call of its own in any case.
    """
    q, number, grad = given.q, cu_seqlens_q.shape[0] - 1, given.grad
    if bias is not None:
        errors.check_bias_of_documents(bias, q, number)
        bias = _spread(bias, bias.shape[-1])
        grad = grad or (operator.gradients_on() and bias.requires_grad)
    if alibi_slopes is not None:
        errors.check_alibi(alibi_slopes, q, 1, q.shape[2], number)
        alibi_slopes = _by_entry(alibi_slopes)
    by_document = apart or bias is not None or (alibi_slopes is not None and alibi_slopes.shape[0] != 1)
    mask_tensors = [cu_seqlens_q, cu_seqlens_k]
    unread = by_document or seqused_k is not None or _on_gpu(cu_seqlens_q, cu_seqlens_k)
    used = ""
    if seqused_k is not None:
        errors.check_tensor("seqused_k", seqused_k, ("documents",), INDEX_DTYPES)
        errors.check_size("seqused_k", "documents", seqused_k.shape[0], number, "cu_seqlens_q")
        mask_tensors.append(seqused_k.to(cu_seqlens_k.device))
        used = ",seqused_k=#2"
    text = f"{'DeviceDocuments' if unread else 'Documents'}(#0,#1,inner={inner.text(mask_tensors)}{used})"
    found = {"bias": bias, "alibi_slopes": alibi_slopes, "diagonal": None, "by_document": by_document, "grad": grad}
    if alibi_slopes is not None and not by_document:
        found["diagonal"] = _document_diagonal(cu_seqlens_q, cu_seqlens_k, seqused_k, q.shape[1], q.device)
    return given._replace(mask=text, mask_tensors=mask_tensors, **found)


def _on_gpu(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    """Whether to read them would be to wait."""
    return cu_seqlens_q.is_cuda and cu_seqlens_k.is_cuda


def combine(causal: bool, mask: Mask | Mapping | None) -> Mask:
    """One mask from `causal` and `mask`; both must allow a pair."""
    errors.check_flag("causal", causal)
    if isinstance(mask, Mapping):
        mask = PerHead(mask)
    if isinstance(mask, Tensor):
        raise ShapeError(
            "mask must be a tilewise mask, got a torch.Tensor; wrap a bool tensor as tilewise.Dense(mask), pass floats as bias="
        )
    if type(mask).__name__ == "BlockMask":
        raise ValueError("mask must be a tilewise mask, got torch's BlockMask; convert it with tilewise.blockmask.from_flex(mask)")
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(f"mask must be a tilewise mask, a mapping of head ranges to masks, or None, got {type(mask).__name__} {mask!r}")
    if mask is None:
        return Causal() if causal else Full()
    return mask & Causal() if causal else mask


def autocast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and a bias that is not fp32, in the dtype of a surrounding torch.autocast region, as torch casts for its own attention."""
    if not isinstance(q, Tensor) or q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(q.device.type)

    if not is_compiling():
        errors.check_memory(q=q, k=k, v=v, bias=bias)

    def cast(x):
        return x.to(dtype) if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.bfloat16, torch.float16) else x

    return cast(q), cast(k), cast(v), bias if isinstance(bias, Tensor) and bias.dtype == torch.float32 else cast(bias)


def _by_entry(slopes: Tensor) -> Tensor:
    """Checked slopes as (batch or 1, heads_q) fp32."""
    return (slopes if slopes.dim() == 2 else slopes[None]).float()


def _spread(bias: Tensor, seqlen_k: int) -> Tensor:
    """A checked bias as (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k): a view; torch sums its gradient up to that of the bias given."""
    if bias.dim() == 4 and bias.shape[3] == seqlen_k:
        return bias
    if not is_compiling():
        errors.check_memory(bias=bias)  # of which there are no views
    return bias[(None,) * (4 - bias.dim())].expand(-1, -1, -1, seqlen_k)


def _last_dim_strided(x: Tensor) -> bool:
    return x.shape[-1] > 1 and x.stride(-1) != 1


def in_rows(name: str, x: Tensor) -> Tensor:
    """x, or a copy where the elements of a row lie apart."""
    if not _last_dim_strided(x):
        return x
    if not is_compiling():
        errors.check_memory(**{name: x})
    return x.contiguous()


def _document_diagonal(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None, total_q: int, device: torch.device) -> Tensor:
    """(total_q,) int64: for a query of document d, the end of its keys minus the end of its queries (see `Call.diagonal`)."""
    ends_q, ends_k = (cu[1:].to(device, torch.int64) for cu in (cu_seqlens_q, cu_seqlens_k))
    if seqused_k is not None:
        ends_k = (cu_seqlens_k[:-1] + seqused_k.to(cu_seqlens_k.device)).to(device, torch.int64)
    if ends_q.shape[0] == 0:
        return ends_q.new_zeros(total_q)
    return (ends_k - ends_q)[_document_of(ends_q, total_q)]


def _document_of(ends: Tensor, total: int) -> Tensor:
    """(total,) int64: the document of each token, from the documents' ends, (documents,) int64; the last one's for those behind it."""
    document = torch.searchsorted(ends, torch.arange(total, dtype=torch.int64, device=ends.device), right=True)
    return document.clamp(max=ends.shape[0] - 1)


def _largest(row_max: Tensor) -> Tensor:
    """(..., heads_q) of (..., heads_q, seqlen_q): NaN where a row has it, -inf where there are no rows."""
    return torch.nn.functional.pad(row_max.detach(), (1, 0), value=-torch.inf).amax(-1)


def largest_of_documents(row_max: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """(documents, heads_q) of (heads_q, total_q), likewise; tokens after the last document see nothing, and have -inf."""
    heads, total = row_max.shape
    ends = cu_seqlens_q[1:].to(row_max.device, torch.int64)
    largest = row_max.new_full((ends.shape[0], heads), -torch.inf)
    if ends.shape[0] == 0:
        return largest
    document = _document_of(ends, total)[:, None].expand(total, heads)
    return largest.scatter_reduce(0, document, row_max.detach().T, "amax")
