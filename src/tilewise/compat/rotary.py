"""`flash_attn.layers.rotary`: rotary position embedding of queries and keys before attention (tilewise/rotary.py)."""

import torch
from torch import Tensor

from tilewise.compat._refusals import translate_errors
from tilewise.errors import ShapeError, UnsupportedError, check_size, check_tensor
from tilewise.masks.arguments import is_integer
from tilewise.rotary import rotated
from tilewise.runtime.cache_values import sequence_of

__all__ = [
    "ApplyRotaryEmb",
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


@translate_errors()
def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """x rotated by its positions; differentiable in x.

    Args:
        x: (batch, seqlen, heads, head_dim), or with cu_seqlens (total, heads, head_dim).
        cos, sin: (seqlen_rotary, rotary_dim / 2), rotary_dim at most head_dim.
        inplace: write into x and return it.
        seqlen_offsets: the position of each sequence's first token: one int, or (batch,) int32 or int64.
        cu_seqlens: (batch + 1,) bounds of packed sequences. `max_seqlen` is not needed.

    Raises:
        ArgumentError (a ShapeError and a RuntimeError): a tensor of the wrong shape, positions beyond the tables.
    """
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    return _write(x, rotated(x, cos, sin, positions, interleaved=interleaved), inplace)


apply_rotary_emb_func = apply_rotary_emb


class ApplyRotaryEmb:
    """`apply` is `apply_rotary_emb`; nothing else of an autograd function is here."""

    apply = staticmethod(apply_rotary_emb)


def rotate_half(x, interleaved=False):
    """x with every pair (a, b) as (-b, a): halves of the last dimension, or neighbours where `interleaved`."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


@translate_errors()
def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """x (batch, seqlen, heads, head_dim) rotated by cos, sin (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2), in plain torch."""
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise ShapeError(f"cos is for {rotary_dim} dimensions, (..., rotary_dim / 2), but x has head_dim {x.shape[-1]}")
    cos, sin = (table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1) for table in (cos, sin))
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((turned * cos[..., None, :] + rotate_half(turned, interleaved) * sin[..., None, :], rest), -1)


@translate_errors()
def apply_rotary(x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False, conjugate=False):
    """`apply_rotary_emb` as `flash_attn.ops.triton.rotary` has it; `conjugate` turns the other way."""
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    return _write(x, rotated(x, cos, -sin if conjugate else sin, positions, interleaved=interleaved), inplace)


@translate_errors()
def apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None):
    """Rotate the q and k of qkv in place, and return it.

    qkv: (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, num_heads_q + 2 heads_k, head_dim).
    cos_k, sin_k: the keys' own tables, where they are other than the queries'.
    """
    if qkv.dim() == 5:
        check_size("qkv", "third dimension", qkv.shape[2], 3, "q, k and v together")
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        q, k, _ = split_heads(qkv, num_heads_q)
    positions = _positions(q, seqlen_offsets, None)
    q.copy_(rotated(q, cos, sin, positions, interleaved=interleaved))
    k.copy_(rotated(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, positions, interleaved=interleaved))
    return qkv


@translate_errors()
def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotate the k of kv (batch, seqlen, 2, heads, head_dim) in place, and return it."""
    check_tensor("kv", kv, ("batch", "seqlen", "2", "heads", "head_dim"))
    k = kv[:, :, 0]
    k.copy_(rotated(k, cos, sin, _positions(k, seqlen_offsets, None), interleaved=interleaved))
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of `dim` dimensions with angles `position * base ** (-2 d / dim)`; its tables grow with the positions that are met.

    No xPos: `scale_base` must be None.
    """

    inv_freq: Tensor

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        if scale_base is not None:
            raise UnsupportedError(
                "tilewise.compat.rotary.RotaryEmbedding: scale_base (xPos) is not supported; leave it None, or scale q and k apart"
            )
        self.dim, self.base, self.interleaved, self.scale_base, self.scale = dim, float(base), interleaved, None, None
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._tables: tuple[Tensor, Tensor] | None = None

    def _frequencies(self, device) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim)

    def _up_to(self, seqlen: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of at least `seqlen` positions, in the dtype and on the device of `like`."""
        known = self._tables
        if (
            known is None
            or known[0].shape[0] < seqlen
            or known[0].device != like.device
            or known[0].dtype != like.dtype
            or (self.training and known[0].is_inference())
        ):
            frequencies = (
                self.inv_freq if self.inv_freq.dtype == torch.float32 else self._frequencies(like.device)
            )  # 16 bits hold no angles
            angles = torch.outer(torch.arange(seqlen, dtype=torch.float32, device=like.device), frequencies.to(like.device))
            self._tables = known = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
        return known

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """Rotate qkv in place, shaped as for `apply_rotary_emb_qkv_`; with kv, qkv is q (batch, seqlen, heads, head_dim) and both are returned.

        seqlen_offset: int or (batch,); where it is a tensor, max_seqlen says how far positions go.
        """
        length = max_seqlen
        if length is None:
            length = qkv.shape[1] + (seqlen_offset if isinstance(seqlen_offset, int) else int(seqlen_offset.max()))
        cos, sin = self._up_to(length, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, interleaved=self.interleaved, seqlen_offsets=seqlen_offset, num_heads_q=num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)


def split_heads(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of qkv (batch, seqlen, num_heads_q + 2 heads_k, head_dim), as views."""
    check_tensor("qkv", qkv, ("batch", "seqlen", "heads_q + 2 heads_k", "head_dim"))
    if num_heads_q is None or not is_integer(num_heads_q) or not 0 < num_heads_q < qkv.shape[2] or (qkv.shape[2] - num_heads_q) % 2:
        raise ShapeError(
            f"num_heads_q must say how many of the {qkv.shape[2]} heads of qkv are queries, got {num_heads_q!r}; the rest are k and v"
        )
    heads_k = (qkv.shape[2] - num_heads_q) // 2
    q, k, v = qkv.split((num_heads_q, heads_k, heads_k), 2)
    return q, k, v


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The position of every token of x: (batch, seqlen), or (total,) of packed sequences."""
    check_tensor("x", x, ("total", "heads", "head_dim") if cu_seqlens is not None else ("batch", "seqlen", "heads", "head_dim"))
    if isinstance(offsets, Tensor):
        check_tensor("seqlen_offsets", offsets, ("batch",), (torch.int32, torch.int64))
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        check_size("seqlen_offsets", "batch", offsets.shape[0], sequences, "x" if cu_seqlens is None else "cu_seqlens")
    if cu_seqlens is None:
        first = offsets[:, None] if isinstance(offsets, Tensor) else offsets
        return first + torch.arange(x.shape[1], dtype=torch.int64, device=x.device).expand(x.shape[0], -1)
    owner = sequence_of(cu_seqlens, x.shape[0])
    first = offsets.to(x.device)[owner] if isinstance(offsets, Tensor) else offsets
    return first + torch.arange(x.shape[0], dtype=torch.int64, device=x.device) - cu_seqlens.to(x.device, torch.int64)[owner]


def _write(x: Tensor, new: Tensor, inplace: bool) -> Tensor:
    return x.copy_(new) if inplace else new
