"""Attention on CUDA cores: the products, the softmax and the store that K2, K3 and (but for S) K4.1 share.

A row of the tile belongs to a few neighbouring threads, `Part`: they split its scores in chunks of 4 and its output in chunks of 8, dealt
in turn, hold its m and l in registers, each a copy, and reduce by shuffles. Elements are read 16 bytes at a time.
"""

from typing import NamedTuple

from tilewise.sm90.dsl import BFloat16, Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, range_constexpr
from tilewise.sm90.fragments import LN2

WIDE = 8  # bf16 in 16 bytes
QUAD = 4  # fp32 in 16 bytes
PAD = 4  # fp32 between the rows of S, so that neighbouring rows start in different banks


class Part(NamedTuple):
    """A thread's share of the tile: row `row`, and chunks `index`, `index + of`, ... of what `of` threads split."""

    row: Int32
    index: Int32
    m: cute.Tensor  # (1,) fp32, in units of the exponent as in fragments.Rows
    l: cute.Tensor  # (1,) fp32
    O: cute.Tensor  # (head_dim / of,) fp32: chunk after chunk


@cute.jit
def part_of(of: Constexpr[int], head_dim: Constexpr[int]) -> Part:
    thread, _, _ = arch.thread_idx()
    m, l = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
    O = cute.make_rmem_tensor(head_dim // of, Float32)
    m.fill(-Float32.inf)
    l.fill(0.0)
    O.fill(0.0)
    return Part(thread // of, thread % of, m, l, O)


def layout_S(tile_m: int, tile_n: int) -> cute.Layout:
    return cute.make_layout((tile_m, tile_n), stride=(tile_n + PAD, 1))


@cute.jit
def chunk(x: cute.Tensor, index: Int32, size: Constexpr[int]) -> cute.TensorSSA:
    """Elements index * size and following of a contiguous row, in fp32, by one wide read."""
    source = cute.local_tile(x, (size,), (index,))
    held = cute.make_rmem_tensor(size, x.element_type)
    cute.autovec_copy(source, held)
    return held.load().to(Float32)


@cute.jit
def scores(part: Part, sQ: cute.Tensor, sK: cute.Tensor, sS: cute.Tensor, end: Int32, of: Constexpr[int]):
    """S = Q K^T for this thread's keys; -inf for keys from `end` on. sQ: (tile_m, head_dim), sK: (tile_n, head_dim)."""
    tile_n, head_dim = cute.size(sK, mode=[0]), cute.size(sK, mode=[1])
    keys = tile_n // of
    S = cute.make_rmem_tensor(keys, Float32)
    S.fill(0.0)
    for c in cutlass.range(head_dim // WIDE, unroll=1):
        q = chunk(sQ[part.row, None], c, WIDE)
        for x in range_constexpr(keys):
            k = chunk(sK[key_of(part, x, of), None], c, WIDE)
            for e in range_constexpr(WIDE):
                S[x] += q[e] * k[e]
    for x in range_constexpr(keys):
        sS[part.row, key_of(part, x, of)] = S[x] if key_of(part, x, of) < end else -Float32.inf


def key_of(part: Part, x: int, of: int) -> Int32:
    """The x-th of this thread's keys: chunks of 4, dealt in turn."""
    return (x // QUAD * of + part.index) * QUAD + x % QUAD


@cute.jit
def softmax(part: Part, sS: cute.Tensor, scale_log2: Float32, of: Constexpr[int]):
    """S becomes P in place; m, l and O move on."""
    chunks = cute.size(sS, mode=[1]) // (of * QUAD)
    row = sS[part.row, None]
    m = -Float32.inf
    for x in range_constexpr(chunks):
        m = chunk(row, x * of + part.index, QUAD).reduce(cute.ReductionOp.MAX, m, 0)
    m = arch.fmax(arch.warp_reduction_max(m, threads_in_group=of) * scale_log2, part.m[0])
    base = 0.0 if m == -Float32.inf else m  # a row that has seen no key yet
    rescale = cute.math.exp2(part.m[0] - base, fastmath=True)
    l = Float32(0.0)  # of this tile, apart from the walk's
    held = cute.make_rmem_tensor(QUAD, Float32)
    for x in range_constexpr(chunks):
        p = cute.math.exp2(chunk(row, x * of + part.index, QUAD) * scale_log2 - base, fastmath=True)
        l = p.reduce(cute.ReductionOp.ADD, l, 0)
        held.store(p)
        cute.autovec_copy(held, cute.local_tile(row, (QUAD,), (x * of + part.index,)))
    part.m[0], part.l[0] = m, part.l[0] * rescale + l
    part.O.store(part.O.load() * rescale)
    arch.sync_warp()  # P: each thread reads what its neighbours wrote


@cute.jit
def accumulate(part: Part, sS: cute.Tensor, sV: cute.Tensor, of: Constexpr[int]):
    """O += P V for this thread's columns. sV: (tile_n, head_dim)."""
    tile_n, head_dim = cute.size(sV, mode=[0]), cute.size(sV, mode=[1])
    for j in cutlass.range(tile_n // QUAD, unroll=1):
        p = chunk(sS[part.row, None], j, QUAD)
        for e in range_constexpr(QUAD):
            for x in range_constexpr(head_dim // (of * WIDE)):
                v = chunk(sV[j * QUAD + e, None], x * of + part.index, WIDE)
                for i in range_constexpr(WIDE):
                    part.O[x * WIDE + i] += p[e] * v[i]


@cute.jit
def store(part: Part, gO: cute.Tensor, gL: cute.Tensor, row: Int32, of: Constexpr[int]):
    """O / l and the log-sum-exp of the row, if it exists. gO: (seqlen, head_dim), gL: (seqlen,)."""
    l = arch.warp_reduction_sum(part.l[0], threads_in_group=of)
    inverse = 1.0 if l == 0.0 else 1.0 / l  # a row without keys: O = 0
    if row < cute.size(gL):
        held = cute.make_rmem_tensor(WIDE, BFloat16)
        for x in range_constexpr(cute.size(part.O) // WIDE):
            for i in range_constexpr(WIDE):
                held[i] = (part.O[x * WIDE + i] * inverse).to(BFloat16)
            cute.autovec_copy(held, cute.local_tile(gO[row, None], (WIDE,), (x * of + part.index,)))
        if part.index == 0:
            gL[row] = -Float32.inf if l == 0.0 else (part.m[0] + cute.math.log2(l)) * LN2


@cute.jit
def keys_seen(row: Int32, n0: Int32, seqlen: Int32, causal: Constexpr[bool]) -> Int32:
    """How many keys of the tile that starts at n0 query `row` sees, as an end; may be negative or beyond the tile."""
    end = seqlen
    if const_expr(causal):
        end = min(end, row + 1)
    return end - n0
