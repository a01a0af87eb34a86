"""The forward and backward passes apart, as `flash_attn.flash_attn_interface` has them for those who write their own autograd around them.

Arguments are those of `tilewise.compat.flash_attn`, windows two numbers. LSE has +inf for rows that see no key, both ways. rng_state (2,) int64 is
the seed and offset of dropout's random numbers, which the backward pass needs. Gradients are written into dq, dk, dv where these are given.
"""

from typing import TypedDict

import torch
from torch import Tensor

from tilewise import api
from tilewise.compat import _kvcache
from tilewise.compat import _translate as translate
from tilewise.compat._refusals import translate_errors
from tilewise.compat.flash_attn import PAGES, SCALE
from tilewise.errors import ShapeError, UnsupportedError, check_number, check_qkv, check_size
from tilewise.masks import Full
from tilewise.masks.constructors import check_lengths
from tilewise.runtime import operator

__all__ = ["_flash_attn_backward", "_flash_attn_forward", "_flash_attn_varlen_backward", "_flash_attn_varlen_forward"]


@translate_errors(**SCALE)
def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
):
    """out, softmax_lse (batch, heads, seqlen_q), S_dmask (empty) and rng_state; nothing is recorded for gradients."""
    given = translate.options(causal, (window_size_left, window_size_right), softmax_scale, softcap, alibi_slopes=alibi_slopes)
    rng_state = _draw(dropout_p, return_softmax)
    with torch.no_grad():
        out, lse = translate.attend(q, k, v, given, **_dropout(dropout_p, rng_state))
    return out, translate.positive_infinity(lse), q.new_empty(0), rng_state


@translate_errors(**PAGES)
def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
    num_splits=0,
):
    """out, softmax_lse (heads, total_q), S_dmask (empty) and rng_state; nothing is recorded for gradients.

    seqused_k: (batch,), how many keys of each sequence count. leftpad_k: (batch,), how many of those to leave out at its begin.
    """
    given = translate.options(causal, (window_size_left, window_size_right), softmax_scale, softcap, alibi_slopes=alibi_slopes)
    rng_state = _draw(dropout_p, return_softmax)
    if leftpad_k is not None:
        raise UnsupportedError(
            "leftpad_k is not supported; give cu_seqlens_k that begin behind the padding, or call flash_attn_with_kvcache"
        )
    with torch.no_grad():
        if block_table is not None:
            if translate.integer("num_splits", num_splits, "an integer, 0 for any number") > 1:
                raise UnsupportedError("num_splits > 1 is not supported together with block_table; leave it 0")
            lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
            k, v, cu_seqlens_k = _kvcache.Cache.of(k, v, lengths.shape[0], lengths, page_table=block_table).packed()
            seqused_k = None
        lengths = translate.Packed(cu_seqlens_q), translate.Packed(cu_seqlens_k, seqused_k)
        out, lse = translate.attend_packed(q, k, v, *lengths, given, **_dropout(dropout_p, rng_state))
    return out, translate.positive_infinity(lse), q.new_empty(0), rng_state


@translate_errors(**SCALE)
def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    """Write dq, dk, dv from what `_flash_attn_forward` took and returned; returns rowsum(dout out), (batch, heads, seqlen_q) fp32."""
    given = translate.options(causal, (window_size_left, window_size_right), softmax_scale, softcap, alibi_slopes=alibi_slopes)
    check_qkv(q, k, v)
    mask = api.combine(given.causal, given.mask)
    write((dout, out, softmax_lse), (dq, dk, dv), operands(q, k, v, mask, given, dropout_p, rng_state, deterministic))
    return (dout.float() * out.float()).sum(-1).transpose(1, 2)


@translate_errors(**SCALE)
def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    """`_flash_attn_backward` of packed sequences; returns (heads, total_q) fp32."""
    given = translate.options(causal, (window_size_left, window_size_right), softmax_scale, softcap, alibi_slopes=alibi_slopes)
    check_qkv(q, k, v, packed=True)
    lengths = translate.Packed(cu_seqlens_q), translate.Packed(cu_seqlens_k)
    write_packed((dout, out, softmax_lse), (q, k, v), lengths, (dq, dk, dv), given, dropout_p, rng_state, deterministic)
    return (dout.float() * out.float()).sum(-1).transpose(0, 1)


_wrapped_flash_attn_forward, _wrapped_flash_attn_backward = _flash_attn_forward, _flash_attn_backward
_wrapped_flash_attn_varlen_forward, _wrapped_flash_attn_varlen_backward = _flash_attn_varlen_forward, _flash_attn_varlen_backward


def _draw(dropout_p: float, return_softmax: bool) -> Tensor:
    """A new rng_state from torch's generator; zeros without dropout."""
    check_number("dropout_p", dropout_p, 0.0, 1.0, high_open=True)
    if return_softmax and dropout_p > 0.0:
        raise UnsupportedError("return_softmax=True is not supported, for S_dmask is the whole score matrix; leave it False")
    state = torch.zeros(2, dtype=torch.int64, device="cpu")
    if dropout_p > 0.0:
        state[0] = torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")
    return state


class Dropout(TypedDict, total=False):
    """In the names of `attention`."""

    dropout_p: float
    dropout_seed: int
    dropout_offset: int


def _dropout(dropout_p: float, rng_state: Tensor | None) -> Dropout:
    if dropout_p == 0.0:
        return {}
    if rng_state is None:
        raise ValueError("rng_state must be given with dropout_p > 0: it is the fourth result of the forward pass")
    seed, offset = rng_state.tolist()
    return {"dropout_p": dropout_p, "dropout_seed": seed, "dropout_offset": offset}


def operands(
    q: Tensor, k: Tensor, v: Tensor, mask, given: translate.Options, dropout_p=0.0, rng_state: Tensor | None = None, deterministic=False
):
    """What the backward operator takes other than O, LSE and their gradients."""
    dropout = _dropout(dropout_p, rng_state)
    with torch.no_grad():
        found = api.operands(
            q,
            k,
            v,
            mask,
            dropout=(dropout_p, dropout.get("dropout_seed", 0), dropout.get("dropout_offset", 0)),
            scale=given.scale,
            softcap=given.softcap,
            alibi_slopes=given.alibi_slopes,
            sink=None,
            deterministic=bool(deterministic),
            backend=None,
        )
    return found._replace(grad=True)


def places(qkv: tuple[Tensor, Tensor, Tensor], given: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Where the gradients of q, k and v go: what is given, else new tensors."""
    dq, dk, dv = (torch.empty_like(x) if into is None else into for x, into in zip(qkv, given, strict=True))
    return dq, dk, dv


def write_packed(
    passed: tuple[Tensor, ...],
    qkv: tuple[Tensor, ...],
    lengths: tuple[translate.Packed, ...],
    wanted: tuple,
    given: translate.Options,
    *how,
) -> None:
    """`write` of packed sequences (total, ...): 0 before the first one. `how`: dropout_p, rng_state and deterministic, as `operands`."""
    q, k, v = qkv
    of_q, of_k = lengths
    try:
        check_lengths(of_q.cu_seqlens, of_k.cu_seqlens, q.shape[0], k.shape[0])
        firsts = 0, 0
    except ShapeError:
        firsts = translate.first_tokens(of_q.cu_seqlens, of_k.cu_seqlens)
    rows, keys = firsts
    whole = operands(q[None, rows:], k[None, keys:], v[None, keys:], Full(), given._replace(alibi_slopes=None), *how)
    cu_q, cu_k, used = translate.in_use(of_q.without(rows), of_k.without(keys))
    packed = api.documents(whole, cu_q, cu_k, api.combine(given.causal, given.mask), alibi_slopes=given.alibi_slopes, seqused_k=used)
    for into, first in zip(wanted, (rows, keys, keys), strict=True):
        if into is not None and first:
            into[:first] = 0
    wanted = tuple(x[first:] if x is not None and first else x for x, first in zip(wanted, (rows, keys, keys), strict=True))
    dout, out, lse = passed
    write((dout[None, rows:], out[None, rows:], lse[None, :, rows:]), wanted, packed)


def write(passed: tuple[Tensor, Tensor, Tensor], wanted: tuple[Tensor | None, ...], given: operator.Operands) -> None:
    """Gradients of `given` from the (dout, out, softmax_lse) that were passed, into those wanted."""
    dout, out, lse = passed
    check_size("dout", "shape", dout.shape, out.shape, "out")
    with torch.no_grad():
        lse = translate.negative_infinity(lse)
        found = operator.backward(out, lse, dout, None, False, *given)
        for gradient, into in zip(found, wanted, strict=False):
            if into is not None:
                into.copy_(gradient.view(into.shape))
