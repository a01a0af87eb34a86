"""Q, K and V of 16 bits become the forward kernel's operands of 8 bits, as backends/eight_bits.py has it to the bit, in two kernels.

The first finds what all tokens decide, of each channel: the centres of K and V, and in chunks of tokens the least and the largest number of V. The
second has a thread block for GROUP tokens of a head, of which a warp has 16 and a lane head_dim / 32 neighbouring channels:

- K loses its centre, and Q says by how much that shifts its scores;
- Q and K are rotated: channels in a lane are added and subtracted first, then those of lanes ever further apart;
- Q gets a scale for each token, K one for each GROUP tokens, and both are rounded to int8 or e4m3;
- V loses its centre, is divided by its channels' scales, rounded to e4m3 and transposed. 16 tokens of a channel lie in the order that P has in
  registers (sm90/key_order.py): those of a warp, so that a lane has all of them.
"""

import math
from typing import NamedTuple

from tilewise.backends.eight_bits import E4M3, LEAST, MOST, SAMPLE
from tilewise.backends.hopper.eight_bits import softmax
from tilewise.backends.hopper.eight_bits.config import GROUP, TOKENS, WARP, WARPS, QuantiserConfig, sign_words
from tilewise.backends.hopper.eight_bits.operands import Given, Made, OfTokens, Scales
from tilewise.sm90 import eight_bits
from tilewise.sm90.dsl import (
    Boolean,
    Constexpr,
    CUstream,
    Float32,
    Int16,
    Int32,
    SmemAllocator,
    Uint32,
    arch,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
)

CENTRE_K, CENTRE_V, EXTREMES = range(3)  # rows of `channels`; from EXTREMES on two for each chunk, the least and the largest number of V


@cute.jit
def launch(
    given: Given, made: Made, scales: Scales, channels: cute.Tensor, scale: Float32, config: Constexpr[QuantiserConfig], stream: CUstream
):  # fmt: skip
    """channels: (batch, heads_k, EXTREMES + 2 * chunks, or 1 without V, head_dim) fp32; scale: of the softmax, which `Scales.shift` has."""
    mQ, mK, mV = given
    batch, heads_q, heads_k = mQ.shape[0], mQ.shape[2], mK.shape[2]
    threads = (WARPS * WARP, 1, 1)
    surveys, heads = 1, heads_q + heads_k
    if const_expr(config.values):
        surveys, heads = (channels.shape[2] + EXTREMES) // 2, heads + heads_k
    survey(mK, mV, channels, config).launch(grid=(surveys, heads_k, batch), block=threads, stream=stream)
    blocks = cute.ceil_div(max(mQ.shape[1], mK.shape[1]), GROUP)
    quantise(given, made, scales, channels, scale, config).launch(grid=(blocks, heads, batch), block=threads, stream=stream)


@cute.kernel
def survey(mK: cute.Tensor, mV: cute.Tensor, channels: cute.Tensor, config: Constexpr[QuantiserConfig]):
    """What all tokens of a head decide: a centre, or the extremes of a chunk of V."""
    row, head, batch = arch.block_idx()
    storage = SmemAllocator()
    s = storage.allocate_tensor(Float32, cute.make_layout((config.numbers, WARP, 2, WARPS)), 16)
    target = channels[batch, head, None, None]
    if const_expr(not config.values):
        centre(mK[batch, None, head, None], s, target[CENTRE_K, None], config)
    elif row < EXTREMES:
        if row == CENTRE_K:
            centre(mK[batch, None, head, None], s, target[row, None], config)
        else:
            centre(mV[batch, None, head, None], s, target[row, None], config)
    else:
        extremes(mV[batch, None, head, None], s, target, row - EXTREMES, config)


@cute.jit
def centre(gX: cute.Tensor, s: cute.Tensor, target: cute.Tensor, config: Constexpr[QuantiserConfig]):
    """The mean of a sample, its tokens added up by halves: a warp has every eighth."""
    warp, lane, thread = arch.warp_idx(), arch.lane_idx(), arch.thread_idx()[0]
    tokens = gX.shape[0]
    number = min(tokens, SAMPLE)
    x, raw = (cute.make_rmem_tensor((config.numbers, TOKENS), each) for each in (Float32, gX.element_type))
    for t in range_constexpr(TOKENS):
        load_token(gX, raw, min(warp + WARPS * t, number - 1) * tokens // number, t, lane, config)
    x.store(raw.load().to(Float32))
    for t in range_constexpr(TOKENS):
        there = warp + WARPS * t < number and lane * config.numbers < gX.shape[1]
        for c in range_constexpr(config.numbers):
            x[c, t] = finite_or_0(x[c, t]) if there else Float32(0.0)
    for level in range_constexpr(TOKENS.bit_length() - 1):
        half = const_expr(TOKENS >> level + 1)
        for t in range_constexpr(half):
            for c in range_constexpr(config.numbers):
                x[c, t] += x[c, t + half]
    for c in range_constexpr(config.numbers):
        s[c, lane, 0, warp] = x[c, 0]
    arch.sync_threads()
    if thread < config.head_dim:
        parts = [s[thread % config.numbers, thread // config.numbers, 0, w] for w in range(WARPS)]
        target[thread] = finite_or_0(added_by_halves(parts) * (1.0 / number.to(Float32)))


def added_by_halves(parts: list[Float32]) -> Float32:
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)]
    return parts[0]


@cute.jit
def extremes(gV: cute.Tensor, s: cute.Tensor, target: cute.Tensor, chunk: Int32, config: Constexpr[QuantiserConfig]):
    warp, lane, thread = arch.warp_idx(), arch.lane_idx(), arch.thread_idx()[0]
    tokens = cute.ceil_div(gV.shape[0], (target.shape[0] - EXTREMES) // 2)
    begin = chunk * tokens
    end = min(begin + tokens, gV.shape[0])
    least, most = cute.make_rmem_tensor(config.numbers, Float32), cute.make_rmem_tensor(config.numbers, Float32)
    least.fill(math.inf)
    most.fill(-math.inf)
    raw = cute.make_rmem_tensor((config.numbers, TOKENS), gV.element_type)
    for i in cutlass.range(cute.ceil_div(end - begin, GROUP), unroll=1):
        first = begin + i * GROUP + warp * TOKENS
        for t in range_constexpr(TOKENS):
            load_token(gV, raw, min(first + t, end - 1), t, lane, config)
        for t in range_constexpr(TOKENS):
            for c in range_constexpr(config.numbers):
                number = finite_or_nan(raw[c, t].to(Float32))  # NaN is left out
                least[c], most[c] = arch.fmin(least[c], number), arch.fmax(most[c], number)
    for c in range_constexpr(config.numbers):
        s[c, lane, 0, warp], s[c, lane, 1, warp] = least[c], most[c]
    arch.sync_threads()
    if thread < config.head_dim:
        of_warps = s[thread % config.numbers, thread // config.numbers, None, None]
        low, high = of_warps[0, 0], of_warps[1, 0]
        for w in range_constexpr(1, WARPS):
            low, high = arch.fmin(low, of_warps[0, w]), arch.fmax(high, of_warps[1, w])
        target[EXTREMES + 2 * chunk, thread], target[EXTREMES + 2 * chunk + 1, thread] = low, high


@cute.jit
def load(gX: cute.Tensor, first: Int32, end: Int32, lane: Int32, config: Constexpr[QuantiserConfig]) -> cute.Tensor:
    """The lane's channels of TOKENS tokens from `first` on, as (numbers, TOKENS) fp32; 0 from token `end` on and beyond the channels that exist."""
    raw, channel = cute.make_rmem_tensor((config.numbers, TOKENS), gX.element_type), lane * config.numbers
    for t in range_constexpr(TOKENS):  # without branches, so that no load waits for another
        load_token(gX, raw, min(first + t, gX.shape[0] - 1), t, lane, config)
    x = cute.make_rmem_tensor((config.numbers, TOKENS), Float32)
    x.store(raw.load().to(Float32))
    for t in range_constexpr(TOKENS):
        there = first + t < end and channel < gX.shape[1]
        for c in range_constexpr(config.numbers):
            x[c, t] = x[c, t] if there else Float32(0.0)
    return x


@cute.jit
def load_token(gX: cute.Tensor, raw: cute.Tensor, token: Int32, t: Constexpr[int], lane: Int32, config: Constexpr[QuantiserConfig]):
    """The lane's channels, or others in place of those that do not exist."""
    place = gX[token, None].iterator + min(lane * config.numbers, gX.shape[1] - config.numbers)
    source = cute.make_tensor(place.align(2 * config.numbers), cute.make_layout(config.numbers))
    cute.autovec_copy(source, raw[None, t])


class Of(NamedTuple):
    """A thread block's tokens of a head, and a warp's of these."""

    batch: Int32
    head: Int32
    first: Int32  # the warp's first token
    lane: Int32


@cute.kernel
def quantise(given: Given, made: Made, scales: Scales, channels: cute.Tensor, scale: Float32, config: Constexpr[QuantiserConfig]):
    """GROUP tokens of a head of Q, K or V."""
    block, head, batch = arch.block_idx()
    storage = SmemAllocator()
    of_warps = storage.allocate_tensor(Int32, cute.make_layout((2, WARPS)), 16)
    sV = storage.allocate_tensor(Int32, cute.make_layout((4, WARPS, config.head_dim)), 16) if const_expr(config.values) else None
    lane = arch.lane_idx()
    first = block * GROUP + arch.warp_idx() * TOKENS
    heads_q, heads_k = given.Q.shape[2], given.K.shape[2]
    if head < heads_q:
        queries(given, made, scales, channels, scale, Of(batch, head, first, lane), config)
    elif head < heads_q + heads_k:
        keys(given, made, scales, channels, of_warps, Of(batch, head - heads_q, first, lane), config)
    elif const_expr(config.values):
        values(given, made, scales, channels, sV, Of(batch, head - heads_q - heads_k, first, lane), config)


@cute.jit
def queries(
    given: Given, made: Made, scales: Scales, channels: cute.Tensor, scale: Float32, of: Of, config: Constexpr[QuantiserConfig]
):  # fmt: skip
    gQ, target = given.Q[of.batch, None, of.head, None], made.Q[of.batch, None, of.head, None]
    seqlen = gQ.shape[0]
    x = load(gQ, of.first, seqlen, of.lane, config)
    head_k = of.head // (given.Q.shape[2] // given.K.shape[2])
    middle = of_lane(channels[of.batch, head_k, CENTRE_K, None], of.lane, config)
    mine = Float32(0.0)  # of the lane's token
    for t in range_constexpr(TOKENS):
        dot = Float32(0.0)
        for c in range_constexpr(config.numbers):
            dot += x[c, t] * middle[c]
        dot = arch.warp_reduction_sum(dot)
        mine = dot if of.lane == t else mine
    rotate(x, of.lane, config)
    of_token = Float32(1.0)
    for t in range_constexpr(TOKENS):
        factor, inverse = scale_of(largest_of_warp(largest(x, t, 1, config)), MOST[config.dtype])
        if const_expr(not config.dtype.is_floating_point):  # which has no NaN
            factor = factor if is_finite(x[0, t]) else Float32(math.nan)
        of_token = factor if of.lane == t else of_token
        if of.first + t < seqlen:
            store(target, of.first + t, x, t, inverse, of.lane, config)
    if of.lane < TOKENS and of.first + of.lane < seqlen:
        scales.q[of.batch, of.head, of.first + of.lane] = of_token
        scales.shift[of.batch, of.head, of.first + of.lane] = mine * scale


@cute.jit
def keys(
    given: Given, made: Made, scales: Scales, channels: cute.Tensor, of_warps: cute.Tensor, of: Of, config: Constexpr[QuantiserConfig]
):  # fmt: skip
    gK, target = given.K[of.batch, None, of.head, None], made.K[of.batch, None, of.head, None]
    seqlen = gK.shape[0]
    x = load(gK, of.first, seqlen, of.lane, config)
    middle = of_lane(channels[of.batch, of.head, CENTRE_K, None], of.lane, config)
    for t in range_constexpr(TOKENS):
        there = of.first + t < seqlen
        for c in range_constexpr(config.numbers):
            x[c, t] = x[c, t] - middle[c] if there else Float32(0.0)
    rotate(x, of.lane, config)
    lost = Float32(0.0)  # NaN where the lane's token has a number that is not finite: the rotation brings it to all
    if const_expr(config.loses):
        for t in range_constexpr(TOKENS):
            lost = x[0, t] * 0.0 if of.lane == t else lost
            for c in range_constexpr(config.numbers):
                x[c, t] = finite_or_0(x[c, t])
    warp = arch.warp_idx()
    found, any_lost = largest_of_warp(largest(x, 0, TOKENS, config)), Int32(arch.vote_any_sync(lost != 0.0))
    if of.lane == 0:
        of_warps[0, warp], of_warps[1, warp] = found, any_lost
    arch.sync_threads()
    for w in range_constexpr(WARPS):
        found, any_lost = max(found, of_warps[0, w]), any_lost | of_warps[1, w]
    factor, inverse = scale_of(found, MOST[config.dtype])
    group = arch.block_idx()[0]
    if group < scales.k.shape[2]:
        if arch.thread_idx()[0] == 0:
            scales.k[of.batch, of.head, group] = factor
        if const_expr(config.loses):
            if arch.thread_idx()[0] == 0:
                scales.whole[of.batch, of.head, group] = factor if any_lost == 0 else Float32(math.nan)
            if of.lane < TOKENS:
                scales.lost[of.batch, of.head, of.first + of.lane] = lost
    for t in range_constexpr(TOKENS):
        if of.first + t < seqlen:
            store(target, of.first + t, x, t, inverse, of.lane, config)


@cute.jit
def values(
    given: Given, made: Made, scales: Scales, channels: cute.Tensor, sV: cute.Tensor, of: Of, config: Constexpr[QuantiserConfig]
):  # fmt: skip
    """sV: (words, warps, channels), the warps of a channel in an order of its own, so that neighbouring lanes write to other banks."""
    gV, target = given.V[of.batch, None, of.head, None], made.V[of.batch, of.head, None, None]
    seqlen, numbers = gV.shape[0], config.numbers
    x = load(gV, of.first, seqlen, of.lane, config)
    middle, factor, inverse = scales_of_values(channels[of.batch, of.head, None, None], of.lane, config)
    warp = arch.warp_idx()
    words = cute.make_rmem_tensor(4, Int32)
    for c in range_constexpr(numbers):
        for t in range_constexpr(TOKENS):
            x[c, t] = (finite_or_nan(x[c, t]) - middle[c]) * inverse[c] if of.first + t < seqlen else 0.0
        for w in range_constexpr(4):
            words[w] = eight_bits.e4m3_of_four(*(x[c, t] for t in (2 * w, 2 * w + 1, 2 * w + 8, 2 * w + 9)))
        cute.autovec_copy(words, sV[None, warp ^ (of.lane % WARPS), of.lane * numbers + c])
    arch.sync_threads()
    group = arch.block_idx()[0]
    write_rows(sV, target, group, numbers, config)
    if group == 0 and warp == 0:
        for c in range_constexpr(numbers):
            channel = of.lane * numbers + c
            if channel < target.shape[0]:
                scales.v[of.batch, of.head, channel] = factor[c]
                scales.centre[of.batch, of.head, channel] = middle[c]


@cute.jit
def write_rows(sV: cute.Tensor, target: cute.Tensor, group: Int32, together: Constexpr[int], config: Constexpr[QuantiserConfig]):
    """GROUP tokens of every channel. target: (head_dim_v, tokens); sV: (words, warps, channels), with the order of warps changed by
    channel // together.
    """
    thread = arch.thread_idx()[0]
    words = cute.make_rmem_tensor(4, Int32)
    for i in range_constexpr(config.head_dim // WARP):
        channel, part = thread // WARPS + i * WARP, thread % WARPS
        at = group * GROUP + part * TOKENS
        if channel < target.shape[0] and at < target.shape[1]:
            cute.autovec_copy(sV[None, part ^ (channel // together % WARPS), channel], words)
            place = cute.recast_ptr((target[channel, None].iterator + at).align(16), dtype=Int32)
            cute.autovec_copy(words, cute.make_tensor(place, cute.make_layout(4)))


@cute.jit
def launch_transpose(
    mV: cute.Tensor, mT: cute.Tensor, tokens: OfTokens | None, config: Constexpr[QuantiserConfig], stream: CUstream
):  # fmt: skip
    """mV: (batch, seqlen_k, heads_k, head_dim_v) of 8 bits; mT: (batch, heads_k, head_dim_v, tokens), as the forward kernel reads it."""
    grid = cute.ceil_div(mV.shape[1], GROUP), mV.shape[2], mV.shape[0]
    transpose(mV, mT, tokens, config).launch(grid=grid, block=(WARPS * WARP, 1, 1), stream=stream)


@cute.kernel
def transpose(mV: cute.Tensor, mT: cute.Tensor, tokens: OfTokens | None, config: Constexpr[QuantiserConfig]):
    """GROUP tokens of a head: a thread has four channels of 16 tokens at a time."""
    group, head, batch = arch.block_idx()
    storage = SmemAllocator()
    sV = storage.allocate_tensor(Int32, cute.make_layout((4, WARPS, config.head_dim)), 16)
    gV = mV[batch, None, head, None]
    columns = const_expr(config.head_dim // 4)
    words = cute.make_rmem_tensor(TOKENS, Int32)
    for i in range_constexpr(cute.ceil_div(WARPS * columns, WARPS * WARP)):
        item = arch.thread_idx()[0] + i * WARPS * WARP
        part, column = item // columns, item % columns
        if part < WARPS:
            words.fill(0)
            for t in range_constexpr(TOKENS):
                token = group * GROUP + part * TOKENS + t
                if token < gV.shape[0] and 4 * column < gV.shape[1]:
                    place = cute.recast_ptr((gV[token, None].iterator + 4 * column).align(4), dtype=Int32)
                    words[t] = place.load()
            for w in range_constexpr(4):
                of_channels = four_channels(*(words[t] for t in (2 * w, 2 * w + 1, 2 * w + 8, 2 * w + 9)))
                for c in range_constexpr(4):
                    sV[w, part ^ (column % WARPS), 4 * column + c] = of_channels[c]
    arch.sync_threads()
    write_rows(sV, mT[batch, head, None, None], group, 4, config)
    if const_expr(config.tokens_k):
        token, scale = scale_of_token(tokens.k[batch, head, None], group)
        tokens.columns[batch, head, token] = scale
    if const_expr(config.tokens_v):
        of_warps = storage.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
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
    for w in range_constexpr(WARPS):
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


@cute.jit
def of_lane(row: cute.Tensor, lane: Int32, config: Constexpr[QuantiserConfig]) -> cute.Tensor:
    """(numbers,): the lane's channels of a row of `channels`."""
    found = cute.make_rmem_tensor(config.numbers, Float32)
    place = (row.iterator + lane * config.numbers).align(4 * min(config.numbers, 4))
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(config.numbers)), found)
    return found


@cute.jit
def scales_of_values(
    of_head: cute.Tensor, lane: Int32, config: Constexpr[QuantiserConfig]
) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:  # fmt: skip
    """The lane's centres, scales and their inverses, (numbers,) fp32 each. of_head: of `channels`."""
    middle, least, most = (
        of_lane(of_head[CENTRE_V, None], lane, config),
        *(of_lane(of_head[EXTREMES + i, None], lane, config) for i in range(2)),
    )
    for row in cutlass.range(EXTREMES + 2, of_head.shape[0], 2, unroll=1):
        low, high = of_lane(of_head[row, None], lane, config), of_lane(of_head[row + 1, None], lane, config)
        for c in range_constexpr(config.numbers):
            least[c], most[c] = arch.fmin(least[c], low[c]), arch.fmax(most[c], high[c])
    for c in range_constexpr(config.numbers):
        found = arch.fmax(most[c] - middle[c], middle[c] - least[c])
        least[c], most[c] = scale_of(bits_of(arch.fmax(found, 0.0)), MOST[E4M3])
    return middle, least, most


@cute.jit
def rotate(x: cute.Tensor, lane: Int32, config: Constexpr[QuantiserConfig]):
    """H D x, in place, and NaN for what is not finite. x: (numbers, TOKENS)."""
    numbers = config.numbers
    flips = cute.make_rmem_tensor(numbers, Float32)
    for c in range_constexpr(numbers):
        negative = (Uint32(sign_words(config.head_dim)[c]) >> Uint32(lane)) & 1
        flips[c] = Float32(-1.0) if negative != 0 else Float32(1.0)
    for t in range_constexpr(TOKENS):
        for c in range_constexpr(numbers):
            x[c, t] *= flips[c]
        for level in range_constexpr(numbers.bit_length() - 1):
            for pair in range_constexpr(numbers // 2):
                low = const_expr((pair >> level << (level + 1)) + (pair & ((1 << level) - 1)))
                a, b = x[low, t], x[low + (1 << level), t]
                x[low, t], x[low + (1 << level), t] = a + b, a - b
    for level in range_constexpr(WARP.bit_length() - 1):
        sign = Float32(-1.0) if lane & (1 << level) != 0 else Float32(1.0)
        for t in range_constexpr(TOKENS):
            for c in range_constexpr(numbers):
                x[c, t] = x[c, t] * sign + arch.shuffle_sync_bfly(x[c, t], 1 << level)
    for t in range_constexpr(TOKENS):
        for c in range_constexpr(numbers):
            x[c, t] = finite_or_nan(x[c, t])


def finite_or_nan(x: Float32) -> Float32:
    return x * 0.0 + x


@cute.jit
def finite_or_0(x: Float32) -> Float32:
    return x if is_finite(x) else Float32(0.0)


def is_finite(x: Float32) -> Boolean:
    return x * 0.0 == 0.0


@cute.jit
def largest(x: cute.Tensor, first: Constexpr[int], tokens: Constexpr[int], config: Constexpr[QuantiserConfig]) -> Int32:
    """The largest magnitude of some of the lane's numbers, as bits; 0 where all are NaN."""
    found = Float32(0.0)
    for t in range_constexpr(first, first + tokens):
        for c in range_constexpr(config.numbers):
            found = arch.fmax(found, cute.math.absf(x[c, t]))
    return bits_of(found)


def rounded_product(x: Float32, y: Float32) -> Float32:
    """Which no addition behind it is fused with."""
    return arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def bits_of(x: Float32) -> Int32:
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def number_of(x: Int32) -> Float32:
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def largest_of_warp(bits: Int32) -> Int32:
    """Bits of numbers that are not negative have their order."""
    return arch.inline_ptx("redux.sync.max.s32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[bits])


@cute.jit
def scale_of(bits: Int32, top: Constexpr[float]) -> tuple[Float32, Float32]:
    """What makes `top` the number with these bits, and its inverse."""
    most = number_of(bits)
    scale = most * (1.0 / top) if most >= LEAST else Float32(1.0)
    inverse = 1.0 / most * top if most >= LEAST else Float32(1.0)
    return scale, inverse


@cute.jit
def store(
    target: cute.Tensor, token: Int32, x: cute.Tensor, t: Constexpr[int], inverse: Float32, lane: Int32, config: Constexpr[QuantiserConfig]
):  # fmt: skip
    """The lane's numbers of a token, in 8 bits. target: (seqlen, head_dim)."""
    numbers = [rounded_product(x[c, t], inverse) for c in range(config.numbers)]
    place = (target[token, None].iterator + lane * config.numbers).align(config.numbers)
    if const_expr(config.numbers == 2):
        word = packed(numbers * 2, config)
        arch.inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[place.toint(), Int32(word).to(Int16)])
    else:
        words = cute.make_rmem_tensor(config.numbers // 4, Int32)
        for i in range_constexpr(config.numbers // 4):
            words[i] = packed(numbers[4 * i : 4 * i + 4], config)
        cute.autovec_copy(words, cute.make_tensor(cute.recast_ptr(place, dtype=Int32), cute.make_layout(config.numbers // 4)))


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
