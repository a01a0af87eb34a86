"""What kernels do a second time, CAREFUL, for tiles of results that hold a NaN.

A product of tiles multiplies hidden values by weights of 0, which a NaN or an infinity does not forgive. So each kernel runs twice. The second time
few programs walk over all tiles, as to start one for each takes longer than to read its flag. They leave alone those that the first run said, in
`spoils`, to be finite; and those that hold no NaN but what must be: of queries with an LSE that is NaN or infinite, as of scores beyond fp32, or a
delta that is NaN, and of keys that these see. The rest they compute again: products take only what is finite, and what other visible values give is
found by products of zeros and ones. What the formula makes NaN stays so.
"""

import triton
import triton.language as tl

from tilewise.backends.triton.kernels.products import load_rows
from tilewise.backends.triton.kernels.visible import by_table, walk


@triton.jit
def walk_over_tiles(tile, wrong, given, of_wrong, spoils, tiles, CAREFUL: tl.constexpr):
    """`tile(program, *given)` for the program's own tile. CAREFUL: for those of its share that have a flag, and are `wrong(program, *of_wrong)`."""
    if CAREFUL:
        for program in range(tl.program_id(0), _behind_last(spoils, tiles), tl.num_programs(0)):
            if tl.load(spoils + program) > 0:  # noqa: SIM102 - Triton's `and` takes both
                if wrong(program, *of_wrong):
                    tile(program, *given)
    else:
        tile(tl.program_id(0), *given)


@triton.jit
def _behind_last(spoils, tiles):
    """Where the tiles of a program end, as far apart as there are programs: behind the last with a flag, which one load for 128 of them finds."""
    end, step = 0, tl.num_programs(0)
    for first in range(tl.program_id(0), tiles, step * 128):
        own = first + tl.arange(0, 128) * step
        end = tl.maximum(end, tl.max(tl.where(tl.load(spoils + own, mask=own < tiles, other=0) > 0, own + 1, 0)))
    return end


@triton.jit
def not_finite(x, x_b, BOTH: tl.constexpr):
    """Which rows of a tile, of two if BOTH, hold a NaN or an infinity, (rows,), as 0 or 1."""
    found = tl.sum(x * 0.0, 1)  # one operation an element, and one register a row
    if BOTH:
        found += tl.sum(x_b * 0.0, 1)
    return (found != found).to(tl.int32)


@triton.jit
def spoiled(x, row, x_row, limit, DIM: tl.constexpr, DIM_B: tl.constexpr, CUT: tl.constexpr):
    """Which rows of a tile in memory hold a NaN, (rows,), as 0 or 1."""
    tile = load_rows(x, row, x_row, tl.arange(0, DIM), limit, 0 if DIM_B else CUT, True).to(tl.float32)
    found = tl.max((tile != tile).to(tl.int32), 1)
    if DIM_B:
        tile_b = load_rows(x + DIM, row, x_row, tl.arange(0, DIM_B), limit, CUT, True).to(tl.float32)
        found = tl.maximum(found, tl.max((tile_b != tile_b).to(tl.int32), 1))
    return found


@triton.jit
def lost(lse, delta):
    """Of queries with these: whether dS of all keys that they see is NaN, and whether P is, as 0 or 1."""
    of_p = (lse != lse).to(tl.int32)
    return tl.maximum(of_p, ((delta != delta) & (lse != float("-inf"))).to(tl.int32)), of_p


@triton.jit
def unexplained(
    of_k, of_v, lse, delta, rows, begin, end, seqlen_q, seqlen_k, pair, n_tiles, n, spans, runs, bands, bitmaps, planes,
    MASK: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Whether a NaN in dK or dV, of the keys that of_k and of_v say, is not of a lost query that sees the key; pair: of the first query head."""
    row, column = tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    left = tl.max(tl.maximum(of_k, of_v))  # loops have no other end
    for head in range(0, GROUP):
        r_first, r_last, ref = 0, 1, 0
        if MASK == "tiles":
            span = spans + (tl.load(planes + pair + head) * n_tiles + n) * 3
            r_first, r_last = tl.load(span), tl.load(span + 2)
        for r in range(r_first, r_last):
            if MASK == "tiles":
                first, last, ref = tl.load(runs + r * 4), tl.load(runs + r * 4 + 1), tl.load(runs + r * 4 + 2)
            else:
                first, last, _free, _stop = walk(begin, end, rows, seqlen_k, TILE_M)
            for m in range(first, last):
                if left > 0:
                    queries = m * TILE_M + column
                    at = tl.cast(pair + head, tl.int64) * seqlen_q + queries
                    lse_columns = tl.load(lse + at, mask=queries < seqlen_q, other=float("-inf"))
                    of_ds, of_p = lost(lse_columns, tl.load(delta + at, mask=queries < seqlen_q, other=0.0))
                    if tl.max(of_ds) > 0:
                        if MASK == "tiles":
                            sees = by_table(ref, bands, bitmaps, rows, queries, row, column, TILE_N, TILE_M)
                        else:
                            sees = (queries[None, :] >= begin[:, None]) & (queries[None, :] < end[:, None])
                        of_k = tl.minimum(of_k, 1 - tl.max(tl.where(sees, of_ds[None, :], 0), 1))
                        of_v = tl.minimum(of_v, 1 - tl.max(tl.where(sees, of_p[None, :], 0), 1))
                        left = tl.max(tl.maximum(of_k, of_v))
    return left > 0


@triton.jit
def set_apart(acc, weights, sees, x, EMULATED: tl.constexpr):
    """acc plus what infinities and NaN of x (columns, dims) give in the product of weights, of visible pairs: NaN or an infinity; and x with 0
    in their place.
    """
    wide = x.to(tl.float32)
    kind = tl.where(wide != wide, 1, tl.where(wide == float("inf"), 2, tl.where(wide == float("-inf"), 3, 0)))
    if tl.max(kind) > 0:
        sign = tl.where(sees, tl.where(weights > 0.0, 2, tl.where(weights < 0.0, 3, 1)), 0)
        for each in tl.range(0, 9, num_stages=1):  # a loop, as registers do not hold several sums
            of_weights, of_x = each // 3 + 1, each % 3 + 1
            met = _count(sign == of_weights, kind == of_x, tl.zeros_like(acc), EMULATED)
            value = tl.where(of_weights == of_x, float("inf"), float("-inf"))
            value = tl.where((of_weights == 1) | (of_x == 1), float("nan"), value)  # 0 times an infinity, too
            acc += tl.where(met > 0.0, value, 0.0)
    return acc, tl.where(tl.abs(wide) < float("inf"), x, tl.zeros_like(x))


@triton.jit
def _count(a, b, acc, EMULATED: tl.constexpr):
    """acc and for each row of a and column of b how often both hold, of bools."""
    if EMULATED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a.to(tl.float16), b.to(tl.float16), acc)


@triton.jit
def mended(at, x, rows, stride, columns, limit, COLUMNS: tl.constexpr):
    """What a tile in memory holds, with x in place of NaN."""
    old = load_rows(at, rows, stride, columns, limit, COLUMNS, True).to(tl.float32)
    return tl.where(old != old, x, old)
