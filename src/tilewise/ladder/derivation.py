"""FlashAttention-2 derived from the textbook formula, one idea a function; every line that computes is an equation of docs/algorithm.md.

    safe_softmax_3pass -> online_softmax_2pass -> attention_one_pass -> attention_tiled_keys -> attention_tiled_queries
    -> flash1_forward -> flash1_backward -> flash2_forward -> flash2_backward

One head: q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v), any one floating-point dtype, which is also the dtype of
all arithmetic. `causal` aligns to the bottom right: query i sees keys j <= i + seqlen_k - seqlen_q. `scale` is head_dim ** -0.5 by default.
A query that sees no key gets O = 0 and LSE = -inf. These are for reading and checking; `backends/tiled` is the same algorithm made fast.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, Fu, Ermon, Rudra and Re, "FlashAttention" (2022),
Algorithm 1; Dao, "FlashAttention-2" (2023), Algorithms 1 and 2, with the corrections listed in docs/algorithm.md.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

INF = math.inf


def safe_softmax_3pass(x: Tensor) -> Tensor:
    """Softmax of x (n,) in three loops: the maximum, the denominator, the quotients. n = 0 gives an empty result."""
    m = x.new_tensor(-INF)
    for x_i in x:
        m = torch.maximum(m, x_i)  # Eq. 5
    l = x.new_tensor(0.0)
    for x_i in x:
        l = l + torch.exp(x_i - m)  # Eq. 6
    a = torch.empty_like(x)
    for i, x_i in enumerate(x):
        a[i] = torch.exp(x_i - m) / l  # Eq. 7
    return a


def online_softmax_2pass(x: Tensor) -> Tensor:
    """Softmax of x (n,) in two loops: the denominator is kept relative to the maximum so far, and corrected when that grows."""
    m, l = x.new_tensor(-INF), x.new_tensor(0.0)
    for x_i in x:
        m_old, m = m, torch.maximum(m, x_i)  # Eq. 5
        l = l * torch.exp(m_old - _finite(m)) + torch.exp(x_i - _finite(m))  # Eq. 9
    a = torch.empty_like(x)
    for i, x_i in enumerate(x):
        a[i] = torch.exp(x_i - m) / l  # Eq. 7
    return a


def attention_one_pass(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """O (seqlen_q, head_dim_v) in one loop over the keys: the output, too, is corrected when the maximum grows. No row of P exists."""
    o = q.new_zeros(len(q), v.shape[-1])
    for i in range(len(q)):
        m, l = q.new_tensor(-INF), q.new_tensor(0.0)
        for j in range(_keys_seen(i, q, k, causal)):
            x = _scale(q, scale) * (q[i] @ k[j])  # Eq. 1
            m_old, m = m, torch.maximum(m, x)  # Eq. 5
            l_old, l = l, l * torch.exp(m_old - m) + torch.exp(x - m)  # Eq. 9
            o[i] = o[i] * (l_old * torch.exp(m_old - m) / l) + torch.exp(x - m) / l * v[j]  # Eq. 10
    return o


def attention_tiled_keys(q: Tensor, k: Tensor, v: Tensor, *, tile_n: int = 64, causal: bool = False, scale: float | None = None) -> Tensor:
    """O (seqlen_q, head_dim_v) in one loop over tiles of tile_n keys: scalars become tiles, and products of tiles are matrix products."""
    return _rows_over_key_tiles(q, k, v, 0, len(q), tile_n, causal, scale)


def attention_tiled_queries(
    q: Tensor, k: Tensor, v: Tensor, *, tile_m: int = 64, tile_n: int = 64, causal: bool = False, scale: float | None = None
) -> Tensor:
    """O (seqlen_q, head_dim_v), tiled over the queries as well. Rows share nothing, so their tiles may run in any order."""
    tiles = [_rows_over_key_tiles(q, k, v, i0, i1, tile_n, causal, scale) for i0, i1 in _tiles(len(q), tile_m)]
    return torch.cat(tiles) if tiles else q.new_zeros(0, v.shape[-1])


def _rows_over_key_tiles(q: Tensor, k: Tensor, v: Tensor, i0: int, i1: int, tile_n: int, causal: bool, scale: float | None) -> Tensor:
    m, l, o = _empty_rows(q[i0:i1], v)
    for j0, j1 in _tiles(len(k), tile_n):
        s = _scores(q, k, i0, i1, j0, j1, causal, scale)  # Eq. 1, Eq. 19
        m, l, o = _normalised_step(m, l, o, s, v[j0:j1])
    return o


def flash1_forward(
    q: Tensor, k: Tensor, v: Tensor, *, tile_m: int = 64, tile_n: int = 64, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-1: O (seqlen_q, head_dim_v) with the row statistics m and l, each (seqlen_q,), which its backward needs.

    Key tiles are the outer loop: each is read once, while O, m and l go back and forth for every key tile and O is normalised each time.
    """
    m, l, o = _empty_rows(q, v)
    for j0, j1 in _tiles(len(k), tile_n):
        for i0, i1 in _tiles(len(q), tile_m):
            s = _scores(q, k, i0, i1, j0, j1, causal, scale)  # Eq. 1, Eq. 19
            m[i0:i1], l[i0:i1], o[i0:i1] = _normalised_step(m[i0:i1], l[i0:i1], o[i0:i1], s, v[j0:j1])
    return o, m.squeeze(1), l.squeeze(1)


def flash1_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    d_o: Tensor,
    *,
    tile_m: int = 64,
    tile_n: int = 64,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV, shaped as q, k, v, from what `flash1_forward` returned and the gradient d_o of O.

    P comes back from two statistics of a row, by a difference, an exponential and a division; `flash2_backward` needs one, and no division.
    """
    m, l = _finite(m[:, None]), _nonzero(l[:, None])
    return _backward(q, k, v, o, d_o, lambda s, i0, i1: torch.exp(s - m[i0:i1]) / l[i0:i1], tile_m, tile_n, causal, scale)  # Eq. 7


def _normalised_step(m_old: Tensor, l_old: Tensor, o: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One tile of scores into the statistics m, l (rows, 1) and the normalised output o (rows, head_dim_v)."""
    m = torch.maximum(m_old, _row_max(s))  # Eq. 11
    p = torch.exp(s - _finite(m))  # Eq. 12
    rescale = torch.exp(m_old - _finite(m))  # Eq. 13
    l = rescale * l_old + p.sum(dim=1, keepdim=True)  # Eq. 14
    return m, l, (rescale * l_old * o + p @ v) / _nonzero(l)  # Eq. 15


def flash2_forward(
    q: Tensor, k: Tensor, v: Tensor, *, tile_m: int = 64, tile_n: int = 64, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2: O (seqlen_q, head_dim_v) and LSE (seqlen_q,), the one statistic that its backward needs.

    Query tiles are the outer loop, so O stays in place; it is normalised once, after the last key tile.
    """
    o, lse = q.new_zeros(len(q), v.shape[-1]), q.new_full((len(q),), -INF)
    for i0, i1 in _tiles(len(q), tile_m):
        m, l, acc_o = _empty_rows(q[i0:i1], v)
        for j0, j1 in _tiles(_keys_seen(i1 - 1, q, k, causal), tile_n):
            s = _scores(q, k, i0, i1, j0, j1, causal, scale)  # Eq. 1, Eq. 19
            m_old, m = m, torch.maximum(m, _row_max(s))  # Eq. 11
            p = torch.exp(s - _finite(m))  # Eq. 12
            rescale = torch.exp(m_old - _finite(m))  # Eq. 13
            l = rescale * l + p.sum(dim=1, keepdim=True)  # Eq. 14
            acc_o = rescale * acc_o + p @ v[j0:j1]  # Eq. 16
        o[i0:i1] = acc_o / _nonzero(l)  # Eq. 17
        lse[i0:i1] = (m + torch.log(l)).squeeze(1)  # Eq. 18
    return o, lse


def flash2_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    d_o: Tensor,
    *,
    tile_m: int = 64,
    tile_n: int = 64,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV, shaped as q, k, v, from what `flash2_forward` returned and the gradient d_o of O.

    The loops are swapped, key tiles outside: dK and dV stay in place, and dQ is what every key tile adds to.
    """
    return _backward(q, k, v, o, d_o, lambda s, i0, i1: torch.exp(s - _finite(lse[i0:i1, None])), tile_m, tile_n, causal, scale)  # Eq. 24


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, d_o: Tensor,
    weights: Callable[[Tensor, int, int], Tensor], tile_m: int, tile_n: int, causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loops of both versions; weights(s, i0, i1) makes P of rows i0 to i1 again from their scores."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (d_o * o).sum(dim=1, keepdim=True)  # Eq. 23
    for j0, j1 in _tiles(len(k), tile_n):
        for i0, i1 in _tiles(len(q), tile_m):
            s = _scores(q, k, i0, i1, j0, j1, causal, scale)  # Eq. 1, Eq. 19
            p = weights(s, i0, i1)
            dv[j0:j1] += p.T @ d_o[i0:i1]  # Eq. 20
            dp = d_o[i0:i1] @ v[j0:j1].T  # Eq. 21
            ds = p * (dp - delta[i0:i1])  # Eq. 25
            dq[i0:i1] += _scale(q, scale) * ds @ k[j0:j1]  # Eq. 26
            dk[j0:j1] += _scale(q, scale) * ds.T @ q[i0:i1]  # Eq. 27
    return dq, dk, dv


def _tiles(length: int, tile: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + tile, length)) for start in range(0, length, tile))


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _keys_seen(i: int, q: Tensor, k: Tensor, causal: bool) -> int:
    """Query i, and every query before it, sees no key beyond this many."""
    return max(i + 1 + len(k) - len(q), 0) if causal else len(k)


def _scores(q: Tensor, k: Tensor, i0: int, i1: int, j0: int, j1: int, causal: bool, scale: float | None) -> Tensor:
    s = _scale(q, scale) * q[i0:i1] @ k[j0:j1].T  # Eq. 1
    if causal:
        i, j = (torch.arange(a, b, dtype=torch.int64, device=q.device) for a, b in ((i0, i1), (j0, j1)))
        s = s.masked_fill(j > i[:, None] + len(k) - len(q), -INF)  # Eq. 19
    return s


def _empty_rows(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m, l (rows, 1) and O (rows, head_dim_v) before any key was seen."""
    return q.new_full((len(q), 1), -INF), q.new_zeros(len(q), 1), q.new_zeros(len(q), v.shape[-1])


def _row_max(s: Tensor) -> Tensor:
    return s.amax(dim=1, keepdim=True)


def _finite(m: Tensor) -> Tensor:
    """The shift of a row: its maximum, or 0 as long as it has seen no key, where exp(-inf - 0) = 0 and exp(-inf - -inf) would be NaN."""
    return m.masked_fill(m == -INF, 0.0)


def _nonzero(l: Tensor) -> Tensor:
    """The divisor of a row: its denominator, or 1 where that is 0, so that a row without a visible key stays 0."""
    return l.masked_fill(l == 0.0, 1.0)
