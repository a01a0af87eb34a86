"""The forward pass in 8 bits on one Hopper GPU, kernel by kernel; whole calls beside others are `tilewise bench --set fp8`.

    python lab/instruments/fp8.py OUT.jsonl [--only accumulator,speed,quantiser] [--tuning "in turns: pingpong=True, cluster=2" ...]

accumulator  values with a mean of 10, without centring and promoted or not: what the tensor cores' sums of 13 bits lose, against fp64
speed        the papers' sweep (16,384 tokens, hidden dimension 2048), TFLOP/s on visible pairs: the kernel alone, on operands that are there, and
             with quantising (or, of e4m3 that is given, transposing V); where --tuning gives fields of its Config, the kernel alone with these
             too, and how far its O is from the usual's, relative to it
quantiser    what makes the operands: microseconds, the share of the speed at which this GPU copies memory, and each launch alone

Contenders of a line take turns in one process. That results are right is for tests/gpu/test_eight_bits.py.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from choices import named
from rows import Rows, compile_ahead
from torch import Tensor

from tilewise.backends import eight_bits as arithmetic
from tilewise.backends.hopper import changes
from tilewise.backends.hopper.eight_bits import call as eight_bits
from tilewise.backends.hopper.eight_bits.config import Config
from tilewise.backends.hopper.forward import call as sixteen_bits
from tilewise.backends.hopper.forward.plan import Plan, num_sms
from tilewise.backends.reference import Reference
from tilewise.bench.provenance import provenance
from tilewise.bench.timing import interleave
from tilewise.masks import Causal, Full, Mask
from tilewise.problem import Call
from tilewise.sm90 import jit
from tilewise.sm90.jit import Kernel

E4M3, TOKENS, HIDDEN, DEVICE = torch.float8_e4m3fn, 16384, 2048, "cuda"
SECONDS = 0.06  # for each figure
MASKS = {"full": Full(), "causal": Causal()}
GIVEN, TOKEN_WISE = "given", "given, tokens"  # e4m3 with a scale for each tensor, or each token
WAYS = ("int8", "int8_qk", "fp8", GIVEN, TOKEN_WISE)
CELLS = [(d, s, name) for s in (8192, 16384, 2048) for d in (128, 64, 256) for name in MASKS]
SUMMED = {"promote": False, "pieces": 1}  # in the tensor cores alone
QUANTISER_CELLS = [(d, s, b) for d in (128, 64, 256) for s, b in ((16384, 1), (8192, 2), (4096, 4), (2048, 8), (4096, 1), (2048, 1))]


def tuning_from(text: str) -> tuple[str, dict]:
    """ArgumentTypeError for what is no tuning."""
    return named(text, [each.name for each in fields(Config)], "eight_bits.config.Config")


def draw(batch: int, seqlen_q: int, seqlen_k: int, heads: int, dim: int, device: str = DEVICE) -> list[Tensor]:
    """q, k and v, bf16, N(0, 1)."""
    shapes = [(batch, seqlen, heads, dim) for seqlen in (seqlen_q, seqlen_k, seqlen_k)]
    if device == "meta":
        return [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    source = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, dtype=torch.bfloat16, device=device, generator=source) for shape in shapes]


def call_of(way: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Call:
    """way: of WAYS; others are the tensors as they are."""
    call = Call(q=q, k=k, v=v, mask=mask, scale=q.shape[-1] ** -0.5)
    if way in arithmetic.RECIPES:
        return replace(call, precision=way)
    if way not in (GIVEN, TOKEN_WISE):
        return call
    given: dict = {"out_dtype": q.dtype}
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.is_meta:
            of_scale = (x.shape[0], x.shape[2], x.shape[1]) if way == TOKEN_WISE else ()
            given |= {name: torch.empty(x.shape, dtype=E4M3, device=x.device), f"{name}_scale": torch.empty(of_scale, device=x.device)}
        else:
            given[name], given[f"{name}_scale"] = arithmetic.quantised(x.float(), E4M3, "token" if way == TOKEN_WISE else "tensor")
    return replace(call, **given)


def cell_of(way: str, dim: int, seqlen: int, mask: str, device: str = DEVICE) -> Call:
    return call_of(way, *draw(TOKENS // seqlen, seqlen, seqlen, HIDDEN // dim, dim, device), MASKS[mask])


def kernel_of(call: Call, **tuning) -> Callable[[], Tensor]:
    """The kernel alone, on operands that are made here; it returns O."""
    make, scale = eight_bits.operands_of(call)
    made, scales, values = make()
    o = torch.empty((*call.q.shape[:3], call.head_dim_v), dtype=call.out_dtype or call.q.dtype, device=DEVICE)
    lse = torch.empty((call.batch, call.heads_q, call.seqlen_q), dtype=torch.float32, device=DEVICE)
    plan = Plan.of(call, num_sms(call.q.device), eight_bits.config_of(call, **tuning))
    attend = jit.compiled(eight_bits.LAUNCH, eight_bits.arguments, plan.config)
    band, scores = sixteen_bits.band_seen(call, plan), changes.scores(call, plan.config, scale)

    def run() -> Tensor:
        attend((*made, o, lse, values), scales, sixteen_bits.work_of(plan, call.q.device), band, scores)
        return o

    return run


def kernels(tunings: list[tuple[str, dict]]) -> list[Kernel]:
    """All that can be launched here."""
    found = []
    for dim, seqlen, mask in CELLS:
        found += sixteen_bits.kernels(cell_of("bf16", dim, seqlen, mask, "meta"))
        for way in WAYS:
            call = cell_of(way, dim, seqlen, mask, "meta")
            found += eight_bits.kernels(call)
            found += [Kernel(eight_bits.LAUNCH, eight_bits.arguments, eight_bits.config_of(call, **tuning)) for _, tuning in tunings]
        given = cell_of(GIVEN, dim, seqlen, mask, "meta")
        found.append(Kernel(eight_bits.LAUNCH, eight_bits.arguments, eight_bits.config_of(given, **SUMMED)))
    return found


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def accumulator(rows: Rows) -> None:
    """Sums of positive numbers show what is cut off at every addition."""
    for dim in (64, 128, 256):
        for keys in (2048, 16384, 65536):
            q, k, v = draw(1, 256, keys, 2, dim)
            call = call_of(GIVEN, q, k * 0.1, v + 10.0, Full())
            exact, _ = Reference().forward(replace(call, out_dtype=torch.float64))
            ways = {"promoted": {}, "not promoted": SUMMED}
            found = {name: float(f"{rms(kernel_of(call, **tuning)().double() - exact) / rms(exact):.3g}") for name, tuning in ways.items()}
            rows.note(what="accumulator", d=dim, keys=keys, relative_rms=found)


def tflops(dim: int, seqlen: int, mask: str, seconds: float) -> float:
    pairs = seqlen * (seqlen + 1) / 2 if mask == "causal" else seqlen**2
    return round(4 * pairs * (TOKENS // seqlen) * HIDDEN / seconds / 1e12, 1)


def speed(rows: Rows, tunings: list[tuple[str, dict]]) -> None:
    for dim, seqlen, mask in CELLS:
        contenders: dict[str, Callable] = {"bf16": partial(sixteen_bits.forward, cell_of("bf16", dim, seqlen, mask))}
        off = {}
        for way in WAYS:
            call = cell_of(way, dim, seqlen, mask)
            contenders |= {way: kernel_of(call), f"{way}, all": partial(eight_bits.forward, call)}
            usual = contenders[way]().float()
            for name, tuning in tunings:
                run = kernel_of(call, **tuning)
                off[f"{way}, {name}"] = float(f"{rms(run().float() - usual) / rms(usual):.2g}")  # P rounded from other maxima: some 0.03
                contenders[f"{way}, {name}"] = run
        found = interleave(contenders, budget_s=SECONDS, device=DEVICE, clock="events")
        rates = {name: tflops(dim, seqlen, mask, stats.median) for name, stats in found.items()}
        us = {name: round(1e6 * stats.median, 1) for name, stats in found.items()}
        rows.note(what="speed", d=dim, s=seqlen, mask=mask, tflops=rates, us=us, off=off)


def quantiser(rows: Rows) -> None:
    big, other = (torch.empty(50 << 20, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    copy = interleave({"copy": partial(other.copy_, big)}, budget_s=SECONDS, device=DEVICE, clock="graph")["copy"].median
    rate = 4 * big.numel() / copy
    rows.note(what="quantiser", of="copy", gb_s=round(rate / 1e9), us=round(1e6 * copy, 1))
    del big, other
    for dim, seqlen, batch in QUANTISER_CELLS:
        q, k, v = draw(batch, seqlen, seqlen, HIDDEN // dim, dim)
        contenders, least = {}, {}
        for way in WAYS:
            call = call_of(way, q, k, v, Full())
            if way in arithmetic.RECIPES:  # bytes of an element, read and written: of V in 8 bits, three times
                contenders[way], bytes_each = eight_bits.operands_of(call)[0], 9 if eight_bits.quantiser_of(call).values else 6
            else:
                contenders[way], bytes_each = eight_bits.operands_of(call)[0], 2
            least[way] = bytes_each * q.numel() / rate
        found = {name: each.median for name, each in interleave(contenders, budget_s=SECONDS, device=DEVICE, clock="graph").items()}
        us = {name: round(1e6 * seconds, 1) for name, seconds in found.items()}
        share = {name: round(least[name] / seconds, 2) for name, seconds in found.items()}
        rows.note(what="quantiser", d=dim, s=seqlen, batch=batch, us=us, share_of_copy=share, alone_us=kernels_alone(contenders))


def kernels_alone(contenders: dict[str, Callable]) -> dict[str, dict[str, float]]:
    """Microseconds of each kernel by torch's profiler, the shortest of several; `quantise` begins, and loads, before `survey` has come to its end."""
    found: dict[str, dict[str, float]] = {}
    flush = torch.empty(256 << 20, dtype=torch.int8, device=DEVICE)
    for name, run in contenders.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(10):
                flush.zero_()
                run()
            torch.cuda.synchronize()
        times: dict[str, float] = {}
        for event in profile.events() or []:
            which = next((each for each in ("survey", "quantise", "transpose") if f"kernel_cutlass_{each}" in event.name), None)
            if which is not None:
                times[which] = min(times.get(which, math.inf), round(event.device_time, 1))
        found[name] = times
    return found


def main(argv: list[str] | None = None) -> int:
    parts = "accumulator", "speed", "quantiser"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(parts))
    parser.add_argument("--tuning", action="append", default=[], type=tuning_from, metavar="'NAME: FIELD=VALUE, ...'")
    given = parser.parse_args(argv)
    only = given.only.split(",")
    if unknown := [name for name in only if name not in parts]:
        parser.error(f"only names {', '.join(unknown)}; there are {', '.join(parts)}")
    compile_ahead(kernels(given.tuning))
    rows = Rows(given.out)
    rows.note(what="environment", environment=provenance(DEVICE))
    if "accumulator" in only:
        accumulator(rows)
    if "speed" in only:
        speed(rows, given.tuning)
    if "quantiser" in only:
        quantiser(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
