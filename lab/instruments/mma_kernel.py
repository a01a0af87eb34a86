"""A forward pass with what sm_80 has, in the CuTe DSL: cp.async, ldmatrix, mma.sync. An experiment; mma_forward.py checks and times it.

Each warp owns 16 rows, or 32: a row of K or V that ldmatrix reads from shared memory then serves two products, and with one it would be read as
long as the tensor cores compute. Tiles of K and V take turns in one ring of buffers, K V K V, and a buffer is asked for again as soon as all warps
have left it: while S is computed, V is on its way. Steps that need a mask have a loop of their own, the first.

What is not there: a NaN or an infinity in V of a key that the causal mask hides reaches a row whose tile the key lies in.
Source: Dao, "FlashAttention-2" (2023), Algorithm 1 and section 3.3. Equations: those of its forward in docs/algorithm.md.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # the DSL reads it as it is imported

import torch
from torch import Tensor

from tilewise.sm90 import fragments, jit
from tilewise.sm90.dsl import (
    BFloat16,
    Constexpr,
    CUstream,
    Float16,
    Float32,
    Int32,
    SmemAllocator,
    arch,
    const_expr,
    cpasync,
    cute,
    range_constexpr,
    warp,
)

MMA = 16, 8, 16
WIDE = 8  # 16-bit numbers in 16 bytes
ACROSS, LINE = 64, 128  # numbers and bytes of a row in shared memory
SMALL = "sm_86", "sm_89", "sm_120"  # 99 KiB of shared memory a block, and a multiprocessor little more
AFRESH = "--opt-level 3"  # the compiler's default; with an option a kernel is not looked for on disk, where none knows this file's sources
MOST_HEADS = 65535  # the second and third dimension of a grid


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a problem is cut and scheduled. ring: buffers for tiles of K and V, at least 2; q_in_registers: Q is read from shared memory once."""

    dtype: torch.dtype
    head_dim: int
    causal: bool
    tile_m: int
    tile_n: int
    warps: int
    ring: int
    q_in_registers: bool = False
    ahead: int = 2  # of 16 x 16 numbers of K or V

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def element(self) -> type:
        return BFloat16 if self.dtype == torch.bfloat16 else Float16

    @property
    def m_tiles(self) -> int:
        """Of 16 rows that a warp owns."""
        return self.tile_m // (MMA[0] * self.warps)

    @property
    def smem_bytes(self) -> int:
        return 2 * self.head_dim * (self.tile_m + self.ring * self.tile_n)


def configure(dtype: torch.dtype, head_dim: int, causal: bool, **choice) -> Config:
    """What is chosen for the GPU that is compiled for. ValueError for what there is no kernel for."""
    if dtype not in (torch.bfloat16, torch.float16) or head_dim not in (64, 128):
        raise ValueError(f"there are kernels for bf16 and fp16, head_dim 64 and 128, and this is {dtype}, {head_dim}")
    if jit.arch().rstrip("af") in SMALL:  # one block of 8 warps fits: they halve K's and V's reads as two blocks would not
        chosen = {"tile_m": 128, "tile_n": 64, "warps": 8, "ring": 3 if head_dim == 128 else 4, "q_in_registers": True}
    else:  # two blocks of 4 warps, which own 32 rows each; more keys a tile spill
        chosen = {"tile_m": 128, "tile_n": 48 if head_dim == 128 else 64, "warps": 4, "ring": 4}
    made = Config(dtype=dtype, head_dim=head_dim, causal=causal, **{**chosen, **choice})
    if made.tile_m % (MMA[0] * made.warps) or made.tile_n % MMA[2] or made.tile_n % (made.threads // WIDE) or made.ring < 2:
        raise ValueError(f"warps own whole tiles of 16 rows and copy whole ones, and a ring has two buffers at least: {made}")
    return made


def arguments(config: Config) -> list:
    """Stand-ins: q, o (batch, seqlen_q, heads_q, head_dim), k, v (batch, seqlen_k, heads_k, head_dim), lse (batch, heads_q, seqlen_q), scale_log2."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k = (jit.size() for _ in range(5))
    of_q, of_k = ((batch, *sizes, config.head_dim) for sizes in ((seqlen_q, heads_q), (seqlen_k, heads_k)))
    tensors = [jit.tensor(config.element, *sizes) for sizes in (of_q, of_k, of_k, of_q)]
    return [*tensors, jit.tensor(Float32, batch, heads_q, seqlen_q, aligned=False), Float32(1.0)]


@cute.jit
def launch(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mL: cute.Tensor,
    scale_log2: Float32, config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    """As `arguments` has them. Scores are multiplied by `scale_log2` ln 2."""
    op = warp.MmaF16BF16Op(config.element, Float32, MMA)
    mma = cute.make_tiled_mma(op, (config.warps, 1, 1), permutation_mnk=(MMA[0] * config.warps, 2 * MMA[1], MMA[2]))
    asynchronous = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), config.element, num_bits_per_copy=8 * jit.BYTES)
    threads = cute.make_ordered_layout((config.threads // WIDE, WIDE), order=(1, 0))
    copy = cute.make_tiled_copy_tv(asynchronous, threads, cute.make_layout((1, WIDE)))
    kernel(mQ, mK, mV, mO, mL, scale_log2, mma, copy, config).launch(
        grid=(cute.ceil_div(mQ.shape[1], config.tile_m), mQ.shape[2], mQ.shape[0]), block=(config.threads, 1, 1), stream=stream
    )


def swizzled(rows: int, config: Config, copies: int) -> tuple[cute.Layout, cute.Swizzle]:
    """(rows, head_dim, copies) in shared memory, in pieces of 8 rows of 128 bytes, so that eight rows that ldmatrix reads lie in all banks."""
    piece = cute.make_ordered_layout((8, ACROSS), order=(1, 0))
    return cute.tile_to_shape(piece, (rows, config.head_dim, copies), order=(0, 1, 2)), cute.make_swizzle(3, 4, 3)


class Operand(NamedTuple):
    atom: cute.CopyAtom
    first: Int32  # address of this lane's row of the first 16 x 16 numbers


class Tile(NamedTuple):
    """What a thread holds from beginning to end."""

    mma: cute.TiledMma
    Q: Operand
    held: tuple[cute.Tensor, ...]  # Q's fragments, if they are read once
    K: Operand
    V: Operand
    acc_O: cute.Tensor
    tScS: cute.Tensor  # (row, column) of each number of S
    rows: tuple[fragments.Rows, ...]  # of 16 rows each
    m0: Int32  # the first row, counted from the bottom right: it sees as many keys, and one
    seqlen_k: Int32
    scale_log2: Float32


class Loads(NamedTuple):
    copy: cute.TiledCopy
    gK: cute.Tensor  # (seqlen_k, head_dim)
    gV: cute.Tensor
    ring: cute.Tensor  # (tile_n, head_dim, ring)


@cute.kernel
def kernel(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mL: cute.Tensor,
    scale_log2: Float32, mma: cute.TiledMma, copy: cute.TiledCopy, config: Constexpr[Config],
):  # fmt: skip
    storage = SmemAllocator()
    (of_Q, swizzle), (of_ring, _) = swizzled(config.tile_m, config, 1), swizzled(config.tile_n, config, config.ring)
    sQ, ring = (storage.allocate_tensor(config.element, x, 1024, swizzle=swizzle) for x in (of_Q, of_ring))
    m_block, head, batch = arch.block_idx()
    if const_expr(config.causal):
        m_block = arch.grid_dim()[0] - 1 - m_block  # those with the most keys start first
    head_k = head // (mQ.shape[2] // mK.shape[2])
    gQ, gO = (x[batch, None, head, None] for x in (mQ, mO))
    loads = Loads(copy, *(x[batch, None, head_k, None] for x in (mK, mV)), ring)
    attend(gQ, gO, mL[batch, head, None], loads, sQ[None, None, 0], mma, m_block, scale_log2, config)


@cute.jit
def attend(
    gQ: cute.Tensor, gO: cute.Tensor, gL: cute.Tensor, loads: Loads, sQ: cute.Tensor, mma: cute.TiledMma, m_block: Int32,
    scale_log2: Float32, config: Constexpr[Config],
):  # fmt: skip
    """A tile of queries: the walk over the keys, the last first, then O and its log-sum-exp. gQ, gO: (seqlen_q, head_dim), gL: (seqlen_q,)."""
    seqlen_q, seqlen_k = gQ.shape[0], loads.gK.shape[0]
    n_blocks, masked = key_blocks(m_block, seqlen_q, seqlen_k, config)
    copy_rows(loads.copy, gQ, sQ, m_block, config.tile_m, True)
    for t in range_constexpr(config.ring - 1):
        ask(loads, n_blocks - 1, t, Int32(t), True, config)  # the first group is Q's as well
    tile = make_tile(sQ, loads.ring, mma, m_block * config.tile_m + seqlen_k - seqlen_q, seqlen_k, scale_log2, config)
    if const_expr(config.q_in_registers):
        arch.cp_async_wait_group(config.ring - 2)
        arch.sync_threads()
        tile = tile._replace(held=tuple(read_Q(tile.Q, k, config) for k in range(config.head_dim // MMA[2])))
    slot = Int32(0)
    n_block = n_blocks - 1  # the loops' only counter, as ptxas has no register for another
    while n_block >= n_blocks - masked:
        slot = step(tile, loads, n_block, slot, True, config)
        n_block -= 1
    while n_block >= 0:
        slot = step(tile, loads, n_block, slot, False, config)
        n_block -= 1
    arch.cp_async_wait_group(0)
    arch.sync_threads()  # where nothing was visited, another thread's copy of Q would come after O, which takes its place
    store(tile, gO, gL, sQ, loads.copy, m_block, config)


@cute.jit
def key_blocks(m_block: Int32, seqlen_q: Int32, seqlen_k: Int32, config: Constexpr[Config]) -> tuple[Int32, Int32]:
    """(tiles to visit, how many of them, from the last, need a mask)."""
    end, free = seqlen_k, seqlen_k
    if const_expr(config.causal):
        first = m_block * config.tile_m + seqlen_k - seqlen_q
        end, free = max(min(end, first + config.tile_m), 0), max(min(free, first + 1), 0)
    n_blocks = cute.ceil_div(end, config.tile_n)
    return n_blocks, n_blocks - free // config.tile_n


@cute.jit
def copy_rows(copy: cute.TiledCopy, source: cute.Tensor, target: cute.Tensor, block: Int32, rows: Constexpr[int], ragged: Constexpr[bool]):
    """Ask for rows from block * rows on; where they may be `ragged`, zeros stand for those that do not exist. NaN times a P of 0 would be NaN."""
    mine = copy.get_slice(arch.thread_idx()[0])
    where = rows, source.shape[1]
    found, to = mine.partition_S(cute.local_tile(source, where, (block, 0))), mine.partition_D(target)
    if const_expr(ragged):
        at = mine.partition_S(cute.make_identity_tensor(where))
        for m in range_constexpr(cute.size(to, mode=[1])):
            if at[0, m, 0][0] < source.shape[0] - block * rows:
                cute.copy(copy, found[None, m, None], to[None, m, None])
            else:
                to[None, m, None].fill(0.0)
    else:
        cute.copy(copy, found, to)


@cute.jit
def ask(loads: Loads, n_block: Int32, t: Constexpr[int], slot: Int32, ragged: Constexpr[bool], config: Constexpr[Config]):
    """Ask for the t-th tile of the walk from `n_block` on (K, V, K, V ...), if there is one, as a group of its own, which may be empty."""
    n_block -= t // 2
    if n_block >= 0:
        copy_rows(loads.copy, loads.gV if t % 2 else loads.gK, loads.ring[None, None, slot], n_block, config.tile_n, ragged)
    arch.cp_async_commit_group()


@cute.jit
def make_tile(
    sQ: cute.Tensor, ring: cute.Tensor, mma: cute.TiledMma, m0: Int32, seqlen_k: Int32, scale_log2: Float32, config: Constexpr[Config]
) -> Tile:
    mine = mma.get_slice(arch.thread_idx()[0])
    lane = arch.lane_idx()
    by_16, by_8 = (lane % 16, lane // 16), (lane // 16 * 8 + lane % 8, lane // 8 % 2)  # (row, 8 columns) of each lane's 16 bytes
    first_Q, first_V, first_K = (address(x, *at) for x, at in ((sQ, by_16), (ring, by_16), (ring, by_8)))
    plain, transposed = (cute.make_copy_atom(warp.LdMatrix8x8x16bOp(each, 4), config.element) for each in (False, True))
    acc_O = cute.make_rmem_tensor(mine.partition_shape_C((config.tile_m, config.head_dim)), Float32)
    acc_O.fill(0.0)
    return Tile(
        mma=mma,
        Q=Operand(plain, first_Q + arch.warp_idx() * (MMA[0] * LINE)),
        held=(),
        K=Operand(plain, first_K),
        V=Operand(transposed, first_V),
        acc_O=acc_O,
        tScS=mine.partition_C(cute.make_identity_tensor((config.tile_m, config.tile_n))),
        rows=tuple(fragments.fresh_rows() for _ in range(config.m_tiles)),
        m0=m0,
        seqlen_k=seqlen_k,
        scale_log2=scale_log2,
    )


def address(shared: cute.Tensor, row: Int32, columns: Int32) -> Int32:
    """Of numbers 8 columns and following of a row below 16."""
    return Int32(shared.iterator.toint()) + row * LINE + (columns ^ row % 8) * jit.BYTES


def read(x: Operand, at: Int32, registers: cute.Tensor):
    """16 x 16 numbers, into 8 registers of 16 bits. The swizzle is written out (`turned`): by the DSL's own each operand has 4 to 8 addresses."""
    pointer = cute.make_ptr(registers.element_type, at, cute.AddressSpace.smem, assumed_align=jit.BYTES)
    cute.copy(x.atom, cute.make_tensor(pointer, cute.make_layout(WIDE)), registers)


def turned(first: Int32, i: int, rows: int) -> Int32:
    """The address of columns 16 i and following, of an operand of so many rows."""
    return (first ^ 2 * jit.BYTES * (i % 4)) + i // 4 * rows * LINE


def read_Q(x: Operand, k: Constexpr[int], config: Constexpr[Config]) -> cute.Tensor:
    """The fragments of 16 terms of the sums, all rows."""
    found = cute.make_rmem_tensor((WIDE, config.m_tiles), config.element)
    for m in range(config.m_tiles):
        read(x, turned(x.first, k, config.tile_m) + m * config.warps * MMA[0] * LINE, found[None, m])
    return cute.make_tensor(found.iterator, cute.make_layout(((2, 2, 2), config.m_tiles)))


def product(tile: Tile, acc: cute.Tensor, A: Sequence[cute.Tensor], B: Operand, slot: Int32, of_V: bool, config: Config):
    """acc += A B, the tile of B, which is V or else K^T, in `slot`; 16 columns and 16 terms of each sum at a time, `ahead` of which are read ahead.

    A: fragments of 16 terms each, or none: they are Q's, and read here. All other fragments' registers are made here, too: those that outlive the
    loop's body are carried around it, eight registers and more.
    """
    first = B.first + slot * (config.tile_n * config.head_dim * 2)
    columns, terms = (config.head_dim, config.tile_n) if of_V else (config.tile_n, config.head_dim)
    places = [(k, n) for k in range(terms // 16) for n in range(columns // 16)]
    a, b = {}, {}
    for i in range(-config.ahead, len(places)):
        if i + config.ahead < len(places):
            k, n = place = places[i + config.ahead]
            if n == 0:
                a[k] = A[k] if A else read_Q(tile.Q, k, config)
            across, down = (n, k) if of_V else (k, n)
            b[place] = cute.make_rmem_tensor(WIDE, config.element)
            read(B, turned(first, across, config.tile_n) + down * (16 * LINE), b[place])
        if i >= 0:
            k, n = places[i]
            for half in range(2):
                part = cute.append_ones(acc[None, None, 2 * n + half], up_to_rank=3)
                columns_8 = cute.make_tensor(b[k, n].iterator + 4 * half, cute.make_layout(((2, 2), 1)))
                cute.gemm(tile.mma, part, a[k], columns_8, part)


@cute.jit
def step(tile: Tile, loads: Loads, n_block: Int32, slot: Int32, masked: Constexpr[bool], config: Constexpr[Config]) -> Int32:
    """O += softmax(S) V for one tile of keys, K of which lies in `slot`; the next tile's slot."""
    acc_S = cute.make_rmem_tensor(tile.tScS.shape, Float32)
    acc_S.fill(0.0)
    arrive(loads, n_block, config.ring - 1, slot, masked, config)
    product(tile, acc_S, tile.held, tile.K, slot, False, config)  # S = Q K^T, Eq. 1
    P = cute.make_rmem_tensor(probabilities(acc_S), config.element)
    for m in range_constexpr(config.m_tiles):
        S = acc_S[None, m, None]
        if const_expr(masked):
            fragments.hide(S, tile.tScS[None, m, None], tile.m0, n_block * config.tile_n, tile.seqlen_k, config.causal)
        rescale = fragments.online_softmax(S, tile.rows[m], tile.scale_log2)
        fragments.scale_rows(tile.acc_O[None, m, None], rescale)
        flat(P[None, m, None]).store(flat(S).load().to(config.element))
    slot = after(slot, config)
    arrive(loads, n_block, config.ring, slot, masked, config)
    product(tile, tile.acc_O, [P[None, None, k] for k in range(config.tile_n // MMA[2])], tile.V, slot, True, config)  # O += P V, Eq. 16
    return after(slot, config)


@cute.jit
def arrive(loads: Loads, n_block: Int32, t: Constexpr[int], slot: Int32, ragged: Constexpr[bool], config: Constexpr[Config]):
    """Wait for the tile in `slot`, and ask for the one that takes the place of the last one before it."""
    arch.cp_async_wait_group(config.ring - 2)
    arch.sync_threads()  # all threads' copies are there, and all warps have left the tile before
    ask(loads, n_block, t, config.ring - 1 if slot == 0 else slot - 1, ragged, config)


@cute.jit
def after(slot: Int32, config: Constexpr[Config]) -> Int32:
    return 0 if slot == config.ring - 1 else slot + 1


def probabilities(acc_S: cute.Tensor) -> cute.Layout:
    """Of P as the second product reads it: two neighbouring 8 columns of S are 16 terms of its sums, in the order in which S lies."""
    _, m_tiles, columns = acc_S.shape
    return cute.make_layout(((2, 2, 2), m_tiles, columns // 2), stride=((1, 2, 4), 2 * columns * 2, 8))


@cute.jit
def flat(x: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(x.iterator, cute.composition(x.layout, cute.make_layout(cute.size(x))))


@cute.jit
def store(tile: Tile, gO: cute.Tensor, gL: cute.Tensor, sO: cute.Tensor, copy: cute.TiledCopy, m_block: Int32, config: Constexpr[Config]):
    """O and the log-sum-exp of the rows that exist; O by way of shared memory, where Q was, so that rows are written 128 bytes at a time."""
    thread, left = arch.thread_idx()[0], gO.shape[0] - m_block * config.tile_m
    for m in range_constexpr(config.m_tiles):
        lse = fragments.finish(tile.acc_O[None, m, None], tile.rows[m])
        at = fragments.by_rows(tile.tScS[None, m, None])
        for r in range_constexpr(fragments.ROWS):
            if at[r, 0][1] == 0 and at[r, 0][0] < left:
                gL[m_block * config.tile_m + at[r, 0][0]] = lse[r]
    rO = cute.make_rmem_tensor(tile.acc_O.shape, config.element)
    rO.store(tile.acc_O.load().to(config.element))
    pairs = cute.make_tiled_copy_C(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), config.element, num_bits_per_copy=32), tile.mma)
    mine = pairs.get_slice(thread)
    cute.copy(pairs, mine.retile(rO), mine.partition_D(sO))  # a warp's own rows, whose Q nobody else reads
    arch.sync_threads()
    rows = copy.get_slice(thread)
    where = config.tile_m, config.head_dim
    found, to = rows.partition_S(sO), rows.partition_D(cute.local_tile(gO, where, (m_block, 0)))
    at = rows.partition_S(cute.make_identity_tensor(where))
    for m in range_constexpr(cute.size(to, mode=[1])):
        if at[0, m, 0][0] < left:
            for c in range_constexpr(cute.size(to, mode=[2])):
                held = cute.make_rmem_tensor(WIDE, config.element)
                cute.autovec_copy(flat(found[None, m, c]), held)
                cute.autovec_copy(held, flat(to[None, m, c]))


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, **choice) -> tuple[Tensor, Tensor]:
    """O, as q, and LSE (batch, heads_q, seqlen_q) fp32, of q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_k, head_dim).

    bf16 or fp16; `causal`: aligned at the bottom right; scores are multiplied by `scale`, 1 / sqrt(head_dim) by default. `choice`: fields of Config.
    Raises ValueError for what there is no kernel for.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if {x.dtype for x in (k, v)} != {q.dtype} or k.shape != v.shape or q.shape[::3] != k.shape[::3] or q.shape[2] % max(1, k.shape[2]):
        raise ValueError(f"q, k and v do not fit each other: {[(tuple(x.shape), x.dtype) for x in (q, k, v)]}")
    if not 0 < scale < math.inf or max(q.shape[0], q.shape[2]) > MOST_HEADS:
        raise ValueError(f"scale must be positive and finite, batch and heads at most {MOST_HEADS}: {scale}, {tuple(q.shape)}")
    config = configure(q.dtype, q.shape[-1], causal, **choice)
    o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    if o.numel():
        jit.compiled(launch, arguments, config, AFRESH)(*map(jit.aligned, (q, k, v)), o, lse, scale / math.log(2))
    return o, lse
