"""transformers' mask functions as tilewise masks.

transformers says what is visible by a tree of closures: `and_masks` and `or_masks` over a handful of leaves. `read` takes the tree apart by the names
of the functions that made the closures and by what these captured; `by_row` says it in the language of masks, one mask a batch entry or one for all.
What is not understood is None: the caller then asks the closures pair by pair.

Positions are transformers' own: query i stands at i + q_offset, key j at j + k_offset.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray
from torch import Tensor

from tilewise.masks import Causal, Documents, FirstKeys, Full, Mask, Padding, Slices, SlidingWindow

MODULE = "transformers.masking_utils"
MOST_BLOCKS = 4096  # rectangles of one mask; beyond, there is no structure to speak of


class Frame(NamedTuple):
    """The queries and keys of a call, and the positions at which they start."""

    seqlen_q: int
    seqlen_k: int
    q_offset: int = 0
    k_offset: int = 0

    @property
    def diagonal(self) -> int:
        """key - query, as indices, where their positions are equal."""
        return self.q_offset - self.k_offset


class Node(NamedTuple):
    """A closure: the function of masking_utils that made it (or is it), the closures it combines, and what else it captured, tensors as arrays."""

    kind: str
    parts: tuple["Node", ...]
    captured: dict[str, Any]

    def depends_on_batch(self) -> bool:
        return any(isinstance(x, ndarray) for x in self.captured.values()) or any(part.depends_on_batch() for part in self.parts)

    def has(self, kind: str) -> bool:
        return self.kind == kind or any(part.has(kind) for part in self.parts)


PACKED, REMAPPED = "packed_sequence_mask_function", "remap_positions_for_packed_sequence"
COMBINED = {"and_masks": "mask_functions", "or_masks": "mask_functions", REMAPPED: "mask_function"}
CAPTURED = {
    "causal_mask_function": (),
    "bidirectional_mask_function": (),
    "sliding_window_overlay": ("sliding_window",),
    "sliding_window_bidirectional_overlay": ("sliding_window",),
    "chunked_overlay": ("chunk_size", "left_padding"),
    PACKED: ("packed_sequence_mask",),
    "blockwise_overlay": ("block_sequence_ids",),
    "and_masks": (),
    "or_masks": (),
    REMAPPED: ("position_ids",),
}


class _NoStructure(Exception):
    """The closures mean something that few bands do not say."""


def kind_of(function: Callable) -> str | None:
    """The name of the function of masking_utils that `function` is, or that made it."""
    return getattr(function, "__qualname__", "").partition(".")[0] if getattr(function, "__module__", None) == MODULE else None


def read(function: Callable, known: Iterable[str] = CAPTURED) -> Node | None:
    """The tree of `function`; None where it has a closure that is not in `known`, or captured other things than it should have."""
    kind = kind_of(function)
    if kind is None or kind not in known or kind not in CAPTURED:
        return None
    cells = function.__closure__ or ()
    captured = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    inner = captured.pop(COMBINED[kind], None) if kind in COMBINED else ()
    if inner is None or captured.keys() != set(CAPTURED[kind]):
        return None
    parts: list[Node] = []
    for each in inner if isinstance(inner, tuple) else (inner,):
        part = read(each, known)
        if part is None:
            return None
        same = part.kind == kind and kind in ("and_masks", "or_masks")
        parts += part.parts if same else (part,)  # those of the same kind within it are written out
    values = {name: x.detach().cpu().numpy() if isinstance(x, Tensor) else x for name, x in captured.items()}
    return Node(kind, tuple(parts), values)


def bounds(function: Callable, known: Iterable[str]) -> tuple[int | None, int | None] | None:
    """What `function` allows of key - query, as positions; None where that is not all that it looks at."""
    tree = read(function, {"and_masks", *_DIAGONALS} & set(known))
    return None if tree is None else bounds_of(tree)


def bounds_of(tree: Node) -> tuple[int | None, int | None] | None:
    """`bounds`, of a closure that is read."""
    parts = tree.parts if tree.kind == "and_masks" else (tree,)
    return _bounds(parts, 0) if all(part.kind in _DIAGONALS for part in parts) else None


def keys_seen(tree: Node, padding: ndarray | None, frame: Frame) -> int:
    """A number of keys, at least 1, after which no query sees any: a cache may be longer than what it holds."""
    last = frame.seqlen_k
    parts = tree.parts if tree.kind == "and_masks" else (tree,)
    if any(part.kind == "causal_mask_function" for part in parts):
        last = min(last, frame.seqlen_q + frame.diagonal)
    if padding is not None:
        seen = np.flatnonzero(padding[:, frame.k_offset : frame.k_offset + frame.seqlen_k].any(axis=0))
        last = min(last, int(seen[-1]) + 1 if len(seen) else 0)
    return max(last, 1)


def by_row(tree: Node, padding: ndarray | None, batch: int, frame: Frame) -> list[Mask] | None:
    """The mask of each of `batch` entries, or of all in a list of one; None where there are too many bands.

    padding: bool (batch, at least k_offset + seqlen_k), true where there is a token, or None.
    """
    rows = range(batch if padding is not None or tree.depends_on_batch() else 1)
    try:
        masks = [_both(_row(tree, row, frame), _keys(None if padding is None else _of_row(padding, row), frame)) for row in rows]
    except _NoStructure:
        return None
    return masks[:1] if all(mask == masks[0] for mask in masks) else masks


def entries(tree: Node, padding: ndarray | None, batch: int, frame: Frame) -> list[Mask] | None:
    """`by_row`, but one mask where `padded` has one."""
    alone = padded(tree, padding, frame)
    return by_row(tree, padding, batch, frame) if alone is None else [alone]


def padded(tree: Node, padding: ndarray | None, frame: Frame) -> Mask | None:
    """One mask for entries of a batch that differ by their padding alone, and have their tokens side by side; None for others."""
    if padding is None or tree.depends_on_batch():
        return None
    seen = padding[:, frame.k_offset :][:, : frame.seqlen_k]
    lengths, start, end = seen.sum(axis=1), seen.argmax(axis=1), frame.seqlen_k - seen[:, ::-1].argmax(axis=1)
    start, end = np.where(lengths, start, 0), np.where(lengths, end, 0)
    if (end - start != lengths).any() or (seen == seen[:1]).all():
        return None
    try:
        mask = _row(tree, 0, frame)
    except _NoStructure:
        return None
    if not start.any():
        return _both(mask, Padding(lengths.tolist()))
    start = np.where(lengths, start, frame.seqlen_k)
    to_the_end = (start + lengths == frame.seqlen_k).all()
    return _both(mask, Padding(None if to_the_end else lengths.tolist(), start.tolist()))


def folded(masks: Sequence[Mask], seqlen_q: int, seqlen_k: int) -> Mask:
    """The masks of the entries of a batch as one mask of their queries and keys laid end to end."""
    whole = [
        (mask.cu_seqlens_q, mask.cu_seqlens_k, mask.inner)
        for mask in masks
        if isinstance(mask, Documents) and mask.cu_seqlens_k is not None
        if (mask.cu_seqlens_q[-1], mask.cu_seqlens_k[-1]) == (seqlen_q, seqlen_k)
    ]
    if len(whole) == len(masks) and all(inner == whole[0][2] for *_, inner in whole):
        return Documents(
            [0, *(n * seqlen_q + end for n, (cu_q, _, _) in enumerate(whole) for end in cu_q[1:])],
            [0, *(n * seqlen_k + end for n, (_, cu_k, _) in enumerate(whole) for end in cu_k[1:])],
            inner=whole[0][2],
        )
    pieces = [mask.slices(seqlen_q, seqlen_k) for mask in masks]
    q, k = (np.concatenate([piece[at] + n * seqlen for n, piece in enumerate(pieces)]) for at, seqlen in ((0, seqlen_q), (1, seqlen_k)))
    return Slices(q, k, np.concatenate([kinds for *_, kinds in pieces]))


def between(lo: int | None, hi: int | None, frame: Frame) -> Mask:
    """Query i sees key j iff i + lo <= j <= i + hi; None is unbounded. One band wherever two ends of a SlidingWindow can say it."""
    right, bottom = frame.seqlen_k - 1, 1 - frame.seqlen_q
    lo, hi = None if lo is None or lo <= bottom else lo, None if hi is None or hi >= right else hi
    if lo is None and hi is None:
        return Full()
    aligned = {"bottom_right": frame.seqlen_k - frame.seqlen_q, "top_left": 0}
    for align, diagonal in aligned.items():
        if lo is None and hi == diagonal:
            return Causal(align)
    if lo is not None and hi is not None and lo > hi:
        return Full() - Full()
    within = [align for align, diagonal in aligned.items() if (lo is None or lo <= diagonal) and (hi is None or diagonal <= hi)]
    align = within[0] if within else "bottom_right"
    diagonal = aligned[align]
    return SlidingWindow(None if lo is None else diagonal - lo, None if hi is None else hi - diagonal, align)


def _row(node: Node, row: int, frame: Frame, ends: list[int] | None = None) -> Mask:
    """What the closure allows in batch entry `row`; `ends`: the packed sequences that a query cannot leave, where there are some."""
    if node.kind in _DIAGONALS:
        return _band([node], frame)
    if node.kind == "and_masks":
        return _all_of(node.parts, row, frame, ends)
    if node.kind == "or_masks":
        first, *rest = (_row(part, row, frame, ends) for part in node.parts)
        for mask in rest:
            first = first | mask
        return first
    if node.kind == REMAPPED:
        return _within_sequences(node, row, frame, ends)
    return _same_group(*_groups(node, row, frame), frame)


def _all_of(parts: tuple[Node, ...], row: int, frame: Frame, ends: list[int] | None) -> Mask:
    packed = [part for part in parts if part.kind == PACKED]
    if packed and any(part.has(REMAPPED) for part in parts):
        ends = _sequences(packed[0], row, frame)
        if any(part.kind == REMAPPED for part in parts):  # which does not leave the sequences
            parts = tuple(part for part in parts if part is not packed[0])
    diagonals = [part for part in parts if part.kind in _DIAGONALS]
    rest = [_row(part, row, frame, ends) for part in parts if part.kind not in _DIAGONALS]
    if diagonals and len(rest) == 1 and isinstance(rest[0], Documents) and rest[0].inner == Full() and frame.diagonal == 0:
        return Documents(rest[0].cu_seqlens_q, inner=inner(_bounds(diagonals, 0)))
    mask = _band(diagonals, frame) if diagonals else Full()
    for other in rest:
        mask = _both(mask, other)
    return mask


def _both(one: Mask, other: Mask) -> Mask:
    return other if one == Full() else one if other == Full() else one & other


# What a closure allows of key - query, as positions.
_DIAGONALS: dict[str, Callable[[dict], tuple[int | None, int | None]]] = {
    "causal_mask_function": lambda captured: (None, 0),
    "bidirectional_mask_function": lambda captured: (None, None),
    "sliding_window_overlay": lambda captured: (1 - captured["sliding_window"], None),
    "sliding_window_bidirectional_overlay": lambda captured: (-captured["sliding_window"], captured["sliding_window"]),
}


def looks_at_positions(node: Node) -> bool:
    """Whether a closure asks where tokens are, and nothing of their own."""
    return node.kind in _DIAGONALS or node.kind == "chunked_overlay"


def _bounds(nodes: Sequence[Node], diagonal: int) -> tuple[int | None, int | None]:
    lows, highs = zip(*(_DIAGONALS[node.kind](node.captured) for node in nodes), strict=True)
    lo, hi = max((lo for lo in lows if lo is not None), default=None), min((hi for hi in highs if hi is not None), default=None)
    return None if lo is None else lo + diagonal, None if hi is None else hi + diagonal


def _band(nodes: list[Node], frame: Frame) -> Mask:
    return between(*_bounds(nodes, frame.diagonal), frame)


def inner(bounds: tuple[int | None, int | None]) -> Mask:
    """A band around the diagonal of each document."""
    lo, hi = bounds
    if lo is None:
        return Full() if hi is None else Causal() if hi == 0 else SlidingWindow(None, hi)
    if hi is not None and lo > hi:
        raise _NoStructure
    return SlidingWindow(-lo, hi)


def _sequences(node: Node, row: int, frame: Frame) -> list[int]:
    """Where the packed sequences of a row start, and where the last one ends."""
    ids = _of_row(node.captured["packed_sequence_mask"], row)
    if frame.seqlen_q != frame.seqlen_k or frame.q_offset or frame.k_offset or len(ids) != frame.seqlen_q:
        raise _NoStructure
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
    if len(np.unique(ids[starts])) != len(starts):  # one that is interrupted
        raise _NoStructure
    return [*starts.tolist(), len(ids)]


def _within_sequences(node: Node, row: int, frame: Frame, ends: list[int] | None) -> Mask:
    """What the closure within allows of positions that start anew in each sequence. Of pairs in different sequences nothing is said."""
    positions = _of_row(node.captured["position_ids"], row)
    if ends is None or len(positions) != ends[-1]:
        raise _NoStructure
    steps = np.diff(positions)
    if not (np.delete(steps, [end - 1 for end in ends[1:-1]]) == 1).all():
        raise _NoStructure
    (part,) = node.parts
    parts = part.parts if part.kind == "and_masks" else (part,)
    if all(each.kind in _DIAGONALS for each in parts):
        return Documents(ends, inner=inner(_bounds(list(parts), 0)))
    diagonals = [each for each in parts if each.kind in _DIAGONALS]
    chunks = [each for each in parts if each.kind == "chunked_overlay"]
    if len(diagonals) + len(chunks) != len(parts) or len(chunks) != 1:
        raise _NoStructure
    chunk, size = chunks[0], chunks[0].captured["chunk_size"]
    ids = (positions - _of_row(chunk.captured["left_padding"], row)) // size
    starts = np.union1d(np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1)), ends[:-1])
    return Documents([*starts.tolist(), ends[-1]], inner=inner(_bounds(diagonals, 0)) if diagonals else None)


def _groups(node: Node, row: int, frame: Frame) -> tuple[ndarray, ndarray]:
    """A number for each query and each key: those of the same group see each other, those below 0 nobody."""
    if node.kind == "chunked_overlay":
        left = _of_row(node.captured["left_padding"], row)
        query, key = ((np.arange(n) + offset - left) // node.captured["chunk_size"] for n, offset in (frame[0::2], frame[1::2]))
        least = min(query.min(initial=0), key.min(initial=0))
        return query - least, key - least  # also those before the first token are alike
    if node.kind == "blockwise_overlay":
        ids = _of_row(node.captured["block_sequence_ids"], row)
    elif node.kind == PACKED:
        ids = _of_row(node.captured["packed_sequence_mask"], row)
        ids = ids - ids.min(initial=0)
    else:
        raise _NoStructure
    if len(ids) < max(frame.q_offset + frame.seqlen_q, frame.k_offset + frame.seqlen_k):
        raise _NoStructure
    return ids[frame.q_offset :][: frame.seqlen_q], ids[frame.k_offset :][: frame.seqlen_k]


def _same_group(query: ndarray, key: ndarray, frame: Frame) -> Mask:
    of_queries, of_keys = _runs(query), _runs(key)
    if of_queries == of_keys and len({group for *_, group in of_keys}) == len(of_keys) and sum(b - a for a, b, _ in of_keys) == len(key):
        return Full() if len(of_keys) == 1 else Documents([0, *(b for _, b, _ in of_keys)])
    keys_of: dict[int, list[tuple[int, int]]] = {}
    for a, b, group in of_keys:
        keys_of.setdefault(group, []).append((a, b))
    blocks = [((a, b), keys) for a, b, group in of_queries for keys in keys_of.get(group, ())]
    if len(blocks) > MOST_BLOCKS:
        raise _NoStructure
    if blocks == [((0, frame.seqlen_q), (0, frame.seqlen_k))]:
        return Full()
    return Slices([q for q, _ in blocks], [k for _, k in blocks], [0] * len(blocks))


def _keys(row: ndarray | None, frame: Frame) -> Mask:
    """The keys that are tokens."""
    if row is None:
        return Full()
    runs = _runs(np.where(row[frame.k_offset :][: frame.seqlen_k], 0, -1))
    if len(runs) > MOST_BLOCKS:
        raise _NoStructure
    if len(runs) == 1 and runs[0][0] == 0:
        return Full() if runs[0][1] == frame.seqlen_k else FirstKeys(runs[0][1])
    return Slices([(0, frame.seqlen_q)] * len(runs), [(a, b) for a, b, _ in runs], [0] * len(runs))


def _runs(groups: ndarray) -> list[tuple[int, int, int]]:
    """(start, end, group) of each run of equal numbers, without those below 0."""
    if not len(groups):
        return []
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    ends = [*starts[1:].tolist(), len(groups)]
    return [(a, b, g) for a, b, g in zip(starts.tolist(), ends, groups[starts].tolist(), strict=True) if g >= 0]


def _of_row(values: ndarray, row: int) -> Any:
    """What a captured tensor says of a batch entry; one of batch 1 says it of all."""
    return values[row if values.shape[0] > 1 else 0]
