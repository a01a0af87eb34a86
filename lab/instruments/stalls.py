"""Where a kernel's warps spend their time, by Nsight Compute's samples: `python lab/instruments/stalls.py` on a machine with a Hopper GPU.

    cells        profile one call of each contender (--impls) on each workload, chosen as in counters.py
    read FILE    the same table from a page that `ncu --import REPORT --page source --csv` printed; needs no GPU

A kernel's instructions are cut where its warps may wait: at barriers, at fences, where a product begins and where it is waited for. A line is what
lies between two cuts: how many instructions, their share of the kernel's samples, and why warps waited there. A warp that waits is found at the
instruction that it cannot issue yet, so a wait is often on the line behind the cut.
"""

import argparse
import csv
import io
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from counters import call, calls_of, inside, with_workloads

CUTS = re.compile(r"WARPGROUP\.(ARRIVE|DEPBAR)|SYNCS\.\S*TRYWAIT|\bBAR\.|\bFENCE\.|\bMEMBAR\.")
LEAST = 0.005  # of a kernel's samples: lines with less are left out; and of the longest kernel's, shorter kernels
REASONS = 3
NAME = 60  # characters of a kernel's


class Part(NamedTuple):
    cut: str  # the instruction with which it begins
    instructions: int
    samples: int
    why: Counter  # stall reason -> samples


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cells, read = commands.add_parser("cells"), commands.add_parser("read")
    with_workloads(cells, "papers", "bwd")
    cells.add_argument("--page", type=Path, help="keep the page here, for `read`")
    cells.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # this is the process that is profiled
    read.add_argument("file", type=Path)
    arguments = parser.parse_args(given)
    if arguments.command == "read":
        return show(arguments.file.read_text(encoding="utf-8"))
    try:
        chosen = calls_of(arguments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.inside:
        return inside(chosen)
    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder) / "stalls.ncu-rep")
        options = ("--section", "SourceCounters", "--profile-from-start", "off", "--clock-control", "none", "--export", report)
        call("ncu", *options, sys.executable, str(Path(__file__)), *given, "--inside")
        page = call("ncu", "--import", report, "--page", "source", "--csv")
    if arguments.page:
        arguments.page.write_text(page, encoding="utf-8")
    return show(page)


def show(page: str) -> int:
    found = kernels(page)
    totals = [sum(part.samples for part in parts) for _, parts in found]
    if max(totals) == 0:
        sys.exit("the page holds no samples: it should come from a report with ncu's section SourceCounters")
    for (name, parts), total in zip(found, totals, strict=True):
        if total < LEAST * max(totals):
            continue
        print(f"\n{name[:NAME]}: {total:,} samples\n{'share':>7} {'instructions':>13}  begins with")
        for part in parts:
            if part.samples >= LEAST * total:
                why = ", ".join(f"{reason} {100 * samples / part.samples:.0f} %" for reason, samples in part.why.most_common(REASONS))
                print(f"{100 * part.samples / total:6.1f}% {part.instructions:13}  {part.cut[:NAME]:{NAME}}  {why}")
    return 0


def kernels(page: str) -> list[tuple[str, list[Part]]]:
    """(name, parts) of each kernel of the page."""
    found: list[tuple[str, list[Part]]] = []
    header: list[str] = []
    for row in csv.reader(io.StringIO(page)):
        if row[:1] == ["Kernel Name"]:
            found.append((row[1], []))
        elif row[:2] == ["Address", "Source"]:
            header = row
        elif found and header and len(row) == len(header):
            add(found[-1][1], dict(zip(header, row, strict=True)))
    if not found:
        sys.exit("the page holds no kernel: it should come from `ncu --import REPORT --page source --csv`")
    return found


def add(parts: list[Part], line: dict[str, str]) -> None:
    """An instruction to the last part, or as the first of a new one. A kernel too short to be sampled has no column for samples."""
    instruction, samples = line["Source"].strip(), int(line.get("# Samples") or 0)
    if not parts or CUTS.search(instruction):
        parts.append(Part(instruction, 0, 0, Counter()))
    last = parts[-1]
    why = {name.removeprefix("stall_"): int(value) for name, value in line.items() if re.fullmatch(r"stall_\w+", name) and value.isdigit()}
    last.why.update({reason: count for reason, count in why.items() if count})
    parts[-1] = last._replace(instructions=last.instructions + 1, samples=last.samples + samples)


if __name__ == "__main__":
    sys.exit(main())
