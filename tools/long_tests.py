"""Writes the list of tests that `make test` runs every third day (tests/shared/sampled.py): those of which a cell takes a second.

    TILEWISE_TEST_SHARE=0.33 python -m pytest -n auto --durations=0 > run.log; python tools/long_tests.py run.log

A test that is not in that run, as it rests, stays in the list.
"""

import re
import sys
from pathlib import Path

LONG = Path(__file__).parents[1] / "tests/shared/long.txt"
LEAST_S = 1.0
LINE = re.compile(r"([0-9.]+)s (?:call|setup|teardown) +(tests/[^\s:]+::[^\s\[]+)")


def long(text: str) -> set[str]:
    """Of what pytest says of durations."""
    return {test for spent, test in LINE.findall(text) if float(spent) >= LEAST_S}


def main(argv: list[str]) -> int:
    text = Path(argv[0]).read_text(encoding="utf-8")
    ran = {test for _, test in LINE.findall(text)}
    before = set(LONG.read_text().split()) if LONG.exists() else set()
    found = sorted(long(text) | (before - ran))
    LONG.write_text("\n".join(found) + "\n")
    print(f"{len(found)} tests, {len(before - ran)} of them as before")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
