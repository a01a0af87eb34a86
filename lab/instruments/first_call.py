"""What the first call of a process waits for, by feature: prints JSON lines, one a process.

    PYTHONPATH=src python lab/instruments/first_call.py              # on an H100 or H200; two minutes
    PYTHONPATH=src python lab/instruments/first_call.py --helpers 0  # without processes that compile ahead (sm90/helpers.py)

Each feature is tried in processes of its own: "nothing" with an empty cache, then "disk" with what that one compiled. Where tilewise-kernels-sm90 is
installed, "prebuilt" comes first; "nothing" leaves such kernels out. "next" makes a second feature's first step, in a process that made one before.
Times are seconds: `first_step` from the end of `import torch` to the end of the first training step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

SHAPE = 1, 4096, 16, 4  # batch, seqlen, query heads, key heads
FEATURES = "causal", "window", "softcap", "documents"
OF_COMPILING = "cutlass", "tilewise.sm90.dsl"


def step(feature: str, torch, tilewise) -> dict:
    """Seconds of the first forward and of the first backward of a feature."""
    from tilewise.masks import Causal, Documents, SlidingWindow

    batch, seqlen, heads_q, heads_k = SHAPE
    dim = 64 if feature == "softcap" else 128
    make = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(batch, seqlen, heads, dim, **make) for heads in (heads_q, heads_k, heads_k))
    options = {
        "causal": {"mask": Causal()},
        "window": {"mask": SlidingWindow(1023, 0)},
        "softcap": {"mask": Causal(), "softcap": 30.0, "sink": torch.zeros(heads_q, device="cuda", dtype=torch.bfloat16)},
        "documents": {"mask": Documents([0, 1000, 2500, seqlen], inner=Causal())},
    }[feature]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    o = tilewise.attention(q, k, v, backend="hopper", **options)
    torch.cuda.synchronize()
    forward = time.perf_counter()
    o.sum().backward()
    torch.cuda.synchronize()
    return {"forward": forward - begin, "backward": time.perf_counter() - forward, "finite": bool(q.grad.isfinite().all())}


def child(features: list[str], without_prebuilt: bool) -> dict:
    """The first steps of this process, one feature after another; of the last one, what is reported."""
    begin = time.perf_counter()
    import torch

    imported = time.perf_counter()
    import tilewise
    from tilewise.sm90 import cache, helpers, jit, prebuilt

    own = time.perf_counter()
    if without_prebuilt:
        prebuilt.entry = lambda *_: None
    built, build = [], jit.build

    def timed(launch, *rest, **options):
        start = time.perf_counter()
        try:
            return build(launch, *rest, **options)
        finally:
            built.append([str(launch).removeprefix("tilewise.backends.hopper."), time.perf_counter() - start])

    jit.build = timed
    torch.cuda.init()
    torch.empty(1, device="cuda")
    ready = time.perf_counter()
    for feature in features:
        built.clear()
        start = time.perf_counter()
        found = step(feature, torch, tilewise)
    found |= {"step": time.perf_counter() - start, "first_step": time.perf_counter() - imported} if len(features) == 1 else {}
    later = step(features[-1], torch, tilewise)
    return {
        "import_torch": imported - begin,
        "import_tilewise": own - imported,
        "cuda": ready - own,
        **found,
        "again": later["forward"] + later["backward"],
        "compiled_here": built,
        "dsl_imported": any(name in sys.modules for name in OF_COMPILING),
        "helpers": helpers.why_not() or f"{len(helpers._helpers)} of them",
        "cache": cache.describe(),
        "prebuilt": prebuilt.describe(),
        "gpu": torch.cuda.get_device_name(),
        "cores": len(os.sched_getaffinity(0)),
    }


def run(what: str, features: list[str], folder: str, helpers: str) -> None:
    """A line for one process."""
    command = [sys.executable, __file__, "--child", *features, *(["--without-prebuilt"] if what != "prebuilt" else [])]
    environment = os.environ | {"TILEWISE_CACHE_DIR": folder, "TILEWISE_HELPERS": helpers}
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    said = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"wrong": done.stderr[-2000:]}
    said = {"feature": features[-1], "kernels": what, "process": time.perf_counter() - begin, **said}
    print(json.dumps({name: round(x, 3) if isinstance(x, float) else x for name, x in said.items()}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--helpers", default="1", help="TILEWISE_HELPERS of the processes")
    parser.add_argument("--features", nargs="+", default=list(FEATURES), choices=FEATURES)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--without-prebuilt", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.child, given.without_prebuilt)))
        return 0
    from importlib.util import find_spec

    ways = [*(["prebuilt"] if find_spec("tilewise_kernels_sm90") else []), "nothing", "disk"]
    for feature in given.features:
        with tempfile.TemporaryDirectory() as compiled:
            for what in ways:
                with tempfile.TemporaryDirectory() as empty:
                    run(what, [feature], empty if what == "prebuilt" else compiled, given.helpers)
    with tempfile.TemporaryDirectory() as empty:
        run("next", given.features[:2], empty, given.helpers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
