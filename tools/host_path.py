"""What a call costs beside the kernel, on a Hopper GPU.

python tools/host_path.py            microseconds of a small call until it returns, and of one with `.sum().backward()`, for every contender here
python tools/host_path.py --cold     seconds from `import torch` to the first result, in this process
"""

import time

import torch

IMPORTED = time.perf_counter()

import argparse  # noqa: E402
import cProfile  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from functools import partial  # noqa: E402

CALLS, ROUNDS = 100, 60
IMPLS = "tilewise,sdpa,fa3,fa3:vllm,fa4"


def small(device: str = "cuda"):
    return (torch.randn(1, 128, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3))


def cold() -> None:
    q, k, v = small()
    torch.cuda.synchronize()
    context = time.perf_counter()
    import tilewise

    imported = time.perf_counter()
    for _ in range(2):
        tilewise.attention(q, k, v, causal=True)
        torch.cuda.synchronize()
        imported, before = time.perf_counter(), imported
        print(f"call: {imported - before:.4f} s", end="; ")
    end = time.perf_counter()
    print(f"CUDA context and inputs: {context - IMPORTED:.3f} s; everything after import torch: {end - IMPORTED:.3f} s", end="; ")
    print("the DSL was imported" if "cutlass" in sys.modules else "without the DSL")


def seconds(call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def table(what: str, calls: dict) -> None:
    """In turns."""
    taken = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            taken[name].append(seconds(call))
    for name, each in taken.items():
        print(f"{what}: {name:12s} median {statistics.median(each) * 1e6:6.1f} us, best {min(each) * 1e6:6.1f} us")


def profiled(call) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(lambda: [call() for _ in range(2000)])
    profiler.print_stats("tottime")


def warm(profile: bool) -> None:
    import tilewise
    from tilewise import bench

    (workload,) = bench.workloads_from({"seqlen": "128", "heads": "2", "head_dim": "64", "mask": "causal", "dtype": "bf16"})
    device, calls = torch.device("cuda"), {}
    q, k, v = small()
    for impl in bench.find(IMPLS):
        if wrong := impl.why_not(workload, device):
            print(f"{impl.name}: {'; '.join(wrong)}", file=sys.stderr)
            continue
        attend = impl.prepare(workload, device)
        calls[impl.name] = lambda attend=attend: attend(q, k, v)
    calls["tilewise"] = lambda: tilewise.attention(q, k, v, causal=True)  # as a user writes it
    with torch.no_grad():
        table("forward", calls)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def trained(call):
        for x in leaves:
            x.grad = None
        call().sum().backward()

    trained_calls = {name: partial(trained, call) for name, call in calls.items()}
    table("forward and .sum().backward()", trained_calls | {"no attention": partial(trained, lambda: q + k + v)})
    if profile:
        profiled(trained_calls["tilewise"])
    with torch.no_grad():
        slices = [[x[:, :seqlen] for x in (q, k, v)] for seqlen in range(1, CALLS + 1)]
        turns = iter(slices)
        first = seconds(lambda: tilewise.attention(*next(turns), causal=True))
        print(f"tilewise, the first call of each of {CALLS} lengths: {first * 1e6:.1f} us")
        if profile:
            profiled(calls["tilewise"])
    torch.cuda.synchronize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true", help="this process's first call, in place of the table")
    parser.add_argument("--profile", action="store_true", help="also say where a call of tilewise spends its time")
    options = parser.parse_args()
    cold() if options.cold else warm(options.profile)
