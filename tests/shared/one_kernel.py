"""One kernel, compiled once, for the tests of what is done with compiled kernels."""

from pathlib import Path

import pytest
import torch

from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.forward.call import arguments
from tilewise.sm90 import cache, jit

LAUNCH = "tilewise.backends.hopper.forward.kernel:launch"


class Exported:
    """Stands for the DSL's object: it was compiled before, and is written out again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def export_to_c(self, path: str, name: str) -> None:
        assert name == cache.FUNCTION
        Path(path).write_bytes(self.path.read_bytes())


@pytest.fixture(scope="session")
def small():
    """(launch, arguments, config) of a kernel that ships."""
    return LAUNCH, arguments, config.configure(torch.bfloat16, 64, 64, "all")


@pytest.fixture(scope="session")
def exported(tmp_path_factory, small) -> Exported:
    if not cache.library():
        pytest.skip("the DSL is not installed, or not for this processor")
    path = tmp_path_factory.mktemp("object") / "kernel.o"
    jit.build(*small).export_to_c(str(path), cache.FUNCTION)
    return Exported(path)


@pytest.fixture
def kept(tmp_path, monkeypatch, exported) -> Path:
    """The folder of an empty cache."""
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    jit.compiled.cache_clear()
    yield cache.folder()
    jit.compiled.cache_clear()
