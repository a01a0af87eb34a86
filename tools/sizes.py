"""How large the code is and how long its gates take: `python tools/sizes.py` writes both into DESIGN.md and README.md.

`python tools/sizes.py --run make test` carries a command out first and appends what it took to benchmarks/gates.jsonl, from which the minutes come.
Lines are those of tracked files' text, docstrings and empty ones among them. Needs the standard library only.
"""

import ast
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/tilewise"
GATES = ROOT / "benchmarks/gates.jsonl"
DEVICE = ("backends/hopper", "sm90", "ladder")  # what the DSL compiles, and what calls it
LONG = 400
BEGIN, END = "<!-- sizes:begin -->\n", "<!-- sizes:end -->"
README_LINE = re.compile(r"^(make test +# the suite: ).*$", re.MULTILINE)


def count() -> dict[str, int]:
    """Figures of the tree as it is, by the words that the table has for them."""
    lines = {path.relative_to(SOURCE).as_posix(): len(path.read_text("utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    device = {path: number for path, number in lines.items() if path.startswith(DEVICE)}
    parameters = list(_parameters())
    return {
        "modules in src/": len(lines),
        "of those at the package's root": sum("/" not in path for path in lines),
        "lines of Python in src/": sum(lines.values()),
        "of those for Hopper: the backend, sm90 and the ladder": sum(device.values()),
        f"modules of more than {LONG} lines": sum(number > LONG for number in lines.values()),
        "lines of C++ in src/": _lines(SOURCE, "*.cpp") + _lines(SOURCE, "*.h"),
        "lines of Python in tests/": _lines(ROOT / "tests", "*.py"),
        "parameters of the longest kernel launch": max(number for name, number in parameters if name.startswith("launch")),
    }


def _lines(folder: Path, pattern: str) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob(pattern))


def _parameters() -> Iterator[tuple[str, int]]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield node.name, len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)


def run(command: list[str]) -> int:
    """Carry `command` out in the repository, and append a row where it succeeds; its exit status."""
    begin, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    status = subprocess.run(command, cwd=ROOT).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status == 0:
        row = {
            "command": " ".join(command),
            "wall_s": round(time.time() - begin, 1),
            "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
            "cores": len(os.sched_getaffinity(0)),
            "load": round(os.getloadavg()[2], 1),  # of the last 15 minutes, its own included
            "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
            "date": time.strftime("%Y-%m-%d", time.gmtime(begin)),
        }
        with GATES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return status


def gates(text: str) -> dict[str, dict]:
    """The newest row of each command."""
    return {row["command"]: row for row in map(json.loads, text.splitlines())}


def table(figures: dict[str, int], rows: dict[str, dict]) -> str:
    lines = ["| | |", "|---|---:|", *(f"| {words} | {number:,} |" for words, number in figures.items())]
    lines += [
        f"| `{command}` on {row['cores']} cores, {row['date']}, {row['commit']} | {minutes(row['wall_s'])} min, {minutes(row['cpu_s'])} CPU min |"
        for command, row in rows.items()
    ]
    return "\n".join(lines)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f}" if seconds >= 570 else f"{seconds / 60:.1f}"


def in_design(text: str, figures: dict[str, int], rows: dict[str, dict]) -> str:
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"DESIGN.md must have {BEGIN.strip()} and, below it, {END}")
    return f"{before}{BEGIN}\n{table(figures, rows)}\n\n{END}{after}"


def in_readme(text: str, rows: dict[str, dict]) -> str:
    """README with the minutes of the newest `make test`; as it is where none is recorded."""
    row = rows.get("make test")
    return README_LINE.sub(rf"\g<1>about {minutes(row['wall_s'])} minutes on {row['cores']} cores", text) if row else text


def stated(text: str) -> dict[str, int]:
    """The figures of the code that DESIGN.md has."""
    lines = re.findall(r"^\| ([^|`]+) \| ([\d,]+) \|$", text.partition(BEGIN)[2].partition(END)[0], re.MULTILINE)
    return {words: int(number.replace(",", "")) for words, number in lines}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--run"] and arguments[1:]:
        if status := run(arguments[1:]):
            return status
    elif arguments:
        print(__doc__, file=sys.stderr)
        return 2
    rows = gates(GATES.read_text("utf-8")) if GATES.exists() else {}
    design, readme = ROOT / "DESIGN.md", ROOT / "README.md"
    design.write_text(in_design(design.read_text("utf-8"), count(), rows), "utf-8")
    readme.write_text(in_readme(readme.read_text("utf-8"), rows), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
