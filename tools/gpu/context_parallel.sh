#!/usr/bin/env bash
# Attention over several GPUs of one machine: bits beside one GPU's, and times of each scheme (tools/gpu/context_parallel.py has what is compared).
#
#   tools/gpu/context_parallel.sh                 all GPUs; --gpus 2: the first two; what follows goes to the script (--parts check, --seqlens, --masks, ...)
#   tools/gpu/context_parallel.sh --gpus 4 --device cpu     a rehearsal on the CPU
#
# Environment: PYTHON (python3), OUT (the file of rows; context-parallel.jsonl).
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} OUT=${OUT:-context-parallel.jsonl}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Multicast is not needed by what runs here, and not every machine permits it.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

gpus=""
if [ "${1:-}" = --gpus ]; then gpus=${2:?--gpus wants a number}; shift 2; fi
[ -n "$gpus" ] || gpus=$("$PYTHON" -c 'import torch; print(max(torch.cuda.device_count(), 1))')
case " $* " in *" --device cpu "*) export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} ;; esac
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$gpus" tools/gpu/context_parallel.py --out "$OUT" "$@"
