"""What the Triton backend was to reach, next to the newest row of each cell of the set `triton`, and why it is missed where that is known."""

from collections.abc import Iterable

from tilewise.bench.sets import SETS, Workload
from tilewise.bench.sets.named import LOW_SOFTCAP
from tilewise.bench.store import Row
from tilewise.bench.tables.rows import MISSING, header, line
from tilewise.masks import Causal, Documents, Full, SlidingWindow

IMPL = "tilewise:triton"
GOALS = {  # by head_dim and kind: TFLOP/s forward and backward, of one H100
    (128, "full"): (550, 430),
    (128, "causal"): (450, 390),
    (128, "window of 1,024"): (340, 300),
    (128, "documents of 1,024"): (320, 260),
    (128, "softcap"): (330, 330),
    (64, "full"): (430, 330),
    (64, "causal"): (390, 310),
    (64, "window of 1,024"): (290, 230),
    (64, "documents of 1,024"): (230, 200),
}
SHARE = 0.85  # of the causal mask's rate on the same GPU: cells of changed scores that have no goal of their own
CHANGES = {"softcap": "softcap", "alibi": "ALiBi", "bias": "a bias", "sink": "a sink"}
MASKS = {Full: "full", Causal: "causal", SlidingWindow: "window of 1,024", Documents: "documents of 1,024"}
LARGE = "softcap of large scores"
NOT_KNOWN = "cause not known"
WHY = {  # by kind and direction, or kind alone
    ("full", "fwd"): "loads by TMA, of which the plan expected 550 at 128, where pointers were to give 450, are not built",
    **dict.fromkeys(
        (("window of 1,024", "fwd"), ("documents of 1,024", "fwd")),
        "a block takes some 9 us besides its tiles (8 at 64), for what is not known, and a tile 1 us; in a window a block has 17, in a document 8.5",
    ),
    "softcap": "a score takes some nine more instructions",
    LARGE: "a score takes some sixteen more instructions, two of them the exponential unit's",
}
CLOCKS = "graph", "events", "wall"


def kind_of(workload: Workload) -> str:
    """What a cell is called: what changes its scores, or its mask."""
    if workload.softcap == LOW_SOFTCAP:
        return LARGE
    changed = next((words for name, words in CHANGES.items() if name in workload.changes), None)
    return changed or MASKS[type(workload.mask)]


def goals_table(rows: Iterable[Row]) -> str:
    """A line a cell and direction: to reach, measured, where and when, and the outcome. The newest row counts, of whichever GPU."""
    rows = [row for row in rows if row.impl == IMPL and row.flops_per_s]
    lines = header("cell, 8k tokens, bf16", "direction", "to reach", "measured", "share of it", "on", "outcome", left=2)
    lines[1] = "|---|---|---:|---:|---:|---|---|"
    for direction in ("fwd", "bwd"):
        cells = SETS["triton"](direction=direction)
        plain = {cell.head_dim: cell for cell in cells if cell.mask == Causal() and not cell.changes}
        for cell in cells:
            kind = kind_of(cell)
            found, goals = _newest(rows, cell), GOALS.get((cell.head_dim, kind))
            if goals:
                unit, to_reach, measured = "", goals[direction == "bwd"], found and found.rate / 1e12
            else:
                beside = found and _newest([row for row in rows if row.device == found.device], plain[cell.head_dim])
                unit, to_reach = " % of causal", round(100 * SHARE)
                measured = 100 * found.rate / beside.rate if found and beside else None
            lines.append(
                line((f"{cell.head_dim}, {kind}", direction, f"{to_reach}{unit}", *_outcome(to_reach, measured, unit, found, kind)))
            )
    return "\n".join(lines)


def _newest(rows: list[Row], cell: Workload) -> Row | None:
    """The cell's row of the last date, by the clock that counts for a kernel."""
    same = [row for row in rows if row.name == cell.name and row.case == cell.case]
    last = max((_when(row) for row in same), default="")
    return min((row for row in same if _when(row) == last), key=lambda row: CLOCKS.index(row.clock), default=None)


def _when(row: Row) -> str:
    return str(row.environment.get("date", ""))


def _outcome(to_reach: float, measured: float | None, unit: str, found: Row | None, kind: str) -> tuple[str, str, str, str]:
    """Measured, its share of the goal, where and when, and whether that is a miss and why."""
    if found is None or measured is None:
        return MISSING, MISSING, MISSING, "not measured"
    why = WHY.get((kind, str(found.case["direction"])), WHY.get(kind, NOT_KNOWN))
    outcome = "**reached**" if measured >= to_reach else f"missed: {why}"
    where = f"{found.device.removeprefix('NVIDIA ').split()[0]}, {_when(found)[:10]}"
    return f"{measured:.0f}{' %' if unit else ''}", f"{measured / to_reach:.2f}", where, outcome
