"""Compiles in processes, one a core, and says how far it is and how long the rest will take: for tools that compile kernels by the hundred."""

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def left(done: int, todo: int, seconds: float) -> str:
    """Where `done` of `todo` took so many seconds: a line with an estimate of the rest, from their mean."""
    minutes, rest = seconds / 60, seconds / done * (todo - done) / 60
    return f"{done} of {todo}, {minutes:.1f} minutes, {rest:.1f} left"


def each(
    function: Callable[[Key], Result],
    todo: list[Key],
    workers: int = 0,
    begin: Callable[[], None] | None = None,
    named: Callable[[Key], str] = str,
) -> Iterator[tuple[Key, Result]]:
    """(key, function(key)) of each key, as they come, with a line of progress for each.

    Processes begin afresh and call `begin` first, so all three are functions or values that pickle. workers: processes at once, 0: one a core.
    Costs differ by kind and kinds come together, so the order is a random one, always the same: the mean of those done is that of the rest.
    What `function` raises is raised here, after which nothing more begins.
    """
    if not todo:
        return
    order, start = random.Random(0).sample(range(len(todo)), len(todo)), time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers or cores(), len(todo)), mp_context=context, initializer=begin) as pool:
        try:
            tasks = {pool.submit(function, todo[at]): todo[at] for at in order}
            for done, task in enumerate(as_completed(tasks), 1):
                print(f"{left(done, len(todo), time.monotonic() - start)}: {named(tasks[task])[:120]}", flush=True)
                yield tasks[task], task.result()
        finally:
            pool.shutdown(cancel_futures=True)
