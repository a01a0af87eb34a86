"""Packed documents with a bias, slopes of ALiBi or scales of 8-bit elements of their own, or that are to have their own bits: within the operators, a
call for each document.

Document d is computed by its own lengths. Its random numbers of dropout count positions within it, and have d added to their offset, so that no two
documents drop the same pairs.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import ShapeError
from tilewise.masks import DeviceDocuments, Full
from tilewise.problem import Call, Gradients
from tilewise.runtime.dispatch import choose


class Piece(NamedTuple):
    """One document's call, and what of the packed tensors it is; `bias` is the part of the packed call's bias, before it spreads over keys."""

    call: Call
    queries: slice
    keys: slice
    bias: tuple[slice, ...] | None


def forward(call: Call, backend: str | None) -> tuple[Tensor, ...]:
    """As `Backend.forward`, of packed documents: a call with the mask `DeviceDocuments`, alibi_slopes (documents or 1, heads_q) and bias
    (documents or 1, heads_q or 1, queries or 1, keys or 1), by the place in a document, no smaller than the longest.
    """
    found = [choose(piece.call.problem, backend).forward(piece.call) for piece in _pieces(call)]
    o, *statistics = zip(*found, strict=True)
    return torch.cat(o, dim=1), *(torch.cat(each, dim=2) for each in statistics)


def backward(
    call: Call, backend: str | None, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False
) -> Gradients:
    """As `Backend.backward`, likewise. A bias or sink that several documents share has its gradient summed up in fp32."""
    dq, dk, dv = (torch.zeros_like(x) for x in (call.q, call.k, call.v))
    d_bias = _zeros(call.bias) if bias_grad and call.bias is not None else None
    d_sink = None if call.sink is None else _zeros(call.sink)
    for piece in _pieces(call):
        rows = piece.queries
        reaching = lse[:, :, rows], d_o[:, rows], None if d_lse is None else d_lse[:, :, rows]
        wanted = d_bias is not None and piece.bias is not None
        found = choose(piece.call.problem, backend).backward(piece.call, o[:, rows], *reaching, bias_grad=wanted)
        dq[:, rows], dk[:, piece.keys], dv[:, piece.keys] = found[:3]
        if d_bias is not None and piece.bias is not None:
            assert found.bias is not None
            part = d_bias[piece.bias]
            part += found.bias.to(d_bias.dtype).sum_to_size(part.shape)
        if d_sink is not None:
            assert found.sink is not None
            d_sink += found.sink
    return Gradients(dq, dk, dv, _as(call.bias, d_bias), _as(call.sink, d_sink))


def _pieces(call: Call) -> Iterator[Piece]:
    """The documents that have queries, and the queries after the last one, which see nothing."""
    mask = call.mask
    assert isinstance(mask, DeviceDocuments)
    mask.check(call.seqlen_q, call.seqlen_k)
    last = 0
    for number, (q0, q1, k0, k1) in enumerate(mask.documents()):
        last = q1
        if q0 < q1:
            dropout = call.dropout and call.dropout._replace(offset=(call.dropout.offset + number) % 2**32)
            bias = None if call.bias is None else _part(call.bias, number, q1 - q0, k1 - k0)
            slopes = call.alibi_slopes
            more = {
                "mask": mask.inner,
                "dropout": dropout,
                "alibi_slopes": slopes if slopes is None or slopes.shape[0] == 1 else slopes[number : number + 1],
                "bias": None if bias is None or call.bias is None else call.bias[bias].expand(-1, -1, -1, k1 - k0),
                **_scales(call, number, slice(q0, q1), slice(k0, k1)),
            }
            yield _piece(call, slice(q0, q1), slice(k0, k1), bias, more)
    if last < call.seqlen_q or call.seqlen_q == 0:
        nothing = {"alibi_slopes": None, "bias": None, "dropout": None, "q_scale": None, "k_scale": None, "v_scale": None}
        yield _piece(call, slice(last, None), slice(0, 0), None, {"mask": Full(), **nothing})


def _piece(call: Call, queries: slice, keys: slice, bias: tuple[slice, ...] | None, more: dict) -> Piece:
    q, k, v = call.q[:, queries], call.k[:, keys], call.v[:, keys]
    return Piece(replace(call, q=q, k=k, v=v, diagonal=None, out=None, **more), queries, keys, bias)


def _scales(call: Call, number: int, queries: slice, keys: slice) -> dict[str, Tensor | None]:
    """What document `number` has of the scales."""

    def of(scale: Tensor | None, tokens: slice) -> Tensor | None:
        if scale is None or scale.dim() == 0:
            return scale
        if scale.dim() == 3:
            return scale[:, :, tokens]
        return scale if scale.shape[0] == 1 else scale[number : number + 1]

    return {"q_scale": of(call.q_scale, queries), "k_scale": of(call.k_scale, keys), "v_scale": of(call.v_scale, keys)}


def _part(bias: Tensor, number: int, queries: int, keys: int) -> tuple[slice, ...]:
    """Where document `number` has its bias."""
    for axis, size, needed in (("queries", bias.shape[2], queries), ("keys", bias.shape[3], keys)):
        if size != 1 and size < needed:
            raise ShapeError(
                f"bias is for documents of up to {size} {axis}, but document {number} has {needed}; its shape {tuple(bias.shape)} must be "
                "(documents or 1, heads_q or 1, max_seqlen_q or 1, max_seqlen_k or 1)"
            )
    document = slice(0, 1) if bias.shape[0] == 1 else slice(number, number + 1)
    return document, slice(None), slice(0, min(queries, bias.shape[2])), slice(0, min(keys, bias.shape[3]))


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)


def _as(like: Tensor | None, x: Tensor | None) -> Tensor | None:
    """x in the dtype of `like`."""
    return None if like is None or x is None else x.to(like.dtype)
