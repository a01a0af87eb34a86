"""What a kernel is compiled with on top of the call: tiles, warps, stages. Literal data, each row with where it comes from."""

from typing import Literal, NamedTuple

import torch

from tilewise.backends.eight_bits import E4M3, RECIPES
from tilewise.backends.triton.targets import Target
from tilewise.problem import Call

# What a call does to scores: nothing; a softcap or ALiBi; a bias or dropout, which differ by pair.
Weight = Literal["plain", "scores", "pairs"]


class Config(NamedTuple):
    """Tiles of `tile_m` queries and `tile_n` keys."""

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    fused: bool = True  # a product and a sum are rounded once, which Triton is about to leave off by default
    registers: int = 0  # of a thread at most, so that a multiprocessor holds one block more; 0: as many as ptxas likes

    def options(self, target: Target) -> dict[str, object]:
        """For Triton's compiler."""
        options: dict[str, object] = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fused}
        return options | ({"maxnreg": self.registers} if self.registers else {})


THREE_BLOCKS = 168  # registers a thread, of three blocks of four warps that share a multiprocessor's 65,536
ROWS = 128  # of a program of the small kernels
SMALL = Config(ROWS, ROWS, 4, 1)  # of those


class Parts(NamedTuple):
    """A head_dim as tiles of powers of two: `first` and, where padding one tile would cost more than an eighth, `second`."""

    first: int
    second: int  # 0: there is none
    cut: int  # columns that exist of the last part, 0 where all do


LEAST_DIM = 16  # what a product of tiles takes
MOST_DIM = 256


def parts(dim: int, halves: bool = False) -> Parts:
    """The parts of a head_dim up to 2 MOST_DIM. halves: two above 32 anyway, for what takes more registers, or tensor memory, of each."""
    whole = power(dim)
    first = whole // 2
    second = power(dim - first)
    if whole <= MOST_DIM and not (halves and whole > 32) and (8 * (whole - dim) <= whole or first + second >= whole):
        return Parts(whole, 0, dim % whole)
    return Parts(first, second, (dim - first) % second)


def power(dim: int) -> int:
    """The smallest power of two that holds it and that a product of tiles takes."""
    return max(LEAST_DIM, 1 << (dim - 1).bit_length())


CLASSES = 64, 128, 192, 256, 512  # of head_dims


def head_class(head_dim: int, head_dim_v: int) -> int:
    """The smallest of CLASSES that holds both."""
    return next(each for each in CLASSES if max(head_dim, head_dim_v) <= each)


COMPILED = "compiled with Triton 3.9.0, never timed"
FITS = "compiled with Triton 3.9.0 to see what fits, never timed"
TIMED = "timed, NVIDIA H100 80GB HBM3, 2026-11-27"
TIMED_AGAIN = "timed, NVIDIA H200, 2026-11-30"
TIMED_FOR_OLDER = "timed, kernels for sm_80 on an NVIDIA H200, 2026-11-29"
TIMED_FOR_MASKS = "timed, NVIDIA H200, 2026-11-28, windows of 1,024 keys and documents of 1,024 tokens"
FOR_TABLES = "compiled with Triton 3.9.0, as what is timed without tables spills 160 bytes with them; never timed"
TABLE: dict[tuple[str, str, int, int], tuple[Config, str]] = {
    # (family, pass, bytes of an element, head class): configuration, provenance
    ("sm80", "forward", 2, 128): (Config(128, 128, 8, 2), TIMED_FOR_OLDER),
    ("sm80", "dkdv", 2, 64): (Config(64, 64, 4, 3), TIMED_FOR_OLDER),
    ("sm80", "dkdv", 2, 128): (Config(64, 32, 4, 3), TIMED_FOR_OLDER),
    ("sm80", "dq", 2, 64): (Config(128, 32, 4, 3), TIMED_FOR_OLDER),
    ("sm80", "dq", 2, 128): (Config(128, 32, 4, 2), TIMED_FOR_OLDER),
    ("sm86", "dkdv", 2, 64): (Config(64, 64, 4, 3), TIMED_FOR_OLDER),
    ("sm86", "dkdv", 2, 128): (Config(64, 32, 4, 3), TIMED_FOR_OLDER),
    ("sm86", "dq", 2, 64): (Config(128, 32, 4, 3), TIMED_FOR_OLDER),
    ("sm86", "dq", 2, 128): (Config(128, 32, 4, 2), TIMED_FOR_OLDER),
    ("sm90", "forward", 2, 64): (Config(128, 64, 4, 3), TIMED),
    ("sm90", "forward", 2, 128): (Config(128, 128, 8, 3), TIMED),
    ("sm90", "dkdv", 2, 64): (Config(64, 64, 4, 4), TIMED_AGAIN),
    ("sm90", "dkdv", 2, 128): (Config(64, 128, 8, 3), TIMED_AGAIN),
    ("sm90", "dq", 2, 64): (Config(64, 64, 4, 3, registers=THREE_BLOCKS), TIMED_AGAIN),
    ("sm90", "dq", 2, 128): (Config(128, 64, 8, 3), TIMED),
    ("sm90", "forward", 2, 192): (Config(128, 64, 8, 3), TIMED_AGAIN),
    ("sm90", "dkdv", 2, 192): (Config(64, 64, 8, 2), TIMED_AGAIN),
    ("sm90", "dq", 2, 192): (Config(128, 64, 8, 2), TIMED_AGAIN),
    ("sm90", "forward", 2, 256): (Config(128, 64, 8, 2), TIMED_AGAIN),
    ("sm90", "dkdv", 2, 256): (Config(64, 64, 8, 2), TIMED_AGAIN),
    ("sm90", "dq", 2, 256): (Config(128, 32, 8, 2), TIMED_AGAIN),
    ("sm90", "chunk", 2, 128): (Config(64, 32, 4, 3), TIMED_AGAIN),
    ("sm90", "decode", 2, 576): (Config(16, 32, 4, 2), TIMED_AGAIN),
    ("sm90", "chunk", 2, 576): (Config(64, 32, 8, 2), TIMED_AGAIN),
    ("sm80", "decode", 2, 576): (Config(16, 32, 4, 2), COMPILED),
    ("sm80", "chunk", 2, 576): (Config(32, 32, 8, 2), COMPILED),
    ("sm86", "decode", 2, 576): (Config(16, 32, 4, 2), COMPILED),
    ("sm86", "chunk", 2, 576): (Config(32, 16, 8, 2), COMPILED),
    ("sm100", "decode", 2, 576): (Config(16, 32, 4, 2), COMPILED),
    ("sm100", "chunk", 2, 576): (Config(32, 32, 8, 2), COMPILED),
    ("sm120", "decode", 2, 576): (Config(16, 32, 4, 2), COMPILED),
    ("sm120", "chunk", 2, 576): (Config(32, 16, 8, 2), COMPILED),
}


class Instead(NamedTuple):
    """A configuration in place of what TABLE and `lighter` have, for head_dims above `above` and up to `most`, what a call does to scores, and kinds
    of masks (`bound.kind_of`), all if there are none here.
    """

    family: str
    purpose: str
    size: int  # bytes of an element
    above: int
    most: int
    weight: Weight
    masks: tuple[str, ...]
    config: Config
    provenance: str


INSTEAD = [  # of several that fit the first
    Instead("sm90", "forward", 2, 0, 64, "plain", ("window", "varlen"), Config(64, 64, 4, 3, registers=THREE_BLOCKS), TIMED_AGAIN),
    Instead("sm90", "forward", 2, 64, 128, "plain", ("window", "varlen"), Config(64, 64, 4, 3), TIMED_FOR_MASKS),
    Instead("sm90", "dkdv", 2, 64, 128, "plain", ("window", "varlen"), Config(32, 64, 4, 4), TIMED_AGAIN),
    Instead("sm90", "dkdv", 2, 64, 128, "plain", ("tiles",), Config(32, 128, 8, 3), FOR_TABLES),
    Instead("sm90", "forward", 2, 192, 256, "plain", ("tiles",), Config(128, 32, 8, 2), FOR_TABLES),
    Instead("sm90", "dkdv", 2, 192, 256, "plain", ("tiles",), Config(32, 64, 8, 2), FITS),
    Instead("sm90", "dq", 2, 64, 128, "plain", ("window",), Config(64, 64, 4, 2), TIMED_AGAIN),
    Instead("sm90", "dq", 2, 64, 128, "plain", ("varlen",), Config(64, 64, 4, 2), TIMED_FOR_MASKS),
    Instead("sm90", "forward", 2, 64, 80, "plain", ("band",), Config(128, 64, 4, 3), TIMED_AGAIN),
    Instead("sm90", "forward", 2, 32, 48, "pairs", ("band", "window", "varlen"), Config(128, 64, 4, 3), TIMED_AGAIN),
    Instead("sm90", "forward", 2, 0, 64, "scores", ("band",), Config(64, 64, 4, 3, registers=THREE_BLOCKS), TIMED_AGAIN),
    Instead("sm90", "forward", 2, 64, 128, "scores", ("band",), Config(128, 128, 8, 3), TIMED_AGAIN),
    Instead("sm90", "dq", 2, 0, 64, "scores", ("band",), Config(64, 64, 4, 3, registers=THREE_BLOCKS), TIMED_AGAIN),
    Instead("sm100", "dkdv", 2, 64, 128, "scores", ("tiles",), Config(64, 64, 8, 2), FITS),
    Instead("sm100", "dq", 2, 64, 128, "scores", ("tiles",), Config(64, 64, 8, 2), FITS),
    Instead("sm90", "dkdv", 2, 0, 64, "scores", (), Config(64, 64, 4, 4), TIMED_AGAIN),
    Instead("sm90", "dkdv", 2, 64, 128, "scores", (), Config(32, 64, 4, 4), TIMED_AGAIN),
    Instead("sm90", "dkdv", 2, 192, 256, "pairs", (), Config(64, 64, 8, 2), TIMED_AGAIN),
    Instead("sm80", "dq", 2, 64, 128, "scores", (), Config(128, 32, 8, 2), FITS),
    Instead("sm86", "dq", 2, 64, 128, "scores", (), Config(128, 32, 8, 2), FITS),
    Instead("sm80", "dkdv", 2, 64, 128, "pairs", (), Config(32, 64, 8, 2), FITS),
    Instead("sm86", "dkdv", 2, 64, 128, "pairs", (), Config(32, 64, 8, 2), FITS),
    Instead("sm90", "forward", 2, 0, 64, "pairs", (), Config(64, 64, 4, 3), TIMED_AGAIN),
    Instead("sm90", "forward", 2, 64, 128, "pairs", (), Config(128, 64, 8, 3), TIMED_AGAIN),
    Instead("sm90", "dkdv", 2, 0, 64, "pairs", (), Config(64, 64, 4, 2), TIMED_AGAIN),
    Instead("sm90", "dkdv", 2, 64, 128, "pairs", (), Config(32, 128, 8, 4), TIMED_AGAIN),
    Instead("sm90", "dq", 2, 0, 64, "pairs", (), Config(64, 64, 4, 3), TIMED_AGAIN),
    Instead("sm90", "dq", 2, 64, 128, "pairs", (), Config(128, 64, 8, 3), TIMED_AGAIN),
]
FITTING: dict[tuple[str, int, int], dict[str, tuple[int, int, int, int]]] = {
    # pass, bytes of an element, head class: {families: (tile_m, tile_n, warps, stages)}
    ("forward", 2, 64): {
        "sm80 sm86 sm100": (128, 64, 4, 3),
        "sm120": (128, 64, 8, 3),
        "cdna gfx950": (128, 64, 4, 1),
        "rdna": (64, 64, 4, 1),
    },
    ("forward", 2, 128): {
        "sm80 sm100": (128, 64, 8, 3),
        "sm86 sm120": (128, 64, 8, 2),
        "cdna gfx950": (128, 64, 4, 1),
        "rdna": (32, 32, 8, 1),
    },
    ("forward", 2, 192): {
        "sm80 sm90 sm100": (128, 64, 8, 2),
        "sm86": (128, 32, 8, 2),
        "sm120": (128, 16, 8, 2),
        "cdna gfx950": (128, 32, 8, 1),
        "rdna": (32, 32, 8, 1),
    },
    ("forward", 2, 256): {
        "sm80": (64, 64, 8, 2),
        "sm86 sm120": (64, 32, 8, 2),
        "sm90 sm100": (128, 32, 8, 2),
        "cdna gfx950": (64, 32, 4, 1),
        "rdna": (32, 16, 8, 1),
    },
    ("forward", 2, 512): {
        "sm80": (64, 32, 8, 2),
        "sm86 sm120": (32, 16, 8, 2),
        "sm90 sm100": (32, 32, 8, 2),
        "cdna gfx950": (32, 32, 4, 1),
        "rdna": (16, 16, 8, 1),
    },
    ("forward", 4, 64): {"sm80 sm86 sm90 sm100 sm120": (64, 32, 4, 2), "cdna gfx950": (128, 64, 4, 1), "rdna": (32, 32, 8, 1)},
    ("forward", 4, 128): {"sm80 sm86 sm90 sm100 sm120": (32, 32, 8, 2), "cdna gfx950": (64, 32, 4, 1), "rdna": (32, 16, 8, 1)},
    ("forward", 4, 192): {
        "sm80 sm90 sm100": (32, 32, 8, 2),
        "sm86": (32, 16, 8, 2),
        "sm120": (32, 16, 8, 1),
        "cdna gfx950": (32, 32, 4, 1),
        "rdna": (16, 16, 8, 1),
    },
    ("forward", 4, 256): {"sm80 sm86 sm90 sm100 sm120 rdna": (16, 16, 8, 1), "cdna gfx950": (32, 32, 4, 1)},
    ("forward", 4, 512): {"sm80 sm86 sm90 sm100 sm120 rdna": (16, 16, 8, 1), "cdna gfx950": (32, 16, 4, 1)},
    # q and k of int8, with v of 16 bits:
    ("forward", 1, 64): {
        "sm80": (128, 64, 4, 3),
        "sm86 sm90 sm100": (128, 64, 4, 2),
        "sm120": (128, 64, 8, 2),
        "cdna gfx950": (128, 64, 4, 1),
        "rdna": (64, 64, 4, 1),
    },
    ("forward", 1, 128): {
        "sm80": (128, 64, 8, 3),
        "sm86 sm90 sm100 sm120": (128, 64, 8, 2),
        "cdna gfx950": (128, 64, 4, 1),
        "rdna": (64, 32, 8, 1),
    },
    ("forward", 1, 192): {
        "sm80 sm86 sm120": (128, 16, 8, 2),
        "sm90 sm100": (64, 64, 8, 2),
        "cdna gfx950": (64, 32, 4, 1),
        "rdna": (32, 32, 8, 1),
    },
    ("forward", 1, 256): {"sm80 sm86 sm90 sm100 sm120": (64, 32, 8, 2), "cdna gfx950": (64, 32, 4, 1), "rdna": (32, 32, 8, 1)},
    ("forward", 1, 512): {"sm80 sm86 sm90 sm100 sm120": (32, 32, 8, 2), "cdna gfx950": (32, 32, 4, 1), "rdna": (16, 16, 8, 1)},
    ("dkdv", 2, 64): {"sm80 sm86 sm100 sm120": (64, 128, 8, 2), "cdna": (32, 128, 4, 1), "gfx950": (64, 128, 4, 1), "rdna": (16, 32, 8, 1)},
    ("dkdv", 2, 128): {
        "sm80 sm86": (32, 128, 8, 2),
        "sm100": (64, 128, 8, 2),
        "sm120": (32, 64, 8, 2),
        "cdna gfx950": (32, 64, 4, 1),
        "rdna": (16, 16, 8, 1),
    },
    ("dkdv", 2, 192): {
        "sm80 sm86 sm90 sm120": (32, 32, 4, 2),
        "sm100": (32, 64, 8, 2),
        "cdna gfx950": (32, 64, 4, 1),
        "rdna": (16, 16, 8, 1),
    },
    ("dkdv", 2, 256): {
        "sm80 sm100": (32, 64, 8, 2),
        "sm86 sm120": (16, 64, 8, 2),
        "sm90": (32, 32, 8, 2),
        "cdna gfx950": (32, 32, 4, 1),
        "rdna": (16, 16, 8, 1),
    },
    ("dkdv", 2, 512): {
        "sm80 sm90 sm100": (16, 32, 8, 2),
        "sm86 sm120": (16, 16, 8, 2),
        "cdna gfx950": (16, 32, 4, 1),
        "rdna": (16, 16, 8, 1),
    },
    ("dkdv", 4, 64): {"sm80 sm86 sm90 sm100 sm120": (32, 32, 4, 2), "cdna gfx950": (64, 64, 4, 1), "rdna": (16, 16, 8, 1)},
    ("dkdv", 4, 128): {
        "sm80 sm86": (32, 32, 8, 2),
        "sm90 sm100": (16, 16, 8, 2),
        "sm120": (16, 32, 8, 2),
        "cdna gfx950": (32, 32, 4, 1),
        "rdna": (16, 16, 8, 1),
    },
    ("dkdv", 4, 192): {"sm80 sm86 sm90 sm100 sm120 rdna": (16, 16, 8, 1), "cdna gfx950": (16, 32, 4, 1)},
    ("dkdv", 4, 256): {"sm80 sm86 sm90 sm100 sm120 rdna": (16, 16, 8, 1), "cdna gfx950": (16, 32, 4, 1)},
    ("dkdv", 4, 512): {"sm80 sm86 sm90 sm100 sm120 rdna": (16, 16, 8, 1), "cdna gfx950": (16, 16, 4, 1)},
    ("dq", 2, 64): {"sm80 sm86 sm100 sm120": (128, 64, 8, 2), "cdna gfx950": (128, 64, 4, 1), "rdna": (64, 32, 8, 1)},
    ("dq", 2, 128): {"sm80 sm100": (128, 64, 8, 2), "sm86 sm120": (128, 32, 8, 2), "cdna gfx950": (64, 64, 4, 1), "rdna": (32, 32, 8, 1)},
    ("dq", 2, 192): {
        "sm80 sm90 sm100": (128, 32, 8, 2),
        "sm86 sm120": (64, 32, 8, 2),
        "cdna gfx950": (64, 32, 4, 1),
        "rdna": (32, 16, 8, 1),
    },
    ("dq", 2, 256): {
        "sm80": (64, 64, 8, 2),
        "sm86 sm120": (32, 32, 8, 2),
        "sm90 sm100": (64, 32, 8, 2),
        "cdna gfx950": (64, 32, 4, 1),
        "rdna": (16, 16, 8, 1),
    },
    ("dq", 2, 512): {
        "sm80 sm90 sm100": (32, 32, 8, 2),
        "sm86 sm120": (32, 16, 8, 1),
        "cdna gfx950": (16, 32, 4, 1),
        "rdna": (16, 16, 8, 1),
    },
    ("dq", 4, 64): {"sm80 sm86 sm90 sm100 sm120": (32, 32, 4, 2), "cdna gfx950": (64, 64, 4, 1), "rdna": (32, 32, 8, 1)},
    ("dq", 4, 128): {
        "sm80 sm90 sm100": (32, 32, 8, 2),
        "sm86 sm120": (32, 16, 8, 2),
        "cdna gfx950": (64, 32, 4, 1),
        "rdna": (16, 16, 8, 1),
    },
    ("dq", 4, 192): {"sm80 sm90 sm100": (32, 16, 8, 1), "sm86 sm120 rdna": (16, 16, 8, 1), "cdna gfx950": (32, 32, 4, 1)},
    ("dq", 4, 256): {"sm80 sm86 sm90 sm100 sm120 rdna": (16, 16, 8, 1), "cdna gfx950": (16, 32, 4, 1)},
    ("dq", 4, 512): {"sm80 sm86 sm90 sm100 sm120 rdna": (16, 16, 8, 1), "cdna gfx950": (16, 16, 4, 1)},
}
"""The largest tiles of some candidates that were compiled for each family, without spills and within its shared memory, in two stages or more where
these fit. RDNA's 256 registers are not enough above a head class of 128, nor for gradients above 64: there spills are fewest."""
TABLE = {
    (family, *key): (Config(*tiles), FITS)
    for key, rows in FITTING.items()
    for families, tiles in rows.items()
    for family in families.split()
} | TABLE

CDNA_DECODE = {  # a thread of 8 warps has 256 registers, of 4 twice as many
    ("decode", 1): {256: (16, 32, 4, 2), 576: (16, 16, 4, 1)},
    ("chunk", 1): {128: (32, 32, 4, 2), 192: (32, 32, 4, 2), 256: (16, 32, 4, 2), 576: (16, 16, 4, 1)},
    ("chunk", 2): {128: (32, 32, 4, 2), 192: (32, 32, 4, 2)},
}
RDNA_DECODE: dict[tuple[str, int], dict[int, tuple[int, int, int, int]]] = {
    ("decode", 1): {64: (16, 32, 8, 1)} | dict.fromkeys((128, 192, 256, 576), (16, 16, 8, 1)),
    ("decode", 2): {64: (16, 64, 8, 1), 128: (16, 32, 8, 1), 192: (16, 32, 8, 1), 256: (16, 16, 8, 1), 576: (16, 32, 8, 1)},
    ("decode", 4): {64: (16, 32, 8, 1)} | dict.fromkeys((128, 192, 256), (16, 16, 8, 1)),
    ("chunk", 1): dict.fromkeys((64, 128, 192, 256, 576), (16, 16, 8, 1)),
    ("chunk", 2): {64: (32, 32, 8, 1), 128: (16, 32, 8, 1)} | dict.fromkeys((192, 256, 576), (16, 16, 8, 1)),
    ("chunk", 4): dict.fromkeys((64, 128, 192, 256), (16, 16, 8, 1)),
}
"""What decode has there in place of DECODE's. RDNA's 256 registers hold tiles of 16 bits up to 192 columns, and of e4m3 and fp32 up to 128, where a
sequence has one query; of the rest, int8 among them, these spill least.
"""
TABLE |= {
    (family, *key, head_dim): (Config(*tiles), COMPILED)
    for families, found in (("cdna gfx950", CDNA_DECODE), ("rdna", RDNA_DECODE))
    for key, rows in found.items()
    for head_dim, tiles in rows.items()
    for family in families.split()
}

# For whatever has no row: "decode" of at most 16 rows of a sequence or "chunk" of more, bytes of a cache's element (4: of q's), head class. Compiled
# with Triton 3.9.0 for sm_80, sm_89, sm_90 and gfx942, never timed. A thread spills 0 to 24 bytes, of fp32 with 192 and 256 up to 152.
DECODE = {
    ("decode", 1, 64): Config(16, 32, 4, 3),
    ("decode", 1, 128): Config(16, 32, 4, 3),
    ("decode", 1, 192): Config(16, 32, 4, 3),
    ("decode", 1, 256): Config(16, 32, 8, 3),
    ("decode", 1, 576): Config(16, 16, 8, 2),
    ("decode", 2, 64): Config(16, 64, 4, 3),
    ("decode", 2, 128): Config(16, 64, 4, 3),
    ("decode", 2, 192): Config(16, 64, 4, 2),
    ("decode", 2, 256): Config(16, 32, 8, 3),
    ("decode", 2, 576): Config(16, 16, 8, 2),
    ("decode", 4, 64): Config(16, 32, 4, 2),
    ("decode", 4, 128): Config(16, 32, 8, 2),
    ("decode", 4, 192): Config(16, 16, 8, 2),
    ("decode", 4, 256): Config(16, 16, 8, 2),
    ("chunk", 1, 64): Config(32, 64, 4, 3),
    ("chunk", 1, 128): Config(32, 32, 8, 2),
    ("chunk", 1, 192): Config(32, 32, 8, 2),
    ("chunk", 1, 256): Config(32, 32, 8, 2),
    ("chunk", 1, 576): Config(16, 16, 8, 2),
    ("chunk", 2, 64): Config(32, 64, 4, 3),
    ("chunk", 2, 128): Config(32, 64, 8, 3),
    ("chunk", 2, 192): Config(32, 32, 8, 2),
    ("chunk", 2, 256): Config(32, 32, 8, 2),
    ("chunk", 2, 576): Config(16, 16, 8, 2),
    ("chunk", 4, 64): Config(16, 32, 4, 2),
    ("chunk", 4, 128): Config(16, 32, 8, 2),
    ("chunk", 4, 192): Config(16, 16, 8, 2),
    ("chunk", 4, 256): Config(16, 16, 8, 2),
}


def decodes(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernel of decode takes such heads: the latent ones of 16 bits too, and in fp32 none that registers do not hold."""
    return max(head_dim, head_dim_v) <= MOST_DIM or (dtype.itemsize == 2 and head_dim <= 576 and head_dim_v <= 2 * MOST_DIM)


def weight_of(call: Call) -> Weight:
    if call.bias is not None or call.dropout is not None:
        return "pairs"
    return "scores" if call.softcap > 0.0 or call.alibi_slopes is not None else "plain"


def config_of(
    target: Target, purpose: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, weight: Weight = "plain", mask: str = "band"
) -> Config:
    """Of a pass: "forward", "dkdv" or "dq". mask: its kind, `bound.kind_of`."""
    family, size, dim = target.family, dtype.itemsize, max(head_dim, head_dim_v)
    for each in INSTEAD:
        if (
            each[:3] == (family, purpose, size)
            and each.above < dim <= each.most
            and each.weight == weight
            and (mask in each.masks or not each.masks)
        ):
            return each.config
    config, _ = TABLE[family, purpose, size, head_class(head_dim, head_dim_v)]
    return lighter(config, purpose, family, weight) if target.nvidia else config


def config_of_call(target: Target, purpose: str, call: Call, weight: Weight, mask: str) -> Config:
    """Likewise, of a call's pass; of int8 a forward pass has its own."""
    kind = call.q.dtype if call.precision is None else RECIPES[call.precision].qk
    dtype = torch.float16 if kind == E4M3 else kind if purpose == "forward" else call.q.dtype
    return config_of(target, purpose, dtype, call.head_dim, call.head_dim_v, weight, mask)


MOST = {  # tiles of what NVIDIA's 255 registers a thread hold
    "scores": {"forward": (128, 64)},
    "pairs": {"forward": (128, 32), "dkdv": (32, 64), "dq": (64, 32)},
}
MOST_ON_BLACKWELL = {"forward": (64, 32)}  # of compute capability 10, where sums pass through registers from tensor memory


def lighter(config: Config, purpose: str, family: str, weight: Weight) -> Config:
    """For kernels that change scores, draw random bits or load a bias for each pair."""
    config = config if weight == "plain" else config._replace(registers=0)
    most = MOST.get(weight, {}).get(purpose)
    if most is None:
        return config
    if family == "sm100" and weight == "pairs":
        most = MOST_ON_BLACKWELL.get(purpose, most)
    tile_m, tile_n = map(min, (config.tile_m, config.tile_n), most)
    return config._replace(tile_m=tile_m, tile_n=tile_n, warps=8 if weight == "pairs" else config.warps)


def config_of_decode(target: Target, rows: int, dtype: torch.dtype, cached: torch.dtype, head_dim: int, head_dim_v: int) -> Config:
    """For `rows` rows of a sequence, queries times the heads of a group."""
    purpose = "decode" if rows <= LEAST_DIM else "chunk"
    size = 4 if dtype.itemsize == 4 else cached.itemsize
    dims = next(each for each in (64, 128, 192, 256, 576) if max(head_dim, head_dim_v) <= each)
    row = TABLE.get((target.family, purpose, size, dims))
    return DECODE[purpose, size, dims] if row is None else row[0]
