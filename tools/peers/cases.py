"""What the plugins for peers' tests share: which cases are run, drawn by seed, and what is said of the rest.

A plugin takes `pytest_addoption` and `pytest_terminal_summary` from here, and calls `select` from its own `pytest_collection_modifyitems` and
`choose_backend` from its `pytest_configure`. `--tilewise-backend triton` has that backend compute all that it takes, and `tiled` the rest, whatever
else there is; what it refused, and why, is printed at the end.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable

LEFT_OUT: Counter = Counter()  # reason: cases
PROBLEMS: Counter = Counter()  # that the backend takes, or why it does not: kinds of problem


def pytest_addoption(parser):
    group = parser.getgroup("tilewise")
    group.addoption("--tilewise-sample", type=int, default=0, help="cases of each test, or of each class; 0 for all (default: %(default)s)")
    group.addoption("--tilewise-seed", type=int, default=0, help="which cases (default: %(default)s)")
    backend_option(group)


def backend_option(group) -> None:
    group.addoption("--tilewise-backend", metavar="NAME", help="the backend that computes (default: tilewise's own choice)")


def choose_backend(config) -> None:
    """Have the backend of the option asked first, and after it none but `tiled` and what is named in a call."""
    if (name := config.getoption("--tilewise-backend")) is None:
        return
    from tilewise.runtime import dispatch

    first, usual = dispatch.named(name), dispatch.backends()
    order = tuple(dict.fromkeys((first, dispatch.named("tiled"), *usual[::-1])))
    why_not = dispatch._why_not

    def counted(backend, problem, decodes: bool) -> list[str]:
        found = why_not(backend, problem, decodes)
        if backend is first:
            PROBLEMS["; ".join(found) or f"by {name}"] += 1
        return found

    dispatch.backends, dispatch._why_not = lambda: order, counted
    for kept in (dispatch.reasons, dispatch.choose):
        kept.cache_clear()


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
    backend_summary(terminalreporter, config)


def backend_summary(terminalreporter, config) -> None:
    """Where a backend was chosen: how many kinds of problem it computed, and what it refused."""
    if (name := config.getoption("--tilewise-backend")) is not None:
        terminalreporter.section(f"kinds of problem, of backend {name}")
        for said, count in sorted(PROBLEMS.items()):
            terminalreporter.write_line(f"{count:8d}  {said}")
