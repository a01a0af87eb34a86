"""The report's pictures of masks: which tiles are skipped, which are partial, which are full."""

from tilewise.masks import Causal, Documents, FirstKeys, Mask, SlidingWindow
from tilewise.tiles import lower

SEQLEN, TILE = 512, 32
DOCUMENTS = (0, 70, 230, 300, 512)


def masks() -> tuple[tuple[str, Mask], ...]:
    """The masks shown, with titles; the first is the one that the demo's model trains with."""
    window = SlidingWindow(127, 0)
    return (
        ("Causal", Causal()),
        ("Sliding window and four sink keys", window | (FirstKeys(4) & Causal())),
        ("Packed documents, causal in each", Documents(DOCUMENTS, inner=Causal())),
        ("Packed documents with a window", Documents(DOCUMENTS, inner=SlidingWindow(63, 0))),
    )


def draw() -> tuple[tuple[str, str, str], ...]:
    """(title, SVG, caption) of each mask; the caption counts its tiles and pairs."""
    return tuple((title, mask.show(SEQLEN, SEQLEN, tile_m=TILE, tile_n=TILE, format="svg"), caption(mask)) for title, mask in masks())


def caption(mask: Mask) -> str:
    full, partial, skipped = lower(mask.resolve(SEQLEN, SEQLEN), TILE, TILE).tiles()
    share = mask.pairs(SEQLEN, SEQLEN) / SEQLEN**2
    return (
        f"{SEQLEN} x {SEQLEN} tokens in tiles of {TILE} x {TILE}: {skipped} skipped, {partial} partial, {full} full. "
        f"{share:.0%} of the pairs are visible."
    )
