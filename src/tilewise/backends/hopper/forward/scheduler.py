"""The tile scheduler of the forward pass: which thread block computes which tile of queries, and when. Thread blocks are persistent.

A unit of work is a tile of queries of one head, or `cluster` neighbouring tiles for a cluster of thread blocks. Units are numbered such that those
with the most keys come first, and those that run at the same time read the same keys: within a section of `section` heads, the last tiles of all
heads come first, then the tiles before them.

A cluster's first unit has the cluster's own number. A static schedule adds the number of clusters for each further unit, and serves masks under
which all units take equally long. A dynamic schedule fetches each further number from a counter in global memory, a few tiles of keys before the
unit at hand ends: early enough to hide the latency of the counter, late enough that slow clusters leave work to fast ones. The first block of a
cluster fetches the number and publishes the unit to all warps that work on it, so its loads begin under the end of the unit before.

Split-KV: under a static schedule the units that remain after the last full round would occupy only some of the clusters. `shares` cuts these units
up. Their tiles of keys, in a row, are dealt out evenly: each cluster gets one stretch, which may hold the end of one unit and the beginning of the
next. The cluster that finishes a unit last merges the pieces (partials.py).
"""

from typing import NamedTuple

from tilewise.backends.hopper.operands import Work
from tilewise.sm90 import tma
from tilewise.sm90.dsl import Boolean, Constexpr, Int32, SmemAllocator, arch, const_expr, cute, range_constexpr

AHEAD = 4  # entries of the queue: units that are published and not released
WORDS = 4  # int32 of an entry, without the Span
LEAST_SHARE = 4  # tiles of keys that a cluster gets at least, where units are shared
MOST_SHARES = 16  # clusters of one unit, about
LEAST_SAVED = 640  # keys by which sharing must shorten the longest cluster's work: a piece's prologue, epilogue and merge take as long


class Units(NamedTuple):
    """All units of a launch: `count` of them, `rows` (of one tile, or of a cluster's) for each head of each batch, `section` heads at a time.

    Divisors divide by a multiplication and a shift.
    """

    count: Int32
    rows: Int32
    section: Int32
    whole_sections: Int32
    per_section: object  # divisor: units of a section
    width: object  # divisor: heads of a section
    last_width: object  # divisor: heads of the last section, where it has fewer
    heads_q: object
    group: object
    order: cute.Tensor | None  # (rows,) int32: rows, those with the most keys last; None: in their own order
    shared: "Shared | None"


class Shared(NamedTuple):
    """Units from `first` on, of `tiles` tiles of keys each, are split: cluster c gets the `share` tiles from c * share on."""

    first: Int32
    tiles: Int32
    share: Int32


class Span(NamedTuple):
    """A piece of a unit: the tiles of keys [first, last), and the slots in global memory of the unit's partial results."""

    first: Int32
    last: Int32
    slot: Int32  # this piece's
    slots: tuple[Int32, Int32]  # [begin, end) of all pieces of the unit, in the order of their keys; a single one is the whole unit


@cute.jit
def shared_of(units: Int32, tiles: Int32, clusters: Int32, tile_n: Constexpr[int]) -> Shared:
    """On the host. Each of `clusters` first computes the same number of the `units`; the rest is shared."""
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


@cute.jit
def cut(mO: cute.Tensor, mK: cute.Tensor, work: Work, order: cute.Tensor | None, config: Constexpr) -> tuple[Units, Int32]:
    """On the host: the units, and how many clusters compute them. mO, mK: as torch has them."""
    rows = cute.ceil_div(mO.shape[1], config.cluster * config.tile_m)
    clusters, shared = work.blocks // config.cluster, None
    if const_expr(config.shares):
        shared = shared_of(rows * mO.shape[2] * mO.shape[0], cute.ceil_div(mK.shape[1], config.tile_n), clusters, config.tile_n)
    units = units_of(rows, mO.shape[2], mK.shape[2], mO.shape[0], work.section, order, shared)
    if const_expr(not config.shares):
        clusters = min(units.count, clusters)
    return units, clusters


class Queue(NamedTuple):
    """The counter that all clusters fetch from, and each block's ring of published units in shared memory."""

    counter: cute.Tensor  # (1,) int32 in global memory; 0 before and after
    entries: cute.Tensor  # (words, AHEAD) int32: row (below 0: the end), head, key head, batch; then a Span, where units are shared
    full: cute.Pointer  # (AHEAD,) mbarriers: the publisher arrives after it has written an entry
    empty: cute.Pointer  # (AHEAD,) mbarriers: every warp that reads an entry arrives when it releases it


class Block(NamedTuple):
    """A thread block's part of a unit: the queries from m0 on, of one head. m0 < 0: no unit is left."""

    m0: Int32
    head: Int32
    head_k: Int32
    batch: Int32


@cute.jit
def make_queue(storage: SmemAllocator, counter: cute.Tensor, warps: int, config: Constexpr) -> Queue:
    """Allocates the ring and initialises its barriers, visible after `tma.barriers_ready`. Readers: `warps` of each block, and its loader."""
    entries = storage.allocate_tensor(Int32, cute.make_layout((WORDS * (1 + config.shares), AHEAD)), 16)
    queue = Queue(counter, entries, storage.allocate_array(cute.Int64, AHEAD), storage.allocate_array(cute.Int64, AHEAD))
    if arch.thread_idx()[0] == 0:
        for i in range_constexpr(AHEAD):
            arch.mbarrier_init(queue.full + i, 1)
            arch.mbarrier_init(queue.empty + i, (warps + 1) * receivers(config))
    return queue


def receivers(config) -> int:
    """Thread blocks that one loader publishes to: its cluster under a dynamic schedule, else its own block."""
    return config.cluster if config.dynamic else 1


@cute.jit
def part(unit: Int32, units: Units) -> tuple[Int32, Int32, Int32, Int32]:
    """(row, head, key head, batch) of a unit. Within a section the last tiles of all heads come first: a causal mask gives them the most keys."""
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
    """The entry of a unit. Where units are shared, numbers from `shared.first` on stand for this cluster's pieces, one for each turn."""
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
    """The unit, among those that are `left`, and the piece of it that a cluster computes in a turn; `left` itself when there is none.

    In the row of all units' tiles the cluster has [cluster * share, (cluster + 1) * share). Its first turn is the stretch inside one unit, its
    second the stretch inside the next. From one piece to the next in the row either the cluster or the unit advances by one, so
    cluster + unit numbers the slots.
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
    """Publish the first unit. One warp of each block, the loader, calls this function and the following ones."""
    if publishes(config):
        publish_to_all(queue, Int32(0), words(arch.block_idx()[0] // config.cluster, units, config), config)


@cute.jit
def fetch(queue: Queue, done: Int32, config: Constexpr) -> Int32:
    """The number of the unit after `done` others, for `publish`."""
    clusters = arch.grid_dim()[0] // config.cluster
    unit = arch.block_idx()[0] // config.cluster + done * clusters
    if const_expr(config.dynamic):
        unit = clusters
        if publishes(config):
            unit += arch.atomic_add(queue.counter.iterator, Int32(1))
    return unit


@cute.jit
def publish(queue: Queue, done: Int32, unit: Int32, units: Units, config: Constexpr):
    """Publish the unit after `done` others, once its entry is free.

    Every unit makes its cluster fetch once, so there are as many fetches as units; the cluster that gets the last ticket resets the counter.
    """
    if publishes(config):
        state = tma.after_empty(done, AHEAD)
        arch.mbarrier_wait(queue.empty + state.index, state.phase)
        publish_to_all(queue, done, words(unit, units, config), config)
        if const_expr(config.dynamic) and unit - arch.grid_dim()[0] // config.cluster == units.count - 1:
            queue.counter[0] = Int32(0)


@cute.jit
def publishes(config: Constexpr) -> Boolean:
    """Whether this thread of the loader's warp publishes."""
    first = arch.lane_idx() == 0
    if const_expr(config.dynamic and config.cluster > 1):
        first = first and arch.block_idx_in_cluster() == 0
    return first


@cute.jit
def publish_to_all(queue: Queue, done: Int32, entry: tuple, config: Constexpr):
    for rank in range_constexpr(receivers(config)):
        publish_to(queue, tma.after(done, AHEAD).index, entry, rank, config)


@cute.jit
def publish_to(queue: Queue, slot: Int32, entry: tuple, rank: Constexpr[int], config: Constexpr):
    """Write the entry into the ring of block `rank` of this cluster, and arrive at its barrier."""
    addresses = queue.entries[None, slot].iterator.toint(), (queue.full + slot).toint()
    if const_expr(config.shares):
        stores = "st.shared.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; st.shared.v4.b32 [{$r0} + 16], {{$r6}, {$r7}, {$r8}, {$r9}};"
        ptx = f"{stores} mbarrier.arrive.shared.b64 _, [{{$r1}}];"
    elif const_expr(receivers(config) == 1):
        ptx = "st.shared.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; mbarrier.arrive.shared.b64 _, [{$r1}];"
    else:
        ptx = (
            f"{{ .reg .b32 slot, full; mapa.shared::cluster.u32 slot, {{$r0}}, {rank}; mapa.shared::cluster.u32 full, {{$r1}}, {rank}; "
            "st.shared::cluster.v4.b32 [slot], {{$r2}, {$r3}, {$r4}, {$r5}}; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [full]; }"
        )
    arch.inline_ptx(ptx, read_only_args=[*addresses, *entry])


@cute.jit
def consume(queue: Queue, done: Int32, config: Constexpr) -> Block:
    """Wait for the unit after `done` others; may be called again until `release`."""
    state = tma.after(done, AHEAD)
    scope = const_expr("" if receivers(config) == 1 else ".acquire.cluster")
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
    """The piece of the unit that `consume` gave, where units are shared."""
    first, last, slot, slots = read(queue, tma.after(done, AHEAD).index, WORDS)
    return Span(first, last, slot, (slots & 0xFFFF, slots >> 16))


@cute.jit
def read(queue: Queue, slot: Int32, word: Constexpr[int]):
    """Four words of an entry, from `word` on. Read again at every call, so that no register holds them in between."""
    return arch.inline_ptx(
        "ld.volatile.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * WORDS,
        read_only_args=[queue.entries[None, slot].iterator.toint() + 4 * word],
    )


@cute.jit
def release(queue: Queue, done: Int32, config: Constexpr):
    """This warp no longer reads the unit's entry."""
    if arch.lane_idx() == 0:
        empty = queue.empty + tma.after(done, AHEAD).index
        arch.mbarrier_arrive(empty, None if const_expr(receivers(config) == 1) else 0)
