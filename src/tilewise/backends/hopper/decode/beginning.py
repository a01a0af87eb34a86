"""What a unit begins with: nothing, or what an earlier launch found for a prefix that all sequences have, as if its keys came first.

O and the log-sum-exp of the prefix are a state of the online softmax like any other: m is the log-sum-exp and l is 1. So nothing is left to be joined
when a unit ends, and what is read is on its way together with Q.
"""

import torch

from tilewise.backends.hopper.decode import rows
from tilewise.backends.hopper.decode.config import Config
from tilewise.backends.hopper.decode.operands import Prior
from tilewise.backends.hopper.decode.rows import Unit
from tilewise.backends.hopper.decode.scheduler import Piece
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Constexpr, Float32, arch, const_expr, cute, range_constexpr
from tilewise.sm90.fragments import LOG2_E
from tilewise.sm90.pointers import known

BELOW = 16  # powers of 2, by which m is less than the log-sum-exp in fp16, so that P of light keys has all its bits


@cute.jit
def of_piece(
    acc_O: cute.Tensor, state: fragments.Rows | None, prior: Prior | None, piece: Piece, unit: Unit, config: Constexpr[Config],
    column0: Constexpr[int] = 0,
):  # fmt: skip
    """O of this thread's rows from `column0` on, and their state, if it is this thread's: the prefix's in the first piece of a unit that joins it."""
    acc_O.fill(0.0)
    if const_expr(config.onto):  # noqa: SIM102 - with `and` the DSL builds what comes behind it all the same
        if unit.joins and piece.number == 0:
            below = const_expr(BELOW if config.dtype == torch.float16 else 0)
            O, pair = fragments.by_rows(acc_O), cute.make_rmem_tensor(2, Float32)
            lse, column = cute.make_rmem_tensor(fragments.ROWS, Float32), column0 + arch.lane_idx() % fragments.QUAD * 2
            lse.fill(-Float32.inf)
            for r in range_constexpr(fragments.ROWS):
                row = rows.row_of(r, config)
                if row < unit.rows:
                    token, head = rows.place_of(row, unit)
                    lse[r] = prior.L[unit.entry, head, unit.first_query + token]
                    first = prior.O[unit.entry, unit.first_query + token, head, None].iterator + column
                    for c in range_constexpr(0, cute.size(O, mode=[1]), 2):
                        if column0 + fragments.column(c) < prior.O.shape[3]:
                            cute.autovec_copy(cute.make_tensor(known(first + fragments.column(c), 8), cute.make_layout(2)), pair)
                            O[r, c], O[r, c + 1] = pair[0], pair[1]
            if const_expr(state is not None):
                for r in range_constexpr(fragments.ROWS):
                    state.m[r] = lse[r] * LOG2_E - float(below)
                    state.l[r] = float(2**below) if column == 0 and lse[r] > -Float32.inf else 0.0  # one of the four threads' parts
            if const_expr(below > 0):
                acc_O.store(acc_O.load() * float(2**below))
