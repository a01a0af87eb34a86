#!/usr/bin/env bash
# What a person with a GPU that this project has not run on runs once (an A100, a 4090, a 5090, a B200, an MI300 ...): the Triton backend's tests, the
# search for its configurations, and a bench of a few cells against torch. All that is to be sent in is in one file.
#
#   tools/gpu/other_gpu.sh               test, tune, measure; half an hour to an hour, most of it the compiler's
#   tools/gpu/other_gpu.sh --tests       the tests only;  --tune: the search only;  --bench: the bench only;  several of them: those
#     --most 12                          candidates of the search for each pass (default: all)
#
# Environment: PYTHON (python3, with torch for this GPU, pytest, hypothesis and rich), OUT (the file; other-gpu.txt).
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} OUT=${OUT:-other-gpu.txt}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" COLUMNS=160

steps="" most=()
while [ $# -gt 0 ]; do
  case $1 in
    --tests | --tune | --bench) steps+=" ${1#--}"; shift ;;
    --most) most=(--most "${2:?--most wants a number}"); shift 2 ;;
    *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0"; exit 2 ;;
  esac
done
chosen() { [[ " ${steps:-tests tune bench} " == *" $1 "* ]]; } # STEP

"$PYTHON" - <<'PY' || exit 3
import sys
import torch
from tilewise.backends.triton import targets

if not torch.cuda.is_available():
    sys.exit("torch finds no GPU here")
sys.exit(targets.why_not(None if torch.version.hip else torch.cuda.get_device_capability()) or None)
PY

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
part() { echo "==== $*" >> "$OUT"; } # TITLE
failed=0
: > "$OUT"
part machine
"$PYTHON" -m tilewise doctor >> "$OUT" 2>&1 || true
if chosen tests; then
  part tests
  "$PYTHON" -m pytest -rfE tests/gpu/test_triton{,_decode,_eight_bits,_random}.py 2>&1 | tee "$folder/tests" || failed=1
  tail -n 60 "$folder/tests" >> "$OUT"
fi
if chosen tune; then
  part "lines of TABLE in src/tilewise/backends/triton/config.py"
  "$PYTHON" -m tilewise tune --backend triton --dtype bf16 --head-dim 64,128 ${most[@]+"${most[@]}"} --out "$folder/tune.jsonl" 2>&1 | tee "$folder/tune" || failed=1
  cat "$folder/tune" >> "$OUT"
fi
if chosen bench; then
  "$PYTHON" -m tilewise bench --set triton --impl tilewise:triton,sdpa:flash,sdpa:efficient,flex --dtype bf16 --direction fwd,bwd --device cuda --clock events \
    --budget 0.2 --no-memory --out "$folder/bench.jsonl" || failed=1
fi
part "rows"
cat "$folder"/*.jsonl >> "$OUT" 2> /dev/null || true
echo "written: $OUT (CONTRIBUTING.md, \"Tuning your GPU\", says where to send it)"
exit "$failed"
