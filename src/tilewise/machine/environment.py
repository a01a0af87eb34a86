"""The environment variables of this project: their names, and what their values mean. docs/environment.md says what each does."""

import difflib
import os
from pathlib import Path

from tilewise.machine import once

NAMES = (  # but those of tests and tools
    "TILEWISE_CACHE",
    "TILEWISE_CACHE_DIR",
    "TILEWISE_CHECK",
    "TILEWISE_COMMIT",
    "TILEWISE_CPU_ISA",
    "TILEWISE_CPU_LIBRARY",
    "TILEWISE_FA3_LIBRARY",
    "TILEWISE_HELPERS",
    "TILEWISE_VLLM_CPU",
    "TILEWISE_VLLM_MLA",
)
OFF, ON = ("0", "off", "no", "false"), ("1", "on", "yes", "true")


def switched_off(name: str) -> bool:
    """Whether a switch that is on by default is turned off. A value that means neither is said once, and leaves it on."""
    value = os.environ.get(name, "").strip().lower()
    if value and value not in OFF + ON:
        once.warn(f"{name} is {os.environ[name]!r}, which means nothing: it takes {', '.join(OFF)} or {', '.join(ON)}, and is on")
    return value in OFF


def named(name: str) -> Path | str:
    """The absolute path that a variable names, or a sentence that says why it is none; empty where the variable is not set.

    It is what is checked and what is opened, so that the two cannot differ: a bare name is looked for elsewhere by dlopen.
    """
    value = os.environ.get(name, "")
    if not value:
        return ""
    try:
        return Path(value).absolute()
    except OSError as error:
        return f"{name} is {value!r}, and there is no current folder to look from ({error.strerror}): name an absolute path"


def given() -> list[str]:
    """ "NAME=value" of each that is set."""
    return [f"{name}={os.environ[name]}" for name in NAMES if name in os.environ]


def misspelt() -> list[str]:
    """A sentence for each variable that looks like one of ours and is none."""
    others = [name for name in os.environ if name.startswith("TILEWISE_") and name not in NAMES]
    close = [(name, difflib.get_close_matches(name, NAMES, 1, 0.8)) for name in others]
    return [f"{name} is set and means nothing: did you mean {found[0]}?" for name, found in close if found]
