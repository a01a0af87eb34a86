"""Who computes what, and in which order, in the backward pass on Hopper: blocks of keys, their walks over tiles of queries, turns at dQ.

Every block of keys adds to the dQ of the queries that see it. In which order these sums are made decides about their last bits, so it is fixed,
and chosen such that hardly anybody waits: `turn_of`.
"""

from typing import NamedTuple

from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.operands import Band, Turns
from tilewise.sm90.dsl import Boolean, Constexpr, Float32, Int32, const_expr, cute

SHARE = 16  # a walk is long if it is more than this part of what each multiprocessor has to do


class Order(NamedTuple):
    """Of the thread blocks. Divisors divide by a multiplication and a shift."""

    slots: Int32  # how many the machine runs at a time
    rising: Int32  # heads, the first of all, each with its last keys first; under a band
    abreast: Int32  # of these take turns: a divisor of `rising`, and of all heads of packed documents
    together: Int32  # of the other heads that take turns, each with its first keys first
    behind: Int32  # by how many numbers the block is behind whose share of dQ a block finishes (finish.py)
    shared_from: Int32  # blocks of keys from this one on, those of the last wave, are shared,
    shares: Int32  # each by so many thread blocks (shares.py); where all keys are seen
    per_rising: object  # divisors: blocks of `abreast` heads,
    rising_width: object  # `abreast`,
    per_section: object  # blocks of `together` heads,
    width: object  # `together`,
    last_width: object  # heads of the last section where it has fewer,
    heads_k: object
    per_share: object  # `shares`


@cute.jit
def order_of(
    turns: Turns, n_blocks: Int32, heads_k: Int32, batch: Int32
) -> Order:  # fmt: skip
    """On the host."""
    slots, rising, abreast, together, _, behind, shared_from, shares = turns
    last = (heads_k * batch - rising) % together
    divisors = abreast * n_blocks, abreast, together * n_blocks, together, max(last, 1), heads_k, shares
    return Order(slots, rising, abreast, together, behind, shared_from, shares, *map(cute.fast_divmod_create_divisor_v2, divisors))


@cute.jit
def settled_order(order: Order, band: Band, heads: Int32, config: Constexpr[Config]) -> Order:
    """Of packed documents, whose lengths the GPU alone may know: all heads rise unless one walk is so long that, begun last, it would be waited for.

    Coming down, the blocks of a document begin at its end side by side and wait in a chain, in one document after another.
    """
    if const_expr(config.sees != "rows"):
        return order
    last = band.tables.walks.shape[0] - 1
    longest, total = band.tables.walks[last, 0], band.tables.walks[last, 1]
    slots, _rising, *others = order
    rising = heads if Float32(longest) * SHARE * slots <= Float32(total) * heads else order.rising
    return Order(slots, rising, *others)


class Block(NamedTuple):
    """What one thread block computes: 64 * consumers keys of one head."""

    n0: Int32
    head_k: Int32
    batch: Int32
    rising: Boolean  # it walks from its first tile of queries to its last
    share: Int32  # which part of the walk is this thread block's,
    shares: Int32  # of how many


class Walk(NamedTuple):
    """Tiles of queries [first, last) that a block of keys visits, from `start` on; those in [free_first, free_last) need no mask.

    For "runs" these are the visits of one query head (seen.walk_of_head).
    """

    start: Int32
    step: Int32  # 1, or -1 where it goes down
    first: Int32
    last: Int32
    free_first: Int32
    free_last: Int32


class Visits(NamedTuple):
    """Tiles of queries [first, last)."""

    first: Int32
    last: Int32


class Visitors(NamedTuple):
    """Blocks of keys [first, last) whose walk visits a tile of queries."""

    first: Int32
    last: Int32


@cute.jit
def visitors_of(m_block: Int32, band: Band, seqlen_k: Int32, config: Constexpr[Config]) -> Visitors:
    """The inverse of `order.walk_of`, exactly: a block that waited for one which never comes would wait for ever."""
    if const_expr(config.sees == "all"):
        return Visitors(Int32(0), cute.ceil_div(seqlen_k, config.tile_n))
    if const_expr(config.sees == "rows"):
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
    if const_expr(config.sees == "runs"):
        return band.tables.visited[band.tables.planes[batch, head], m_block] > 0
    visitors = visitors_of(m_block, band, seqlen_k, config)
    return visitors.first < visitors.last


@cute.jit
def block_of(number: Int32, n_blocks: Int32, heads: Int32, order: Order, config: Constexpr[Config]) -> Block:
    """The block's share of `heads` (of all sequences). Blocks start in the order of their numbers."""
    share, shares = Int32(0), Int32(1)
    if const_expr(config.shares):  # noqa: SIM102
        if number >= order.shared_from:  # all parts of a block side by side: the fewer have the same tiles of queries at a time
            number, share = divmod(number - order.shared_from, order.per_share)
            number, shares = number + order.shared_from, order.shares
    if const_expr(config.split == "keys"):
        section, within = divmod(number, order.per_rising)
        turn, member = divmod(within, order.rising_width)
        n_block, head = n_blocks - 1 - turn, section * order.abreast + member
        rising = head < order.rising
    else:  # `abreast` is 1, and registers are few
        head, turn = divmod(number, order.per_rising)
        rising, n_block = head < order.rising, n_blocks - 1 - turn
    section, within = divmod(max(number - order.rising * n_blocks, 0), order.per_section)
    turn, member = divmod(within, order.width)
    last_turn, last_member = divmod(within, order.last_width)
    first_head = order.rising + section * order.together
    if first_head + order.together > heads:
        turn, member = last_turn, last_member
    if not rising:
        n_block, head = turn, first_head + member
    batch, head_k = divmod(head, order.heads_k)
    return Block(n_block * config.tile_n, head_k, batch, rising, share, shares)


@cute.jit
def walk_of(block: Block, band: Band, seqlen_q: Int32, seqlen_k: Int32, config: Constexpr[Config]) -> Walk:
    """Empty where no query sees any of the keys. Rows beyond the last query need no mask: their log-sum-exp is +inf, so P = 0.

    Where it begins and which way it goes: see `turn_of`.
    """
    tile_m, tile_n, n0 = config.tile_m, config.tile_n, block.n0
    m_blocks = cute.ceil_div(seqlen_q, tile_m)
    if const_expr(config.sees == "all"):
        free = m_blocks if n0 + tile_n <= seqlen_k else Int32(0)
        first, last = Int32(0), m_blocks
        if const_expr(config.shares):
            first, last = block.share * m_blocks // block.shares, (block.share + 1) * m_blocks // block.shares
        return Walk(first, Int32(1), first, last, Int32(0), free)
    if const_expr(config.sees == "runs"):
        return Walk(Int32(0), Int32(1), Int32(0), Int32(0), Int32(0), Int32(0))
    if const_expr(config.sees == "rows"):
        first, last, free_first, free_last = (band.tables.walks[n0 // tile_n, i] for i in range(4))
        return begun(block, first, last, free_first, free_last)
    left, right = max(n0, band.k0), min(n0 + tile_n, band.k1) - 1  # the keys that anybody sees
    begin, end = max(band.q0, left - band.hi), min(band.q1, right - band.lo + 1)  # queries that see some of them
    first = max(begin, 0) // tile_m
    last = max(cute.ceil_div(max(end, 0), tile_m), first)
    if left > right:
        last = first
    begin, end = max(band.q0, n0 + tile_n - 1 - band.hi), min(band.q1, n0 - band.lo + 1)  # that see all
    if n0 < band.k0 or n0 + tile_n > band.k1:
        end = begin
    free_first = min(max(cute.ceil_div(max(begin, 0), tile_m), first), last)
    free_last = max(end, 0) // tile_m
    if end >= seqlen_q:
        free_last = last
    return begun(block, first, last, free_first, min(max(free_last, free_first), last))


@cute.jit
def last_visits(block: Block, band: Band, seqlen_q: Int32, seqlen_k: Int32, config: Constexpr[Config]) -> Visits:
    """Where no block's turn comes after this one's: tiles that the next one in turn does not visit, as later keys' walks begin and end later."""
    n0 = block.n0 + config.tile_n
    first, last = Int32(0), cute.ceil_div(seqlen_q, config.tile_m)
    if block.rising:
        n0 = block.n0 - config.tile_n
    if n0 >= 0 and n0 < seqlen_k:
        walk = walk_of(Block(n0, block.head_k, block.batch, block.rising, block.share, block.shares), band, seqlen_q, seqlen_k, config)
        if walk.first < walk.last and block.rising:
            first = walk.last
        elif walk.first < walk.last:
            last = walk.first
    return Visits(first, last)


@cute.jit
def begun(block: Block, first: Int32, last: Int32, free_first: Int32, free_last: Int32) -> Walk:
    """From the first on where the block is rising, else from the last on."""
    start, step = last - 1, Int32(-1)
    if block.rising:
        start, step = first, Int32(1)
    return Walk(start, step, first, last, free_first, free_last)


@cute.jit
def turn_of(place: Int32, block: Block, band: Band, seqlen_k: Int32, config: Constexpr[Config]) -> Int32:
    """How many blocks of keys add to the tile of dQ at a place of the walk before this one, in an order that keeps hardly anybody waiting.

    Each waits only for those before it, which started earlier. One that comes down finds the last tile left by then where it started when others
    ended, or, if they began together, a tile after the one before it; other heads' blocks start in between (`block_of`).
    """
    if const_expr(config.sees == "runs"):
        return band.tables.visits[place, 2]
    n_block = block.n0 // config.tile_n
    visitors = visitors_of(place, band, seqlen_k, config)
    return visitors.last - 1 - n_block if block.rising else n_block - visitors.first
