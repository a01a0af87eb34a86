"""Pieces: whether PIECE rows of Q, K, V or dO hold large elements, found once and remembered at the end of the list."""

from tilewise.backends.hopper.backward.config import PIECE
from tilewise.backends.hopper.backward.repair.config import RepairConfig
from tilewise.backends.hopper.backward.repair.elements import EIGHT, STEP, Matrix, column_of, is_finite, row_of, too_large, words_of
from tilewise.backends.hopper.backward.tiles import WARP
from tilewise.backends.hopper.stand_ins import dsl
from tilewise.sm90.dsl import Boolean, Constexpr, Int32, Int64, arch, cute, cutlass, range_constexpr

UNKNOWN, SMALL, LARGE = range(3)  # states of a piece; prepare.py clears them to 0


@cute.jit
def pieces_of(mX: cute.Tensor) -> Int32:
    """Pieces of a tensor: a head has one for every PIECE rows. mX: (batch, seqlen, heads, head_dim)."""
    return mX.shape[0] * mX.shape[2] * cute.ceil_div(mX.shape[1], PIECE)


@cute.jit
def looked_at(tensors) -> Int64:
    """Address of the states of the pieces of Q, dO, K and V, in this order, an int32 each: the end of the list."""
    known = 2 * (pieces_of(tensors.Q) + pieces_of(tensors.K))
    return (tensors.spoiled.iterator + tensors.spoiled.shape[0] - known).toint()


@cute.jit
def known_of(X: Matrix, piece: Int32) -> cute.Tensor:
    """The state of a piece: (1,) int32 in global memory."""
    return cute.make_tensor(cute.make_ptr(Int32, X.looked + 4 * piece, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(1))


@cute.jit
def all_small(X: Matrix, begin: Int32, end: Int32, minus_delta: cute.Tensor, config: Constexpr[RepairConfig]) -> Boolean:
    """Whether all pieces with rows in [begin, end) are SMALL, by a warp, which scans pieces of UNKNOWN state.

    minus_delta: (rows of whole tiles,) fp32 of the queries.
    """
    small, last = Boolean(True), cute.ceil_div(end, PIECE)
    piece0 = begin // PIECE
    while piece0 < last and begin < end and small:
        known, piece = Int32(SMALL), piece0 + arch.lane_idx()
        if piece < last:
            known = known_of(X, piece)[0]
        small = not arch.vote_any_sync(known == LARGE)
        unknown = Int32(arch.vote_ballot_sync(known == UNKNOWN))
        while unknown != 0 and small:
            i = Int32(WARP - 1 - arch.clz(unknown))
            unknown &= ~(1 << i)
            small = look(X, piece0 + i, minus_delta, config)
        piece0 += WARP
    return small


@cute.jit
def look(X: Matrix, piece: Int32, minus_delta: cute.Tensor, config: Constexpr[RepairConfig]) -> Boolean:
    """Whether a piece is small, by a warp: the product of any two such rows is finite in fp32, and for dO the deltas are finite too. The state is
    written; warps that scan a piece at the same time find the same.
    """
    found = Int32(0)
    for step in cutlass.range(max(config.head_dim, config.head_dim_v) // STEP, unroll=2):
        for half in range_constexpr(PIECE // EIGHT):
            words = words_of(X, row_of(piece * PIECE, half), column_of(STEP * step, 0))
            for j in range_constexpr(4):
                found |= too_large(words[j], dsl(config.dtype))
    if X.with_delta:  # noqa: SIM102
        if not is_finite(minus_delta[min(piece * PIECE + arch.lane_idx(), X.rows - 1)]):
            found = Int32(1)
    small = arch.vote_all_sync(found == 0)
    if arch.lane_idx() == 0:
        known_of(X, piece)[0] = Int32(SMALL) if small else Int32(LARGE)
    return small
