"""Writes a folder that the `kernels` package loads in place of a repository of FlashAttention kernels: `python tools/kernels_layout.py [folder]`.

    LOCAL_KERNELS="kernels-community/flash-attn2=$PWD/dist/kernels-layout" python ...

there makes `attn_implementation="kernels-community/flash-attn2"` of transformers run on tilewise, on a CPU too, with no word changed in the program;
several of them are joined by ":". The folder holds no kernel, only the names: tilewise has to be installed where it is used.
"""

import json
import sys
from pathlib import Path

from tilewise import __version__
from tilewise.compat import flash_attn

VARIANTS = {"torch-cpu": "cpu", "torch-cuda": "cuda"}  # folder: its backend
NAME = "tilewise-flash-attn2"
MODULE = '''"""FlashAttention-2's functions by tilewise {version}, under the names that the package `kernels` looks for."""

from tilewise.compat.flash_attn import {names}

__all__ = {exported}
'''


def metadata(backend: str) -> dict:
    """metadata.json of a variant, as `kernels` 0.17 and later read it."""
    return {
        "id": NAME.replace("-", "_"),
        "name": NAME,
        "version": int(flash_attn.__version__[0]),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }


def write(folder: Path) -> list[Path]:
    """Every variant's folder, in `folder`/build."""
    names = sorted(name for name in flash_attn.__all__ if name.startswith("flash_attn"))
    written = []
    for variant, backend in VARIANTS.items():
        place = folder / "build" / variant
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").write_text(MODULE.format(version=__version__, names=", ".join(names), exported=names))
        (place / "metadata.json").write_text(json.dumps(metadata(backend), indent=2) + "\n")
        written.append(place)
    return written


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist/kernels-layout").resolve()
    write(target)
    print(f'LOCAL_KERNELS="kernels-community/flash-attn2={target}"')
