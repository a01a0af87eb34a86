"""What a Hopper GPU does in 8 bits: how its tensor cores round sums, how fast they are, and what K7's loop makes of it.

    python lab/instruments/fp8_facts.py OUT.jsonl                          # on an H100 or H200: compiles, then measures for less than a minute
    CUTE_DSL_ARCH=sm_90a python lab/instruments/fp8_facts.py --compile     # without a GPU: compiles a kernel of each kind

Rows are JSON lines; `what` they are about:

- bits: 1 and 31 numbers of 2^-k, of either sign, in one instruction or in two; `kept`: bits behind the leading one;
- sums: P V over up to 64k keys, P constant, V 1 or normal around 0 or 10: never, every tile and every fourth tile added up in fp32;
- rates: of products in e4m3, int8 and bf16, in TFLOP/s; of exponentials beside maxima of three integers or of two fp32 numbers, a clock of an SM;
- loops: K6, K7 with tiles of 128 and 192 keys, without turns, K8, and K7 and K8 with maxima or exponentials held before the wait for P V, in TFLOP/s
  on visible pairs; operands are quantised ahead.
"""

import argparse
import hashlib
import json
import linecache
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from tilewise.bench.provenance import provenance
from tilewise.bench.timing import interleave
from tilewise.ladder import RUNGS, Rung, stamps
from tilewise.sm90 import eight_bits, fragments, jit, tma, wgmma
from tilewise.sm90.dsl import (
    BFloat16,
    Constexpr,
    CUstream,
    Float8E4M3FN,
    Float32,
    Int8,
    Int32,
    OperandMajorMode,
    SmemAllocator,
    arch,
    const_expr,
    cute,
    cutlass,
    range_constexpr,
    sm90,
    warpgroup,
)
from tilewise.testing import eight_bits as simulated

DTYPES = {"e4m3": (Float8E4M3FN, torch.float8_e4m3fn), "int8": (Int8, torch.int8), "bf16": (BFloat16, torch.bfloat16)}
DEPTH = 128  # keys of a tile
UNITS = ("exponentials", "maxima of 3 integers", "maxima of 2", "exponentials, maxima of 3 integers", "exponentials, maxima of 2")
SHAPES = [(head_dim, causal) for head_dim in (128, 64) for causal in (False, True)]
NUMBERS, THREADS = 16, 256  # of a thread's in the loop of `kernel_of_units`; threads of its block
HELD = {"maxima": ("m", "gt", "7F7FFFFF"), "exponentials": ("l", "lt", "00000000")}  # what a row has when they are done, and never is


def holding(module: str, what: str) -> str:
    """A module beside `module` of the ladder in which `what` of a softmax is done before the wait for P V: a store stands there that depends on it.
    It never takes place, but the compiler, which takes waits for free, cannot know.
    """
    numbers, compare, bits = HELD[what]
    store = f"{{ .reg .pred p; setp.{compare}.f32 p, {{$r1}}, 0f{bits}; @p st.volatile.shared.f32 [{{$r0}}], {{$r1}}; }}"
    given = f"tile.consumer * 4 + 1024, tile.rows.{numbers}[0] + tile.rows.{numbers}[1]"
    line = f"    arch.inline_ptx({store!r}, read_only_args=[{given}])\n"
    source, wait = stamps.source_of(module), "    warpgroup.wait_group(0)\n    pipes.v.consumer_release(before)\n"
    if source.count(wait) != 1:
        raise ValueError(f"{module} has {source.count(wait)} waits for P V in its loop, and one is expected")
    source = source.replace(wait, line + wait)
    short = f"{module}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"  # the cache of kernels knows a kernel by its module's name
    name, file = f"tilewise.ladder.{short}", f"<{short}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where the DSL looks for a function's source
    made = sys.modules[name] = ModuleType(name)
    made.__file__ = file
    exec(compile(source, file, "exec"), made.__dict__)
    return short


LOOPS = {
    "k6": RUNGS["k6"],
    "k7": RUNGS["k7"],
    "k7, 192 keys": Rung("k7", "k7_fp8", "", {"tile_n": 192, "kv_stages": 3}, recipe="per_tensor"),
    "k7, no turns": Rung("k7", "k7_fp8", "", {"pingpong": False}, recipe="per_tensor"),
    **{f"k7, {what} held": Rung("k7", holding("k7_fp8", what), "", recipe="per_tensor") for what in HELD},
    "k8": RUNGS["k8"],
    **{f"k8, {what} held": Rung("k8", holding("k8_fp8_incoherent", what), "", recipe="incoherent") for what in HELD},
}


@dataclass(frozen=True)
class Products:
    """A warpgroup's: D (64, tile_n) += A (64, DEPTH) B^T (tile_n, DEPTH) over and over; after each `promote` of them, if any, to D in fp32."""

    kind: str
    tile_n: int = 64
    promote: int = 0
    tile_m: int = 64
    head_dim: int = DEPTH
    kv_stages: int = 1

    @property
    def dtype(self) -> type:
        return DTYPES[self.kind][0]


def arguments_of_products(config: Products) -> list:
    """a (1, 64, DEPTH), b (1, tile_n, DEPTH), d (64, tile_n) fp32 or int32; how often, blocks."""
    given = [jit.tensor(config.dtype, 1, rows, config.head_dim) for rows in (64, config.tile_n)]
    return [*given, jit.tensor(eight_bits.sum_of(config.dtype), 64, config.tile_n), Int32(1), Int32(1)]


@cute.jit
def launch_products(
    mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, times: Int32, blocks: Int32, config: Constexpr[Products], stream: CUstream
):
    mA, mB = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 2, 0])) for x in (mA, mB))
    layouts = wgmma.layout_Q(config, config.dtype), wgmma.layout_K(config, config.dtype)
    loads = tuple(tma.describe(x, layout, (rows, DEPTH)) for x, layout, rows in zip((mA, mB), layouts, (64, config.tile_n), strict=True))
    k, smem = OperandMajorMode.K, warpgroup.OperandSource.SMEM
    mma = sm90.make_trivial_tiled_mma(
        config.dtype, config.dtype, k, k, eight_bits.sum_of(config.dtype), (1, 1, 1), (64, config.tile_n), smem
    )
    kernel_of_products(loads, mD, times, mma, layouts, config).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)


@cute.kernel
def kernel_of_products(loads: tuple, mD: cute.Tensor, times: Int32, mma: cute.TiledMma, layouts: tuple, config: Constexpr[Products]):
    storage = SmemAllocator()
    tiles = tuple(storage.allocate_tensor(config.dtype, x.outer, 1024, swizzle=x.inner) for x in layouts)
    pipes = tuple(tma.make_pipe(storage, 1, rows * DEPTH * config.dtype.width // 8, 4) for rows in (64, config.tile_n))
    tma.barriers_ready()
    if arch.make_warp_uniform(arch.warp_idx()) == 0:
        for load, sX, pipe, rows in zip(loads, tiles, pipes, (64, config.tile_n), strict=True):
            pipe.producer_acquire(tma.at_first_empty(1))
            tma.load(load, sX, pipe, tma.at_first_empty(1), (rows, DEPTH), (0, 0, 0))
    for pipe in pipes:
        pipe.consumer_wait(tma.at_first(1))
    mine, all_mine = mma.get_slice(arch.thread_idx()[0]), mma.get_slice(0)
    a = all_mine.make_fragment_A(all_mine.partition_A(tiles[0]))[None, None, None, 0]
    b = all_mine.make_fragment_B(all_mine.partition_B(tiles[1]))[None, None, None, 0]
    acc = cute.make_rmem_tensor(mine.partition_shape_C((64, config.tile_n)), eight_bits.sum_of(config.dtype))
    acc.fill(0)
    for _ in cutlass.range(times, unroll=1):
        if const_expr(config.promote == 0):
            fragments.product(mma, acc, a, b, True)
        else:
            tile = cute.make_rmem_tensor_like(acc)
            for i in range_constexpr(config.promote):
                fragments.product(mma, tile, a, b, i > 0)
            warpgroup.wait_group(0)
            acc.store(acc.load() + tile.load())
    warpgroup.wait_group(0)
    if arch.block_idx()[0] == 0:
        cute.autovec_copy(acc, mine.partition_C(mD))


def arguments_of_units(config: str) -> list:
    """found (THREADS,) fp32, so that no number is computed in vain; clocks (1,) int32; how often, blocks."""
    return [jit.tensor(Float32, jit.size(), aligned=False), jit.tensor(Int32, jit.size(), aligned=False), Int32(1), Int32(1)]


@cute.jit
def launch_units(found: cute.Tensor, clocks: cute.Tensor, times: Int32, blocks: Int32, config: Constexpr[str], stream: CUstream):
    kernel_of_units(found, clocks, times, config).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def kernel_of_units(found: cute.Tensor, clocks: cute.Tensor, times: Int32, config: Constexpr[str]):
    thread = arch.thread_idx()[0]
    x, y = cute.make_rmem_tensor(NUMBERS, Float32), cute.make_rmem_tensor(NUMBERS, Float32)
    for i in range_constexpr(NUMBERS):
        x[i] = Float32(thread + i) * 0.001
        y[i] = Float32(thread * i + 1)
    integers = cute.recast_tensor(y, Int32)
    start = arch.clock()
    for _ in cutlass.range(times, unroll=1):
        for i in range_constexpr(NUMBERS):
            if const_expr("exponentials" in config):
                x[i] = cute.math.exp2(x[i], fastmath=True)
            if const_expr("integers" in config):
                integers[i] = fragments.largest_integer(integers[i], integers[(i + 1) % NUMBERS], integers[(i + 5) % NUMBERS])
            elif const_expr("maxima" in config):
                y[i] = arch.fmax(y[i], y[(i + 1) % NUMBERS])
    end = arch.clock()
    found[thread] = x.load().reduce(cute.ReductionOp.ADD, 0.0, 0) + y.load().reduce(cute.ReductionOp.ADD, 0.0, 0)
    if thread == 0 and arch.block_idx()[0] == 0:
        clocks[0] = end - start


PRODUCTS = [Products("e4m3"), Products("e4m3", promote=1), Products("e4m3", promote=4), *(Products(kind, 128) for kind in DTYPES)]


def built(config: Products | str):
    """The launch function of a kernel of this file."""
    if isinstance(config, str):
        return jit.build(launch_units, arguments_of_units, config)
    return jit.build(launch_products, arguments_of_products, config)


def multiply(kernel, config: Products, a: Tensor, b: Tensor, times: int = 1, blocks: int = 1) -> Tensor:
    """D of a (64, DEPTH) and b (tile_n, DEPTH), `times` over."""
    d = torch.zeros(64, config.tile_n, dtype=torch.int32 if config.kind == "int8" else torch.float32, device=a.device)
    kernel(a[None], b[None], d, times, blocks)
    return d


def bits(kernel, device: str) -> list[dict]:
    """A row a question. `kept` is the largest k at which 31 times 2^-k beside 1 are all there; `got` says what is, for each k."""
    config, rows, found = Products("e4m3"), range(6, 17), {}
    for sign in (1, -1):
        for where, places in (("in one instruction", slice(1, 32)), ("after another instruction", slice(32, 63))):
            a, b = torch.zeros(64, DEPTH), torch.zeros(64, DEPTH)
            a[:, 0] = b[:, 0] = 1.0
            for row, k in enumerate(rows):
                a[row, places] = sign * 2.0 ** -(k // 2)
                b[row, places] = 2.0 ** -(k - k // 2)
            d = multiply(kernel, config, *(x.to(torch.float8_e4m3fn).to(device) for x in (a, b))).diagonal().tolist()
            found[where, sign] = {k: d[row] for row, k in enumerate(rows)}
    made = []
    for (where, sign), got in found.items():
        exact = {k: 1 + sign * 31 * 2.0**-k for k in rows}
        kept = max((k for k in rows if got[k] == exact[k]), default=0)
        made.append({"what": "bits", "where": where, "sign": sign, "kept": kept, "got": {str(k): got[k] for k in rows}})
    return made


def sums(kernels: dict[int, object], device: str, most: int = 65536) -> Iterator[dict]:
    """Of (64, 64) numbers: their error relative to the exact sums' root mean square; `predicted` by sums of 13 bits, up to 4k keys."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, DEPTH, generator=generator, dtype=torch.float32)
    values = {"V 1": torch.ones(64, DEPTH), "V normal": normal, "V around 10": normal + 10}
    p = torch.full((64, DEPTH), 224.0).to(torch.float8_e4m3fn)
    for name, v in values.items():
        v8 = (v * (448 / v.abs().max())).clamp(-448, 448).to(torch.float8_e4m3fn)
        once = p.double() @ v8.double().T
        for keys in (n for n in (1024, 4096, 16384, 65536) if n <= most):
            exact = once * (keys // DEPTH)
            for promote, kernel in kernels.items():
                times = keys // DEPTH // max(promote, 1)
                got = multiply(kernel, Products("e4m3", promote=promote), p.to(device), v8.to(device), times).double().cpu()
                row = {"what": "sums", "values": name, "keys": keys, "promoted every": promote}
                yield row | {"relative_error": relative(got, exact), "bias": float(((got - exact) / exact.square().mean().sqrt()).mean())}
            if keys <= 4096:
                cut = simulated.summed(p[:1].double().repeat(1, keys // DEPTH), v8.double().T.repeat(keys // DEPTH, 1))
                row = {"what": "sums", "values": name, "keys": keys, "promoted every": 0}
                yield row | {"predicted_relative_error": relative(cut, exact[:1])}


def relative(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def seconds(call) -> float:
    return interleave({"it": call}, budget_s=0.3, device="cuda", clock="events")["it"].median


def rates(kernels: dict) -> Iterator[dict]:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for kind, (_, dtype) in DTYPES.items():
        config, times, blocks = Products(kind, 128), 4000, 2 * processors
        a, b = (torch.randint(-100, 100, (rows, DEPTH), device="cuda", dtype=torch.int64).to(dtype) for rows in (64, config.tile_n))
        taken = seconds(lambda c=config, a=a, b=b, n=times, m=blocks: multiply(kernels[c], c, a, b, n, m))
        flops = 2 * 64 * config.tile_n * DEPTH * times * blocks
        yield {"what": "rates", "products": kind, "operands": "shared memory", "seconds": taken, "tflops": flops / taken * 1e-12}
    for config in UNITS:
        found, clocks = torch.zeros(THREADS, device="cuda", dtype=torch.float32), torch.zeros(1, device="cuda", dtype=torch.int32)
        measured = []
        for _ in range(5):
            kernels[config](found, clocks, 2000, processors)
            measured.append(clocks.item())
        lanes = 2000 * NUMBERS * THREADS / statistics.median(measured)
        yield {"what": "rates", "units": config, "warps": THREADS // 32, "of each a clock of an SM": lanes}


def loops() -> Iterator[dict]:
    for head_dim, causal in SHAPES:
        seqlen, heads, calls = 8192, 2 * 2048 // head_dim, {}
        q, k, v = (torch.randn(heads, seqlen, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for name in kernels_of(head_dim):
            given = LOOPS[name].operands(q, k, v, head_dim**-0.5)
            calls[name] = partial(LOOPS[name], q, k, v, causal=causal, operands=given)
        flops = 4 * heads * seqlen * (seqlen + 1 if causal else 2 * seqlen) / 2 * head_dim
        for name, stats in interleave(calls, budget_s=0.3, device="cuda", clock="events").items():
            row = {"what": "loops", "kernel": name, "head_dim": head_dim, "causal": causal, "seqlen": seqlen, "heads": heads}
            yield row | {"seconds": stats.median, "tflops": flops / stats.median * 1e-12}


def kernels_of(head_dim: int) -> list[str]:
    """Of LOOPS; for 192 keys three warpgroups have no registers."""
    return [name for name in LOOPS if head_dim == 128 or "192" not in name]


def into_cache(name: str, head_dim: int, causal: bool) -> None:
    LOOPS[name].compiled(head_dim, causal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    if given.out is None and not given.compile:
        parser.error("name the file for the rows, or say --compile")
    todo = [(name, *shape) for shape in (SHAPES[:1] if given.compile else SHAPES) for name in kernels_of(shape[0])]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        compiling = [pool.submit(into_cache, *each) for each in todo]
        kernels = {config: built(config) for config in (*PRODUCTS, *UNITS)}
        for each, done in zip(todo, compiling, strict=True):
            done.result()
            print(f"{each}: compiled", file=sys.stderr, flush=True)
    if given.compile:
        return 0
    of_sums = {config.promote: kernels[config] for config in PRODUCTS[:3]}
    environment = provenance("cuda")
    with given.out.open("a") as file:
        for row in chain(bits(of_sums[0], "cuda"), sums(of_sums, "cuda"), rates(kernels), loops()):
            file.write(json.dumps(row | {"environment": environment}) + "\n")
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
