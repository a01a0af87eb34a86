"""Masks as a notebook shows them: the picture of masks/picture.py, at lengths that the mask itself suggests where no call gives them."""

import html as escaping
import re
from typing import TYPE_CHECKING

from torch import Tensor

from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks.picture import MOST_TILES, show

if TYPE_CHECKING:
    from tilewise.masks.mask import Mask

LEAST, MOST = 32, 1 << 30  # queries and keys that are tried


def html(mask: "Mask", lengths: tuple[int, int] | None = None, tile: tuple[int, int] | None = None) -> str:
    """The picture as a part of a page: SVG, or characters where matplotlib is not installed. None: lengths that fit, and tiles of about a 32nd."""
    sizes = fitting(mask) if lengths is None else lengths
    if tile is not None and max(-(-size // step) for size, step in zip(sizes, tile, strict=True)) > MOST_TILES:
        tile = None
    tile_m, tile_n = tile or (None, None)
    words = escaping.escape(f"{mask!r:.200} at {sizes[0]:,} queries x {sizes[1]:,} keys")
    try:
        drawn = str(show(mask, *sizes, tile_m=tile_m, tile_n=tile_n, format="svg"))
        drawn = drawn[drawn.index("<svg") :]
    except UnsupportedError:
        drawn = f"<pre>{escaping.escape(str(show(mask, *sizes, tile_m=tile_m, tile_n=tile_n)))}</pre>"
    return f"<figure style='margin:0'>{drawn}<figcaption><code>{words}</code></figcaption></figure>"


def fitting(mask: "Mask") -> tuple[int, int]:
    """seqlen_q and seqlen_k that show what the mask is: the shortest that hold its documents, tree or tensor, else twice its largest number."""
    tensors: list[Tensor] = []
    numbers = [int(number) for number in re.findall(r"\d+", re.sub(r"#\d+", "", mask.text(tensors)))]
    largest = min(2 * max(numbers, default=0), MOST)
    any_length = max(largest, LEAST)
    if mask.kind == "bitmap":
        shapes = [tuple(x.shape[-2:]) for x in tensors if x.dim() >= 2]
        sizes = [max((shape[axis] for shape in shapes), default=1) for axis in (0, 1)]
        rows, keys = (size if size > 1 else any_length for size in sizes)  # a dimension of 1 fits every length
        return rows, keys
    if _fits(mask, 0, 0):
        return any_length, any_length
    both = _shortest(lambda n: _fits(mask, n, n))
    unbounded = max(both, largest // 2)
    seqlen_q = unbounded if _fits(mask, 0, both) else _shortest(lambda n: _fits(mask, n, both))
    return seqlen_q, unbounded if _fits(mask, seqlen_q, 0) else _shortest(lambda n: _fits(mask, seqlen_q, n))


def _fits(mask: "Mask", seqlen_q: int, seqlen_k: int) -> bool:
    try:
        mask.planes(seqlen_q, seqlen_k, *mask.extent)
    except ShapeError:
        return False
    return True


def _shortest(fits) -> int:
    """The least n for which it fits, which does for every larger one."""
    low, high = 0, 1
    while high < MOST and not fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
