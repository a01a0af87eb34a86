"""The gradient of an additive bias on Hopper, seen from torch: the call of bias/kernel.py, and the last sum."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tilewise.backends.hopper import changes, short
from tilewise.backends.hopper.backward import tables as backward_tables
from tilewise.backends.hopper.operands import Band, BiasTensors, Changes, Given, KeyTables, LikeO, LikeV, Scratch
from tilewise.backends.hopper.score_changes import ScoreChanges
from tilewise.backends.hopper.stand_ins import StandIns
from tilewise.backends.tables import documents
from tilewise.backends.tables.band import band_of
from tilewise.masks import Full
from tilewise.problem import Call
from tilewise.sm90 import jit
from tilewise.views import part

LAUNCH = "tilewise.backends.hopper.backward.bias.kernel:launch"
TILE = 128  # queries, and keys
COLUMNS = 64  # of a stage
WAVES = 2  # of thread blocks that there should be


@dataclass(frozen=True, kw_only=True)
class Config(ScoreChanges):
    """What the kernel is compiled for: head_dim, and the fields of `config.Config` that scores/ goes by."""

    dtype: torch.dtype
    mask_kind: Literal["band", "varlen", "tiles"]  # as in visible/, but any single band
    bias_pairs: bool
    rows: bool  # the bias has a row for each query
    whole: bool  # dB is written in the bias's dtype, not in fp32 for the host to sum up
    chunks: int = 1  # of COLUMNS columns, of Q and K
    chunks_v: int = 1  # of dO and V
    tile_m: int = TILE
    tile_n: int = TILE
    registers: tuple[int, int] = (24, 240)  # of a producer's and a consumer's thread
    sink: bool = False

    @property
    def separate_dq_kernel(self) -> bool:
        """No: there is no dQ, so tables for its kernel are not wanted."""
        return False

    @property
    def consumers(self) -> int:
        return self.tile_m // 64

    @property
    def stages(self) -> int:
        """Of the ring, 32 KB each, next to what threads keep of the bias."""
        return 6 if self.bias.itemsize == 2 else 5

    @property
    def behind(self) -> int:
        """How many groups of products may be under way when the next is asked for; no more than dP has, so that S is complete when all are."""
        return min(self.chunks_v, 2)

    @property
    def vector(self) -> int:
        """Elements of a bias in 16 bytes."""
        return 16 // self.bias.itemsize

    @property
    def vectors(self) -> int:
        """That a thread keeps: of its two rows, or of one where all are the same."""
        return (2 if self.rows else 1) * self.tile_n // (4 * self.vector)


def parts_of(call: Call, multiprocessors: int) -> int:
    """Into how many parts each sum is cut, so that there is work for the whole machine, and memory for them: what dQ in fp32 takes."""
    bias, m_blocks, n_blocks = call.bias, -(-call.seqlen_q // TILE), -(-call.seqlen_k // TILE)
    owners = bias.shape[0] * bias.shape[1]
    blocks, items = n_blocks * owners, call.batch * call.heads_q // owners
    if by_rows(call):
        blocks *= m_blocks
    else:
        items *= m_blocks
    room = (call.q.numel() - _numbers_of_total(bias)) // bias.numel()
    return max(1, min(WAVES * multiprocessors // blocks, items, room))


def bytes_of_sums(call: Call, multiprocessors: int) -> int:
    """Of the memory that the gradient takes in addition to its own tensor."""
    parts = parts_of(call, multiprocessors)
    return 0 if parts == 1 else 4 * (parts * call.bias.numel() + _numbers_of_total(call.bias))


def _numbers_of_total(bias: Tensor) -> int:
    """Of all parts together, in fp32, where that is not dB itself."""
    return 0 if bias.dtype == torch.float32 else bias.numel()


def by_rows(call: Call) -> bool:
    """Whether the bias has a row for each query."""
    return call.bias.shape[2] > 1 or call.seqlen_q == 1


def config_of(call: Call, rows: bool, whole: bool) -> Config:
    """`whole`: dB needs no last sum."""
    mask_kind = "varlen" if documents.by_rows(call.mask) else "band" if call.mask.kind in ("full", "band") else "tiles"
    chunks, chunks_v = (-(-x.shape[-1] // COLUMNS) for x in (call.q, call.v))
    shape = {"rows": rows, "whole": whole, "chunks": chunks, "chunks_v": chunks_v}
    return Config(dtype=call.q.dtype, mask_kind=mask_kind, bias_pairs=changes.in_pairs(call.bias), **shape, **changes.fields(call))


def kernels(call: Call) -> list[jit.Kernel]:
    """For every shape that the bias may have."""
    configs = [config_of(call, rows, whole) for rows in (True, False) for whole in (True, False)]
    ahead = [backward_tables.kernel(configs[0])] if configs[0].mask_kind == "varlen" else []
    return [*ahead, *(jit.Kernel(LAUNCH, arguments, config) for config in configs)]


def kernel(call: Call, multiprocessors: int) -> jit.Kernel:
    """Of `kernels`, the one that the call launches on a GPU with that many multiprocessors."""
    return jit.Kernel(LAUNCH, arguments, config_of(call, by_rows(call), parts_of(call, multiprocessors) == 1))


def bind(call: Call, multiprocessors: int) -> Callable[[Given, Scratch, Changes], Tensor]:
    """What gives dB in the bias's shape and dtype, of the tensors of the kernels before."""
    parts, like, empty = parts_of(call, multiprocessors), call.bias, short.allocator(call.bias.device)
    config = config_of(call, by_rows(call), parts == 1)
    band = Band(
        *band_of(call.mask if config.mask_kind == "band" else Full(), call.seqlen_q, call.seqlen_k), backward_tables.of_call(call, config)
    )
    band = short.as_operand(band, call.q.is_cuda)
    kernel, shift, shape, dtype = jit.compiled(LAUNCH, arguments, config), call.seqlen_k - call.seqlen_q, (parts, *like.shape), like.dtype
    layout = shape, short.strides(shape), dtype if config.whole else torch.float32
    of_bias = tuple(like.shape), short.strides(like.shape), 0

    def compute(given: Given, scratch: Scratch, changed: Changes) -> Tensor:
        sums, (inner, factor, bias, slopes, diagonal, _, draw) = empty(*layout), changed
        changed = Changes(inner, factor, bias, slopes, diagonal, shift, draw)
        kernel(given.V, given.dO, BiasTensors(given.Q, given.K, scratch.lse, scratch.minus_delta, sums), band, changed)
        return part(sums, *of_bias) if config.whole else sums.sum(0).to(dtype)

    return compute


def arguments(config) -> list:
    """Stand-ins for the launch's operands."""
    made = StandIns(config)
    return [*map(made, (LikeV, LikeO, BiasTensors)), made(Band, tables=KeyTables), made(Changes, shift=int)]
