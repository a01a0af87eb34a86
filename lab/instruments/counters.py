"""What limits a kernel, by the hardware's counters: `python lab/instruments/counters.py` on a machine with a Hopper GPU and Nsight Compute.

    rungs [k5 ...]  profile one launch of each rung of the ladder; rows go to benchmarks/results/profiles/h100.jsonl (or --out)
    cells           profile one call of each contender (--impls) on each workload; rows go to benchmarks/results/profiles/h200.jsonl
    reread FILE     make rows of counters that --raw FILE kept; needs no GPU

tools/counter_tables.py writes the rows as tables into docs. Workloads are chosen by --set, --dtype, --direction and --only as in `tilewise bench`.

What is profiled together shares one process, whose compilations and first launches are not profiled. Nsight Compute runs a kernel alone, many
times, with pauses: it counts cycles at a clock that the kernel would not keep. Counters have names that move between GPUs and versions, so the
names are looked up, and the columns that match a pattern are kept.
"""

import argparse
import csv
import functools
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from counter_tables import HEAD_DIM, PROFILES, table, table_of_calls

ROWS, CELLS = PROFILES / "h100.jsonl", PROFILES / "h200.jsonl"
HIDDEN = 2048
SEQLEN, TOKENS = 4096, 16384
K1_SEQLEN, K1_TOKENS = 2048, 4096  # its S takes 0.5 GB, ten times the L2 cache
# Of a rung that launches several:
KERNELS = {"k1": ("compute_S", "compute_P", "compute_O"), **dict.fromkeys(("b1", "b2", "b3"), ("prepare", "kernel"))}

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
    "cycles": ("sm__cycles_elapsed.max",),
    "instructions": ("sm__inst_executed.sum", "smsp__inst_executed.sum"),
    "l2_sectors": ("lts__t_sectors_srcunit_tex.sum",),
    "shared_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "l1tex__data_pipe_lsu_wavefronts.sum"),
    "issue_per_cycle": ("smsp__issue_active.avg.per_cycle_active", "smsp__inst_executed.avg.per_cycle_active"),
}  # fmt: skip
PIPE = re.compile(r"sm__(?:inst_executed_)?pipe_(\w+?)(?:_cycles_active)?\.(?:avg|sum)\.pct_of_peak_sustained_(active|elapsed)")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
SAMPLED = re.compile(r"smsp__pcsamp_warps_issue_stalled_(?!\w+_not_issued)(\w+)")
EXTRA = {  # what a set of sections may leave out, by the patterns of the names that Nsight Compute knows
    r"sm__pipe_tensor\w*_cycles_active": ".avg.pct_of_peak_sustained_active",
    r"sm__inst_executed_pipe_(alu|fma|fmaheavy|lsu|xu)": ".avg.pct_of_peak_sustained_active",
    r"l1tex__data_(pipe_lsu_wavefronts|bank_conflicts_pipe_lsu)_mem_shared_op_(ld|st)": ".sum",
    r"l1tex__data_pipe_lsu_wavefronts_mem_shared": ".avg.pct_of_peak_sustained_elapsed",
}
CALLS = {  # all that is asked for of a call on a workload, whose kernels take milliseconds: each pass runs them again
    "gpu__time_duration": ".sum",
    "sm__cycles_elapsed": ".max",
    r"(sm|smsp)__inst_executed": ".sum",
    r"smsp__issue_active": ".avg.pct_of_peak_sustained_active",
    r"sm__pipe_tensor(_op_[hg]mma)?_cycles_active": ".avg.pct_of_peak_sustained_active",
    r"sm__inst_executed_pipe_(alu|fma|fmaheavy|xu|uniform)": ".avg.pct_of_peak_sustained_active",
    r"lts__t_(sectors|requests)_srcunit_tex": ".sum",
    r"lts__t_sectors": ".avg.pct_of_peak_sustained_elapsed",
    r"lts__t_sector_hit_rate": ".pct",
    r"dram__bytes_(read|write)": ".sum",
    r"l1tex__data_pipe_lsu_wavefronts(_mem_shared)?": ".sum",
    r"l1tex__m_xbar2l1tex_read_bytes": ".sum",
}
OF_LAUNCH = ("launch__registers_per_thread", "launch__grid_size", "launch__shared_mem_per_block")
BETWEEN = "spin_kernel"  # of torch.cuda._sleep: in a report it stands ahead of each call's kernels
TIME_UNITS = {"s": 1e6, "second": 1e6, "ms": 1e3, "msecond": 1e3, "us": 1.0, "usecond": 1.0, "ns": 1e-3, "nsecond": 1e-3}


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    rungs, cells = (commands.add_parser(name) for name in ("rungs", "cells"))
    rungs.add_argument("names", nargs="*")
    rungs.add_argument("--set", default="full", dest="sections", help="Nsight Compute's set of sections")
    for command, out in ((rungs, ROWS), (cells, CELLS)):
        command.add_argument("--out", type=Path, default=out)
        command.add_argument("--report", type=Path, help="keep Nsight Compute's own report (.ncu-rep) here")
        command.add_argument("--raw", type=Path, help="keep all counters here")
        command.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # this is the process that is profiled
    with_workloads(cells)
    command = commands.add_parser("reread")
    command.add_argument("raw", type=Path)
    command.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(given)
    if arguments.command == "reread":
        kept = json.loads(arguments.raw.read_text(encoding="utf-8"))
        return append(kept["what"], kept["csv"], kept["environment"], arguments.out)
    try:
        chosen = rungs_of(arguments.names) if arguments.command == "rungs" else calls_of(arguments)
    except ValueError as error:
        parser.error(str(error))
    require_hopper()
    return inside(chosen) if arguments.inside else run(chosen, given, arguments)


def with_workloads(
    parser: argparse.ArgumentParser, sets: str = "papers,gpu-shapes", direction: str = "fwd", impls: str = "tilewise,fa4"
) -> None:
    """The options that `calls_of` reads."""
    parser.add_argument("--set", default=sets, help="sets of workloads (default: %(default)s)")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--direction", default=direction)
    parser.add_argument("--only", metavar="PATTERN,...", help="of these workloads those whose names or ids match")
    parser.add_argument("--impls", default=impls, help="(default: %(default)s)")


def require_hopper() -> None:
    from tilewise.sm90.jit import why_not_here

    if reasons := why_not_here():
        sys.exit(f"Hopper's kernels cannot be measured here: {'; '.join(reasons)}")


def rungs_of(names: list[str]) -> list:
    """ValueError for a name that no rung has."""
    from tilewise.ladder import BACKWARD_RUNGS, RUNGS, VARIANTS

    known = {**RUNGS, **VARIANTS, **BACKWARD_RUNGS}
    if unknown := set(names) - set(known):
        raise ValueError(f"no rung is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [known[name] for name in names or RUNGS]


def calls_of(arguments) -> list[tuple]:
    """(workload, contender) for all that are asked for; ValueError where there is none."""
    from tilewise.bench.peers import find
    from tilewise.bench.sets import chosen, workloads_from

    found = workloads_from({"set": arguments.set, "dtype": arguments.dtype, "direction": arguments.direction})
    return [(workload, impl) for workload in chosen(found, arguments.only) for impl in find(arguments.impls)]


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


def prepared(rung=None, workload=None, impl=None):
    """What is profiled: a rung's launch, or a contender's call on a workload; compiled and run once."""
    import torch

    if rung is not None:
        sizes = case(rung)
        shape = sizes["batch"] * sizes["heads"], sizes["seqlen"], HEAD_DIM
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        if hasattr(rung, "attend"):  # of gradients
            o, lse = rung.attend(*inputs, causal=False, scale=HEAD_DIM**-0.5)
            launch = functools.partial(rung, *inputs, o, lse, torch.randn_like(o))
        else:
            launch = functools.partial(rung, *inputs, operands=rung.operands(*inputs, HEAD_DIM**-0.5))
    else:
        from tilewise.bench.runner import TIME_SEED, call_of

        device = torch.device("cuda")
        inputs = workload.inputs(TIME_SEED, device, getattr(impl, "heads_first", False))
        launch = call_of(impl.prepare(workload, device), workload, inputs)
    launch()
    torch.cuda.synchronize()
    return launch


def inside(chosen) -> int:
    """The process that is profiled: each once to compile it, then once between the profiler's marks."""
    import torch

    for each in chosen:
        on_ladder = not isinstance(each, tuple)
        launch = prepared(rung=each) if on_ladder else prepared(None, *each)
        torch.cuda.profiler.start()
        if not on_ladder:
            torch.cuda._sleep(1)  # BETWEEN
        launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return 0


def run(chosen, given: list[str], arguments) -> int:
    from tilewise.bench.provenance import provenance

    query = output("ncu", "--query-metrics", "--chips", "gh100") or ""
    if arguments.command == "rungs":
        names, options = extra(query, EXTRA), ["--set", arguments.sections]
    else:
        names, options = [*extra(query, CALLS), *OF_LAUNCH], ["--section", "WarpStateStats"]
    with tempfile.TemporaryDirectory() as folder:
        report = arguments.report or Path(folder) / "counters.ncu-rep"
        options += ["--profile-from-start", "off", "--clock-control", "none", *(["--metrics", ",".join(names)] if names else [])]
        call("ncu", *options, "--force-overwrite", "--export", str(report), sys.executable, str(Path(__file__)), *given, "--inside")
        text = call("ncu", "--import", str(report), "--csv", "--page", "raw", "--print-units", "base")
    environment = {**provenance("cuda"), "ncu": call("ncu", "--version").strip().splitlines()[-1]}
    what = [described(each) for each in chosen]
    if arguments.raw:
        arguments.raw.write_text(json.dumps({"what": what, "environment": environment, "csv": text}), encoding="utf-8")
    return append(what, text, environment, arguments.out)


def described(each) -> dict:
    """What a row says of what was profiled; JSON-ready."""
    if not isinstance(each, tuple):
        return {"rung": each.name, "case": case(each)}
    workload, impl = each
    return {"impl": impl.name, "name": workload.name, "id": workload.id, "case": workload.case}


def append(what: list[dict], text: str, environment: dict, out: Path) -> int:
    """Rows of Nsight Compute's CSV, added to `out` and shown."""
    written = rows(what, parse(text), environment)
    keep(written, out)
    on_ladder = [each["rung"] for each in what if "rung" in each]
    print("\n".join(table(on_ladder, written) if on_ladder else table_of_calls(written)))
    return 0


def keep(rows: list[dict], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def extra(query: str, patterns: dict[str, str]) -> list[str]:
    """Of the metrics that Nsight Compute says there are, those that match, with the ending that says what to make of them."""
    known = [line.split()[0] for line in query.splitlines() if line[:1].islower()]
    return [name + ending for name in known for pattern, ending in patterns.items() if re.fullmatch(pattern, name)]


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


def rows(what: list[dict], kernels: list[dict], environment: dict) -> list[dict]:
    """A row for each kernel of each of `what`, torch's aside; ValueError where the report holds other kernels than were launched."""
    if not all("rung" in each for each in what):
        return rows_of_calls(what, kernels, environment)
    kernels = [kernel for kernel in kernels if "at::" not in kernel["Kernel Name"][0]]
    expected = [(each, name) for each in what for name in KERNELS.get(each["rung"], ("kernel",))]
    named = [kernel["Kernel Name"][0] for kernel in kernels]
    if len(named) != len(expected) or not all(name in found for (_, name), found in zip(expected, named, strict=True)):
        wanted = [f"{each['rung']} {name}" for each, name in expected]
        raise ValueError(f"the report holds the kernels {named}, not {wanted}")
    return [
        {"rung": each["rung"], "kernel": name, "case": each["case"], **measures(kernel), "environment": environment}
        for (each, name), kernel in zip(expected, kernels, strict=True)
    ]


def rows_of_calls(what: list[dict], kernels: list[dict], environment: dict) -> list[dict]:
    """A row for the longest kernel of each call; the others' times are in it."""
    calls: list[list[dict]] = []
    for kernel in kernels:
        if BETWEEN in kernel["Kernel Name"][0]:
            calls.append([])
        elif calls:
            calls[-1].append(kernel)
    if len(calls) != len(what) or not all(calls):
        raise ValueError(f"the report holds kernels of {sum(map(bool, calls))} calls, not of {len(what)}")
    made = []
    for each, launched in zip(what, calls, strict=True):
        measured = [{"kernel": kernel["Kernel Name"][0], **measures(kernel)} for kernel in launched]
        longest = max(measured, key=lambda row: row["time_us"] or 0.0)
        others = [(row["kernel"], row["time_us"]) for row in measured if row is not longest]
        made.append({**each, **longest, "others_us": others, "environment": environment})
    return made


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


if __name__ == "__main__":
    sys.exit(main())
