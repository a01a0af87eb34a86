"""The tables of hardware counters in docs, from the rows of lab/instruments: `python tools/counter_tables.py` rewrites the pages that changed.

In docs/worklog/*.md they stand between `<!-- profile:k5 -->` and `<!-- /profile -->`: a list of rungs (`profile:k3_1,k3_2`) shows these, a single one
also the rung before it. In docs/*.md between `<!-- counters:fwd -->` and `<!-- /counters -->`: all cells of a direction.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROFILES, PAGES = ROOT / "benchmarks/results/profiles", ROOT / "docs"
HEAD_DIM = 128  # of the rungs that are profiled


def pipe(row: dict, word: str) -> float | None:
    """The busiest pipe whose name holds `word`: what a pipe counts differs between GPUs, and so does its name."""
    return max((value for name, value in row["pipes_percent"].items() if re.search(word, name)), default=None)


def conflicts(row: dict) -> float | None:
    """Of the passes through shared memory that threads made, the share that bank conflicts added, in %."""
    passes, added = (
        sum(row["numbers"].get(f"shared_{way}_{what}", 0.0) for way in ("load", "store")) for what in ("wavefronts", "conflicts")
    )
    return 100 * added / passes if passes else None


def number(name: str):
    return lambda row: row["numbers"].get(name)


LINES = (
    ("time, us", lambda row: row["time_us"], "{:,.0f}"),
    ("tensor cores, % of their cycles", lambda row: pipe(row, "tensor"), "{:.0f}"),
    ("multiply-add pipe, %", lambda row: pipe(row, r"^fma"), "{:.0f}"),
    ("exponential pipe (XU), %", lambda row: pipe(row, r"^xu"), "{:.0f}"),
    ("load and store pipe, %", lambda row: pipe(row, r"^lsu"), "{:.0f}"),
    ("shared memory by threads, % of its passes", number("shared_percent"), "{:.0f}"),
    ("of these for bank conflicts, %", conflicts, "{:.0f}"),
    ("L1 and shared memory in all, %", number("l1_percent"), "{:.0f}"),
    ("L2, %", number("l2_percent"), "{:.0f}"),
    ("HBM, %", number("dram_percent"), "{:.0f}"),
    ("HBM read, MB", lambda row: _scaled(row, "dram_read_bytes"), "{:,.0f}"),
    ("HBM written, MB", lambda row: _scaled(row, "dram_write_bytes"), "{:,.0f}"),
    ("issue slots used, %", lambda row: row["numbers"].get("issue_percent", _scaled(row, "issue_per_cycle", 100)), "{:.0f}"),
    ("warps resident, % of 64", number("occupancy_percent"), "{:.0f}"),
    ("registers a thread", number("registers"), "{:.0f}"),
)  # fmt: skip


def _scaled(row: dict, name: str, factor: float = 1e-6) -> float | None:
    found = row["numbers"].get(name)
    return None if found is None else found * factor


def table(names: list[str], rows: list[dict]) -> list[str]:
    """Markdown: a line a measure, a column a kernel; the last row of each rung's kernel counts."""
    latest = {(row["rung"], row["kernel"]): row for row in rows}
    columns = [row for name in names for (rung, _), row in latest.items() if rung == name]
    heads = [row["rung"] if row["kernel"] == "kernel" else f"{row['rung']} {row['kernel']}" for row in columns]
    lines = [f"| head_dim {HEAD_DIM}, full | {' | '.join(heads)} |", "|---|" + "---:|" * len(columns)]
    for title, read, form in LINES:
        found = [read(row) for row in columns]
        if any(value is not None for value in found):
            lines.append(f"| {title} | {' | '.join('–' if value is None else form.format(value) for value in found)} |")
    for place, ordinal in enumerate(("most", "second", "third")):
        reasons = [list(row["stalls_percent"].items())[place : place + 1] for row in columns]
        cells = ["–" if not each else f"{each[0][0].replace('_', ' ')} {each[0][1]:.0f} %" for each in reasons]
        lines.append(f"| why warps wait, {ordinal} | {' | '.join(cells)} |")
    tokens = ", ".join(dict.fromkeys(f"{head} {row['case']['seqlen']}" for head, row in zip(heads, columns, strict=True)))
    where = columns[-1]["environment"]
    stamp = f"{where.get('device')}, {where.get('date', '')[:10]}, commit {where.get('commit')}; {where.get('ncu')}"
    return [*lines, "", f"One launch; tokens a sequence: {tokens}. {stamp}."]


CALL_LINES = (  # title, what to read, how to write it; of the longest kernel
    ("us", lambda row: row["time_us"], "{:,.0f}"),
    ("million cycles", lambda row: _scaled(row, "cycles"), "{:.3f}"),
    ("other kernels, us", lambda row: sum(time_us for _, time_us in row["others_us"]) or None, "{:,.0f}"),
    ("tensor cores, %", lambda row: pipe(row, "tensor"), "{:.1f}"),
    ("issue slots, %", number("issue_percent"), "{:.1f}"),
    ("million instructions", lambda row: _scaled(row, "instructions"), "{:,.0f}"),
    ("shared memory, million wavefronts", lambda row: _scaled(row, "shared_wavefronts"), "{:,.0f}"),
    ("L2, million sectors", lambda row: _scaled(row, "l2_sectors"), "{:,.0f}"),
    ("L2 hits, %", number("l2_hit_percent"), "{:.0f}"),
    ("HBM, MB", lambda row: _scaled(row, "dram_read_bytes", 1e-6) + (_scaled(row, "dram_write_bytes") or 0.0), "{:,.0f}"),
    ("why warps wait", lambda row: reasons(row, 4), "{}"),
)
ENERGY_LINES = (
    ("us a call", lambda row: row["time_us"], "{:,.0f}"),
    ("SM clock, MHz", lambda row: row["clock_mhz"], "{:,.0f}"),
    ("W", lambda row: row["watts"], "{:.0f}"),
    ("J a call", lambda row: row["joules"], "{:.3f}"),
    ("pJ a FLOP", lambda row: 1e12 * row["joules"] / row["flops"], "{:.3f}"),
)  # fmt: skip


def reasons(row: dict, most: int) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {share:.0f} %" for name, share in list(row["stalls_percent"].items())[:most])


def table_of_calls(rows: list[dict]) -> list[str]:
    """Markdown: a line a call, counters first and, where it was measured, energy after them; the last row of each call counts."""
    lines = []
    for columns, note in ((CALL_LINES, "One call each, alone, by Nsight Compute"), (ENERGY_LINES, "Calls without a pause, in turns")):
        kind = [row for row in rows if ("joules" in row) == (columns is ENERGY_LINES)]
        latest = {(row["id"], row["impl"]): row for row in kind}
        if not latest:
            continue
        found = [[_written(row, read, form) for _, read, form in columns] for row in latest.values()]
        kept = [i for i in range(len(columns)) if any(cells[i] != "–" for cells in found)]
        lines += ["", f"| | | {' | '.join(columns[i][0] for i in kept)} |", "|---|---|" + "---:|" * len(kept)]
        for (name, impl), cells in zip(latest, found, strict=True):
            lines.append(f"| {name} | {impl} | {' | '.join(cells[i] for i in kept)} |")
        where = list(latest.values())[-1]["environment"]
        stamp = f"{where.get('device')}, {where.get('date', '')[:10]}, commit {where.get('commit')}"
        lines += ["", f"{note}. {stamp}{'; ' + where['ncu'] if 'ncu' in where else ''}."]
    return lines


def _written(row: dict, read, form: str) -> str:
    try:
        value = read(row)
    except (KeyError, TypeError):  # not counted there
        value = None
    return "–" if value is None else form.format(value)


MARKED = re.compile(r"(<!-- profile:([\w:,]+) -->\n).*?(<!-- /profile -->)", re.DOTALL)
CALLS_MARKED = re.compile(r"(<!-- counters:([\w+]+) -->\n).*?(<!-- /counters -->)", re.DOTALL)


def refreshed(page: str, rows: list[dict]) -> str:
    """The page with every marked table written anew."""
    from tilewise.ladder import RUNGS

    ladder = list(RUNGS)
    on_ladder, calls = [row for row in rows if "rung" in row], [row for row in rows if "impl" in row]

    def write(match: re.Match) -> str:
        names = match[2].split(",")
        profiled = {row["rung"] for row in on_ladder}
        if not profiled & set(names):
            return match[0]  # not profiled yet
        if len(names) == 1:
            below = ladder[: ladder.index(names[0].partition(":")[0])]
            names[:0] = [name for name in below if name in profiled][-1:]
        return match[1] + "\n".join(table(names, on_ladder)) + "\n" + match[3]

    def write_calls(match: re.Match) -> str:
        mine = [row for row in calls if row["case"]["direction"] == match[2]]
        return match[1] + "\n".join([*table_of_calls(mine), ""]) + "\n" + match[3] if mine else match[0]

    return CALLS_MARKED.sub(write_calls, MARKED.sub(write, page))


def tables() -> int:
    found = [row for path in sorted(PROFILES.glob("*.jsonl")) for row in load(path)]
    for page in sorted(PAGES.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        if (after := refreshed(before, found)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
    return 0


def load(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(tables())
