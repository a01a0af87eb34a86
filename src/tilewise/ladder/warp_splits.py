"""How the warps of a thread block share one tile of queries: split-K, as FlashAttention-1 does, and split-Q, as FlashAttention-2 does.

Both walk over the keys in tiles and give the same O (rows, head_dim_v) for q (rows, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v). What
differs is what goes through shared memory, which `Shared` counts: operands at 2 bytes an element (bf16), statistics and partial O at 4.

Source: Dao, "FlashAttention-2" (2023), section 3.3.
"""

from collections import Counter

import torch
from torch import Tensor

OPERAND, FP32 = 2, 4  # bytes an element


class Shared:
    """A thread block's shared memory: `bytes` that warps wrote and read, by what they are, and the `barriers` at which all warps met."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.barriers = 0

    def moved(self, what: str, x: Tensor, itemsize: int = OPERAND) -> Tensor:
        """x, on its way to or from a warp."""
        self.bytes[what] += x.numel() * itemsize
        return x


def split_q(q: Tensor, k: Tensor, v: Tensor, *, tile_n: int = 64, warps: int = 4) -> tuple[Tensor, Shared]:
    """Each warp owns rows. It reads every tile of K and V, and never hears of the others."""
    shared, o = Shared(), []
    for rows in q.chunk(warps):
        mine = shared.moved("Q", rows)  # once: these rows fit in registers
        m, l, acc_o = rows.new_full((len(rows), 1), -torch.inf), rows.new_zeros(len(rows), 1), rows.new_zeros(len(rows), v.shape[1])
        for j in range(0, len(k), tile_n):
            s = q.shape[1] ** -0.5 * mine @ shared.moved("K and V", k[j : j + tile_n]).T  # Eq. 1
            m_old, m = m, torch.maximum(m, s.amax(1, keepdim=True))  # Eq. 11
            p, rescale = torch.exp(s - m), torch.exp(m_old - m)  # Eq. 12, Eq. 13
            l = rescale * l + p.sum(1, keepdim=True)  # Eq. 14
            acc_o = rescale * acc_o + p @ shared.moved("K and V", v[j : j + tile_n])  # Eq. 16
        o.append(acc_o / l)  # Eq. 17
    return torch.cat(o), shared


def split_k(q: Tensor, k: Tensor, v: Tensor, *, tile_n: int = 64, warps: int = 4) -> tuple[Tensor, Shared]:
    """Each warp owns keys of each tile: it has a part of every row, and all parts meet in shared memory, in every step.

    A warp needs the whole of Q, which does not fit in its registers, so it reads Q in every step too.
    """
    shared = Shared()
    m, l, o = q.new_full((len(q), 1), -torch.inf), q.new_zeros(len(q), 1), q.new_zeros(len(q), v.shape[1])
    for j in range(0, len(k), tile_n):
        slices = list(torch.arange(j, min(j + tile_n, len(k)), dtype=torch.int64, device=q.device).chunk(warps))
        scores = [q.shape[1] ** -0.5 * shared.moved("Q", q) @ shared.moved("K and V", k[mine]).T for mine in slices]  # Eq. 1
        m_old, m = (
            m,
            torch.maximum(m, _together(shared, "statistics", [s.amax(1, keepdim=True) for s in scores], readers=warps).amax(0)),
        )  # Eq. 11
        weights = [torch.exp(s - m) for s in scores]  # Eq. 12
        rescale = torch.exp(m_old - m)  # Eq. 13
        l = rescale * l + _together(shared, "statistics", [p.sum(1, keepdim=True) for p in weights], readers=warps).sum(0)  # Eq. 14
        parts = [p @ shared.moved("K and V", v[mine]) for p, mine in zip(weights, slices, strict=True)]
        o = rescale * o + _together(shared, "partial O", parts, readers=1).sum(0)  # Eq. 16
    return o / l, shared


def _together(shared: Shared, what: str, parts: list[Tensor], readers: int) -> Tensor:
    """(warps, ...): each warp writes its part, all meet, and the parts are read: by all warps, or each element by one."""
    for part in parts:
        shared.moved(what, part, FP32)
    shared.barriers += 1
    for _ in range(readers):
        for part in parts:
            shared.moved(what, part, FP32)
    return torch.stack(parts)
