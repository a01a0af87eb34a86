"""Counter-based dropout: whether a (query, key) pair is kept is a pure function of its coordinates, so any tiling gives the same mask.

The generator is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).
Key: the low and high 32 bits of the seed. Counter: (j // 4, i, b * heads_q + h, low 32 bits of the offset). Pair (i, j) takes output word
j % 4 and is kept iff `word >= round(p * 2**32)`; what is kept is multiplied by `1 / (1 - p)`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.problem import Dropout

ROUNDS = 10
_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, as fractions of 2**32


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit output words of Philox-4x32-10, as int64 tensors.

    `counter` is four int64 tensors that broadcast together, `key` two integers; all values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in round_keys(key):
        # 64-bit products wrap to negative numbers; the mask after the shift drops the copies of the sign bit.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> 32 & _MASK) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32 & _MASK) ^ c3 ^ k1, product0 & _MASK
    return c0, c1, c2, c3


def round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    """Of each round."""
    return [(key[0] + i * _WEYL[0] & _MASK, key[1] + i * _WEYL[1] & _MASK) for i in range(ROUNDS)]


def key_of(dropout: Dropout) -> tuple[int, int]:
    return dropout.seed & _MASK, dropout.seed >> 32 & _MASK


def threshold(p: float) -> int:
    """The smallest 32-bit word that is kept at dropout probability `p`."""
    return round(p * 2**32)


def keep_scale(p: float) -> float:
    """What a kept probability is multiplied by; 0 where everything is dropped (p = 1)."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def keep(
    dropout: Dropout,
    batch: range | Tensor,
    heads: range | Tensor,
    i0: int,
    i1: int,
    j0: int,
    j1: int,
    heads_q: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which pairs of queries [i0, i1) and keys [j0, j1) are kept: bool (len(batch), len(heads), i1 - i0, j1 - j0).

    `batch` and `heads` are ranges or 1-D int64 tensors of indices into the whole problem; `heads_q` is the problem's number of query heads. Where
    that is a part of a larger one (`Dropout.part`), these are pairs of the larger one.
    """
    b, h = (_indices(x, device) for x in (batch, heads))
    new = {"dtype": torch.int64, "device": device}
    rows, (first_head, every) = dropout.rows(device), dropout.heads(heads_q)
    row = torch.arange(i0, i1, **new) if rows is None else rows[i0:i1]
    block = torch.arange(j0 // 4, -(-j1 // 4), **new)  # one call of the generator serves four keys
    counter = (
        block,
        row[:, None],
        (b[:, None] * every + first_head + h)[..., None, None] & _MASK,
        torch.tensor(dropout.offset & _MASK, **new),
    )
    words = torch.stack(philox(counter, key_of(dropout)), dim=-1)
    first = j0 % 4
    return words.flatten(-2)[..., first : first + j1 - j0] >= threshold(dropout.p)


def _indices(which: range | Tensor, device: torch.device | str) -> Tensor:
    if isinstance(which, range):
        return torch.arange(which.start, which.stop, which.step, dtype=torch.int64, device=device)
    return which.to(device)
