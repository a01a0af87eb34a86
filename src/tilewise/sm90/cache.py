"""Compiled kernels on disk, so that only the first process on a machine waits for the compiler.

An entry is a shared library that holds a kernel and what launches it. Loading one takes tvm-ffi and the DSL's runtime library, not the DSL, which
takes seconds to import and to compile. Entries lie in a folder that is named after everything besides the kernel's own identity that changes the
code: versions, toolkit, this package's device code (`fingerprint`). They are sealed (machine/sealed.py), so that what is cut short, damaged or
misplaced is compiled again. A digest proves wholeness, not origin: nothing is loaded that another user could have written, or from a folder where one
could (machine/trust.py); it is compiled instead, and kept by this process alone. So it is where there is no folder, or no room in it.

Only files that have the name of an entry, or of what is left of writing one, are ever removed, and none behind a symbolic link.

Kernels that came in a wheel are looked for first (prebuilt.py). TILEWISE_CACHE_DIR moves the folder (default: $XDG_CACHE_HOME/tilewise,
~/.cache/tilewise); TILEWISE_CACHE=0 does without it, and without prebuilt ones.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tilewise.errors import UnsupportedError
from tilewise.machine import environment, once, sealed, trust
from tilewise.machine.folders import cache_folder, why_no_room
from tilewise.machine.sealed import whole
from tilewise.sm90 import link, prebuilt
from tilewise.sm90.identity import FUNCTION, driver, name_of, settings
from tilewise.sm90.versions import DSL, warn_untested

MOST_BYTES = 512 << 20  # beyond it the entries that were not used for longest go; a kernel takes 0.1 MB
RUNTIME = "libcute_dsl_runtime.so"
PACKAGE = Path(__file__).parent.parent
SOURCES = ("sm90", "backends/hopper", "backends/tables", "ladder")
VERSION = re.compile("[0-9a-f]{16}")  # a folder of entries
ENTRY = re.compile(r"[0-9a-f]{32}\.so")
LEFT = re.compile(r"\.[0-9a-f]{32}\.(lock|\w{8}\.tmp)")  # behind a process that was stopped while it compiled or wrote
NOT_KEPT = "compiled kernels are not kept, and every process compiles what it needs: {}"
INSTEAD = "this process compiles its kernels itself (TILEWISE_CACHE_DIR names another folder for them)"


def folder() -> Path | str:
    """Where entries of all versions lie; a sentence where there is no such place."""
    if environment.switched_off("TILEWISE_CACHE"):
        return f"the cache is off, because TILEWISE_CACHE is {os.environ['TILEWISE_CACHE']!r}"
    root = environment.named("TILEWISE_CACHE_DIR") or cache_folder()
    return root if isinstance(root, str) else root / "hopper"


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
    if isinstance(root, str):
        if not environment.switched_off("TILEWISE_CACHE"):
            once.warn(NOT_KEPT.format(root))
        return None
    if not library() or "<locals>" in launch or not _as_imported():
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
        sealed.write(path, content)
        _evict(path)
    except (OSError, link.NotLinkable):
        return False
    return True


def keeps(path: Path) -> bool:
    """Whether an entry that is stored there would be one to load, as far as can be said before it is made; a warning says once why none would.

    Asked before a kernel is compiled, because one that is compiled to be kept cannot be run.
    """
    if prebuilt.owns(path) or trust.why_not(path.parent):
        return False
    why = why_not() or _why_no_room(path.parent)
    if why:
        once.warn(NOT_KEPT.format(why))
    return not why


def entries() -> list[Path]:
    """The entries of all versions."""
    return [path for path in _files() if ENTRY.fullmatch(path.name)]


def clear() -> int:
    """Remove every entry, and what is left of writing some; how many entries there were."""
    gone = [path for path in list(_files()) if _removed(path)]
    for version in {path.parent for path in gone}:
        with contextlib.suppress(OSError):  # somebody is writing there, or keeps files of their own there
            version.rmdir()
    return sum(ENTRY.fullmatch(path.name) is not None for path in gone)


def why_not() -> str:
    """Why this process can keep no kernels; empty where it can."""
    root = folder()
    if isinstance(root, str):
        return root
    if platform.machine() != "x86_64":
        return f"entries are made for x86_64, and this is {platform.machine()}"
    if os.path.islink(root):
        return f"{root} is a symbolic link, behind which nothing is removed; TILEWISE_CACHE_DIR names another folder"
    if no_room := _why_no_room(root):
        return no_room
    existing = next(path for path in (root, *root.parents) if os.path.exists(path))
    if hasattr(os, "ST_NOEXEC") and os.statvfs(existing).f_flag & os.ST_NOEXEC:
        return f"{existing} is on a file system that lets nothing be executed; TILEWISE_CACHE_DIR names another folder"
    if refused := trust.why_not(root):
        return f"{refused}; TILEWISE_CACHE_DIR names another folder"
    return ""


def describe() -> str:
    """Where compiled kernels are kept and how many, and why no more can be."""
    found, root, wrong = entries(), folder(), why_not()
    there = f"{root}: {len(found)} kernels, {sum(map(_size, found)) / 1e6:.1f} MB" if isinstance(root, Path) else ""
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


def _stamps() -> set[tuple]:
    """What changes when a source is written, whatever the clocks of this machine and of the sources' file system say."""
    found, folders = set(), [str(PACKAGE / source) for source in SOURCES]
    while folders:
        for each in _listed(folders.pop()):
            if each.name.endswith(".py"):
                with contextlib.suppress(FileNotFoundError):
                    status = each.stat()
                    found.add((each.path, status.st_mtime_ns, status.st_size, status.st_ino))
            elif each.name != "__pycache__" and each.is_dir():
                folders.append(each.path)
    return found


def _as_imported() -> bool:
    """Whether no source was written since this process began to import them: what it compiles is then what they say."""
    same = _stamps() == IMPORTED
    if not same:
        once.warn("kernels are compiled and not kept, because their sources were written after this process began: start another")
    return same


@cache
def _load_runtime() -> ctypes.CDLL:
    """Entries call it by the name that it has once it is loaded."""
    return ctypes.CDLL(str(library()))


def _trusted(path: Path) -> bool:
    """Whether nobody else could have written what is there; the first time that one could, a warning says so."""
    if refused := trust.why_not(path):
        trust.warn(refused, INSTEAD)
    return not refused


def _why_no_room(at: Path) -> str:
    """Why no kernel can be written into the folder, or aside to be linked; empty where one can."""
    if wrong := why_no_room(at):
        return f"{wrong}; TILEWISE_CACHE_DIR names another folder"
    try:
        wrong = why_no_room(Path(tempfile.gettempdir()))
    except OSError as error:
        wrong = error.strerror
    return wrong and f"{wrong}, for files of the moment; TMPDIR names another folder"


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
        if path != keep and _removed(path):
            total -= size


def _removed(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _used() -> Iterator[tuple[float, int, Path]]:
    for path in _files():
        try:
            status = path.stat()
        except OSError:
            continue
        yield status.st_mtime, status.st_size, path


def _files() -> Iterator[Path]:
    """What this cache wrote, by its name: the entries of all versions, and what is left of writing some. Others' files may lie next to it."""
    root = folder()
    if isinstance(root, str) or os.path.islink(root) or trust.why_not(root):  # in a folder of others', a name may lead anywhere
        return
    versions = [each for each in _listed(root) if VERSION.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
    for version in versions:
        for each in _listed(version.path):
            if (ENTRY.fullmatch(each.name) or LEFT.fullmatch(each.name)) and each.is_file(follow_symlinks=False):
                yield Path(each.path)


def _listed(at: str | Path) -> list[os.DirEntry]:
    try:
        with os.scandir(at) as found:
            return list(found)
    except OSError:
        return []


IMPORTED = _stamps()
