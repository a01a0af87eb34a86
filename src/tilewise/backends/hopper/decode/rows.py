"""A unit's rows: query tokens times heads of a group, where they lie, and which keys each sees."""

from typing import NamedTuple

from tilewise.backends.hopper.decode import loads, rotation
from tilewise.backends.hopper.decode.config import Config
from tilewise.backends.hopper.decode.operands import Tensors
from tilewise.backends.hopper.decode.scheduler import Piece, Sequence, Shape, Turns, held, position_of
from tilewise.backends.hopper.operands import Scores
from tilewise.backends.hopper.scores import logits as scores
from tilewise.backends.hopper.visible.hiding import keep
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, range_constexpr
from tilewise.sm90.pointers import known

THREADS, WARP, ROWS = 128, 32, 16  # of a warpgroup; of a warp; of a tile that a warp holds
WIDE = 8  # elements that a thread clears at a time
CLEARED = 1  # a named barrier
CLEARED_BY = 8  # and the following: likewise, one a warpgroup of several
QUAD = fragments.QUAD


class Unit(NamedTuple):
    """Where the rows of a unit lie."""

    entry: Int32  # of Q, O and L
    first_query: Int32
    head0: Int32  # query head of the group's first
    row0: Int32  # the unit's first row among the sequence's
    rows: Int32  # of the unit
    group: object  # divisor
    joins: Boolean  # those of a prefix


class Keys(NamedTuple):
    """For this thread's rows: position of the query, and the keys [begin, end) it sees. (ROWS,) int32 each."""

    position: cute.Tensor
    begin: cute.Tensor
    end: cute.Tensor


@cute.jit
def unit_of(b: Int32, piece: Piece, sequence: Sequence, shape: Shape, config: Constexpr[Config]) -> Unit:
    rows = min(sequence.queries * shape.group - piece.row0, shape.by_rows.divisor)
    entry = Int32(0) if const_expr(config.ragged) else b
    return Unit(entry, sequence.first_query, piece.head_k * shape.group, piece.row0, rows, shape.by_group, sequence.joins)


@cute.jit
def place_of(row: Int32, unit: Unit) -> tuple[Int32, Int32]:
    """(query token of its sequence, query head) of a unit's row."""
    token, head = divmod(unit.row0 + row, unit.group)
    return token, unit.head0 + head


@cute.jit
def row_of(r: Constexpr[int], config: Constexpr[Config]) -> Int32:
    """The row of its unit that this thread holds as its r-th."""
    return arch.warp_idx() % (config.tile_m // ROWS) * ROWS + arch.lane_idx() // QUAD + r * (ROWS // fragments.ROWS)


@cute.jit
def load_queries(fragment: cute.Tensor, tensors: Tensors, unit: Unit, sequence: Sequence, config: Constexpr[Config]):
    """Q in the registers from which the first product reads it: words of two, in the order (row, half of 8 columns, 16 columns)."""
    mQ, words = tensors.Q, cute.recast_tensor(fragment, Int32)
    words.fill(0)
    for r in range_constexpr(fragments.ROWS):
        row = row_of(r, config)
        if row < unit.rows:
            token, head = place_of(row, unit)
            gQ = mQ[unit.entry, unit.first_query + token, head, None]
            first = gQ.iterator + arch.lane_idx() % QUAD * 2
            for c in range_constexpr(config.head_dim // 8):
                if 8 * c < gQ.shape[0]:
                    word = cute.make_tensor(cute.recast_ptr(known(first + 8 * c, 4), dtype=Int32), cute.make_layout(1))
                    words[r + 2 * c] = word[0]
            if const_expr(config.rotary is not None):
                rotation.of_row(fragment, r, sequence.length - sequence.queries + token, tensors.tables, config)


@cute.jit
def keys_of(sequence: Sequence, unit: Unit, shape: Shape, config: Constexpr[Config]) -> Keys:
    keys = Keys(*(cute.make_rmem_tensor(fragments.ROWS, Int32) for _ in Keys._fields))
    for r in range_constexpr(fragments.ROWS):
        token, _ = place_of(row_of(r, config), unit)
        position = sequence.length - sequence.queries + token
        keys.position[r] = position
        keys.begin[r] = max(sequence.left, position + shape.window.lo)
        keys.end[r] = min(sequence.length, position + shape.window.hi + 1)
        if const_expr(config.share):
            keys.begin[r], keys.end[r] = held(keys.begin[r], shape.turns), held(keys.end[r], shape.turns)
    return keys


@cute.jit
def free_of(sequence: Sequence, unit: Unit, shape: Shape, config: Constexpr[Config]) -> tuple[Int32, Int32]:
    """The keys [begin, end) that all rows of a unit see, or of its sequence."""
    last, first = sequence.length - 1, sequence.length - sequence.queries
    if const_expr(config.causal_tiles):
        (last, _), (token, _) = place_of(unit.rows - 1, unit), place_of(Int32(0), unit)
        last, first = first + last, first + token
    begin = max(sequence.left, last + shape.window.lo)
    end = min(sequence.length, first + shape.window.hi + 1)
    if const_expr(config.tree):
        end = min(end, sequence.length - shape.lengths.tree.shape[2])
    if const_expr(config.share):
        begin, end = held(begin, shape.turns), held(end, shape.turns)
    return begin, end


@cute.jit
def slopes_of(changes: Scores, b: Int32, unit: Unit, config: Constexpr[Config]) -> cute.Tensor:
    """ALiBi's of this thread's rows, (ROWS,) fp32."""
    slopes = cute.make_rmem_tensor(fragments.ROWS, Float32)
    for r in range_constexpr(fragments.ROWS):
        _, head = place_of(min(row_of(r, config), unit.rows - 1), unit)
        slopes[r] = changes.slopes[min(b, changes.slopes.shape[0] - 1), head]
    return slopes


@cute.jit
def modify(
    acc_S: cute.Tensor, n0: Int32, keys: Keys, slopes: cute.Tensor | None, changes: Scores, turns: Turns | None, config: Constexpr[Config]
):  # fmt: skip
    """Softcap and ALiBi."""
    S, first = fragments.by_rows(acc_S), n0 + arch.lane_idx() % QUAD * 2
    for r in range_constexpr(fragments.ROWS):
        place, slope = (keys.position[r] - first).to(Float32), slopes[r] if const_expr(config.alibi) else None
        for c in range_constexpr(cute.size(S, mode=[1])):
            distance = place - float(fragments.column(c))
            if const_expr(config.share and config.alibi):
                distance = (keys.position[r] - position_of(first + fragments.column(c), turns)).to(Float32)
            S[r, c] = scores.logit(S[r, c], Float32(0.0), distance, changes, slope, config)


@cute.jit
def hide(acc_S: cute.Tensor, n0: Int32, b: Int32, sequence: Sequence, unit: Unit, shape: Shape, config: Constexpr[Config]):
    """-inf for the keys that a row does not see. What it sees is worked out anew: few tiles need it, and registers are scarce."""
    keys, S = keys_of(sequence, unit, shape, config), fragments.by_rows(acc_S)
    first = n0 + arch.lane_idx() % QUAD * 2
    for r in range_constexpr(fragments.ROWS):
        keep(S, r, keys.begin[r] - first, keys.end[r] - first, -Float32.inf)
    if const_expr(config.tree):
        hide_in_tree(acc_S, keys, n0, b, sequence.length, shape.lengths.tree, shape.turns, config)


@cute.jit
def hide_in_tree(
    acc_S: cute.Tensor, keys: Keys, n0: Int32, b: Int32, length: Int32, tree: cute.Tensor, turns: Turns | None, config: Constexpr[Config]
):  # fmt: skip
    """-inf for the newest keys that a row's token does not see in the tree. One that is older than the tree has no place in it."""
    S, new = fragments.by_rows(acc_S), tree.shape[2]
    # Copies, or else addresses are computed ahead of the loop over tiles, and stay in registers that there are not.
    b, length = (arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]) for x in (b, length))
    first = n0 + arch.lane_idx() % QUAD * 2 - (length - new)  # in the tree
    for r in range_constexpr(fragments.ROWS):
        token = keys.position[r] - (length - new)
        for c in range_constexpr(cute.size(S, mode=[1])):
            key = first + fragments.column(c)
            if const_expr(config.share):
                key = position_of(n0 + arch.lane_idx() % QUAD * 2 + fragments.column(c), turns) - (length - new)
            if key >= 0 and key < new:
                shown = cutlass.Uint8(1)
                if token >= 0 and token < new:
                    shown = tree[min(b, tree.shape[0] - 1), token, key]
                S[r, c] = -Float32.inf if shown == 0 else S[r, c]


@cute.jit
def clear_values(address: Int32, n0: Int32, piece: Piece, config: Constexpr[Config]):
    """0 in the rows of a tile of V that no row of the unit sees, whatever lies there; by the warpgroup that reads it.

    The stage at `address` is blocks of columns, each a token after another. A swizzle changes places within a token's part of a block only.
    """
    width = const_expr(loads.columns(config.head_dim_v) // WIDE)  # pieces of a token in a block
    pieces = const_expr(config.tile_n * config.head_dim_v // WIDE)
    thread = arch.thread_idx()[0] % THREADS
    for i in cutlass.range(thread, pieces, THREADS, unroll=1):
        key = n0 + i // width % config.tile_n
        if key < piece.begin or key >= piece.end:
            arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};", read_only_args=[address + i * 16, Int32(0)])
    hand_over(config)


@cute.jit
def hand_over(config: Constexpr[Config]):
    """What this warpgroup's threads have written to shared memory is there for its products."""
    arch.fence_proxy("async.shared", space="cta")
    meet(config)


@cute.jit
def meet(config: Constexpr[Config]):
    """All threads of a warpgroup."""
    barrier = CLEARED if const_expr(config.consumers == 1) else CLEARED_BY + arch.make_warp_uniform(arch.warp_idx()) // (THREADS // WARP)
    arch.barrier(barrier_id=barrier, number_of_threads=THREADS)
