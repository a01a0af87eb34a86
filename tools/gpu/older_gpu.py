"""Kernels that the Triton backend makes for an older NVIDIA GPU, run on a newer one.

Its PTX has the older one's instructions (mma.sync and cp.async of an A100 or a 4090, no wgmma), and assembles for any GPU that came later. So these
paths can be tested, and compared with FlashAttention-2, which has the same instructions, where there is no such GPU. Tiles are the older GPU's; what
its memory and clocks would make of them is not seen.

    python tools/gpu/older_gpu.py sm_80 test -n 8 -k "quick or dropout"            tests/gpu/test_triton.py and test_triton_decode.py
    python tools/gpu/older_gpu.py sm_80 tune --backend triton --out rows.jsonl
    python tools/gpu/older_gpu.py sm_80 bench --set papers --device cuda --impl tilewise:triton,sdpa:flash --out rows.jsonl

What follows goes to pytest, or to `tilewise`. Rows of bench say "tilewise:triton" and this GPU's name: keep them apart.
"""

import importlib
import os
import pkgutil
import shlex
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASKED = "OLDER_GPU_ARCH"  # set for the processes that this one starts, which all load this file (sitecustomize)
WRAPPER = """#!/bin/sh
for each do
  shift
  case $each in --gpu-name=*) each=--gpu-name={newer} ;; esac
  set -- "$@" "$each"
done
exec {ptxas} "$@"
"""


def assembler(folder: Path, ptxas: str, newer: str) -> Path:
    """A program in `folder` that is `ptxas`, but assembles for the architecture `newer` whatever it is asked for."""
    made = folder / "ptxas"
    made.write_text(WRAPPER.format(newer=newer, ptxas=shlex.quote(ptxas)))
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return made


def take_place(arch: str) -> None:
    """From now on the Triton backend of this process compiles for `arch`, on whatever GPU."""
    from tilewise.backends import triton

    target = importlib.import_module("tilewise.backends.triton.targets").Target(arch)
    for each in pkgutil.iter_modules(triton.__path__, f"{triton.__name__}."):
        module = importlib.import_module(each.name)
        if hasattr(module, "of_device"):
            module.of_device = lambda device: target


def main() -> int:
    if len(sys.argv) < 3 or not sys.argv[1].startswith("sm_"):
        print(__doc__)
        return 2
    import torch
    from triton.backends.nvidia.compiler import get_ptxas

    arch, verb, *rest = sys.argv[1:]
    newer = "sm_{}{}".format(*torch.cuda.get_device_capability())
    with tempfile.TemporaryDirectory() as folder:
        wrapper = assembler(Path(folder), get_ptxas(int(newer[3:])).path, newer)
        (Path(folder) / "sitecustomize.py").write_text("import older_gpu\n")
        paths = [folder, str(ROOT / "tools/gpu"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        given = {
            "TRITON_PTXAS_PATH": str(wrapper),
            "TRITON_CACHE_DIR": f"{folder}/cache",
            ASKED: arch,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        if verb == "test":
            tests = [str(ROOT / "tests/gpu" / name) for name in ("test_triton.py", "test_triton_decode.py")]
            command = [sys.executable, "-m", "pytest", *tests, *rest]
        else:
            command = [sys.executable, "-m", "tilewise", verb, *rest]
        return subprocess.run(command, cwd=ROOT, env=os.environ | given, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
elif os.environ.get(ASKED):
    take_place(os.environ[ASKED])
