"""The backward pass on Hopper, seen from torch: which problems it takes, what it allocates, and the call of the compiled kernels."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.hopper import changes
from tilewise.backends.hopper.backward import tables as backward_tables
from tilewise.backends.hopper.backward.bias import call as bias_gradient
from tilewise.backends.hopper.backward.config import ONE_BLOCK, PIECE, TILES, Config, configure, tile_dims
from tilewise.backends.tables import documents
from tilewise.backends.tables.band import band_of
from tilewise.errors import UnsupportedError
from tilewise.machine.sheets import H100
from tilewise.masks import Causal, Documents, Full
from tilewise.problem import Call, Gradients, Problem
from tilewise.sm90 import jit

LAUNCH = "tilewise.backends.hopper.backward.kernel:launch"  # by name, so that a kernel from the cache needs no DSL
MOST = 65535  # the second and third dimension of a grid: heads, batch
NARROW = 4  # heads that come down under a window, the last ones; twice as many of 64 and less
CACHE = 8 << 20  # bytes that the blocks of one key head read: with more, and grouped queries, heads come down
SHARING = 8  # such heads take turns: then a head's blocks wait in short chains only
ABREAST = 8  # rising heads that take turns, at most,
RISING = 16 << 20  # and what these read in all, in bytes;
FEW = 4  # so many, of above 64, may read twice that
MOST_SHARES = 4  # thread blocks that share a block of keys of the last wave; each adds 0.1 MB to what one of them reads;
MOST_OF_ONE_BLOCK = 12  # and where its head has no other (H200, 2026-11-22: benchmarks/results/exploratory/backward-few-keys-h200.jsonl)
OF_A_BLOCK = 4  # tiles that take as long as a thread block's beginning and end
NEIGHBOURS = 8  # blocks of keys of a head that run at a time under a full mask; each begins a tile later
AT_HAND = 16 << 20  # bytes that heads which take turns may read in all, if there are fewer neighbours then
# Bytes of the L2 cache, at least, and bytes that all of them may read before a tile is read again, once neighbours have drifted apart evenly. 50 MB:
# H100, 2026-11-23, benchmarks/results/exploratory/backward-neighbours-h100.jsonl; 60 MB: H200, as below.
AGAIN = (0, 2 << 20), (60 << 20, 24 << 20)


class Board(NamedTuple):
    """A GPU."""

    slots: int  # multiprocessors
    again: int  # bytes, as in AGAIN


def why_not(problem: Problem) -> list[str]:
    """Sentences that say why these kernels cannot compute the problem's gradients; empty when they can."""
    wrong = []
    dims = problem.head_dim, problem.head_dim_v
    if tile_dims(*dims) is None:
        largest = max(TILES)
        wrong.append(f"its backward pass takes head_dim up to {largest[0]} and head_dim_v up to {largest[1]}, not {dims[0]} and {dims[1]}")
    if problem.dropout:
        wrong.append("its backward pass has no dropout yet")
    return wrong


def check(call: Call) -> None:
    """Raise UnsupportedError for more heads than a grid of thread blocks can have."""
    if call.heads_q > MOST:
        raise UnsupportedError(
            f"q has {call.heads_q} heads; backend 'hopper' computes gradients of at most {MOST}: divide them among several calls, "
            "or pass backend='tiled'"
        )


def config_of(call: Call) -> Config:
    sees = {"full": "all", "band": "interval"}.get(call.mask.kind, "runs")
    if isinstance(call.mask, Causal):
        sees = "from"
    elif documents.by_rows(call.mask):
        sees = "rows"
    few = call.seqlen_k <= ONE_BLOCK
    return configure(call.q.dtype, call.head_dim, call.head_dim_v, sees, call.seqlen_q, few, **changes.fields(call))


WALKS = {
    "all": "over all tiles of {} queries",
    "from": "over tiles of {} queries, from those that begin to see them on",
    "interval": "over tiles of {} queries, from the first to the last that see them",
    "rows": "over tiles of {} queries, which the GPU finds from cu_seqlens",
    "runs": "over tiles of {} queries, from tables",
}


def lines(call: Call, slots: int = H100.sms) -> list[str]:
    """What the backward pass will do, in sentences; slots: multiprocessors of the GPU."""
    config = config_of(call)
    walk = WALKS[config.sees].format(config.tile_m)
    sums = "dQ written by who computes it" if config.one_block else "dQ by a kernel of its own"
    if config.sums:
        size = 4 * call.batch * call.heads_q * -(-call.seqlen_q // config.tile_m) * config.numbers_of_sum(call.head_dim)
        sums = f"dQ summed up in fp32 ({size / 1e6:,.1f} MB) in one order, so that every run gives the same bits"
    _, shares, parts = _shared(config, call, slots)
    if parts:
        size, where = 4 * parts * _numbers_of_part(config), "" if config.one_block else ", where dQ goes later"
        sums += f"; the last blocks shared by {shares} thread blocks each, whose parts of dK and dV take {size / 1e6:,.1f} MB{where}"
    found = [f"backward: blocks of {config.tile_n} keys walk {walk}; {sums}"]
    if call.bias is not None:
        size = bias_gradient.bytes_of_sums(call, slots)
        memory = f"; then, with dQ's memory free again, its sums take {size / 1e6:,.1f} MB" if size else ""
        found.append(f"backward: the bias's gradient, if it is asked for, by a kernel that computes S and dP once more{memory}")
    return found


def kernels(call: Call) -> list[tuple]:
    """What `jit.compiled` takes: the launch function of all three kernels, that of what finds out what packed documents see, and a bias's."""
    config = config_of(call)
    ahead = [backward_tables.kernel(config)] if config.sees == "rows" else []
    return [*ahead, (LAUNCH, arguments, config), *([] if call.bias is None else bias_gradient.kernels(call))]


def backward(call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
    """dQ, dK, dV in the dtype of q; see `backends.Backend.backward`. Beside them it allocates two numbers a row and dQ in fp32, or what `lines`
    says instead.
    """
    batch, seqlen_q, heads_q, _ = call.q.shape
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (call.q, call.k, call.v))
    if d_q.numel() == 0 or d_k.numel() == 0:
        d_bias = torch.zeros_like(call.bias) if bias_grad else None
        return Gradients(d_q.zero_(), d_k.zero_(), d_v.zero_(), d_bias, _sink_alone(call, d_lse))
    config, board = config_of(call), _board(call.q.device)
    rows = -(-seqlen_q // config.tile_m) * config.tile_m
    statistics = torch.empty((2, batch, heads_q, rows), dtype=torch.float32, device=call.q.device)
    reaching = lse if d_lse is None else d_lse.to(torch.float32)
    tensors = *(_readable(x) for x in (call.q, call.k, call.v, o)), _rows(lse), _readable(d_o), _rows(reaching)
    d_bias = None
    with torch.cuda.device(call.q.device):
        _main(call, config, board, d_lse is not None, (*tensors, d_q, d_k, d_v, *statistics))
        if bias_grad:
            d_bias = bias_gradient.compute(call, (*tensors[:3], tensors[5]), statistics, board.slots)
    return Gradients(d_q, d_k, d_v, d_bias, None if call.sink is None else _sink(call.sink, *statistics, config.natural))


def _main(call: Call, config: Config, board: Board, has_d_lse: bool, tensors: tuple[Tensor, ...]) -> None:
    """All but the bias's gradient. tensors: the first of `backward.launch`, up to those of statistics. What it allocates is free when it returns."""
    (batch, seqlen_q, heads_q, _), d_q = call.q.shape, tensors[7]
    m_blocks = -(-seqlen_q // config.tile_m)
    sum_dq = torch.empty((batch, heads_q, m_blocks, config.numbers_of_sum(call.head_dim)), dtype=torch.float32, device=d_q.device)
    turns = torch.empty((batch, heads_q, m_blocks, config.counters), dtype=torch.int32, device=d_q.device)
    band = band_of(Full() if config.sees in ("rows", "runs") else call.mask, seqlen_q, call.seqlen_k)
    ends = last_seen(call, band)
    narrow = config.sees == "interval" and 2 * (band[5] - band[4]) < seqlen_q
    shared_from, shares, parts = _shared(config, call, board.slots)
    partial = _place_of_parts(config, parts, d_q)
    spoiled = torch.empty(_entries(config, call), dtype=torch.int32, device=d_q.device) if config.repairs else None
    counter = torch.empty(1 + parts, dtype=torch.int32, device=d_q.device) if config.stays or config.shares else None
    compute = jit.compiled(LAUNCH, arguments, config)
    numbers = *band, call.scale, changes.outer_log2(config, call.scale, call.softcap), *changes.factors(config, call.scale, call.softcap)
    changed = changes.operands(call)
    tables, apart = backward_tables.of_call(call, config)
    for first in range(0, batch, MOST):
        part = slice(first, first + MOST)
        given = *tensors, sum_dq, turns
        of_part, of_tables = (changed.bias, changed.slopes), tables
        if batch > MOST:
            given, of_tables = (x[part] for x in given), backward_tables.of_batch(tables, part)
            of_part = (x if x is None or x.shape[0] == 1 else x[part] for x in of_part)
        order = _order(config, min(batch - first, MOST), seqlen_q, heads_q, *call.k.shape[1:3], board, narrow)
        shared = partial, shared_from, shares
        compute(*given, spoiled, counter, *order, *shared, int(has_d_lse), *ends, *numbers, *of_part, changed.diagonal, *of_tables, *apart)


def last_seen(call: Call, band: tuple[int, ...]) -> tuple[int, int]:
    """From where on queries and keys are known to be padding, which no pair sees; at least 1."""
    if isinstance(call.mask, Documents):
        return max(1, call.mask.cu_seqlens_q[-1]), max(1, call.mask.cu_seqlens_k[-1])
    return max(1, band[1]), max(1, band[3])


def _entries(config: Config, call: Call) -> int:
    """Of the list of what is not finite: how many there are, all that there can be, and what is known of pieces of Q, dO, K and V."""
    of_keys = call.heads_k * -(-call.seqlen_k // 16) * config.repaired_parts[1]
    pieces = 2 * (call.heads_q * -(-call.seqlen_q // PIECE) + call.heads_k * -(-call.seqlen_k // PIECE))
    return 1 + call.batch * (of_keys + call.heads_q * -(-call.seqlen_q // 16) * config.repaired_parts[0] + pieces)


def _order(
    config: Config, batch: int, seqlen_q: int, heads_q: int, seqlen_k: int, heads_k: int, board: Board, narrow: bool
) -> tuple[int, ...]:
    """The fields of `backward_order.Order`, and how many heads take turns in by_queries.py. narrow: a window, much shorter than the queries."""
    slots = board.slots
    heads, group, n_blocks, m_blocks = batch * heads_k, heads_q // heads_k, -(-seqlen_k // config.tile_n), -(-seqlen_q // 128)
    behind = 3 * slots // 2 + n_blocks
    if config.sees == "all":
        return slots, 0, 1, 1 if config.dq_apart else _side_by_side(config, heads, group, seqlen_q, board), 1, behind
    longest = _as_much_as_the_longest(n_blocks, slots)
    rising, together = 0, _evenly(heads, longest)
    if config.sees == "from" and not config.dq_apart:
        rising, together = _causal(config, heads, group, seqlen_q, n_blocks, slots)
    elif config.sees == "rows" and not config.dq_apart:  # likely to be like causal ones, and shorter than all of them together
        together = min(heads, _coming_down(config, n_blocks, slots))
        rising = heads - together
    if narrow and group == 1 and not config.dq_apart:  # walks of equal length: few come down
        together = min(heads, NARROW if config.head_dim > 64 else 2 * NARROW)
        rising = heads - together
    abreast = _abreast(config, heads, group, seqlen_q)
    behind, left = behind + (abreast - 1) * n_blocks, rising % abreast
    return slots, rising - left, abreast, together + left, _evenly(batch * heads_q, _as_much_as_the_longest(m_blocks, slots)), behind


def _abreast(config: Config, heads: int, group: int, seqlen_q: int) -> int:
    """Rising heads that take turns: then a block's neighbours are some tiles ahead of it when it begins, so that it seldom waits for its turn at dQ.
    H200, 2026-11-22: benchmarks/results/exploratory/backward-units-h200.jsonl, run 3, backward-edges-h200.jsonl, run 6. A group's heads give such a
    lead by themselves.
    """
    if config.split == "columns" or group > 1:
        return 1
    fit = RISING // _read(config, group, seqlen_q)
    most = min(ABREAST, max(1, fit, min(FEW, 2 * fit) if config.head_dim > 64 else 1))
    return next(n for n in range(most, 0, -1) if config.sees != "rows" or heads % n == 0)


def _side_by_side(config: Config, heads: int, group: int, seqlen_q: int, board: Board) -> int:
    """Heads that take turns under a full mask: so many that a head has few blocks at a time, unless these then have to fetch all anew. H200,
    2026-11-22: benchmarks/results/exploratory/, backward-adders-h200.jsonl, runs 1 to 5, and backward-neighbours-h200.jsonl, run 2.
    """
    read = _read(config, group, seqlen_q)
    apart = math.isqrt(board.again * board.slots // read)  # n heads have slots / n blocks each, and read n / slots of n heads meanwhile
    most = max(1, min(board.slots // NEIGHBOURS, apart), AT_HAND // read)
    return -(-heads // -(-heads // most))


def _read(config: Config, group: int, seqlen_q: int) -> int:
    """Bytes of Q, dO and dQ that the blocks of one key head read."""
    return 2 * group * seqlen_q * (3 * config.head_dim + config.head_dim_v)


def _causal(config: Config, heads: int, group: int, seqlen_q: int, n_blocks: int, slots: int) -> tuple[int, int]:
    """(rising, together). Rising blocks of all multiprocessors are spread over as many queries as they have keys, whatever the length, of each head
    of the group; so much of Q, dO and dQ must fit into the L2 cache.
    """
    if group > 1 and _read(config, group, seqlen_q) >= CACHE:
        return 0, _evenly(heads, SHARING)
    together = min(heads, _coming_down(config, n_blocks, slots))
    return heads - together, together


def _coming_down(config: Config, n_blocks: int, slots: int) -> int:
    """How many heads come down after the rising ones. They touch all of their queries at a time: three of 24,576 are 75 MB at head_dim 128, for two
    percent of balance.
    """
    return max(2, 2 * slots // (n_blocks + 1) if config.head_dim >= 128 else 3 * _as_much_as_the_longest(n_blocks, slots) // 2)


def _shared(config: Config, call: Call, slots: int) -> tuple[int, int, int]:
    """(shared_from, shares) of `backward_order.Order`, and how many thread blocks leave a part of dK and dV to another: the blocks of the last
    wave are shared by as many as make the end the earliest, if their parts find room.
    """
    blocks, m_blocks = -(-call.seqlen_k // config.tile_n) * call.heads_k * call.batch, -(-call.seqlen_q // config.tile_m)
    last = blocks % slots
    if not config.shares or last == 0 or call.batch > MOST:
        return blocks, 1, 0
    room = call.q.numel() // (1 if config.one_block else 2) // (last * _numbers_of_part(config))

    def tiles(shares: int) -> int:
        return -(-last * shares // slots) * (-(-m_blocks // shares) + OF_A_BLOCK)

    most = min(MOST_OF_ONE_BLOCK if config.one_block else MOST_SHARES, max(1, m_blocks // OF_A_BLOCK), 1 + room)
    shares = min(range(1, 1 + most), key=tiles)
    return (blocks, 1, 0) if shares == 1 else (blocks - last, shares, last * (shares - 1))


def _numbers_of_part(config: Config) -> int:
    """Of dK and dV of a block of keys."""
    return config.tile_n * (config.head_dim + config.head_dim_v)


def _place_of_parts(config: Config, parts: int, d_q: Tensor) -> Tensor | None:
    """(parts, numbers) fp32, where blocks may share: the end of dQ, which is not written before the kernel is through (of the queries that
    `backward_shares.lent` counts); `one_block`, where it is, memory of its own, no more than dQ in fp32 would take.
    """
    if not config.shares:
        return None
    numbers = parts * _numbers_of_part(config)
    if config.one_block:
        place = torch.empty(numbers, dtype=torch.float32, device=d_q.device)
    else:
        place = d_q.view(-1)[d_q.numel() - 2 * numbers :].view(torch.float32)
    return place.view(parts, _numbers_of_part(config))


def _as_much_as_the_longest(blocks: int, slots: int) -> int:
    """Heads, whose blocks are 1, 2, ... `blocks` tiles long, that have as much work as `slots` of the longest. If as many take turns at the end,
    longest first, all multiprocessors come to an end at about the same time.
    """
    return -(-2 * slots // (blocks + 1))


def _evenly(heads: int, most: int) -> int:
    """How many take turns, about `most`, so that the last section has as many as the others."""
    return -(-heads // max(1, heads // most))


def _sink(sink: Tensor, lse: Tensor, minus_delta: Tensor, natural: bool) -> Tensor:
    """-sum(exp(z - L) delta) (Eq. 34) from what `prepare` left, (batch, heads_q, rows): L, in powers of two unless `natural`, and -delta."""
    sink_of_row = sink.float()[:, None]
    below = sink_of_row - lse if natural else sink_of_row / math.log(2) - lse
    below.clamp_(max=0.0)  # a large L may be rounded to below its sink
    weights = torch.exp(below) if natural else torch.exp2(below)
    return (weights * minus_delta).sum((0, 2)).to(sink.dtype)


def _sink_alone(call: Call, d_lse: Tensor | None) -> Tensor | None:
    """Without a key the sink is the whole log-sum-exp; one of -inf takes part in nothing."""
    if call.sink is None or d_lse is None:
        return None if call.sink is None else torch.zeros_like(call.sink)
    nothing = (call.sink == -math.inf)[:, None]
    return d_lse.float().masked_fill(nothing, 0.0).sum((0, 2)).to(call.sink.dtype)


def arguments(config: Config) -> list:
    """Stand-ins for `backward.launch`'s tensors, flag, band and scales."""
    from tilewise.sm90.dsl import Float32, Int32

    dtype = changes.dsl(config.dtype)
    batch, seqlen_q, seqlen_k, heads_q, heads_k, dim, dim_v, rows, m_blocks = (jit.size() for _ in range(9))
    q, d_q = (jit.tensor(dtype, batch, seqlen_q, heads_q, dim) for _ in range(2))
    o, d_o = (jit.tensor(dtype, batch, seqlen_q, heads_q, dim_v) for _ in range(2))
    k, d_k = (jit.tensor(dtype, batch, seqlen_k, heads_k, dim) for _ in range(2))
    v, d_v = (jit.tensor(dtype, batch, seqlen_k, heads_k, dim_v) for _ in range(2))
    given = [jit.tensor(Float32, batch, heads_q, seqlen_q, aligned=False) for _ in range(2)]
    made = [jit.tensor(Float32, batch, heads_q, rows) for _ in range(2)]
    sum_dq = jit.tensor(Float32, batch, heads_q, m_blocks, jit.size() if config.narrow else config.numbers_of_sum(config.head_dim))
    turns = jit.tensor(Int32, batch, heads_q, m_blocks, config.counters, aligned=False)
    counter = jit.tensor(Int32, jit.size(), aligned=False) if config.stays or config.shares else None
    spoiled = jit.tensor(Int32, jit.size(), aligned=False) if config.repairs else None
    order = [Int32(0) for _ in range(6)]
    partial = jit.tensor(Float32, jit.size(), jit.size()) if config.shares else None
    numbers = [*order, partial, *(Int32(0) for _ in range(11)), Float32(1.0), Float32(1.0)]
    tables = backward_tables.arguments(config, batch, heads_q, seqlen_q, seqlen_k, m_blocks)
    changed = changes.stand_ins(config, seqlen_q, seqlen_k, heads_q)
    return [
        q,
        k,
        v,
        o,
        given[0],
        d_o,
        given[1],
        d_q,
        d_k,
        d_v,
        *made,
        sum_dq,
        turns,
        spoiled,
        counter,
        *numbers,
        *changed,
        *tables,
        *backward_tables.query_arguments(config),
    ]


def _readable(x: Tensor) -> Tensor:
    """x, or a copy where the copy engine could not read it: rows that start between its addresses, or that lie on top of each other."""
    repeated = 0 in x.stride() and any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
    return x.contiguous() if repeated else jit.aligned(x)


def _rows(x: Tensor) -> Tensor:
    """x, or a copy whose last dimension is contiguous, also where that has one number."""
    return x if x.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


@cache
def _board(device: torch.device) -> Board:
    found = torch.cuda.get_device_properties(device)
    return Board(found.multi_processor_count, next(most for least, most in reversed(AGAIN) if found.L2_cache_size >= least))
