#!/bin/sh
# The AMX kernels' tests on a processor without AMX: a build whose tiles AVX512_BF16 carries out (csrc/emulated_tiles.h). It says nothing about time.
# Usage: tools/emulated_tiles.sh [pytest arguments]; PYTHON chooses the interpreter. Four minutes on two cores.
set -e
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
grep -q avx512_bf16 /proc/cpuinfo || { echo "emulated tiles: skipped, this processor has no AVX512_BF16"; exit 0; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" - "$folder/libtilewise_cpu.so" <<'PY'
import sys
from pathlib import Path
from tilewise.backends.cpu.build import build
print(build("-DEMULATE_TILES=ON", to=Path(sys.argv[1])))
PY
# What is about the system's permission has nothing to ask for here.
TILEWISE_CPU_LIBRARY="$folder/libtilewise_cpu.so" "$PYTHON" -m pytest -p no:cacheprovider -q tests/backends/cpu/test_amx.py \
  tests/backends/cpu/test_conformance.py tests/backends/cpu/test_nonfinite.py tests/backends/cpu/test_parts.py -k "amx and not permission" "$@"
