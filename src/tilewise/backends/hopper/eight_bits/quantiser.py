"""Q, K and V of 16 bits become the forward kernel's operands of 8 bits, as backends/eight_bits.py has it to the bit, in two kernels.

The first (`survey`) finds what all tokens decide, of each channel: the centres of K and V, and in slices of tokens the least and the largest element
of V. The second (`quantise`) has thread blocks, or clusters of them, for GROUP tokens of a head, of which a thread has `numbers` elements:

- of Q and K a thread has one token, and chunks of its channels, which lie as far apart as those of all threads that share it are wide. The
  rotation adds and subtracts neighbours first, so it goes from the chunk's channels over the lanes to the thread's chunks;
- K loses its centre, and Q says by how much that shifts its scores;
- Q gets a scale for each token, K one for each GROUP tokens, and both are rounded to int8 or e4m3;
- V loses its centre, is divided by its channels' scales, rounded to e4m3 and transposed. 16 tokens of a channel lie in the order that P has in
  registers (sm90/key_order.py); a thread has four channels of eight or all of them.

Both are bound by memory: of Q, K and V each element takes 2 bytes to read, V's 2 again, and 1 to write. So little is computed for each: D's signs
change while two elements share a register, V's extremes are found in pairs, and what is not finite shows in the maxima that are found anyway. (K's
centre has D's signs, too. Where a key's first channel is -0 and its centre is 0, a zero of its e4m3 may so have the other sign.)
"""

import math
from typing import NamedTuple

from tilewise.backends.eight_bits import E4M3, LEAST, MOST, SAMPLE, SIGNS
from tilewise.backends.hopper.eight_bits import softmax
from tilewise.backends.hopper.eight_bits.config import CHUNK, GROUP, SLICES, SURVEYORS, TOKENS, WARP, QuantiserConfig, sign_words
from tilewise.backends.hopper.eight_bits.operands import Given, Made, OfTokens, Scales
from tilewise.sm90 import eight_bits
from tilewise.sm90.dsl import (
    Boolean,
    Constexpr,
    CUstream,
    Float32,
    Int32,
    Int64,
    SmemAllocator,
    Uint32,
    arch,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
)

CENTRE_K, CENTRE_V, SLICE = range(3)  # rows of `channels`; from SLICE on one of each slice of V: pairs of least, then of largest
EXTREMES = "min", "max"
AT_ONCE = 8  # loads of a thread that looks for extremes
PARTS = GROUP // TOKENS
CARVEOUT = 25  # per cent of a multiprocessor's memory, of which both kernels' thread blocks need less


@cute.jit
def launch(
    given: Given, made: Made, scales: Scales, channels: cute.Tensor, scale: Float32, config: Constexpr[QuantiserConfig], stream: CUstream
):  # fmt: skip
    """channels: (batch, heads_k, surveyed, head_dim) fp32; scale: of the softmax, which `Scales.shift` has."""
    mQ, mK, _, _ = given
    batch, heads_q, heads_k = mQ.shape[0], mQ.shape[2], mK.shape[2]
    heads = heads_q + (2 * heads_k if const_expr(config.values) else heads_k)
    survey(given, channels, config).launch(
        grid=(config.surveyed, batch, heads_k),
        block=(SURVEYORS, 1, 1),
        min_blocks_per_mp=3,
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
        use_pdl=True,
    )
    blocks = cute.ceil_div(max(mQ.shape[1], mK.shape[1]), GROUP) * config.cluster
    quantise(given, made, scales, channels, scale, heads_q // heads_k, config).launch(
        grid=(blocks, batch, heads),
        block=(config.threads, 1, 1),
        cluster=(config.cluster, 1, 1) if config.cluster > 1 else None,
        min_blocks_per_mp=config.blocks,
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
        use_pdl=True,
    )


# What all tokens decide


@cute.kernel
def survey(given: Given, channels: cute.Tensor, config: Constexpr[QuantiserConfig]):
    """Of a head: a centre, or the extremes of a slice of V."""
    arch.griddepcontrol_wait()  # what kernels before this one wrote, it and the next may read
    arch.griddepcontrol_launch_dependents()
    row, batch, head = arch.block_idx()
    gK, gV = given.K[batch, None, head, None], given.V[batch, None, head, None]
    tokens = counted(given)
    storage = SmemAllocator()
    warps = const_expr(SURVEYORS // WARP)
    sums = storage.allocate_tensor(Float32, cute.make_layout((config.head_dim, warps)), 16)
    pairs = storage.allocate_tensor(Uint32, cute.make_layout((config.head_dim // 2, 2, warps)), 16) if const_expr(config.values) else None
    if row == CENTRE_K:
        centre(gK, tokens, sums, channels, True, config)
    elif const_expr(config.values):
        if row == CENTRE_V:
            centre(gV, tokens, sums, channels, False, config)
        else:
            extremes(gV, tokens, pairs, channels, row - SLICE, config)


@cute.jit
def counted(given: Given) -> Int32:
    """How many keys are scaled and centred, one at least; the others are 0."""
    count = given.K.shape[1]
    if const_expr(given.ends is not None):
        count = min(max(given.ends[given.ends.shape[0] - 1], 1), count)
    return count


@cute.jit
def centre(
    gX: cute.Tensor, tokens: Int32, sums: cute.Tensor, channels: cute.Tensor, rotates: Constexpr[bool], config: Constexpr[QuantiserConfig]
):  # fmt: skip
    """The mean of a sample, its tokens added up by halves: a warp has every eighth. rotates: its signs are changed as those of what is rotated."""
    warp, lane, thread = arch.warp_idx(), arch.lane_idx(), arch.thread_idx()[0]
    words, warps = const_expr(config.head_dim // (2 * WARP)), const_expr(SURVEYORS // WARP)  # words: of a lane and a token
    channel = 2 * words * lane
    start, step, there = address_of(gX, 0, channel), step_of(gX), channel < gX.shape[1]
    x = []
    for t in range_constexpr(SAMPLE // warps):
        i = warp + t * warps
        token = (i * tokens) >> (SAMPLE.bit_length() - 1) if tokens > SAMPLE else i
        found = loaded(start + token * step, words, i < tokens and there)
        x.append([finite_or_0(number) for word in found for number in numbers_of(word, config)])
    for c in range_constexpr(2 * words):
        sums[channel + c, warp] = added_by_halves([numbers[c] for numbers in x])
    arch.sync_threads()
    if thread < config.head_dim:
        mean = finite_or_0(added_by_halves([sums[thread, w] for w in range(warps)]) * (1.0 / min(tokens, SAMPLE).to(Float32)))
        row_of_block(channels)[thread] = mean * sign_of(thread, config) if const_expr(rotates) else mean


def row_of_block(channels: cute.Tensor) -> cute.Tensor:
    """Of `channels`, which a block of `survey` writes."""
    row, batch, head = arch.block_idx()
    return channels[batch, head, row, None]


def added_by_halves(terms: list[Float32]) -> Float32:
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


class Walk(NamedTuple):
    """Where a thread is in its slice of V."""

    address: Int64
    token: Int32
    step: Int64  # bytes from one of its tokens to the next
    tokens: Int32  # between these: they go round the slices, and in each round over threads of a block


@cute.jit
def fetch(walk: Walk, end: Int32, raw: cute.Tensor) -> Walk:
    """A token's words, NaN from token `end` on; where the thread is then. raw: (4,)."""
    words = loaded(walk.address, 4, walk.token < end, otherwise=0x7FFF7FFF)
    for w in range_constexpr(4):
        raw[w] = words[w]
    return Walk(walk.address + walk.step, walk.token + walk.tokens, walk.step, walk.tokens)


@cute.jit
def extremes(
    gV: cute.Tensor, tokens: Int32, of_warps: cute.Tensor, channels: cute.Tensor, part: Int32, config: Constexpr[QuantiserConfig]
):  # fmt: skip
    """Pairs of the least and of the largest finite elements of a slice. of_warps: (head_dim / 2, 2, warps)."""
    thread, lane = arch.thread_idx()[0], arch.lane_idx()
    columns, pairs = const_expr(config.head_dim // 8), const_expr(config.head_dim // 2)
    rows, column = const_expr(SURVEYORS // columns), thread % columns
    first, apart = part * rows + thread // columns, const_expr(SLICES * rows)
    walk = Walk(address_of(gV, first, min(8 * column, gV.shape[1] - 8)), first, step_of(gV) * apart, Int32(apart))
    raw = cute.make_rmem_tensor((4, AT_ONCE), Uint32)
    extreme = cute.make_rmem_tensor((4, 2), Uint32)
    for w in range_constexpr(4):
        extreme[w, 0], extreme[w, 1] = Uint32(config.infinities), Uint32(config.infinities | 0x80008000)
    for u in range_constexpr(AT_ONCE):
        walk = fetch(walk, tokens, raw[None, u])
    for _ in cutlass.range(cute.ceil_div(tokens, apart * AT_ONCE), unroll=1):
        for u in range_constexpr(AT_ONCE):
            for w in range_constexpr(4):
                pair = finite_pair(raw[w, u], config)
                for k, name in enumerate(EXTREMES):
                    extreme[w, k] = extreme_of([extreme[w, k], pair], name, config)
            walk = fetch(walk, tokens, raw[None, u])
    for k, name in enumerate(EXTREMES):
        for w in range_constexpr(4):
            pair = extreme[w, k]
            for level in range_constexpr((WARP // columns).bit_length() - 1):
                pair = extreme_of([pair, arch.shuffle_sync_bfly(pair, columns << level)], name, config)
            if lane < columns:
                of_warps[4 * column + w, k, thread // WARP] = pair
    arch.sync_threads()
    for k, name in enumerate(EXTREMES):
        if thread // pairs == k:
            row_of_block(channels)[thread] = number_of(
                extreme_of([of_warps[thread % pairs, k, w] for w in range(SURVEYORS // WARP)], name, config)
            )


# Elements of 8 bits


class Of(NamedTuple):
    """A thread block's tokens of a head."""

    batch: Int32
    head: Int32
    first: Int32


@cute.kernel
def quantise(
    given: Given, made: Made, scales: Scales, channels: cute.Tensor, scale: Float32, share: Int32, config: Constexpr[QuantiserConfig]
):  # fmt: skip
    """`tokens` of a head: V's first, the last that `survey` read before others, as they may still be in the L2 cache. share: heads of queries for
    each of keys.
    """
    block, batch, head = arch.block_idx()
    blocks, batches, _ = arch.grid_dim()
    storage = SmemAllocator()
    rows = storage.allocate_tensor(Float32, cute.make_layout((config.head_dim, 2)), 16)
    if const_expr(config.cluster > 1):
        arch.cluster_arrive_relaxed()
    of_warps = storage.allocate_tensor(Int32, cute.make_layout(config.cluster * config.threads // WARP), 16)
    sV, heads_k, first = None, given.K.shape[2], 0  # first: head of keys
    if const_expr(config.values):
        sV, first = storage.allocate_tensor(Int32, cute.make_layout((4, config.tokens // TOKENS, config.head_dim)), 16), heads_k
    if head >= first + heads_k:
        of = Of(batch, head - first - heads_k, block * config.tokens)
        row = channels[batch, of.head // share, CENTRE_K, None]
        queries(given.Q, made.Q, scales, row, scale, rows[None, 0], of, config)
    elif head >= first:
        of = Of(batch, head - first, block * config.tokens)
        keys(given, made.K, scales, channels, rows[None, 0], of_warps, of, config)
    elif const_expr(config.values):
        of = Of(batches - 1 - batch, heads_k - 1 - head, (blocks - 1 - block) * config.tokens)
        values(given, made.V, scales, channels, rows, sV, of, config)


@cute.jit
def queries(
    mQ: cute.Tensor, mTarget: cute.Tensor, scales: Scales, row: cute.Tensor, scale: Float32, middle: cute.Tensor, of: Of,
    config: Constexpr[QuantiserConfig],
):  # fmt: skip
    """row: the centre of K, its signs changed as Q's are."""
    gQ, target = mQ[of.batch, None, of.head, None], mTarget[of.batch, None, of.head, None]
    token, sharer = place_of_thread(of.first, config)
    seqlen = gQ.shape[0]
    if of.first < seqlen:
        raw = load(gQ, token, sharer, config)
        read_middle(row, middle)
        x = cute.make_rmem_tensor(config.numbers, Float32)
        dot = Float32(0.0)
        widen(raw, x, sharer, config)
        for i in range_constexpr(config.numbers // 4):
            four = of_chunk(middle, i, sharer, config)
            for c in range_constexpr(4):
                dot += x[4 * i + c] * four[c]
        for level in range_constexpr(config.sharers.bit_length() - 1):
            dot += arch.shuffle_sync_bfly(dot, 1 << level)
        if sharer == 0 and token < seqlen:
            scales.shift[of.batch, of.head, token] = dot * scale
        rotate(x, config)
        most = of_sharers(largest(x), config)
        spoiled = not is_finite(most)
        if arch.vote_any_sync(spoiled):
            most = of_sharers(without_spoiled(x, config), config)
        factor, inverse = scale_of(most, MOST[config.dtype])
        if const_expr(not config.dtype.is_floating_point):  # which has no NaN
            factor = Float32(math.nan) if spoiled else factor
        if token < seqlen:
            store(target, token, x, inverse, sharer, config)
            if sharer == 0:
                scales.q[of.batch, of.head, token] = factor


@cute.jit
def keys(
    given: Given, mTarget: cute.Tensor, scales: Scales, channels: cute.Tensor, middle: cute.Tensor, of_warps: cute.Tensor, of: Of,
    config: Constexpr[QuantiserConfig],
):  # fmt: skip
    gK, target = given.K[of.batch, None, of.head, None], mTarget[of.batch, None, of.head, None]
    token, sharer = place_of_thread(of.first, config)
    seqlen, last = gK.shape[0], counted(given)
    group = of.first // GROUP
    if group * GROUP < seqlen:
        raw = load(gK, token, sharer, config)
        read_middle(channels[of.batch, of.head, CENTRE_K, None], middle)
        x = cute.make_rmem_tensor(config.numbers, Float32)
        widen(raw, x, sharer, config)
        for i in range_constexpr(config.numbers // 4):
            four = of_chunk(middle, i, sharer, config)
            for c in range_constexpr(4):
                x[4 * i + c] -= four[c]
        if const_expr(config.ends):
            only_if(token < last, x)
        rotate(x, config)
        most = largest(x)
        lost = not is_finite(of_sharers(most, config))
        if arch.vote_any_sync(lost):
            most = without_spoiled(x, config)
        most = most if token < last else Float32(0.0)
        lost = lost and token < last
        thread = arch.thread_idx()[0]
        word = largest_of_warp(bits_of(most))
        if const_expr(config.loses):  # a bit that no value above 0 has says so
            word |= Int32(arch.vote_any_sync(lost)) << 31
        word = tell(of_warps, word, config)
        any_lost = False
        if const_expr(config.loses):
            any_lost = arch.vote_any_sync(word < 0)
        factor, inverse = scale_of(number_of(largest_of_warp(word & 0x7FFFFFFF)), MOST[config.dtype])
        if thread == 0:
            scales.k[of.batch, of.head, group] = factor
        if const_expr(config.loses):
            if thread == 0:
                scales.whole[of.batch, of.head, group] = Float32(math.nan) if any_lost else factor
            if sharer == 0:
                scales.lost[of.batch, of.head, token] = Float32(math.nan) if lost else Float32(0.0)
        if token < seqlen:
            store(target, token, x, inverse, sharer, config)


@cute.jit
def tell(of_warps: cute.Tensor, word: Int32, config: Constexpr[QuantiserConfig]) -> Int32:
    """A warp's word to all warps that have the GROUP tokens; any of theirs, so that a warp has all of them."""
    thread = arch.thread_idx()[0]
    if const_expr(config.cluster == 1):
        if thread % WARP == 0:
            of_warps[thread // WARP] = word
        arch.sync_threads()
    else:
        place = of_warps.iterator + (arch.block_idx_in_cluster() * (config.threads // WARP) + thread // WARP)
        arch.cluster_wait()  # the others are there
        if thread % WARP < config.cluster:
            to_rank(thread % WARP, place, word)
        arch.cluster_arrive()
        arch.cluster_wait()
    return of_warps[thread % cute.size(of_warps)]


@cute.jit
def values(
    given: Given, mTarget: cute.Tensor, scales: Scales, channels: cute.Tensor, rows: cute.Tensor, sV: cute.Tensor, of: Of,
    config: Constexpr[QuantiserConfig],
):  # fmt: skip
    """rows: (head_dim, 2) fp32; sV: (words, parts, channels), the parts of a channel, TOKENS each, in an order of its own, so that neighbouring
    lanes write to other banks.
    """
    gV, target = given.V[of.batch, None, of.head, None], mTarget[of.batch, of.head, None, None]
    last = counted(given)
    if of.first < gV.shape[0]:
        columns, words = const_expr(config.head_dim // 4), const_expr(config.numbers // 16)
        item, column = arch.thread_idx()[0] // columns, arch.thread_idx()[0] % columns
        part, word = item // (4 // words), item % (4 // words) * words  # the first of the part's words that are the thread's
        first = of.first + part * TOKENS + 2 * word
        offsets = const_expr([2 * w + i for w in range(words) for i in (0, 1, 8, 9)])
        start, step = address_of(gV, first, 4 * column), step_of(gV)
        there = [first + offset < last for offset in offsets]
        raw = [loaded(start + offset * step, 2, each and 4 * column < gV.shape[1]) for offset, each in zip(offsets, there, strict=True)]
        scales_of_values(channels[of.batch, of.head, None, None], scales, rows, of, config)
        middle, inverse = (four_of(rows[None, i].iterator + 4 * column) for i in range(2))
        kept = [there_of_word(there[4 * w : 4 * w + 4]) for w in range(words)]
        found = cute.make_rmem_tensor((words, 4), Int32)
        for pair in range_constexpr(2):
            tokens = [numbers_of(finite_pair(each[pair], config), config) for each in raw]
            for i in range_constexpr(2):
                c = const_expr(2 * pair + i)
                x = [(each[i] - middle[c]) * inverse[c] for each in tokens]
                for w in range_constexpr(words):
                    found[w, c] = eight_bits.e4m3_of_four(*x[4 * w : 4 * w + 4]) & kept[w]
        for c in range_constexpr(4):
            to = sV[None, part ^ (column % (config.tokens // TOKENS)), 4 * column + c].iterator + word
            cute.autovec_copy(found[None, c], cute.make_tensor(to.align(4 * words), cute.make_layout(words)))
        arch.sync_threads()
        write_rows(sV, target, of.first, config.threads, config)


@cute.jit
def scales_of_values(of_head: cute.Tensor, scales: Scales, rows: cute.Tensor, of: Of, config: Constexpr[QuantiserConfig]):
    """V's centres and inverse scales into `rows`, which `survey` has found; those of the head's first block go into `Scales`, too. of_head: of
    `channels`.
    """
    arch.griddepcontrol_wait()
    thread, pairs = arch.thread_idx()[0], const_expr(config.head_dim // 2)
    for k, name in enumerate(EXTREMES):
        if thread // pairs == k:
            found = extreme_of([as_word(of_head[SLICE + i, thread]) for i in range(SLICES)], name, config)
            numbers = numbers_of(found, config)
            for i in range_constexpr(2):
                rows[2 * (thread % pairs) + i, k] = numbers[i]
    arch.sync_threads()
    if thread < config.head_dim:
        middle, least, most = of_head[CENTRE_V, thread], rows[thread, 0], rows[thread, 1]
        factor, inverse = scale_of(arch.fmax(arch.fmax(most - middle, middle - least), 0.0), MOST[E4M3])
        rows[thread, 0], rows[thread, 1] = middle, inverse
        if of.first == 0 and thread < scales.v.shape[2]:
            scales.v[of.batch, of.head, thread], scales.centre[of.batch, of.head, thread] = factor, middle
    arch.sync_threads()


def there_of_word(there: list[Boolean]) -> Int32:
    """A mask of the bytes of those that are there."""
    mask = Int32(0)
    for i, each in enumerate(there):
        mask |= -Int32(each) & Int32((255, 255 << 8, 255 << 16, -(1 << 24))[i])
    return mask


@cute.jit
def write_rows(sV: cute.Tensor, target: cute.Tensor, first: Int32, threads: Constexpr[int], config: Constexpr[QuantiserConfig]):
    """The block's tokens, from `first` on, of every channel. target: (head_dim_v, tokens); sV: (words, parts, channels), with the order of parts
    changed by channel // 4.
    """
    thread, parts = arch.thread_idx()[0], const_expr(cute.size(sV, mode=[1]))
    words = cute.make_rmem_tensor(4, Int32)
    for i in range_constexpr(config.head_dim * parts // threads):
        channel, part = thread // parts + i * (threads // parts), thread % parts
        at = first + part * TOKENS
        if channel < target.shape[0] and at < target.shape[1]:
            cute.autovec_copy(sV[None, part ^ (channel // 4 % parts), channel], words)
            place = cute.recast_ptr((target[channel, None].iterator + at).align(16), dtype=Int32)
            cute.autovec_copy(words, cute.make_tensor(place, cute.make_layout(4)))


@cute.jit
def launch_transpose(
    mV: cute.Tensor, mT: cute.Tensor, tokens: OfTokens | None, config: Constexpr[QuantiserConfig], stream: CUstream
):  # fmt: skip
    """mV: (batch, seqlen_k, heads_k, head_dim_v) of 8 bits; mT: (batch, heads_k, head_dim_v, tokens), as the forward kernel reads it."""
    grid = cute.ceil_div(mV.shape[1], GROUP), mV.shape[2], mV.shape[0]
    transpose(mV, mT, tokens, config).launch(grid=grid, block=(2 * config.head_dim, 1, 1), stream=stream)


@cute.kernel
def transpose(mV: cute.Tensor, mT: cute.Tensor, tokens: OfTokens | None, config: Constexpr[QuantiserConfig]):
    """GROUP tokens of a head: a thread has four channels of 16 tokens."""
    group, head, batch = arch.block_idx()
    storage = SmemAllocator()
    sV = storage.allocate_tensor(Int32, cute.make_layout((4, PARTS, config.head_dim)), 16)
    gV = mV[batch, None, head, None]
    columns = const_expr(config.head_dim // 4)
    part, column = arch.thread_idx()[0] // columns, arch.thread_idx()[0] % columns
    words = cute.make_rmem_tensor(TOKENS, Int32)
    words.fill(0)
    for t in range_constexpr(TOKENS):
        token = group * GROUP + part * TOKENS + t
        if token < gV.shape[0] and 4 * column < gV.shape[1]:
            place = cute.recast_ptr((gV[token, None].iterator + 4 * column).align(4), dtype=Int32)
            words[t] = place.load()
    for w in range_constexpr(4):
        of_channels = four_channels(*(words[t] for t in (2 * w, 2 * w + 1, 2 * w + 8, 2 * w + 9)))
        for c in range_constexpr(4):
            sV[w, part ^ (column % PARTS), 4 * column + c] = of_channels[c]
    arch.sync_threads()
    write_rows(sV, mT[batch, head, None, None], group * GROUP, 2 * config.head_dim, config)
    if const_expr(config.tokens_k):
        token, scale = scale_of_token(tokens.k[batch, head, None], group)
        tokens.columns[batch, head, token] = scale
    if const_expr(config.tokens_v):
        of_warps = storage.allocate_tensor(Int32, cute.make_layout(2 * config.head_dim // WARP), 16)
        token, scale = scale_of_token(tokens.v[batch, head, None], group)
        unit = unit_of(scale, of_warps)
        tokens.weights[batch, head, token] = finite_or_nan(scale) / unit
        tokens.units[batch, head, group] = unit


@cute.jit
def scale_of_token(of_head: cute.Tensor, group: Int32) -> tuple[Int32, Float32]:
    """A thread's token of the group, which several have, and its scale; 0 for a token that does not exist."""
    token = group * GROUP + arch.thread_idx()[0] % GROUP
    scale = of_head[min(token, of_head.shape[0] - 1)]
    return token, scale if token < of_head.shape[0] else Float32(0.0)


@cute.jit
def unit_of(scale: Float32, of_warps: cute.Tensor) -> Float32:
    """The largest finite magnitude of the thread block's scales; 1 where that is 0."""
    warp, most = arch.warp_idx(), largest_of_warp(bits_of(cute.math.absf(finite_or_0(scale))))
    if arch.lane_idx() == 0:
        of_warps[warp] = most
    arch.sync_threads()
    for w in range_constexpr(cute.size(of_warps)):
        most = max(most, of_warps[w])
    return number_of(most) if most > 0 else Float32(1.0)


def four_channels(*tokens: Int32) -> tuple[Int32, ...]:
    """Four channels of four tokens, a word each, as four tokens of each channel."""
    ptx = (
        "{ .reg .b32 a, b, c, d; prmt.b32 a, {$r0}, {$r1}, 0x5140; prmt.b32 b, {$r2}, {$r3}, 0x5140; prmt.b32 c, {$r0}, {$r1}, 0x7362; "
        "prmt.b32 d, {$r2}, {$r3}, 0x7362; prmt.b32 {$w0}, a, b, 0x5410; prmt.b32 {$w1}, a, b, 0x7632; prmt.b32 {$w2}, c, d, 0x5410; "
        "prmt.b32 {$w3}, c, d, 0x7632; }"
    )
    return arch.inline_ptx(ptx, write_only_types=[Int32] * 4, read_only_args=tokens)


def place_of_thread(first: Int32, config: QuantiserConfig) -> tuple[Int32, Int32]:
    """The thread's token of Q or K, and which of its sharers it is."""
    thread = arch.thread_idx()[0]
    return first + thread // config.sharers, thread % config.sharers


@cute.jit
def load(gX: cute.Tensor, token: Int32, sharer: Int32, config: Constexpr[QuantiserConfig]) -> cute.Tensor:
    """The thread's pairs (4, chunks) of a token: 0 where there is no channel, the last token's where there is no token."""
    start = address_of(gX, min(token, gX.shape[0] - 1), CHUNK * sharer)
    raw = cute.make_rmem_tensor((4, config.numbers // 8), Uint32)
    for i in range_constexpr(config.numbers // 8):
        channel = const_expr(config.channel(8 * i))
        words = loaded(start + 2 * channel, 4, channel + CHUNK * sharer < gX.shape[1])
        for w in range_constexpr(4):
            raw[w, i] = words[w]
    return raw


def address_of(gX: cute.Tensor, token: Int32, channel: Int32) -> Int64:
    return (gX[token, None].iterator + channel).toint()


def step_of(gX: cute.Tensor) -> Int64:
    """Bytes from token to token."""
    return Int64(gX.stride[0] * (gX.element_type.width // 8))


def loaded(address: Int64, words: int, there: Boolean, otherwise: int = 0) -> tuple[Uint32, ...]:
    """`words` words of global memory, `otherwise` where they are not there; without branches, so that no load waits for another."""
    targets, kind = [f"{{$w{i}}}" for i in range(words)], "b32" if words == 1 else f"v{words}.b32"
    load = f"ld.global.L2::128B.{kind} {'{' * (words > 1)}{', '.join(targets)}{'}' * (words > 1)}, [{{$r0}}];"
    others = " ".join(f"mov.b32 {target}, {otherwise};" for target in targets)
    ptx = f"{{ .reg .pred there; setp.ne.b32 there, {{$r1}}, 0; {others} @there {load} }}"
    found = arch.inline_ptx(ptx, write_only_types=[Uint32] * words, read_only_args=[address, Int32(there)])
    return found if words > 1 else (found,)


@cute.jit
def read_middle(row: cute.Tensor, middle: cute.Tensor):
    """A row of `channels` into shared memory, once it is there."""
    arch.griddepcontrol_wait()
    thread = arch.thread_idx()[0]
    if thread < cute.size(middle):
        middle[thread] = row[thread]
    arch.sync_threads()


@cute.jit
def of_chunk(middle: cute.Tensor, i: Constexpr[int], sharer: Int32, config: Constexpr[QuantiserConfig]) -> cute.Tensor:
    """(4,): for the thread's elements from 4 i on."""
    return four_of(middle.iterator + (config.channel(4 * i) + CHUNK * sharer))


@cute.jit
def four_of(place: cute.Pointer) -> cute.Tensor:
    found = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(cute.make_tensor(place.align(16), cute.make_layout(4)), found)
    return found


@cute.jit
def widen(raw: cute.Tensor, x: cute.Tensor, sharer: Int32, config: Constexpr[QuantiserConfig]):
    """D x. raw: pairs (4, chunks); x: (numbers,)."""
    words = sign_words(config)
    for half in range_constexpr(config.numbers // 32):
        flips = Uint32(words[0][half])
        for i in range_constexpr(1, config.sharers):
            flips = Uint32(words[i][half]) if sharer == i else flips
        for k in range_constexpr(16):
            pair = const_expr(16 * half + k)
            flip = (flips << Uint32(15 - k)) & Uint32(0x80008000)
            x[2 * pair], x[2 * pair + 1] = numbers_of(raw[pair % 4, pair // 4] ^ flip, config)


@cute.jit
def rotate(x: cute.Tensor, config: Constexpr[QuantiserConfig]):
    """H x, in place. x: (numbers,)."""
    inner = const_expr(CHUNK.bit_length() - 1)
    for level in range_constexpr(inner):
        add_and_subtract(x, 1 << level)
    lane = arch.lane_idx()
    for level in range_constexpr(config.sharers.bit_length() - 1):
        sign = Float32(-1.0) if lane & (1 << level) != 0 else Float32(1.0)
        add_and_subtract_lanes(x, 1 << level, sign)
    for level in range_constexpr(inner, config.numbers.bit_length() - 1):
        add_and_subtract(x, 1 << level)


def add_and_subtract(x: cute.Tensor, apart: int):
    for low in range(cute.size(x)):
        if low & apart == 0:
            a, b = x[low], x[low + apart]
            x[low], x[low + apart] = a + b, a - b


def add_and_subtract_lanes(x: cute.Tensor, apart: int, sign: Float32):
    """sign: -1 in the upper of two lanes that are `apart`."""
    for c in range(cute.size(x)):
        x[c] = x[c] * sign + arch.shuffle_sync_bfly(x[c], apart)


def only_if(there: Boolean, x: cute.Tensor):
    """0 in place of x where it is not there."""
    for c in range(cute.size(x)):
        x[c] = or_0(x[c], there)


def without_spoiled(x: cute.Tensor, config: QuantiserConfig) -> Float32:
    """The largest finite magnitude of the thread's elements; in place of what is not finite comes 0 or, where the dtype has it, NaN."""
    most = Float32(0.0)
    for c in range(config.numbers):
        x[c] = finite_or_nan(x[c]) if config.dtype.is_floating_point else finite_or_0(x[c])
        most = arch.fmax(most, cute.math.absf(x[c]))
    return most


def finite_or_nan(x: Float32) -> Float32:
    return x * 0.0 + x


def finite_or_0(x: Float32) -> Float32:
    return or_0(x, is_finite(x))


@cute.jit
def or_0(x: Float32, there: Boolean) -> Float32:
    return x if there else Float32(0.0)


def is_finite(x: Float32) -> Boolean:
    return x * 0.0 == 0.0


def largest(x: cute.Tensor) -> Float32:
    """The largest magnitude of the thread's elements, NaN if any is NaN."""
    found = [Float32(0.0)] * 4
    for c in range(cute.size(x)):
        found[c % 4] = largest_or_nan(found[c % 4], x[c])
    return largest_or_nan(largest_or_nan(found[0], found[1]), largest_or_nan(found[2], found[3]))


def largest_or_nan(most: Float32, x: Float32) -> Float32:
    ptx = "{ .reg .f32 size; abs.f32 size, {$r1}; max.NaN.f32 {$w0}, {$r0}, size; }"
    return arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[most, x])


@cute.jit
def of_sharers(most: Float32, config: Constexpr[QuantiserConfig]) -> Float32:
    """The largest of all that share a token."""
    for level in range_constexpr(config.sharers.bit_length() - 1):
        most = largest_or_nan(most, arch.shuffle_sync_bfly(most, 1 << level))
    return most


def largest_of_warp(bits: Int32) -> Int32:
    """Bits of floats that are not negative have the floats' order."""
    return arch.inline_ptx("redux.sync.max.s32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[bits])


@cute.jit
def scale_of(most: Float32, top: Constexpr[float]) -> tuple[Float32, Float32]:
    """What makes `top` of `most`, and its inverse."""
    scale = most * (1.0 / top) if most >= LEAST else Float32(1.0)
    inverse = 1.0 / most * top if most >= LEAST else Float32(1.0)
    return scale, inverse


@cute.jit
def store(
    target: cute.Tensor, token: Int32, x: cute.Tensor, inverse: Float32, sharer: Int32, config: Constexpr[QuantiserConfig]
):  # fmt: skip
    """The thread's elements of a token, in 8 bits. target: (seqlen, head_dim)."""
    place, words = (target[token, None].iterator + CHUNK * sharer).toint(), const_expr(CHUNK // 4)
    stored = const_expr(f"st.global.v{words}.b32 [{{$r0}}], {{{', '.join(f'{{$r{i + 1}}}' for i in range(words))}}};")
    for first in range_constexpr(0, config.numbers, CHUNK):
        found = [packed([rounded_product(x[first + 4 * w + c], inverse) for c in range(4)], config) for w in range(words)]
        arch.inline_ptx(stored, read_only_args=[place + config.channel(first), *found])


# Elements in registers


def numbers_of(pair: Uint32, config: QuantiserConfig) -> tuple[Float32, Float32]:
    """Two of 16 bits in fp32."""
    if config.kind == "bf16":
        return number_of(pair << Uint32(16)), number_of(pair & Uint32(0xFFFF0000))
    ptx = "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
    return arch.inline_ptx(ptx, write_only_types=[Float32] * 2, read_only_args=[pair])


def finite_pair(pair: Uint32, config: QuantiserConfig) -> Uint32:
    """With NaN in place of infinities."""
    ptx = f"{{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.{config.kind}x2 {{$w0}}, {{$r0}}, zero, {{$r0}}; }}"
    return arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[pair])


def extreme_of(pairs: list[Uint32], name: str, config: QuantiserConfig) -> Uint32:
    """name: "min" or "max", which leave out NaN."""
    found, *others = pairs
    for pair in others:
        ptx = f"{name}.{config.kind}x2 {{$w0}}, {{$r0}}, {{$r1}};"
        found = arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[found, pair])
    return found


@cute.jit
def sign_of(channel: Int32, config: Constexpr[QuantiserConfig]) -> Float32:
    """D's."""
    word = Uint32(SIGNS[0])
    for i in range_constexpr(1, config.head_dim // 32):
        word = Uint32(SIGNS[i]) if channel // 32 == i else word
    return Float32(-1.0) if (word >> Uint32(31 - channel % 32)) & 1 != 0 else Float32(1.0)


def to_rank(rank: Int32 | int, place: cute.Pointer, x: Float32 | Int32 | Uint32):
    """Into the same place of the shared memory of one of the cluster's thread blocks."""
    ptx = "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r2}; st.shared::cluster.b32 [there], {$r1}; }"
    arch.inline_ptx(ptx, read_only_args=[place.toint(), x, Int32(rank)])


def rounded_product(x: Float32, y: Float32) -> Float32:
    """Which no addition behind it is fused with."""
    return arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def bits_of(x: Float32) -> Int32:
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def as_word(x: Float32) -> Uint32:
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[x])


def number_of(x: Int32 | Uint32) -> Float32:
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def packed(numbers: list[Float32], config) -> Int32:
    """Four, the first in the lowest bits."""
    if config.dtype.is_floating_point:
        return eight_bits.e4m3_of_four(*numbers)
    a, b, c, d = (bits_of(x + softmax.MAGIC) for x in numbers)
    ptx = (
        "{ .reg .b32 low, high; prmt.b32 low, {$r0}, {$r1}, 0x0040; prmt.b32 high, {$r2}, {$r3}, 0x0040; "
        "prmt.b32 {$w0}, low, high, 0x5410; }"
    )
    return arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[a, b, c, d])
