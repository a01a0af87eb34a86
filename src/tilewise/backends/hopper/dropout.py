"""Dropout in kernels: which pairs are kept, bit for bit as backends/philox.py says: one evaluation at a counter serves four keys of a query.

Of a tile's scores no thread holds four neighbouring keys of a query, but some lanes of a warp do so together. Each of them evaluates the generator
for another query, or other keys, of theirs, and they exchange bits, so that no word is computed twice. What is kept is a bit for each of a thread's
elements; the factor 1 / (1 - p) is left to whoever writes the sums.
"""

import torch

from tilewise.backends.hopper.operands import Draw
from tilewise.backends.philox import MULTIPLIERS, ROUNDS
from tilewise.sm90 import fragments
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, range_constexpr

WORDS = 4  # of an evaluation, each a key's
NEXT_ROW = 8  # the second of a thread's rows, from its first
HALF = 16  # of a word, for each of a thread's rows
PAIRS = 8  # of a thread's columns that a word of `of_columns` is about
ROUND = (
    "{ .reg .b64 a, b; .reg .b32 a0, a1, b0, b1; "
    f"mul.wide.u32 a, {{$r0}}, {MULTIPLIERS[0]}; mul.wide.u32 b, {{$r2}}, {MULTIPLIERS[1]}; "
    "mov.b64 {a0, a1}, a; mov.b64 {b0, b1}, b; xor.b32 b1, b1, {$r1}; xor.b32 b1, b1, {$r4}; xor.b32 a1, a1, {$r3}; xor.b32 a1, a1, {$r5}; "
    "mov.b32 {$w0}, b1; mov.b32 {$w1}, b0; mov.b32 {$w2}, a1; mov.b32 {$w3}, a0; }"
)
MARK = "{ .reg .pred p; .reg .b32 x; mov.b32 x, {$r0}; setp.ge.u32 p, {$r1}, {$r2}; @p or.b32 x, x, @bit; mov.b32 {$w0}, x; }"
CHOOSE = "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};"


def head_of(draw: Draw, batch: Int32, head: Int32) -> Int32:
    """The number of a query head among those of all batch entries."""
    return draw.first + batch * draw.heads + head


def lift_of(draw: Draw, config) -> Float32:
    """What kept pairs are multiplied by within dS, which is rounded to fp16: other dtypes need no `Draw.lift`, and no register for it."""
    return draw.lift if config.dtype == torch.float16 else Float32(1.0)


def words_of(draw: Draw, head: Int32, query: Int32, four: Int32) -> list[Int32]:
    """Of a query and the keys from 4 * four on. head: of `head_of`."""
    words = [four, query, head, draw.offset]
    for i in range(ROUNDS):
        keys = draw.keys[2 * i : 2 * i + 2]
        words = arch.inline_ptx(ROUND, write_only_types=[Int32] * WORDS, read_only_args=[*words, *keys])
    return words


def marked(bits: Int32, place: int, word: Int32, draw: Draw) -> Int32:
    """With a bit more where a pair of that word is kept."""
    return arch.inline_ptx(MARK.replace("@bit", str(1 << place)), write_only_types=[Int32], read_only_args=[bits, word, draw.threshold])


@cute.jit
def of_rows(draw: Draw, head: Int32, query: Int32, key: Int32, columns: Constexpr[int]) -> cute.Tensor:
    """Where a thread's rows are queries: (2,) int32, of `place_in_rows`, of at most 32 elements a row. query, key: of its first element.

    Of every eight keys two neighbouring lanes have four, of two queries; each evaluates for both queries, in half of the keys. So the first three
    products of a round that keys alone decide serve two queries.
    """
    odd, low, high = (key & 2) != 0, Int32(0), Int32(0)
    four = (key >> 2) + columns // 2 if odd else key >> 2
    for i in range_constexpr(columns // 4):
        for r in range_constexpr(fragments.ROWS):
            words = words_of(draw, head, query + NEXT_ROW * r, four + 2 * i)
            for x in range_constexpr(2):
                _, place = place_in_rows(r, 2 * i + x, columns)
                low, high = marked(low, place, words[x], draw), marked(high, place, words[2 + x], draw)
    own, others = high if odd else low, low if odd else high
    came = arch.shuffle_sync_bfly(others, 1)
    bits = cute.make_rmem_tensor(2, Int32)
    bits[0], bits[1] = came if odd else own, own if odd else came
    return bits


@cute.jit
def of_columns(draw: Draw, head: Int32, query: Int32, key: Int32, columns: Constexpr[int]) -> cute.Tensor:
    """Where a thread's columns are queries: (words,) int32, of `place_in_columns`. query, key: of its first element.

    Four lanes have four keys of a query; of every eight columns two queries, and in either half of the rows. Each evaluates for one of these four
    sets, and has then a byte for every lane; so have the others.
    """
    member, pairs = key & 3, const_expr(columns // 2)
    four, query = (key >> 2) + (member & 2), query + (member & 1)
    bits = cute.make_rmem_tensor(-(-pairs // PAIRS), Int32)
    halves = Int32(0x3276) if member >= 2 else Int32(0x5410)
    bytes_ = Int32(0x3715) if member & 1 != 0 else Int32(0x6240)
    for i in range_constexpr(cute.size(bits)):
        found = Int32(0)
        for pair in range_constexpr(PAIRS * i, min(PAIRS * (i + 1), pairs)):
            words = words_of(draw, head, query + NEXT_ROW * pair, four)
            for x in range_constexpr(WORDS):
                found = marked(found, 8 * x + pair % PAIRS, words[x], draw)
        for distance, selector in ((8, halves), (4, bytes_)):
            came = arch.shuffle_sync_bfly(found, distance)
            found = arch.inline_ptx(CHOOSE, write_only_types=[Int32], read_only_args=[found, came, selector])
        bits[i] = found
    return bits


def place_in_rows(r: int, c: int, columns: int) -> tuple[int, int]:
    """(word, bit) of a thread's element c of its row r, which has as many `columns`."""
    return c // (columns // 2), HALF * r + c % (columns // 2)


def place_in_columns(r: int, c: int) -> tuple[int, int]:
    """(word, bit) of a thread's element c of its row r."""
    return c // (2 * PAIRS), 8 * (2 * r + c % 2) + c // 2 % PAIRS


def row_and_column(i: int) -> tuple[int, int]:
    """Of element i of an accumulator, as `fragments.by_rows` has it."""
    return i // 2 % fragments.ROWS, i // 4 * 2 + i % 2


def in_columns(bits: cute.Tensor, i: int, kept: Float32 | float = 1.0) -> Float32:
    """`kept` where element i of an accumulator is kept, else 0; bits: of `of_columns`."""
    word, place = place_in_columns(*row_and_column(i))
    return kept_as(kept, bits[word], place)


def in_rows(bits: cute.Tensor, r: int, c: int, columns: int, kept: Float32) -> Float32:
    """Likewise for a thread's element c of its row r, which has as many `columns`; bits: of `of_rows`."""
    word, place = place_in_rows(r, c, columns)
    return kept_as(kept, bits[word], place)


def kept_as(kept: Float32 | float, word: Int32, place: int) -> Float32:
    """`kept` where the bit is set, else 0."""
    bit = 1 << place
    return cutlass.select_((word & (bit - (bit >> 31 << 32))) != 0, Float32(kept), Float32(0.0))


@cute.jit
def drop(acc_P: cute.Tensor, bits: cute.Tensor):
    """P = 0 for the pairs that are dropped; a row with NaN has a NaN denominator."""
    P = fragments.by_rows(acc_P)
    columns = const_expr(cute.size(P, mode=[1]))
    for r in range_constexpr(fragments.ROWS):
        for c in range_constexpr(columns):
            word, place = place_in_rows(r, c, columns)
            P[r, c] = P[r, c] if bits[word] & (1 << place) != 0 else Float32(0.0)


@cute.jit
def is_kept(draw: Draw, head: Int32, query: Int32, key: Int32) -> Boolean:
    """Of one pair, anywhere."""
    words, bits = words_of(draw, head, query, key >> 2), Int32(0)
    for x in range_constexpr(WORDS):
        bits = marked(bits, x, words[x], draw)
    return (bits >> (key & 3)) & 1 != 0


def with_sign(p: Float32, kept: Float32) -> Float32:
    """P, which is not negative, and in its sign whether it is dropped."""
    return cutlass.select_(kept != 0.0, p, -p)


def from_sign(signed: Float32, kept: Float32) -> tuple[Float32, Float32]:
    """P of `with_sign`, and `kept`, or 0 where it is dropped."""
    return arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 x; mov.b32 x, {$r0}; setp.ge.s32 p, x, 0; and.b32 x, x, 0x7FFFFFFF; "
        "selp.f32 {$w1}, {$r1}, 0f00000000, p; mov.b32 {$w0}, x; }",
        write_only_types=[Float32, Float32],
        read_only_args=[signed, kept],
    )
