"""Which thread block computes which tile of queries, and when: blocks that stay, and take one tile after another.

A tile of queries of one head, or `cluster` neighbouring ones, are a unit of work, for a thread block or a cluster of them. Units are numbered so
that those with the most keys come first and those that run at the same time share keys: a section of `section` heads, all its last tiles, then
those before them. A cluster begins with the unit of its own number; its first block draws the next ones from a counter, and tells all
threads that want to know what to compute. Loaders are ahead of their readers, so that a tile's loads begin while the tile before it is still
computed.
"""

from typing import NamedTuple

from tilewise.hopper import tma
from tilewise.hopper.dsl import Boolean, Constexpr, Int32, SmemAllocator, arch, const_expr, cute, range_constexpr

AHEAD = 3  # units that may be told of and not done yet
WORDS = 4  # of what is told of one


class Units(NamedTuple):
    """All units of a launch: `count` of them, `rows` (of one tile, or of a cluster's) for each of `heads` (of all batches), `section` at a time."""

    count: Int32
    heads: Int32
    rows: Int32
    section: Int32


class Queue(NamedTuple):
    """Where clusters draw from, and where each of their blocks finds what was drawn."""

    counter: cute.Tensor  # (1,) int32 in global memory; 0 before and after
    told: cute.Tensor  # (WORDS, AHEAD) int32: row, head, head of the keys, batch; a row below 0 is the end
    full: cute.Pointer  # (AHEAD) mbarriers, on which a cluster's first block arrives once it has written a slot,
    empty: cute.Pointer  # and those of the first block, on which every warp of the cluster that reads a slot arrives when it is done


class Block(NamedTuple):
    """A block's part of a unit: the queries from m0 on, of one head. m0 < 0: there is nothing more to do."""

    m0: Int32
    head: Int32
    head_k: Int32
    batch: Int32


@cute.jit
def make_queue(storage: SmemAllocator, counter: cute.Tensor, warps: int, cluster: Constexpr[int]) -> Queue:
    """With its barriers initialised, and visible after `tma.barriers_ready`; `warps` of each block and the loader read from it."""
    told = storage.allocate_tensor(Int32, cute.make_layout((WORDS, AHEAD)), 16)
    queue = Queue(counter, told, storage.allocate_array(cute.Int64, AHEAD), storage.allocate_array(cute.Int64, AHEAD))
    if arch.thread_idx()[0] == 0:
        for i in range_constexpr(AHEAD):
            arch.mbarrier_init(queue.full + i, 1)
            arch.mbarrier_init(queue.empty + i, (warps + 1) * cluster)
    return queue


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
    row = units.rows - 1 - row if unit < units.count else Int32(-1)
    return row, head, head // (heads_q // heads_k), batch


@cute.jit
def draw(queue: Queue, done: Int32, units: Units, heads_q: Int32, heads_k: Int32, config: Constexpr) -> Block:
    """The loader's next unit, after `done` others, told to all readers. One warp of each block calls it.

    Every cluster draws after each unit, which makes as many draws as there are units; the last one sets the counter back.
    """
    state = tma.after_empty(done, AHEAD)
    first = Boolean(True)
    if const_expr(config.cluster > 1):
        first = arch.block_idx_in_cluster() == 0
    if first and arch.lane_idx() == 0:
        arch.mbarrier_wait(queue.empty + state.index, state.phase)
        clusters, unit = arch.grid_dim()[0] // config.cluster, arch.block_idx()[0] // config.cluster
        if done > 0:
            ticket = arch.atomic_add(queue.counter.iterator, Int32(1))
            if ticket == units.count - 1:
                queue.counter[0] = Int32(0)
            unit = clusters + ticket
        words = part(unit, units, heads_q, heads_k)
        for rank in range_constexpr(config.cluster):
            tell(queue, state.index, words, rank, config)
    block = told(queue, done, config)
    forget(queue, done, config)
    return block


@cute.jit
def tell(queue: Queue, slot: Int32, words: tuple, rank: Constexpr[int], config: Constexpr):
    """Write `words` where block `rank` of this cluster looks for them, and arrive there."""
    addresses = queue.told[None, slot].iterator.toint(), (queue.full + slot).toint()
    if const_expr(config.cluster == 1):
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
    scope = const_expr("" if config.cluster == 1 else ".acquire.cluster")
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
        arch.mbarrier_arrive(empty, None if const_expr(config.cluster == 1) else 0)
