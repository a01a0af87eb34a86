"""Compiled kernels on disk, so that only the first process on a machine waits for the compiler.

An entry is a shared library that holds a kernel and what launches it. Loading one takes tvm-ffi and the DSL's runtime library, not the DSL, whose
import and compiler take seconds. Entries lie in a folder that is named after everything besides the kernel's own identity that changes the
code: versions, toolkit, this package's device code (`fingerprint`). They are written aside and renamed into place, and end with a digest of their
name and content, so that what is cut short, damaged or misplaced is compiled again. A digest proves wholeness, not origin: nothing is loaded that
another user could have written, or from a folder where one could (machine/trust.py); it is compiled instead, and kept by this process alone.

Kernels that came in a wheel are looked for first (prebuilt.py). TILEWISE_CACHE_DIR moves the folder (default: $XDG_CACHE_HOME/tilewise,
~/.cache/tilewise); TILEWISE_CACHE=0 does without it, and without prebuilt ones.
"""

import ctypes
import hashlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tilewise.errors import UnsupportedError
from tilewise.machine import trust
from tilewise.sm90 import link, prebuilt
from tilewise.sm90.identity import FUNCTION, OFF, driver, name_of, sealed, settings, whole
from tilewise.sm90.versions import DSL, warn_untested

MOST_BYTES = 512 << 20  # beyond it the entries that were not used for longest go; a kernel takes 0.1 MB
RUNTIME = "libcute_dsl_runtime.so"
PACKAGE = Path(__file__).parent.parent
SOURCES = ("sm90", "backends/hopper", "backends/tables", "ladder")
IMPORTED = time.time()
INSTEAD = "this process compiles its kernels itself (TILEWISE_CACHE_DIR names another folder for them)"


def folder() -> Path | None:
    """Where entries of all versions lie; None where the cache is switched off."""
    if os.environ.get("TILEWISE_CACHE", "").lower() in OFF:
        return None
    root = os.environ.get("TILEWISE_CACHE_DIR")
    return (Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewise") / "hopper"


def entry(launch: str, config, arch: str) -> Path | None:
    """Where the kernel of `launch` ("module:function") and `config` (a dataclass) for `arch` is kept; None where it cannot be.

    That is among the prebuilt ones (prebuilt.py), where they have it. Raises UnsupportedError where they do not, and it cannot be compiled either;
    warns once where the compiler is of a version that was not tested.
    """
    if found := prebuilt.entry(launch, config, arch):
        return found
    if find_spec("cutlass") is None:
        raise UnsupportedError(prebuilt.why_no_kernel(launch, config))
    warn_untested()
    root = folder()
    if root is None or not library() or "<locals>" in launch or not _as_imported():
        return None
    return root / fingerprint()[:16] / f"{name_of(launch, config, arch)}.so"


def load(path: Path) -> Callable | None:
    """The function of an entry; None where there is none that is whole, and that this user or root wrote."""
    ours = not prebuilt.owns(path)
    try:
        if (ours and not _trusted(path)) or not whole(path):
            return None
        import tvm_ffi

        if ours:
            _load_runtime()
        function = tvm_ffi.load_module(path)[FUNCTION]
    except (OSError, RuntimeError, AttributeError):  # it went away, or the folder's file system lets nothing be executed
        return None
    if ours:
        _touch(path)
    return function


def store(path: Path, kernel) -> bool:
    """Keep `kernel`, as `jit.build` made it; whether that was possible."""
    if not _as_imported() or prebuilt.owns(path):
        return False
    try:
        with tempfile.TemporaryDirectory(prefix="tilewise-") as aside:
            objects = Path(aside) / "kernel.o"
            kernel.export_to_c(str(objects), FUNCTION)
            content = link.shared_library(objects.read_bytes(), lambda name: name == f"__tvm_ffi_{FUNCTION}", (RUNTIME, "libtvm_ffi.so"))
        trust.make_folder(path.parent)
        if not _trusted(path.parent):
            return False
        handle, written = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(sealed(path, content))
            os.replace(written, path)
        except BaseException:
            os.unlink(written)
            raise
        _evict(path)
    except (OSError, link.NotLinkable):
        return False
    return True


def keeps(path: Path) -> bool:
    """Whether an entry that is stored there would be one to load, as far as can be said before it is made."""
    writable = not path.parent.exists() or os.access(path.parent, os.W_OK | os.X_OK)
    return writable and not (prebuilt.owns(path) or why_not() or trust.why_not(path.parent))


def entries() -> list[Path]:
    """The entries of all versions, and what was left of writing some."""
    root = folder()
    if root is None or trust.why_not(root):  # in a folder of others', a name may lead anywhere
        return []
    return [path for path in root.glob("*/*") if path.is_file()]


def clear() -> int:
    """Remove every entry; how many there were."""
    found = entries()
    for path in found:
        path.unlink(missing_ok=True)
    for version in {path.parent for path in found}:
        try:
            version.rmdir()
        except OSError:  # somebody is writing there
            continue
    return len(found)


def why_not() -> str:
    """Why this process can keep no kernels; empty where it can."""
    root = folder()
    if root is None:
        return f"the cache is off, because TILEWISE_CACHE is {os.environ['TILEWISE_CACHE']!r}"
    if platform.machine() != "x86_64":
        return f"entries are made for x86_64, and this is {platform.machine()}"
    existing = next(path for path in (root, *root.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written to; TILEWISE_CACHE_DIR names another folder"
    if hasattr(os, "ST_NOEXEC") and os.statvfs(existing).f_flag & os.ST_NOEXEC:
        return f"{existing} is on a file system that lets nothing be executed; TILEWISE_CACHE_DIR names another folder"
    if refused := trust.why_not(root):
        return f"{refused}; TILEWISE_CACHE_DIR names another folder"
    return ""


def describe() -> str:
    """Where compiled kernels are kept and how many, and why no more can be."""
    found, root, wrong = entries(), folder(), why_not()
    there = f"{root}: {len(found)} kernels, {sum(map(_size, found)) / 1e6:.1f} MB" if root else ""
    return "; ".join(filter(None, (there, wrong and f"every process compiles what it needs: {wrong}")))


@cache
def fingerprint() -> str:
    """A digest of what changes the code of every kernel: versions, toolkit, environment, this package's device code."""
    versions = [metadata.version(name) for name in (DSL, "apache-tvm-ffi")]
    parts = [sys.implementation.cache_tag, platform.machine(), *versions, toolkit_of(library())]
    parts += settings()
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in _sources():
        digest.update(f"\0{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def library() -> Path | None:
    """The DSL's runtime library: of the newest toolkit that the driver supports, as the DSL itself chooses; None where entries cannot be used."""
    spec = find_spec("nvidia_cutlass_dsl")
    if spec is None or platform.machine() != "x86_64":
        return None
    found = [path for root in spec.submodule_search_locations for path in Path(root).glob(f"cu[0-9]*/lib/{RUNTIME}")]
    toolkits = {int(toolkit_of(path)[2:]): path for path in found}
    newest = driver()
    supported = [toolkit for toolkit in toolkits if newest is None or toolkit <= newest]
    return toolkits[max(supported)] if supported else None


def toolkit_of(path: Path) -> str:
    """Such as "cu13"."""
    return path.parts[-3]


def _sources() -> list[Path]:
    return [path for source in SOURCES for path in sorted((PACKAGE / source).rglob("*.py"))]


def _as_imported() -> bool:
    """Whether no source was written after this process began to import them: what it compiles is then what they say."""
    return all(path.stat().st_mtime <= IMPORTED for path in _sources())


@cache
def _load_runtime() -> ctypes.CDLL:
    """Entries call it by the name that it has once it is loaded."""
    return ctypes.CDLL(str(library()))


def _trusted(path: Path) -> bool:
    """Whether nobody else could have written what is there; the first time that one could, a warning says so."""
    if refused := trust.why_not(path):
        trust.warn(refused, INSTEAD)
    return not refused


def _touch(path: Path) -> None:
    """Its time is that of its last use."""
    try:
        os.utime(path)
    except OSError:
        return


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _evict(keep: Path) -> None:
    """Remove what was not used for longest, until the rest fits."""
    found = sorted(_used())
    total = sum(size for _, size, _ in found)
    for _, size, path in found:
        if total <= MOST_BYTES:
            return
        if path != keep:
            path.unlink(missing_ok=True)
            total -= size


def _used() -> Iterator[tuple[float, int, Path]]:
    for path in entries():
        try:
            status = path.stat()
        except OSError:
            continue
        yield status.st_mtime, status.st_size, path
