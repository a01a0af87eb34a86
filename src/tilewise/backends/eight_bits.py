"""Attention in 8 bits: what the operands become, exactly, before they are multiplied. Kernels and their emulation (tiled/eight_bits.py) fill this.

A recipe (`precision=`) quantises q, k and v inside, all arithmetic in fp32, rounded to nearest even where nothing else is said:

    c_K, c_V     a constant of each key head and channel, about its mean (`centre`); K - c_K moves all scores of a row alike, V - c_V all of O
    rotation     H D x of the last dimension (`rotated`): D fixed signs, H Hadamard's matrix, unscaled, so that q.k grows by the width exactly
    Q            8 bits, a scale for each token and query head
    K            K - c_K, rotated, in 8 bits, a scale for each TILE keys of a head
    V            e4m3 of V - c_V, a scale for each channel of a head over all keys; "int8_qk" leaves V as it is
    shift        scale q c_K^T, of each row: with softcap a term of every score, else of LSE and of the largest score alone

The products, for keys in tiles of TILE from key 0 on, the last tile first (`m`, `l`, `r` = exp(m_old - m): Eq. 11 to 14):

    S = (Q8 K8^T) * (row factor * key scale)        int8: exact sums; row factor = Q's scale * scale / width
    l = l r + sum(P),  P = exp(S - m)               in fp32, not rounded
    N = e4m3(P * 256) V8,  O = O r + N              each tile's product is promoted: added in fp32. "int8_qk": P in the inputs' dtype times V
    O / (256 l) * V's scale + c_V                   where a sink takes part of the row, c_V counts by what it leaves

A scale of V by token or tile, of tensors that come in 8 bits, goes into P before it is rounded: e4m3(P * 256 * scale / t) with t the largest scale of
the tile, and N t. What is no finite number stays none: e4m3 has NaN for both; an int8 group with one has a scale of NaN; a key with one in
"int8" and "int8_qk", which have no NaN in K, is NaN for every row that sees it (`key_nan`), in O at least. Scales and centres are of finite elements
alone, so that a NaN that the mask hides reaches nothing; finite elements that it hides do count. Packed documents are one sequence, and its
keys end with the last document's (`counted`): what lies behind them is as if it were 0.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import EIGHT_BITS
from tilewise.masks import DeviceDocuments, Documents
from tilewise.problem import Call

E4M3, INT8 = EIGHT_BITS
TILE = 128  # keys that share a scale; each tile's product is promoted
P_SCALE = 256.0  # P is at most 1, so this leaves e4m3's upper values unused and its subnormal ones for P below 2^-14
SAMPLE = 128  # tokens, evenly spread; their mean is the centre
MOST = {E4M3: 448.0, INT8: 127.0}
LEAST = 2.0**-100  # what is smaller counts as 0: the reciprocal of its scale would overflow
SIGNS = (
    0x243F6A88,
    0x85A308D3,
    0x13198A2E,
    0x03707344,
    0xA4093822,
    0x299F31D0,
    0x082EFA98,
    0xEC4E6C89,
)  # pi's first 256 bits behind the point


class Recipe(NamedTuple):
    """The dtypes that a precision multiplies in."""

    qk: torch.dtype
    pv: torch.dtype | None  # None: the inputs'


RECIPES = {"fp8": Recipe(E4M3, E4M3), "int8": Recipe(INT8, E4M3), "int8_qk": Recipe(INT8, None)}


class Quantised(NamedTuple):
    """One call as kernels multiply it. Scales fp32: () all, (batch, heads), (batch, heads, tokens) or, of k and v, (batch, heads, tiles); None: 1."""

    q: Tensor  # (batch, seqlen_q, heads_q, width) e4m3 or int8
    k: Tensor  # (batch, seqlen_k, heads_k, width)
    v: Tensor  # (batch, seqlen_k, heads_k, head_dim_v) e4m3, or as given
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    factor: float  # what the products of q and k are multiplied by on top of the scales: the softmax's scale, without the rotation's growth
    key_nan: Tensor | None = None  # (batch, heads_k, seqlen_k) bool: keys of int8 that are none
    v_channel: Tensor | None = None  # (batch, heads_k, head_dim_v): V's scale
    v_centre: Tensor | None = None  # (batch, heads_k, head_dim_v)
    shift: Tensor | None = None  # (batch, heads_q, seqlen_q)


def operands_of(call: Call) -> Quantised:
    """The call's tensors in 8 bits: as they are given, or by the recipe of `call.precision`."""
    if call.precision is None:
        return Quantised(call.q, call.k, call.v, call.q_scale, call.k_scale, call.v_scale, call.scale)
    recipe = RECIPES[call.precision]
    keys = counted(call)
    k_centre, k = _to(call.seqlen_k, *centred(call.k[:, :keys]))
    q, k = rotated(call.q.float()), rotated(k)
    q8, q_scale = quantised(q, recipe.qk, "token")
    k8, k_scale = quantised(k, recipe.qk, "tile", of_finite=True)
    key_nan = None
    if recipe.qk == INT8:
        key_nan = ~k.isfinite().all(-1).transpose(1, 2)
    group_centre = k_centre.repeat_interleave(call.group, dim=1)
    shift = call.scale * torch.einsum("bqhd,bhd->bhq", call.q.float(), group_centre)
    common = q8, k8
    factor = call.scale / q.shape[-1]
    if recipe.pv is None:
        return Quantised(*common, call.v, q_scale, k_scale, None, factor, key_nan, shift=shift)
    v_centre, v = _to(call.seqlen_k, *centred(call.v[:, :keys]))
    scale, inverse = _scale(_largest(v, (1,)), recipe.pv)  # (batch, 1, heads_k, head_dim_v)
    return Quantised(*common, _rounded(v, inverse, recipe.pv), q_scale, k_scale, None, factor, key_nan, scale[:, 0], v_centre, shift)


def counted(call: Call) -> int:
    """How many keys there are to scale and centre: all, or as many as packed documents have together."""
    mask = call.mask.read() if isinstance(call.mask, DeviceDocuments) else call.mask
    if not isinstance(mask, Documents):
        return call.seqlen_k
    assert mask.cu_seqlens_k is not None  # since it was made
    return int(mask.cu_seqlens_k[-1])


def exact(call: Call) -> Call:
    """The call that its 8 bits stand for, in fp64: elements times their scales, and no precision."""
    fields: dict[str, Any] = {"precision": None, "q_scale": None, "k_scale": None, "v_scale": None}
    if call.precision is None:
        for name in ("q", "k", "v"):
            x, scale = getattr(call, name), getattr(call, f"{name}_scale")
            fields[name] = x.double() if scale is None else x.double() * _to_tokens(spread(scale, x.shape[1]).double())
    return replace(call, **fields)


def quantised(x: Tensor, dtype: torch.dtype, per: str, of_finite: bool = False) -> tuple[Tensor, Tensor]:
    """x (batch, tokens, heads, dim), fp32, in `dtype`, and its scale in fp32, shaped by `per`.

    A number that is not finite is NaN in e4m3. In int8, which has none, the scale of its group is NaN, unless `of_finite`: then the number is 0.
    """
    tokens = x.shape[1]
    largest = _largest(x, (3,) if per in ("token", "tile") else (1, 3)).transpose(1, 2)[..., 0]  # (batch, heads, tokens or 1)
    if per == "tile":
        largest = _tiles(largest).amax(3)
    elif per == "tensor":
        largest = torch.nn.functional.pad(largest.flatten(), (0, 1)).amax()
    elif per == "head":
        largest = largest[..., 0]
    scale, inverse = _scale(largest, dtype)
    rounded = _rounded(x, _to_tokens(spread(inverse, tokens)), dtype)
    if dtype == INT8 and not of_finite:
        scale = scale.masked_fill(_any(~x.isfinite().all(3).transpose(1, 2), per), torch.nan)
    return rounded, scale


def spread(scale: Tensor, tokens: int) -> Tensor:
    """A scale as (batch or 1, heads or 1, tokens or 1), whatever it is for."""
    if scale.dim() == 3 and scale.shape[2] != tokens:
        return scale.repeat_interleave(TILE, dim=2)[:, :, :tokens]
    return scale if scale.dim() == 3 else scale[..., None] if scale.dim() == 2 else scale.reshape(1, 1, 1)


def centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """The centre (batch, heads, dim) of x (batch, tokens, heads, dim), and x without it, both fp32."""
    c = centre(x)
    return c, x.float() - c[:, None]


def centre(x: Tensor) -> Tensor:
    """The mean over up to SAMPLE tokens, the i-th of m being i * tokens // m, in fp32, added up by halves: (batch, heads, dim). Elements that are
    not finite count as 0, and so does a mean that is not.
    """
    tokens = x.shape[1]
    number = min(tokens, SAMPLE)
    if number == 0:
        return x.new_zeros((x.shape[0], *x.shape[2:]), dtype=torch.float32)
    index = torch.arange(number, dtype=torch.int64, device=x.device) * tokens // number
    terms = _finite(x[:, index].float())
    terms = torch.nn.functional.pad(terms, (0, 0, 0, 0, 0, SAMPLE - number))
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return _finite(terms[:, 0] * (1.0 / number))


def rotated(x: Tensor) -> Tensor:
    """H D x of the last dimension, with zeros behind it up to a power of two: neighbours are added and subtracted first, halves last."""
    dim = x.shape[-1]
    width = 1 << (dim - 1).bit_length()
    x = torch.nn.functional.pad(x * signs(dim, x.device), (0, width - dim))
    reach = 1
    while reach < width:
        a, b = x.reshape(*x.shape[:-1], width // (2 * reach), 2, reach).unbind(-2)
        x = torch.stack((a + b, a - b), -2).reshape(x.shape)
        reach *= 2
    return x


def signs(dim: int, device: torch.device) -> Tensor:
    """(dim,) fp32 of 1 and -1: channel i has -1 where bit i % 32, from the top, of word i / 32 of SIGNS is set; they repeat after 256."""
    bits = [-1.0 if SIGNS[i // 32 % len(SIGNS)] >> (31 - i % 32) & 1 else 1.0 for i in range(dim)]
    return torch.tensor(bits, dtype=torch.float32, device=device)


def e4m3(x: Tensor) -> Tensor:
    """fp32 rounded to e4m3, which keeps what is not finite as NaN and takes 448 for the most."""
    return x.clamp(-MOST[E4M3], MOST[E4M3]).masked_fill(~x.isfinite(), torch.nan).to(E4M3)


def _to(tokens: int, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """c, and x with zeros behind its last token, up to `tokens` tokens."""
    return c, torch.nn.functional.pad(x, (0, 0, 0, 0, 0, tokens - x.shape[1]))


def _rounded(x: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    finite, x = x.isfinite(), x * inverse
    if dtype == INT8:
        return torch.where(finite, x, 0.0).round().clamp(-MOST[INT8], MOST[INT8]).to(INT8)  # never -128
    return x.clamp(-MOST[E4M3], MOST[E4M3]).masked_fill(~finite, torch.nan).to(E4M3)


def _scale(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scale of elements up to `largest`, and what they are multiplied by before they are rounded. Where there is nothing, both are 1."""
    nothing = largest < LEAST
    scale, inverse = largest * (1.0 / MOST[dtype]), MOST[dtype] / largest
    return scale.masked_fill(nothing, 1.0), inverse.masked_fill(nothing, 1.0)


def _largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest finite |x| over `dims`, which stay with size 1; 0 where there is none."""
    if 0 in [x.shape[dim] for dim in dims]:
        return x.new_zeros([1 if dim in dims else size for dim, size in enumerate(x.shape)])
    return _finite(x).abs().amax(dims, keepdim=True)


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(~x.isfinite(), 0.0)


def _to_tokens(scale: Tensor) -> Tensor:
    """(batch, heads, tokens) to (batch, tokens, heads, 1)."""
    return scale.transpose(1, 2)[..., None]


def _tiles(x: Tensor) -> Tensor:
    """(batch, heads, tokens) as (batch, heads, tiles, TILE), with zeros behind the last token."""
    number = -(-x.shape[2] // TILE)
    return torch.nn.functional.pad(x, (0, number * TILE - x.shape[2])).reshape(*x.shape[:2], number, TILE)


def _any(bad: Tensor, per: str) -> Tensor:
    """Whether any of bad (batch, heads, tokens) is in the group of a scale."""
    if per == "tile":
        return _tiles(bad).any(3)
    return bad if per == "token" else bad.any(2) if per == "head" else bad.any()
