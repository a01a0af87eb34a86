#!/bin/sh
# The CPU kernel under AddressSanitizer and UndefinedBehaviorSanitizer, driven by its own tests (QUICK, poison, decode, random problems).
# Usage: tools/sanitize.sh [pytest arguments]; PYTHON chooses the interpreter.
set -e
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
PYTHONPATH=src "$PYTHON" - "$folder/libtilewise_cpu.so" <<'PY'
import sys
from pathlib import Path
from tilewise.backends.cpu.build import build
print(build("-DSANITIZE=address,undefined", to=Path(sys.argv[1])))
PY
# Python itself and torch keep memory until exit: leaks are not what this looks for.
LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so)" \
ASAN_OPTIONS=detect_leaks=0:handle_segv=0 UBSAN_OPTIONS=print_stacktrace=1 \
TILEWISE_CPU_LIBRARY="$folder/libtilewise_cpu.so" PYTHONPATH=src \
  "$PYTHON" -m pytest -q -p no:cacheprovider -m "not slow" tests/backends/cpu "$@"
