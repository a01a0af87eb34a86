"""Packed documents of a padding-free batch, as transformers' keywords say them to each layer: cu_seq_lens_q and _k, seq_idx, position_ids.

A model makes its mask without them. Here each document gets the mask that it would have alone: bands go to `tilewise.attention_varlen`, which
leaves the lengths where they are; what else the model said is made again with the documents in it.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from tilewise.compat import hf_masks
from tilewise.compat.hf_masks import PACKED, REMAPPED, Frame, Node
from tilewise.compat.hf_pairs import Pairs
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import Causal, Dense, Full, Mask

Shape = tuple[int, int, int, int]  # of pairs: (batch, 1, seqlen_q, seqlen_k)


class Said(NamedTuple):
    """What a call says of its documents, and the keyword that says it; None where it says nothing."""

    name: str
    cu_q: Tensor | None = None  # (documents + 1,) ends of the queries' documents, of all entries end to end
    cu_k: Tensor | None = None
    seq_idx: Tensor | None = None  # (batch or 1, seqlen), the number of each token's document

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self[1:] if x is not None]


def said(given: Mapping[str, Any], pairs: Any, shape: Shape) -> Said | None:
    """What keywords say on top of the model's mask of this shape. ShapeError for values of other kinds than theirs."""
    cu_q, cu_k, seq_idx = (given.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"))
    if cu_q is cu_k is seq_idx is None:
        seq_idx = _restarts(pairs, given.get("position_ids"), shape)
        return None if seq_idx is None else Said("position_ids", seq_idx=seq_idx)
    for name, x, dims in (("cu_seq_lens_q", cu_q, 1), ("cu_seq_lens_k", cu_k, 1), ("seq_idx", seq_idx, 2)):
        if x is not None and (not isinstance(x, Tensor) or x.dim() != dims or x.is_floating_point()):
            expected = "(documents + 1,)" if dims == 1 else "(batch or 1, seqlen)"
            found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{name} must be integers of shape {expected}, got {found}")
    name = "seq_idx" if cu_q is cu_k is None else "cu_seq_lens_k" if cu_q is None else "cu_seq_lens_q"
    return Said(name, cu_k if cu_q is None else cu_q, cu_q if cu_k is None else cu_k, seq_idx)


_latest: list[tuple[weakref.ref[Tensor], list[int], Tensor | None]] = []  # position_ids, weakly, their version, and what `_restarts` found


def _restarts(pairs: Any, position_ids: Any, shape: Shape) -> Tensor | None:
    """seq_idx of positions that start anew where the model's mask does not say so, as with a cache; they are read once for all layers.

    Of a traced call they are not read, and with a mask they say nothing then: models hand on positions of their own making as well.
    """
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] < 2:
        return None
    traced = is_tracing(position_ids)
    if pairs is not None:
        origin = pairs.origin if isinstance(pairs, Pairs) else None
        if traced or origin is None or origin.tree is None or origin.padding is not None or origin.tree.has(PACKED):
            return None
    if _square(pairs, shape) is None or tuple(position_ids.shape) not in ((1, shape[2]), (shape[0], shape[2])):
        return None
    version = _versions([position_ids])
    if version is not None and _latest and _latest[0][0]() is position_ids and _latest[0][1] == version:
        return _latest[0][2]
    numbers = (torch.diff(position_ids, dim=1, prepend=position_ids[:, :1] - 1) <= 0).cumsum(1)
    found = numbers if traced or bool(numbers[:, -1].any()) else None
    if version is not None:
        _latest[:] = [(weakref.ref(position_ids), version, found)]
    return found


def _square(pairs: Pairs | Mask | None, shape: Shape) -> Frame | None:
    """The frame of queries that see keys of their own only, which may be fewer or have empty places of a cache behind them; None for others."""
    frame = pairs.origin.frame if isinstance(pairs, Pairs) and pairs.origin is not None else None
    if frame is None:
        frame = Frame(*shape[2:])
    fits = not (frame.q_offset or frame.k_offset) and frame.seqlen_k <= frame.seqlen_q <= shape[3]
    return Frame(frame.seqlen_q, frame.seqlen_q) if fits else None


def inner_band(what: Said, given: Any, causal: bool, shape: Shape) -> Mask | None:
    """What is visible within each document, where that is a band around its diagonal and all that the model said; else None."""
    if what.seq_idx is not None or (given is not None and not isinstance(given, Pairs)):
        return None
    if given is None:
        return Causal() if causal else Full()
    origin = given.origin
    if origin is None or origin.bounds is None or origin.frame is None or _square(given, shape) is None:
        return None
    return hf_masks.inner(origin.bounds)


def apart(what: Said, given: Pairs | Mask | None, causal: bool, shape: Shape) -> Pairs:
    """The pairs that share a document, among those of `given`, or of `causal` where there is none.

    Raises UnsupportedError where a cache or an encoder has more keys, and for masks of which nobody knows what they would be for one document.
    """
    if not isinstance(given, Pairs):
        return _made(what, given, causal, shape)
    held = what.tensors
    versions = _versions(held)
    if given.apart is not None and versions is not None:
        before, then, found = given.apart  # by the layer before
        if versions == then and len(before) == len(held) and all(a is b for a, b in zip(before, held, strict=True)):
            return found
    found = _made(what, given, causal, shape)
    given.apart = None if versions is None else (held, versions, found)
    return found


def _made(what: Said, given: Pairs | Mask | None, causal: bool, shape: Shape) -> Pairs:
    batch, _, seqlen_q, seqlen_k = shape
    frame = _square(given, shape)
    if frame is None:
        raise UnsupportedError(
            f"{what.name} gives the documents of {seqlen_q} queries, but there are {seqlen_k} keys, from a cache or an encoder, whose documents it "
            "does not give; leave it out of such steps, or call tilewise.attention_varlen"
        )
    origin, tree = given.origin if isinstance(given, Pairs) else None, None
    if given is None:
        tree = Node("causal_mask_function" if causal else "bidirectional_mask_function", (), {})
    elif origin is not None:
        tree = origin.tree
    if not is_tracing(what.tensors[0]):
        check_rows(what, batch, seqlen_q)
        if tree is not None and (numbers := _numbers(what, batch, seqlen_q)) is not None:
            padding = None if origin is None else origin.padding
            masks = hf_masks.entries(_with(tree, numbers), padding, batch, frame)
            if masks is not None:
                return Pairs(masks, shape, frame.seqlen_k)
    if origin is not None and (origin.moves or (tree is not None and tree.has("chunked_overlay"))):
        raise UnsupportedError(
            f"{what.name} cannot be put into this layer's mask, which counts positions from the start of the batch in a way that is not known; pass "
            "position_ids that start anew in each document, with use_cache=False, in its place"
        )
    same = Dense(_same(what, batch, seqlen_q))
    if given is None:
        return Pairs((same & Causal() if causal else same,), shape, seqlen_q)
    if not isinstance(given, Pairs):
        return Pairs((given & same,), shape, seqlen_k)
    if given.mask is not None and not given.folded and given.keys == seqlen_q:
        return Pairs((given.mask & same,), shape, given.keys)
    return Pairs((Dense(given.bits()[..., :seqlen_q]) & same,), shape, seqlen_q)


def check_rows(what: Said, batch: int, seqlen: int) -> None:
    """ShapeError unless cu_seq_lens of several entries have the ends of each among them; for one entry, nothing is read."""
    if batch == 1 or what.cu_q is None:
        return
    missing = set(range(seqlen, batch * seqlen + 1, seqlen)) - set(what.cu_q.tolist())
    if missing:
        raise ShapeError(
            f"{what.name} must count the tokens of all {batch} entries end to end, {seqlen} each, and no document may go from one entry into the "
            f"next: {min(missing)} is not among its ends"
        )


def _versions(tensors: list[Tensor]) -> list[int] | None:
    """What changes when torch's operators write to them; None where that is not counted."""
    return None if any(is_tracing(x) or x.is_inference() for x in tensors) else [x._version for x in tensors]


def _of_tokens(what: Said, batch: int, seqlen: int) -> Iterator[tuple[Tensor, Tensor, int | None]]:
    """The document of each query and of each key, (batch or 1, seqlen), and the number of those after the last one, by each that says it."""
    if what.cu_q is not None and what.cu_k is not None:  # both or neither
        place = torch.arange(batch * seqlen, device=what.cu_q.device, dtype=what.cu_q.dtype)
        of_q, of_k = (
            torch.searchsorted(cu[1:].contiguous(), place.to(cu), right=True).view(batch, seqlen) for cu in (what.cu_q, what.cu_k)
        )
        yield of_q, of_k, what.cu_q.shape[0] - 1
    if what.seq_idx is not None:
        if tuple(what.seq_idx.shape) not in ((1, seqlen), (batch, seqlen)):
            raise ShapeError(f"{what.name} must be ({batch} or 1, {seqlen}), as the layer's tokens, got shape {tuple(what.seq_idx.shape)}")
        yield what.seq_idx, what.seq_idx, None


def _same(what: Said, batch: int, seqlen: int) -> Tensor:
    """Which pairs share a document, bool (batch or 1, 1, seqlen, seqlen); tokens after the last one see nothing and are seen by nobody."""
    found = None
    for of_q, of_k, after in _of_tokens(what, batch, seqlen):
        pairs = of_q[:, None, :, None] == of_k[:, None, None, :]
        if after is not None:
            pairs = pairs & (of_q < after)[:, None, :, None]
        found = pairs if found is None else found & pairs
    assert found is not None  # since something says the documents
    return found


def _numbers(what: Said, batch: int, seqlen: int) -> ndarray | None:
    """Numbers of documents (batch or 1, seqlen) that rise by 1; None where some tokens have none, or one lies in several places."""
    starts = np.zeros((1, seqlen), bool)
    for of_q, of_k, after in _of_tokens(what, batch, seqlen):
        of_q, of_k = of_q.cpu().numpy(), of_k.cpu().numpy()
        starting = np.diff(of_q, axis=1, prepend=of_q[:, :1]) != 0
        whole = all(len(np.unique(row)) == 1 + count for row, count in zip(of_q, starting.sum(axis=1), strict=True))
        if not whole or not np.array_equal(of_q, of_k) or (of_q == after).any():
            return None
        starts = starts | starting
    return starts.cumsum(axis=1)


def _with(tree: Node, numbers: ndarray) -> Node:
    """The closures as transformers itself puts them together for documents that it finds by their positions."""
    parts = tree.parts if tree.kind == "and_masks" else (tree,)
    starts = np.diff(numbers, axis=1) != 0
    by_position = [np.diff(part.captured["packed_sequence_mask"], axis=1) != 0 for part in parts if part.kind == PACKED]
    if any(each.shape[1] == starts.shape[1] and (each == starts).all() for each in by_position):
        return tree  # which has these documents
    place = np.arange(numbers.shape[1])
    first = np.maximum.accumulate(np.where(np.diff(numbers, axis=1, prepend=-1) != 0, place, 0), axis=1)
    anew = _starting_anew(tree, place - first)
    packed = Node(PACKED, (), {"packed_sequence_mask": numbers})
    return Node("and_masks", (*(anew.parts if anew.kind == "and_masks" else (anew,)), packed), {})


def _starting_anew(node: Node, positions: ndarray) -> Node:
    """The closures, with positions that start anew for those that look at positions alone."""
    parts = node.parts if node.kind == "and_masks" else (node,)
    if all(hf_masks.looks_at_positions(part) for part in parts):
        return Node(REMAPPED, (node,), {"position_ids": positions})
    if node.kind in ("and_masks", "or_masks"):
        return node._replace(parts=tuple(_starting_anew(part, positions) for part in node.parts))
    return node
