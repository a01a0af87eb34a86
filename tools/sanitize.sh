#!/bin/sh
# The CPU kernel under AddressSanitizer and UndefinedBehaviorSanitizer, driven by its own tests (QUICK, poison, random problems) and by those of decode,
# append and packed sequences: of each test's cells a sample by a seed of the day (tests/shared/sampled.py), all with TILEWISE_TEST_SHARE=1. Where the
# processor has AVX512_BF16, AMX's kernels run with tiles that it carries out (csrc/emulated_tiles.h), AMX or not: the sanitizers see those tiles'
# loads and stores, and not AMX's own.
# Usage: tools/sanitize.sh [pytest arguments]; PYTHON chooses the interpreter, CXX the compiler.
set -e
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export CXX="${CXX:-g++}" PYTHONPATH=src
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

skip() {
  echo "sanitize: skipped, $1"
  exit 0
}
command -v "$CXX" > /dev/null || skip "there is no compiler $CXX"
for library in libasan.so libubsan.so; do
  [ -e "$("$CXX" -print-file-name=$library)" ] || skip "$CXX has no $library to load into Python (GCC's runtimes: apt-get install g++)"
done

emulated=
if grep -q avx512_bf16 /proc/cpuinfo; then emulated=-DEMULATE_TILES=ON; else echo "sanitize: without AMX's kernels, this processor has no AVX512_BF16"; fi
"$PYTHON" - "$folder/libtilewise_cpu.so" $emulated <<'PY'
import sys
from pathlib import Path
from tilewise.backends.cpu.build import build
print(build("-DSANITIZE=address,undefined", *sys.argv[2:], to=Path(sys.argv[1])))
PY

# Python itself and torch keep memory until exit: leaks are not what this looks for. The tests that are about threads ask for them by number;
# elsewhere one is enough, as torch's threads spin while they wait, which is slow where cores are shared.
export ASAN_OPTIONS=detect_leaks=0:handle_segv=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
export TILEWISE_TEST_SHARE="${TILEWISE_TEST_SHARE:-0.1}"
export TILEWISE_CPU_LIBRARY="$folder/libtilewise_cpu.so"
preload="$("$CXX" -print-file-name=libasan.so):$("$CXX" -print-file-name=libubsan.so)"

# First the proof that it would be noticed: a call whose keys begin one row late must end in AddressSanitizer's report.
overrun='
import torch
from tilewise.backends.cpu import Cpu
from tilewise.backends.cpu.bound import Bound
from tilewise.masks import Full
from tilewise.problem import Call
real = Bound._run
Bound._run = lambda self, args, q, k, v, o, lse: real(self, args, q, k.flatten()[64:], v, o, lse)
x = torch.ones(1, 64, 1, 64)
Cpu().forward(Call(q=x, k=x.clone(), v=x.clone(), mask=Full(), scale=1.0))
'
if LD_PRELOAD="$preload" "$PYTHON" -c "$overrun" 2> "$folder/report" || ! grep -q "AddressSanitizer: heap-buffer-overflow" "$folder/report"; then
  cat "$folder/report"
  echo "sanitize: an overrun went unnoticed"
  exit 1
fi
# test_memory.py measures the process's peak, which is the sanitizers' here, by long sequences that took longer than all others. What is about the
# system's permission to use tiles has nothing to ask for where they are emulated. torch's compiler is not what is looked at, nor are processes that
# begin anew, which take a minute each here, or longer than their tests wait.
permission=
for test in test_without_permission_the_next_best_runs test_permission_is_asked_for_once_and_held; do
  [ -z "$emulated" ] || permission="$permission --deselect tests/backends/cpu/test_amx.py::$test"
done
LD_PRELOAD="$preload" "$PYTHON" -m pytest -p no:cacheprovider -m "not slow" -k "not compile and not export and not forked_child and not workers_of_a_loader" -n auto --dist worksteal \
  tests/backends/cpu --ignore tests/backends/cpu/test_memory.py $permission \
  tests/test_decoding.py tests/test_decode_fuzz.py tests/test_varlen.py tests/runtime/test_by_document.py tests/runtime/test_three_calls.py "$@"
[ $# -gt 0 ] || "$PYTHON" tools/sanitized.py --write
