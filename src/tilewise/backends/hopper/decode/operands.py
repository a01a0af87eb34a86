"""What crosses the boundary between torch and a decode launch; as in hopper/operands.py, a field is a tensor or number, a stand-in, or the DSL's."""

from typing import NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """Ragged queries are those of one entry, one after another; then so are O and L."""

    Q: Tensor  # (batch or 1, seqlen_q or total_q, heads_q, head_dim)
    K: Tensor  # (entries or pages, capacity or page_size, heads_k, head_dim)
    V: Tensor  # likewise, with head_dim_v
    O: Tensor  # as Q, with head_dim_v
    L: Tensor  # (batch or 1, heads_q, seqlen_q or total_q) fp32
    tables: "Tables | None" = None  # by which Q is rotated
    k_scale: Tensor | None = (
        None  # fp32, of caches of 8 bits, which are int8 here: (batch, heads_k), or (entries or pages, capacity or page_size, heads_k)
    )
    v_scale: Tensor | None = None


class Tables(NamedTuple):
    """Of rotary positions, (seqlen_rotary, rotary_dim / 2)."""

    cos: Tensor
    sin: Tensor


class Lengths(NamedTuple):
    """int32 or int64, but for the tree; read on the GPU."""

    seqlens: Tensor  # (batch,): clamped to [0, capacity]
    pages: Tensor | None  # (batch, max_pages)
    cu_seqlens_q: Tensor | None  # (batch + 1,)
    entries: Tensor | None  # (batch,): the entry of K and V that holds a sequence
    leftpad: Tensor | None  # (batch,): the first token that may be seen
    tree: Tensor | None  # (batch or 1, new, new) uint8: which of the newest tokens see which
    all_seqlens: Tensor | None = None  # (sequences,): in a prefix's launch, whose keys are the longest one's of those with queries
    all_cu_seqlens_q: Tensor | None = None  # (sequences + 1,)


class Prior(NamedTuple):
    """What the launch before this one found for the first `tokens` keys of every sequence. Shaped as O and L, fp32."""

    O: Tensor
    L: Tensor
    tokens: int
    early: int = 0  # 1 if this launch takes nothing else from launches that may still run: no copy was made since


class Work(NamedTuple):
    """Pieces of units that several thread blocks share; arrivals are 0 before and after."""

    sums: Tensor  # (slots, rows of a unit at most, head_dim_v) fp32: O of each piece
    lse: Tensor  # (2, slots, rows) fp32: of each piece, and of a group of them, whose sum takes the first one's place
    arrivals: Tensor  # (counters,) int32: two a unit, one a group
    columns: int  # of key heads, side by side
    blocks: int  # thread blocks of a column
    queries: int  # of a sequence, at most
    least: int  # tiles of a block's share, where there are any
    split: int  # tiles of a piece; 0: not fixed
    most_pieces: int  # of a unit, then
    step: int  # tiles of rows, after which keys that are seen end `rise` tiles later
    rise: int  # a power of two, as its logarithm
    alone: int  # `scheduler.Shape.alone`
    polls: int  # of a block with nothing else to do, at least, for the other pieces of its unit


class Window(NamedTuple):
    """A row at position p sees the keys [p + lo, p + hi]."""

    lo: int
    hi: int


class New(NamedTuple):
    """Tokens on their way into caches; packed ones are those of one entry."""

    K_cache: Tensor  # (entries or pages, capacity or page_size, heads_k, head_dim)
    V_cache: Tensor  # likewise, with head_dim_v
    K: Tensor  # (batch or 1, new or total_new, heads_k, head_dim)
    V: Tensor  # likewise, with head_dim_v


class Places(NamedTuple):
    """Where they go: int32 or int64."""

    seqlens: Tensor  # (batch,)
    pages: Tensor | None  # (batch, max_pages)
    entries: Tensor | None  # (batch,)
    cu_seqlens: Tensor | None  # (batch + 1,)
    ends: Tensor  # (batch,) int32, written: the lengths behind them


class Turn(NamedTuple):
    """Rotary tables (seqlen_rotary, rotary_dim / 2)."""

    cos: Tensor
    sin: Tensor
    first: Tensor | None  # (batch,): positions of the first new tokens, where they are not their lengths
