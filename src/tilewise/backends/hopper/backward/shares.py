"""A block of keys whose walk over the queries several thread blocks share, in the backward pass on Hopper: the last wave of a full mask.

Without a mask all blocks take equally long, so a last wave that occupies half of the machine takes as long as a whole one. Each thread block
then walks over a part of the tiles of queries; the last of them adds up dK and dV of all parts, in one order, and writes them. It waits only for
thread blocks that started before it.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.order import Block, Order
from tilewise.backends.hopper.backward.parts import Tensors, now_at
from tilewise.backends.hopper.backward.tiles import THREADS, Barrier
from tilewise.sm90.dsl import Constexpr, Float32, Int32, Int64, arch, cute, cutlass, range_constexpr


class Partials(NamedTuple):
    sums: cute.Tensor  # (thread blocks, (head_dim + head_dim_v) * tile_n) fp32, in the order of the registers
    ready: cute.Tensor  # (thread blocks,) int32: 1 where they are there; `prepare` sets them to 0
    shared: Int32  # blocks of keys,
    number: Int32  # of which this is one


@cute.jit
def partials_of(sums: cute.Tensor, counters: cute.Tensor, unit: Int32, order: Order, blocks: Int32) -> Partials:
    """Of a thread block that shares, or of a unit; `blocks` of keys of all heads."""
    shared = blocks - order.shared_from
    ready = cute.make_tensor(counters.iterator + 1, counters.layout)  # behind the counter of persistent blocks
    return Partials(sums, ready, shared, (unit - order.shared_from) // order.per_share)


@cute.jit
def lent(sums: cute.Tensor, tensors: Tensors) -> Int32:
    """How many queries of all sequences, the last ones, have parts where their dQ goes, which therefore has to wait until this kernel is through."""
    return cute.ceil_div(2 * sums.shape[0] * sums.shape[1], tensors.Q.shape[2] * tensors.Q.shape[3])  # two 16-bit numbers for one of 32


@cute.jit
def leave(partials: Partials, acc_dK: cute.Tensor, acc_dV: cute.Tensor, block: Block, config: Constexpr[Config]):
    """This thread block's part."""
    number, threads = block.share * partials.shared + partials.number, config.consumers * THREADS
    address = place_of(partials, number, config)
    for i in range_constexpr(vectors_of(acc_dK)):
        write(address + 16 * threads * i, acc_dK, i)
    for i in range_constexpr(vectors_of(acc_dV)):
        write(address + 16 * threads * (vectors_of(acc_dK) + i), acc_dV, i)
    arch.barrier(barrier_id=Barrier.DS, number_of_threads=threads)
    if arch.thread_idx()[0] == THREADS:
        arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], 1;", read_only_args=[(partials.ready.iterator + number).toint()])


@cute.jit
def add_others(partials: Partials, acc_dK: cute.Tensor, acc_dV: cute.Tensor, block: Block, config: Constexpr[Config]):
    """To the last one's: those of the others, one after another."""
    threads = config.consumers * THREADS
    for share in cutlass.range(block.share, unroll=1):
        number = share * partials.shared + partials.number
        if arch.thread_idx()[0] == THREADS:
            while now_at((partials.ready.iterator + number).toint()) == 0:
                pass
        arch.barrier(barrier_id=Barrier.DS, number_of_threads=threads)
        address = place_of(partials, number, config)
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
def add(address: Int64, acc: cute.Tensor, i: Constexpr[int]):
    """Read past the L1 cache, which knows nothing of what other multiprocessors write."""
    numbers = arch.inline_ptx(
        "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Float32] * 4, read_only_args=[address]
    )
    for j in range_constexpr(4):
        acc[4 * i + j] += numbers[j]
