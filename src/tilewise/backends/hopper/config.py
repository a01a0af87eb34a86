"""Tiles and schedules of the Hopper kernels: literal data with provenance, one line a case."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

SHARED_BYTES = 227 * 1024 - 1024  # of a thread block, less what barriers and alignment take
REGISTERS = {2: (24, 240), 3: (32, 160)}  # of a producer's and a consumer's thread, by consumers; a multiprocessor has 64 K


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a problem is cut and scheduled; with the launch function, the identity of a compiled kernel."""

    dtype: torch.dtype
    head_dim: int  # of the tile; the tensors' may be smaller
    head_dim_v: int
    sees: Literal["all", "until", "interval", "rows", "runs"]  # visible.py says what each means
    tile_m: int
    tile_n: int
    kv_stages: int = 2
    pingpong: bool = True
    late: bool = False  # O is rescaled when the next product is under way
    draws: bool = True  # a thread block's next tile from a counter, not by a fixed step
    cluster: int = 1  # thread blocks that fetch their tiles of keys together
    softcap: bool = False
    bias: torch.dtype | None = None  # its dtype, where there is one
    alibi: bool = False
    diagonal: bool = False  # ALiBi's distance counts from a row's own place
    sink: bool = False

    @property
    def consumers(self) -> int:
        return self.tile_m // 64

    @property
    def own_O(self) -> bool:
        """Whether O has shared memory of its own; otherwise it takes Q's, and the next tile's Q has to wait for it."""
        operands = self.tile_m * self.head_dim + self.kv_stages * self.tile_n * (self.head_dim + self.head_dim_v)
        return 2 * (operands + self.tile_m * self.head_dim_v) <= SHARED_BYTES

    @property
    def natural(self) -> bool:
        """Whether the softmax takes logits in natural units; otherwise scores that still lack a factor (scores.py)."""
        return self.alibi or self.bias is not None

    @property
    def modified(self) -> bool:
        return self.softcap or self.natural

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS[self.consumers]


# (head_dim, head_dim_v): for each way to see, (tile_m, tile_n, turns).
# H100 80GB HBM3, 2026-11-21, the ladder's K6 at 8k: at (128, 128) causal, turns cost 4 %; at (64, 64) they are worth 2 to 16 %.
# (64, 64) with intervals: three warpgroups of 160 registers a thread would spill 150 bytes.
TILES = {
    (64, 64): {"all": (192, 128, True), "until": (192, 128, True), "interval": (128, 128, True)},
    (96, 96): dict.fromkeys(("all", "until", "interval"), (128, 128, True)),
    (128, 128): {"all": (128, 128, True), "until": (128, 128, False), "interval": (128, 128, False)},
    (192, 128): {"all": (128, 128, True), "until": (128, 128, False), "interval": (128, 128, False)},
    (192, 192): {"all": (128, 112, False), "until": (128, 112, False), "interval": (128, 96, False)},
    (256, 256): dict.fromkeys(("all", "until", "interval"), (128, 80, False)),
}


# tile_n where there would be spills otherwise: with softcap or rows of their own, and with logits.
SOFTCAP_OR_ROWS = {(192, 192): 96, (256, 256): 64}
LOGITS = {(192, 192): 80, (256, 256): 64} | dict.fromkeys(((64, 64), (96, 96), (128, 128), (192, 128)), 96)


def tile_dims(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """The smallest tile that holds the heads; None where there is none."""
    return next((dims for dims in sorted(TILES) if head_dim <= dims[0] and head_dim_v <= dims[1]), None)


def configure(dtype: torch.dtype, head_dim: int, head_dim_v: int, sees: str, **changes) -> Config:
    """`changes` of the scores: softcap, bias, alibi, diagonal, sink."""
    if changes.get("bias") and sees == "until":
        sees = "interval"  # a few bytes would spill in between the loops of "until"
    dims = tile_dims(head_dim, head_dim_v)
    tile_m, tile_n, turns = TILES[dims]["interval" if sees in ("rows", "runs") else sees]
    config = Config(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], sees=sees, tile_m=tile_m, tile_n=tile_n, pingpong=turns, **changes)
    if config.natural:
        return replace(config, tile_m=128, tile_n=LOGITS[dims])
    if config.softcap or sees == "rows":
        return replace(config, tile_m=128, tile_n=SOFTCAP_OR_ROWS.get(dims, tile_n))
    return config
