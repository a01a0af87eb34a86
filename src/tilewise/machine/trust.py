"""Whether code may be loaded from a file: only where nobody but this user and the machine's administrator could have put it there.

A digest proves that a file is whole, not where it comes from. Who may write to a file, or to a folder on the way to it, decides what it holds.
"""

import os
import stat
from pathlib import Path

from tilewise.machine import once

MOST_LINKS = 40  # as many as Linux follows


def why_not(path: Path) -> str:
    """Why nothing should be loaded from `path`; empty where nothing speaks against it, or nothing is there.

    The sentence names what on the way to `path` is at fault: a file, folder or symbolic link that another user owns (root aside), or a file or
    folder that others may write to. In a folder with the sticky bit, such as /tmp, others can add names, but not replace what is this user's.
    """
    if not hasattr(os, "getuid"):  # Windows, where a user's folders are the user's
        return ""
    # Whoever owns / rules the machine; seen from a user namespace, that need not be 0.
    owners = {os.getuid(), 0, os.lstat("/").st_uid}
    path = path if path.is_absolute() else Path.cwd() / path
    at, rest, links = Path(path.anchor), list(path.parts[:0:-1]), 0
    wrong = _fault(at, os.lstat(at), owners)
    while rest and not wrong:
        name = rest.pop()
        step = at.parent if name == ".." else at / name
        try:
            status = os.lstat(step)
            target = Path(os.readlink(step)) if stat.S_ISLNK(status.st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return f"{step} cannot be looked at ({error.strerror})"
        wrong = _fault(step, status, owners)
        if target is None:
            at = step
            continue
        links += 1
        if links > MOST_LINKS:
            return f"{path} leads through more than {MOST_LINKS} symbolic links"
        at = Path(target.anchor) if target.is_absolute() else at
        rest += target.parts[:0:-1] if target.is_absolute() else target.parts[::-1]
    return wrong


def warn(refused: str, instead: str) -> None:
    """Warn that nothing is loaded because of `refused`, a sentence of `why_not`, and what is done `instead`; once a process and sentence."""
    once.warn(f"{refused}, so nothing is loaded from there: {instead}")


def make_folder(path: Path) -> None:
    """Make a folder and what leads to it, for this user alone; what exists stays as it is."""
    for each in (*reversed(path.parents), path):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)  # mkdir(parents=True) would give the parents what the umask leaves


def _fault(path: Path, status: os.stat_result, owners: set[int]) -> str:
    if status.st_uid not in owners:
        return f"{path} belongs to another user (number {status.st_uid}, and this is {os.getuid()})"
    mode = status.st_mode
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return ""
    if mode & stat.S_IWOTH:
        return f"{path} can be written to by everybody (chmod go-w {path} ends that)"
    if mode & stat.S_IWGRP and not _private(status.st_gid, status.st_uid):
        return f"{path} can be written to by its group (chmod go-w {path} ends that)"
    return ""


def _private(group: int, owner: int) -> bool:
    """Whether a group is its owner's own: of the same name, and without other members, as many systems make one for each user."""
    import grp
    import pwd

    try:
        name, entry = pwd.getpwuid(owner).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}
