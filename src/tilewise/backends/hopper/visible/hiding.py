"""What is hidden of a tile of scores, or of what is computed from them, in the registers of a product."""

from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, const_expr, cute, range_constexpr

WORD = 32  # columns in a word of a bitmap


def bit_in(bitmaps: cute.Tensor, ref: Int32, row: Int32, column: Int32) -> Boolean:
    """Of a row of bitmap `ref`."""
    return (bitmaps[ref, row, column // WORD] >> column % WORD) & 1 != 0


@cute.jit
def keep(S: cute.Tensor, r: Constexpr[int], begin: Int32, end: Int32, hidden: Constexpr[float]):
    """`hidden` in row r but for columns at a distance in [begin, end) from the thread's first. S: (ROWS, columns)."""
    for c in range_constexpr(cute.size(S, mode=[1])):
        column = const_expr(fragments.column(c))
        S[r, c] = S[r, c] if column >= begin and column < end else Float32(hidden)


@cute.jit
def hide(
    its, acc: cute.Tensor, tScS: cute.Tensor, column0: Int32, mask_kind: Constexpr[str] = "band", hidden: Constexpr[float] = 0.0,
    first: Constexpr[int] = 0, last: Constexpr[int] = 0,
):  # fmt: skip
    """P = 0, or dS, for the pairs that are hidden, or have a key that does not exist. P = 0 makes dS = 0 too, unless dP is NaN (repair/).

    its.begin, its.end: (ROWS,) int32, the columns that see this thread's rows, or are seen by them; `mask_kind` "full" or "causal" spares comparisons
    where rows are keys. column0: of the tile. `hidden`: -inf for what P is computed from; [first, last): columns of a thread, all where last is 0.
    """
    P, at = fragments.by_rows(acc), fragments.by_rows(tScS)
    for r in range_constexpr(fragments.ROWS):
        for c in range_constexpr(first, last or cute.size(P, mode=[1])):
            P[r, c] = P[r, c] if shown(its, r, at[r, c][1], column0, mask_kind) else Float32(hidden)


@cute.jit
def shown(its, r: Constexpr[int], column: Int32, column0: Int32, mask_kind: Constexpr[str]) -> Boolean:
    """Of a column of row r."""
    if const_expr(mask_kind == "full"):
        return its.end[r] > 0
    if const_expr(mask_kind == "causal"):
        return column >= its.begin[r] - column0
    return column >= its.begin[r] - column0 and column < its.end[r] - column0
