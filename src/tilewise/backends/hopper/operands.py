"""What crosses the boundary between torch and a launch: each bundle is defined once, for the host, for the compiler and for the device.

On the host a field holds a torch tensor or a Python number, for the compiler a stand-in that is made of its annotation (stand_ins.py), on the
device what the DSL makes of it. None stands for what a configuration does without. Nothing here imports the DSL.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import philox
from tilewise.backends.hopper.stand_ins import Floats, Ints, Of, When

LikeQ = Annotated[Tensor, Of("batch seqlen_q heads_q head_dim", aligned=True)]
LikeK = Annotated[Tensor, Of("batch seqlen_k heads_k head_dim", aligned=True)]
LikeV = Annotated[Tensor, Of("batch seqlen_k heads_k head_dim_v", aligned=True)]
LikeO = Annotated[Tensor, Of("batch seqlen_q heads_q head_dim_v", aligned=True)]
LikeL = Annotated[Tensor, Floats("batch heads_q seqlen_q")]

ROWS, RUNS, EITHER = (When("mask_kind", each) for each in (("varlen",), ("tiles",), ("varlen", "tiles")))
APART = When("separate_dq_kernel")
WORD = 32  # queries in a word of a bitmap of KeyTables
QUERIES, KEYS = 128, 64  # of a tile of by_queries.py


class RowTables(NamedTuple):
    """What the forward pass reads of a mask beyond one band."""

    order: Annotated[Tensor | None, EITHER, Ints(lambda config: "m_blocks" if config.cluster == 1 else "clusters")] = None
    spans: Annotated[Tensor | None, RUNS, Ints("planes m_blocks 3")] = None
    runs: Annotated[Tensor | None, RUNS, Ints("runs 4")] = None
    bands: Annotated[Tensor | None, RUNS, Ints("bands 6")] = None
    bitmaps: Annotated[Tensor | None, RUNS, Ints(lambda config: f"bitmaps {config.tile_m} 4")] = None  # 4 words
    planes: Annotated[Tensor | None, RUNS, Ints("batch heads_q")] = None
    rows: Annotated[Tensor | None, ROWS, Ints("2 seqlen_q")] = None  # begin, end
    walks: Annotated[Tensor | None, ROWS, Ints("m_blocks 4")] = None  # the fields of keys.Walk


class KeyTables(NamedTuple):
    """What the backward pass reads of it; backward/tables.py makes them."""

    keys: Annotated[Tensor | None, ROWS, Ints("2 seqlen_q")] = None  # begin and end of the keys that a query sees
    queries: Annotated[Tensor | None, ROWS, Ints("2 seqlen_k")] = None  # of the queries that see a key
    # n_blocks + 1: first, last, free_first, free_last of order.Walk; then the most tiles of one, and all.
    walks: Annotated[Tensor | None, ROWS, Ints("walks 4")] = None
    visitors: Annotated[Tensor | None, ROWS, Ints("m_blocks 2")] = None  # the fields of order.Visitors
    visits: Annotated[Tensor | None, RUNS, Ints("visits 4", aligned=True)] = None  # the fields of queries.Visit
    bands: Annotated[Tensor | None, RUNS, Ints("bands 6")] = None  # of queries that see a key, so keys are the rows
    bitmaps: Annotated[Tensor | None, RUNS, Ints(lambda config: f"bitmaps {config.tile_n} {config.tile_m // WORD}")] = None
    spans: Annotated[Tensor | None, RUNS, Ints("planes n_blocks 2")] = None  # the visits of a block of keys
    visited: Annotated[Tensor | None, RUNS, Ints("planes m_blocks")] = None  # how many blocks of keys visit a tile of queries
    seeing: Annotated[Tensor | None, RUNS, Ints("planes seqlen_q")] = None  # whether a query sees any key
    planes: Annotated[Tensor | None, RUNS, Ints("batch heads_q")] = None  # the plane that is each head's mask

    # For by_queries.py:
    query_walks: Annotated[Tensor | None, ROWS, APART, Ints("query_blocks 4")] = None  # the fields of its Walk
    query_visits: Annotated[Tensor | None, RUNS, APART, Ints("query_visits 4", aligned=True)] = (
        None  # as those of keys; here queries are the rows
    )
    query_bands: Annotated[Tensor | None, RUNS, APART, Ints("query_bands 6")] = None
    query_bitmaps: Annotated[Tensor | None, RUNS, APART, Ints(f"query_bitmaps {QUERIES} {KEYS // WORD}")] = None
    query_spans: Annotated[Tensor | None, RUNS, APART, Ints("query_planes query_blocks 2")] = None


class Band(NamedTuple):
    """Row q of [q0, q1) sees the keys [max(k0, q + lo), min(k1, q + hi + 1)); other rows see none. Or the tables say what is seen."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int
    hi: int
    tables: RowTables | KeyTables | None


class Tensors(NamedTuple):
    """Of a forward pass, as torch has them."""

    Q: LikeQ
    K: LikeK
    V: LikeV
    O: LikeO
    L: LikeL


class Work(NamedTuple):
    """How a forward pass is divided among thread blocks; counter and arrivals are 0 before and after. All in global memory."""

    counter: Annotated[Tensor, Ints("1")]  # units that are fetched
    # slots * Config.partial_elements: pieces of units that several thread blocks share.
    sums: Annotated[Tensor | None, When("shares"), Floats("elements", aligned=True)]
    arrivals: Annotated[Tensor | None, When("shares"), Ints("arrivals")]  # slots * warps
    section: int  # heads that have their units mixed (scheduler.Units)
    blocks: int  # thread blocks, at most


class Draw(NamedTuple):
    """Which pairs dropout keeps, as backends/philox.py says. Words of 32 bits, as int32."""

    keys: tuple[(int,) * (2 * philox.ROUNDS)]  # of every round two
    offset: int
    threshold: int  # of an evaluation's words, the least that is kept
    heads: int  # of the queries, in a batch entry
    first: int  # the number of the launch's first head among those of all batch entries
    rescale: float  # 1 / (1 - p), by which sums over kept pairs are multiplied; 1 where everything is dropped
    lift: float  # the part of it that dS has ahead of its sums, a power of two; 1 but for fp16
    rest: float  # rescale / lift: what is left for those sums
    kept: float  # lift * (1 - p), of delta within dS


Inner = Annotated[float | None, When("softcap")]  # scale / softcap
Factor = Annotated[float | None, When("natural")]  # of logits: the scale, or softcap
Bias = Annotated[Tensor | None, Of("_ _ _ seqlen_k", "bias")]  # _: batch, heads_q, seqlen_q, or 1 each
Slopes = Annotated[Tensor | None, When("alibi"), Floats("_ heads_q")]  # _: batch or 1
Diagonal = Annotated[Tensor | None, When("diagonal"), Of("seqlen_q", torch.int64)]


class Scores(NamedTuple):
    """What becomes of the forward pass's scores."""

    scale_log2: float  # what multiplies the kernel's scores in the exponent of 2
    inner: Inner
    factor: Factor
    bias: Bias
    slopes: Slopes
    diagonal: Diagonal
    sink: Annotated[Tensor | None, When("sink"), Floats("heads_q")]
    row_max: Annotated[Tensor | None, When("row_max"), Floats("batch heads_q seqlen_q")]  # written: the largest of each row
    shift: int  # seqlen_k - seqlen_q, the diagonal where there is no tensor
    draw: Annotated[Draw | None, When("dropout")] = None


class Changes(NamedTuple):
    """Likewise of the backward pass's."""

    inner: Inner = None
    factor: Factor = None
    bias: Bias = None
    slopes: Slopes = None
    diagonal: Diagonal = None
    shift: Annotated[int | None, When("alibi")] = None
    draw: Annotated[Draw | None, When("dropout")] = None


class Given(NamedTuple):
    """What a backward pass reads, as torch has it."""

    Q: LikeQ
    K: LikeK
    V: LikeV
    O: LikeO
    L: LikeL
    dO: LikeO
    dL: LikeL  # L itself where no gradient reaches it


class Gradients(NamedTuple):
    """What a backward pass writes."""

    dQ: LikeQ
    dK: LikeK
    dV: LikeV


RowSums = Annotated[Tensor, Floats("batch heads_q rows", aligned=True)]  # of whole tiles


def _sum_of_dQ(config) -> str:
    return f"batch heads_q m_blocks {'_' if config.narrow else config.elements_of_sum(config.head_dim)}"


class Scratch(NamedTuple):
    """What the kernels of a backward pass leave for each other; prepare.py begins with it."""

    lse: RowSums  # in powers of two (`natural`: of e), +inf for a row that sees nothing
    minus_delta: RowSums  # -delta; with dropout times Draw.kept, as dS is summed up without Draw.rest
    sum_dQ: Annotated[Tensor, Floats(_sum_of_dQ, aligned=True)]  # the last: tile_m * head_dim, in the order of its registers
    turns: Annotated[Tensor, Ints(lambda config: f"batch heads_q m_blocks {config.counters}")]
    # How many parts of gradients are not finite, and which (backward/repair/entries.py):
    spoiled: Annotated[Tensor | None, When("repairs"), Ints("entries")]
    # 1 + parts: units that are fetched, and for each part whether, or how often, it was written.
    counter: Annotated[Tensor | None, When("counts"), Ints("counters")]
    # Parts or sums of dK and dV of a block of keys (shares.py):
    partial: Annotated[Tensor | None, When("partial"), Floats("parts elements", aligned=True)]


class Turns(NamedTuple):
    """The order of a backward pass's thread blocks, of which order.Order is made."""

    num_sms: int
    ascending: int
    heads_per_step: int
    heads_interleaved: int
    queries_together: int  # heads that take turns in by_queries.py
    finish_lag: int
    shared_from: int
    shares: int


class Scalars(NamedTuple):
    """Scalars of a backward pass."""

    scale: float
    scale_log2: float
    has_dL: int
    last_q: int  # queries from here on are padding, and are read as zeros, whatever lies there
    last_k: int  # likewise keys


class Repaired(NamedTuple):
    """Gradients that repairs look at, behind what they are of."""

    Q: LikeQ
    K: LikeK
    V: LikeV
    dO: LikeO
    dQ: LikeQ
    dK: LikeK
    dV: LikeV


class Spoiled(NamedTuple):
    """What repairs read of Scratch."""

    lse: RowSums
    minus_delta: RowSums
    spoiled: Annotated[Tensor, Ints("entries")]


class RepairScalars(NamedTuple):
    """Scalars of repairs."""

    scale: float  # from sums of dQ and dK to gradients
    scale_log2: float
    enlarged: float  # what P is multiplied by before it is rounded
    of_dV: float  # from sums of dV to gradients
    looks: int  # whether hidden elements may be looked for (Config.looks)
    of_queries: int  # in how many parts of their columns dQ, and dK and dV, are repaired
    of_keys: int
    blocks: int  # thread blocks


def _bias_gradient(config) -> str:
    """Sizes of which two may be 1, batch and heads_q; without rows a third is."""
    return f"parts _ _ {'seqlen_q' if config.rows else '_'} seqlen_k"


class BiasTensors(NamedTuple):
    """Of a bias's gradient."""

    Q: LikeQ
    K: LikeK
    lse: RowSums  # in natural units, +inf for a row without keys
    minus_delta: RowSums
    dB: Annotated[Tensor, Of(_bias_gradient, lambda config: config.bias if config.whole else torch.float32)]


class Packed(NamedTuple):
    """Documents: where they begin, and where a row sees keys of its document (tables.documents.Offsets)."""

    cu_seqlens_q: Annotated[Tensor, Ints("cu_seqlens")]
    cu_seqlens_k: Annotated[Tensor, Ints("cu_seqlens")]
    seqlen_k: int
    lo: int
    hi: int
    lo_left: int
    hi_left: int
