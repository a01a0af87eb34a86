"""K1: the formula as it is written. Three kernels, with the whole score matrix in global memory between them.

One thread for every element of S = scale Q K^T, one for every row of the softmax, one for every element of O = P V; all arithmetic in fp32 on
CUDA cores, every operand read from global memory (the caches help). S is (heads, seqlen, seqlen) in fp32, and P takes its place.

Predicted bottleneck: the traffic of S, written once, read three times and written again by a softmax with neighbouring threads that read
addresses a whole row apart; and memory itself: 16 heads of 16,384 tokens take 17 GB.
Equations: 1 to 3 of docs/algorithm.md.
"""

from dataclasses import dataclass

from tilewise.sm90.dsl import BFloat16, Constexpr, CUstream, Float32, arch, const_expr, cute, cutlass
from tilewise.sm90.fragments import LN2

SIDE = 16  # of a block of threads, for the products
ROWS_A_BLOCK = 256  # for the softmax
PIECE = 64  # exponentials added one after another; their sums then are: one long chain loses digits
SCRATCH = True  # `launch` takes S


@dataclass(frozen=True, kw_only=True)
class Config:
    head_dim: int
    causal: bool


def configure(head_dim: int, causal: bool) -> Config:
    return Config(head_dim=head_dim, causal=causal)


@cute.jit
def launch(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mL: cute.Tensor, mS: cute.Tensor,
    scale_log2: Float32, config: Constexpr[Config], stream: CUstream,
):  # fmt: skip
    """mQ, mK, mV, mO: (heads, seqlen, head_dim) bf16; mL: (heads, seqlen), mS: (heads, seqlen, seqlen) fp32."""
    heads, seqlen = mO.shape[0], mO.shape[1]
    tiles, square = cute.ceil_div(seqlen, SIDE), (SIDE, SIDE, 1)
    compute_S(mQ, mK, mS, scale_log2, config).launch(grid=(tiles, tiles, heads), block=square, stream=stream)
    compute_P(mS, mL).launch(grid=(cute.ceil_div(seqlen, ROWS_A_BLOCK), heads, 1), block=(ROWS_A_BLOCK, 1, 1), stream=stream)
    compute_O(mS, mV, mO, config).launch(grid=(cute.ceil_div(config.head_dim, SIDE), tiles, heads), block=square, stream=stream)


@cute.jit
def place():
    """(head, row, column) of this thread's element."""
    (x, y, _), (column, row, head) = arch.thread_idx(), arch.block_idx()
    return head, row * SIDE + y, column * SIDE + x


@cute.kernel
def compute_S(mQ: cute.Tensor, mK: cute.Tensor, mS: cute.Tensor, scale_log2: Float32, config: Constexpr[Config]):
    head, i, j = place()
    if i < mS.shape[1] and j < mS.shape[2]:
        s = Float32(0.0)
        gQ, gK = mQ[head, i, None], mK[head, j, None]
        for c in cutlass.range(config.head_dim, unroll=8):
            s += gQ[c].to(Float32) * gK[c].to(Float32)
        s *= scale_log2
        if const_expr(config.causal):
            s = -Float32.inf if j > i else s
        mS[head, i, j] = s


@cute.kernel
def compute_P(mS: cute.Tensor, mL: cute.Tensor):
    """A thread a row: the maximum, the sum, the quotients."""
    thread, (block, head, _) = arch.thread_idx()[0], arch.block_idx()
    i = block * ROWS_A_BLOCK + thread
    if i < mS.shape[1]:
        row = mS[head, i, None]
        m, l = -Float32.inf, Float32(0.0)
        for j in cutlass.range(mS.shape[2], unroll=4):
            m = arch.fmax(m, row[j])
        for j0 in cutlass.range(0, mS.shape[2], PIECE, unroll=1):
            piece = Float32(0.0)
            for j in cutlass.range(j0, min(j0 + PIECE, mS.shape[2]), unroll=4):
                piece += cute.math.exp2(row[j] - m, fastmath=True)
            l += piece
        for j in cutlass.range(mS.shape[2], unroll=4):
            row[j] = cute.math.exp2(row[j] - m, fastmath=True) / l
        mL[head, i] = (m + cute.math.log2(l)) * LN2


@cute.kernel
def compute_O(mP: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, config: Constexpr[Config]):
    head, i, c = place()
    if i < mO.shape[1] and c < config.head_dim:
        o = Float32(0.0)
        gP, gV = mP[head, i, None], mV[head, None, c]
        for j in cutlass.range(mP.shape[2], unroll=4):
            o += gP[j] * gV[j].to(Float32)
        mO[head, i, c] = o.to(BFloat16)
