"""Compile a rung or kernel once for each (launch, arguments, config): the only place that calls the DSL's compiler.

The key holds nothing that changes from call to call: lengths, batch and strides are symbols of the compiled code.
"""

import functools
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.machine import lock
from tilewise.machine.room import make_room
from tilewise.sm90 import cache
from tilewise.views import part

ARCH = "sm_90a"
BYTES = 16  # the copy engine and wide reads start at multiples of these


def why_no_compiler() -> list[str]:
    """A sentence where the DSL, or what its compiled functions are called through, is missing; compiling needs nothing else."""
    needs = {"cutlass": "NVIDIA's CuTe DSL", "tvm_ffi": "apache-tvm-ffi"}
    return [f"{name} is not installed: pip install 'tilewise[hopper]'" for module, name in needs.items() if not find_spec(module)]


def why_not_here(capability: tuple[int, int] | None = None) -> list[str]:
    """Sentences that say why no Hopper kernel can run on this machine's current GPU, or on one of that compute capability; empty where one can."""
    if missing := why_no_compiler():
        return missing
    if not torch.cuda.is_available():
        return ["torch sees no GPU here: run it on a machine with an H100 or H200"]
    if torch.version.hip:  # its devices have capability numbers of their own, 9.0 for MI200s
        return ["it needs a Hopper GPU of NVIDIA's, and this torch is built for AMD's (ROCm)"]
    capability = capability or torch.cuda.get_device_capability()
    if capability != (9, 0):
        return [f"it needs a Hopper GPU (compute capability 9.0), and this is {capability[0]}.{capability[1]}"]
    return []


def arch() -> str:
    """What is compiled for."""
    return os.environ.get("CUTE_DSL_ARCH") or ARCH


class Kernel(NamedTuple):
    """What `compiled` takes."""

    launch: str | Callable
    arguments: Callable[[Any], list]
    config: Any  # a frozen dataclass

    @property
    def identity(self) -> tuple:
        """By which a compiled one is found."""
        return self.launch, self.config


def compiled(launch, arguments, config, options: str = ""):
    """`launch` for `config`, as a function of torch tensors and numbers that runs on torch's current stream.

    `launch` is a function of the DSL, or "module:function": so named it is not imported, nor is the DSL, where the compiled kernel is on disk
    (cache.py). `arguments(config)` gives stand-ins for what comes before the config: `tensor(...)`, Int32(0), Float32(0.0). With `options`
    for the compiler it is compiled afresh.

    Raises torch.OutOfMemoryError where the current GPU has no memory for its code.
    """
    kernel = _compiled(launch, arguments, config, options)
    first = id(kernel), torch.cuda.current_device() if torch.cuda.is_initialized() else None
    if first not in _LAUNCHED:
        make_room()
        _LAUNCHED.add(first)
    return kernel


_LAUNCHED: set[tuple] = set()  # kernels and GPUs


@functools.cache
def _compiled(launch, arguments, config, options: str):
    name = launch if isinstance(launch, str) else f"{launch.__module__}:{launch.__qualname__}"
    entry = None if options else cache.entry(name, config, arch())
    if entry is None:
        return build(launch, arguments, config, options)
    if known := cache.load(entry):
        return known
    if not cache.keeps(entry):
        return build(launch, arguments, config)
    with lock.held(entry):
        return cache.load(entry) or _kept(entry, launch, arguments, config)


def _kept(entry, launch, arguments, config):
    """Compile what is then loaded from the cache. Where that fails after all it is compiled once more, to be run as the DSL has it."""
    kernel = build(launch, arguments, config, runs=False)
    return (cache.store(entry, kernel) and cache.load(entry)) or build(launch, arguments, config)


def build(launch, arguments, config, options: str = "", *, runs: bool = True):
    """The DSL's object of `launch` for `config`, compiled here and now: `compiled` without any cache. One that is only to be kept, and so need not be
    one that `runs`, takes an eighth less time, as its code for the host is made once.
    """
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    from tilewise.sm90.dsl import cute, make_fake_stream

    if isinstance(launch, str):
        module, _, function = launch.partition(":")
        launch = getattr(import_module(module), function)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, *arguments(config), config, stream, options=f"--enable-tvm-ffi {options}", no_jit_engine=not runs)


def strided(x: Tensor) -> bool:
    """Whether the steps between x's rows are such that `tensor(aligned=True)` takes it, if it begins at a multiple of 16 bytes. Of a dimension of
    size 1 no step is ever taken, so any is right: the DSL's functions do not look at it, and kernels multiply it by 0.
    """
    return steps(x) is not None


def steps(x: Tensor) -> tuple[int, ...] | None:
    """x's strides, with 16 bytes for those of no meaning that are no multiple of that; None where it is not `strided`."""
    return _steps(x.shape, x.stride(), x.element_size())


@functools.lru_cache(1024)
def _steps(shape: torch.Size, strides: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    found = *(BYTES // size if n == 1 and step * size % BYTES else step for n, step in zip(shape[:-1], strides[:-1], strict=True)), 1
    last = strides[-1] == 1 or shape[-1] == 1
    return found if last and not any(step * size % BYTES for step in found[:-1]) else None


def in_place(x: Tensor) -> bool:
    """Whether `tensor(aligned=True)` takes x where it lies."""
    return strided(x) and x.data_ptr() % BYTES == 0


def aligned(x: Tensor) -> Tensor:
    """x, or a copy with its rows as `tensor(aligned=True)` promises them; a view will do where dimensions of size 1 alone have other steps."""
    found = steps(x)
    if found is None or x.data_ptr() % BYTES:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    return x if found == x.stride() else part(x, x.shape, found, 0)


def readable(x: Tensor) -> Tensor:
    """x, or a copy where the copy engine could not read it: rows that start between its addresses, or that lie on top of each other."""
    if _repeated(x.stride(), x.shape):
        return x.contiguous()
    return aligned(x)


@functools.lru_cache(1024)
def _repeated(strides: tuple[int, ...], shape: torch.Size) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(strides, shape, strict=True))


def rows(x: Tensor) -> Tensor:
    """x, or a copy with its last dimension contiguous, also where that has one element."""
    return x if x.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def tensors_of(bundle: tuple) -> list[Tensor]:
    """The torch tensors in a bundle of operands, in order; bundles may hold bundles."""
    found = []
    for x in bundle:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, tuple):
            found += tensors_of(x)
    return found


def size():
    """A length known at run time; the same object in several places is the same length."""
    from tilewise.sm90.dsl import cute

    return cute.sym_int()


def scattered(dtype, *sizes):
    """A tensor of any strides, which may be 0."""
    from tilewise.sm90.dsl import cute, make_fake_tensor

    return make_fake_tensor(dtype, sizes, tuple(cute.sym_int64() for _ in sizes), assumed_align=dtype.width // 8)


def tensor(dtype, *sizes, aligned: bool = True):
    """A tensor with its last dimension contiguous; `aligned`: every row starts at a multiple of 16 bytes."""
    from tilewise.sm90.dsl import cute, make_fake_tensor

    divisibility = 8 * BYTES // dtype.width if aligned else 1
    strides = (*(cute.sym_int64(divisibility=divisibility) for _ in sizes[1:]), 1)
    return make_fake_tensor(dtype, sizes, strides, assumed_align=BYTES if aligned else dtype.width // 8)
