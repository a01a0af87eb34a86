"""What crosses the boundary between torch and the launches of 8 bits; see ../operands.py. Nothing here imports the DSL."""

from typing import NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """Of a forward pass. Numbers of 8 bits come as int8, whatever they mean."""

    Q: Tensor  # (batch, seqlen_q, heads_q, head_dim)
    K: Tensor  # (batch, seqlen_k, heads_k, head_dim)
    V: Tensor | None  # (batch, heads_k, head_dim_v, tokens): those of a row in the order of P (sm90/eight_bits.py), 0 from seqlen_k on
    O: Tensor  # (batch, seqlen_q, heads_q, head_dim_v), bf16 or fp16
    L: Tensor  # (batch, heads_q, seqlen_q) fp32
    values: Tensor  # (batch, seqlen_k, heads_k, head_dim_v): what V was made from, for numbers that are not finite; without V what is multiplied


class Scales(NamedTuple):
    """What numbers of 8 bits are to be multiplied with, fp32, by any strides: 0 where several have one."""

    q: Tensor  # (batch, heads_q, seqlen_q)
    k: Tensor  # (batch, heads_k, groups of GROUP keys)
    v: Tensor | None  # (batch, heads_k, head_dim_v) with `centre`; without it (batch, heads_k, groups of GROUP keys); None: V has 16 bits
    centre: Tensor | None  # (batch, heads_k, head_dim_v): what V lacks
    shift: Tensor | None  # (batch, heads_q, seqlen_q): what a row's scores, and its log-sum-exp, lack
    whole: Tensor | None  # as k, but NaN where a key of the group was not finite, which int8 cannot say
    lost: Tensor | None  # (batch, heads_k, groups * GROUP): NaN for the keys that were not finite, 0 for the others
    columns: Tensor | None  # (batch, heads_k, groups * GROUP): beside `k`, of each token
    weights: Tensor | None  # likewise, beside `v`


class OfTokens(NamedTuple):
    """Scales that each token has, fp32: as given, by any strides, and what becomes of them."""

    k: Tensor | None  # (batch, heads_k, seqlen_k)
    v: Tensor | None
    columns: Tensor | None  # (batch, heads_k, groups * GROUP): k, and 0 from seqlen_k on
    weights: Tensor | None  # likewise v, over `units`; NaN for what is not finite
    units: Tensor | None  # (batch, heads_k, groups): the largest finite |v| of a group, or 1 where that is 0


class Given(NamedTuple):
    """What the quantiser reads: bf16 or fp16, and where keys end that count."""

    Q: Tensor  # (batch, seqlen_q, heads_q, head_dim)
    K: Tensor  # (batch, seqlen_k, heads_k, head_dim)
    V: Tensor  # (batch, seqlen_k, heads_k, head_dim_v)
    ends: Tensor | None = None  # (documents + 1,) int32, of which the last does; None: all count


class Made(NamedTuple):
    """What it writes, as `Tensors` have it, with the tile's head_dim."""

    Q: Tensor
    K: Tensor
    V: Tensor | None
