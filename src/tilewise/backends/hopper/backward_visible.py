"""What the backward pass on Hopper sees beyond one band: of keys and queries, by what backward_tables.py puts into memory.

config.sees says what is known when the kernel is compiled:

    all       every query sees every key
    from      a key is seen by the queries from a beginning on; band masks
    interval  by those from a beginning to an end; band masks
    rows      likewise, but each key's beginning and end are read from memory: packed documents
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward_config import Config
from tilewise.backends.hopper.visible import Band, interval
from tilewise.hopper.dsl import Constexpr, Int32, const_expr, cute


class Tables(NamedTuple):
    """In global memory, int32, for Band.tables; None where they are not for this kernel."""

    keys: cute.Tensor | None  # (2, seqlen_q): begin and end of the keys that a query sees
    queries: cute.Tensor | None  # (2, seqlen_k): of the queries that see a key
    walks: cute.Tensor | None  # (n_blocks, 4): first, last, free_first, free_last of backward_order.Walk
    visitors: cute.Tensor | None  # (m_blocks, 2): the fields of backward_order.Visitors


@cute.jit
def keys_of(row: Int32, band: Band, config: Constexpr[Config]):
    """[begin, end) of the keys that a query sees, where they are an interval."""
    if const_expr(config.sees == "rows"):
        return band.tables.keys[0, row], band.tables.keys[1, row]
    return interval(row, band)


@cute.jit
def queries_of(key: Int32, band: Band, config: Constexpr[Config]):
    """[begin, end) of the queries that see a key, where they are an interval; the key may lie beyond the last."""
    if const_expr(config.sees == "rows"):
        there = min(key, band.tables.queries.shape[1] - 1)
        begin, end = band.tables.queries[0, there], band.tables.queries[1, there]
        if key > there:
            end = begin
        return begin, end
    begin, end = max(band.q0, key - band.hi), min(band.q1, key - band.lo + 1)
    if key < band.k0 or key >= band.k1:
        end = begin
    return begin, end
