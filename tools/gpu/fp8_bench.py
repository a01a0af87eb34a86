"""Measures the forward pass in 8 bits on one Hopper GPU: checked first, then its errors on four distributions, then its speed beside bf16's.

    python tools/gpu/fp8_bench.py OUT.jsonl [--only check,accumulator,errors,speed,tuning,quantiser] [--seconds 300]

check: against the emulation in torch (backends/tiled/eight_bits.py) and, by the root of the mean square, against fp64; odd lengths, every head_dim.
accumulator: values with a mean of 10, without centring and promoted or not: what the tensor cores' sums of 13 bits lose.
errors: against fp64, pooled over 16 heads of 8,192 keys; `gain` is over e4m3 with one scale a tensor.
speed: the papers' sweep (16,384 tokens, hidden dimension 2048), TFLOP/s on visible pairs, all in one process, interleaved: the kernel alone, on
operands that are there, and with quantising (or, of e4m3 that is given, transposing V).
tuning: the kernel alone with other tiles and schedules.
quantiser: what makes the operands: its bits against the emulation's on the CPU, then microseconds and the share of the speed at which this GPU
copies memory: both launches, each of them, and the transposing of a V that comes in e4m3.

Kernels are compiled ahead, on all cores. Every row is printed and written to OUT.jsonl as soon as it is there.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tilewise.backends import eight_bits as arithmetic
from tilewise.backends.hopper import warmup
from tilewise.backends.hopper.eight_bits import call as eight_bits
from tilewise.backends.hopper.eight_bits.config import QuantiserConfig
from tilewise.backends.hopper.forward import call as sixteen_bits
from tilewise.backends.reference import Reference
from tilewise.backends.tiled import Tiled
from tilewise.bench import provenance
from tilewise.bench.timing import interleave
from tilewise.masks import Causal, Full, Mask, SlidingWindow
from tilewise.problem import Call
from tilewise.sm90 import key_order

E4M3, TOKENS, HIDDEN = torch.float8_e4m3fn, 16384, 2048
START, DEVICE = time.monotonic(), "cuda"
SECONDS = 0.06  # for each figure
MASKS = {"full": Full(), "causal": Causal()}
GIVEN, TOKEN_WISE = "given", "given, tokens"  # e4m3 with a scale for each tensor, or each token
QK = "int8_qk"  # P and V in 16 bits
WAYS = ("int8", QK, "fp8", GIVEN, TOKEN_WISE)
CELLS = [(d, s, name) for s in (8192, 16384, 2048) for d in (128, 64, 256) for name in MASKS]
LENGTHS = [(1, 1), (3, 15), (130, 16), (129, 17), (300, 127), (256, 128), (257, 129), (70, 1000), (1000, 1900)]  # queries and keys
SUMMED = {"promote": False, "pieces": 1}  # in the tensor cores alone
TUNINGS = {
    128: [
        {"cluster": 1, "pingpong": False},
        {"kv_stages": 2},
        {"cluster": 1, "pingpong": True},
        {"cluster": 2, "pingpong": False},
        {"cluster": 2, "pingpong": True},
        {"hold": True},
        {"hold": True, "pingpong": True},
        {"hold": True, "cluster": 2},
        {"hold": True, "cluster": 2, "pingpong": True},
        {"promote": False, "pingpong": True},
        {"tile_m": 192, "pieces": 2, "pingpong": False},
        {"tile_m": 192, "pieces": 2, "pingpong": False, "cluster": 1},
    ],
    64: [
        {"cluster": 1, "pingpong": True},
        {"cluster": 2, "pingpong": True},
        {"hold": True},
        {"hold": True, "pingpong": True},
        {"tile_m": 192, "promote": False, "pingpong": True},
        {"tile_m": 192, "tile_n": 64, "cluster": 1, "hold": True},
        {"tile_m": 192, "pieces": 2},
        {"tile_m": 192, "pieces": 2, "cluster": 1},
    ],
    256: [
        {"cluster": 1},
        {"cluster": 2},
        SUMMED,
        SUMMED | {"cluster": 1},
        SUMMED | {"hold": True},
    ],
}
TUNINGS_OF_QK = {
    128: [
        {"cluster": 1},
        {"cluster": 1, "pingpong": True},
        {"cluster": 2, "pingpong": True},
        {"cluster": 2, "kv_stages": 2},
        {"cluster": 2, "hold": True},
    ],
    64: [{"pingpong": False}, {"cluster": 2}, {"tile_m": 128}, {"tile_m": 128, "pingpong": False, "cluster": 2}],
    256: [{"pingpong": True}, {"cluster": 2}, {"cluster": 2, "kv_stages": 3}, {"kv_stages": 3}],
}
QUANTISERS = [{}, {"cluster": 1}, {"cluster": 2}]  # fields of its configuration
QUANTISER_CELLS = [(d, s, b) for d in (128, 64, 256) for s, b in ((16384, 1), (8192, 2), (4096, 4), (2048, 8), (4096, 1), (2048, 1))]


class Rows:
    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, **row) -> None:
        row["at_s"] = round(time.monotonic() - START, 1)
        print(json.dumps(row), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def draw(batch: int, seqlen_q: int, seqlen_k: int, heads: tuple[int, int], dim: int, device: str, seed: int = 0) -> list[Tensor]:
    """q, k and v, bf16, N(0, 1)."""
    shapes = (seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1])
    if device == "meta":
        return [torch.empty(batch, *shape, dim, dtype=torch.bfloat16, device=device) for shape in shapes]
    source = torch.Generator(device).manual_seed(seed)
    return [torch.randn(batch, *shape, dim, dtype=torch.bfloat16, device=device, generator=source) for shape in shapes]


def call_of(way: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Call:
    """way: of WAYS; others are the tensors as they are."""
    call = Call(q=q, k=k, v=v, mask=mask, scale=q.shape[-1] ** -0.5 if scale is None else scale)
    if way in arithmetic.RECIPES:
        return replace(call, precision=way)
    if way not in (GIVEN, TOKEN_WISE):
        return call
    fields: dict = {"out_dtype": q.dtype}
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.is_meta:
            of_scale = (x.shape[0], x.shape[2], x.shape[1]) if way == TOKEN_WISE else ()
            fields |= {name: torch.empty(x.shape, dtype=E4M3, device=x.device), f"{name}_scale": torch.empty(of_scale, device=x.device)}
        else:
            fields[name], fields[f"{name}_scale"] = arithmetic.quantised(x.float(), E4M3, "token" if way == TOKEN_WISE else "tensor")
    return replace(call, **fields)


def kernel_of(call: Call, **tuning) -> Callable[[], tuple[Tensor, Tensor]]:
    """The kernel alone, on operands that are made here."""
    with torch.cuda.device(call.q.device):
        operands = eight_bits.quantise(call) if call.precision is not None else eight_bits.given(call)
    o = torch.full((*call.q.shape[:3], call.head_dim_v), torch.nan, dtype=call.out_dtype or call.q.dtype, device=call.q.device)
    lse = torch.full((call.batch, call.heads_q, call.seqlen_q), torch.nan, dtype=torch.float32, device=call.q.device)
    config = eight_bits.config_of(call, **tuning) if tuning else None

    def run() -> tuple[Tensor, Tensor]:
        eight_bits.attend(call, *operands, o, lse, config=config)
        return o, lse

    return run


def cell_of(way: str, dim: int, seqlen: int, mask: str, device: str = "") -> Call:
    heads = HIDDEN // dim
    return call_of(way, *draw(TOKENS // seqlen, seqlen, seqlen, (heads, heads), dim, device or DEVICE), MASKS[mask])


def compile_ahead(rows: Rows, only: set[str]) -> None:
    todo = quantisers() if "quantiser" in only else []
    for dim, seqlen, mask in CELLS if only - {"quantiser"} else []:
        for way in WAYS:
            call = cell_of(way, dim, seqlen, mask, "meta")
            todo += eight_bits.kernels(call)
            if "tuning" in only and seqlen == CELLS[0][1]:
                tuned = (eight_bits.config_of(call, **each) for each in tunings_of(way, dim))
                todo += [(eight_bits.LAUNCH, eight_bits.arguments, config) for config in tuned]
        if "speed" in only:
            todo += sixteen_bits.kernels(cell_of("bf16", dim, seqlen, mask, "meta"))
        for way in ("int8", GIVEN):
            config = eight_bits.config_of(cell_of(way, dim, seqlen, mask, "meta"), **SUMMED)
            todo.append((eight_bits.LAUNCH, eight_bits.arguments, config))
    if "check" in only:
        for way in ("int8", QK):
            todo += eight_bits.kernels(call_of(way, *draw(1, 256, 256, (2, 1), 128, "meta"), SlidingWindow(90, 3)))
    outcomes = list(warmup.warm(dict.fromkeys(warmup.Kernel(*each) for each in todo)))
    states = [each.state for each in outcomes]
    failures = [f"{each.kernel.config}: {each.reason[:300]}" for each in outcomes if each.state == "failed"]
    rows.note(kind="compile", **{state: states.count(state) for state in sorted(set(states))}, failures=failures)


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def check(rows: Rows) -> None:
    emulated = Tiled()
    cases = [(d, q, k, mask, way) for d in (128, 64, 256) for mask in MASKS.values() for way in WAYS for q, k in LENGTHS]
    cases += [(128, q, k, SlidingWindow(90, 3), way) for q, k in LENGTHS for way in ("int8", QK)]
    worst: dict[tuple, dict] = {}
    for dim, seqlen_q, seqlen_k, mask, way in cases:
        q, k, v = draw(2, seqlen_q, seqlen_k, (4, 2), dim, DEVICE, seqlen_q + seqlen_k)
        k, v = k + 3.0, v + 2.0
        call = call_of(way, q, k, v, mask)
        o, lse = eight_bits.forward(call)
        again, _ = eight_bits.forward(call)
        want, of_want = emulated.forward(call)
        exact, _ = Reference().forward(call_of("bf16", q, k, v, mask))
        there = of_want.isfinite()
        row = {
            "difference": (o.float() - want.float()).abs().max().item(),
            "lse": (lse - of_want)[there].abs().max().item() if there.any() else 0.0,
            "rms": rms(o.double() - exact.double()) / max(rms(want.double() - exact.double()), 1e-9),
            "other bits": int(not torch.equal(o, again)),
            "nan": int(o.isnan().sum().item() + lse.isnan().sum().item()),
            "empty rows": int(not torch.equal(lse.isfinite(), there)),
        }
        have = worst.setdefault((dim, way, str(mask)), dict(row, at=[]))
        bad = row["rms"] > 1.1 or row["lse"] > 0.02 or row["other bits"] or row["nan"] or row["empty rows"]
        for name, x in row.items():
            have[name] = max(have[name], x)
        if bad:
            have["at"].append([seqlen_q, seqlen_k])
    for (dim, way, mask), row in worst.items():
        shown = {name: float(f"{x:.3g}") if isinstance(x, float) else x for name, x in row.items()}
        rows.note(kind="check", d=dim, way=way, mask=mask, told="wrong" if row["at"] else "ok", **shown)


def accumulator(rows: Rows) -> None:
    """Sums of positive numbers show what is cut off at every addition."""
    for dim in (64, 128, 256):
        for keys in (2048, 16384, 65536):
            q, k, v = draw(1, 256, keys, (2, 2), dim, DEVICE)
            call = call_of(GIVEN, q, k * 0.1, v + 10.0, Full())
            exact, _ = Reference().forward(replace(call, out_dtype=torch.float64))
            found = {}
            for name, fields in (("promoted", {}), ("not promoted", SUMMED)):
                o, _ = kernel_of(call, **fields)()
                found[name] = float(f"{rms(o.double() - exact) / rms(exact):.3g}")
            rows.note(kind="accumulator", d=dim, keys=keys, relative_rms=found)


def distributions(dim: int, keys: int) -> dict[str, tuple[Tensor, Tensor, Tensor, float]]:
    """q, k, v and the scale of 16 heads."""
    queries = 256
    q, k, v = (x.float() for x in draw(1, queries, keys, (16, 16), dim, DEVICE))
    source = torch.Generator(DEVICE).manual_seed(7)

    def outliers(x: Tensor) -> Tensor:
        rare = torch.rand(x.shape, device=DEVICE, generator=source) < 1e-3
        return x + 10.0 * torch.randn(x.shape, device=DEVICE, generator=source) * rare

    uneven = torch.exp(0.5 * torch.randn(dim, device=DEVICE, generator=source))
    mean = torch.zeros(dim, device=DEVICE)
    mean[torch.randperm(dim, generator=torch.Generator().manual_seed(3))[:4].to(DEVICE)] = 12.0
    of_values = torch.randn(dim, device=DEVICE, generator=source)
    usual = dim**-0.5
    return {
        "outlier": (outliers(q), outliers(k), outliers(v), usual),
        "normal": (q, k, v, usual),
        "llm": (q * uneven, k * uneven + mean, v + of_values, usual),
        "peaky": (q, k, v, 4.0 * usual),
    }


def errors(rows: Rows) -> None:
    for dim in (128, 64, 256):
        for keys in (8192, 2048):
            for name, (q, k, v, scale) in distributions(dim, keys).items():
                tensors = [x.bfloat16() for x in (q, k, v)]
                exact, _ = Reference().forward(replace(call_of("bf16", *tensors, Full(), scale), out_dtype=torch.float64))
                found = {way: rms(eight_bits.forward(call_of(way, *tensors, Full(), scale))[0].double() - exact) for way in WAYS}
                o, _ = kernel_of(call_of("int8", *tensors, Full(), scale), **SUMMED)()
                found["int8, not promoted"] = rms(o.double() - exact)
                found["bf16"] = rms(sixteen_bits.forward(call_of("bf16", *tensors, Full(), scale))[0].double() - exact)
                gains = {way: round(found[GIVEN] / max(x, 1e-12), 2) for way, x in found.items()}
                rows.note(kind="errors", d=dim, keys=keys, of=name, rms={way: float(f"{x:.3g}") for way, x in found.items()}, gain=gains)


def tflops(dim: int, seqlen: int, mask: str, seconds: float) -> float:
    pairs = seqlen * (seqlen + 1) / 2 if mask == "causal" else seqlen**2
    return round(4 * pairs * (TOKENS // seqlen) * HIDDEN / seconds / 1e12, 1)


def contenders_of(calls: dict[str, Call], bf16: Call) -> dict[str, Callable]:
    alone = {way: kernel_of(call) for way, call in calls.items()}
    whole = {f"{way}, all": partial(eight_bits.forward, call) for way, call in calls.items()}
    return {**alone, **whole, "bf16": partial(sixteen_bits.forward, bf16)}


def ahead_of(calls: dict[str, Call]) -> dict[str, Callable]:
    """What comes before the kernel."""
    quantisers = {f"quantiser, {way}": partial(eight_bits.quantise, calls[way]) for way in ("int8", QK)}
    return {**quantisers, "transposing": partial(eight_bits.given, calls[GIVEN])}


def speed(rows: Rows) -> None:
    for dim, seqlen, mask in CELLS:
        calls = {way: cell_of(way, dim, seqlen, mask) for way in WAYS}
        contenders = contenders_of(calls, cell_of("bf16", dim, seqlen, mask))
        found = interleave(contenders | ahead_of(calls), budget_s=SECONDS, device=DEVICE, clock="events")
        times = {name: each.median for name, each in found.items()}
        us = {name: round(1e6 * seconds, 1) for name, seconds in times.items()}
        rates = {name: tflops(dim, seqlen, mask, times[name]) for name in contenders}
        rows.note(kind="speed", d=dim, s=seqlen, mask=mask, tflops=rates, us=us)


def tunings_of(way: str, dim: int) -> list[dict]:
    """None where another way's are enough."""
    if way == QK:
        return TUNINGS_OF_QK[dim]
    return TUNINGS[dim] if way == "int8" or (dim > 64 and way != TOKEN_WISE) else []


def tuning(rows: Rows) -> None:
    seqlen = CELLS[0][1]
    for dim, mask, way in itertools.product(TUNINGS, MASKS, WAYS):
        if each := tunings_of(way, dim):
            call, contenders, off = cell_of(way, dim, seqlen, mask), {}, {}
            usual = kernel_of(call)()[0].float()
            for fields in ({}, *each):
                try:
                    run, name = kernel_of(call, **fields), " ".join(f"{name}={x}" for name, x in fields.items()) or "usual"
                    off[name] = float(f"{rms(run()[0].float() - usual) / rms(usual):.2g}")  # P rounded from other maxima: some 0.03
                    contenders[name] = run
                except (RuntimeError, StopIteration, ValueError) as failure:
                    rows.note(
                        kind="tuning", d=dim, way=way, mask=mask, fields=fields, failed=f"{type(failure).__name__}: {str(failure)[:200]}"
                    )
            found = interleave(contenders, budget_s=SECONDS, device=DEVICE, clock="events")
            rates = {name: tflops(dim, seqlen, mask, stats.median) for name, stats in found.items()}
            rows.note(
                kind="tuning", d=dim, way=way, s=seqlen, mask=mask, tflops=dict(sorted(rates.items(), key=lambda item: -item[1])), off=off
            )


def quantiser_configs(call: Call) -> dict[str, QuantiserConfig]:
    """By what is unusual of them."""
    found = {}
    for fields in QUANTISERS:
        config = eight_bits.quantiser_of(call, **fields)
        if config not in found.values():
            found[" ".join(f"{name}={x}" for name, x in fields.items()) or "usual"] = config
    return found


def quantisers() -> list[tuple]:
    """What `jit.compiled` takes, of the part `quantiser`."""
    todo = []
    for dim, way in itertools.product((64, 128, 256), WAYS):
        for dtype in (torch.bfloat16, torch.float16) if way == "int8" else (torch.bfloat16,):
            call = call_of(way, *(x.to(dtype) for x in draw(1, 256, 256, (2, 1), dim, "meta")), Full())
            if way in (GIVEN, TOKEN_WISE):
                todo += [each for each in eight_bits.kernels(call) if each[0] == eight_bits.TRANSPOSE]
            else:
                todo += [(eight_bits.QUANTISE, eight_bits.quantiser_arguments, each) for each in quantiser_configs(call).values()]
    return todo


def quantiser(rows: Rows) -> None:
    for dim, way in itertools.product((128, 64, 256), arithmetic.RECIPES):
        quantiser_check(rows, dim, way)
    big, other = (torch.empty(50 << 20, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    copy = interleave({"copy": partial(other.copy_, big)}, budget_s=SECONDS, device=DEVICE, clock="graph")["copy"].median
    rate = 4 * big.numel() / copy
    rows.note(kind="quantiser", of="copy", gb_s=round(rate / 1e9), us=round(1e6 * copy, 1))
    del big, other
    for dim, seqlen, batch in QUANTISER_CELLS:
        q, k, v = draw(batch, seqlen, seqlen, (HIDDEN // dim, HIDDEN // dim), dim, DEVICE)
        contenders, least = {}, {}
        for way in arithmetic.RECIPES:
            call = call_of(way, q, k, v, Full())
            for name, config in quantiser_configs(call).items():
                contenders[f"{way} {name}"] = partial(eight_bits.quantise, call, config)
                least[f"{way} {name}"] = (9 if config.values else 6) * q.numel() / rate
        for way, name in ((GIVEN, "transposing"), (TOKEN_WISE, "transposing, tokens")):
            contenders[name] = partial(eight_bits.given, call_of(way, q, k, v, Full()))
            least[name] = 2 * q.numel() / rate
        found = {name: each.median for name, each in interleave(contenders, budget_s=SECONDS, device=DEVICE, clock="graph").items()}
        us = {name: round(1e6 * seconds, 1) for name, seconds in found.items()}
        share = {name: round(least[name] / seconds, 2) for name, seconds in found.items()}
        alone = kernels_alone({name: run for name, run in contenders.items() if "=" not in name})
        rows.note(kind="quantiser", d=dim, s=seqlen, batch=batch, us=us, share_of_copy=share, alone_us=alone)


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


def quantiser_check(rows: Rows, dim: int, way: str) -> None:
    """Bits, but for the shift, whose sum has no order."""
    wrong, worst, cases = [], 0.0, 0
    for (seqlen_q, seqlen_k), spoiled in itertools.product([*LENGTHS, (5000, 4500)], (False, True)):
        dtype = torch.float16 if way == "int8" and seqlen_k % 2 else torch.bfloat16
        q, k, v = (x.to(dtype) for x in draw(2, seqlen_q, seqlen_k, (4, 2), dim - 8 * (seqlen_q % 2), "cpu", seqlen_q + seqlen_k))
        k, v = k + 3.0, v + 2.0
        if spoiled:
            q[0, -1, 0, 1], k[0, -1, 0, 3], v[0, -1, 0, 1], v[1, 0, 1, 5], v[..., 2] = math.inf, math.nan, -math.inf, math.nan, 5.0
        call = call_of(way, q, k, v, Full())
        want = arithmetic.operands_of(call)
        on_device = replace(call, **{name: getattr(call, name).to(DEVICE) for name in "qkv"})
        for name, config in quantiser_configs(on_device).items():
            made, scales, _ = eight_bits.quantise(on_device, config)
            cases += 1
            pairs = {
                "q": (made.Q, want.q.view(torch.int8)),
                "k": (made.K, want.k.view(torch.int8)),
                "scale of q": (scales.q, want.q_scale),
                "scale of k": (scales.k, want.k_scale),
            }
            if config.values:
                pairs |= {
                    "v": (made.V, key_order.transposed(want.v.transpose(1, 2)).view(torch.int8)),
                    "scale of v": (scales.v, want.v_channel),
                    "centre": (scales.centre, want.v_centre),
                }
            for what, (got, expected) in pairs.items():
                got = got.cpu()
                differ = got != expected
                if got.dtype == torch.float32:
                    differ &= ~(got.isnan() & expected.isnan())
                elif way == "fp8" or what == "v":
                    differ &= (got & expected & 0x7F) != 0x7F  # NaN has two codes
                if differ.any():
                    wrong.append([name, what, seqlen_q, seqlen_k, spoiled, int(differ.sum())])
            worst = max(worst, (scales.shift.cpu() - want.shift).nan_to_num(0.0).abs().max().item())
    told = "wrong" if wrong or worst > 1e-3 else "ok"
    rows.note(kind="quantiser", of="check", d=dim, way=way, told=told, cases=cases, shift=float(f"{worst:.2g}"), wrong=wrong[:20])


def graph(rows: Rows) -> None:
    """A call without waiting for the GPU, captured and replayed on other numbers, gives the bits of one that was not."""
    for way in WAYS:
        call, other = (call_of(way, *draw(2, 500, 700, (4, 2), 128, DEVICE, seed), Causal()) for seed in (0, 1))
        eight_bits.forward(call)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eight_bits.forward(call)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            o, lse = eight_bits.forward(call)
        for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale"):
            if (target := getattr(call, name)) is not None:
                target.copy_(getattr(other, name))
        captured.replay()
        want = eight_bits.forward(other)
        rows.note(kind="graph", way=way, told="ok" if torch.equal(o, want[0]) and torch.equal(lse, want[1]) else "other bits")


PARTS = {
    "check": check,
    "graph": graph,
    "accumulator": accumulator,
    "errors": errors,
    "speed": speed,
    "tuning": tuning,
    "quantiser": quantiser,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=300.0)
    given = parser.parse_args()
    only, rows = set(given.only.split(",")), Rows(given.out)
    rows.note(kind="machine", **provenance.provenance(DEVICE))
    compile_ahead(rows, only)
    ready = time.monotonic()
    for name, part in PARTS.items():
        if name not in only:
            continue
        if time.monotonic() - ready > given.seconds:
            rows.note(kind=name, failed="no time was left")
            continue
        begin = time.monotonic()
        try:
            part(rows)
        except (
            RuntimeError,
            AssertionError,
            TypeError,
            ValueError,
            NotImplementedError,
        ) as failure:  # so that the others are measured all the same
            rows.note(kind=name, failed=f"{type(failure).__name__}: {str(failure)[:500]}")
        rows.note(kind="seconds", of=name, seconds=round(time.monotonic() - begin, 1))


if __name__ == "__main__":
    main()
