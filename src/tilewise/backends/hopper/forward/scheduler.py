"""Which thread block computes which tile of queries, and when: blocks that stay, and take one tile after another.

A tile of queries of one head, or `cluster` neighbouring ones, are a unit of work, for a thread block or a cluster of them. Units are numbered so
that those with the most keys come first and those that run at the same time share keys: a section of `section` heads, all its last tiles, then
those before them. A cluster begins with the unit of its own number. Where all units take as long it goes on by the number of clusters; else
its first block draws the next one from a counter, when it has but a few tiles left to load: early enough not to wait for it, and late enough
that who is slow leaves work to the others. All who work on a unit are told of it, and its loads begin while the unit before it is still
computed.

Where all units take as long, those that are left when every cluster has had as many would keep only some of the clusters busy: `shares` cuts them
up instead. Their tiles of keys, one unit's after another's, are dealt out evenly, each cluster a piece in a row, which may hold the end of one
unit and the beginning of the next. What the pieces of a unit found is put together by whoever is done with it last (partials.py).
"""

from typing import NamedTuple

from tilewise.sm90 import tma
from tilewise.sm90.dsl import Boolean, Constexpr, Int32, SmemAllocator, arch, const_expr, cute, range_constexpr

AHEAD = 4  # units that may be told of and not done yet
WORDS = 4  # of what is told of one; as many again where units are shared
LEAST_SHARE, MOST_SHARES = 4, 16  # tiles of keys of a cluster, where units are shared; and clusters of one unit, about
LEAST_SAVED = 640  # keys that sharing must save the cluster with most of them: beginning and ending a piece, and adding up, take as long


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
    shared: "Shared | None"


class Shared(NamedTuple):
    """The units from `first` on, of `tiles` tiles of keys each, are shared: cluster c has `share` tiles in a row, from c * share on."""

    first: Int32
    tiles: Int32
    share: Int32


class Span(NamedTuple):
    """A piece of a unit: the tiles of keys [first, last), and where what it finds is kept until all of the unit's is there."""

    first: Int32
    last: Int32
    slot: Int32  # its own,
    slots: tuple[Int32, Int32]  # and those of all pieces of the unit, in their order, [begin, end); one of them: it is the whole unit


@cute.jit
def shared_of(units: Int32, tiles: Int32, clusters: Int32, tile_n: Constexpr[int]) -> Shared:
    """On the host; for `units` of `tiles` each, of which each of `clusters` first has as many as all others."""
    first = units // clusters * clusters
    even = cute.ceil_div((units - first) * tiles, clusters)
    share = max(max(even, cute.ceil_div(tiles, MOST_SHARES)), LEAST_SHARE)
    if (tiles - share) * tile_n < LEAST_SAVED:
        share = tiles
    return Shared(first, tiles, share)


@cute.jit
def units_of(
    rows: Int32, heads_q: Int32, heads_k: Int32, batch: Int32, section: Int32, order: cute.Tensor | None, shared: Shared | None
) -> Units:
    """On the host."""
    heads = heads_q * batch
    last = heads % section
    divisors = (section * rows, section, max(last, 1), heads_q, heads_q // heads_k)
    return Units(rows * heads, rows, section, heads // section, *map(cute.fast_divmod_create_divisor_v2, divisors), order, shared)


class Queue(NamedTuple):
    """Where clusters draw from, and where each of their blocks finds what was drawn."""

    counter: cute.Tensor  # (1,) int32 in global memory; 0 before and after
    told: cute.Tensor  # (words, AHEAD) int32: row, head, head of the keys, batch, a row below 0 is the end; where units are shared, a Span
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
    told = storage.allocate_tensor(Int32, cute.make_layout((WORDS * (1 + config.shares), AHEAD)), 16)
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
def words(unit: Int32, units: Units, config: Constexpr) -> tuple[Int32, ...]:
    """What is told of a unit; where units are shared, numbers from `shared.first` on stand for this cluster's pieces, one for each turn."""
    if const_expr(not config.shares):
        return part(unit, units)
    clusters, number, span = arch.grid_dim()[0] // config.cluster, unit, Span(Int32(0), units.shared.tiles, Int32(0), (Int32(0), Int32(1)))
    if unit >= units.shared.first:
        left, turn = units.count - units.shared.first, (unit - units.shared.first) // clusters
        which, span = piece(arch.block_idx()[0] // config.cluster, turn, left, units.shared)
        number = units.shared.first + which
    begin, end = span.slots
    return (*part(number, units), span.first, span.last, span.slot, begin | end << 16)


@cute.jit
def piece(cluster: Int32, turn: Int32, left: Int32, shared: Shared) -> tuple[Int32, Span]:
    """Which of the units that are `left` a cluster's turn is about, and its part of it; `left` itself when nothing is left to do.

    In a row of all their tiles, the cluster has [cluster * share, (cluster + 1) * share): in its first turn what of it is in one unit, in its
    second what is in the next. Of two pieces that follow each other, the cluster or the unit is another one, so their sum numbers the slots.
    """
    tiles, share = shared.tiles, shared.share
    at, until = cluster * share, min((cluster + 1) * share, left * tiles)
    which = at // tiles
    if turn > 0:
        which += 1
        at = which * tiles if turn == 1 else until
    begin, end = which * tiles // share + which, ((which + 1) * tiles - 1) // share + which + 1
    span = Span(at - which * tiles, min(until - which * tiles, tiles), cluster + which, (begin, end))
    return (which if at < until else left), span


@cute.jit
def begin(queue: Queue, units: Units, config: Constexpr):
    """The loader tells the first unit. One warp of each block calls it, like the following."""
    if tells(config):
        tell_all(queue, Int32(0), words(arch.block_idx()[0] // config.cluster, units, config), config)


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
        tell_all(queue, done, words(unit, units, config), config)
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
def tell_all(queue: Queue, done: Int32, told: tuple, config: Constexpr):
    for rank in range_constexpr(listeners(config)):
        tell(queue, tma.after(done, AHEAD).index, told, rank, config)


@cute.jit
def tell(queue: Queue, slot: Int32, told: tuple, rank: Constexpr[int], config: Constexpr):
    """Write what is `told` where block `rank` of this cluster looks for them, and arrive there."""
    addresses = queue.told[None, slot].iterator.toint(), (queue.full + slot).toint()
    if const_expr(config.shares):
        stores = "st.shared.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; st.shared.v4.b32 [{$r0} + 16], {{$r6}, {$r7}, {$r8}, {$r9}};"
        ptx = f"{stores} mbarrier.arrive.shared.b64 _, [{{$r1}}];"
    elif const_expr(listeners(config) == 1):
        ptx = "st.shared.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; mbarrier.arrive.shared.b64 _, [{$r1}];"
    else:
        ptx = (
            f"{{ .reg .b32 slot, full; mapa.shared::cluster.u32 slot, {{$r0}}, {rank}; mapa.shared::cluster.u32 full, {{$r1}}, {rank}; "
            "st.shared::cluster.v4.b32 [slot], {{$r2}, {$r3}, {$r4}, {$r5}}; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [full]; }"
        )
    arch.inline_ptx(ptx, read_only_args=[*addresses, *told])


@cute.jit
def told(queue: Queue, done: Int32, config: Constexpr) -> Block:
    """The unit after `done` others, once it was told; may be asked again until `forget`."""
    state = tma.after(done, AHEAD)
    scope = const_expr("" if listeners(config) == 1 else ".acquire.cluster")
    arch.inline_ptx(
        f"{{ .reg .pred there; again: mbarrier.try_wait.parity{scope}.shared::cta.b64 there, [{{$r0}}], {{$r1}}; @!there bra again; }}",
        read_only_args=[(queue.full + state.index).toint(), state.phase],
    )
    row, head, head_k, batch = read(queue, state.index, 0)
    if const_expr(config.cluster > 1):
        row = row * config.cluster + arch.block_idx_in_cluster() if row >= 0 else row
    return Block(row * config.tile_m, head, head_k, batch)


@cute.jit
def span(queue: Queue, done: Int32) -> Span:
    """Of the unit that `told` has told of, where units are shared."""
    first, last, slot, slots = read(queue, tma.after(done, AHEAD).index, WORDS)
    return Span(first, last, slot, (slots & 0xFFFF, slots >> 16))


@cute.jit
def read(queue: Queue, slot: Int32, word: Constexpr[int]):
    """Four words from `word` on. Read anew each time, so that nothing has to be kept in registers in between."""
    return arch.inline_ptx(
        "ld.volatile.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * WORDS,
        read_only_args=[queue.told[None, slot].iterator.toint() + 4 * word],
    )


@cute.jit
def forget(queue: Queue, done: Int32, config: Constexpr):
    """This warp is done with the unit."""
    if arch.lane_idx() == 0:
        empty = queue.empty + tma.after(done, AHEAD).index
        arch.mbarrier_arrive(empty, None if const_expr(listeners(config) == 1) else 0)
