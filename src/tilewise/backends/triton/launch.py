"""From a kernel and its constants to something that can be launched, or looked at without a GPU.

Triton's own way of calling a kernel looks at every argument of every call, and compiles anew for a length of 1 or a multiple of 16. Here a kernel has
one signature, by the names of its parameters, whatever the lengths; only what is aligned to 16 bytes is told to the compiler.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import ASTSource

from tilewise.backends.triton.config import Config
from tilewise.backends.triton.direct import direct
from tilewise.backends.triton.tape import recording
from tilewise.backends.triton.targets import Target, interpreted
from tilewise.machine import lock
from tilewise.machine.room import make_room

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
# Of q's dtype, where `dtypes` has no other:
OPERANDS = "q", "k", "v", "o", "d_o", "d_q", "d_k", "d_v", "x", "k_cache", "v_cache", "partial_o", "q8", "k8", "v8"
POINTERS: dict[str, str | None] = dict.fromkeys(("bias", "d_bias", "sink", "cos", "sin", *OPERANDS))
POINTERS |= dict.fromkeys(("lengths", "starts", "pages", "entry_of", "leftpad", "firsts"))  # int32 or int64
POINTERS |= dict.fromkeys(("lse", "statistics", "delta", "d_lse", "slopes", "k_scale", "v_scale", "partial_o", "partial_lse"), "*fp32")
POINTERS |= dict.fromkeys(
    ("ends", "order", "spans", "runs", "bands", "bitmaps", "planes", "diagonals", "drawn", "cu_q", "cu_k", "spoils", "parts_of"), "*i32"
)
POINTERS |= dict.fromkeys(("row_max", "row_factor", "row_shift", "k_whole", "k_lost", "centre", "k_centre", "v_centre"), "*fp32")
POINTERS |= dict.fromkeys(("v_weights", "v_units", "largest"), "*fp32")
POINTERS["tree"] = "*i8"
NUMBERS = {"bias_row": "i64", "seed": "i64", "offset": "u32", "threshold": "u32"} | dict.fromkeys(
    ("scale", "factor", "softcap", "keep_scale"), "fp32"
)
# Multiples of 16 where `bias_column` is a constant, 1; so is the address in bytes. Of seqlen_k it says that 16 keys exist together.
WITH_WIDE_BIAS = "bias", "bias_batch", "bias_head", "bias_row", "seqlen_k"
WIDE = "_batch", "_head", "_page", "_part"  # ends of the names of strides in 64 bits; all other numbers have 32


@dataclass(frozen=True)
class Kernel:
    """A kernel with all its constants, and the dtypes of those tensors that can have several."""

    function: Any  # a kernel as Triton decorates it, which has no type
    constants: tuple[tuple[str, object], ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    config: Config
    aligned: bool = True  # whether every tensor of OPERANDS begins at a multiple of 16 bytes, and its strides are such

    @property
    def name(self) -> str:
        return self.function.__name__

    def __reduce__(self):
        """For helpers: Triton's functions cannot be pickled."""
        return _kernel_of, (self.function.__module__, self.name, self.constants, self.dtypes, self.config, self.aligned)

    def signature(self) -> tuple[dict[str, str], dict]:
        """The type of every parameter, and which of them are multiples of 16."""
        dtypes, constants = dict(self.dtypes), dict(self.constants)
        types, attributes, wide_bias = {}, {}, "bias_column" in constants
        for place, name in enumerate(self.function.arg_names):
            if name in constants:
                types[name] = "constexpr"
            elif name in POINTERS:
                types[name] = POINTERS[name] or f"*{NAMES[dtypes.get(name, dtypes['q'])]}"
            else:
                types[name] = NUMBERS.get(name, "i64" if name.endswith(WIDE) else "i32")
            stride = any(name.startswith(f"{each}_") for each in OPERANDS) and types[name] in ("i32", "i64")
            if name == "statistics" or (self.aligned and (name in OPERANDS or stride)) or (wide_bias and name in WITH_WIDE_BIAS):
                attributes[(place,)] = [["tt.divisibility", 16]]
        return types, attributes


def _kernel_of(module: str, name: str, *rest) -> Kernel:
    return Kernel(getattr(import_module(module), name), *rest)


@functools.cache
def compiled(kernel: Kernel, target: Target):
    """Triton's compiled kernel, from its cache on disk where it is there, or will be when another process has made it; needs no GPU of the target."""
    if (place := lock_of(kernel, target)) is None or on_disk(kernel, target):
        return build(kernel, target)
    with lock.held(place):
        return build(kernel, target)


def build(kernel: Kernel, target: Target):
    """`compiled`, whatever other processes do."""
    return triton.compile(source_of(kernel), target=target.gpu(), options=kernel.config.options(target))


def source_of(kernel: Kernel) -> ASTSource:
    """As Triton's compiler takes it."""
    types, attributes = kernel.signature()
    return ASTSource(kernel.function, types, constexprs=dict(kernel.constants), attrs=attributes)


def lock_of(kernel: Kernel, target: Target) -> Path | None:
    """The entry that a process locks (machine/lock.py) while it compiles the kernel, in Triton's folder; None where it has none."""
    text = repr((kernel.function.__module__, kernel.name, kernel.constants, kernel.dtypes, kernel.config, kernel.aligned, target))
    try:
        return Path(knobs.cache.dir) / f"tilewise-{hashlib.sha256(text.encode()).hexdigest()}"
    except (OSError, RuntimeError, TypeError, AttributeError):  # there is no home
        return None


def on_disk(kernel: Kernel, target: Target) -> bool:
    """Whether Triton's cache has it, by its way of naming entries; where that is another one, nothing is found."""
    try:
        from triton.compiler import compiler

        source, backend = source_of(kernel), compiler.make_backend(target.gpu())
        options = backend.parse_options(dict(kernel.config.options(target), **source.parse_options()))
        key = compiler.get_cache_key(source, backend, options, env_vars=compiler.get_cache_invalidating_env_vars())
        return bool(compiler.get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(f"{source.name[:150]}.json"))
    except Exception:  # of any kind: these are Triton's own functions, which no version promises
        return False


@functools.cache
def _loaded(kernel: Kernel, target: Target, device: int):
    """`compiled`, once for each device: a kernel is loaded into the context of the one that is current when it is first launched.

    Raises torch.OutOfMemoryError where that GPU has no memory for its code, and looks again at the next launch.
    """
    found = compiled(kernel, target) if device == 0 else build(kernel, target)
    make_room()
    return found


@functools.cache
def launcher(kernel: Kernel, target: Target) -> Callable[[int, Mapping[str, object]], None]:
    """What runs the kernel with a given number of programs and arguments by name, on the current device and stream."""
    types, _ = kernel.signature()
    known = {name: None if kind.startswith("*") else 0 for name, kind in types.items()} | dict(kernel.constants)
    if not interpreted():
        compiled(kernel, target)

    def run(programs: int, arguments: Mapping[str, object]) -> None:
        values = [arguments.get(name, value) for name, value in known.items()]
        if interpreted():
            found, start = None, _in_interpreter(kernel.function[(programs,)], tuple(known))
        else:
            driver = triton.runtime.driver.active  # a GPU's, as in direct.py
            device = driver.get_current_device()  # pyright: ignore[reportAttributeAccessIssue]
            found = _loaded(kernel, target, device)
            start = found[(programs, 1, 1)]
        if (tape := recording()) is not None:
            tape.add(start, known, values, found and direct(found, programs, len(values)))
        start(*values)

    return run


def _in_interpreter(function: Callable, names: tuple[str, ...]) -> Callable:
    return lambda *values: function(**dict(zip(names, values, strict=True)))


def on(device: torch.device):
    """The device is the current one within."""
    return HERE if device.type != "cuda" or device.index == torch.cuda.current_device() else torch.cuda.device(device)


HERE = nullcontext()
