"""dK and dV of a block of keys that several thread blocks of the backward pass compute parts of. Each waits only for blocks that started earlier.

The last wave of a full mask (Config.shares): without a mask all blocks take equally long, so a last wave that occupies half of the machine takes as
long as a whole one. Several thread blocks then divide one walk over the queries; the last of them adds up the parts, in one order.

Grouped queries (Config.heads_apart): a block that walks with all query heads of a group stays at a tile of queries for as many steps as there are
heads. Blocks that started one after another are then so far apart that the L2 cache has lost a tile when the next block reads it (H100, 64:8 heads of
128, 8,192 tokens, causal: 5.96 ms, with as many key heads 4.80). So each head has a thread block of its own, in the order of heads without groups.
The first head of the group leaves its dK and dV in global memory, each further head adds its own in turn, and the last one writes the gradients.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.order import Block, Order
from tilewise.backends.hopper.backward.parts import Tensors, now_at
from tilewise.backends.hopper.backward.tiles import THREADS, Barrier
from tilewise.sm90.dsl import Constexpr, Float32, Int32, Int64, arch, cute, cutlass, range_constexpr


class Partials(NamedTuple):
    sums: cute.Tensor  # (thread blocks, (head_dim + head_dim_v) * tile_n) fp32, in the order of the registers
    ready: cute.Tensor  # (thread blocks,) int32: how many parts are in the sums; `prepare` sets them to 0
    shared: Int32  # how many blocks of keys have parts
    number: Int32  # of this block among them


@cute.jit
def partials_of(sums: cute.Tensor, counters: cute.Tensor, unit: Int32, order: Order, blocks: Int32) -> Partials:
    """Of a thread block that shares, or of a unit; `blocks` of keys of all heads."""
    shared = blocks - order.shared_from
    ready = cute.make_tensor(counters.iterator + 1, counters.layout)  # behind the counter of persistent blocks
    return Partials(sums, ready, shared, (unit - order.shared_from) // order.per_share)


@cute.jit
def partials_of_group(sums: cute.Tensor, counters: cute.Tensor, block: Block, tensors: Tensors, config: Constexpr[Config]) -> Partials:
    """The sums of one block of keys, for all heads of the group."""
    ready = cute.make_tensor(counters.iterator + 1, counters.layout)
    n_blocks = cute.ceil_div(tensors.K.shape[1], config.tile_n)
    number = (block.batch * tensors.K.shape[2] + block.head_k) * n_blocks + block.n0 // config.tile_n
    return Partials(sums, ready, Int32(0), number)


@cute.jit
def lent(sums: cute.Tensor, tensors: Tensors) -> Int32:
    """How many queries of all sequences, the last ones, have parts where their dQ goes, which therefore has to wait until this kernel is through."""
    return cute.ceil_div(2 * sums.shape[0] * sums.shape[1], tensors.Q.shape[2] * tensors.Q.shape[3])  # two 16-bit elements for one of 32


@cute.jit
def leave(partials: Partials, acc_dK: cute.Tensor, acc_dV: cute.Tensor, block: Block, config: Constexpr[Config]):
    """This thread block's part."""
    number = block.share * partials.shared + partials.number
    write_all(partials, number, acc_dK, acc_dV, config)
    count(partials, number, config)


@cute.jit
def pass_on(partials: Partials, acc_dK: cute.Tensor, acc_dV: cute.Tensor, block: Block, config: Constexpr[Config]):
    """This head's part, added to the sum of the heads before it. Additions in the L2 cache keep no thread waiting, as reading the sum would."""
    if block.member == 0:
        write_all(partials, partials.number, acc_dK, acc_dV, config)
    else:
        wait_for(partials, partials.number, block.member, config)
        threads, address = config.consumers * THREADS, place_of(partials, partials.number, config)
        for i in range_constexpr(vectors_of(acc_dK)):
            add_in_memory(address + 16 * threads * i, acc_dK, i)
        for i in range_constexpr(vectors_of(acc_dV)):
            add_in_memory(address + 16 * threads * (vectors_of(acc_dK) + i), acc_dV, i)
    count(partials, partials.number, config)


@cute.jit
def write_all(partials: Partials, number: Int32, acc_dK: cute.Tensor, acc_dV: cute.Tensor, config: Constexpr[Config]):
    threads, address = config.consumers * THREADS, place_of(partials, number, config)
    for i in range_constexpr(vectors_of(acc_dK)):
        write(address + 16 * threads * i, acc_dK, i)
    for i in range_constexpr(vectors_of(acc_dV)):
        write(address + 16 * threads * (vectors_of(acc_dK) + i), acc_dV, i)


@cute.jit
def count(partials: Partials, number: Int32, config: Constexpr[Config]):
    """One part more is there."""
    arch.barrier(barrier_id=Barrier.DS, number_of_threads=config.consumers * THREADS)
    if arch.thread_idx()[0] == THREADS:
        arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], 1;", read_only_args=[(partials.ready.iterator + number).toint()])


@cute.jit
def wait_for(partials: Partials, number: Int32, parts: Int32, config: Constexpr[Config]):
    """Until place `number` holds `parts` parts."""
    if arch.thread_idx()[0] == THREADS:
        while now_at((partials.ready.iterator + number).toint()) < parts:
            pass
    arch.barrier(barrier_id=Barrier.DS, number_of_threads=config.consumers * THREADS)


@cute.jit
def add_others(partials: Partials, acc_dK: cute.Tensor, acc_dV: cute.Tensor, block: Block, config: Constexpr[Config]):
    """To the last one's: those of the others, one after another."""
    for share in cutlass.range(block.share, unroll=1):
        add_from(partials, share * partials.shared + partials.number, Int32(1), acc_dK, acc_dV, config)


@cute.jit
def add_from(partials: Partials, number: Int32, parts: Int32, acc_dK: cute.Tensor, acc_dV: cute.Tensor, config: Constexpr[Config]):
    """Add what is at place `number`, once it holds `parts` parts."""
    wait_for(partials, number, parts, config)
    threads, address = config.consumers * THREADS, place_of(partials, number, config)
    for i in range_constexpr(vectors_of(acc_dK)):
        add(address + 16 * threads * i, acc_dK, i)
    for i in range_constexpr(vectors_of(acc_dV)):
        add(address + 16 * threads * (vectors_of(acc_dK) + i), acc_dV, i)


@cute.jit
def place_of(partials: Partials, number: Int32, config: Constexpr[Config]) -> Int64:
    """Of this thread's first vector; a warp's lie side by side."""
    return (partials.sums[number, None].iterator + 4 * (arch.thread_idx()[0] - THREADS)).toint()


def vectors_of(acc: cute.Tensor) -> int:
    return cute.size(acc) // 4


@cute.jit
def write(address: Int64, acc: cute.Tensor, i: Constexpr[int]):
    numbers = (acc[4 * i + j] for j in range(4))
    arch.inline_ptx("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *numbers])


@cute.jit
def add_in_memory(address: Int64, acc: cute.Tensor, i: Constexpr[int]):
    numbers = (acc[4 * i + j] for j in range(4))
    arch.inline_ptx("red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *numbers])


@cute.jit
def add(address: Int64, acc: cute.Tensor, i: Constexpr[int]):
    """Read past the L1 cache, which knows nothing of what other multiprocessors write."""
    numbers = arch.inline_ptx(
        "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Float32] * 4, read_only_args=[address]
    )
    for j in range_constexpr(4):
        acc[4 * i + j] += numbers[j]
