"""Split-K and split-Q (ladder/warp_splits.py) as kernels: one thread block of four warps on ordinary lanes, with operands in shared memory."""

from typing import NamedTuple

from tilewise.sm90.dsl import BFloat16, Constexpr, CUstream, Float32, SmemAllocator, arch, const_expr, cute, cutlass, range_constexpr

WARPS, LANES = 4, 32
ROWS, KEYS, TILE_N, DIM = WARPS * LANES, 32, 16, 16
EACH = TILE_N // WARPS  # keys of a tile that a warp has in split-K
OPERAND_BYTES = 2 * DIM * (ROWS + 2 * KEYS)  # they come first in shared memory


class Smem(NamedTuple):
    Q: cute.Tensor  # (ROWS, DIM) bf16
    K: cute.Tensor  # (KEYS, DIM) bf16
    V: cute.Tensor  # (KEYS, DIM) bf16
    maxima: cute.Tensor  # (WARPS, ROWS) fp32
    sums: cute.Tensor  # (WARPS, ROWS) fp32
    parts: cute.Tensor  # (WARPS, ROWS, DIM) fp32


@cute.jit
def launch(mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, by_keys: Constexpr[bool], stream: CUstream):
    """mQ: (ROWS, DIM), mK, mV: (KEYS, DIM) bf16; mO: (ROWS, DIM) fp32, as scores in the units of exp2 give it, without a scale."""
    kernel(mQ, mK, mV, mO, by_keys).launch(grid=(1, 1, 1), block=(ROWS, 1, 1), stream=stream)


@cute.kernel
def kernel(mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, by_keys: Constexpr[bool]):
    storage = SmemAllocator()
    operands = [storage.allocate_tensor(BFloat16, rows_of(rows, DIM), 16) for rows in (ROWS, KEYS, KEYS)]
    sm = Smem(
        *operands, *(storage.allocate_tensor(Float32, rows_of(*shape), 16) for shape in ((WARPS, ROWS), (WARPS, ROWS), (WARPS, ROWS, DIM)))
    )
    thread = arch.thread_idx()[0]
    for c in range_constexpr(DIM):
        sm.Q[thread, c] = mQ[thread, c]
        if thread < KEYS:
            sm.K[thread, c], sm.V[thread, c] = mK[thread, c], mV[thread, c]
    arch.sync_threads()
    acc_O = cute.make_rmem_tensor(DIM, Float32)
    acc_O.fill(0.0)
    l = split_k(sm, acc_O) if const_expr(by_keys) else split_q(sm, acc_O)
    for c in range_constexpr(DIM):
        mO[thread, c] = acc_O[c] / l


def rows_of(*shape: int) -> cute.Layout:
    return cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))


@cute.jit
def split_q(sm: Smem, acc_O: cute.Tensor) -> Float32:
    """A lane has a row. Fills acc_O, returns the row's denominator."""
    row = arch.thread_idx()[0]
    q, S = cute.make_rmem_tensor(DIM, Float32), cute.make_rmem_tensor(TILE_N, Float32)
    for c in range_constexpr(DIM):
        q[c] = sm.Q[row, c].to(Float32)
    m, l = -Float32.inf, Float32(0.0)
    for step in cutlass.range(KEYS // TILE_N, unroll=1):
        m_old = m
        for j in range_constexpr(TILE_N):
            s = Float32(0.0)
            for c in range_constexpr(DIM):
                s += q[c] * sm.K[step * TILE_N + j, c].to(Float32)
            S[j] = s
            m = arch.fmax(m, s)
        rescale = cute.math.exp2(m_old - m, fastmath=True)
        l *= rescale
        for c in range_constexpr(DIM):
            acc_O[c] *= rescale
        for j in range_constexpr(TILE_N):
            p = cute.math.exp2(S[j] - m, fastmath=True)
            l += p
            for c in range_constexpr(DIM):
                acc_O[c] += p * sm.V[step * TILE_N + j, c].to(Float32)
    return l


@cute.jit
def split_k(sm: Smem, acc_O: cute.Tensor) -> Float32:
    """A warp has keys, a lane four rows of their scores; O is kept by the lane that has its row in split-Q."""
    thread = arch.thread_idx()[0]
    warp, lane = thread // LANES, thread % LANES
    of_rows = [cute.make_rmem_tensor(WARPS, Float32) for _ in range(3)]
    m, l, rescale = of_rows
    m.fill(-Float32.inf)
    l.fill(0.0)
    S = cute.make_rmem_tensor((WARPS, EACH), Float32)
    for step in cutlass.range(KEYS // TILE_N, unroll=1):
        key = step * TILE_N + warp * EACH
        S.fill(0.0)
        for c in range_constexpr(DIM):
            q, k = (cute.make_rmem_tensor(n, Float32) for n in (WARPS, EACH))
            for i in range_constexpr(WARPS):
                q[i] = sm.Q[lane + LANES * i, c].to(Float32)
            for j in range_constexpr(EACH):
                k[j] = sm.K[key + j, c].to(Float32)
                for i in range_constexpr(WARPS):
                    S[i, j] += q[i] * k[j]
        for i in range_constexpr(WARPS):
            top = S[i, 0]
            for j in range_constexpr(1, EACH):
                top = arch.fmax(top, S[i, j])
            sm.maxima[warp, lane + LANES * i] = top
        arch.sync_threads()  # the maxima are there
        for i in range_constexpr(WARPS):
            top = m[i]
            for w in range_constexpr(WARPS):
                top = arch.fmax(top, sm.maxima[w, lane + LANES * i])
            rescale[i] = cute.math.exp2(m[i] - top, fastmath=True)
            m[i] = top
            total = Float32(0.0)
            for j in range_constexpr(EACH):
                S[i, j] = cute.math.exp2(S[i, j] - top, fastmath=True)
                total += S[i, j]
            sm.sums[warp, lane + LANES * i] = total
        arch.sync_threads()  # the sums are there
        own = Float32(0.0)
        for i in range_constexpr(WARPS):
            l[i] *= rescale[i]
            for w in range_constexpr(WARPS):
                l[i] += sm.sums[w, lane + LANES * i]
            own = rescale[i] if warp == i else own
        for c in range_constexpr(DIM):
            v = cute.make_rmem_tensor(EACH, Float32)
            for j in range_constexpr(EACH):
                v[j] = sm.V[key + j, c].to(Float32)
            for i in range_constexpr(WARPS):
                part = Float32(0.0)
                for j in range_constexpr(EACH):
                    part += S[i, j] * v[j]
                sm.parts[warp, lane + LANES * i, c] = part
        arch.sync_threads()  # the parts of O are there
        for c in range_constexpr(DIM):
            acc_O[c] *= own
            for w in range_constexpr(WARPS):
                acc_O[c] += sm.parts[w, thread, c]
    of_mine = Float32(0.0)
    for i in range_constexpr(WARPS):
        of_mine = l[i] if warp == i else of_mine
    return of_mine
