"""The one band of a mask as the six numbers that kernels take. Causal masks and windows, which are most, are written down directly."""

from functools import lru_cache

from tilewise.masks import Bands, Causal, Full, Mask, SlidingWindow

FAR = 1 << 30  # beyond every key, and far from overflowing when a row is added
NOTHING = 0, 0, 0, 0, -FAR, FAR


@lru_cache(maxsize=4096)
def band_of(mask: Mask, seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
    """(q0, q1, k0, k1, lo, hi), as small as the mask allows; lo and hi at -FAR and FAR where they hide nothing; NOTHING without a visible pair."""
    match mask:
        case Full():
            return _window(seqlen_q, seqlen_k, -FAR, FAR)
        case Causal():
            return _window(seqlen_q, seqlen_k, -FAR, _diagonal(mask, seqlen_q, seqlen_k))
        case SlidingWindow(left=left, right=right):
            diagonal = _diagonal(mask, seqlen_q, seqlen_k)
            return _window(seqlen_q, seqlen_k, -FAR if left is None else diagonal - left, FAR if right is None else diagonal + right)
    (plane,) = mask.planes(seqlen_q, seqlen_k, 1, 1)
    assert isinstance(plane.region, Bands)
    if not plane.region:
        return NOTHING
    (band,) = plane.region
    return *band[:4], max(band.lo, -FAR), min(band.hi, FAR)


def _diagonal(mask: Causal | SlidingWindow, seqlen_q: int, seqlen_k: int) -> int:
    """key - query at a query's position."""
    return mask.offset + (seqlen_k - seqlen_q if mask.align == "bottom_right" else 0)


def _window(seqlen_q: int, seqlen_k: int, lo: int, hi: int) -> tuple[int, ...]:
    """What `band_tables.canonical` makes of lo <= key - query <= hi."""
    q0, q1 = max(0, -hi), min(seqlen_q, seqlen_k - lo)
    if q0 >= q1 or lo > hi or seqlen_k == 0:
        return NOTHING
    k0, k1 = max(0, q0 + lo), min(seqlen_k, q1 + hi)
    return q0, q1, k0, k1, -FAR if q1 - 1 + lo <= k0 else max(lo, -FAR), FAR if q0 + hi >= k1 - 1 else min(hi, FAR)
