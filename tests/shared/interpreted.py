"""Triton's kernels on CPU tensors: a process in which Triton interprets them, since that is decided when they are imported."""

import atexit
import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

SECONDS = 300


def interpreted(function: Callable, *arguments: object) -> object:
    """What a function of a module returns, or raises, there."""
    return _pool().submit(function, *arguments).result(SECONDS)


@functools.cache
def _pool() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool.submit(_begin).result(SECONDS)
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
    return pool


def _begin() -> None:
    import torch

    torch.set_num_threads(1)
    atexit.register(os._exit, 0)  # before Triton's library lists what it leaks
