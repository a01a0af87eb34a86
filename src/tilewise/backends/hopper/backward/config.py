"""Tiles and schedules of the backward pass on Hopper: literal data with provenance, one line a case."""

import dataclasses
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from tilewise.backends.hopper.score_changes import ScoreChanges

ADDERS = 2  # warps that add tiles of dQ to the sum in global memory, in turns: one alone waits for too much
REGISTERS = {2: (24, 240), 3: (32, 160)}  # of a producer's and a consumer's thread, by consumers; a multiprocessor has 64 K
ONE_BLOCK = 128  # keys, at most
PIECE = 32  # rows that repairs look through at a time for large elements, and remember
ROOMY = 40, 232  # where two consumers can do with less, and the warps that draw, load, add and finish gain by more


# Where a tile of dQ goes


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Through shared memory, from where the copy engine adds it to the sum in global memory."""

    finishes: bool = False  # a warp of the main kernel finishes what it can of dQ (finish.py)
    persistent: bool = False  # a thread block takes one block of keys after another (persistent.py); not under "tiles"


@dataclass(frozen=True, kw_only=True)
class Direct:
    """From registers, likewise added to the sum."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """From registers to the gradient itself: all keys are one block's."""

    persistent: bool = False


@dataclass(frozen=True, kw_only=True)
class Apart:
    """Nowhere: a kernel of its own computes dQ (by_queries.py)."""


# How a step of two warpgroups with keys of their own goes


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Registers hold S and dP at a time (by_keys.step)."""

    pairwise: bool = False  # dS is rounded by twos: ptxas rounds a whole fragment twice, for shared memory and for dK
    delta_in: bool = False  # dP's registers start as -delta
    asks_ahead: bool = False  # a tile's log-sum-exps are read during the tile before; where scores are plain


@dataclass(frozen=True, kw_only=True)
class Lean:
    """Registers hold S or dP (by_keys.step_lean); dK takes dS from shared memory."""


# What two warpgroups divide dK and dV by


@dataclass(frozen=True, kw_only=True)
class ByKeys:
    """Each has 64 keys, or there are three (by_keys.py)."""

    dq: Staged | Direct | Written = Staged()
    step: Whole | Lean = Whole()
    ahead: float = 1  # which share of a tile's exponentials is computed before dP is waited for
    dq_transposed: bool = False  # dQ^T = K^T dS^T, for a tile_m that is no multiple of 64
    shares: bool = False  # thread blocks may share the walk of a block of keys (shares.py); where all keys are seen
    q_heads_in_turn: bool = False  # the query heads of a group see different keys, and are walked with one after another; under "tiles"
    # Each query head of a group has thread blocks of its own (members.py); where scores are plain, not under "tiles".
    block_per_q_head: bool = False


@dataclass(frozen=True, kw_only=True)
class ByColumns:
    """Each has half of the columns (by_columns.py)."""

    dq: Direct | Apart = Apart()


SUMS = {  # what a name stands for in the tables below, in `Config.of` and in `Config.but`: a sum type's field, and its alternatives
    "split": {"keys": ByKeys, "columns": ByColumns},
    "dq": {"staged": Staged, "direct": Direct, "written": Written, "apart": Apart},
    "step": {"whole": Whole, "lean": Lean},
}


@dataclass(frozen=True, kw_only=True)
class Config(ScoreChanges):
    """How a problem is cut and scheduled; with the launch function, the identity of a compiled kernel."""

    dtype: torch.dtype
    head_dim: int  # of the tile; the tensors' may be smaller
    head_dim_v: int
    mask_kind: Literal["full", "causal", "band", "varlen", "tiles"]  # visible/ says what each means
    tile_m: int  # queries
    tile_n: int  # keys
    split: ByKeys | ByColumns = ByKeys()
    stages: int = 2  # of Q and dO
    ds_stages: int = 2
    dq_consumers: int = 2  # warpgroups that compute dQ
    dq_pieces: int = 1  # in which a warpgroup computes its part of dQ, one after another
    ordered: bool = True  # dQ is added up in one order, so that every run gives the same bits
    roomy: bool = False  # ROOMY instead of REGISTERS; where there are two consumers
    narrow: bool = False  # the tensors' head_dim is smaller, and the sums of dQ leave out what lies beyond it
    change_parts: int = 1  # in which a tile of scores becomes logits, so that fewer registers are taken at a time
    wide_keys: bool = False  # dK and dV are written in fp32

    @classmethod
    def of(cls, **choice) -> "Config":
        """From flat names: Config's own fields, and those of the alternatives that `split`, `dq` and `step` name (SUMS). TypeError for any other."""
        found = _taken(cls, choice)
        if choice:
            raise TypeError(f"this configuration has no {', '.join(choice)}")
        return found

    def but(self, **choice) -> "Config":
        """With other values, by the same names. An alternative that was not there begins with its defaults."""
        flat = _flat(self)
        parts = {"split": self.split, "dq": self.split.dq} | ({"step": self.split.step} if isinstance(self.split, ByKeys) else {})
        for name, part in parts.items():
            if choice.get(name, flat.get(name)) != flat.get(name):
                flat = {other: value for other, value in flat.items() if other not in _flat(part)}
        return self.of(**flat | choice)

    @property
    def enlarged(self) -> float:
        """What P is multiplied by before it is rounded: fp16 has few bits for probabilities below 6e-5, and none below 6e-8, as keys have that are
        far away or of a low bias. Where P stays in fp32 for dS and no score is changed, the naive formula loses as much of dV.
        """
        return 4096.0 if self.dtype == torch.float16 and (self.modified or self.lean or not self.by_keys) else 1.0

    @property
    def own_factor(self) -> bool:
        """Whether the factor of dP - delta in dS, which goes through shared memory, is not P as it is rounded for dV."""
        return not self.by_keys and bool(self.softcap or self.dropout)

    @property
    def repairs(self) -> bool:
        """Whether NaN and infinities may be hidden: by a mask, or by a bias that leaves a query nothing to see."""
        return self.mask_kind != "full" or self.bias is not None

    @property
    def looks(self) -> bool:
        """Whether it is known which hidden elements may have made a row NaN: where a row sees all keys between a first and a last one, and not where
        one row makes dQ of a whole tile NaN.
        """
        return self.repairs and self.mask_kind != "tiles" and self.bias is None and not self.one_block

    @property
    def bias_pairs(self) -> bool:
        """A bias is read one element at a time: transposed, no thread holds neighbours."""
        return False

    @property
    def repaired_parts(self) -> tuple[int, int]:
        """In how many parts of their columns dQ, and dK and dV, are repaired: as they are written, or in as many as fit into registers."""
        fit = -(-self.head_dim // 128)
        return fit if self.separate_dq_kernel else self.dq_grid[1] * self.dq_pieces, max(fit, self.column_parts)

    @property
    def repaired_columns(self) -> int:
        """Of a part, at most."""
        of_queries, of_keys = self.repaired_parts
        return max(self.head_dim // min(of_queries, of_keys), self.head_dim_v // of_keys)

    @property
    def by_keys(self) -> bool:
        return isinstance(self.split, ByKeys)

    @property
    def separate_dq_kernel(self) -> bool:
        return isinstance(self.split.dq, Apart)

    @property
    def one_block(self) -> bool:
        return isinstance(self.split.dq, Written)

    @property
    def direct(self) -> bool:
        return isinstance(self.split.dq, Direct | Apart)

    @property
    def finishes(self) -> bool:
        return isinstance(self.split.dq, Staged) and self.split.dq.finishes

    @property
    def persistent(self) -> bool:
        return isinstance(self.split.dq, Staged | Written) and self.split.dq.persistent

    @property
    def shares(self) -> bool:
        return isinstance(self.split, ByKeys) and self.split.shares

    @property
    def q_heads_in_turn(self) -> bool:
        """Whether a group's query heads have walks of their own, one after another."""
        return self.split.q_heads_in_turn if isinstance(self.split, ByKeys) else self.mask_kind == "tiles"

    @property
    def block_per_q_head(self) -> bool:
        return isinstance(self.split, ByKeys) and self.split.block_per_q_head

    @property
    def dq_transposed(self) -> bool:
        return isinstance(self.split, ByKeys) and self.split.dq_transposed

    @property
    def ahead(self) -> float:
        return self.split.ahead if isinstance(self.split, ByKeys) else 1

    @property
    def whole(self) -> Whole:
        """The choices of a whole step; none of them for any other."""
        return self.split.step if isinstance(self.split, ByKeys) and isinstance(self.split.step, Whole) else Whole()

    @property
    def lean(self) -> bool:
        return isinstance(self.split, ByKeys) and isinstance(self.split.step, Lean)

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = {
            "where keys are split, the consumers do not know a visit's tile of queries before it is there: dQ cannot go directly": (
                self.by_keys and self.direct and self.mask_kind == "tiles"
            ),
            "a persistent thread block needs walks over tiles": self.persistent and self.mask_kind == "tiles",
            "sums leave out columns only where there are sums, of dQ that is not transposed": self.narrow
            and (self.dq_transposed or not self.sums),
            "ROOMY is for two consumers": self.roomy and self.consumers != 2,
            "a tile's stage says which warp adds its dQ, so there are as many stages, or a multiple": self.by_keys
            and self.stages % ADDERS > 0,
            "what finishes dQ takes 64 columns of a warpgroup": self.finishes and self.dq_width != 64,
            "dropout comes between dP and delta, and knows no lean step": self.dropout and (self.whole.delta_in or self.lean),
            "log-sum-exps are asked for ahead only where scores are plain": self.whole.asks_ahead and self.modified,
            "blocks of keys are shared only where all are seen": self.shares and self.mask_kind != "full",
            "query heads are apart only where scores are plain, walks go over tiles, dQ is summed up and blocks are not shared": self.block_per_q_head
            and (self.modified or self.mask_kind == "tiles" or self.shares or not self.staged),
            "where blocks are shared and dQ is finished, thread blocks are persistent: they know whose dQ has to wait": (
                self.shares and self.finishes and not self.persistent
            ),
            "planes are of tables": self.q_heads_in_turn and self.mask_kind != "tiles",
        }
        for why, holds in wrong.items():
            if holds:
                raise ValueError(why)

    @property
    def consumers(self) -> int:
        return self.tile_n // 64 if self.by_keys else 2

    @property
    def column_parts(self) -> int:
        """Among how many warpgroups the columns of dK and dV are divided."""
        return 1 if self.by_keys else self.consumers

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
    def dq_elements(self) -> int:
        """Of dQ that one of their threads holds."""
        return self.tile_m * self.head_dim // (128 * self.dq_consumers)

    @property
    def counts(self) -> bool:
        """Whether Scratch.counter is there."""
        return self.persistent or self.partial

    @property
    def partial(self) -> bool:
        """Whether Scratch.partial is there."""
        return self.shares or self.block_per_q_head

    @property
    def counters(self) -> int:
        """Of a tile of dQ: how often it has been added to, or each warpgroup's part of it where these add by themselves."""
        return self.dq_consumers if self.direct else 1

    @property
    def delta_ahead(self) -> bool:
        """Whether -delta is read before P is there or after it: which of the two spills is found by trying."""
        return self.mask_kind == "tiles" and not (self.whole.delta_in or self.modified)

    @property
    def least_blocks(self) -> int:
        """Of the last kernel, on a multiprocessor, for the compiler; 0 leaves it free. Then it spills a few bytes to have one more."""
        squeezed = self.modified or self.mask_kind in ("varlen", "tiles") or (self.repairs and self.head_dim == 96)
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
        return not (self.separate_dq_kernel or self.one_block)

    @property
    def marks_last_visits(self) -> bool:
        """Whether Q and dO are first to leave the L2 cache at their last visit. Where scores are changed, registers are too few to know."""
        return self.sums and self.mask_kind != "tiles" and not self.modified

    def elements_of_sum(self, head_dim: int) -> int:
        """Of a tile of dQ in global memory. head_dim: of the tensors."""
        return self.tile_m * head_dim if self.sums else 4

    @property
    def registers(self) -> tuple[int, int]:
        return ROOMY if self.roomy else REGISTERS[self.consumers]


def _taken(kind: type, choice: dict):
    """A `kind` of the fields that `choice` has for it, which leave `choice`."""
    given = {}
    for each in dataclasses.fields(kind):
        if each.name in SUMS:
            default = next(name for name, other in SUMS[each.name].items() if isinstance(each.default, other))
            given[each.name] = _taken(SUMS[each.name][choice.pop(each.name, default)], choice)
        elif each.name in choice:
            given[each.name] = choice.pop(each.name)
    return kind(**given)


def _flat(part) -> dict:
    """What `_taken` makes a part of."""
    found = {}
    for each in dataclasses.fields(part):
        value = getattr(part, each.name)
        if each.name in SUMS:
            found[each.name] = next(name for name, other in SUMS[each.name].items() if isinstance(value, other))
            found |= _flat(value)
        else:
            found[each.name] = value
    return found


def names() -> set[str]:
    """All that `Config.of` takes."""
    parts = [Config, *(part for alternatives in SUMS.values() for part in alternatives.values())]
    return {each.name for part in parts for each in dataclasses.fields(part)}


# (head_dim, head_dim_v): choices of Config.of.
TILES = {
    (64, 64): dict(tile_m=128, tile_n=128, ahead=0.25),
    (96, 96): dict(tile_m=64, tile_n=128, dq_consumers=1),
    (128, 128): dict(tile_m=64, tile_n=128, ahead=0.25),
    (192, 128): dict(tile_m=64, tile_n=64, split="columns"),
    (192, 192): dict(tile_m=64, tile_n=64, split="columns"),
    (256, 256): dict(tile_m=64, tile_n=64, split="columns", dq_pieces=2),
}

# Where scores are changed by a softcap, by a bias or ALiBi ("natural"), or by both (and by a bias with ALiBi from places of the rows' own, which
# takes as much): what keeps registers from spilling. Likewise with dropout, alone or together with any of these or with tables ("both").
CHANGED = {
    "dropout": {(64, 64): dict(tile_m=64), (128, 128): dict(persistent=True, finishes=True)},
    "softcap": {(64, 64): dict(tile_m=64)},
    "natural": {(64, 64): dict(tile_m=64), (192, 128): dict(roomy=True)},
    "both": {
        (64, 64): dict(tile_m=64, change_parts=4),
        (96, 96): dict(change_parts=4),
        (128, 128): dict(tile_n=64, split="columns"),
        (192, 128): dict(change_parts=2, roomy=True),
        (192, 192): dict(change_parts=2, roomy=True),
        (256, 256): dict(change_parts=4),
    },
}

# In addition, where dQ is not computed apart.
CHANGED_WITH_DQ = {
    "dropout": {(128, 128): dict(change_parts=4)},
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


# Instead, for masks of these kinds and from that many queries on, the last that applies. Larger tiles of queries and keys ask less of shared memory
# for each product, and short sequences fill them badly; a block that visits few tiles would have to wait for what it finishes. H200, 2026-11-22
# (lab/rows/: backward-adders-h200.jsonl; `roomy` backward-prepares-h200.jsonl; what was chosen before backward-schedules-h200.jsonl,
# backward-dense-h200*).
FINISHES, PERSIST, SHARED, PAIRWISE = dict(finishes=True), dict(persistent=True), dict(shares=True), dict(pairwise=True)
AHEAD = dict(asks_ahead=True)
WHOLE = PAIRWISE | AHEAD | dict(delta_in=True, roomy=True)
LARGER = WHOLE | dict(tile_m=80, dq_transposed=True, ahead=0.5, roomy=False)
LONG = {
    ((128, 128), "full"): ((1, PERSIST | WHOLE), (1024, FINISHES | PERSIST | WHOLE), (2048, LARGER | PERSIST), (8192, LARGER | SHARED)),
    ((128, 128), "causal"): ((1, WHOLE), (1024, FINISHES | WHOLE)),
    ((128, 128), "band"): ((1, FINISHES | WHOLE),),
    ((128, 128), "varlen"): ((1, FINISHES | WHOLE),),
    ((64, 64), "full"): ((1, FINISHES | PERSIST | AHEAD), (1024, FINISHES | PERSIST | SHARED | AHEAD)),
    ((64, 64), "causal"): ((1, PAIRWISE | AHEAD), (256, FINISHES | PAIRWISE | AHEAD)),
    ((64, 64), "band"): ((1, FINISHES | PAIRWISE | AHEAD),),
    ((64, 64), "varlen"): ((1, PAIRWISE | AHEAD),),
}
# Five products, where neither tables nor changed scores take registers as well.
WIDE = dict(tile_n=128, split="keys", ds_stages=1, step="lean", ahead=0.25)
LONG |= {((192, 128), mask_kind): ((1, WIDE),) for mask_kind in ("full", "causal", "band", "varlen")}


# Where a thread block takes one block of keys after another: one's end and the next one's beginning take the time of two or three tiles, of
# which it saves a part. Where all keys are seen, LONG says when.
PERSISTENT = "causal", "band", "varlen"
PERSISTENT_UP_TO = 16384  # queries, under a causal mask (H200, 2026-11-22: with dQ finished by the way 4 to 5 % from 4,096 to 16,384)


@lru_cache(1024)
def configure(dtype: torch.dtype, head_dim: int, head_dim_v: int, mask_kind: str, seqlen_q: int = 1, few: bool = False, **choice) -> Config:
    """few: keys, at most ONE_BLOCK."""
    dims = tile_dims(head_dim, head_dim_v)
    config = Config.of(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], mask_kind=mask_kind, **(TILES[dims] | choice))
    if config.modified or config.dropout:
        config = config.but(**_instead(config, dims, few))
    else:
        larger = [fields for least, fields in LONG.get((dims, mask_kind), ()) if (1 if few else seqlen_q) >= least]
        fields = [fields for fields in larger if not (fields.get("step") and _spills_if_lean(dtype, mask_kind, few))]
        fields = [fields for fields in fields if not (fields.get("dq_transposed") and head_dim < dims[0])]
        if config.by_keys and mask_kind in PERSISTENT and (mask_kind != "causal" or seqlen_q <= PERSISTENT_UP_TO):
            config = config.but(persistent=True)
        config = config.but(**(fields[-1] if fields else {}) | choice)
    if few and isinstance(config.split, ByKeys):
        return _of_one_block(config)
    return replace(config, narrow=config.sums and head_dim < dims[0])


def _of_one_block(config: Config) -> Config:
    """These spill unless dS is rounded by twos, dP's registers start as -delta, or the producer has more registers."""
    plain_softcap = config.head_dim == 128 and config.softcap and not (config.natural or config.dropout)
    tight = {"delta_in": True, "roomy": True} if plain_softcap else {}
    if config.head_dim == 64 and config.mask_kind == "tiles" and not (config.modified or config.dropout):
        tight = {"delta_in": True}
    rounding = {} if config.lean else {"pairwise": True}
    return config.but(dq="written", persistent=config.persistent, shares=config.mask_kind == "full", **rounding, **tight)


def _spills_if_lean(dtype: torch.dtype, mask_kind: str, few: bool) -> bool:
    """8 to 32 bytes, or may."""
    return mask_kind != "full" if few else dtype == torch.float16 and mask_kind in ("band", "varlen")


def lengths() -> list[int]:
    """Numbers of queries, one for each way that tiles depend on them; and one at which as many keys take more than one block."""
    return sorted({1, ONE_BLOCK + 1, PERSISTENT_UP_TO + 1, *(least for each in LONG.values() for least, _ in each)})


def _instead(config: Config, dims: tuple[int, int], few: bool) -> dict:
    """Where tables and changed scores come together, dQ takes fewer registers as a sum; but the keys of one block leave nothing to sum up."""
    most = config.natural and (config.softcap or (config.bias is not None and config.diagonal))
    if config.dropout:
        how = "both" if config.modified or config.mask_kind == "tiles" else "dropout"
    else:
        how = "both" if most else "natural" if config.natural else "softcap"
    fields = CHANGED[how].get(dims, {})
    if config.mask_kind in ("varlen", "tiles") and not few:
        fields = fields | CHANGED_WITH_DQ[how].get(dims, {}) | (CHANGED_WITH_DQ["dropout"].get(dims, {}) if config.dropout else {})
        if fields.get("split") or not config.by_keys:
            fields["dq"] = "direct"
    if config.dropout and config.by_keys and not fields.get("split"):
        fields = fields | dict(pairwise=True, q_heads_in_turn=config.mask_kind == "tiles")  # else 96 columns spill
    return fields
