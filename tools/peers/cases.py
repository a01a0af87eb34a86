"""What the plugins for peers' tests share: which cases are run, drawn by seed, and what is said of the rest.

A plugin takes `pytest_addoption` and `pytest_terminal_summary` from here, and calls `select` from its own `pytest_collection_modifyitems`.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable

LEFT_OUT: Counter = Counter()  # reason: cases


def pytest_addoption(parser):
    group = parser.getgroup("tilewise")
    group.addoption("--tilewise-sample", type=int, default=0, help="cases of each test, or of each class; 0 for all (default: %(default)s)")
    group.addoption("--tilewise-seed", type=int, default=0, help="which cases (default: %(default)s)")


def select(config, items: list, wanted: str, excluded: dict[str, str], group: Callable[..., str]) -> None:
    """Keep of `items` those whose node ids match `wanted`, without those that a pattern of `excluded` matches, and of each group the sample."""
    kept = defaultdict(list)
    for item in items:
        reason = "another subject" if not re.search(wanted, item.nodeid) else None
        reason = reason or next((why for pattern, why in excluded.items() if re.search(pattern, item.nodeid)), None)
        if reason is None:
            kept[group(item)].append(item)
        else:
            LEFT_OUT[reason] += 1
    size, seed = config.getoption("--tilewise-sample"), config.getoption("--tilewise-seed")
    for name, cases in kept.items():
        if size and len(cases) > size:
            LEFT_OUT["not in the sample"] += len(cases) - size
            kept[name] = random.Random(f"{seed} {name}").sample(cases, size)
    chosen = {id(item) for cases in kept.values() for item in cases}
    items[:] = [item for item in items if id(item) in chosen]


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.section("cases left out")
    for reason, count in sorted(LEFT_OUT.items()):
        terminalreporter.write_line(f"{count:8d}  {reason}")
