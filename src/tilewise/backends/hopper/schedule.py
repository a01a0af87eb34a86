"""Which thread block computes which tile of queries, and when: blocks that stay, and take one tile after another.

A tile of queries of one head, or `cluster` neighbouring ones, are a unit of work, for a thread block or a cluster of them. Units are numbered so
that those with the most keys come first and those that run at the same time share keys: a section of `section` heads, all its last tiles, then
those before them. A cluster begins with the unit of its own number. Where all units take as long it goes on by the number of clusters; else
its first block draws the next one from a counter, when it has but a few tiles left to load: early enough not to wait for it, and late enough
that who is slow leaves work to the others. All who work on a unit are told of it, and its loads begin while the unit before it is still
computed.
"""

from typing import NamedTuple

from tilewise.hopper import tma
from tilewise.hopper.dsl import Boolean, Constexpr, Int32, SmemAllocator, arch, const_expr, cute, range_constexpr

AHEAD = 4  # units that may be told of and not done yet
WORDS = 4  # of what is told of one


class Units(NamedTuple):
    """All units of a launch: `count` of them, `rows` (of one tile, or of a cluster's) for each head of each batch, `section` heads at a time.

    Divisors divide by a multiplication and a shift.
    """

    count: Int32
    rows: Int32
    section: Int32
    whole_sections: Int32
    per_section: object  # divisors: units of a section,
    width: object  # its heads,
    last_width: object  # heads of the last section where it has fewer,
    heads_q: object
    group: object
    order: cute.Tensor | None  # (rows,) int32: rows, those with the most keys last; None: as they are


@cute.jit
def units_of(rows: Int32, heads_q: Int32, heads_k: Int32, batch: Int32, section: Int32, order: cute.Tensor | None) -> Units:
    """On the host."""
    heads = heads_q * batch
    last = heads % section
    divisors = (section * rows, section, max(last, 1), heads_q, heads_q // heads_k)
    return Units(rows * heads, rows, section, heads // section, *map(cute.fast_divmod_create_divisor_v2, divisors), order)


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
def part(unit: Int32, units: Units) -> tuple[Int32, Int32, Int32, Int32]:
    """(row, head, head of the keys, batch) of a unit. Within a section the last tiles of all heads come first: a causal mask gives them most keys."""
    section, within = divmod(unit, units.per_section)
    row, head = divmod(within, units.width)
    last_row, last_head = divmod(within, units.last_width)
    if section >= units.whole_sections:
        row, head = last_row, last_head
    head += section * units.section
    batch, head = divmod(head, units.heads_q)
    row = units.rows - 1 - row
    if const_expr(units.order is not None):
        row = units.order[min(max(row, 0), units.rows - 1)]  # beyond the last unit `row` may be anything
    row = row if unit < units.count else Int32(-1)
    return row, head, head // units.group, batch


@cute.jit
def begin(queue: Queue, units: Units, config: Constexpr):
    """The loader tells the first unit. One warp of each block calls it, like the following."""
    if tells(config):
        tell_all(queue, Int32(0), part(arch.block_idx()[0] // config.cluster, units), config)


@cute.jit
def draw(queue: Queue, done: Int32, config: Constexpr) -> Int32:
    """The number of the unit after `done` others, to be passed to `announce` later."""
    clusters = arch.grid_dim()[0] // config.cluster
    unit = arch.block_idx()[0] // config.cluster + done * clusters
    if const_expr(config.draws):
        unit = clusters
        if tells(config):
            unit += arch.atomic_add(queue.counter.iterator, Int32(1))
    return unit


@cute.jit
def announce(queue: Queue, done: Int32, unit: Int32, units: Units, config: Constexpr):
    """The loader tells the unit after `done` others.

    Every unit makes its cluster draw once: as many draws as there are units, and whoever gets the last ticket sets the counter back.
    """
    if tells(config):
        state = tma.after_empty(done, AHEAD)
        arch.mbarrier_wait(queue.empty + state.index, state.phase)
        tell_all(queue, done, part(unit, units), config)
        if const_expr(config.draws) and unit - arch.grid_dim()[0] // config.cluster == units.count - 1:
            queue.counter[0] = Int32(0)


@cute.jit
def tells(config: Constexpr) -> Boolean:
    """Whether this thread is the one of the loader's warp that tells."""
    first = arch.lane_idx() == 0
    if const_expr(config.draws and config.cluster > 1):
        first = first and arch.block_idx_in_cluster() == 0
    return first


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
