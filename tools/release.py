"""What a release says: `python tools/release.py vX.Y.Z` prints CHANGELOG.md's section of that version, or why the tag is none.

The version stands in src/tilewise/__init__.py alone. Needs the standard library only.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATE = r"\d{4}-\d{2}-\d{2}"


def version(source: str) -> str:
    return re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1]


def notes(tag: str, version: str, changes: str) -> str:
    """The section of CHANGELOG.md (`changes`) for a tag. ValueError where tag, version and the newest section do not fit together."""
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, but src/tilewise/__init__.py has version {version}: the tag must be v{version}")
    newest, _, rest = changes.partition("\n## ")[2].partition("\n")
    if not re.fullmatch(rf"{re.escape(version)} \({DATE}\)", newest):
        raise ValueError(f"CHANGELOG.md begins with {newest!r}; for this tag it must be '{version} (YYYY-MM-DD)', the day of the release")
    return rest.partition("\n## ")[0].strip() + "\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    source, changes = (ROOT / name for name in ("src/tilewise/__init__.py", "CHANGELOG.md"))
    try:
        print(notes(arguments[0], version(source.read_text("utf-8")), changes.read_text("utf-8")), end="")
    except ValueError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
