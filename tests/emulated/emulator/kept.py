"""Kernels compiled for the emulator, on disk: one worker's for the others, and for the next run where no source has changed that reaches them.

They lie in pytest's cache, each in a folder named after a digest of what it is made from (kernel_facts.py); `make clean` removes them.
"""

import fcntl
import os
import shutil
import time
from pathlib import Path

import kernel_facts
from kernel_inventory import Kernel

from tilewise.sm90 import cache, jit

FOLDER = Path(__file__).parents[3] / ".pytest_cache/emulated"
OBJECTS, PTX = "kernel.o", "kernel.ptx"
UNUSED = 7 * 86400  # seconds after which a kernel goes


def kept(launch, arguments, config, aside: Path) -> tuple[Path, Path]:
    """The DSL's object file and its PTX: those that are there, or compiled; in `aside` where the launch function is none of the package's."""
    kernel = Kernel("", launch, arguments, config)
    if kernel_facts.module_of(launch) not in kernel_facts.MODULES:
        return _compiled(kernel, aside)
    folder = FOLDER / kernel_facts.source(kernel)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two workers that need a kernel one compiles it
        if not folder.exists():
            _forget_unused()
            _compiled(kernel, aside)
            whole = folder.with_suffix(f".{os.getpid()}")
            whole.mkdir()
            for name in (OBJECTS, PTX):
                shutil.copyfile(aside / name, whole / name)
            whole.rename(folder)
        os.utime(folder)
    return folder / OBJECTS, folder / PTX


def _compiled(kernel: Kernel, folder: Path) -> tuple[Path, Path]:
    built = jit.build(kernel.launch, kernel.arguments, kernel.config, f"--keep-ptx --dump-dir {folder}", runs=False)
    built.export_to_c(str(folder / OBJECTS), cache.FUNCTION)
    (folder / PTX).write_text(built.__ptx__)
    return folder / OBJECTS, folder / PTX


def _forget_unused() -> None:
    for each in FOLDER.iterdir():
        if each.is_dir() and each.stat().st_mtime < time.time() - UNUSED:
            shutil.rmtree(each, ignore_errors=True)
