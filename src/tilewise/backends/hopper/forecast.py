"""What a configuration takes of a multiprocessor, and the rate that none of its limits lets a call exceed: arithmetic on `Config`, for `explain`.

Per clock a Hopper multiprocessor does 4096 multiplications and additions of its tensor cores, 16 exponentials, and 128 bytes of shared memory.
A warpgroup's product reads both operands from shared memory but for P, which is in its registers; nothing is read once for two warpgroups.
"""

import math
from dataclasses import dataclass

from tilewise.backends.hopper.forward.config import Config
from tilewise.machine.sheets import H100, Machine
from tilewise.masks.tiles import lower
from tilewise.problem import Call

PRODUCTS, EXPONENTIALS, SMEM_BYTES = 4096, 16, 128  # a clock
ROWS, THREADS_A_ROW = 64, 4  # of a warpgroup's scores: rows, and threads that hold one
WARPGROUP = 128


@dataclass(frozen=True)
class Clocks:
    """Clocks that a thread block's work on one tile of keys occupies each part of its multiprocessor."""

    products: float
    exponentials: float
    shared_memory: float

    @property
    def longest(self) -> str:
        return max(vars(self), key=vars(self).get)

    @property
    def most(self) -> float:
        return getattr(self, self.longest)


def clocks(config: Config) -> Clocks:
    dims = config.head_dim + config.head_dim_v
    numbers = config.tile_m * config.tile_n
    rescales = config.tile_m * THREADS_A_ROW
    a_warpgroup = (config.tile_n + ROWS) * config.head_dim + config.tile_n * config.head_dim_v  # K and Q, then V
    read, written = config.consumers * a_warpgroup, config.tile_n * dims
    return Clocks(2 * numbers * dims / PRODUCTS, (numbers + rescales) / EXPONENTIALS, 2 * (read + written) / SMEM_BYTES)


def smem_bytes(config: Config) -> int:
    """Of Q, the stages of K and V, and O where it has memory of its own; barriers come on top."""
    q = config.q_stages * config.tile_m * config.head_dim
    return 2 * (q + config.smem_elements_of_O + config.kv_stages * config.tile_n * (config.head_dim + config.head_dim_v))


@dataclass(frozen=True)
class Forecast:
    """Of one call: units of work (a tile of queries of one head), tiles that they visit, and the rate of useful work that cannot be exceeded."""

    units: int
    blocks: int
    visited: int
    flops_per_s: float
    limit: str

    @property
    def waves(self) -> float:
        return self.units / self.blocks


def forecast(config: Config, call: Call, machine: Machine = H100) -> Forecast:
    """As if every block worked without a pause, and the clock were that of the data sheet's rate."""
    visited = 0
    for plane in call.mask.planes(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q):
        full, partial, _ = lower(plane.region, config.tile_m, config.tile_n).tiles()
        visited += len(plane.batch) * len(plane.heads) * (full + partial)
    rows = math.ceil(call.seqlen_q / config.tile_m)
    units, busy = rows * call.heads_q * call.batch, machine.sms // config.cluster * config.cluster
    blocks, a_unit = busy * config.blocks, math.ceil(call.seqlen_k / config.tile_n)
    rounds, left = divmod(units, blocks)
    most = math.ceil(left * a_unit / blocks) if config.shares else min(left, 1) * a_unit  # tiles of what is left over, for a block
    even = (rounds * a_unit + most) * config.blocks
    steps = even if config.mask_kind == "full" else max(visited / busy, visited / max(units, 1))  # of a multiprocessor
    pairs = call.mask.pairs(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q)
    flops = 2 * pairs * (call.head_dim + call.head_dim_v)
    a_clock = machine.peak[config.dtype] / (machine.sms * PRODUCTS)
    each = clocks(config)
    idle = visited < 0.9 * steps * busy
    limit = "multiprocessors without work" if idle else each.longest.replace("_", " ")
    return Forecast(units, blocks, visited, flops * a_clock / max(steps * each.most, 1), limit)


def lines(config: Config, call: Call, machine: Machine = H100) -> list[str]:
    """The configuration and its forecast in sentences."""
    found, each = forecast(config, call, machine), clocks(config)
    producer, consumer = config.registers
    turns = "that take turns at the tensor cores" if config.pingpong else "without turns"
    together = f"; {config.cluster} blocks fetch keys together" if config.cluster > 1 else ""
    sharing = f", {config.blocks} such blocks a multiprocessor" if config.blocks > 1 else ""
    warpgroups = f"{config.consumers} warpgroup{'s' * (config.consumers > 1)} of {ROWS} queries"
    registers = WARPGROUP * config.blocks * (config.consumers * consumer + producer)
    share = {name: f"{value / each.products:.0%}" for name, value in vars(each).items()}
    return [
        f"kernel: {config.kv_stages} stages of {config.tile_n} keys, {warpgroups} {turns}{together}{sharing}",
        f"registers: {consumer} a computing thread, {producer} a loading one ({registers:,} of "
        f"{machine.registers:,}); shared memory: {smem_bytes(config) / 1024:.0f} of {config.shared_bytes / 1024:.0f} KiB",
        _padding(config, call),
        f"waves: {found.units:,} tiles of queries for {found.blocks} thread blocks, {found.waves:.2f} each",
        f"clocks of the limits, of the products': exponentials {share['exponentials']}, shared memory {share['shared_memory']}",
        f"predicted ceiling: {found.flops_per_s / 1e12:,.0f} TFLOP/s of visible pairs ({found.limit})",
    ]


def _padding(config: Config, call: Call) -> str:
    dims, tile = (call.head_dim, call.head_dim_v), (config.head_dim, config.head_dim_v)
    if dims == tile:
        return "padding: none"
    return f"padding: head_dim {dims[0]}, head_dim_v {dims[1]} are computed as {tile[0]}, {tile[1]} ({sum(dims) / sum(tile):.0%} is useful work)"
