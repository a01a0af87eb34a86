"""What crosses the boundary between torch and a launch: each bundle is defined once, for the host, for the compiler and for the device.

On the host a field holds a torch tensor or a Python number, for the compiler a stand-in (sm90/jit.py), on the device what the DSL makes of it. None
stands for what a configuration does without. Nothing here imports the DSL.
"""

from typing import NamedTuple

from torch import Tensor


class Band(NamedTuple):
    """Row q of [q0, q1) sees the keys [max(k0, q + lo), min(k1, q + hi + 1)); other rows see none. Or the tables say what is seen."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int
    hi: int
    tables: "RowTables | KeyTables | None"


class RowTables(NamedTuple):
    """What the forward pass reads of a mask beyond one band, int32: order for "rows" and "runs", rows and walks for "rows", the others for "runs"."""

    order: Tensor | None = None  # (m_blocks,); with clusters a number for each cluster's
    spans: Tensor | None = None  # (planes, m_blocks, 3)
    runs: Tensor | None = None  # (runs, 4)
    bands: Tensor | None = None  # (bands, 6)
    bitmaps: Tensor | None = None  # (bitmaps, tile_m, WORDS)
    planes: Tensor | None = None  # (batch, heads)
    rows: Tensor | None = None  # (2, seqlen_q): begin, end
    walks: Tensor | None = None  # (m_blocks, 4): the fields of keys.Walk


class KeyTables(NamedTuple):
    """What the backward pass reads of it, int32; backward/tables.py makes them."""

    keys: Tensor | None = None  # (2, seqlen_q): begin and end of the keys that a query sees
    queries: Tensor | None = None  # (2, seqlen_k): of the queries that see a key
    walks: Tensor | None = None  # (n_blocks + 1, 4): first, last, free_first, free_last of order.Walk; then the most tiles of one, and all
    visitors: Tensor | None = None  # (m_blocks, 2): the fields of order.Visitors
    visits: Tensor | None = None  # (visits, 4): the fields of queries.Visit
    bands: Tensor | None = None  # (bands, 6): of queries that see a key, so keys are the rows
    bitmaps: Tensor | None = None  # (bitmaps, tile_n, tile_m / WORD)
    spans: Tensor | None = None  # (planes, n_blocks, 2): the visits of a block of keys
    visited: Tensor | None = None  # (planes, m_blocks): how many blocks of keys visit a tile of queries
    seeing: Tensor | None = None  # (planes, seqlen_q): whether a query sees any key
    planes: Tensor | None = None  # (batch, heads_q): whose mask each head has

    # For by_queries.py:
    query_walks: Tensor | None = None  # (tiles of queries, 4): the fields of its Walk
    query_visits: Tensor | None = None  # as those of keys; for these, queries are the rows
    query_bands: Tensor | None = None
    query_bitmaps: Tensor | None = None
    query_spans: Tensor | None = None


class Tensors(NamedTuple):
    """Of a forward pass, as torch has them: (batch, seqlen, heads, head_dim); L (batch, heads, seqlen_q) fp32."""

    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor
    L: Tensor


class Work(NamedTuple):
    """How a forward pass is divided among thread blocks; counter and arrivals are 0 before and after. All in global memory."""

    counter: Tensor  # (1,) int32: units that are fetched
    sums: Tensor | None  # (slots * Config.partial_elements,) fp32: pieces of units that several thread blocks share
    arrivals: Tensor | None  # (slots * warps,) int32
    section: int  # heads whose units are mixed (scheduler.Units)
    blocks: int  # thread blocks, at most


class Draw(NamedTuple):
    """Which pairs dropout keeps, as backends/philox.py says. Words of 32 bits, as int32."""

    keys: tuple  # of int: of every round two
    offset: int
    threshold: int  # of an evaluation's words, the least that is kept
    heads: int  # of the queries, in a batch entry
    first: int  # the number of the launch's first head among those of all batch entries
    rescale: float  # 1 / (1 - p), by which sums over kept pairs are multiplied; 1 where everything is dropped
    lift: float  # the part of it that dS has ahead of its sums, a power of two; 1 but for fp16
    rest: float  # rescale / lift: what is left for those sums
    kept: float  # lift * (1 - p), of delta within dS


class Scores(NamedTuple):
    """What becomes of the forward pass's scores."""

    scale_log2: float  # what multiplies the kernel's scores in the exponent of 2
    inner: float | None  # scale / softcap
    factor: float | None  # of logits: the scale, or softcap
    bias: Tensor | None  # (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k)
    slopes: Tensor | None  # (batch or 1, heads_q) fp32
    diagonal: Tensor | None  # (seqlen_q,) int64
    sink: Tensor | None  # (heads_q,) fp32
    row_max: Tensor | None  # (batch, heads_q, seqlen_q) fp32, written: the largest of each row
    shift: int  # seqlen_k - seqlen_q, the diagonal where there is no tensor
    draw: Draw | None = None


class Changes(NamedTuple):
    """Likewise of the backward pass's."""

    inner: float | None = None
    factor: float | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    diagonal: Tensor | None = None
    shift: int | None = None  # with ALiBi only
    draw: Draw | None = None


class Given(NamedTuple):
    """What a backward pass reads, as torch has it."""

    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor
    L: Tensor  # (batch, heads_q, seqlen_q) fp32
    dO: Tensor
    dL: Tensor  # likewise; L itself where no gradient reaches it


class Gradients(NamedTuple):
    """What a backward pass writes."""

    dQ: Tensor
    dK: Tensor
    dV: Tensor


class Scratch(NamedTuple):
    """What the kernels of a backward pass leave for each other; prepare.py begins with it."""

    lse: Tensor  # (batch, heads_q, rows of whole tiles) fp32: in powers of two (`natural`: of e), +inf for a row that sees nothing
    minus_delta: Tensor  # likewise: -delta; with dropout times Draw.kept, as dS is summed up without Draw.rest
    sum_dQ: Tensor  # (batch, heads_q, m_blocks, tile_m * head_dim) fp32, a tile in the order of its registers
    turns: Tensor  # (batch, heads_q, m_blocks, counters) int32
    spoiled: Tensor | None  # (1 + .,) int32: how many parts of gradients are not finite, and which (backward/repair/entries.py)
    counter: Tensor | None  # (1 + parts,) int32: units that are fetched, and for each part whether, or how often, it was written
    partial: Tensor | None  # (parts, numbers) fp32: parts or sums of dK and dV of a block of keys (shares.py)


class Turns(NamedTuple):
    """The order of a backward pass's thread blocks, of which order.Order is made."""

    num_sms: int
    ascending: int
    abreast: int
    together: int
    queries_together: int  # heads that take turns in by_queries.py
    behind: int
    shared_from: int
    shares: int


class Scalars(NamedTuple):
    """Numbers of a backward pass."""

    scale: float
    scale_log2: float
    has_dL: int
    last_q: int  # queries from here on are padding, and are read as zeros, whatever lies there
    last_k: int  # likewise keys


class Repaired(NamedTuple):
    """Gradients that repairs look at, behind what they are of."""

    Q: Tensor
    K: Tensor
    V: Tensor
    dO: Tensor
    dQ: Tensor
    dK: Tensor
    dV: Tensor


class Spoiled(NamedTuple):
    """What repairs read of Scratch."""

    lse: Tensor
    minus_delta: Tensor
    spoiled: Tensor


class RepairScalars(NamedTuple):
    """Numbers of repairs."""

    scale: float  # from sums of dQ and dK to gradients
    scale_log2: float
    enlarged: float  # what P is multiplied by before it is rounded
    of_dV: float  # from sums of dV to gradients
    looks: int  # whether it may be looked for hidden numbers (Config.looks)
    of_queries: int  # in how many parts of their columns dQ, and dK and dV, are repaired
    of_keys: int
    blocks: int  # thread blocks


class BiasTensors(NamedTuple):
    """Of a bias's gradient: (batch, seqlen, heads, head_dim), but for what says otherwise."""

    Q: Tensor
    K: Tensor
    lse: Tensor  # (batch, heads_q, at least seqlen_q) fp32, in natural units, +inf for a row without keys
    minus_delta: Tensor  # likewise
    dB: Tensor  # (parts, batch or 1, heads_q or 1, seqlen_q, seqlen_k); without rows (parts, batch or 1, heads_q or 1, 1, seqlen_k)


class Packed(NamedTuple):
    """Documents: (documents + 1,) int32 each, and where a row sees keys of its document (tables.documents.Offsets)."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqlen_k: int
    lo: int
    hi: int
    lo_left: int
    hi_left: int
