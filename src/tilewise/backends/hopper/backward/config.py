"""Tiles and schedules of the backward pass on Hopper: literal data with provenance, one line a case."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from tilewise.backends.hopper.score_changes import ScoreChanges

ADDERS = 2  # warps that add tiles of dQ to the sum in global memory, in turns: one alone waits for too much
REGISTERS = {2: (24, 240), 3: (32, 160)}  # of a producer's and a consumer's thread, by consumers; a multiprocessor has 64 K
ONE_BLOCK = 128  # keys, at most
PIECE = 32  # rows that repairs look through at a time for large numbers, and remember
ROOMY = 40, 232  # where two consumers can do with less, and the warps that draw, load, add and finish gain by more


@dataclass(frozen=True, kw_only=True)
class Config(ScoreChanges):
    """How a problem is cut and scheduled; with the launch function, the identity of a compiled kernel.

    dq says where a tile of dQ goes:

        staged   through shared memory, from where the copy engine adds it to the sum in global memory
        direct   from registers, likewise added to the sum
        written  from registers to the gradient itself, as all keys are one block's; where keys are split
        apart    nowhere: a kernel of its own computes dQ (by_queries.py); where columns are split
    """

    dtype: torch.dtype
    head_dim: int  # of the tile; the tensors' may be smaller
    head_dim_v: int
    sees: Literal["all", "causal", "interval", "rows", "runs"]  # seen.py says what each means
    tile_m: int  # queries
    tile_n: int  # keys
    stages: int = 2  # of Q and dO
    ds_stages: int = 2
    dq_consumers: int = 2  # warpgroups that compute dQ
    dq: Literal["staged", "direct", "written", "apart"] = "staged"  # where dQ goes, see below
    ordered: bool = True  # dQ is added up in one order, so that every run gives the same bits
    finishes: bool = False  # a warp of the main kernel finishes what it can of dQ (finish.py); where keys are split and nothing is `direct`
    roomy: bool = False  # ROOMY instead of REGISTERS; where there are two consumers
    ahead: float = 1  # which share of a tile's exponentials is computed before dP is waited for
    lean: bool = False  # registers hold S or dP, not both (by_keys.step_lean); dK takes dS from shared memory
    always: bool = False  # every tile is masked, so that no branch divides what ptxas may arrange; under a causal mask
    pairwise: bool = False  # dS is rounded by twos: ptxas rounds a whole fragment twice, for shared memory and for dK
    delta_in: bool = False  # -delta is in dP's registers before dP is
    skips: bool = False  # a warpgroup leaves out what it can of tiles that see none of its keys, at its walk's ends; where keys are split
    asks_ahead: bool = False  # a tile's log-sum-exps are asked for under the tile before; where keys are split
    split: Literal["keys", "columns"] = "keys"  # what two warpgroups share dK and dV by
    dq_transposed: bool = False  # dQ^T = K^T dS^T, for a tile_m that is no multiple of 64
    persistent: bool = False  # a thread block takes one block of keys after another (persistent.py); where keys are split
    shares: bool = False  # thread blocks may share the walk of a block of keys (shares.py); where keys are split and all are seen
    dq_pieces: int = 1  # in which a warpgroup computes its part of dQ, one after another
    narrow: bool = False  # the tensors' head_dim is smaller, and the sums of dQ leave out what lies beyond it
    change_parts: int = 1  # in which a tile of scores becomes logits, so that fewer registers are taken at a time

    @property
    def enlarged(self) -> float:
        """What P is multiplied by before it is rounded to an operand: fp16 has few bits for probabilities below 6e-5, and none below 6e-8, as keys
        have that are far away or of a low bias. Where P stays in fp32 for dS and no score is changed, the naive formula loses as much of dV.
        """
        return 4096.0 if self.dtype == torch.float16 and (self.modified or self.lean or self.split == "columns") else 1.0

    @property
    def own_factor(self) -> bool:
        """Whether the factor of dP - delta in dS goes through shared memory and is not P as it is rounded for dV."""
        return self.split == "columns" and self.softcap

    @property
    def repairs(self) -> bool:
        """Whether NaN and infinities may be hidden: by a mask, or by a bias that leaves a query nothing to see."""
        return self.sees != "all" or self.bias is not None

    @property
    def looks(self) -> bool:
        """Whether it is known which hidden numbers may have made a row NaN: where a row sees all between a beginning and an end, and not where dQ of
        a whole tile is written NaN for one row's sake.
        """
        return self.repairs and self.sees != "runs" and self.bias is None and not self.one_block

    @property
    def bias_pairs(self) -> bool:
        """A bias is read number by number: transposed, neighbours are no thread's own."""
        return False

    @property
    def repaired_parts(self) -> tuple[int, int]:
        """In how many parts of their columns dQ, and dK and dV, are repaired: as they are written, or in as many as fit into registers."""
        fit = -(-self.head_dim // 128)
        return fit if self.dq_apart else self.dq_grid[1] * self.dq_pieces, max(fit, self.column_parts)

    @property
    def repaired_columns(self) -> int:
        """Of a part, at most."""
        of_queries, of_keys = self.repaired_parts
        return max(self.head_dim // min(of_queries, of_keys), self.head_dim_v // of_keys)

    @property
    def dq_apart(self) -> bool:
        return self.dq == "apart"

    @property
    def one_block(self) -> bool:
        return self.dq == "written"

    @property
    def direct(self) -> bool:
        return self.dq in ("direct", "apart")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sees == "runs" and self.direct and self.split == "keys":
            raise ValueError(
                "where keys are split, the consumers do not know a visit's tile of queries before it is there: dQ cannot go directly"
            )
        if (self.dq == "apart") > (self.split == "columns"):
            raise ValueError("dQ has a kernel of its own only where columns are split")
        if self.persistent and (self.split == "columns" or self.direct or self.sees not in PERSISTENT):
            raise ValueError("a thread block stays only where keys are split and dQ goes through shared memory")
        if self.one_block and (self.split == "columns" or self.direct or self.finishes or self.skips):
            raise ValueError("dQ is written by who computes it only where keys are split, no tile is skipped, and nobody else finishes it")
        if self.narrow and (self.dq_transposed or not self.sums):
            raise ValueError("sums leave out columns only where there are sums, of dQ that is not transposed")
        if self.roomy and self.consumers != 2:
            raise ValueError("ROOMY is for two consumers")
        if self.split == "keys" and self.stages % ADDERS:
            raise ValueError("a tile's stage says which warp adds its dQ, so there are as many stages, or a multiple")
        if self.asks_ahead and (self.split == "columns" or self.lean or self.modified):
            raise ValueError(
                "log-sum-exps are asked for ahead only where keys are split, S and dP are in registers together and scores are plain"
            )
        if self.skips and (self.split == "columns" or self.direct or self.lean or self.sees in ("all", "runs")):
            raise ValueError(
                "tiles are skipped only where keys are split, walks go over tiles, and whole steps send dQ through shared memory"
            )
        if self.shares and (self.split == "columns" or self.sees != "all"):
            raise ValueError("blocks of keys are shared only where keys are split and all are seen")
        if self.shares and self.finishes and not self.persistent:
            raise ValueError("where blocks are shared and dQ is finished, thread blocks stay: they know whose dQ has to wait")
        if self.always and (self.modified or self.sees != "causal"):
            raise ValueError("every tile is masked only under a causal mask")

    @property
    def consumers(self) -> int:
        return self.tile_n // 64 if self.split == "keys" else 2

    @property
    def column_parts(self) -> int:
        """Among how many warpgroups the columns of dK and dV are divided."""
        return 1 if self.split == "keys" else self.consumers

    @property
    def dq_grid(self) -> tuple[int, int]:
        """How the warpgroups that compute dQ share it: blocks of 64 rows times blocks of columns; of every piece."""
        if self.dq_transposed:
            return self.dq_consumers, 1
        return self.tile_m // 64, self.dq_consumers // (self.tile_m // 64)

    @property
    def dq_width(self) -> int:
        """Columns of dQ, or of dQ^T, that a warpgroup computes at a time."""
        if self.dq_transposed:
            return self.tile_m
        return self.head_dim // (self.dq_grid[1] * self.dq_pieces)

    @property
    def dq_numbers(self) -> int:
        """Of dQ that one of their threads holds."""
        return self.tile_m * self.head_dim // (128 * self.dq_consumers)

    @property
    def counters(self) -> int:
        """Of a tile of dQ: how often it has been added to, or each warpgroup's part of it where these add by themselves."""
        return self.dq_consumers if self.direct else 1

    @property
    def delta_ahead(self) -> bool:
        """Whether -delta is read before P is there or after it: which of the two spills is found by trying."""
        return self.sees == "runs" and not (self.delta_in or self.modified)

    @property
    def least_blocks(self) -> int:
        """Of the last kernel, on a multiprocessor, for the compiler; 0 leaves it free. Then it spills a few bytes to have one more."""
        squeezed = self.modified or self.sees in ("rows", "runs") or (self.repairs and self.head_dim == 96)
        return 1 if self.only_looks or squeezed else 0

    @property
    def only_looks(self) -> bool:
        """Whether the last kernel only looks for what is left of dQ."""
        return self.finishes or self.one_block

    @property
    def staged(self) -> bool:
        """Whether dQ goes through shared memory to the warps that add it up."""
        return not (self.direct or self.one_block)

    @property
    def sums(self) -> bool:
        """Whether dQ is summed up in global memory."""
        return not (self.dq_apart or self.one_block)

    @property
    def marks_last_visits(self) -> bool:
        """Whether Q and dO are first to leave the L2 cache at their last visit. Where scores are changed, registers are too few to know."""
        return self.sums and self.sees != "runs" and not self.modified

    def numbers_of_sum(self, head_dim: int) -> int:
        """Of a tile of dQ in global memory. head_dim: of the tensors."""
        return self.tile_m * head_dim if self.sums else 4

    @property
    def registers(self) -> tuple[int, int]:
        return ROOMY if self.roomy else REGISTERS[self.consumers]


# (head_dim, head_dim_v): fields of Config.
TILES = {
    (64, 64): dict(tile_m=128, tile_n=128, ahead=0.25),
    (96, 96): dict(tile_m=64, tile_n=128, dq_consumers=1),
    (128, 128): dict(tile_m=64, tile_n=128, ahead=0.25),
    (192, 128): dict(tile_m=64, tile_n=64, split="columns", dq="apart"),
    (192, 192): dict(tile_m=64, tile_n=64, split="columns", dq="apart"),
    (256, 256): dict(tile_m=64, tile_n=64, split="columns", dq="apart", dq_pieces=2),
}

# Where scores are changed by a softcap, by a bias or ALiBi ("natural"), or by both (and by a bias with ALiBi from places of the rows' own, which
# takes as much): what keeps registers from spilling.
CHANGED = {
    "softcap": {(64, 64): dict(tile_m=64)},
    "natural": {(64, 64): dict(tile_m=64), (192, 128): dict(roomy=True)},
    "both": {
        (64, 64): dict(tile_m=64, change_parts=4),
        (96, 96): dict(change_parts=4),
        (128, 128): dict(tile_n=64, split="columns", dq="apart"),
        (192, 128): dict(change_parts=2, roomy=True),
        (192, 192): dict(change_parts=2, roomy=True),
        (256, 256): dict(change_parts=4),
    },
}

# Besides, where dQ is not computed apart.
CHANGED_WITH_DQ = {
    "softcap": {},
    "natural": {(256, 256): dict(dq_pieces=4, change_parts=2)},
    "both": {
        (128, 128): dict(change_parts=2),
        (192, 128): dict(dq_pieces=3, change_parts=4),
        (192, 192): dict(dq_pieces=3, change_parts=4),
        (256, 256): dict(dq_pieces=4, change_parts=8),
    },
}


def tile_dims(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """The smallest tile that holds the heads; None where there is none."""
    return next((dims for dims in sorted(TILES) if head_dim <= dims[0] and head_dim_v <= dims[1]), None)


# Instead, for masks of these kinds and from so many queries on, the last that applies. Larger tiles of queries and keys ask less of shared memory for
# each product, and short sequences fill them badly; a block that visits few tiles would have to wait for what it finishes. H200, 2026-11-22
# (lab/rows/: backward-adders-h200.jsonl; SKIPS backward-edges-h200.jsonl; `roomy` backward-prepares-h200.jsonl; what was chosen
# before backward-schedules-h200.jsonl, backward-dense-h200*).
FINISHES, PERSIST, SHARED, PAIRWISE = dict(finishes=True), dict(persistent=True), dict(shares=True), dict(pairwise=True)
AHEAD, SKIPS = dict(asks_ahead=True), dict(skips=True)
WHOLE = PAIRWISE | AHEAD | dict(delta_in=True, roomy=True)
LARGER = WHOLE | dict(tile_m=80, dq_transposed=True, ahead=0.5, roomy=False)
ONE_PIECE = PAIRWISE | AHEAD | dict(always=True)
LONG = {
    ((128, 128), "all"): ((1, PERSIST | WHOLE), (1024, FINISHES | PERSIST | WHOLE), (2048, LARGER | PERSIST), (8192, LARGER | SHARED)),
    ((128, 128), "causal"): ((1, WHOLE | SKIPS), (1024, FINISHES | WHOLE | SKIPS), (8192, FINISHES | WHOLE)),
    ((128, 128), "interval"): ((1, FINISHES | WHOLE | SKIPS),),
    ((128, 128), "rows"): ((1, FINISHES | WHOLE | SKIPS),),
    ((64, 64), "all"): ((1, FINISHES | PERSIST | AHEAD), (1024, FINISHES | PERSIST | SHARED | AHEAD)),
    ((64, 64), "causal"): ((1, ONE_PIECE), (256, FINISHES | ONE_PIECE), (4096, FINISHES | PAIRWISE | AHEAD)),
    ((64, 64), "interval"): ((1, FINISHES | PAIRWISE | AHEAD),),
    ((64, 64), "rows"): ((1, PAIRWISE | AHEAD),),
}
# Five products, where tables or changed scores take no registers besides.
WIDE = dict(tile_n=128, split="keys", dq="staged", ds_stages=1, lean=True, ahead=0.25)
LONG |= {((192, 128), sees): ((1, WIDE),) for sees in ("all", "causal", "interval", "rows")}


# Where a thread block takes one block of keys after another: one's end and the next one's beginning take the time of two or three tiles, of
# which it saves a part.
PERSISTENT = "all", "causal", "interval", "rows"
PERSISTENT_UP_TO = 16384  # queries, under a causal mask (H200, 2026-11-22: with dQ finished by the way 4 to 5 % from 4,096 to 16,384)


@lru_cache(1024)
def configure(dtype: torch.dtype, head_dim: int, head_dim_v: int, sees: str, seqlen_q: int = 1, few: bool = False, **choice) -> Config:
    """few: keys, at most ONE_BLOCK."""
    dims = tile_dims(head_dim, head_dim_v)
    config = Config(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], sees=sees, **(TILES[dims] | choice))
    if config.modified:
        config = replace(config, **_instead(config, dims, few))
    else:
        larger = [fields for least, fields in LONG.get((dims, sees), ()) if (1 if few else seqlen_q) >= least]
        fields = [fields for fields in larger if not (fields.get("lean") and _spills_if_lean(dtype, sees, few))]
        fields = [fields for fields in fields if not (fields.get("dq_transposed") and head_dim < dims[0])]
        stays = config.split == "keys" and sees in PERSISTENT and sees != "all" and (sees != "causal" or seqlen_q <= PERSISTENT_UP_TO)
        config = replace(config, **({"persistent": stays} | (fields[-1] if fields else {}) | choice))
    if few and config.split == "keys":
        return _of_one_block(config)
    return replace(config, narrow=config.sums and head_dim < dims[0])


def _of_one_block(config: Config) -> Config:
    """Rounding by twos, -delta in dP's registers and more of them for who brings tiles are what keeps these from spilling."""
    plain_softcap = config.head_dim == 128 and config.softcap and not config.natural
    tight = {"delta_in": True, "roomy": True} if plain_softcap else {}
    if config.head_dim == 64 and config.sees == "runs" and not config.modified:
        tight = {"delta_in": True}
    return replace(config, dq="written", finishes=False, skips=False, pairwise=True, shares=config.sees == "all", **tight)


def _spills_if_lean(dtype: torch.dtype, sees: str, few: bool) -> bool:
    """8 to 32 bytes, or may."""
    return sees != "all" if few else dtype == torch.float16 and sees in ("interval", "rows")


def lengths() -> list[int]:
    """Numbers of queries, one for each way that tiles depend on them; and, with as many keys, one whose keys are not one block's."""
    return sorted({1, ONE_BLOCK + 1, PERSISTENT_UP_TO + 1, *(least for each in LONG.values() for least, _ in each)})


def _instead(config: Config, dims: tuple[int, int], few: bool) -> dict:
    """Where tables and changed scores come together, dQ takes fewer registers as a sum; but the keys of one block leave nothing to sum up."""
    most = config.softcap or (config.bias is not None and config.diagonal)
    how = "softcap" if not config.natural else "both" if most else "natural"
    fields = CHANGED[how].get(dims, {})
    if config.sees in ("rows", "runs") and not few:
        fields = fields | CHANGED_WITH_DQ[how].get(dims, {})
        if fields.get("dq", config.dq) == "apart":
            fields["dq"] = "direct"
    return fields
