#!/usr/bin/env bash
# SGLang 0.5.17 and what it imports beside torch 2.11 and Triton, for a Hopper machine that has no network: FOLDER/sglang.part.0 and on, 34 MB each.
#
#   tools/gpu/sglang_bundle.sh FOLDER          PYTHON=python3.12: of the version that is there
#   there:  cat sglang.part.* | xz -dc | tar x -C ~/site && PYTHONPATH=~/site python3 tools/sglang_tokens.py triton,tilewise ~/out --device cuda
#
# Of sglang-kernel's wheel, 383 MB, 20 are taken: no FlashAttention-3, FlashMLA, InfLLM, and nothing for Blackwell.
set -euo pipefail
PYTHON=${PYTHON:-python3.12} out=${1:?a folder}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$PYTHON" -m pip install -q --target "$work/site" aiohttp attrs charset_normalizer cloudpickle dill distro einops fastapi gguf httpx interegular IPython loguru \
  msgspec "numpy<2.4" nvidia-ml-py openai==2.6.1 openai-harmony orjson partial_json_parser pillow prometheus-client psutil pybase64 python-multipart pyzmq \
  requests sentencepiece setproctitle tiktoken tqdm transformers==5.12.1 uvicorn uvloop watchfiles xxhash zstandard apache-tvm-ffi==0.1.11
"$PYTHON" -m pip install -q --no-deps --target "$work/site" xgrammar==0.2.1 compressed-tensors
"$PYTHON" -m pip download -q --no-deps --only-binary :all: -d "$work" sglang==0.5.17 sglang-kernel==0.4.5
"$PYTHON" - "$work" <<'P'
import sys
import zipfile
from pathlib import Path

work, left_out = Path(sys.argv[1]), ("flash_ops", "flashmla_ops", "infllm_ops", "sm100/")
for wheel in work.glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "site", [name for name in archive.namelist() if not any(word in name for word in left_out)])
P
stand_in() { # PACKAGE "MODULE ...": imported by SGLang, and not used here
  mkdir -p "$work/site/$1"
  cat > "$work/site/$1/__init__.py" <<P
"""A stand-in: every name is one that raises when it is called."""

import sys
import types


class OfClasses(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class Name(metaclass=OfClasses):
    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Name()

    def __call__(self, *_, **__):
        raise RuntimeError(f"{__name__} is a stand-in here")


class Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Name


for each in "$2".split():
    sys.modules[f"{__name__}.{each}"] = Module(f"{__name__}.{each}")
sys.modules[__name__].__class__ = Module
__version__ = "0"
P
}
stand_in torchvision "transforms transforms.functional transforms.v2 transforms.v2.functional io ops" # for pictures; it would have to fit torch
stand_in flashinfer "gemm fused_moe fused_moe.core comm sampling" # not norm: without it SGLang takes its own
find "$work/site" -name __pycache__ -prune -exec rm -rf {} + -o -name tests -path "*/site/*" -prune -exec rm -rf {} +
tar c -C "$work/site" . | xz -6 -T0 | split -b 34000000 -d -a 1 - "$out/sglang.part."
ls -l "$out"
