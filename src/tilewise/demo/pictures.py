"""The report's pictures of masks: which tiles are skipped, which are partial, which are full."""

from tilewise.masks import Causal, Documents, FirstKeys, Mask, SlidingWindow

SEQLEN, TILE = 512, 32
DOCUMENTS = (0, 70, 230, 300, 512)
MASKS: tuple[tuple[str, str, Mask], ...] = (
    ("Causal", "What the model above trains with: a query sees itself and what came before.", Causal()),
    (
        "Sliding window with sink keys",
        "The last 128 keys, and the first 4 for everyone: the cost no longer grows with the square of the length.",
        SlidingWindow(127, 0) | (FirstKeys(4) & Causal()),
    ),
    (
        "Packed documents",
        "Four documents in one sequence, causal in each.",
        Documents(DOCUMENTS, inner=Causal()),
    ),
    ("Packed documents with a window", "The same documents, and only the last 64 keys.", Documents(DOCUMENTS, inner=SlidingWindow(63, 0))),
)


def draw() -> tuple[tuple[str, str, str], ...]:
    """(title, SVG, caption) of each mask; the pictures say how many tiles of each kind there are."""
    return tuple((title, _svg(mask), caption) for title, caption, mask in MASKS)


def _svg(mask: Mask) -> str:
    drawn = mask.show(SEQLEN, SEQLEN, tile_m=TILE, tile_n=TILE, format="svg")
    assert isinstance(drawn, str)
    return drawn
