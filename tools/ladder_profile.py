"""What limits each rung, by the hardware's counters: `python tools/ladder_profile.py run` on a machine with an H100 and Nsight Compute.

    run [k5 ...]   profile one launch of each rung and append rows to benchmarks/results/profiles/h100.jsonl (or --out)
    reread FILE    make rows of counters that `run --raw FILE` kept; needs no GPU
    tables         write the rows as tables into docs/worklog/*.md, between `<!-- profile:k5 -->` and `<!-- /profile -->`; a list of
                   rungs (`profile:k3_1,k3_2`) shows these, a single one also the rung before it

All rungs share one process, whose compilations and first launches are not profiled. Counters have names that move between GPUs and versions,
so everything is collected and the columns that match a pattern are kept.
"""

import argparse
import csv
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks/results/profiles/h100.jsonl"
PAGES = ROOT / "docs/worklog"
HEAD_DIM, HIDDEN = 128, 2048
SEQLEN, TOKENS = 4096, 16384
K1_SEQLEN, K1_TOKENS = 2048, 4096  # its S takes 0.5 GB, ten times the L2 cache
K1_KERNELS = ("compute_S", "compute_P", "compute_O")

# Kept as one number each: name in the row -> candidates, the first that Nsight Compute knows.
NUMBERS = {
    "sm_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "l1_percent": ("l1tex__throughput.avg.pct_of_peak_sustained_active", "l1tex__throughput.avg.pct_of_peak_sustained_elapsed"),
    "l2_percent": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", "lts__t_sectors.avg.pct_of_peak_sustained_elapsed"),
    "dram_percent": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "dram__throughput.avg.pct_of_peak_sustained_elapsed"),
    "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active", "sm__inst_issued.avg.pct_of_peak_sustained_active"),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "l2_hit_percent": ("lts__t_sector_hit_rate.pct",),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "shared_load_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum", "smsp__l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"),
    "shared_load_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",),
    "shared_store_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum", "smsp__l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum"),
    "shared_store_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",),
    "shared_percent": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
        "smsp__l1tex_data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    ),
    "registers": ("launch__registers_per_thread",),
    "shared_bytes_a_block": ("launch__shared_mem_per_block", "launch__shared_mem_per_block_dynamic"),
    "issue_per_cycle": ("smsp__issue_active.avg.per_cycle_active", "smsp__inst_executed.avg.per_cycle_active"),
}  # fmt: skip
PIPE = re.compile(r"sm__(?:inst_executed_)?pipe_(\w+?)(?:_cycles_active)?\.(?:avg|sum)\.pct_of_peak_sustained_(active|elapsed)")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
SAMPLED = re.compile(r"smsp__pcsamp_warps_issue_stalled_(?!\w+_not_issued)(\w+)")
EXTRA = {
    r"sm__pipe_tensor\w*_cycles_active": ".avg.pct_of_peak_sustained_active",
    r"sm__inst_executed_pipe_(alu|fma|fmaheavy|lsu|xu)": ".avg.pct_of_peak_sustained_active",
    r"l1tex__data_(pipe_lsu_wavefronts|bank_conflicts_pipe_lsu)_mem_shared_op_(ld|st)": ".sum",
    r"l1tex__data_pipe_lsu_wavefronts_mem_shared": ".avg.pct_of_peak_sustained_elapsed",
}
TIME_UNITS = {"s": 1e6, "second": 1e6, "ms": 1e3, "msecond": 1e3, "us": 1.0, "usecond": 1.0, "ns": 1e-3, "nsecond": 1e-3}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "launch"):
        command = commands.add_parser(name)
        command.add_argument("names", nargs="*")
        command.add_argument("--out", type=Path, default=ROWS)
        command.add_argument("--set", default="full", help="Nsight Compute's set of sections")
        command.add_argument("--report", type=Path, help="keep Nsight Compute's own report (.ncu-rep) here")
        command.add_argument("--raw", type=Path, help="keep all counters here")
    command = commands.add_parser("reread")
    command.add_argument("raw", type=Path)
    command.add_argument("--out", type=Path, default=ROWS)
    commands.add_parser("tables")
    arguments = parser.parse_args(argv)
    if arguments.command == "tables":
        return tables()
    from tilewise.ladder import RUNGS, VARIANTS

    known = {**RUNGS, **VARIANTS}
    if arguments.command == "reread":
        kept = json.loads(arguments.raw.read_text(encoding="utf-8"))
        return append([known[name] for name in kept["rungs"]], kept["csv"], kept["environment"], arguments.out)
    names = arguments.names or list(RUNGS)
    if unknown := set(names) - set(known):
        parser.error(f"no rung is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    rungs = [known[name] for name in names]
    return launch(rungs) if arguments.command == "launch" else run(rungs, arguments)


def case(rung) -> dict:
    """A row's case; the same words as a benchmark row's."""
    seqlen, tokens = (K1_SEQLEN, K1_TOKENS) if rung.name == "k1" else (SEQLEN, TOKENS)
    return {
        "batch": tokens // seqlen,
        "seqlen": seqlen,
        "heads": HIDDEN // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "mask": "Full()",
        "dtype": "bf16",
    }


def launch(rungs) -> int:
    """The process that is profiled: every rung once to compile it, then once between the profiler's marks."""
    import torch

    for rung in rungs:
        sizes = case(rung)
        q, k, v = (
            torch.randn(sizes["batch"] * sizes["heads"], sizes["seqlen"], HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        rung(q, k, v)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        rung(q, k, v)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return 0


def run(rungs, arguments) -> int:
    from tilewise.bench.provenance import provenance
    from tilewise.hopper.compile import why_not_here

    if reasons := why_not_here():
        sys.exit(f"the ladder cannot be profiled here: {'; '.join(reasons)}")
    with tempfile.TemporaryDirectory() as folder:
        report = arguments.report or Path(folder) / "ladder.ncu-rep"
        application = [sys.executable, str(Path(__file__)), "launch", *(rung.name for rung in rungs)]
        options = ["--profile-from-start", "off", "--clock-control", "none", "--set", arguments.set]
        if names := extra(output("ncu", "--query-metrics", "--chips", "gh100") or ""):
            options += ["--metrics", ",".join(names)]
        call("ncu", *options, "--force-overwrite", "--export", str(report), *application)
        text = call("ncu", "--import", str(report), "--csv", "--page", "raw", "--print-units", "base")
    environment = {**provenance("cuda"), "ncu": call("ncu", "--version").strip().splitlines()[-1]}
    if arguments.raw:
        kept = {"rungs": [rung.name for rung in rungs], "environment": environment, "csv": text}
        arguments.raw.write_text(json.dumps(kept), encoding="utf-8")
    return append(rungs, text, environment, arguments.out)


def append(rungs, text: str, environment: dict, out: Path) -> int:
    """Rows of Nsight Compute's CSV, added to `out` and shown."""
    written = rows(rungs, parse(text), environment)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in written)
    print("\n".join(table([rung.name for rung in rungs], written)))
    return 0


def extra(query: str) -> list[str]:
    """Of the metrics that Nsight Compute says there are, those that a set of sections may leave out."""
    known = [line.split()[0] for line in query.splitlines() if line[:1].islower()]
    return [name + ending for name in known for pattern, ending in EXTRA.items() if re.fullmatch(pattern, name)]


def output(*command: str) -> str | None:
    """None where the command fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit(f"{command[0]} is not on the PATH: install NVIDIA Nsight Compute")
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def parse(text: str) -> list[dict[str, tuple[str, str]]]:
    """Nsight Compute's raw page as CSV: for each kernel, column -> (value, unit)."""
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        sys.exit(f"Nsight Compute's report holds no kernel:\n{text[-2000:]}")
    header, units, *kernels = csv.reader(io.StringIO("\n".join(lines[begin:])))
    return [dict(zip(header, zip(kernel, units, strict=True), strict=True)) for kernel in kernels if kernel]


def rows(rungs, kernels: list[dict], environment: dict) -> list[dict]:
    """A row for each rung, for k1 one for each of its kernels; ValueError where the report holds other kernels than were launched."""
    expected = [(rung, name) for rung in rungs for name in (K1_KERNELS if rung.name == "k1" else ("kernel",))]
    named = [kernel["Kernel Name"][0] for kernel in kernels]
    if len(named) != len(expected) or not all(name in found for (_, name), found in zip(expected, named, strict=True)):
        raise ValueError(f"the report holds the kernels {named}, not {[f'{rung.name} {name}' for rung, name in expected]}")
    return [
        {"rung": rung.name, "kernel": name, "case": case(rung), **measures(kernel), "environment": environment}
        for (rung, name), kernel in zip(expected, kernels, strict=True)
    ]


def measures(kernel: dict[str, tuple[str, str]]) -> dict:
    """Time, the numbers that are known here, the use of each pipe in %, and the share of each stall reason in %."""
    values = {
        name: float(value.replace(",", ""))
        for name, (value, _) in kernel.items()
        if re.fullmatch(r"-?[\d,]*\.?\d+(?:[eE][+-]?\d+)?", value)
    }
    duration = "gpu__time_duration.sum"
    first = {name: next((values[each] for each in candidates if each in values), None) for name, candidates in NUMBERS.items()}
    numbers = {name: value for name, value in first.items() if value is not None}
    pipes: dict[str, float] = {}
    for name, value in values.items():
        if match := PIPE.fullmatch(name):
            pipes[match[1]] = max(value, pipes.get(match[1], 0.0))
    stalls = {match[1]: value for name, value in values.items() if (match := STALL.fullmatch(name))}
    stalls = stalls or {match[1]: value for name, value in values.items() if (match := SAMPLED.fullmatch(name))}
    waiting = {name: value for name, value in stalls.items() if name != "selected"}
    total = sum(waiting.values()) or 1.0
    shares = {name: round(100 * value / total, 1) for name, value in sorted(waiting.items(), key=lambda item: -item[1]) if value}
    time_us = values[duration] * TIME_UNITS[kernel[duration][1]] if duration in values else None
    return {"time_us": time_us, "numbers": numbers, "pipes_percent": pipes, "stalls_percent": shares}


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


MARKED = re.compile(r"(<!-- profile:([\w:,]+) -->\n).*?(<!-- /profile -->)", re.DOTALL)


def refreshed(page: str, rows: list[dict]) -> str:
    """The page with every marked table written anew."""
    from tilewise.ladder import RUNGS

    ladder = list(RUNGS)

    def write(match: re.Match) -> str:
        names = match[2].split(",")
        if not {row["rung"] for row in rows} & set(names):
            return match[0]  # not profiled yet
        if len(names) == 1 and ladder.index(names[0].partition(":")[0]) > 0:
            names.insert(0, ladder[ladder.index(names[0].partition(":")[0]) - 1])
        return match[1] + "\n".join(table(names, rows)) + "\n" + match[3]

    return MARKED.sub(write, page)


def tables() -> int:
    found = load(ROWS)
    for page in sorted(PAGES.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        if (after := refreshed(before, found)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
    return 0


def load(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
