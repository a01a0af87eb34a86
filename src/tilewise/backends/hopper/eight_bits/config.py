"""How the forward pass in 8 bits is cut: literal data, one line a case."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from tilewise.backends.eight_bits import SIGNS
from tilewise.backends.eight_bits import TILE as GROUP
from tilewise.backends.hopper.forward.config import REGISTERS, SHARED_BYTES
from tilewise.backends.hopper.score_changes import ScoreChanges

WARP = 32  # threads
TOKENS = 16  # that have their values in the order of P's


@dataclass(frozen=True, kw_only=True)
class Config(ScoreChanges):
    """How a problem is cut and scheduled; with the launch function, the identity of a compiled kernel. Names as in forward/config.py."""

    dtype: torch.dtype  # of Q and K
    out: torch.dtype  # of O and, of the quantiser's, of the values that V was made from
    head_dim: int
    head_dim_v: int
    mask_kind: Literal["full", "causal", "band", "varlen", "tiles"]
    tile_m: int
    tile_n: int
    promote: bool  # each tile's P V is a sum of its own, added to O in fp32; otherwise the tensor cores go on from O, with 13 bits
    pieces: int = 1  # of O's columns, promoted one after another: at head_dim_v 256 there are no registers for all at once
    centred: bool = False  # K lacks a constant and, if not `wide_values`, V too, which has a scale for each channel
    wide_values: bool = False  # P and V have 16 bits, as O has; V is as it was given
    tiles_of_values: bool = False  # V has a scale for each GROUP keys; otherwise, if not `centred`, one a head
    tokens_k: bool = False  # each token of K has a scale
    tokens_v: bool = False  # likewise of V; the group's, of `tiles_of_values`, is then the largest
    q_stages: int = 1
    kv_stages: int = 2
    pingpong: bool = False
    hold: bool = False  # maxima are found before the wait for P V
    dynamic: bool = True
    cluster: int = 1
    sink: bool = False
    row_max: bool = False

    blocks = 1  # of a multiprocessor
    late = False
    bias_pairs = False
    from_zero = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pieces > 1 and (not self.promote or self.wide_values or self.pingpong):
            raise ValueError(
                f"pieces={self.pieces} goes with promote, without wide_values and pingpong, got promote={self.promote}, "
                f"wide_values={self.wide_values} and pingpong={self.pingpong}; leave pieces at 1"
            )

    @property
    def loses(self) -> bool:
        """Whether K had elements that int8 cannot say, NaN and infinities (`Scales.lost`)."""
        return self.centred and self.dtype == torch.int8

    @property
    def nan_scales(self) -> bool:
        """Whether scales of Q may be NaN, and those of K that are not the quantiser's."""
        return self.dtype == torch.int8 or not self.centred

    @property
    def channels(self) -> bool:
        """Whether O's channels have a scale and a constant."""
        return self.centred and not self.wide_values

    @property
    def value_bytes(self) -> int:
        """Of an element of V."""
        return 2 if self.wide_values else 1

    @property
    def hides(self) -> bool:
        """As in forward/config.py."""
        return self.mask_kind != "full"

    @property
    def consumers(self) -> int:
        return self.tile_m // 64

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS[self.consumers, self.blocks]

    @property
    def lean(self) -> bool:
        """Whether products read descriptors of `fragments.lean_slice`."""
        return self.head_dim > 128

    @property
    def pieces_of_O(self) -> int:
        """In how many pieces, a part of the columns each, O leaves through shared memory."""
        of_key = self.head_dim + self.value_bytes * self.head_dim_v
        operands = self.q_stages * self.tile_m * self.head_dim + self.kv_stages * self.tile_n * of_key
        sizes = [n for n in (1, 2, 4) if n == 1 or self.head_dim_v % (64 * n) == 0]
        return next(n for n in sizes if operands + 2 * self.tile_m * self.head_dim_v // n <= SHARED_BYTES - 2048)

    @property
    def shares(self) -> bool:
        """As in forward/config.py."""
        return self.mask_kind == "full" and not (self.dynamic or self.modified or self.sink)

    @property
    def partial_elements(self) -> int:
        return self.cluster * self.tile_m * (self.head_dim_v + 4 * (1 + self.row_max))


# (head_dim, head_dim_v): tiles; what is otherwise where there are few keys and V is centred; and where there are more than LONG queries.
# H100, driver 580.159, 2026-11-26, lab/instruments/fp8.py, 8k, TFLOP/s, full / causal.
TILES = {
    (64, 64): dict(tile_m=128, tile_n=128, promote=True, q_stages=2, kv_stages=4),
    (128, 128): dict(tile_m=128, tile_n=128, promote=True, q_stages=2, kv_stages=3),
    (256, 128): dict(tile_m=128, tile_n=128, promote=True, kv_stages=3),
    (256, 256): dict(tile_m=128, tile_n=128, promote=True, pieces=2),  # two launches of 128 columns: 791 / 733, given 817 / 766
}

# Up to how many keys a sum of tiles in the tensor cores' 13 bits is within the tolerance of 8 bits, if V is centred: at 8,192 it is not, by a
# few elements in 130,560. int8 1,399 / 1,301. At (64, 64) 192 queries a tile, not promoted, would have 588 / 535 for 574 / 522; but 4,096 queries
# are 22 tiles of 192 then, a thirtieth of which is nobody's.
FEW_KEYS = 4096
OF_FEW_KEYS = {(256, 256): {"promote": False, "pieces": 1}}

# Two blocks of a cluster share K and V, so each waits for the other at every tile. Under a causal mask their walks differ by a tile, which one of
# them lets pass, and masked tiles of the one hold up whole ones of the other. Causal, pairs / single blocks: (128, 128) e4m3 894 / 918, given 922 /
# 944, int8 873 / 873, with turns 857 / 889; (256, 256) int8 1,057 / 1,065, given 1,075 / 1,098; (64, 64) int8 497 / 474. Full: (128, 128) int8 925 /
# 873, given 993 / 971, e4m3 974 / 986; (256, 256) int8 1,203 / 1,146, given 1,163 / 1,143. (64, 64) in e4m3 takes 5 % less time by single blocks, 8
# causal (H200, 2026-11-29: lab/rows/variants-kept-paths-h200.jsonl).
LONG = 2048
USUAL_WHEN_LONG = {
    (128, 128, "full"): {"cluster": 2, "hold": True},
    (128, 128, "causal"): {"hold": True},
    (256, 256, "full"): {"cluster": 2},
}
# int8 that is centred; what is given may have scales of tiles, with which turns would spill 8 bytes.
QUANTISED_WHEN_LONG = USUAL_WHEN_LONG | {
    (64, 64, "full"): {"cluster": 2},
    (64, 64, "causal"): {"cluster": 2},
    (128, 128, "causal"): {"hold": True, "pingpong": True},
}

# Likewise with `wide_values`. K and V have three quarters of the bytes of 16 bits, and the products take three quarters of the time. So turns, pairs
# and tiles of queries are those of forward/config.py but for those that were measured: (128, 128) causal with turns 833 for 817; (256, 256) pairs and
# three stages 978 / 921, without 952 / 903, three stages alone 953 / 904, pairs alone 950 / 899.
TILES_OF_WIDE_VALUES = {
    (64, 64): dict(tile_m=192, tile_n=128, promote=False, q_stages=2, kv_stages=3, pingpong=True),
    (128, 96): dict(tile_m=128, tile_n=128, promote=False, q_stages=2, kv_stages=3),
    (128, 128): dict(tile_m=128, tile_n=128, promote=False, q_stages=2, kv_stages=3),
    (256, 128): dict(tile_m=128, tile_n=128, promote=False),
    (256, 256): dict(tile_m=128, tile_n=64, promote=False),
}
WIDE_VALUES_WHEN_LONG = {
    (128, 96, "full"): {"cluster": 2},
    (128, 96, "causal"): {"cluster": 2},
    (128, 128, "full"): {"cluster": 2},
    (128, 128, "causal"): {"cluster": 2, "pingpong": True},
    (256, 256, "full"): {"cluster": 2, "kv_stages": 3},
    (256, 256, "causal"): {"cluster": 2, "kv_stages": 3},
}
FEWER = 64  # keys of a tile where scores are changed, above (64, 64) where tokens have scales, or at (128, 128) promoted for runs: 128 would spill


def tile_dims(head_dim: int, head_dim_v: int, tiles: dict[tuple[int, int], dict] = TILES) -> tuple[int, int] | None:
    """The smallest tile that holds the heads; None where there is none."""
    return next((dims for dims in sorted(tiles) if head_dim <= dims[0] and head_dim_v <= dims[1]), None)


@lru_cache(maxsize=4096)
def configure(
    dtype: torch.dtype, out: torch.dtype, head_dim: int, head_dim_v: int, mask_kind: str, long: bool = False, few: bool = False, **fields
) -> Config:  # fmt: skip
    """The configuration for these heads; long: more than LONG queries; few: FEW_KEYS keys at most; fields: of `Config`, those of the call and others
    in place of the usual.
    """
    wide, centred = fields.get("wide_values"), fields.get("centred")
    tiles = TILES_OF_WIDE_VALUES if wide else TILES
    when_long = WIDE_VALUES_WHEN_LONG if wide else QUANTISED_WHEN_LONG if centred and dtype == torch.int8 else USUAL_WHEN_LONG
    dims = tile_dims(head_dim, head_dim_v, tiles)
    spilling = dims == (256, 256) and bool(centred or fields.get("tiles_of_values"))  # 8 to 136 bytes, if units were shared
    usual = {"dynamic": mask_kind != "full" or spilling, **tiles[dims], **(when_long.get((*dims, mask_kind), {}) if long else {})}
    if few and centred and not wide:
        usual |= OF_FEW_KEYS.get(dims, {})
    tokens = fields.get("tokens_k") or fields.get("tokens_v")
    if fields.get("softcap") or fields.get("alibi"):
        usual |= {"tile_n": FEWER, "cluster": 1, "dynamic": True}
    elif (tokens and dims != (64, 64)) or (mask_kind == "tiles" and dims == (128, 128) and usual["promote"]):
        usual["tile_n"] = FEWER
    return Config(dtype=dtype, out=out, head_dim=dims[0], head_dim_v=dims[1], mask_kind=mask_kind, **usual | fields)


# Quantiser

SLICES, SURVEYORS = 16, 256  # of a head's values, each a thread block's that looks for their extremes, and its threads
CHUNK = 16  # neighbouring channels of a thread, behind which the others that share a token have theirs


@dataclass(frozen=True, kw_only=True)
class QuantiserConfig:
    given: torch.dtype
    dtype: torch.dtype  # of Q and K
    head_dim: int  # as `Config` has it
    numbers: int  # of a thread, which has two registers for each
    cluster: int  # thread blocks for GROUP tokens
    ends: bool = False  # keys that count may end before the tensors do (`Given.ends`)
    values: bool = True  # V is made, too
    tokens_k: bool = False  # as `Config` has it, where V is transposed
    tokens_v: bool = False

    @property
    def loses(self) -> bool:
        """As in `Config`."""
        return self.dtype == torch.int8

    @property
    def surveyed(self) -> int:
        """Rows of `channels` in quantiser.py: K's centre and, where V is made, V's and its slices."""
        return 2 + SLICES if self.values else 1

    @property
    def tokens(self) -> int:
        """Of a block."""
        return GROUP // self.cluster

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.tokens * self.head_dim // self.numbers

    @property
    def blocks(self) -> int:
        """Of a multiprocessor."""
        return 65536 // (2 * self.numbers * self.threads)

    @property
    def sharers(self) -> int:
        """Threads that have a token of Q or K together."""
        return self.head_dim // self.numbers

    def channel(self, number: int) -> int:
        """Of the first sharer's."""
        return number // CHUNK * CHUNK * self.sharers + number % CHUNK

    @property
    def kind(self) -> str:
        """PTX's name of what is given."""
        return "bf16" if self.given == torch.bfloat16 else "f16"

    @property
    def infinities(self) -> int:
        """A pair's bits."""
        return 0x7F807F80 if self.given == torch.bfloat16 else 0x7C007C00


NUMBERS, CLUSTER = {64: 32, 128: 64, 256: 64}, {64: 1, 128: 2, 256: 2}  # by head_dim


def configure_quantiser(given: torch.dtype, dtype: torch.dtype, head_dim: int, **fields) -> QuantiserConfig:
    """fields: of `QuantiserConfig`, in place of the usual."""
    usual = {"numbers": NUMBERS[head_dim], "cluster": CLUSTER[head_dim]}
    return QuantiserConfig(given=given, dtype=dtype, head_dim=head_dim, **usual | fields)


@lru_cache
def sign_words(config: QuantiserConfig) -> list[list[int]]:
    """Which of a token's elements change their sign before the rotation: a word for each of its sharers, and each 32 elements that it has; the
    word's bits k and 16 + k are for the two of the k-th pair.
    """
    negative = [SIGNS[i // 32] >> (31 - i % 32) & 1 for i in range(config.head_dim)]

    def word(sharer: int, first: int) -> int:
        channels = [[config.channel(first + 2 * k + i) + CHUNK * sharer for k in range(16)] for i in range(2)]
        return sum(negative[channel] << (16 * i + k) for i in range(2) for k, channel in enumerate(channels[i]))

    return [[word(sharer, first) for first in range(0, config.numbers, 32)] for sharer in range(config.sharers)]
