"""What a call costs and what a machine can give: FLOPs, HBM bytes, intensity, thread blocks, on-chip budget, and the time none can beat.

Counts are exact for the algorithm they name. Sources: FA1 is arXiv 2205.14135, FA2 2307.08691, FA3 2407.08608.
Scores are counted by visible (query, key) pairs, so that a mask's saving appears wherever the algorithm can skip what the mask hides.
"""

from dataclasses import dataclass, field
from math import ceil
from typing import Literal

import torch
from torch import Tensor

from tilewise.machine.sheets import KB, Machine
from tilewise.masks import Mask

WARPGROUP = 128  # threads
STATISTIC_BYTES = 4  # m, l, LSE and delta are fp32
ACCUMULATOR_BYTES = 4  # so is dQ, which several thread blocks add to

Direction = Literal["fwd", "bwd", "fwd+bwd"]
Algorithm = Literal["naive", "fa1", "fa2", "once"]
DIRECTIONS: dict[str, tuple[str, ...]] = {"fwd": ("fwd",), "bwd": ("bwd",), "fwd+bwd": ("fwd", "bwd")}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one call. `pairs` counts the visible (query, key) pairs over all batches and query heads; None: all are visible."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int = None  # pyright: ignore[reportAssignmentType]  (None: head_dim, which __post_init__ puts there)
    dtype: torch.dtype = torch.bfloat16
    pairs: int = None  # pyright: ignore[reportAssignmentType]  (None: all_pairs, likewise)

    def __post_init__(self):
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if self.pairs is None:
            object.__setattr__(self, "pairs", self.all_pairs)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> "Shape":
        """The shape of a call on q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_k, head_dim), v (..., head_dim_v)."""
        batch, seqlen_q, heads_q, head_dim = q.shape
        _, seqlen_k, heads_k, head_dim_v = v.shape
        return cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads_q,
            heads_k=heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=q.dtype,
            pairs=mask.pairs(seqlen_q, seqlen_k, batch, heads_q),
        )

    @property
    def all_pairs(self) -> int:
        return self.batch * self.heads_q * self.seqlen_q * self.seqlen_k

    @property
    def q_rows(self) -> int:
        """Query rows over batches and heads: the length of LSE and delta."""
        return self.batch * self.heads_q * self.seqlen_q

    @property
    def q_elements(self) -> int:
        return self.q_rows * self.head_dim

    @property
    def o_elements(self) -> int:
        return self.q_rows * self.head_dim_v

    @property
    def k_elements(self) -> int:
        return self.batch * self.heads_k * self.seqlen_k * self.head_dim

    @property
    def v_elements(self) -> int:
        return self.batch * self.heads_k * self.seqlen_k * self.head_dim_v


def flops(shape: Shape, direction: Direction = "fwd") -> int:
    """FLOPs of the products on the visible pairs: two forward (S, O), five backward (S again, dV, dP, dQ, dK), 2 a multiply-add.

    With head_dim_v = head_dim that is 4 and 10 times pairs * head_dim, so backward is 2.5 times forward.
    """
    d, d_v = shape.head_dim, shape.head_dim_v
    per_pair = {"fwd": 2 * (d + d_v), "bwd": 2 * (3 * d + 2 * d_v)}
    return sum(per_pair[part] for part in DIRECTIONS[direction]) * shape.pairs


def paper_flops(shape: Shape, causal: bool, direction: Direction = "fwd") -> int:
    """The papers' convention (FA2 section 4.1): 4 * seqlen^2 * head_dim * heads, halved for causal; backward 2.5 times that."""
    forward = 2 * (shape.head_dim + shape.head_dim_v) * shape.all_pairs // (2 if causal else 1)
    return sum({"fwd": forward, "bwd": forward * 5 // 2}[part] for part in DIRECTIONS[direction])


def score_matrix_bytes(shape: Shape, itemsize: int | None = None) -> int:
    """One materialised seqlen_q x seqlen_k matrix of scores for every batch and head: what the naive formula keeps, twice (S and P)."""
    return shape.all_pairs * (shape.dtype.itemsize if itemsize is None else itemsize)


def hbm_bytes(shape: Shape, algorithm: Algorithm, direction: Direction = "fwd", tiles: tuple[int, int] = (128, 128)) -> int:
    """Bytes that `algorithm` moves between HBM and chip with `tiles` (tile_m, tile_n), caches not counted.

    "naive": three kernels that write and read S and P whole, backward also dP and dS (FA1, Algorithms 0 and 3).
    "fa1": keys outside, queries inside; O, m and l go back and forth once a key tile (FA1, Algorithms 1 and 4). With `fa1_tiles` the
    forward is 12 * pairs * head_dim^2 / M elements to first order: FA1's Theorem 2 with its constant.
    "fa2": queries outside, so only K and V are read again; LSE instead of m and l (FA2, Algorithms 1 and 2).
    "once": every operand exactly once: what no algorithm can go below, and what FA2 reaches when L2 serves the repeated reads.
    Raises ValueError for another algorithm.
    """
    counts = {"naive": _naive_bytes, "fa1": _fa1_bytes, "fa2": _fa2_bytes, "once": _once_bytes}
    if algorithm not in counts:
        raise ValueError(f"algorithm is {algorithm!r}; it must be one of {', '.join(counts)}")
    return sum(counts[algorithm](shape, part, tiles) for part in DIRECTIONS[direction])


def _naive_bytes(shape: Shape, part: str, tiles: tuple[int, int]) -> int:
    q, k, v, o, n2 = shape.q_elements, shape.k_elements, shape.v_elements, shape.o_elements, shape.all_pairs
    kernels = {
        "fwd": (q + k + n2, n2 + n2, n2 + v + o),  # S = Q K^T; P = softmax(S); O = P V
        # dV = P^T dO; dP = dO V^T; dS = P (dP - delta); dQ = dS K; dK = dS^T Q
        "bwd": (n2 + o + v, o + v + n2, 3 * n2, n2 + k + q, n2 + q + k),
    }
    return sum(kernels[part]) * shape.dtype.itemsize


def _once_bytes(shape: Shape, part: str, tiles: tuple[int, int]) -> int:
    q, k, v, o = shape.q_elements, shape.k_elements, shape.v_elements, shape.o_elements
    operands = q + k + v + o if part == "fwd" else 2 * (q + k + v + o)  # backward reads Q K V O dO and writes dQ dK dV
    return operands * shape.dtype.itemsize + shape.q_rows * STATISTIC_BYTES


def _fa1_bytes(shape: Shape, part: str, tiles: tuple[int, int]) -> int:
    size, d, d_v = shape.dtype.itemsize, shape.head_dim, shape.head_dim_v
    # Every visible pair's query row is fetched once for each key tile it meets: pairs / tile_n times over all rows.
    row_visits = ceil(shape.pairs / tiles[1])
    kv = (shape.k_elements + shape.v_elements) * size
    if part == "fwd":
        return kv + row_visits * ((d + 2 * d_v) * size + 4 * STATISTIC_BYTES)  # read Q O m l, write O m l
    dq = 2 * d * ACCUMULATOR_BYTES
    return 2 * kv + row_visits * ((d + 2 * d_v) * size + dq + 2 * STATISTIC_BYTES)  # read Q O dO dQ m l, write dQ; dK, dV once


def _fa2_bytes(shape: Shape, part: str, tiles: tuple[int, int]) -> int:
    size, d, d_v = shape.dtype.itemsize, shape.head_dim, shape.head_dim_v
    tile_m, tile_n = tiles
    if part == "fwd":
        key_visits = ceil(shape.pairs / tile_m)
        return (shape.q_elements + shape.o_elements) * size + shape.q_rows * STATISTIC_BYTES + key_visits * (d + d_v) * size
    row_visits = ceil(shape.pairs / tile_n)
    delta = shape.o_elements * 2 * size + shape.q_rows * STATISTIC_BYTES  # rowsum(dO * O), beforehand
    kv = 2 * (shape.k_elements + shape.v_elements) * size
    dq = 2 * d * ACCUMULATOR_BYTES
    return delta + kv + row_visits * ((d + d_v) * size + dq + 2 * STATISTIC_BYTES)  # read Q dO dQ LSE delta, write dQ


def fa1_tiles(shape: Shape, on_chip_bytes: int) -> tuple[int, int]:
    """FA1's Algorithm 1, line 1: (tile_m, tile_n) = (min(M / 4d, d), M / 4d), M the on-chip memory in elements."""
    tile_n = max(1, ceil(on_chip_bytes // shape.dtype.itemsize / (4 * shape.head_dim)))
    return min(tile_n, shape.head_dim), tile_n


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A kernel's tile configuration. Shared memory: `q_stages` tiles of Q, `kv_stages` of K and of V, and the scores where they live there.

    `kv_shared`: K and V take turns in one buffer. `scores_bytes`: bytes a score takes in shared memory; 0 when S and P stay in registers.
    `threads` are those that hold the accumulators (the consumers, not the producer).
    """

    tile_m: int
    tile_n: int
    threads: int = WARPGROUP
    q_stages: int = 1
    kv_stages: int = 1
    kv_shared: bool = False
    scores_bytes: int = 0

    def smem_bytes(self, shape: Shape) -> int:
        """Shared memory of one thread block, barriers not counted."""
        size, d, d_v = shape.dtype.itemsize, shape.head_dim, shape.head_dim_v
        kv = max(d, d_v) if self.kv_shared else d + d_v
        q_tiles = self.q_stages * self.tile_m * d * size
        kv_tiles = self.kv_stages * self.tile_n * kv * size
        return q_tiles + kv_tiles + self.tile_m * self.tile_n * self.scores_bytes

    def accumulators(self, shape: Shape) -> dict[str, int]:
        """32-bit registers a thread holds for each accumulator: acc_S, acc_O, and P as the second product's operand."""
        per_thread = 0 if self.scores_bytes else self.tile_m * self.tile_n / self.threads
        return {
            "acc_S": ceil(per_thread),
            "acc_O": ceil(self.tile_m * shape.head_dim_v / self.threads),
            "P": ceil(per_thread * shape.dtype.itemsize / 4),
        }

    def blocks_per_sm(self, shape: Shape, machine: Machine) -> int:
        """Thread blocks resident on an SM at once, by shared memory, accumulator registers and threads; 0 when one does not fit."""
        smem = self.smem_bytes(shape)
        if smem > machine.smem_block_bytes:
            return 0
        reserved = smem + KB  # the system keeps 1 KB a block
        registers = self.threads * sum(self.accumulators(shape).values())
        return min(machine.smem_bytes // reserved, machine.registers // max(1, registers), machine.threads // self.threads)


def fa1_blocks(shape: Shape) -> int:
    """Thread blocks of FA1's forward: one a batch and head (FA2 section 3.2)."""
    return shape.batch * shape.heads_q


def fa2_blocks(shape: Shape, tile_m: int) -> int:
    """Thread blocks of FA2's forward: one a batch, head and query tile (FA2 section 3.2)."""
    return fa1_blocks(shape) * ceil(shape.seqlen_q / tile_m)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How `blocks` equal thread blocks lie on a machine's SMs. `tail_efficiency`: their work over what the waves they occupy could do."""

    blocks: int
    idle_sms: int
    waves: int
    tail_efficiency: float

    @classmethod
    def of(cls, blocks: int, machine: Machine, blocks_per_sm: int = 1) -> "Launch":
        slots = machine.sms * blocks_per_sm
        waves = ceil(blocks / slots)
        return cls(
            blocks=blocks,
            idle_sms=max(0, machine.sms - blocks),
            waves=waves,
            tail_efficiency=blocks / (waves * slots) if blocks else 1.0,
        )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a call costs; with a machine, also what bounds it. Bytes are HBM bytes by algorithm, times are seconds, rates FLOP/s."""

    flops: int
    bytes: dict[str, int]
    intensity: dict[str, float]  # FLOP/byte
    machine: Machine | None = None
    ridge: float | None = None
    bound: str | None = None  # "compute", "exponentials" or "memory", whichever takes longest with operands read once
    seconds: float | None = None
    attainable: float | None = None
    launches: dict[str, Launch] = field(default_factory=dict)
    smem_bytes: int | None = None
    registers: dict[str, int] = field(default_factory=dict)
    blocks_per_sm: int | None = None

    def lines(self) -> list[str]:
        """The estimate as short sentences, for people."""
        text = [f"{self.flops / 1e9:,.2f} GFLOP on visible pairs"]
        text += [f"{name}: {self.bytes[name] / 1e6:,.1f} MB through HBM, {self.intensity[name]:,.1f} FLOP/byte" for name in self.bytes]
        if self.machine is not None:
            assert self.seconds is not None and self.attainable is not None  # `estimate` has them of every machine
            text.append(
                f"{self.machine.name}: ridge {self.ridge:,.0f} FLOP/byte, bound by {self.bound}, "
                f"at best {self.seconds * 1e6:,.1f} us = {self.attainable / 1e12:,.1f} TFLOP/s"
            )
        text += [
            f"{name}: {launch.blocks} thread blocks, {launch.idle_sms} SMs idle, {launch.waves} waves, tail {launch.tail_efficiency:.0%}"
            for name, launch in self.launches.items()
        ]
        if self.blocks_per_sm is not None and self.smem_bytes is not None:
            registers = " + ".join(f"{count} {name}" for name, count in self.registers.items())
            fit = f"{self.blocks_per_sm} blocks an SM" if self.blocks_per_sm else "more than one thread block may take"
            text.append(f"tile: {self.smem_bytes / KB:,.0f} KB of shared memory, {registers} registers a thread, {fit}")
        return text


def estimate(shape: Shape, *, machine: Machine | None = None, tile: Tile | None = None, direction: Direction = "fwd") -> Estimate:
    """The cost of `shape`; on `machine` the time nothing can beat, and how FA1's and FA2's grids fill it with `tile` (default 128 x 128).

    The bound is the longest of three: products at the tensor cores' peak, one exponential a pair and pass, and every operand moved once.
    Raises ValueError when the machine has no rate for the dtype.
    """
    work = flops(shape, direction)
    tiles = (tile.tile_m, tile.tile_n) if tile else (128, 128)
    moved = {name: hbm_bytes(shape, name, direction, tiles) for name in ("naive", "fa1", "fa2", "once")}
    intensity = {name: work / count if count else 0.0 for name, count in moved.items()}
    known = {"flops": work, "bytes": moved, "intensity": intensity}
    if tile is not None:
        known |= {"smem_bytes": tile.smem_bytes(shape), "registers": tile.accumulators(shape)}
    if machine is None:
        return Estimate(**known)
    if shape.dtype not in machine.peak:
        raise ValueError(f"dtype {shape.dtype} has no peak rate on {machine.name}; it has {', '.join(map(str, machine.peak))}")
    seconds = {
        "compute": work / machine.peak[shape.dtype],
        "exponentials": shape.pairs * len(DIRECTIONS[direction]) / machine.exp_peak,
        "memory": moved["once"] / machine.hbm_bandwidth,
    }
    bound = max(seconds, key=seconds.__getitem__)
    blocks_per_sm = tile.blocks_per_sm(shape, machine) if tile else None
    known["launches"] = {
        "FA1": Launch.of(fa1_blocks(shape), machine),
        "FA2": Launch.of(fa2_blocks(shape, tiles[0]), machine, max(1, blocks_per_sm or 1)),
    }
    return Estimate(
        **known,
        machine=machine,
        ridge=machine.ridge(shape.dtype),
        bound=bound,
        seconds=seconds[bound],
        attainable=work / seconds[bound] if seconds[bound] else 0.0,
        blocks_per_sm=blocks_per_sm,
    )
