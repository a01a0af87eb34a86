"""What crosses the boundary between torch and a decode launch; as in hopper/operands.py, a field is a tensor or number, a stand-in, or the DSL's."""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.hopper.operands import LikeL, LikeQ
from tilewise.backends.hopper.stand_ins import Floats, Ints, Of, When
from tilewise.problem import Share


def _stored(config) -> torch.dtype:
    """Of caches, which have int8 for all of 8 bits."""
    return torch.int8 if config.widens else config.dtype


def _sequences(config) -> str:
    """Those that have a length."""
    return "sequences" if config.ragged else "batch"


def _everyone(config) -> str:
    """All sequences, also in a prefix's launch."""
    return "everyone" if config.common else _sequences(config)


def _index(name: str) -> Callable:
    """int64 where `Config.wide` names it, otherwise int32."""
    return lambda config: torch.int64 if name in config.wide else torch.int32


def _scales(of: str, config) -> str | None:
    return {"": None, "head": f"{_sequences(config)} heads_k", "token": "entries capacity heads_k"}[of]


class Tables(NamedTuple):
    """Of rotary positions."""

    cos: Annotated[Tensor, Of("seqlen_rotary pairs", "rotary.dtype")]  # pairs: rotary_dim / 2
    sin: Annotated[Tensor, Of("seqlen_rotary pairs", "rotary.dtype")]


class Tensors(NamedTuple):
    """Ragged queries are those of one entry, one after another; then so are O and L. entries and capacity may be pages and page_size."""

    Q: LikeQ
    K: Annotated[Tensor, Of("entries capacity heads_k head_dim", _stored, aligned=True)]
    V: Annotated[Tensor, Of("entries capacity heads_k head_dim_v", _stored, aligned=True)]
    O: Annotated[Tensor, Of("batch seqlen_q heads_q head_dim_v", lambda config: config.out or config.dtype, aligned=True)]
    L: LikeL
    tables: Annotated[Tables | None, When("rotary")] = None  # by which Q is rotated
    k_scale: Annotated[Tensor | None, Floats(lambda config: _scales(config.scales[0], config), scattered=True)] = None
    v_scale: Annotated[Tensor | None, Floats(lambda config: _scales(config.scales[1], config), scattered=True)] = None


class Lengths(NamedTuple):
    """int32 or int64, but for the tree; read on the GPU."""

    seqlens: Annotated[Tensor, Of(_sequences, _index("seqlens"))]  # clamped to [0, capacity]
    pages: Annotated[Tensor | None, When("box"), Of(lambda config: f"{_everyone(config)} max_pages", _index("pages"))]
    cu_seqlens_q: Annotated[Tensor | None, When("ragged"), Of("cu_seqlens", _index("cu_seqlens_q"))]
    entries: Annotated[Tensor | None, When("entries"), Of(_everyone, _index("entries"))]  # the entry of K and V that holds a sequence
    leftpad: Annotated[Tensor | None, When("leftpad"), Of(_sequences, _index("leftpad"))]  # the first token that may be seen
    tree: Annotated[Tensor | None, When("tree"), Of("_ new new", torch.uint8)]  # which of the newest tokens see which; _: batch or 1
    # In a prefix's launch, which reads the keys of the longest sequence with queries:
    all_seqlens: Annotated[Tensor | None, When("common"), Of(_everyone, _index("all_seqlens"))] = None
    all_cu_seqlens_q: Annotated[Tensor | None, When("common", ("packed",)), Of("all_cu_seqlens", _index("all_cu_seqlens_q"))] = None
    share: Annotated[Share | None, When("share")] = None  # the tokens that are in the caches; lengths and leftpad are of whole sequences


class Prior(NamedTuple):
    """What the launch before this one found for the first `tokens` keys of every sequence. Shaped as O and L, fp32."""

    O: Annotated[Tensor, Floats("batch seqlen_q heads_q head_dim_v", aligned=True)]
    L: LikeL
    tokens: int
    early: int = 0  # 1 if this launch takes nothing else from launches that may still run: no copy was made since


class Work(NamedTuple):
    """Pieces of units that several thread blocks share; arrivals are 0 before and after."""

    sums: Annotated[Tensor, Floats("slots rows head_dim_v", aligned=True)]  # O of each piece; rows: of a unit, at most
    lse: Annotated[Tensor, Floats("2 slots rows")]  # of each piece, and of a group of them; a group's sum takes its first piece's place
    arrivals: Annotated[Tensor, Ints("counters")]  # two a unit, one a group
    columns: int  # of key heads, side by side
    blocks: int  # thread blocks of a column
    queries: int  # of a sequence, at most
    least: int  # tiles of a block's share, where there are any
    split: int  # tiles of a piece; 0: not fixed
    most_pieces: int  # of a unit, then
    step: int  # tiles of rows, after which keys that are seen end `rise` tiles later
    rise: int  # a power of two, as its logarithm
    solo_speedup_x4: int  # `scheduler.Shape.solo_speedup_x4`
    polls: int  # of a block with nothing else to do, at least, for the other pieces of its unit


class New(NamedTuple):
    """Tokens on their way into caches; packed ones are those of one entry. entries and capacity as in `Tensors`; tokens: new, or total_new."""

    K_cache: Annotated[Tensor, Of("entries capacity heads_k head_dim", aligned=True)]
    V_cache: Annotated[Tensor, Of("entries capacity heads_k head_dim_v", aligned=True)]
    K: Annotated[Tensor, Of("groups tokens heads_k head_dim", aligned=True)]
    V: Annotated[Tensor, Of("groups tokens heads_k head_dim_v", aligned=True)]


class Places(NamedTuple):
    """Where they go: int32 or int64."""

    seqlens: Annotated[Tensor, Of("batch", "seqlens")]
    pages: Annotated[Tensor | None, Of("batch max_pages", "pages")]
    entries: Annotated[Tensor | None, Of("batch", "entries")]
    cu_seqlens: Annotated[Tensor | None, Of("cu_seqlens", "cu_seqlens")]
    ends: Annotated[Tensor, Ints("batch")]  # written: the lengths behind them
    share: Annotated[Share | None, When("share")] = None  # the tokens that have a place


class RotaryTables(NamedTuple):
    """Rotary tables (seqlen_rotary, rotary_dim / 2)."""

    cos: Annotated[Tensor, Of("seqlen_rotary pairs", "rotary")]
    sin: Annotated[Tensor, Of("seqlen_rotary pairs", "rotary")]
    first: Annotated[Tensor | None, Of("batch", "first")]  # positions of the first new tokens, where they are not their lengths
