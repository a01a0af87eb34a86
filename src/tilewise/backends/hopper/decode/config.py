"""How the decode kernel is cut: literal data, one line a case."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch

from tilewise.backends.hopper.score_changes import ScoreChanges

WARPGROUP = 128  # threads
TILE_M = 64  # rows of a warpgroup: query tokens times heads of a group
LEAST_BOX = 8  # tokens that the copy engine fetches at a time, at least: rows of a swizzle
IN_FLIGHT = 64 * 1024  # bytes of K and V that a multiprocessor waits for at once; with more, memory is slower
LAUNCHED = 3 * 168  # registers that a thread of each of three warpgroups has together, which come in multiples of 8
PAGES = None, 16, 32, 64, 128  # tokens, for which kernels are made ahead; those of 128 are for larger ones, too
SERVED = None, 16, 64, 128  # likewise for `kinds`
RAW_STAGES = 2  # of tiles in 8 bits: more are slower
OVERLAPPED_TILE = 128  # keys, as many as registers hold scores of, with Q in shared memory
BYTES, NUMBERS = 13, 32  # a clock of a multiprocessor: from memory; of K and V multiplied with the rows of a warpgroup
TILE_CLOCKS, KEY_CLOCKS = (
    580,
    2.5,
)  # what a tile and each of its keys take in addition: at head_dim 128 with 64 keys 1,250 in all, 1,750 with two warpgroups
SMALL_TILE = 64  # keys of a tile at most, where there are few
FEW_KEYS = 1 << 14  # of all key heads: fewer tiles of 128 than multiprocessors


class Rotary(NamedTuple):
    """How queries are rotated on their way to registers."""

    half: int  # pairs
    interleaved: bool
    dtype: torch.dtype  # of the tables


SMALL_CACHE_TOKENS = 1 << 16  # of key heads, up to which a unit has the rows of one product: more units, of which fewer read the same keys


@dataclass(frozen=True, kw_only=True)
class Config(ScoreChanges):
    """How a problem is cut and scheduled; with the launch function, the identity of a compiled kernel."""

    dtype: torch.dtype
    head_dim: int  # of the tile; the tensors' may be smaller
    head_dim_v: int
    tile_n: int
    kv_stages: int
    box: int = 0  # tokens that the copy engine fetches at a time from a page; 1: threads do, token by token; 0: the cache is not paged
    blocks: int = 1  # thread blocks of a multiprocessor
    consumers: int = 1  # warpgroups that multiply, with rows of their own; a latent cache has two for one tile of rows
    overlap: bool = False  # a tile's softmax under O += P V of the tile before
    q_in_smem: bool = False  # where the first product reads Q; else in registers
    causal_tiles: bool = False  # sequences have several units a key head, and later ones may see later keys
    ragged: bool = False
    entries: bool = False
    leftpad: bool = False
    tree: bool = False
    common: str = ""  # the keys are a prefix of all sequences, which have as many queries each ("even"), or "packed" ones
    onto: bool = False  # results join those of a prefix that all sequences have, from an earlier launch
    share: bool = False  # the caches hold those tokens that are one rank's
    out: torch.dtype | None = None  # of O, where it is not dtype
    split: bool = False  # pieces of a fixed size
    cached: tuple[torch.dtype, torch.dtype] | None = None  # of K and V, where they have 8 bits
    scales: tuple[str, str] = ("", "")  # what has one in K's and V's cache: "head", "token", or nothing
    raw_stages: int = 0  # of tiles in 8 bits
    sinks: bool = False
    rotary: Rotary | None = None
    latent: bool = False  # V is the first head_dim_v columns of K, which is read once; two warpgroups have half of O's columns each
    wide: tuple[str, ...] = ()  # which of `operands.Lengths` are int64
    evict_first: bool = True  # what the L2 cache does with K and V
    fixed: int = 2  # tiles that a unit counts for beyond its own, where there is enough to do
    most_pieces: int = 40  # of a unit with a split, that are added up at once; of more, groups of `group` first
    group: int = 12
    sink: bool = False  # it joins a unit, no piece of it; and no row_max: for logits.close
    row_max: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        prefixed = bool(self.common) or self.onto
        wrong = {
            "a cache in 8 bits is loaded in stages of its own, and no other is": (self.cached is None) != (self.raw_stages == 0),
            "scales are of caches in 8 bits": any(self.scales) and self.cached is None,
            "the prefix's own results join none": bool(self.common) and self.onto,
            "a prefix is of caches that hold all tokens, and its queries come rotated": prefixed
            and (self.share or self.rotary is not None),
            "latent values are the keys' first columns, in 16 bits": self.latent and (self.widens or self.consumers != 1),
            "a bias and dropout are attention's": self.bias is not None or self.dropout,
            "a box is a part of a tile": self.box > 1 and self.tile_n % self.box != 0,
            "three warpgroups have no more registers than their launch gets": self.three and sum(self.registers) > LAUNCHED,
        }
        if found := [sentence for sentence, broken in wrong.items() if broken]:
            raise ValueError("; ".join(found))

    @property
    def tile_m(self) -> int:
        """Rows of a product."""
        return TILE_M * self.consumers

    @property
    def threads(self) -> int:
        """Of the warpgroups that compute."""
        return WARPGROUP * (2 if self.latent else self.consumers)

    @property
    def three(self) -> bool:
        """Whether a block has three warpgroups, which share out the registers that their launch gets."""
        return self.widens or self.consumers > 1

    @property
    def columns_of_O(self) -> int:
        """That a warpgroup has."""
        return self.head_dim_v // 2 if self.latent else self.head_dim_v

    @property
    def gathers(self) -> bool:
        """Whether threads fetch single tokens, because pages are too small or too odd for the copy engine."""
        return self.box == 1

    @property
    def widens(self) -> bool:
        """Whether a warpgroup makes `dtype` of the caches' 8 bits."""
        return self.cached is not None

    @property
    def load_stages(self) -> int:
        """Of what is loaded."""
        return self.raw_stages if self.widens else self.kv_stages

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread of each of three warpgroups, where there are three: they multiply, load and widen, or multiply, multiply and load. Together
        no more than their launch gets (`LAUNCHED`): whoever asked for more would wait for ever.
        """
        if self.widens:
            return 248, 104, 152
        return (224, 224, 56) if self.overlap else (208, 208, 88)

    @property
    def alike(self) -> bool:
        """Whether all units of a sequence have the same tiles, so that a block may have whole ones."""
        return not (self.causal_tiles or self.split)

    @property
    def solo_speedup_x4(self) -> int:
        """Quarters: how much faster a block without others goes through tiles than memory brings them to all at once; 4 (not faster) to 8."""
        numbers = self.tile_n * (self.head_dim + self.head_dim_v)
        work = TILE_CLOCKS + KEY_CLOCKS * self.tile_n + self.consumers * numbers / NUMBERS
        loaded = self.tile_n * self.head_dim if self.latent else numbers
        return min(max(int(4 * loaded * (1 if self.widens else 2) / BYTES / work), 4), 8)

    @property
    def loaders(self) -> int:
        """Warps that load, of K and V each."""
        return 2 if self.gathers else 1

    @property
    def rows_of_box(self) -> int:
        return LEAST_BOX if self.gathers else self.box or self.tile_n


# (head_dim, head_dim_v): keys of a tile, as many as registers hold scores of.
TILES = {(64, 64): 128, (96, 96): 64, (128, 128): 64, (192, 128): 64, (256, 256): 32}
WIDE = (64, 64), (96, 96), (128, 128), (192, 128)  # of which two warpgroups' registers hold enough
CHUNK = {"evict_first": False, "overlap": True}  # where units read the same keys, and products decide
LONG = 1024  # rows of a sequence on average, from which large tiles of keys are faster
MANY_ROWS = 1024  # of ragged queries beyond the first of each sequence, for which they are taken as chunks
IN_EIGHT_BITS = TILES | {(128, 128): 128}  # of a cache

# Likewise where V is the first columns of K: keys, and stages, which lie in shared memory next to Q.
LATENT_TILES = {(320, 256): (64, 3), (576, 512): (64, 2)}
LATENT_PIECES = {"most_pieces": 16}  # each is up to 128 KB


@lru_cache(maxsize=256)
def tile_dims(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """The smallest tile that holds the heads; None where there is none."""
    return next((dims for dims in sorted(TILES) if head_dim <= dims[0] and head_dim_v <= dims[1]), None)


def latent_dims(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """Likewise where V is the first columns of K; None also where a tile of K and one of V do."""
    if tile_dims(head_dim, head_dim_v) or head_dim_v > head_dim:
        return None
    return next((dims for dims in sorted(LATENT_TILES) if head_dim <= dims[0] and head_dim_v <= dims[1]), None)


def rows_of_unit(keys: int) -> int:
    """At most; a tile may have fewer. keys: tokens of all key heads."""
    return TILE_M if keys <= SMALL_CACHE_TOKENS else 2 * TILE_M


@lru_cache(maxsize=4096)
def configure(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, page_size: int | None, few: bool = False, in_flight: int = IN_FLIGHT, **fields
) -> Config:
    """few: keys, so that tiles are small. in_flight: bytes of a multiprocessor's stages, of which there are two at least. fields: of `Config`, those
    of the call and others in place of the usual.
    """
    if dims := latent_dims(head_dim, head_dim_v):
        return _latent(dtype, dims, page_size, fields)
    dims = tile_dims(head_dim, head_dim_v)
    tile_n, blocks = fields.pop("tile_n", _tile_n(dims, few, fields)), fields.pop("blocks", 1)
    usual = max(2, in_flight // blocks // ((1 if fields.get("cached") else 2) * tile_n * sum(dims)))
    stages = fields.pop("kv_stages", 2 if fields.get("cached") else usual)
    if fields.get("cached"):
        fields.setdefault("raw_stages", RAW_STAGES)
    # A tile of 64 keys would have as much of Q as of K read from shared memory. But after rotated registers ptxas orders products.
    if fields.get("overlap"):
        fields.setdefault("q_in_smem", tile_n == OVERLAPPED_TILE or bool(fields.get("rotary")))
    cut = {"tile_n": tile_n, "kv_stages": stages, "box": _box(page_size, tile_n)}
    return Config(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], blocks=blocks, **cut, **fields)


def _latent(dtype: torch.dtype, dims: tuple[int, int], page_size: int | None, fields: dict) -> Config:
    tile_n, stages = LATENT_TILES[dims]
    cut = {"tile_n": tile_n, "kv_stages": stages, "box": _box(page_size, tile_n)}
    return Config(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], latent=True, **cut | LATENT_PIECES | fields)


def _box(page_size: int | None, tile_n: int) -> int:
    """`Config.box` for pages of `page_size` tokens."""
    box = gcd(page_size, tile_n) if page_size else 0
    return 1 if 0 < box < LEAST_BOX else box


def _tile_n(dims: tuple[int, int], few: bool, fields: dict) -> int:
    """Keys of a tile; what else takes registers leaves fewer for scores. With a split as many however rows are cut, for bits are."""
    if fields.get("overlap") and not fields.get("split"):
        return OVERLAPPED_TILE
    changed = fields.get("softcap") and fields.get("alibi")
    if dims == (256, 256) and (changed or (fields.get("tree") and fields.get("split"))):
        return TILES[dims] // 2
    usual = (IN_EIGHT_BITS if fields.get("cached") and not changed else TILES)[dims]
    return min(usual, SMALL_TILE) if few or fields.get("tree") else usual


def shipped(dtype: torch.dtype, head_dim: int, head_dim_v: int, **fields) -> list[Config]:
    """What calls need, of any size, on contiguous caches and on pages of PAGES tokens, each once; fields: of `Config`. Where there are none, also the
    most usual of `kinds`.
    """
    todo = [(fields, PAGES), *([] if fields else kinds(dtype, head_dim, head_dim_v))]
    found = (
        configure(dtype, head_dim, head_dim_v, page_size, few, **each)
        for each, pages in todo
        for few in (False, *([] if each.keys() & {"causal_tiles", "rotary"} else [True]))
        for page_size in pages
    )
    return list(dict.fromkeys(found))


def kinds(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> Iterator[tuple[dict, tuple]]:
    """Calls of servers other than the plain ones, as fields of `Config`, and their pages: packed queries, chunks of many tokens, rotary
    tables for the whole head, caches in e4m3. Those with many rows and those that are rotated take no account of small caches.
    """
    yield {"ragged": True}, SERVED[1:]
    dims = tile_dims(head_dim, head_dim_v)
    if dims in (None, (96, 96)):
        return
    chunk = {"causal_tiles": True} | ({"consumers": 2, **CHUNK} if dims in WIDE else {})
    yield chunk, SERVED
    small = [{**chunk, "tile_n": TILES[dims]}] if dims in WIDE and TILES[dims] < OVERLAPPED_TILE else []
    for causal_tiles in ({"causal_tiles": True}, chunk, *small):
        yield {"ragged": True, **causal_tiles}, SERVED[1:]
    if dims[0] == dims[1] and head_dim % 16 == 0:
        for table in (dtype, torch.float32):
            yield {"rotary": Rotary(head_dim // 2, False, table)}, SERVED
    eight = {"cached": (torch.float8_e4m3fn, torch.float8_e4m3fn), "scales": ("head", "head")}
    yield eight, SERVED
    for causal_tiles in ({}, {"causal_tiles": True}):
        yield {**eight, "ragged": True, **causal_tiles}, SERVED[1:]
