"""Triton's kernels on CPU tensors: a process in which Triton interprets them, since that is decided when they are imported."""

import atexit
import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

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
    _hasten()
    atexit.register(os._exit, 0)  # before Triton's library lists what it leaks


def _hasten() -> None:
    """The same interpreter in a quarter of the time.

    Triton puts it in place of its language at every call of a device function, by looking at each name of that, and takes it out behind every kernel:
    here it stays. And each sum and product of integers is checked for overflow, by a dozen operations whose result is then dropped unless one debugs.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def once(function: Callable) -> interpreter._LangPatchScope:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
