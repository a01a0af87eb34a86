"""What a backward pass on Hopper is made of, found once for a call: its configuration, the order of its thread blocks, the sizes of its scratch."""

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from tilewise.backends.hopper import changes, visibility
from tilewise.backends.hopper.backward.config import ONE_BLOCK, PIECE, Config, configure
from tilewise.backends.hopper.operands import Turns
from tilewise.backends.tables.band import band_of
from tilewise.masks import Documents, Full, Mask, Part, SlidingWindow
from tilewise.problem import Call
from tilewise.sm90 import jit

MOST = 65535  # limit of a grid's second and third dimension: heads, batch
NARROW = 4  # descending heads under a window, the last ones; twice as many at head_dim 64 and below
CACHE = 8 << 20  # bytes: grouped heads descend where the blocks of one key head read more than this
WINDOW_CACHE = 4 << 20  # bytes: likewise under a window, where such heads have thread blocks of their own
NONE_ASCENDS = -1  # in place of a number, for documents on the GPU, however short their walks are
SHARING = 8  # grouped descending heads that take turns, so that chains of waiting blocks are short
LONG = 48 << 20  # bytes: heads without a group descend where one reads more than this. H200, 2026-11-30: lab/rows/backward-long-h200.jsonl
FAR = 4  # of such heads take turns
ABREAST = 8  # ascending heads that take turns, at most
ASCENDING = 16 << 20  # bytes that the ascending heads which take turns may read in all
FEW = 4  # this many heads above head_dim 64 may read twice ASCENDING
MOST_SHARES = 4  # thread blocks that share a block of keys of the last wave; each adds 0.1 MB of reads
MOST_OF_ONE_BLOCK = 12  # likewise where the head has a single block (H200, 2026-11-22: lab/rows/backward-few-keys-h200.jsonl)
CHAINS = 2  # tiles of dQ that heads which take turns have, for each multiprocessor, where they have fewer queries than keys
SHORT = 2048  # keys of a window, of which the query heads of a group are walked with one after another
OF_A_BLOCK = 4  # tiles of queries that take as long as a thread block's prologue and epilogue
OF_A_HEAD = 4  # blocks of keys of one head that run at a time under tables, at least, so that most of what they read is in the L2 cache
NEIGHBOURS = 8  # blocks of keys of one head that run at a time under a full mask; each begins one tile later than the one before
AT_HAND = 16 << 20  # bytes that heads which take turns may read in all, where that leaves fewer than NEIGHBOURS
# (smallest L2 cache, bytes that all running blocks may read before a tile is read again, once neighbours have drifted apart evenly). 50 MB: H100,
# 2026-11-23, lab/rows/backward-neighbours-h100.jsonl; 60 MB: H200, as below.
AGAIN = (0, 2 << 20), (60 << 20, 24 << 20)


class Gpu(NamedTuple):
    """A GPU."""

    num_sms: int  # multiprocessors
    again: int  # bytes, as in AGAIN


@cache
def gpu_of(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, next(most for least, most in reversed(AGAIN) if found.L2_cache_size >= least))


@dataclass(frozen=True)
class Plan:
    """Everything about one call on one GPU that its tensors do not decide; sizes in elements."""

    config: Config
    m_blocks: int  # tiles of queries
    band: tuple[int, ...]  # the integers of operands.Band
    last_q: int  # operands.Scalars
    last_k: int
    turns: tuple[tuple[slice, Turns], ...]  # for each launch its batch entries, at most MOST, and the order of its blocks
    parts: int  # thread blocks that hand their dK and dV to another one
    scratch: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]  # shapes and dtypes of operands.Scratch

    @classmethod
    def of(cls, call: Call, gpu: Gpu) -> "Plan":
        config = config_of(call)
        band = band_of(Full() if config.mask_kind in ("varlen", "tiles") else call.mask, call.seqlen_q, call.seqlen_k)
        narrow = config.mask_kind == "band" and 2 * (band[5] - band[4]) < call.seqlen_q
        shared_from, shares, parts = shared(config, call, gpu.num_sms)
        heads_q, heads_k = call.q.shape[2], call.k.shape[2]
        turns = []
        for first in range(0, call.batch, MOST):
            batch = min(call.batch - first, MOST)
            order = _order(config, batch, call.seqlen_q, heads_q, call.seqlen_k, heads_k, gpu, narrow)
            turns.append((slice(first, first + batch), Turns(*order, shared_from, shares)))
        m_blocks = -(-call.seqlen_q // config.tile_m)
        return cls(config, m_blocks, band, *last_seen(call, band), tuple(turns), parts, _scratch(config, call, m_blocks, parts))

    @property
    def lends(self) -> bool:
        """Whether Scratch.partial lies where dQ goes later, and has no memory of its own."""
        return lends(self.config, self.parts)


def config_of(call: Call) -> Config:
    few, mask_kind = call.seqlen_k <= ONE_BLOCK, visibility.mask_kind(call.mask)
    config = configure(call.q.dtype, call.head_dim, call.head_dim_v, mask_kind, call.seqlen_q, few, **changes.fields(call))
    if call.wide_keys and not jit.why_no_compiler():  # prebuilt kernels round
        config = wide_keys(config)
    if _q_heads_in_turn(config, call):
        return config.but(q_heads_in_turn=True)
    return block_per_q_head(config) if _apart(config, call) else config


def _q_heads_in_turn(config: Config, call: Call) -> bool:
    """Whether a mask has tables, and query heads of one group see different keys, or few keys. Of a part's heads as of all: dK and dV have the same
    bits.
    """
    if config.mask_kind != "tiles" or not config.by_keys or call.group == 1:
        return False
    if call.mask.extent[1] == 1:
        return isinstance(call.mask, Part) and _is_short(call.mask.mask)
    if isinstance(call.mask, Part):
        return True
    planes = call.mask.planes(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q)
    return any(end % call.group for plane in planes for end in (plane.heads.start, plane.heads.stop))


def _is_short(mask: Mask) -> bool:
    """Whether it is a window of few keys: the query heads of a group one after another take 0.73 to 0.80 of the time there (1,024 keys), and 1.15 to
    1.3 times as long for documents and chunks of 4,096 and more (H200, 2026-11-29: lab/rows/masks-under-tables-h200.jsonl).
    """
    return isinstance(mask, SlidingWindow) and mask.left is not None and mask.right is not None and mask.left + mask.right < SHORT


@lru_cache(1024)
def wide_keys(config: Config) -> Config:
    """With dK and dV in fp32. Two kernels would spill 8 bytes by that: under tables at head_dim 64, which therefore has tiles of 64 queries, and
    of one block of keys at 128 without a mask: its consumers need the registers that ROOMY gives to others. dQ has the same bits.
    """
    config = replace(config, wide_keys=True)
    if config.mask_kind == "tiles" and config.tile_m == 128 and not config.one_block:
        return config.but(tile_m=64)
    if config.one_block and config.mask_kind == "full" and not (config.modified or config.dropout):
        return config.but(roomy=False)
    return config


@lru_cache(1024)
def block_per_q_head(config: Config) -> Config:
    """With thread blocks for each query head of a group. They are persistent, as ptxas spills where the end of a block has a branch otherwise."""
    return config.but(block_per_q_head=True, persistent=True)


def _apart(config: Config, call: Call) -> bool:
    """Whether query heads of a group have thread blocks of their own: where all that the walks of a key head's blocks read at a time is much."""
    if (
        call.group == 1
        or config.mask_kind not in ("causal", "band")
        or config.modified
        or config.dropout
        or config.lean
        or not config.staged
        or call.batch > MOST
    ):
        return False
    if config.mask_kind == "causal":
        return _read(config, call.group, call.seqlen_q) >= CACHE
    *_, lo, hi = band_of(call.mask, call.seqlen_q, call.seqlen_k)
    return _read(config, call.group, min(call.seqlen_q, hi - lo + config.tile_n)) >= WINDOW_CACHE


def last_seen(call: Call, band: tuple[int, ...]) -> tuple[int, int]:
    """From where on queries and keys are known to be padding, which no pair sees; at least 1."""
    if isinstance(call.mask, Documents):
        return max(1, call.mask.cu_seqlens_q[-1]), max(1, call.mask.cu_seqlens_k[-1])
    return max(1, band[1]), max(1, band[3])


def _scratch(config: Config, call: Call, m_blocks: int, parts: int) -> tuple:
    of_heads, of_rows = (call.batch, call.heads_q), m_blocks * config.tile_m
    return (
        ((*of_heads, of_rows), torch.float32),
        ((*of_heads, of_rows), torch.float32),
        ((*of_heads, m_blocks, config.elements_of_sum(call.head_dim)), torch.float32),
        ((*of_heads, m_blocks, config.counters), torch.int32),
        ((_entries(config, call),), torch.int32) if config.repairs else None,
        ((1 + parts,), torch.int32) if config.counts else None,
        ((parts, elements_of_part(config)), torch.float32) if config.partial and not lends(config, parts) else None,
    )


def _entries(config: Config, call: Call) -> int:
    """Of the list of what is not finite: how many there are, all that there can be, and what is known of pieces of Q, dO, K and V."""
    of_keys = call.heads_k * -(-call.seqlen_k // 16) * config.repaired_parts[1]
    pieces = 2 * (call.heads_q * -(-call.seqlen_q // PIECE) + call.heads_k * -(-call.seqlen_k // PIECE))
    return 1 + call.batch * (of_keys + call.heads_q * -(-call.seqlen_q // 16) * config.repaired_parts[0] + pieces)


def _order(config: Config, batch: int, seqlen_q: int, heads_q: int, seqlen_k: int, heads_k: int, gpu: Gpu, narrow: bool) -> tuple[int, ...]:
    """The first fields of operands.Turns. narrow: a window, much shorter than the queries."""
    num_sms = gpu.num_sms
    if config.block_per_q_head:  # the order of heads without groups
        heads_k = heads_q
    heads, group, n_blocks, m_blocks = batch * heads_k, heads_q // heads_k, -(-seqlen_k // config.tile_n), -(-seqlen_q // 128)
    finish_lag = 3 * num_sms // 2 + n_blocks
    if config.mask_kind == "full":
        return num_sms, 0, 1, 1 if config.separate_dq_kernel else _side_by_side(config, heads, group, seqlen_q, gpu), 1, finish_lag
    longest, summed = _as_much_as_the_longest(n_blocks, num_sms), not config.separate_dq_kernel
    ascending, heads_interleaved = 0, _evenly(heads, longest)
    if summed and config.mask_kind == "causal":
        ascending, heads_interleaved = _causal(config, heads, group, seqlen_q, n_blocks, num_sms)
    elif summed and config.mask_kind == "tiles":  # whatever rows and heads a part has: dQ is added up in the order of the whole call
        heads_interleaved = _evenly(heads, num_sms // OF_A_HEAD)
    elif summed and config.mask_kind == "varlen" and group > 1:  # in 0.75 to 0.89 of the ascending order's time: backward-long-h200.jsonl
        ascending, heads_interleaved = NONE_ASCENDS, _evenly(heads, SHARING)
    elif summed and config.mask_kind == "varlen":  # likely to be like causal ones, and shorter than all of them together
        heads_interleaved = min(heads, _descending(config, n_blocks, num_sms))
        ascending = heads - heads_interleaved
    if summed and narrow and group == 1:  # walks of equal length: few heads descend
        heads_interleaved = min(heads, NARROW if config.head_dim > 64 else 2 * NARROW)
        ascending = heads - heads_interleaved
    chains = group * -(-seqlen_q // config.tile_m)  # of additions to dQ, one a tile, for the blocks of a key head
    crowd = 1
    if config.by_keys and config.mask_kind in ("causal", "band") and n_blocks > chains:
        crowd = min(heads, -(-CHAINS * num_sms // chains))
        heads_interleaved = max(heads_interleaved, crowd)
        ascending = min(ascending, heads - heads_interleaved)
    heads_per_step = max(_heads_per_step(config, heads, group, seqlen_q), crowd)
    finish_lag, left = finish_lag + (heads_per_step - 1) * n_blocks, ascending % heads_per_step
    return (
        num_sms,
        ascending - left,
        heads_per_step,
        heads_interleaved + left,
        _evenly(batch * heads_q, _as_much_as_the_longest(m_blocks, num_sms)),
        finish_lag,
    )


def _heads_per_step(config: Config, heads: int, group: int, seqlen_q: int) -> int:
    """The number of ascending heads that take turns. A block's neighbours are then some tiles ahead when it begins, and it seldom waits at dQ. The
    heads of a group give such a lead by themselves. H200, 2026-11-22: lab/rows/backward-units-h200.jsonl, run 3, backward-edges-h200.jsonl, run 6.
    """
    if not config.by_keys or group > 1:
        return 1
    fit = ASCENDING // _read(config, group, seqlen_q)
    most = min(ABREAST, max(1, fit, min(FEW, 2 * fit) if config.head_dim > 64 else 1))
    return next(n for n in range(most, 0, -1) if config.mask_kind != "varlen" or heads % n == 0)


def _side_by_side(config: Config, heads: int, group: int, seqlen_q: int, gpu: Gpu) -> int:
    """Heads that take turns under a full mask: enough that a head has few blocks at a time, unless these then have to fetch all anew. H200,
    2026-11-22: lab/rows/, backward-adders-h200.jsonl, runs 1 to 5, and backward-neighbours-h200.jsonl, run 2; LONG: backward-long-h200.jsonl.
    """
    read = _read(config, group, seqlen_q)
    again = gpu.again if read < LONG else AGAIN[0][1]  # no cache holds a head: as few at a time as the smallest one wants
    apart = math.isqrt(again * gpu.num_sms // read)  # n heads have num_sms / n blocks each, and read n / num_sms of n heads meanwhile
    most = max(1, min(gpu.num_sms // NEIGHBOURS, apart), AT_HAND // read)
    return -(-heads // -(-heads // most))


def _read(config: Config, group: int, seqlen_q: int) -> int:
    """Bytes of Q, dO and dQ that the blocks of one key head read."""
    return config.dtype.itemsize * group * seqlen_q * (3 * config.head_dim + config.head_dim_v)


def _causal(config: Config, heads: int, group: int, seqlen_q: int, n_blocks: int, num_sms: int) -> tuple[int, int]:
    """(ascending, together). The ascending blocks that run at a time cover as many queries as keys, whatever the length, of each head of the group;
    that much of Q, dO and dQ must fit into the L2 cache. Where it does not, all descend: each block follows a tile behind the one before it, and
    reads what that has just read.
    """
    most, together = (CACHE, SHARING) if group > 1 else (LONG, FAR)
    if _read(config, group, seqlen_q) >= most:
        return 0, _evenly(heads, together)
    heads_interleaved = min(heads, _descending(config, n_blocks, num_sms))
    return heads - heads_interleaved, heads_interleaved


def _descending(config: Config, n_blocks: int, num_sms: int) -> int:
    """The number of descending heads, after the ascending ones. They touch all of their queries at a time: three of 24,576 are 75 MB at head_dim 128,
    for two percent of balance.
    """
    return max(2, 2 * num_sms // (n_blocks + 1) if config.head_dim >= 128 else 3 * _as_much_as_the_longest(n_blocks, num_sms) // 2)


def shared(config: Config, call: Call, num_sms: int) -> tuple[int, int, int]:
    """(shared_from, shares) of operands.Turns, and how many thread blocks leave a part of dK and dV to another: the blocks of the last
    wave are shared by as many as make the end the earliest, if their parts find room.
    """
    blocks, m_blocks = -(-call.seqlen_k // config.tile_n) * call.heads_k * call.batch, -(-call.seqlen_q // config.tile_m)
    if config.block_per_q_head:
        return blocks * call.group, 1, blocks
    last = blocks % num_sms
    if not config.shares or last == 0 or call.batch > MOST:
        return blocks, 1, 0
    room = call.q.numel() // (1 if config.one_block else 2) // (last * elements_of_part(config))

    def tiles(shares: int) -> int:
        return -(-last * shares // num_sms) * (-(-m_blocks // shares) + OF_A_BLOCK)

    most = min(MOST_OF_ONE_BLOCK if config.one_block else MOST_SHARES, max(1, m_blocks // OF_A_BLOCK), 1 + room)
    shares = min(range(1, 1 + most), key=tiles)
    return (blocks, 1, 0) if shares == 1 else (blocks - last, shares, last * (shares - 1))


def lends(config: Config, parts: int) -> bool:
    """As `Plan.lends`: where no thread block has written dQ by then, nor is it a group's dK and dV that is summed up."""
    return parts > 0 and not (config.one_block or config.block_per_q_head)


def elements_of_part(config: Config) -> int:
    """Of dK and dV of a block of keys."""
    return config.tile_n * (config.head_dim + config.head_dim_v)


def _as_much_as_the_longest(blocks: int, num_sms: int) -> int:
    """Heads that have as much work as `num_sms` of the longest blocks; the blocks of a head are 1, 2, ... `blocks` tiles long. If as many take turns
    at the end, longest first, all multiprocessors come to an end at about the same time.
    """
    return -(-2 * num_sms // (blocks + 1))


def _evenly(heads: int, most: int) -> int:
    """How many take turns, about `most`, so that the last section has as many as the others."""
    return -(-heads // max(1, heads // most))
