"""Whether `make sanitize` has passed on the CPU kernel as it is: exits with 0 where it has. CI runs the sanitizers where it has not.

    python tools/sanitized.py            # says what tests/backends/cpu/sanitized.json knows
    python tools/sanitized.py --write    # tools/sanitize.sh, once it has passed as a whole

The record is a digest of what is compiled, of what calls it, and of the tests that drive it; comments of Python files do not count.
"""

import argparse
import ast
import hashlib
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/shared"))

from code_digest import plain

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests/backends/cpu/sanitized.json"
READ = ("src/tilewise/backends/cpu/csrc/*", "src/tilewise/backends/cpu/*.py", "src/tilewise/backends/cpu/CMakeLists.txt")
DRIVEN = ("tests/backends/cpu/*.py", "tools/sanitize.sh")


def digest(root: Path = ROOT) -> str:
    found = hashlib.sha256()
    for path in sorted(path for pattern in READ + DRIVEN for path in root.glob(pattern) if path.is_file()):
        text = path.read_text()
        found.update(f"{path.relative_to(root)}\0{plain(ast.parse(text)) if path.suffix == '.py' else text}\0".encode())
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="record that it passed, today, with $CXX")
    if parser.parse_args().write:
        version = subprocess.run([os.environ.get("CXX", "g++"), "--version"], capture_output=True, text=True, check=True).stdout
        amx = "amx emulated" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "without amx"
        said = {
            "sources": digest(),
            "date": f"{date.today()}",
            "compiler": version.splitlines()[0],
            "machine": f"{platform.machine()}, {amx}",
        }
        RECORD.write_text(json.dumps(said, indent=1) + "\n")
        return 0
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"sources": None}
    same = record["sources"] == digest()
    print(f"sanitized on {record['date']}, {record['compiler']}, {record['machine']}" if same else "not sanitized as it is: make sanitize")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
