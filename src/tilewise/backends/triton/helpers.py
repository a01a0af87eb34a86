"""Kernels of a call compiled by helpers (machine/helpers.py) while this process compiles the first of them, into Triton's own cache on disk.

There `launch.compiled` waits for one that is being made. Triton up to 3.6 has a C compiler make what launches a kernel, too: so do helpers.
"""

import contextlib
import threading
from collections.abc import Hashable

from tilewise.backends.triton.bound import Bound, finding, kind_of
from tilewise.backends.triton.eight_bits import Quantiser
from tilewise.backends.triton.launch import Kernel, build, lock_of, on_disk
from tilewise.backends.triton.targets import Target, interpreted
from tilewise.machine import helpers
from tilewise.problem import Call
from tilewise.sm90 import lock

crew = helpers.Helpers("triton.compiler", "tilewise.backends.triton.kernels.forward,tilewise.backends.triton.helpers")
_guard = threading.Lock()
_seen: set[Hashable] = set()  # kinds of calls, and kernels


def why_not() -> str:
    """Why this process has no helpers; empty where it may."""
    return "Triton's interpreter compiles nothing" if interpreted() else helpers.why_not()


def begin(bound: Bound, call: Call) -> None:
    """Have what `call`, of which `bound` is made, and its gradients launch compiled, where it is not on disk. Returns soon, and raises nothing."""
    kind = call.problem, kind_of(call.mask), bound.dtypes, bound.config, bound.target
    if kind in _seen:
        return
    with _guard:
        _seen.add(kind)
        if why_not():
            return
        _, *others = dict.fromkeys(ahead(bound, call))  # this process begins with the first
        missing = [(kernel, bound.target) for kernel in others if (kernel, bound.target) not in _seen and not on_disk(kernel, bound.target)]
        _seen.update(missing)
        for first in range(helpers.room()):
            if job := missing[first :: helpers.room()]:
                crew.give(job)


def ahead(bound: Bound, call: Call) -> list[Kernel]:
    """What they launch, in that order, for tensors that lie at multiples of 16 bytes and without a gradient of LSE."""
    mask = kind_of(call.mask)
    found = [finding(False)] if mask == "varlen" else []
    if isinstance(bound.quantiser, Quantiser):
        found += bound.quantiser.kernels()
    found += bound.kernels("forward", mask)
    if call.grad and not call.problem.eight_bits:
        found += [finding(True)] if mask == "varlen" else []
        found += [bound.preparing(False), *bound.kernels("dkdv", mask), *bound.kernels("dq", mask)]
    return found


def compile_one(kernel: Kernel, target: Target) -> None:
    """In a helper."""
    if (place := lock_of(kernel, target)) is None:
        return
    with lock.held(place, 0.0) as ours, contextlib.suppress(Exception):  # of the compiler; whoever needs the kernel gets it
        if ours:
            _make_launcher(build(kernel, target))


def _make_launcher(found) -> None:
    """Have the C compiler make what launches it, where Triton's version has such; no driver is asked for anything."""
    if found.metadata.target.backend == "cuda":
        from triton.backends.nvidia import driver

        driver.CudaUtils()
        if hasattr(driver, "make_launcher"):
            driver.CudaLauncher(found.src, found.metadata)
