"""Makes a first training step with prebuilt kernels, in a process without the DSL, and prints JSON: times, and whether the step is right.

    python -m pip install torch apache-tvm-ffi numpy; python -m pip install --no-deps dist/tilewise_kernels_sm90-*.whl
    PYTHONPATH=src python tools/gpu/prebuilt_check.py
    PYTHONPATH=src:/tmp/kernels python tools/gpu/prebuilt_check.py     # where the wheel was unpacked to: unzip -d /tmp/kernels dist/...whl

On an H100 or H200. Every case is the first step of a process of its own; results are checked against fp64 by the repository's tolerance afterwards.
Where the DSL is installed its import is refused. Exits with 1 where a result is wrong, or a first step takes longer than the promise.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what is imported, and when, is measured here
    from torch import Tensor

    from tilewise.problem import Call, Gradients

PROMISE_S = 1.5  # from the end of `import torch` to the end of the first training step
BLOCKED = ("cutlass", "nvidia_cutlass_dsl")
CASES = [(head_dim, mask) for head_dim in (64, 128) for mask in ("full", "causal", "window", "documents")]


class Blocked:
    """Refuses what must not be needed."""

    def find_spec(self, name: str, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def block() -> None:
    """As if the DSL were not installed."""
    sys.meta_path.insert(0, Blocked())
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in BLOCKED else found(name, package)


def step(head_dim: int, mask: str) -> dict:
    """The first training step of this process."""
    block()
    begin = time.perf_counter()
    import torch

    imported = time.perf_counter()
    import tilewise
    from tilewise.masks import Causal, Documents, Full, SlidingWindow

    own = time.perf_counter()
    torch.manual_seed(0)
    shapes = (1, 1000, 8, head_dim), (1, 1000, 2, head_dim), (1, 1000, 2, head_dim), (1, 1000, 8, head_dim)
    q, k, v, d_o = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    torch.cuda.synchronize()
    ready = time.perf_counter()
    masks = {"full": Full(), "causal": Causal(), "window": SlidingWindow(200, 0), "documents": Documents([0, 300, 1000], inner=Causal())}
    visible = masks[mask]
    o = tilewise.attention(q, k, v, mask=visible, backend="hopper")
    torch.cuda.synchronize()
    forward = time.perf_counter()
    (o * d_o).sum().backward()  # a scalar, as in training: for o.backward(d_o) torch imports sympy, 1.6 s, once a process
    torch.cuda.synchronize()
    backward = time.perf_counter()
    first = [x.grad.clone() for x in (q, k, v)]
    later = []
    for _ in range(5):
        start = time.perf_counter()
        (tilewise.attention(q, k, v, mask=visible, backend="hopper") * d_o).sum().backward()
        torch.cuda.synchronize()
        later.append(time.perf_counter() - start)
    from tilewise.problem import Call, Gradients
    from tilewise.sm90 import jit, prebuilt

    with torch.no_grad():
        _, lse = tilewise.attention(q, k, v, mask=visible, backend="hopper", return_lse=True)
    call = Call(q=q.detach(), k=k.detach(), v=v.detach(), mask=visible, scale=head_dim**-0.5, grad=True)
    wrong, used = checked(call, o.detach(), lse, Gradients(*first, None, None), d_o)
    return {
        "head_dim": head_dim,
        "mask": mask,
        "right": not wrong,
        "wrong": wrong,
        "share_of_tolerance": used,
        "dsl_imported": "cutlass" in sys.modules,
        "without_compiler": jit.why_no_compiler(),
        "kernels": prebuilt.describe().rpartition("/")[2],
        "import_torch_s": imported - begin,
        "import_tilewise_s": own - imported,
        "cuda_and_tensors_s": ready - own,
        "first_forward_s": forward - ready,
        "first_backward_s": backward - forward,
        "since_torch_s": backward - imported,
        "later_step_s": min(later),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
    }


def checked(call: "Call", o: "Tensor", lse: "Tensor", gradients: "Gradients", d_o: "Tensor") -> tuple[str, float]:
    """What is wrong with the step, empty where nothing is; and the largest error as a share of what is tolerated."""
    from tilewise.testing import tolerance

    expect = tolerance.expected(call, d_o)
    try:
        return "", max(tolerance.check_outputs(call, o, lse, expect), tolerance.check_gradients(call, gradients, d_o, expect=expect))
    except AssertionError as error:
        return str(error), float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step", nargs=2, metavar=("HEAD_DIM", "MASK"), help="this case alone, in this process")
    given = parser.parse_args()
    if given.step:
        print(json.dumps(step(int(given.step[0]), given.step[1])))
        return 0
    rows = []
    for head_dim, mask in CASES:
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | {"TILEWISE_CACHE_DIR": empty}
            command = [sys.executable, __file__, "--step", str(head_dim), mask]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            rows.append({"head_dim": head_dim, "mask": mask, "right": False, "wrong": done.stderr[-2000:]})
        else:
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    sound = all(row["right"] and not row["dsl_imported"] for row in rows)
    longest = max((row.get("since_torch_s", float("inf")) for row in rows), default=0.0)
    print(json.dumps({"right": sound, "longest_since_torch_s": longest, "promise_s": PROMISE_S, "kept": sound and longest <= PROMISE_S}))
    return 0 if sound and longest <= PROMISE_S else 1


if __name__ == "__main__":
    sys.exit(main())
