"""New keys and values into their caches, keys rotated on the way: a thread block a token, a thread eight elements of a head.

What is written is bit for bit what torch writes (runtime/append_operator.py). The launch may overlap the end of the one before it, and the
beginning of the one behind it, which is mostly decode's.
"""

from tilewise.backends.hopper.decode import rotation
from tilewise.backends.hopper.decode.append_call import Appending
from tilewise.backends.hopper.decode.operands import New, Places, RotaryTables
from tilewise.sm90.dsl import Boolean, Constexpr, CUstream, Int32, Int64, arch, const_expr, cute, cutlass
from tilewise.sm90.pointers import known

THREADS, WARP = 256, 32
WIDE = 8  # elements that a thread moves
FAR = 2**31 - 1  # a length beyond is as good as this


@cute.jit
def launch(new: New, places: Places, turn: RotaryTables | None, config: Constexpr[Appending], stream: CUstream):
    (entries, tokens, heads, dim), dim_v = new.K.shape, new.V.shape[3]
    parts = cute.ceil_div(heads * (dim // WIDE + dim_v // WIDE), THREADS)
    kernel(new, places, turn, config).launch(grid=(entries * tokens, parts, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)


@cute.kernel
def kernel(new: New, places: Places, turn: RotaryTables | None, config: Constexpr[Appending]):
    arch.griddepcontrol_wait()  # what kernels before this one wrote, it may read; and the caches are no longer read
    arch.griddepcontrol_launch_dependents()
    thread, (token, part, _) = arch.thread_idx()[0], arch.block_idx()
    if token == 0 and part == 0:
        store_ends(new, places, thread, config)
    b, place, there = owner_of(token, new, places, config)
    position = Int64(places.seqlens[b]) + place
    entry, row, fits = slot_of(b, position, there, new, places, config)
    pieces, pieces_v = new.K.shape[3] // WIDE, new.V.shape[3] // WIDE
    which = part * THREADS + thread
    head, piece = which // (pieces + pieces_v), which % (pieces + pieces_v)
    if fits and head < new.K.shape[2]:
        if piece < pieces:
            source, target = (row_of(x, *at) for x, at in ((new.K, token_of(token, new)), (new.K_cache, (entry, row))))
            numbers = wide_at(source, head, piece * WIDE)
            if const_expr(config.rotary is not None):
                first = places.seqlens[b] if const_expr(config.first is None) else turn.first[b]
                rotation.of_numbers(numbers, source[head, None], piece * WIDE, Int64(first) + place, turn, config)
            store_at(target, head, piece * WIDE, numbers)
        else:
            source, target = (row_of(x, *at) for x, at in ((new.V, token_of(token, new)), (new.V_cache, (entry, row))))
            column = (piece - pieces) * WIDE
            store_at(target, head, column, wide_at(source, head, column))


@cute.jit
def store_ends(new: New, places: Places, thread: Int32, config: Constexpr[Appending]):
    """Lengths behind the new tokens."""
    for b in cutlass.range(thread, places.seqlens.shape[0], THREADS, unroll=1):
        more = Int64(new.K.shape[1])
        if const_expr(config.cu_seqlens is not None):
            more = Int64(places.cu_seqlens[b + 1]) - Int64(places.cu_seqlens[b])
        end = Int64(places.seqlens[b]) + more
        places.ends[b] = Int32(min(max(end, Int64(-FAR)), Int64(FAR)))


@cute.jit
def owner_of(token: Int32, new: New, places: Places, config: Constexpr[Appending]) -> tuple[Int32, Int64, Boolean]:
    """A token's sequence, its number among the sequence's new ones, and whether it is anybody's."""
    if const_expr(config.cu_seqlens is None):
        return token // new.K.shape[1], Int64(token % new.K.shape[1]), Boolean(True)
    batch, ended = places.seqlens.shape[0], Int32(0)
    for first in cutlass.range(0, batch, WARP, unroll=4):
        b = first + arch.lane_idx()
        end = Int64(places.cu_seqlens[min(b, batch - 1) + 1])
        ended += arch.popc(arch.vote_ballot_sync(end <= token and b < batch))
    b = min(ended, batch - 1)
    return b, token - Int64(places.cu_seqlens[b]), token < Int64(places.cu_seqlens[batch])


@cute.jit
def slot_of(
    b: Int32, position: Int64, there: Boolean, new: New, places: Places, config: Constexpr[Appending]
) -> tuple[Int32, Int32, Boolean]:
    """Entry or page, place in it, and whether the cache has it."""
    size, capacity = Int64(new.K_cache.shape[1]), Int64(new.K_cache.shape[1])
    if const_expr(config.pages is not None):
        capacity *= places.pages.shape[1]
    if const_expr(config.share):  # of a rank's own tokens their places in its cache
        rank, world, run = (Int64(x) for x in (places.share.rank, places.share.world, places.share.interleave))
        there = there and position >= 0 and position // run % world == rank
        position = position // (run * world) * run + position % run
    fits, entry, row = there and position >= 0 and position < capacity, Int64(b), position
    if const_expr(config.pages is not None):
        entry, row = Int64(-1), position % size
        if fits:
            entry = Int64(places.pages[b, Int32(position // size)])
    elif const_expr(config.entries is not None):
        entry = Int64(places.entries[b])
    fits = fits and entry >= 0 and entry < new.K_cache.shape[0]
    return Int32(entry), Int32(row), fits


@cute.jit
def token_of(token: Int32, new: New) -> tuple[Int32, Int32]:
    return token // new.K.shape[1], token % new.K.shape[1]


@cute.jit
def row_of(x: cute.Tensor, entry: Int32, row: Int32) -> cute.Tensor:
    """(heads, dim) of a token."""
    return x[entry, row, None, None]


@cute.jit
def wide_at(row: cute.Tensor, head: Int32, column: Int32) -> cute.Tensor:
    numbers = cute.make_rmem_tensor(WIDE, row.element_type)
    cute.autovec_copy(wide(row, head, column), numbers)
    return numbers


@cute.jit
def store_at(row: cute.Tensor, head: Int32, column: Int32, numbers: cute.Tensor):
    cute.autovec_copy(numbers, wide(row, head, column))


@cute.jit
def wide(row: cute.Tensor, head: Int32, column: Int32) -> cute.Tensor:
    first = row[head, None].iterator + column
    return cute.make_tensor(known(first, WIDE * row.element_type.width // 8), cute.make_layout(WIDE))
