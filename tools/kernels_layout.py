"""Writes folders that the `kernels` package loads in place of repositories: `python tools/kernels_layout.py [folder]`.

    export LOCAL_KERNELS="kernels-community/flash-attn2=$PWD/dist/kernels-layout/flash-attn2:tilewise/attention=$PWD/dist/kernels-layout/attention"

makes `attn_implementation="kernels-community/flash-attn2"` of transformers run on tilewise, on a CPU too, with no word changed in the program; and
`"tilewise/attention"` is there without an import of tilewise, with masks of any kind. Either may stand alone. The folders hold no kernel, only the
names: tilewise has to be installed where they are used.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from tilewise import __version__
from tilewise.compat import flash_attn

VARIANTS = {"torch-cpu": "cpu", "torch-cuda": "cuda"}  # folder: its backend


class Layout(NamedTuple):
    """A folder that stands for the repository `replaces`."""

    folder: str
    replaces: str
    name: str
    version: int
    module: str


FUNCTIONS = sorted(name for name in flash_attn.__all__ if name.startswith("flash_attn"))
FLASH_ATTN = f'''"""FlashAttention-2's functions by tilewise {__version__}, under the names that the package `kernels` looks for."""

from tilewise.compat.flash_attn import {", ".join(FUNCTIONS)}

__all__ = {FUNCTIONS}
'''
ATTENTION = f'''"""transformers' attention by tilewise {__version__}, as a kernel by the name "tilewise/attention"; its masks keep their structure."""

from tilewise.compat.transformers import attention as flash_attn_forward, register_kernel

__all__ = ["flash_attn_forward", "supports_flash_attn"]
supports_flash_attn = True  # transformers looks for both names in a kernel that takes what its attention functions take
register_kernel("tilewise/attention")
'''
LAYOUTS = (
    Layout("flash-attn2", "kernels-community/flash-attn2", "tilewise-flash-attn2", int(flash_attn.__version__[0]), FLASH_ATTN),
    Layout("attention", "tilewise/attention", "tilewise-attention", 1, ATTENTION),
)


def metadata(layout: Layout, backend: str) -> dict:
    """metadata.json of a variant, as `kernels` 0.17 and later read it."""
    return {
        "id": layout.name.replace("-", "_"),
        "name": layout.name,
        "version": layout.version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }


def write(folder: Path) -> list[Path]:
    """Every variant's folder, of every layout."""
    written = []
    for layout in LAYOUTS:
        for variant, backend in VARIANTS.items():
            place = folder / layout.folder / "build" / variant
            place.mkdir(parents=True, exist_ok=True)
            (place / "__init__.py").write_text(layout.module)
            (place / "metadata.json").write_text(json.dumps(metadata(layout, backend), indent=2) + "\n")
            written.append(place)
    return written


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist/kernels-layout").resolve()
    write(target)
    print(f'LOCAL_KERNELS="{":".join(f"{each.replaces}={target / each.folder}" for each in LAYOUTS)}"')
