"""Caches of 8 bits: a warpgroup makes q's dtype of every tile, between the copy engine that brings it and the tensor cores that multiply it.

K and V come as they lie, a token after another. They go on, multiplied by their tokens' scales where tokens have some, in the layouts that the
products read; scales of whole heads wait for S and O, since elements of 8 bits are exact in 16. So nothing but the cache's own rounding is lost. The
way is 12 bytes of shared memory for each that memory brings, and two or three operations an element: less time than memory takes.
"""

import torch

from tilewise.backends.hopper.decode import loads, scheduler
from tilewise.backends.hopper.decode.config import Config
from tilewise.backends.hopper.decode.operands import Tensors
from tilewise.backends.hopper.decode.scheduler import Piece, Place, Shape, Start
from tilewise.sm90 import tma
from tilewise.sm90.dsl import Constexpr, Float32, Int32, arch, const_expr, cute, cutlass, pipeline, range_constexpr
from tilewise.sm90.pointers import known

THREADS, WARPS = 128, 4
WIDE, BYTES = 8, 16  # elements that a thread widens at a time, and what they take then
SCALED, WIDENED = 5, 6  # named barriers

HALVES = {  # of four elements, as two words of two in fp16, exactly
    torch.float8_e4m3fn: (
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }"
    ),
    # 1024 + 128 + x has x + 128 for its last bits.
    torch.int8: (
        "{ .reg .b32 x, y; xor.b32 x, {$r0}, 0x80808080; prmt.b32 y, x, 0x64646464, 0x5140; prmt.b32 x, x, 0x64646464, 0x7362;"
        " mov.b32 {$w0}, y; mov.b32 {$w1}, x; }"
    ),
}
UNBIASED = 1024.0 + 128.0


@cute.jit
def widen(
    tensors: Tensors, raw: tuple, wide: tuple, filled: tuple, ready: tuple, broadcast: cute.Tensor, shape: Shape, begin: Start,
    config: Constexpr[Config],
):  # fmt: skip
    """raw: K and V as they come, (tile_n, dim, load_stages), filled: their pipes; wide: as the products read them, (tile_n, dim, kv_stages), and
    ready: theirs. told: (tile_n,) fp32 in shared memory, for scales.
    """
    come, go = tma.at_first(config.load_stages), tma.at_first_empty(config.kv_stages)
    shares = begin.shares
    b, start, at = begin.place.sequence, begin.place.start, begin.place.at
    common = scheduler.owner_of(shape, config) if const_expr(config.common) else None
    while at < shares.end:
        sequence = scheduler.sequence_of(b, shape, config)
        span = scheduler.span_of(sequence, shares, shape, config)
        if at - start >= span:
            b += 1
            start += span
        else:
            piece = scheduler.piece_of(Place(b, start, at), sequence, shares, shape, config)
            owner = common if const_expr(config.common) else b
            come, go = widen_piece(tensors, raw, wide, (filled, ready), broadcast, come, go, owner, piece, shape, config)
            at = piece.next


@cute.jit
def widen_piece(
    tensors: Tensors, raw: tuple, wide: tuple, pipes: tuple, broadcast: cute.Tensor, come: pipeline.PipelineState,
    go: pipeline.PipelineState, b: Int32, piece: Piece, shape: Shape, config: Constexpr[Config],
) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:  # fmt: skip
    (filled, ready), scales, ahead = pipes, (tensors.k_scale, tensors.v_scale), cute.make_rmem_tensor(2, Float32)
    for i in range_constexpr(2):
        if const_expr(by_token(scales[i])):
            ahead[i] = scale_of(scales[i], b, piece.first, piece, shape, config)
    for n in cutlass.range(piece.first, piece.last, unroll=1):
        for i in range_constexpr(2):
            filled[i].consumer_wait(come)
            ready[i].sync_object_empty.wait(go.index, go.phase)
            if const_expr(by_token(scales[i])):
                if thread_of() < config.tile_n:
                    broadcast[thread_of()] = ahead[i]
                arch.barrier(barrier_id=SCALED, number_of_threads=THREADS)
                ahead[i] = scale_of(scales[i], b, n + 1, piece, shape, config)
            dim = const_expr((config.head_dim, config.head_dim_v)[i])
            widen_tile(
                raw[i][None, None, come.index], wide[i][None, None, go.index].iterator.toint(), broadcast if by_token(scales[i]) else None,
                dim, config.cached[i], config,
            )  # fmt: skip
            tma.release(filled[i], come)
            loads.hand_on(ready[i], go, WIDENED, warp_of(), THREADS)
        come.advance()
        go.advance()
    return come, go


def by_token(scale: cute.Tensor | None) -> bool:
    return scale is not None and len(scale.shape) == 3


def thread_of() -> Int32:
    """Of the warpgroup."""
    return arch.thread_idx()[0] % THREADS


def warp_of() -> Int32:
    return arch.make_warp_uniform(arch.warp_idx()) % WARPS


@cute.jit
def scale_of(scale: cute.Tensor, b: Int32, n: Int32, piece: Piece, shape: Shape, config: Constexpr[Config]) -> Float32:
    """Of this thread's token of tile n; 1 where no row sees the token, or there is no such page. scale: (entries or pages, places, heads_k)."""
    token, found = n * config.tile_n + thread_of(), Float32(1.0)
    if token >= piece.begin and token < piece.end and thread_of() < config.tile_n:
        entry, place = b, token
        if const_expr(config.box > 0):
            number, place = divmod(token, shape.page_size)
            entry = scheduler.number(shape.lengths.pages[b, None], number)
        elif const_expr(config.entries):
            entry = scheduler.number(shape.lengths.entries, b)
        if entry >= 0 and entry < scale.shape[0]:
            found = scale[entry, place, piece.head_k]
    return found


@cute.jit
def widen_tile(
    sRaw: cute.Tensor, address: Int32, scales: cute.Tensor | None, dim: Constexpr[int], kind: Constexpr, config: Constexpr[Config]
):  # fmt: skip
    """sRaw: (tile_n, dim), to a stage at `address`, as loads.py has it there."""
    of_token, width = const_expr(dim // WIDE), const_expr(loads.columns(dim) // WIDE)
    turns = const_expr(config.tile_n * of_token // THREADS)
    words = cute.make_rmem_tensor((2, turns), Int32)
    for i in range_constexpr(turns):
        which = i * THREADS + thread_of()
        source = known(sRaw[which // of_token, None].iterator + which % of_token * WIDE, WIDE)
        cute.autovec_copy(cute.make_tensor(cute.recast_ptr(source, dtype=Int32), cute.make_layout(2)), words[None, i])
    for i in range_constexpr(turns):
        which = i * THREADS + thread_of()
        token, piece = which // of_token, which % of_token
        scale = None if const_expr(scales is None) else scales[token]
        found = [*widened(words[0, i], scale, kind, config), *widened(words[1, i], scale, kind, config)]
        to = address + loads.place_of(token, piece, width, config) * BYTES
        arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[to, *found])


def widened(word: Int32, scale: Float32 | None, kind: torch.dtype, config: Config) -> list[Int32]:
    """Four elements of 8 bits, as two words in config.dtype."""
    halves = arch.inline_ptx(HALVES[kind], write_only_types=[Int32, Int32], read_only_args=[word])
    if kind == torch.float8_e4m3fn and config.dtype == torch.float16 and scale is None:
        return list(halves)
    name = "bf16x2" if config.dtype == torch.bfloat16 else "f16x2"
    found = []
    for pair in halves:
        code = "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
        numbers = arch.inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[pair])
        numbers = [x - UNBIASED if kind == torch.int8 else x for x in numbers]
        numbers = [x if scale is None else x * scale for x in numbers]
        found.append(arch.inline_ptx(f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Int32], read_only_args=numbers))
    return found
