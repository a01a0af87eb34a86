"""What a call would do and what it costs, in sentences: the backend, its tiles, the work, the memory, and why the others were passed over."""

from dataclasses import dataclass, field
from html import escape

import torch

from tilewise.machine.roofline import Estimate, Shape, Tile, estimate, score_matrix_bytes
from tilewise.machine.sheets import machine_for
from tilewise.masks import Mask
from tilewise.masks.notebook import html
from tilewise.masks.tiles import lower
from tilewise.problem import Call, Problem
from tilewise.runtime.dispatch import choose, named, reasons


@dataclass(frozen=True, kw_only=True)
class TileCounts:
    """Tiles of all (batch, query head) pairs by what the mask leaves of them. Skipped tiles are neither loaded nor computed."""

    tile_m: int
    tile_n: int
    full: int
    partial: int
    skipped: int

    def __str__(self) -> str:
        total = max(1, self.full + self.partial + self.skipped)
        return (
            f"{self.tile_m} x {self.tile_n} (queries x keys): {self.full} full, {self.partial} partial, "
            f"{self.skipped} skipped ({self.skipped / total:.0%} of the score matrix is never touched)"
        )


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `attention` would run. `reasons` holds, for every backend, why it cannot run the problem or was passed over (empty: chosen)."""

    problem: Problem
    backend: str
    reasons: dict[str, list[str]]
    tiles: TileCounts | None
    pairs: int
    flops: int
    estimate: Estimate
    score_matrix_bytes: int
    notes: tuple[str, ...]
    runs_on: str = ""  # what the backend says of itself: instruction set, threads
    details: tuple[str, ...] = ()  # what it says of its kernel for this call
    mask: Mask | None = field(default=None, repr=False, compare=False)
    lengths: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)  # seqlen_q, seqlen_k

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}{f' ({self.runs_on})' if self.runs_on else ''}"]
        lines += [f"passed over: {name} ({'; '.join(why)})" for name, why in self.reasons.items() if why]
        lines.append(f"tiles: {self.tiles}" if self.tiles else "tiles: none (the whole score matrix at once)")
        lines += self.details
        lines.append(f"visible pairs: {self.pairs:,}")
        lines += [f"work: {line}" for line in self.estimate.lines()]
        lines.append(f"the naive formula would store {self.score_matrix_bytes / 1e6:,.1f} MB for one score matrix")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows: the picture of the mask, cut into the backend's tiles, over the sentences."""
        tile = None if self.tiles is None else (self.tiles.tile_m, self.tiles.tile_n)
        picture = "" if self.mask is None else html(self.mask, self.lengths, tile)
        rows = (line.partition(": ") for line in str(self).splitlines())
        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(said)}</td></tr>"
            for name, _, said in rows
        )
        return f"{picture}<table>{cells}</table>"


def describe(call: Call, backend: str | None, copied: list[str]) -> Explanation:
    """Explain `call`. `copied` names the inputs that were copied to make the last dimension contiguous.

    Raises:
        UnsupportedError: as running the call would.
    """
    problem = call.problem
    chosen = choose(problem, backend)
    passed_over = {name: list(why) for name, why in reasons(problem).items()}
    for name, why in passed_over.items():
        if name != chosen.name and not why:
            why.append("another backend was asked for" if backend else _preference(name, chosen.name))
    shape = Shape.of(call.q, call.k, call.v, call.mask)
    machine = machine_for(call.q.device)
    if machine is not None and call.q.dtype not in machine.peak:
        machine = None
    tile = chosen.tile(call)
    notes = [f"the last dimension of {name} is not contiguous; {name} is copied" for name in copied]
    if call.mask.kind == "bitmap":
        notes.append("the mask holds a dense boolean tensor: its tiles are found by looking at every bit")
    return Explanation(
        problem=problem,
        backend=chosen.name,
        reasons=passed_over,
        tiles=None if tile is None else _count(call, *tile),
        pairs=shape.pairs,
        flops=estimate(shape).flops,
        estimate=estimate(shape, machine=machine, tile=None if tile is None else Tile(tile_m=tile[0], tile_n=tile[1])),
        score_matrix_bytes=score_matrix_bytes(shape, torch.float32.itemsize),
        notes=tuple(notes),
        runs_on=chosen.describe(),
        details=tuple(chosen.details(call)),
        mask=call.mask,
        lengths=(call.seqlen_q, call.seqlen_k),
    )


def _preference(name: str, chosen: str) -> str:
    return named(name).by_name or f"it can run this, but {chosen} comes first"


def _count(call: Call, tile_m: int, tile_n: int) -> TileCounts:
    full = partial = skipped = 0
    for plane in call.mask.planes(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q):
        copies = len(plane.batch) * len(plane.heads)
        counts = lower(plane.region, tile_m, tile_n).tiles()
        full, partial, skipped = (total + copies * count for total, count in zip((full, partial, skipped), counts, strict=True))
    return TileCounts(tile_m=tile_m, tile_n=tile_n, full=full, partial=partial, skipped=skipped)
