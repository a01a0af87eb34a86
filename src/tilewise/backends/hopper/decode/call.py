"""Decoding on Hopper, seen from torch: what the kernel covers, and what it takes."""

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

import torch

from tilewise.backends.hopper import changes
from tilewise.backends.hopper.decode import append_call, prefix, workspace
from tilewise.backends.hopper.decode.append_call import TABLES
from tilewise.backends.hopper.decode.bound import Decoder, Prefixed, kept
from tilewise.backends.hopper.decode.config import IN_FLIGHT, LEAST_BOX, TILE_M, TILES, Config, Rotary, configure, latent_dims, tile_dims
from tilewise.backends.hopper.decode.config import shipped as shipped_configs
from tilewise.backends.hopper.decode.extents import capacity_of, few_keys, latent, rows_of, rows_of_unit
from tilewise.backends.hopper.decode.operands import Lengths, Prior, Tensors, Work
from tilewise.backends.hopper.decode.workspace import Need
from tilewise.backends.hopper.forward import plan
from tilewise.backends.hopper.operands import Scores
from tilewise.backends.hopper.stand_ins import Floats, StandIns
from tilewise.backends.tables.window import Window, window_of
from tilewise.errors import EIGHT_BITS
from tilewise.problem import DecodeCall
from tilewise.sm90 import jit, prebuilt

LAUNCH = "tilewise.backends.hopper.decode.kernel:launch"  # by name, so that a kernel from the cache needs no DSL
LATENT = "tilewise.backends.hopper.decode.latent:launch"
MOST_BYTES = 1 << 30  # of pieces, with a split
MAX_IDLE_FRACTION = 1 / 20  # of the multiprocessors, so that the others' work is even


class Cut(NamedTuple):
    """How a launch's work is divided among thread blocks."""

    aligned: bool = True  # blocks side by side read the key heads of the same tokens
    rows: int = 0  # of a unit, at most; 0: `extents.rows_of_unit`
    elements_per_extra_tile: int = (
        4096  # of O in a piece: for each 4096 of them a block has at least one tile more, as a piece takes time to be added up
    )
    solo_speedup_x4: int | None = None  # in place of `Config.solo_speedup_x4`; 0: shares are always equal
    fitted: bool = True  # equal shares end with units, where that leaves few thread blocks idle
    polls: int = 32  # of a block with nothing else to do, at least, for the other pieces of its unit: predicted to take 15 us


USUAL = Cut()
LATENT_FACTOR = 4  # as many for a latent cache: its tiles take twice as long, and twice as many threads add its pieces up


def why_not(call: DecodeCall) -> list[str]:
    """Sentences that say why the kernel does not cover the call; empty where it does."""
    dtype, dims, wrong = call.q.dtype, (call.q.shape[-1], call.v_cache.shape[-1]), []
    cached, multiple = {call.k_cache.dtype, call.v_cache.dtype}, jit.BYTES // call.k_cache.itemsize
    if dtype not in (torch.bfloat16, torch.float16) or not (cached == {dtype} or cached <= set(EIGHT_BITS)):
        wrong.append(
            f"it computes bf16 and fp16, and takes caches of q's dtype or of 8 bits, not {dtype}, {call.k_cache.dtype} and {call.v_cache.dtype}"
        )
    elif cached == {dtype} and latent_dims(*dims) and not any(dim % multiple for dim in dims):
        wrong += _why_not_latent(call)
    elif tile_dims(*dims) is None or any(dim % multiple for dim in dims):
        wrong.append(
            f"it takes head_dim and head_dim_v up to {max(TILES)[0]} that are multiples of {multiple}, not {dims[0]} and {dims[1]}"
        )
    if window_of(call.mask) is None:
        wrong.append(f"it takes masks of one band on the bottom right diagonal, not {call.mask}")
    if call.scale <= 0.0:
        wrong.append(f"it takes a positive scale, not {call.scale}")
    if call.cache_batch_idx is not None and call.page_table is not None:
        wrong.append("it takes cache_batch_idx or page_table, not both")
    if call.split is not None and call.split < 1:
        wrong.append(f"it takes a split of at least 1 key, not {call.split}")
    if call.rotary is not None:
        wrong += _why_not_rotary(call)
    if 0 in call.k_cache.shape or call.q.numel() == 0:
        wrong.append("there is nothing to read")
    if not wrong and call.split is not None and (size := _need(call, config_of(call)).bytes) > MOST_BYTES:
        wrong.append(f"with a split of {call.split} keys it would keep {size >> 20} MB of pieces, more than {MOST_BYTES >> 20}")
    if not wrong and jit.why_no_compiler():
        lacking = [each.identity for each in kernels(call) if not prebuilt.entry(*each.identity, jit.arch())]
        wrong += [prebuilt.why_no_kernel(*each) for each in lacking]
    return wrong


def _why_not_latent(call: DecodeCall) -> list[str]:
    dim, dim_v, wrong = call.k_cache.shape[3], call.v_cache.shape[3], []
    if not latent(call):
        wrong.append(f"with head_dim {dim} v_cache has to be a view of the same memory, k_cache[..., :{dim_v}]")
    if call.page_table is not None and call.k_cache.shape[1] % LEAST_BOX:
        wrong.append(f"with head_dim {dim} it takes pages of a multiple of {LEAST_BOX} tokens, not of {call.k_cache.shape[1]}")
    if call.rotary is not None:
        wrong.append(f"it rotates no queries of head_dim {dim}")
    return wrong


def _why_not_rotary(call: DecodeCall) -> list[str]:
    cos, sin, interleaved = call.rotary
    multiple, wrong = (4 if interleaved else 8), []
    if cos.shape[1] % multiple or 0 in cos.shape:
        wrong.append(f"it rotates pairs in multiples of {multiple}, not {cos.shape[1]}, at 1 position or more, not {cos.shape[0]}")
    if cos.dtype != sin.dtype or cos.dtype not in TABLES:
        wrong.append(f"it takes rotary tables of one dtype, bf16, fp16 or fp32, not {cos.dtype} and {sin.dtype}")
    if prefix.pays(call):
        wrong.append("it rotates no queries with a common prefix")
    return wrong


def bound(call: DecodeCall) -> Decoder | Prefixed | None:
    """As `bind`, once for all calls like this one."""
    return kept(_key(call), lambda: bind(call))


def bind(call: DecodeCall, cut: Cut = USUAL, **tuning) -> Decoder | Prefixed | None:
    """What computes calls like this one; None where the kernel does not cover them. tuning: fields of `Config` in place of the usual."""
    if why_not(call):
        return None
    if not prefix.pays(call):
        return _decoder(call, config_of(call, **tuning), cut)
    first = prefix.of(call)
    return Prefixed(
        call, _decoder(first, config_of_prefix(first, **tuning), cut), _decoder(call, config_of(call, onto=True, **tuning), cut)
    )


def _decoder(call: DecodeCall, config: Config, cut: Cut) -> Decoder:
    kernel = jit.compiled(*kernel_of(config))
    need, device = _need(call, config, cut), call.q.device
    window = window_of(call.mask)
    assert window is not None  # or `why_not` had said so
    return Decoder(call, kernel, window, _scores(call, config), lambda: workspace.of(need, device), config.out or call.q.dtype)


def _key(call: DecodeCall) -> tuple:
    """What a decoder depends on, and whether the kernel covers a call."""
    q, k, v, ragged = call.q, call.k_cache, call.v_cache, call.cu_seqlens_q is not None
    indices = call.seqlens, call.page_table, call.cu_seqlens_q, call.cache_batch_idx, call.leftpad
    there = *(None if x is None else x.dtype for x in indices), *(x is None for x in (call.tree, call.alibi_slopes, call.sink))
    sizes = q.shape, k.shape[2:], v.shape[3], call.max_seqlen_q, 0 in k.shape
    paged = 0 if call.page_table is None else k.shape[1]
    counts = (k.shape[1], None if call.page_table is None else call.page_table.shape[1]) if call.split or call.shared_prefix else ()
    options = call.split, call.shared_prefix, call.mask, call.scale, call.softcap, call.share, call.out_dtype
    rotary = call.rotary and (
        call.rotary.cos.shape[1],
        call.rotary.cos.shape[0] > 0,
        call.rotary.cos.dtype,
        call.rotary.sin.dtype,
        call.rotary.interleaved,
    )
    return (
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        ragged,
        call.seqlens.shape[0],
        paged,
        *sizes,
        latent_dims(k.shape[3], v.shape[3]) is not None and latent(call),
        there,
        rotary,
        *(None if x is None else x.dim() == 3 or x.stride() for x in (call.k_scale, call.v_scale)),
        few_keys(call),
        tuple(rows_of(call).items()),
        rows_of_unit(call),
        counts,
        *options,
    )


def config_of(call: DecodeCall, **tuning) -> Config:
    page_size = call.k_cache.shape[1] if call.page_table is not None else None
    return configure(
        call.q.dtype,
        call.q.shape[-1],
        call.v_cache.shape[3],
        page_size,
        few=few_keys(call),
        **{"out": call.out_dtype} | rows_of(call) | tuning,
        softcap=call.softcap > 0.0,
        alibi=call.alibi_slopes is not None,
        sinks=call.sink is not None,
        ragged=call.cu_seqlens_q is not None,
        entries=call.cache_batch_idx is not None,
        leftpad=call.leftpad is not None,
        share=call.share is not None,
        common=call.kind if isinstance(call, prefix.Common) else "",
        tree=call.tree is not None,
        split=call.split is not None,
        cached=None if call.k_cache.dtype == call.q.dtype else (call.k_cache.dtype, call.v_cache.dtype),
        scales=tuple("" if x is None else "token" if x.dim() == 3 else "head" for x in (call.k_scale, call.v_scale)),
        wide=tuple(name for name, x in _lengths_of(call)._asdict().items() if x is not None and x.dtype == torch.int64),
        rotary=call.rotary and Rotary(call.rotary.cos.shape[1], call.rotary.interleaved, call.rotary.cos.dtype),
    )


def _lengths_of(call: DecodeCall) -> Lengths:
    found = Lengths(call.seqlens, call.page_table, call.cu_seqlens_q, call.cache_batch_idx, call.leftpad, call.tree)
    if isinstance(call, prefix.Common):
        return found._replace(all_seqlens=call.all_seqlens, all_cu_seqlens_q=call.all_cu_seqlens_q)
    return found


def config_of_prefix(call: DecodeCall, **tuning) -> Config:
    """Of `prefix.of(call)`. Where softmax and products overlap, a tile takes 1,200 clocks, less than it takes to come from memory. So that more than
    the next one is on its way, stages are twice as many. (Chunks read the same keys again and again, from the L2 cache.)
    """
    return config_of(call, out=torch.float32, **{"in_flight": 2 * IN_FLIGHT} if rows_of(call).get("overlap") else {}, **tuning)


def shipped(dtype: torch.dtype, head_dim: int, head_dim_v: int, changes: Iterable[str] = ()) -> list[jit.Kernel]:
    """For calls with such heads, and for appending; none where no tile holds them. changes: fields of `Config` that are True."""
    dims = head_dim, head_dim_v
    if tile_dims(*dims) is None and (latent_dims(*dims) is None or any(dim % (jit.BYTES // dtype.itemsize) for dim in dims)):
        return []
    configs = shipped_configs(dtype, head_dim, head_dim_v, **dict.fromkeys(changes, True))
    return [*map(kernel_of, configs), *append_call.shipped(dtype)]


def kernels(call: DecodeCall) -> list[jit.Kernel]:
    """Every kernel that the call launches."""
    configs = [config_of(call)]
    if prefix.pays(call):
        configs = [config_of_prefix(prefix.of(call)), config_of(call, onto=True)]
    return [*map(kernel_of, configs)]


def kernel_of(config: Config) -> jit.Kernel:
    return jit.Kernel(LATENT if config.latent else LAUNCH, arguments, config)


def arguments(config: Config) -> list:
    """Stand-ins for the launch's operands."""
    made = StandIns(config)
    sink = Floats("heads_q") if config.sinks else None
    return [*map(made, (Tensors, Lengths, Work, Window, Prior if config.onto else None)), made(Scores, sink=sink)]


def columns(units: int, blocks: int) -> int:
    """As many columns of key heads, or of tiles of rows (scheduler.py), as leave few of `blocks` thread blocks idle."""
    return max(n for n in range(1, units + 1) if units % n == 0 and blocks % n / blocks <= MAX_IDLE_FRACTION)


def fitted(units: int, blocks: int) -> int:
    """As many of a column's thread blocks as have whole units each, or as each unit has whole ones; all, where that left more than few idle."""
    found = blocks // units * units if units <= blocks else -(-units // -(-units // blocks))
    return found if (blocks - found) / blocks <= MAX_IDLE_FRACTION else blocks


def _need(call: DecodeCall, config: Config, cut: Cut = USUAL) -> Need:
    queries = max(call.max_seqlen_q, 1) if config.ragged else call.q.shape[1]
    dim, heads_k = call.v_cache.shape[3], call.k_cache.shape[2]
    group = call.q.shape[-2] // heads_k
    rows, abreast = queries * group, heads_k
    blocks = plan.num_sms(call.q.device) * config.blocks
    if config.latent:  # tiles of rows that every sequence has; of ragged queries it may have one
        abreast = -(-(group if config.ragged else rows) // TILE_M)
    side_by_side = columns(abreast, blocks) if cut.aligned else 1
    grid, of_unit = (side_by_side, blocks // side_by_side), min(cut.rows or rows_of_unit(call), config.tile_m)
    stairs, kept = stairs_of(group, config.tile_n, of_unit), min(of_unit, rows)
    if call.split is None:
        known = not (config.latent or config.causal_tiles or (config.ragged and rows > of_unit))  # how many units a column has
        if cut.fitted and known:
            grid = side_by_side, fitted(call.seqlens.shape[0] * -(-rows // of_unit) * heads_k // side_by_side, grid[1])
        elements = cut.elements_per_extra_tile * (LATENT_FACTOR if config.latent else 1)
        solo_speedup_x4 = config.solo_speedup_x4 if cut.solo_speedup_x4 is None else cut.solo_speedup_x4
        return Need(
            *grid, 2 * blocks, 2 * blocks, kept, dim, queries, max(1, kept * dim // elements), 0, 0, *stairs, solo_speedup_x4, cut.polls
        )
    split = -(-call.split // config.tile_n)
    most = -(-capacity_of(call) // (split * config.tile_n))
    units = call.seqlens.shape[0] * heads_k * -(-rows // of_unit)
    return Need(*grid, units * most, units * (2 + -(-most // config.group)), kept, dim, queries, 1, split, most, *stairs, polls=cut.polls)


def stairs_of(group: int, tile_n: int, rows: int) -> tuple[int, int]:
    """(tiles of rows, logarithm of tiles of keys): under a diagonal, that many tiles of rows further, keys end that many tiles later."""
    common = gcd(group * tile_n, rows)
    return group * tile_n // common, (rows // common).bit_length() - 1


def _scores(call: DecodeCall, config: Config) -> Scores:
    slopes, sink = (None if x is None else x.float().contiguous() for x in (call.alibi_slopes, call.sink))
    scaled = changes.outer_log2(config, call.scale, call.softcap)
    return Scores(scaled, *changes.factors(config, call.scale, call.softcap), None, slopes, None, sink, None, 0)
