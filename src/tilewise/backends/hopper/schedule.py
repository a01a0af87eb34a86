"""Which thread block computes which tile of queries, and when: blocks that stay, and take one tile after another.

A tile of queries of one head, or `cluster` neighbouring ones, are a unit of work, for a thread block or a cluster of them. Units are numbered so
that those with the most keys come first and those that run at the same time share keys: a section of `section` heads, all its last tiles, then
those before them. A cluster begins with the unit of its own number. Where all units take as long it goes on by the number of clusters; else
its first block draws the next ones from a counter. A unit is told to all who work on it before the one before it is loaded, so that neither
the counter nor the divisions that make a unit of a number are waited for, and its loads begin while the unit before it is still computed.
"""

from typing import NamedTuple

from tilewise.hopper import tma
from tilewise.hopper.dsl import Boolean, Constexpr, Int32, SmemAllocator, arch, const_expr, cute, range_constexpr

AHEAD = 4  # units that may be told of and not done yet
WORDS = 4  # of what is told of one


class Units(NamedTuple):
    """All units of a launch: `count` of them, `rows` (of one tile, or of a cluster's) for each of `heads` (of all batches), `section` at a time."""

    count: Int32
    heads: Int32
    rows: Int32
    section: Int32
    order: cute.Tensor | None  # (rows,) int32: rows, those with the most keys last; None: as they are


class Queue(NamedTuple):
    """Where clusters draw from, and where each of their blocks finds what was drawn."""

    counter: cute.Tensor  # (1,) int32 in global memory; 0 before and after
    told: cute.Tensor  # (WORDS, AHEAD) int32: row, head, head of the keys, batch; a row below 0 is the end
    full: cute.Pointer  # (AHEAD) mbarriers, on which the one who tells arrives once it has written a slot,
    empty: cute.Pointer  # and those on which every warp that reads what it tells arrives when it is done with a slot


class Block(NamedTuple):
    """A block's part of a unit: the queries from m0 on, of one head. m0 < 0: there is nothing more to do."""

    m0: Int32
    head: Int32
    head_k: Int32
    batch: Int32


@cute.jit
def make_queue(storage: SmemAllocator, counter: cute.Tensor, warps: int, config: Constexpr) -> Queue:
    """With its barriers initialised, and visible after `tma.barriers_ready`; `warps` of each block and the loader read from it."""
    told = storage.allocate_tensor(Int32, cute.make_layout((WORDS, AHEAD)), 16)
    queue = Queue(counter, told, storage.allocate_array(cute.Int64, AHEAD), storage.allocate_array(cute.Int64, AHEAD))
    if arch.thread_idx()[0] == 0:
        for i in range_constexpr(AHEAD):
            arch.mbarrier_init(queue.full + i, 1)
            arch.mbarrier_init(queue.empty + i, (warps + 1) * listeners(config))
    return queue


def listeners(config) -> int:
    """Blocks that are told by one loader: where units are drawn, its whole cluster."""
    return config.cluster if config.draws else 1


@cute.jit
def part(unit: Int32, units: Units, heads_q: Int32, heads_k: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """(row, head, head of the keys, batch) of a unit. Within a section the last tiles of all heads come first: a causal mask gives them most keys."""
    per_section = units.section * units.rows
    section = unit // per_section
    within, first = unit - section * per_section, section * units.section
    width = min(units.section, units.heads - first)  # the last section may have fewer heads
    row = within // width
    head = first + within - row * width
    batch = head // heads_q
    head -= batch * heads_q
    row = units.rows - 1 - row
    if const_expr(units.order is not None):
        row = units.order[min(max(row, 0), units.rows - 1)]  # beyond the last unit `row` may be anything
    row = row if unit < units.count else Int32(-1)
    return row, head, head // (heads_q // heads_k), batch


@cute.jit
def begin(queue: Queue, units: Units, heads_q: Int32, heads_k: Int32, config: Constexpr) -> Int32:
    """The loader tells the first unit; returns the ticket of the next (see `announce`). One warp of each block calls it."""
    unit, ticket = arch.block_idx()[0] // config.cluster, Int32(0)
    if tells(config):
        tell_all(queue, Int32(0), part(unit, units, heads_q, heads_k), config)
        ticket = draw(queue, unit, config)
    return ticket


@cute.jit
def announce(queue: Queue, done: Int32, ticket: Int32, units: Units, heads_q: Int32, heads_k: Int32, config: Constexpr) -> Int32:
    """The loader tells the unit after `done` others, which is that of `ticket`; returns the ticket of the one after it.

    A counter's tickets begin at 0, for the unit after the first of all clusters. Every unit makes its cluster draw once: as many draws as
    there are units, and whoever holds the last one sets the counter back.
    """
    following = Int32(0)
    if tells(config):
        state = tma.after_empty(done, AHEAD)
        arch.mbarrier_wait(queue.empty + state.index, state.phase)
        unit = ticket
        if const_expr(config.draws):
            unit += arch.grid_dim()[0] // config.cluster
            if ticket == units.count - 1:
                queue.counter[0] = Int32(0)
        tell_all(queue, done, part(unit, units, heads_q, heads_k), config)
        if unit < units.count:
            following = draw(queue, unit, config)
    return following


@cute.jit
def tells(config: Constexpr) -> Boolean:
    """Whether this thread is the one of the loader's warp that tells."""
    first = arch.lane_idx() == 0
    if const_expr(config.draws and config.cluster > 1):
        first = first and arch.block_idx_in_cluster() == 0
    return first


@cute.jit
def draw(queue: Queue, unit: Int32, config: Constexpr) -> Int32:
    """The ticket after that of `unit`: from the counter, or the unit a step further itself."""
    if const_expr(config.draws):
        return arch.atomic_add(queue.counter.iterator, Int32(1))
    return unit + arch.grid_dim()[0] // config.cluster


@cute.jit
def tell_all(queue: Queue, done: Int32, words: tuple, config: Constexpr):
    for rank in range_constexpr(listeners(config)):
        tell(queue, tma.after(done, AHEAD).index, words, rank, config)


@cute.jit
def tell(queue: Queue, slot: Int32, words: tuple, rank: Constexpr[int], config: Constexpr):
    """Write `words` where block `rank` of this cluster looks for them, and arrive there."""
    addresses = queue.told[None, slot].iterator.toint(), (queue.full + slot).toint()
    if const_expr(listeners(config) == 1):
        ptx = "st.shared.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; mbarrier.arrive.shared.b64 _, [{$r1}];"
    else:
        ptx = (
            f"{{ .reg .b32 slot, full; mapa.shared::cluster.u32 slot, {{$r0}}, {rank}; mapa.shared::cluster.u32 full, {{$r1}}, {rank}; "
            "st.shared::cluster.v4.b32 [slot], {{$r2}, {$r3}, {$r4}, {$r5}}; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [full]; }"
        )
    arch.inline_ptx(ptx, read_only_args=[*addresses, *words])


@cute.jit
def told(queue: Queue, done: Int32, config: Constexpr) -> Block:
    """The unit after `done` others, once it was told; may be asked again until `forget`."""
    state = tma.after(done, AHEAD)
    scope = const_expr("" if listeners(config) == 1 else ".acquire.cluster")
    arch.inline_ptx(
        f"{{ .reg .pred there; again: mbarrier.try_wait.parity{scope}.shared::cta.b64 there, [{{$r0}}], {{$r1}}; @!there bra again; }}",
        read_only_args=[(queue.full + state.index).toint(), state.phase],
    )
    row, head, head_k, batch = read(queue, state.index)
    if const_expr(config.cluster > 1):
        row = row * config.cluster + arch.block_idx_in_cluster() if row >= 0 else row
    return Block(row * config.tile_m, head, head_k, batch)


@cute.jit
def read(queue: Queue, slot: Int32):
    """Read anew each time, so that nothing has to be kept in registers in between."""
    return arch.inline_ptx(
        "ld.volatile.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * WORDS,
        read_only_args=[queue.told[None, slot].iterator.toint()],
    )


@cute.jit
def forget(queue: Queue, done: Int32, config: Constexpr):
    """This warp is done with the unit."""
    if arch.lane_idx() == 0:
        empty = queue.empty + tma.after(done, AHEAD).index
        arch.mbarrier_arrive(empty, None if const_expr(listeners(config) == 1) else 0)
