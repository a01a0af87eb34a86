"""Where this user's caches lie, and whether a folder takes new files.

Both answer with a sentence where there is none or it takes none: no cache is no reason not to compute.
"""

import os
import tempfile
from pathlib import Path

ROOM = 1 << 20  # bytes: a compiled kernel for a GPU takes 0.1 MB


def cache_folder() -> Path | str:
    """$XDG_CACHE_HOME/tilewise, else ~/.cache/tilewise, which need not be there yet; or a sentence that says why this user has no such folder.

    A relative XDG_CACHE_HOME is passed over, as the XDG base directory specification wants it.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        try:
            home = Path.home()
        except RuntimeError:
            return "there is no home directory: HOME is not set, and this user is not in the password file"
        if not home.is_absolute():
            return f"the home directory, {str(home)!r}, is no absolute path: set HOME"
        if wrong := _out_of_reach(home, needed=True):
            return f"the home directory is of no use: {wrong}"
        root = home / ".cache"
    return _out_of_reach(root / "tilewise") or root / "tilewise"


def why_no_room(folder: Path) -> str:
    """Why no file of ROOM bytes can be written into `folder`, or the first folder above it that is there; empty where one can.

    Found by writing one that has no name: rights, file systems that are read-only or full, quotas and limits of a process are all asked at once.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(ROOM))
    except OSError as error:
        return f"{existing} cannot be written to ({error.strerror})"
    return ""


def _out_of_reach(folder: Path, needed: bool = False) -> str:
    """Why nothing can be looked for in `folder`; empty where it can, or where it is not there and not `needed`."""
    try:
        os.stat(os.path.join(folder, "."))
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and not needed
        return "" if missing else f"{folder} cannot be read ({error.strerror})"
    return ""
