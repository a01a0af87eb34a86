"""The order of the backward pass: which thread block computes which block of keys, its walk over tiles of queries, and its turns at dQ.

dQ accumulation: every block of keys adds its part to the dQ of the queries that see it. The order of these additions decides the last bits, so it is
fixed (`turn_of`), and chosen such that a block hardly ever waits for its turn.

A head is ascending or descending. Blocks of an ascending head start from its last keys, and each walks from its first tile of queries to its last;
blocks of a descending head start from its first keys, and each walks from its last tile of queries to its first. Where a mask has tables all heads
descend, and blocks walk in the order of the table (tables.py).
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.operands import Band, Turns
from tilewise.backends.hopper.visible.bands import some_of, tiles_of, transposed
from tilewise.backends.hopper.visible.queries import Walk
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, const_expr, cute

SHARE = 16  # a walk is long if it exceeds 1 / SHARE of the average work of a multiprocessor


class Order(NamedTuple):
    """The numbering of thread blocks. Divisors divide by a multiplication and a shift."""

    num_sms: Int32  # thread blocks that run at a time
    ascending: Int32  # number of ascending heads, which come first; band masks only
    heads_per_step: Int32  # ascending heads that take turns; divides `ascending`, and with packed documents the number of heads
    heads_interleaved: Int32  # descending heads that take turns
    finish_lag: Int32  # a block finishes the dQ of the block this many numbers before it (finish.py)
    shared_from: Int32  # blocks of keys from this number on, those of the last wave, are shared (shares.py); where all keys are seen
    shares: Int32  # thread blocks that share one of them
    per_ascending: object  # divisor: blocks of `heads_per_step` heads
    ascending_width: object  # divisor: `heads_per_step`
    per_section: object  # divisor: blocks of `heads_interleaved` heads
    width: object  # divisor: `heads_interleaved`
    last_width: object  # divisor: heads of the last section, where it has fewer
    heads: object  # divisor: heads of a sequence that have blocks of their own: key heads, or query heads where these are apart
    per_share: object  # divisor: `shares`
    heads_k: object | None = None  # divisor: key heads, where query heads are apart


@cute.jit
def order_of(turns: Turns, n_blocks: Int32, Q: cute.Tensor, K: cute.Tensor, config: Constexpr[Config]) -> Order:
    """On the host."""
    heads, batch = heads_of(Q, K, config), K.shape[0]
    num_sms, ascending, heads_per_step, heads_interleaved, _, finish_lag, shared_from, shares = turns
    last = (heads * batch - max(ascending, 0)) % heads_interleaved
    divisors = heads_per_step * n_blocks, heads_per_step, heads_interleaved * n_blocks, heads_interleaved, max(last, 1), heads
    made = [
        cute.fast_divmod_create_divisor_v2(x) for x in (*divisors, shares, *([K.shape[2]] if const_expr(config.block_per_q_head) else []))
    ]
    return Order(num_sms, ascending, heads_per_step, heads_interleaved, finish_lag, shared_from, shares, *made)


@cute.jit
def settled_order(order: Order, band: Band, heads: Int32, config: Constexpr[Config]) -> Order:
    """The order for packed documents; the GPU alone may know their lengths. All heads ascend, unless none is to (plan.NONE_ASCENDS), or one walk is
    so long that the launch would wait for it at the end.

    The blocks of a descending document begin side by side at its end and wait for each other in a chain, one document after another.
    """
    if const_expr(config.mask_kind != "varlen"):
        return order
    last = band.tables.walks.shape[0] - 1
    longest, total = band.tables.walks[last, 0], band.tables.walks[last, 1]
    num_sms, ascending, *others = order
    if ascending >= 0 and Float32(longest) * SHARE * num_sms <= Float32(total) * heads:
        ascending = heads
    return Order(num_sms, max(ascending, 0), *others)


class Block(NamedTuple):
    """A block of keys: tile_n keys of one key head, for one thread block, with all query heads of the group or one."""

    n0: Int32
    head_k: Int32
    member: Int32  # the query head of the group, where these are apart; else 0
    batch: Int32
    ascending: Boolean  # it walks from its first tile of queries to its last
    share: Int32  # index of this thread block's part of the walk
    shares: Int32  # number of parts


class Visits(NamedTuple):
    """Tiles of queries [first, last)."""

    first: Int32
    last: Int32


class Visitors(NamedTuple):
    """Blocks of keys [first, last) that visit a tile of queries on their walk."""

    first: Int32
    last: Int32


@cute.jit
def visitors_of(m_block: Int32, band: Band, seqlen_k: Int32, config: Constexpr[Config]) -> Visitors:
    """The exact inverse of `order.walk_of`: a block that waits for a visitor that does not exist never ends."""
    if const_expr(config.mask_kind == "full"):
        return Visitors(Int32(0), cute.ceil_div(seqlen_k, config.tile_n))
    if const_expr(config.mask_kind == "varlen"):
        return Visitors(band.tables.visitors[m_block, 0], band.tables.visitors[m_block, 1])
    top, bottom = m_block * config.tile_m, (m_block + 1) * config.tile_m - 1
    begin, end = max(band.k0, top + band.lo), min(band.k1, bottom + band.hi + 1)
    first, last = max(begin, 0) // config.tile_n, cute.ceil_div(max(end, 0), config.tile_n)
    if bottom < band.q0 or top >= band.q1 or begin >= band.k1 or end <= band.k0:
        last = first
    return Visitors(first, max(first, last))


@cute.jit
def is_visited(m_block: Int32, head: Int32, batch: Int32, band: Band, seqlen_k: Int32, config: Constexpr[Config]) -> Boolean:
    """Whether any block of keys adds to a tile of dQ."""
    if const_expr(config.mask_kind == "tiles"):
        return band.tables.visited[band.tables.planes[batch, head], m_block] > 0
    visitors = visitors_of(m_block, band, seqlen_k, config)
    return visitors.first < visitors.last


@cute.jit
def block_of(number: Int32, n_blocks: Int32, heads: Int32, order: Order, config: Constexpr[Config]) -> Block:
    """The block of keys with a number, among `heads` of all sequences. Blocks start in the order of their numbers."""
    share, shares = Int32(0), Int32(1)
    if const_expr(config.shares):  # noqa: SIM102
        if number >= order.shared_from:  # parts of a block run side by side, so fewer blocks read the same tiles of queries at a time
            number, share = divmod(number - order.shared_from, order.per_share)
            number, shares = number + order.shared_from, order.shares
    if const_expr(config.by_keys):
        section, within = divmod(number, order.per_ascending)
        turn, member = divmod(within, order.ascending_width)
        n_block, head = n_blocks - 1 - turn, section * order.heads_per_step + member
        ascending = head < order.ascending
    else:  # `heads_per_step` is 1, and registers are few
        head, turn = divmod(number, order.per_ascending)
        ascending, n_block = head < order.ascending, n_blocks - 1 - turn
    section, within = divmod(max(number - order.ascending * n_blocks, 0), order.per_section)
    turn, member = divmod(within, order.width)
    last_turn, last_member = divmod(within, order.last_width)
    first_head = order.ascending + section * order.heads_interleaved
    if first_head + order.heads_interleaved > heads:
        turn, member = last_turn, last_member
    if not ascending:
        n_block, head = turn, first_head + member
    batch, head = divmod(head, order.heads)
    member, head_k = Int32(0), head
    if const_expr(config.block_per_q_head):  # those that run at a time are of different groups, as far as there are groups
        member, head_k = divmod(head, order.heads_k)
    return Block(n_block * config.tile_n, head_k, member, batch, ascending, share, shares)


def heads_of(Q: cute.Tensor, K: cute.Tensor, config: Config) -> Int32:
    """Heads of a sequence that have blocks of their own."""
    return Q.shape[2] if config.block_per_q_head else K.shape[2]


@cute.jit
def walk_of(block: Block, band: Band, seqlen_q: Int32, seqlen_k: Int32, config: Constexpr[Config]) -> Walk:
    """The walk of a block of keys; empty where no query sees any of the keys. Rows beyond the last query need no mask: their LSE is +inf, so P = 0.

    `turn_of` explains its start and direction.
    """
    tile_m, tile_n, n0 = config.tile_m, config.tile_n, block.n0
    m_blocks = cute.ceil_div(seqlen_q, tile_m)
    if const_expr(config.mask_kind == "full"):
        free = m_blocks if n0 + tile_n <= seqlen_k else Int32(0)
        first, last = Int32(0), m_blocks
        if const_expr(config.shares):
            first, last = block.share * m_blocks // block.shares, (block.share + 1) * m_blocks // block.shares
        return Walk(first, Int32(1), first, last, Int32(0), free)
    if const_expr(config.mask_kind == "tiles"):
        return Walk(Int32(0), Int32(1), Int32(0), Int32(0), Int32(0), Int32(0))
    if const_expr(config.mask_kind == "varlen"):
        first, last, free_first, free_last = (band.tables.walks[n0 // tile_n, i] for i in range(4))
        return begun(block, first, last, free_first, free_last)
    left, right, begin, end = some_of(n0, tile_n, transposed(band))
    first, last = tiles_of(begin, end, tile_m)
    if left > right:
        last = first
    begin, end = max(band.q0, n0 + tile_n - 1 - band.hi), min(band.q1, n0 - band.lo + 1)  # queries that see all of them
    if n0 < band.k0 or n0 + tile_n > band.k1:
        end = begin
    free_first = min(max(cute.ceil_div(max(begin, 0), tile_m), first), last)
    free_last = max(end, 0) // tile_m
    if end >= seqlen_q:
        free_last = last
    return begun(block, first, last, free_first, min(max(free_last, free_first), last))


@cute.jit
def last_visits(block: Block, band: Band, seqlen_q: Int32, seqlen_k: Int32, config: Constexpr[Config]) -> Visits:
    """Tiles at which this block is the last to add: the next block in turn does not visit them, as walks of later keys begin and end later."""
    n0 = block.n0 + config.tile_n
    first, last = Int32(0), cute.ceil_div(seqlen_q, config.tile_m)
    if block.ascending:
        n0 = block.n0 - config.tile_n
    if n0 >= 0 and n0 < seqlen_k:
        walk = walk_of(
            Block(n0, block.head_k, block.member, block.batch, block.ascending, block.share, block.shares), band, seqlen_q, seqlen_k, config
        )
        if walk.first < walk.last and block.ascending:
            first = walk.last
        elif walk.first < walk.last:
            last = walk.first
    return Visits(first, last)


@cute.jit
def begun(block: Block, first: Int32, last: Int32, free_first: Int32, free_last: Int32) -> Walk:
    """The walk from its first tile on where the block is ascending, else from its last."""
    start, step = last - 1, Int32(-1)
    if block.ascending:
        start, step = first, Int32(1)
    return Walk(start, step, first, last, free_first, free_last)


@cute.jit
def turn_of(place: Int32, block: Block, band: Band, seqlen_k: Int32, config: Constexpr[Config]) -> Int32:
    """The number of blocks of keys that add to the tile of dQ at a place of the walk before this one does.

    A block waits only for blocks that started earlier. A descending block that starts when others end finds its first tile free; of descending
    blocks that start together, each follows a tile behind the one before it. Blocks of other heads start in between (`block_of`).
    """
    if const_expr(config.mask_kind == "tiles"):
        return band.tables.visits[place, 2]
    n_block = block.n0 // config.tile_n
    visitors = visitors_of(place, band, seqlen_k, config)
    return visitors.last - 1 - n_block if block.ascending else n_block - visitors.first
