"""What the warps of a rung do, and when: recorded by the kernel itself, with stamps (stamps.py), for pictures and for a trace viewer.

All blocks are stamped, so that all pay the same for it; kept are the first that ran on one multiprocessor. The command is in cli/tracing.py.
"""

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.ladder import stamps
from tilewise.sm90.phases import SLOTS, WARPS, Phase

BLOCKS = 8  # kept of a trace
MOST_BLOCKS = 1 << 15  # of a grid: 4 GB of events
LEAST_NS = 10_000  # between the first and the last look at the machine's clock, which steps by up to 1 us
ASSUMED_GHZ = 1.755  # an H100's clock under load, where that is too short to measure it

WORDS = {
    Phase.START: "prologue",
    Phase.EMPTY: "waits for an empty stage",
    Phase.LOAD: "loads",
    Phase.WAIT: "waits for a tile",
    Phase.TURN: "waits for its turn",
    Phase.ISSUE: "issues both products",
    Phase.SCORES: "S = Q Kᵀ",
    Phase.SOFTMAX: "softmax",
    Phase.OUTPUT: "O += P V",
    Phase.STORE: "stores O",
}
OF_GRADIENTS = WORDS | {
    Phase.SCORES: "S and dP",
    Phase.SOFTMAX: "P and dS",
    Phase.OUTPUT: "dV, dQ and dK",
    Phase.ADD: "adds dQ",
    Phase.STORE: "stores dV and dK",
}


@dataclass(frozen=True)
class Span:
    """A phase of a warp, in clocks since the trace began."""

    block: int  # of those kept
    warp: int
    phase: Phase
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Case:
    rung: str
    seqlen: int
    head_dim: int
    causal: bool
    heads: int  # batch * heads
    device: str
    cost: float = 0.0  # of the stamps: time with them over time without, less 1

    @property
    def name(self) -> str:
        return f"trace-{self.rung.replace(':', '-')}-s{self.seqlen}-d{self.head_dim}-{'causal' if self.causal else 'full'}"


@dataclass(frozen=True)
class Trace:
    """The events of a few blocks that ran on one multiprocessor, in the order of their beginning.

    blocks: (n,) their places in the grid, block of queries first, or backward of keys; events: (n, WARPS, SLOTS, 2) int32 (sm90/phases.py).
    """

    case: Case
    blocks: np.ndarray
    events: np.ndarray

    @cached_property
    def spans(self) -> list[Span]:
        """Of every warp, in order; a phase without a noted end is left out."""
        found = []
        for block, warp, clocks, phases in self._warps():
            for start, end, phase in zip(clocks, clocks[1:], phases, strict=False):
                found.append(Span(block, warp, Phase(phase), int(start), int(end)))
        return found

    @cached_property
    def words(self) -> dict[Phase, str]:
        """What phases are called: those of a backward pass are other ones."""
        return OF_GRADIENTS if (self.events[..., 1] == Phase.ADD).any() else WORDS

    @cached_property
    def ghz(self) -> float:
        """The multiprocessor's clock, from the moments at which warps noted the machine's time as well."""
        pairs = [
            (warp[ends[0]][0], warp[ends[0] + 1][0])
            for warp in self.events.reshape(-1, SLOTS, 2)
            if len(ends := np.flatnonzero(warp[:, 1] == Phase.END)) and ends[0] + 1 < SLOTS and warp[ends[0] + 1][1] == Phase.TIME
        ]
        if not pairs:
            return ASSUMED_GHZ
        clocks, ns = (_since(column, column[0]).astype(float) for column in np.array(pairs, np.int32).T)
        return float(np.polyfit(ns, clocks, 1)[0]) if np.ptp(ns) >= LEAST_NS else ASSUMED_GHZ

    def us(self, clocks: float) -> float:
        return clocks / self.ghz / 1e3

    def role(self, warp: int) -> str:
        """What the warp is for, as its phases tell."""
        phases = self._phases(warp)
        if not self.specialised:
            return f"warp {warp}, loads and computes" if Phase.EMPTY in phases else f"warp {warp}"
        return f"warp {warp}, consumer {warp // 4 - 1}" if Phase.SCORES in phases else f"warp {warp}, producer"

    @cached_property
    def specialised(self) -> bool:
        """A warp loads that does not compute."""
        return any(Phase.LOAD in self._phases(warp) and Phase.SCORES not in self._phases(warp) for warp in range(WARPS))

    def save(self, path: str | Path) -> Path:
        """Write it as the name's ending says: .npz the events, .json or .json.gz for a trace viewer; ValueError for another ending."""
        path = Path(path)
        if path.suffix == ".npz":
            np.savez_compressed(path, case=json.dumps(asdict(self.case)), blocks=self.blocks, events=self._trimmed())
        elif path.suffixes[-2:] == [".json", ".gz"]:
            path.write_bytes(gzip.compress(json.dumps(self.chrome()).encode(), mtime=0))
        elif path.suffix == ".json":
            path.write_text(json.dumps(self.chrome()), encoding="utf-8")
        else:
            raise ValueError(f"path is {path.name!r}; it must end in .npz, .json or .json.gz")
        return path

    @staticmethod
    def load(path: str | Path) -> "Trace":
        """What `save` wrote to an .npz file."""
        with np.load(path) as file:
            events = np.zeros((len(file["blocks"]), WARPS, SLOTS, 2), np.int32)
            events[:, :, : file["events"].shape[2]] = file["events"]
            return Trace(Case(**json.loads(str(file["case"]))), file["blocks"], events)

    def chrome(self) -> dict:
        """The trace event format of Chrome and Perfetto: a process a block, a thread a warp, a complete event ("X") a phase, in us."""
        rows = [
            {"ph": "M", "name": "process_name", "pid": block, "args": {"name": self.block_name(block)}} for block in range(len(self.blocks))
        ]
        for block, warp in sorted({(span.block, span.warp) for span in self.spans}):
            rows.append({"ph": "M", "name": "thread_name", "pid": block, "tid": warp, "args": {"name": self.role(warp)}})
            rows.append({"ph": "M", "name": "thread_sort_index", "pid": block, "tid": warp, "args": {"sort_index": warp}})
        for span in self.spans:
            times = {"ts": round(self.us(span.start), 4), "dur": round(self.us(span.end - span.start), 4)}
            event = {"ph": "X", "name": self.words[span.phase], "cat": span.phase.name.lower(), "pid": span.block, "tid": span.warp}
            rows.append({**event, **times, "args": {"clocks": span.end - span.start}})
        return {"traceEvents": rows, "displayTimeUnit": "ns", "otherData": {**asdict(self.case), "ghz": round(self.ghz, 4)}}

    def block_name(self, block: int) -> str:
        return f"block {self.blocks[block][0]} of head {self.blocks[block][1]}"

    def _warps(self):
        """(block, warp, clocks since the first, phases) of each warp that noted any."""
        stamps = self.events[..., 1] >= Phase.START
        first = self.events[stamps][:1, 0]
        begin = min((int(_since(clock, first)[0]) for clock in self.events[self.events[..., 1] == Phase.START][:, :1]), default=0)
        for block, warp in np.argwhere(stamps.any(axis=2)):
            mine = self.events[block, warp][stamps[block, warp]]
            yield int(block), int(warp), _since(mine[:, 0], first) - begin, mine[:, 1]

    def _phases(self, warp: int) -> set[Phase]:
        return {Phase(phase) for phase in np.unique(self.events[:, warp, :, 1])}

    def _trimmed(self) -> np.ndarray:
        used = np.flatnonzero(self.events[..., 1].any(axis=(0, 1)))
        return self.events[:, :, : used[-1] + 1 if len(used) else 0]


def _since(clocks: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Differences of 32-bit counters that have wrapped around once at most, as int64; negative for earlier ones."""
    return (clocks.astype(np.int64) - np.int64(first) + (1 << 31)) % (1 << 32) - (1 << 31)


def record(rung, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, blocks: int = BLOCKS) -> tuple[Trace, Tensor]:
    """The trace of checked tensors (see Rung.__call__), and O. UnsupportedError for k1, as its kernels have no phases, and for huge grids."""
    if not stamps.possible(rung.module):
        raise UnsupportedError(f"{rung.name} has no phases to trace: each of its kernels does one thing; take a rung from k2 on")
    scale = 1 / math.sqrt(q.shape[-1])

    def prepared() -> Callable:
        return partial(rung.run, q, k, v, causal, scale, operands=rung.operands(q, k, v, scale))

    trace, (o, _) = _recorded(rung, q, causal, "tile_m", prepared, blocks)
    return trace, o


def record_gradients(
    rung, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor, causal: bool = False, blocks: int = BLOCKS
) -> tuple[Trace, tuple[Tensor, Tensor, Tensor]]:
    """Likewise of a backward pass (see BackwardRung.__call__), with dQ, dK and dV; of its kernel that has products, not of `prepare`."""
    run = partial(rung.run, q, k, v, o, lse, d_o, causal=causal, scale=1 / math.sqrt(q.shape[-1]))
    return _recorded(rung, q, causal, "tile_n", lambda: run, blocks)


def _recorded(rung, q: Tensor, causal: bool, tile: str, prepared: Callable[[], Callable], blocks: int) -> tuple[Trace, tuple]:
    """The trace, and what `prepared()(events)` returns; tile: the field of its configuration that says how many tokens are a block's own."""
    if q.numel() == 0:
        raise UnsupportedError(f"there is nothing to trace: the tensors are {tuple(q.shape)}")
    heads, seqlen, head_dim = q.shape
    in_a_row = -(-seqlen // getattr(rung.code.configure(head_dim, causal, **rung.choice), tile))
    if in_a_row * heads > MOST_BLOCKS:
        raise UnsupportedError(
            f"{rung.name} is traced for at most {MOST_BLOCKS} blocks, and this is {in_a_row * heads}; take fewer heads or tokens"
        )
    events = torch.zeros((in_a_row * heads * WARPS * SLOTS, 2), dtype=torch.int32, device=q.device)
    run = prepared()
    plain = _fastest(run)
    stamped = _fastest(lambda: run(events=events))
    events.zero_()
    found = run(events=events)
    case = Case(
        rung=rung.name, seqlen=seqlen, head_dim=head_dim, causal=causal, heads=heads,
        device=torch.cuda.get_device_name(q.device), cost=round(stamped / plain - 1, 4),
    )  # fmt: skip
    return Trace(case, *keep(events.view(-1, WARPS, SLOTS, 2), in_a_row, blocks)), found


def _fastest(call, of: int = 4) -> float:
    """Milliseconds; the first call, which may compile, is one of `of`."""
    times = []
    for _ in range(of):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def keep(events: Tensor, m_blocks: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(places in the grid, events) of the first `count` blocks of the multiprocessor that ran block 0."""
    here = torch.nonzero(events[:, 0, 0, 0] == events[0, 0, 0, 0])[:, 0]
    begins = _since(events[here, 0, 1, 0].cpu().numpy(), events[0, 0, 1, 0].item())
    here = here.cpu()[torch.from_numpy(np.argsort(begins, kind="stable")[:count])]
    places = np.stack([here.numpy() % m_blocks, here.numpy() // m_blocks], axis=1)
    return places, events[here.to(events.device)].cpu().numpy()
