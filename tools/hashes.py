"""Writes what pip would install here for tilewise, with digests, for `pip install --require-hashes -r`: `python tools/hashes.py [extra ...]`.

Versions are those of constraints.txt; files, and so digests, are those of this platform and this Python. Without extras: those of the tests.
pip looks into the files' metadata and installs nothing. SECURITY.md says what it is for.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ("scikit-build-core", "cmake", "ninja")  # which `--no-build-isolation` wants to be there


def requirements(report: dict) -> list[str]:
    """Lines of a requirements file from pip's report of an installation. ValueError where a file came without a digest."""
    found = []
    for each in report["install"]:
        wanted, source = each["metadata"], each["download_info"]
        if "dir_info" in source:  # this checkout
            continue
        digest = source.get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise ValueError(f"{wanted['name']} {wanted['version']} came without a sha256 from its index: no line can be written for it")
        found.append(f"{wanted['name']}=={wanted['version']} --hash=sha256:{digest}")
    return sorted(found, key=str.lower)


def main(extras: list[str]) -> int:
    wanted = f"{ROOT}[{','.join(extras or ['test'])}]"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run([*command, "-c", ROOT / "constraints.txt", wanted, *BUILD], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    print(f"# Made by tools/hashes.py on {sys.platform}, Python {sys.version_info.major}.{sys.version_info.minor}.")
    print("\n".join(requirements(json.loads(done.stdout))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
