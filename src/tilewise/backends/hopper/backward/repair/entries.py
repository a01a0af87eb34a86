"""Rows and operands of an entry of the list (reports.py).

An entry's own rows are those of the gradient; its others are the keys that its queries see, or the queries that see its keys.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.repair.config import RepairConfig
from tilewise.backends.hopper.backward.repair.elements import Matrix, either, matrix, row_of
from tilewise.backends.hopper.backward.repair.pieces import looked_at, pieces_of
from tilewise.backends.hopper.backward.repair.reports import ROWS
from tilewise.backends.hopper.operands import Band, Changes, Gradients, RepairScalars
from tilewise.backends.hopper.scores import again as changed
from tilewise.backends.hopper.visible.queries import keys_of, queries_of
from tilewise.sm90.dsl import Constexpr, Int32, arch, cute, range_constexpr

WARPS = 8  # of a thread block of the kernel
OF_DQ, OF_DK, OF_DV = range(3)


class Operands(NamedTuple):
    """What the kernel reads: of operands.Repaired, operands.Spoiled, and what changes scores."""

    Q: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    dO: cute.Tensor
    lse: cute.Tensor
    minus_delta: cute.Tensor
    spoiled: cute.Tensor
    changes: Changes


class Entry(NamedTuple):
    """One gradient of an entry: its rows and columns, and the others of this lane's two rows."""

    of: Int32  # OF_DQ, OF_DK or OF_DV
    gX: Matrix  # the gradient's rows
    head: Int32  # query head for dQ, key head for dK and dV
    batch: Int32
    row0: Int32  # first of its ROWS rows
    column0: Int32  # first of its columns
    last: Int32  # end of its columns, exclusive
    begin: cute.Tensor  # (2,) int32: first other of each of this lane's two rows
    end: cute.Tensor  # (2,) int32: end of the others, exclusive; equal to begin for a row beyond the last


class Others(NamedTuple):
    """Operands of the sums of an entry, for one query head."""

    own_S: Matrix  # S = own_S other_S^T
    other_S: Matrix
    own_dP: Matrix  # dP = own_dP other_dP^T
    other_dP: Matrix
    summed: Matrix  # right operand of the weights: K, Q or dO
    lse: cute.Tensor  # (rows of whole tiles,) fp32, of the queries
    minus_delta: cute.Tensor  # (rows of whole tiles,) fp32, of the queries
    changes: Changes
    which: changed.Head  # batch and query head


@cute.jit
def entry_of(
    tensors: Operands, gradients: Gradients, number: Int32, turn: Int32, band: Band, scalars: RepairScalars, config: Constexpr[RepairConfig]
) -> Entry:  # fmt: skip
    """A gradient of the entry of a number: dK in turn 0 and dV in turn 1; or dQ in turn 0, and none (`of` below 0) in turn 1."""
    mdQ, mdK, mdV = gradients
    by_keys = number >= 0
    seqlen_q, seqlen_k, heads_q, heads_k = tensors.Q.shape[1], tensors.K.shape[1], tensors.Q.shape[2], tensors.K.shape[2]
    number = number if by_keys else -1 - number
    parts = scalars.of_keys if by_keys else scalars.of_queries
    groups = cute.ceil_div(seqlen_k if by_keys else seqlen_q, ROWS)
    heads = heads_k if by_keys else heads_q
    group, part = number // parts, number % parts
    row0, head, batch = group % groups * ROWS, group // groups % heads, group // groups // heads
    of = (OF_DK + turn) if by_keys else (OF_DQ - turn)
    gX = matrix(mdQ, batch, head if not by_keys else 0)
    if by_keys:
        gX = either(turn == 0, matrix(mdK, batch, head), matrix(mdV, batch, head))
    width = (Int32(config.head_dim_v) if by_keys and turn == 1 else Int32(config.head_dim)) // parts
    begin, end = (cute.make_rmem_tensor(2, Int32) for _ in range(2))
    for half in range_constexpr(2):
        row = row_of(row0, half)
        first, last = keys_of(row, band, config)
        if by_keys:
            first, last = queries_of(row, band, config)
        begin[half], end[half] = max(first, 0), min(last, seqlen_q if by_keys else seqlen_k)
        if row >= gX.rows:
            end[half] = begin[half]
    return Entry(of, gX, head, batch, row0, part * width, min((part + 1) * width, gX.columns), begin, end)


@cute.jit
def heads_of(entry: Entry, tensors: Operands) -> Int32:
    """Query heads that the sums of an entry go over: 1 for dQ, the group for dK and dV."""
    return Int32(1) if entry.of == OF_DQ else tensors.Q.shape[2] // tensors.K.shape[2]


@cute.jit
def others_of(entry: Entry, g: Int32, tensors: Operands) -> Others:
    """Operands of the sums of an entry, for query head g of `heads_of`."""
    group, by_keys, batch = tensors.Q.shape[2] // tensors.K.shape[2], entry.of != OF_DQ, entry.batch
    head = entry.head * group + g if by_keys else entry.head
    head_k = entry.head if by_keys else entry.head // group
    of_queries, of_keys = pieces_of(tensors.Q), pieces_of(tensors.K)
    looked = looked_at(tensors)
    Q = matrix(tensors.Q, batch, head, False, looked)
    dO = matrix(tensors.dO, batch, head, True, looked + 4 * of_queries)
    K = matrix(tensors.K, batch, head_k, False, looked + 8 * of_queries)
    V = matrix(tensors.V, batch, head_k, False, looked + 8 * of_queries + 4 * of_keys)
    summed = either(entry.of == OF_DV, dO, either(by_keys, Q, K))
    statistics = tensors.lse[batch, head, None], tensors.minus_delta[batch, head, None]
    products = either(by_keys, K, Q), either(by_keys, Q, K), either(by_keys, V, dO), either(by_keys, dO, V)
    return Others(*products, summed, *statistics, tensors.changes, changed.Head(batch, head))


@cute.jit
def ranges_of(entry: Entry) -> tuple[Int32, Int32, Int32, Int32]:
    """(begin, end, common begin, common end): the range of others that the rows reach together, and the range that each row sees, rows that see
    none left aside. Both are empty where no row sees anything.
    """
    begin, end, latest, earliest = Int32(1 << 30), Int32(0), Int32(0), Int32(1 << 30)
    for half in range_constexpr(2):
        if entry.begin[half] < entry.end[half]:
            begin, end = min(begin, entry.begin[half]), max(end, entry.end[half])
            latest, earliest = max(latest, entry.begin[half]), min(earliest, entry.end[half])
    begin, earliest = (-arch.warp_redux_sync(-x, "max") for x in (begin, earliest))
    end = arch.warp_redux_sync(end, "max")
    return begin, end, arch.warp_redux_sync(latest, "max"), min(earliest, end)  # empty where no row sees anything
