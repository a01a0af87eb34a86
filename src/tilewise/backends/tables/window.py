"""A mask as seen from each query's own position: the keys from `lo` to `hi` places further, if it can be said so."""

from functools import lru_cache
from typing import NamedTuple

from tilewise.masks import Bands, Full, Mask
from tilewise.masks.band_tables import INF

FAR = 1 << 30  # beyond every length; sums of two still fit 32 bits
QUERIES, KEYS = 1 << 20, (1 << 40, (1 << 40) + 12345)  # lengths on which a mask is tried


class Window(NamedTuple):
    """A row at position p sees the keys [p + lo, p + hi]."""

    lo: int
    hi: int


@lru_cache(maxsize=256)
def window_of(mask: Mask) -> Window | None:
    """None where the mask is none of one band on the bottom right diagonal, the same for all heads and at every length."""
    if isinstance(mask, Full):
        return Window(-FAR, FAR)
    if mask.kind not in ("full", "band") or not mask.alike:
        return None
    found = {_on(mask, seqlen_k) for seqlen_k in KEYS}
    return found.pop() if len(found) == 1 else None


def _on(mask: Mask, seqlen_k: int) -> Window | None:
    (plane,) = mask.planes(QUERIES, seqlen_k)
    assert isinstance(plane.region, Bands)
    if len(plane.region) != 1:
        return None
    ((q0, q1, k0, k1, lo, hi),) = plane.region
    diagonal = seqlen_k - QUERIES
    ends = q0 == 0, q1 == QUERIES, k0 == max(0, lo), k1 == min(seqlen_k, QUERIES + hi)  # of the frame, or the diagonals
    limits = Window(-FAR if lo <= -INF else lo - diagonal, FAR if hi >= INF else hi - diagonal)
    return limits if all(ends) and all(abs(x) <= FAR for x in limits) else None
