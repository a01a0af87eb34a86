"""One kernel, compiled once, for the tests of what is done with compiled kernels."""

from pathlib import Path

import pytest
import torch

from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.forward.call import arguments
from tilewise.sm90 import cache, jit

LAUNCH = "tilewise.backends.hopper.forward.kernel:launch"


class Exported:
    """Stands for the DSL's object: it was compiled before, and is written out again, as an object file or as LLVM's text."""

    def __init__(self, path: Path, ptx: str = "") -> None:
        self.path, self.ptx = path, ptx

    def export_to_c(self, path: str, name: str, export_only_tvm_ffi_symbols: bool = False) -> None:
        assert name == cache.FUNCTION
        Path(path).write_bytes(self.path.with_suffix(Path(path).suffix).read_bytes())


@pytest.fixture(scope="session")
def small():
    """A kernel that ships."""
    return jit.Kernel(LAUNCH, arguments, config.configure(torch.bfloat16, 64, 64, "full", 384, 384))


@pytest.fixture(scope="session")
def exported(tmp_path_factory, small) -> Exported:
    if not cache.library():
        pytest.skip("the DSL is not installed, or not for this processor")
    path = tmp_path_factory.mktemp("object") / "kernel.o"
    built = jit.build(*small, f"--keep-ptx --dump-dir {path.parent}")
    built.export_to_c(str(path), cache.FUNCTION)
    built.export_to_c(str(path.with_suffix(".ll")), cache.FUNCTION, export_only_tvm_ffi_symbols=True)
    return Exported(path, built.__ptx__)


@pytest.fixture
def kept(tmp_path, monkeypatch, exported) -> Path:
    """The folder of an empty cache."""
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    jit._compiled.cache_clear()
    yield cache.folder()
    jit._compiled.cache_clear()
