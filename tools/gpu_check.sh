#!/usr/bin/env bash
# What a person with an H100 or H200 runs once: the GPU tests, then every rung of the ladder and the kernels that `tilewise.attention` runs,
# each beside its peers, measured in turns in one process.
#
#   tools/gpu_check.sh                  install what is missing (into $PYTHON's environment), test, measure
#   tools/gpu_check.sh --tests          the tests only;  --bench: the measurement only;  --gate: the long gate, FULL and random problems,
#                                       only; several of them: those
#     --ladder                          of the measurements, the ladder's only;  --kernels: all but the ladder's
#     --head-dim 128 --seqlen 8192      cells of the ladder's sweep (comma-separated lists);  --causal 0 or 1
#     --set papers,gpu-shapes           sets of what is run beside the ladder; --direction bwd; hard-inputs is one more set, of half an hour
#     --impl k5,k6,sdpa:cudnn           contenders, in place of all that are here
#     --budget 540                      begin no further cell after so many seconds of measuring
#     --sample 0.15                     seconds of timing for each contender and cell
#
# Where there are several GPUs they share tests and cells; each cell's contenders take turns on one.
#
# Environment: PYTHON (python3), OUT (the file or folder of the rows; benchmarks/results/h100.jsonl or h200.jsonl), TILEWISE_OFFLINE=1 (install nothing),
# TILEWISE_FA3_LIBRARY (vLLM's build of FlashAttention-3), TILEWISE_COMMIT (where the checkout has no history, or an older one).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"

steps="" ladder=yes kernels=yes impl="" limit=100000 sample=0.15 sets=papers,gpu-shapes,gpu-cross direction=fwd,bwd cells=()
while [ $# -gt 0 ]; do
  case $1 in
    --tests | --gate | --bench) steps+=" ${1#--}"; shift ;;
    --ladder) kernels=no; shift ;;
    --kernels) ladder=no; shift ;;
    --head-dim | --seqlen | --causal) cells+=("$1" "${2:?$1 wants a value}"); shift 2 ;;
    --set) sets=${2:?--set wants names}; shift 2 ;;
    --direction) direction=${2:?--direction wants fwd, bwd or fwd+bwd}; shift 2 ;;
    --impl) impl=${2:?--impl wants names}; shift 2 ;;
    --budget) limit=${2:?--budget wants seconds}; shift 2 ;;
    --sample) sample=${2:?--sample wants seconds}; shift 2 ;;
    *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0"; exit 2 ;;
  esac
done
chosen() { [[ " ${steps:-tests bench} " == *" $1 "* ]]; } # STEP

if ! nvidia-smi > /dev/null 2>&1; then # before anything is installed
  echo "nvidia-smi finds no GPU here: run this on a machine with an H100 or H200" >&2
  exit 3
fi

missing() { # MODULE=REQUIREMENT ...: the requirements whose modules are not here
  "$PYTHON" -c '
import sys
from importlib.util import find_spec
print(*(need for module, need in (each.split("=", 1) for each in sys.argv[1:]) if find_spec(module) is None))' "$@"
}
wanted=$(missing torch=torch numpy=numpy rich=rich matplotlib=matplotlib pytest=pytest hypothesis=hypothesis \
  xdist=pytest-xdist cutlass=nvidia-cutlass-dsl==4.8.1 tvm_ffi=apache-tvm-ffi)
peers=$(missing flash_attn.cute=flash-attn-4==4.0.0b36 2> /dev/null || echo flash-attn-4==4.0.0b36)
if [ "${TILEWISE_OFFLINE:-0}" = 0 ]; then
  # shellcheck disable=SC2086
  [ -z "$wanted" ] || "$PYTHON" -m pip install -q $wanted
  # shellcheck disable=SC2086
  [ -z "$peers" ] || "$PYTHON" -m pip install -q --pre $peers nvidia-cutlass-dsl==4.8.1 || echo "FlashAttention-4 was not installed: no row of it"
elif [ -n "$wanted" ]; then
  echo "missing, and TILEWISE_OFFLINE is set: $wanted" >&2
  exit 3
fi

"$PYTHON" - <<'PY' || exit 3
import sys
from tilewise.sm90.jit import why_not_here
sys.exit("; ".join(why_not_here()) or None)
PY

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
workers=$((13 * gpus < $(nproc) * 13 / 16 ? 13 * gpus : $(nproc) * 13 / 16)) # most of a test's time is a kernel's compilation
suite=("$PYTHON" -m pytest -n "$((workers > 1 ? workers : 1))" --dist worksteal -rfE)
if chosen tests; then
  alone=(tests/gpu/test_hopper_large.py tests/gpu/test_bench.py tests/gpu/test_hopper_hard_inputs.py) # one takes most of a GPU's memory, the others time what a dozen workers would slow down
  "${suite[@]}" tests/gpu "${alone[@]/#/--ignore=}"
  "$PYTHON" -m pytest -rfEs "${alone[@]}"
fi
! chosen gate || "${suite[@]}" tests/gpu/test_hopper_gate.py -m slow
chosen bench || exit 0

here() { # WORKLOADS NAME,... [DIRECTION]: the contenders that can run these
  "$PYTHON" - "$@" <<'PY'
import sys
import torch
from tilewise import bench

direction = (*sys.argv[3:], "fwd")[0]
cell, here = bench.workloads_from({"set": sys.argv[1], "dtype": "bf16", "direction": direction})[0], []
for contender in bench.find(sys.argv[2]):
    if reasons := contender.why_not(cell, torch.device("cuda")):
        print(f"no row of {contender.name}: {'; '.join(reasons)}", file=sys.stderr)
    else:
        here.append(contender.name)
print(",".join(here))
PY
}
measure() { # PROCESSES SET IMPL OPTION...: rows of a set; each process has a GPU
  local processes=$1 set=$2 impl=$3 one failed=0
  parts=$(mktemp -d)
  shift 3
  for ((one = 0; one < processes; one++)); do
    CUDA_VISIBLE_DEVICES=$(cut -d, -f$((one + 1)) <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}") \
      "$PYTHON" -m tilewise bench --impl "$impl" --set "$set" --part "$((one + 1))/$processes" "${how[@]}" "$@" --out "$parts/$one.jsonl" &
  done
  for ((one = 0; one < processes; one++)); do wait -n || failed=$?; done
  keep
  return "$failed"
}
keep() { # what has been measured, also when this is interrupted
  [ -n "$parts" ] || return 0
  [ -z "$(ls "$parts")" ] || cat "$parts"/*.jsonl >> "$rows"
  rm -r "$parts"
  parts=""
}
parts=""
trap keep EXIT
trap 'kill $(jobs -p) 2> /dev/null || true; wait; exit 130' INT TERM
board=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | grep -oi 'h[0-9]*00' | tr 'H' 'h' || echo gpu)
rows=${OUT:-benchmarks/results/$board.jsonl}
[ ! -d "$rows" ] || rows=$rows/$board.jsonl
how=(--device cuda --dtype bf16 --budget "$sample" --clock events --no-memory --limit "$limit")
peers=fa4,fa3,fa3:vllm,sdpa:cudnn,fa2,sdpa:flash
if [ "$ladder" = yes ]; then
  variants=$("$PYTHON" -c 'from tilewise.ladder import VARIANTS; print(",".join(VARIANTS))')
  measure "$([ ${#cells[@]} = 0 ] && echo "$gpus" || echo 1)" ladder "${impl:-$(here ladder "k1..k8,$variants,$peers")}" --once-above 0.3 "${cells[@]}"
  if [ -z "$impl" ]; then
    measure "$([ ${#cells[@]} = 0 ] && echo "$gpus" || echo 1)" ladder "$(here ladder "b1..b3,tilewise,$peers" bwd)" --direction bwd --once-above 0.3 "${cells[@]}"
  fi
fi
if [ "$kernels" = yes ]; then
  for sweep in ${sets//,/ }; do # a contender that takes so long would make the others' calls late: cuDNN has no packed documents
    formula=$([ "$sweep" = hard-inputs ] && echo ,naive || true) # whose errors are of interest there
    measure "$gpus" "$sweep" "${impl:-$(here "$sweep" "tilewise,$peers$formula")}" --once-above 0.03 --direction "$direction"
  done
fi
