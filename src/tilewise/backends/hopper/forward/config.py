"""Tiles and schedules of the Hopper kernels: literal data with provenance, one line a case."""

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from tilewise.backends.hopper.score_changes import ScoreChanges

SHARED_BYTES = 228 * 1024  # of a multiprocessor; a thread block takes 1 KB for itself, and barriers and alignment less than another
REGISTERS = {(2, 1): (24, 240), (3, 1): (32, 160), (1, 3): (24, 136)}  # of a producer's and a consumer's thread, by consumers and blocks


@dataclass(frozen=True, kw_only=True)
class Config(ScoreChanges):
    """How a problem is cut and scheduled; with the launch function, the identity of a compiled kernel."""

    dtype: torch.dtype
    head_dim: int  # of the tile; the tensors' may be smaller
    head_dim_v: int
    mask_kind: Literal["full", "causal", "band", "varlen", "tiles"]  # visible/ says what each means
    tile_m: int
    tile_n: int
    q_stages: int = 1
    kv_stages: int = 2
    pingpong: bool = False  # warpgroups take turns to multiply
    late: bool = False  # O is rescaled when the next product is under way
    dynamic: bool = True  # a thread block's next tile from a counter, not by a fixed step
    from_zero: bool = False  # maxima by a shorter way, where no row's maximum so far is below 0
    cluster: int = 1  # thread blocks that fetch their tiles of keys together
    blocks: int = 1  # thread blocks that share a multiprocessor
    bias_pairs: bool = False  # its elements, of 16 bits, come by twos
    sink: bool = False
    row_max: bool = False  # each row's largest score is written, too

    @property
    def value_bytes(self) -> int:
        """Of an element of V."""
        return self.dtype.itemsize

    @property
    def consumers(self) -> int:
        return self.tile_m // 64

    @property
    def shared_bytes(self) -> int:
        """What a thread block may have for Q, K, V and O."""
        return SHARED_BYTES // self.blocks - 2048

    @property
    def lean(self) -> bool:
        """Whether products read descriptors of `fragments.lean_slice`: those of 16 steps over head_dim do not fit the uniform registers."""
        return self.head_dim > 192

    @property
    def pieces_of_O(self) -> int:
        """In how many pieces, a part of the columns each, O leaves through shared memory of its own; 0: there is none, and it takes Q's.

        Then the next unit's Q has to wait for it.
        """
        operands = self.q_stages * self.tile_m * self.head_dim + self.kv_stages * self.tile_n * (self.head_dim + self.head_dim_v)
        sizes = [n for n in (1, 2, 4) if n == 1 or self.head_dim_v % (64 * n) == 0]
        return next((n for n in sizes if 2 * (operands + self.tile_m * self.head_dim_v // n) <= self.shared_bytes), 0)

    @property
    def smem_elements_of_O(self) -> int:
        """Elements of O that its own shared memory holds."""
        return self.tile_m * self.head_dim_v // self.pieces_of_O if self.pieces_of_O else 0

    @property
    def shares(self) -> bool:
        """Whether tiles that are left over for less than a round are shared out by keys (scheduler.py): where all take as long, by a fixed step."""
        return self.mask_kind == "full" and not (self.dynamic or self.modified or self.sink)  # each piece would count the sink

    @property
    def partial_elements(self) -> int:
        """What a cluster keeps of a piece of a unit: O and, for each of a row's four threads, its `logits.Statistics` (partials.py)."""
        return self.cluster * self.tile_m * (self.head_dim_v + 4 * (1 + self.row_max))

    @property
    def hides(self) -> bool:
        """Whether a row may not see what another row of its tile sees, so that V is screened (hidden.py)."""
        return self.mask_kind != "full"

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS[self.consumers, self.blocks]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to take up to `most_queries` of a sequence, `few_keys`: and up to as many keys; None: any number.

    Of a window as many queries count as it is wide, of packed documents those of the longest. Of several with the same bounds, that of the least
    `work`: tiles that a length fills badly lose to smaller ones, though these take more for each score.
    """

    most_queries: int | None = None
    few_keys: bool = False
    fields: dict
    cost: float = 1.0  # of a score in a full tile, over that of the first with these bounds; others than 1 were measured with plain scores

    def takes(self, seqlen_q: int, seqlen_k: int) -> bool:
        return self.most_queries is None or (seqlen_k if self.few_keys and seqlen_k > seqlen_q else seqlen_q) <= self.most_queries

    def work(self, seqlen_q: int, seqlen_k: int) -> float:
        """What a full mask's scores cost, those of padding too, in units of a score of the first choice."""
        tile_m, tile_n = self.fields["tile_m"] * self.fields.get("cluster", 1), self.fields["tile_n"]
        return self.cost * (-(-seqlen_q // tile_m) * tile_m) * (-(-seqlen_k // tile_n) * tile_n)


def any_length(**fields) -> tuple[Choice, ...]:
    return (Choice(fields=fields),)


def step(**fields) -> dict:
    """For full masks, where all units take as long."""
    return {**fields, "dynamic": False}


def pairs(**fields) -> tuple[Choice, ...]:
    """Thread blocks in pairs where tiles of queries fill them (else half of the last pair has nothing to do); long walks without turns."""
    paired = {**fields, "cluster": 2}
    return (
        Choice(most_queries=2 * fields["tile_m"], fields=fields),
        Choice(most_queries=2048, fields=fields),
        Choice(most_queries=2048, fields=paired, cost=0.95),
        Choice(fields={**paired, "pingpong": False}),
    )


# (head_dim, head_dim_v): for each way to see, what to take, the shortest sequences first; "varlen" and "tiles" as "band", but for their own.
# H200, driver 580.159, 2026-11-21 and 22, mostly the papers' sweep (16,384 tokens, hidden dimension 2048), TFLOP/s; the rows are in
# lab/rows/, hopper-h200.jsonl and, for what names the third round (of the lab notes), forward-h200.jsonl.
# Two stages for Q: a tile's queries come while the tile before is still computed. Full 512: 531 / 504 at (128, 128), 399 / 358 at (64, 64); but
#   causal 8k at (128, 128) 649 / 658.
# (64, 64): tile_m 192 or 128: full 576 / 455 at 8k, causal 502 / 439 at 8k; a third stage for K and V: 461 / 456 full at 1k.
#   Third round: windows of 4,096 504 / 423, packed documents ("varlen") 398 / 361. Three blocks of one warpgroup each under a causal mask, against
#   one of two: 282 / 259 at 512, 359 / 341 at 1k; full 393 / 407 at 512.
# (128, 128): a pair reads its keys once: full 683 / 634 at 8k, 624 / 613 at 1k; causal, fourth round (forward-h200.jsonl, fwd-1-2
#   and fwd-2): 460 / 488 at 1k, 584 / 594 at 2k, 666 / 659 at 4k, 681 / 654 at 8k, 711 / 676 at 16k; windows of 1,024 526 / 560, of 4,096 674 / 661.
#   Documents, H100, 2026-11-26 (documents-in-pairs-h100.jsonl), in pairs and single: 16k and 16 of 1k 710 / 676, 8 of 8k 675 / 648, 4 of 4k
#   646 / 628, but 200 to 3,000 tokens 499 / 520, all of 1,024 413 / 426. 192 queries and 80 keys a tile: 8 of 8k 652, 60k and 100 short ones
#   696 (694 / 655).
#   Without turns (lab notes, the second round): full 700 / 682 at 8k, 675 / 656 at 16k. Third round: causal 642 / 623 at 16k, windows 628 / 610.
# (256, 256): O rescaled late: full 748 / 696, causal 640 / 613 at 8k; at (128, 128) late loses 7 % causal.
#   tile_n 64, with memory for half of O (lab notes, the second round): full 533 / 498 at 512, 632 / 646 at 1k; causal 340 / 299 at 512,
#   478 / 461 at 1k, 620 / 602 at 2k. Third round: full 697 / 711 at 2k, 743 / 776 at 8k.
# (192, 128): late: full 697 / 663; causal, third round: 694 / 703 at 8k, 687 with turns; fourth, pairs: 746 / 720.
# (192, 192): tile_n 112 with intervals would spill 24 bytes.
# Short sequences under full masks, H100, 2026-11-26 (short-tiles-h100.jsonl), ms: (64, 64), 197 tokens 0.101 with 192 queries a tile, 0.086 with 64;
#   257: 0.056 / 0.046; but 577: 0.139 / 0.142, 1,024: 0.157 / 0.170. 192 and 96 keys, against 64 and 96 (short-tiles-few-keys-h100.jsonl): 4,096 on
#   77 0.0448 / 0.0481, at head_dim 40 0.0382 / 0.0508; 192 on 96 0.0382 / 0.0426; but 257: 0.0473 / 0.0444.
#   (96, 96): at 72, 729 tokens 0.172 with 128 queries, 0.129 with 192; at 80,
#   257: 0.073 / 0.063, 4,096: 0.342 / 0.322, but 577: 0.169 / 0.194. (128, 128) without pairs: 384: 0.062 / 0.054,
#   577: 0.113 / 0.101, 256: 0.058 / 0.056. (192, 192), 80 keys, with memory for O, against 112: 256: 0.055 / 0.049, 1,024: 0.096 / 0.090,
#   4,096 on 77: 0.108 / 0.076; pairs with turns: 8,192: 1.062 / 1.028.
#   Causal: (96, 96) with 128 and 192 queries: 4,096 0.385 / 0.355, 16,384 1.404 / 1.246, but 1,024 0.129 / 0.138. (128, 128), chunks, single and in
#   pairs: 512 on 16,384 0.761 / 0.734, 2,048 on 32,768 2.93 / 2.87.
TILES = {
    (64, 64): {
        "full": (*any_length(**step(tile_m=192, tile_n=128, q_stages=2, kv_stages=3, pingpong=True)),
                Choice(fields=step(tile_m=192, tile_n=96, q_stages=2, kv_stages=3, pingpong=True), cost=1.08),
                Choice(fields=step(tile_m=64, tile_n=96, q_stages=2, blocks=3), cost=1.17),
                Choice(fields=step(tile_m=64, tile_n=64, q_stages=2, kv_stages=3, blocks=3), cost=1.28)),
        "causal": (Choice(most_queries=512, few_keys=True, fields={"tile_m": 64, "tile_n": 64, "q_stages": 2, "kv_stages": 3, "blocks": 3}),
                  Choice(most_queries=2048, few_keys=True, fields={"tile_m": 64, "tile_n": 96, "q_stages": 2, "blocks": 3}),
                  *any_length(tile_m=192, tile_n=128, q_stages=2, pingpong=True)),
        "band": any_length(tile_m=192, tile_n=128, q_stages=2, pingpong=True),
        "tiles": any_length(tile_m=128, tile_n=128, q_stages=2, kv_stages=3, pingpong=True),
    },
    (96, 96): {
        "full": (*any_length(**step(tile_m=128, tile_n=128, q_stages=2, pingpong=True)),
                Choice(fields=step(tile_m=192, tile_n=96, q_stages=2), cost=0.91),
                Choice(fields=step(tile_m=192, tile_n=112, q_stages=2), cost=0.905)),
        "causal": (Choice(most_queries=1024, fields={"tile_m": 128, "tile_n": 128, "q_stages": 2, "kv_stages": 3}),
                  Choice(most_queries=8192, fields={"tile_m": 192, "tile_n": 96, "q_stages": 2, "kv_stages": 3, "pingpong": True}),
                  *any_length(tile_m=192, tile_n=112, q_stages=2, pingpong=True)),
        "band": any_length(tile_m=128, tile_n=128, q_stages=2, pingpong=True),
    },
    (128, 128): {
        "full": pairs(**step(tile_m=128, tile_n=128, q_stages=2, pingpong=True)),
        "causal": (Choice(most_queries=128, fields={"tile_m": 128, "tile_n": 128, "q_stages": 2}),
                  Choice(most_queries=2048, few_keys=True, fields={"tile_m": 128, "tile_n": 128, "q_stages": 2}),
                  *any_length(tile_m=128, tile_n=128, cluster=2)),
        "band": (Choice(most_queries=2048, fields={"tile_m": 128, "tile_n": 128, "q_stages": 2}),
                     *any_length(tile_m=128, tile_n=128, q_stages=2, cluster=2)),
        "varlen": (Choice(most_queries=3072, fields={"tile_m": 128, "tile_n": 128, "q_stages": 2}),
                 *any_length(tile_m=128, tile_n=128, q_stages=2, cluster=2)),
        "tiles": any_length(tile_m=128, tile_n=128, q_stages=2),
    },
    (192, 128): {
        "full": any_length(**step(tile_m=128, tile_n=128, late=True)),
        "causal": (Choice(most_queries=2048, fields={"tile_m": 128, "tile_n": 128}), *any_length(tile_m=128, tile_n=128, cluster=2)),
        "band": any_length(tile_m=128, tile_n=128),
    },
    (192, 192): {
        "full": (Choice(most_queries=2048, fields=step(tile_m=128, tile_n=80, late=True)),
                *any_length(**step(tile_m=128, tile_n=112, pingpong=True, late=True, cluster=2)),
                Choice(fields=step(tile_m=128, tile_n=80, late=True))),
        "causal": any_length(tile_m=128, tile_n=112, late=True),
        "band": any_length(tile_m=128, tile_n=96, late=True),
    },
    (256, 256): {
        "full": (Choice(most_queries=512, fields=step(tile_m=128, tile_n=64, pingpong=True, late=True)),
                *any_length(**step(tile_m=128, tile_n=80, late=True))),
        "causal": (Choice(most_queries=2048, few_keys=True, fields={"tile_m": 128, "tile_n": 64, "late": True}),
                  *any_length(tile_m=128, tile_n=80, late=True)),
        "band": any_length(tile_m=128, tile_n=80, late=True),
    },
}  # fmt: skip


LONG = 1 << 30  # queries: more than any Choice bounds
SHORTEST_STEP = 16  # queries and keys between which no tile begins or ends

# tile_n where there would be spills otherwise: with dropout; with softcap or rows of their own, and with logits, of which dropout takes another 16.
SOFTCAP_OR_ROWS = {(192, 192): 96, (256, 256): 64}
DROPOUT = {((64, 64), "full"): 112, ((192, 128), "band"): 112}
LOGITS = {(192, 192): 80, (256, 256): 64} | dict.fromkeys(((64, 64), (96, 96), (128, 128), (192, 128)), 96)


def tile_dims(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """The smallest tile that holds the heads; None where there is none."""
    return next((dims for dims in sorted(TILES) if head_dim <= dims[0] and head_dim_v <= dims[1]), None)


@lru_cache(maxsize=4096)
def configure(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, mask_kind: str, seqlen_q: int = LONG, seqlen_k: int = 0, **changes
) -> Config:
    """The configuration for these heads and lengths, with `changes` of the scores: softcap, bias, alibi, diagonal, sink; and row_max."""
    if changes.get("bias") and mask_kind == "causal":
        mask_kind = "band"  # a few bytes would spill in between the loops of "causal"
    dims = tile_dims(head_dim, head_dim_v)
    return _chosen(_choices(dtype, dims, mask_kind, changes), seqlen_q, seqlen_k)


def _chosen(choices: list[tuple[Choice, Config]], seqlen_q: int, seqlen_k: int) -> Config:
    fit = [each for each in choices if each[0].takes(seqlen_q, seqlen_k)]
    alike = (each for each in fit if each[0].most_queries == fit[0][0].most_queries)
    return min(alike, key=lambda each: each[0].work(seqlen_q, seqlen_k))[1]


@lru_cache
def lengths() -> list[int]:
    """Numbers of queries, and of as many keys, with which every Choice is taken."""
    ways = [_choices(torch.bfloat16, dims, mask_kind, {}) for dims, each in TILES.items() for mask_kind in each]
    bounds = [choice.most_queries + 1 for way in ways for choice, _ in way if choice.most_queries is not None]
    steps = range(SHORTEST_STEP, max(bounds), SHORTEST_STEP)
    firsts = [{_chosen(way, n, n): n for n in reversed(steps)}.values() for way in ways]
    return sorted({1, *bounds, *itertools.chain(*firsts)})


def shipped(dtype: torch.dtype, **changes) -> list[Config]:
    """Every configuration that `configure` can give for a dtype and changes of the scores."""
    return [
        made
        for dims in TILES
        for mask_kind in ("full", "causal", "band", "varlen", "tiles")
        for _, made in _choices(dtype, dims, mask_kind, changes)
    ]


def _choices(dtype: torch.dtype, dims: tuple[int, int], mask_kind: str, changes: dict) -> list[tuple[Choice, Config]]:
    """With their configurations, the shortest sequences first."""
    ways = TILES[dims]
    choices = ways.get(mask_kind) or ways["band"]
    made = [(each, _made(dtype, dims, mask_kind, each.fields, changes)) for each in choices]
    plain = not any(config.modified or config.dropout for _, config in made)
    return [each for each in made if plain or (each[0].cost == 1.0 and each[1].blocks == 1)]  # blocks: too many registers


def _made(dtype: torch.dtype, dims: tuple[int, int], mask_kind: str, fields: dict, changes: dict) -> Config:
    config = Config(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], mask_kind=mask_kind, **fields, **changes)
    if config.dropout:
        if config.consumers == 3 and mask_kind != "full":  # threads of three consumers have too few registers
            config = replace(config, tile_m=128, tile_n=128)
        config = replace(config, tile_n=DROPOUT.get((dims, mask_kind), config.tile_n))
    if config.natural:
        return replace(config, tile_m=128, tile_n=LOGITS[dims] - 16 * config.dropout, late=False, cluster=1, dynamic=True)
    if config.softcap:
        return replace(config, tile_m=128, tile_n=SOFTCAP_OR_ROWS.get(dims, config.tile_n), late=False, cluster=1, dynamic=True)
    if mask_kind == "varlen":
        config = replace(config, tile_n=SOFTCAP_OR_ROWS.get(dims, config.tile_n), late=False)
    return replace(config, from_zero=mask_kind == "full" and not config.dropout)  # one loop less, where each holds the generator's code
