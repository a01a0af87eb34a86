"""How long the first call of each feature takes with an empty cache of kernels, and with the cache on disk that it leaves: by the wall clock, each in
a process of its own after one call of torch's own attention.

python tools/gpu/first_call.py [--backend triton] [--json FILE]       on a GPU, one to two minutes
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

FEATURES = "plain", "window", "documents", "varlen", "softcap", "alibi", "bias", "sink", "dropout", "int8_qk", "decode"


def call_of(feature: str, backend: str) -> tuple[Callable, list]:
    """The call, and its leaves: batch 2, 1,024 tokens, 8 heads of 128, bf16."""
    import torch

    import tilewise as tw

    grad = feature not in ("decode", "int8_qk")
    q, k, v = x = [torch.randn(2, 1024, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]
    cu = torch.tensor([0, 300, 2048], dtype=torch.int32, device="cuda")
    packed, bias, sink = (
        [y.flatten(0, 1) for y in x],
        torch.randn(1, 8, 1024, 1024, device="cuda", dtype=q.dtype),
        torch.randn(8, device="cuda"),
    )
    options = {
        "plain": {"causal": True},
        "window": {"mask": tw.SlidingWindow(100, 0)},
        "documents": {"mask": tw.Documents([0, 300, 1024], inner=tw.Causal())},
        "softcap": {"causal": True, "softcap": 30.0},
        "alibi": {"causal": True, "alibi_slopes": sink.abs()},
        "bias": {"bias": bias},
        "sink": {"causal": True, "sink": sink},
        "dropout": {"causal": True, "dropout_p": 0.1},
        "int8_qk": {"causal": True, "precision": "int8_qk"},
    }
    if feature == "varlen":
        return lambda: tw.attention_varlen(*packed, cu, cu, causal=True, backend=backend), x
    if feature == "decode":
        lengths = torch.tensor([700, 1000], dtype=torch.int32, device="cuda")
        return lambda: tw.decode(q[:, :1], k, v, cache_seqlens=lengths, backend=backend), x
    return lambda: tw.attention(q, k, v, **options[feature], backend=backend), x


def measure(feature: str, backend: str) -> dict:
    """Seconds of the first call and of its gradients, in this process."""
    import torch

    call, leaves = call_of(feature, backend)
    y = torch.randn(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(y, y, y)
    torch.cuda.synchronize()
    start = time.perf_counter()
    o = call()
    torch.cuda.synchronize()
    found = {"forward_s": time.perf_counter() - start}
    if leaves[0].requires_grad:
        start = time.perf_counter()
        torch.autograd.grad(o.float().sum(), leaves)
        torch.cuda.synchronize()
        found["backward_s"] = time.perf_counter() - start
    return {name: round(seconds, 3) for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--features", default=",".join(FEATURES), help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="append the lines to this file")
    parser.add_argument("--feature", choices=FEATURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.feature:
        print(json.dumps(measure(options.feature, options.backend)))
        return
    for feature in options.features.split(","):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"TRITON_CACHE_DIR": folder, "TILEWISE_CACHE_DIR": folder}
            for cache in ("empty", "on disk"):
                command = [sys.executable, __file__, "--feature", feature, "--backend", options.backend]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                found = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip().splitlines()[-1:]}
                line = json.dumps({"feature": feature, "cache": cache, "backend": options.backend, **found})
                print(line, flush=True)
                if options.json:
                    with open(options.json, "a", encoding="utf-8") as file:
                        print(line, file=file)


if __name__ == "__main__":
    main()
