"""Kernels of a call compiled by helpers (machine/helpers.py) while this process compiles the first of them, into Triton's own cache on disk.

There `launch.compiled` waits for one that is being made. Triton 3.6 has a C compiler make what launches a kernel, a third to a half of a second each:
so do helpers, ahead of the kernel, and for the first one too.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable
from pathlib import Path

from tilewise.backends.triton.bound import Bound, finding, kind_of
from tilewise.backends.triton.eight_bits import Quantiser
from tilewise.backends.triton.launch import Kernel, build, lock_of, on_disk, source_of
from tilewise.backends.triton.targets import Target, interpreted
from tilewise.machine import helpers, lock
from tilewise.problem import Call

crew = helpers.Helpers("triton.compiler", "tilewise.backends.triton.kernels.forward,tilewise.backends.triton.helpers")
_guard = threading.Lock()
_seen: set[Hashable] = set()  # kinds of calls, and kernels


def why_not() -> str:
    """Why this process has no helpers; empty where it may."""
    return "Triton's interpreter compiles nothing" if interpreted() else helpers.why_not()


def begin_call(bound: Bound, call: Call) -> None:
    """`begin` what `call`, of which `bound` is made, and its gradients launch."""
    kind = call.problem, kind_of(call.mask), bound.dtypes, bound.config
    begin(kind, lambda: ahead(bound, call), bound.target)


def begin(kind: Hashable, launched: Callable[[], list[Kernel]], target: Target) -> None:
    """Have what calls of that kind launch, `launched()` in that order, compiled where it is not on disk. Returns soon, and raises nothing."""
    if (kind, target) in _seen:
        return
    with _guard:
        _seen.add((kind, target))
        if why_not():
            return
        first, *others = dict.fromkeys(launched())
        missing = [(kernel, target) for kernel in others if (kernel, target) not in _seen and not on_disk(kernel, target)]
        _seen.update(missing)
        for turn in range(helpers.room()):
            if job := missing[turn :: helpers.room()]:  # the first is compiled here
                crew.give([(first, target, False)][turn:] + [(*each, True) for each in job])


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


def compile_one(kernel: Kernel, target: Target, whole: bool) -> None:
    """In a helper: the kernel, or no more than what launches it."""
    place = lock_of(kernel, target)
    with contextlib.suppress(Exception):  # of compilers, which have many; whoever needs the kernel gets it
        if target.nvidia and place is not None:
            _make_launcher(kernel, place.with_name("tilewise-driver"))
    with contextlib.suppress(Exception):
        if whole and place is not None:
            with lock.held(place, 0.0) as ours:
                if ours:
                    build(kernel, target)


def _make_launcher(kernel: Kernel, of_driver: Path) -> None:
    """Have the C compiler make what NVIDIA's launches take, of which the part that all share by one helper; the driver is not asked for anything."""
    from triton.backends.nvidia import driver

    with lock.held(of_driver, 0.0) as ours:
        if ours:
            driver.CudaUtils()
    if hasattr(driver, "make_launcher"):  # Triton up to 3.6 or so: a function of each signature
        driver.CudaLauncher(source_of(kernel), Unknown())


class Unknown:
    """Of a kernel that is not compiled yet: what its C function does not depend on."""

    tensordesc_meta = None

    def __getattr__(self, name: str) -> int:
        return 0
