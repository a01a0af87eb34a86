"""Files that end with a digest of their name and content, so that one that was cut short, damaged or misplaced is known before it is loaded.

A library that lacks pages does not fail to load: it ends the process, by SIGBUS or worse, when it reaches them.
A digest proves wholeness, not origin; for that see trust.py.
"""

import hashlib
import os
import stat
import struct
import tempfile
from pathlib import Path

MARK = b"tilewise"  # ahead of the digest


def sealed(path: Path, content: bytes) -> bytes:
    """What a file at `path` holds."""
    return content + _seal(path, content)


def whole(path: Path) -> bool:
    """Whether there is a file, as it was written."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            return False
        content = path.read_bytes()
    except OSError:
        return False
    end = len(content) - len(MARK) - hashlib.sha256().digest_size
    return end > 0 and content[end:] == _seal(path, content[:end])


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Put a sealed file at `path`, whole or not at all: written aside, flushed to the disk, renamed. Raises OSError, and then leaves nothing.

    Who writes the same file at the same time writes aside under another name; the last one stays.
    """
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(sealed(path, content))
            file.flush()
            os.chmod(aside, mode)
            os.fsync(file.fileno())  # a rename may reach the disk before the content does
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def cut_short(path: Path) -> bool:
    """Whether a 64-bit little-endian ELF file without a seal ends before its own tables say. Raises OSError."""
    with path.open("rb") as file:
        head, size = file.read(64), os.fstat(file.fileno()).st_size
    if head[:6] != b"\x7fELF\2\1":
        return False
    if len(head) < 64:
        return True
    sections, (entry, count) = struct.unpack_from("<Q", head, 40)[0], struct.unpack_from("<HH", head, 58)
    return size < sections + entry * count  # linkers put the table of sections last


def _seal(path: Path, content: bytes) -> bytes:
    return MARK + hashlib.sha256(path.stem.encode() + content).digest()
