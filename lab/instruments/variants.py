"""Variants of Hopper's kernels, in turns in one process, next to other contenders, on a machine with a Hopper GPU.

python lab/instruments/variants.py, and

    --variant "two rows: stages=4, pairwise=False"    names of backward.config.Config.of that differ from what ships
    --variant "turns: heads_interleaved=8, heads_per_step=4"          and of the order: descending heads, at least; ascending heads that take turns
    --variant "down: ascending=0, heads_interleaved=4"                  all heads descend, four at a time (of packed documents with ascending=-1)
    --direction fwd --variant "short: from_zero=True" of the forward pass: fields of forward.config.Config
    --direction fwd --precision fp8 --variant "one: cluster=1"    of that in 8 bits: fields of eight_bits.config.Config

What ships is measured first, as "base". A variant's results are compared with each other bit by bit, RUNS times, and with the base's within CLOSE;
a row says whether they have the base's bits, too, as where all that differs is when things are done. Kernels are compiled ahead, side by
side. Workloads are chosen by --set, --dtype and --direction as in `tilewise bench`, and of these by --only, patterns of their ids.
"""

import argparse
import dataclasses
import json
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from choices import named
from counters import calls_of, require_hopper, with_workloads
from rows import compile_ahead

RUNS = 8  # of a variant, compared with each other
ORDER = "ascending", "heads_interleaved", "heads_per_step"
CLOSE = 2**-7  # of the largest number: gradients are rounded to eight bits


class Variant(NamedTuple):
    name: str
    config: dict  # fields of the pass's Config
    order: dict  # of ORDER


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", default=[], metavar="'NAME: FIELD=VALUE, ...'")
    with_workloads(parser, "papers", "bwd", impls="fa4")
    parser.add_argument("--precision", default="", help="fp8, int8, int8_qk")
    parser.add_argument("--budget", type=float, default=0.2, metavar="SECONDS", help="to time one of them (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append a row for each workload, as JSON lines")
    arguments = parser.parse_args(argv)
    try:
        variants = [Variant("base", {}, {}), *(variant_from(text, fields_of(arguments)) for text in arguments.variant)]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if len({variant.name for variant in variants}) < len(variants):
        parser.error("variants have names of their own, and what ships is called base")
    try:
        chosen = calls_of(arguments)
    except ValueError as error:
        parser.error(str(error))
    require_hopper()
    workloads = list(dict.fromkeys(workload for workload, _ in chosen))
    compile_ahead(kernels_of(workloads, variants, arguments.precision))
    for workload in workloads:
        row = measure(workload, variants, [impl for of, impl in chosen if of == workload], arguments.budget, arguments.precision)
        print(line(row), flush=True)
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return 0


def fields_of(arguments: argparse.Namespace) -> list[str]:
    """What a variant of the pass that is measured may name."""
    from tilewise.backends.hopper.backward.config import names
    from tilewise.backends.hopper.eight_bits.config import Config as EightBits
    from tilewise.backends.hopper.forward.config import Config as Forward

    if arguments.precision:
        return [each.name for each in dataclasses.fields(EightBits)]
    return [*names(), *ORDER] if arguments.direction == "bwd" else [each.name for each in dataclasses.fields(Forward)]


def variant_from(text: str, fields: list[str]) -> Variant:
    """Raises ArgumentTypeError for what is no variant."""
    name, found = named(text, fields, "the Config of the pass, and of its order")
    order = {field: found.pop(field) for field in ORDER if field in found}
    return Variant(name, found, order)


@contextmanager
def in_place(variant: Variant, grad: bool = True, precision: str = ""):
    """Calls that are bound meanwhile have their pass, backward or forward, as the variant has it."""
    from tilewise.runtime import call_cache

    call_cache.forget()  # calls bound as another variant has them
    with patched(variant, grad, precision):
        yield
    call_cache.forget()


@contextmanager
def patched(variant: Variant, grad: bool, precision: str):
    """Likewise, while calls that are known stay so."""
    from tilewise.backends.hopper.backward import plan
    from tilewise.backends.hopper.eight_bits import call as eight_bits
    from tilewise.backends.hopper.forward import plan as forward

    shipped_order = plan._order

    def order(config, batch, seqlen_q, heads_q, seqlen_k, heads_k, *others):
        num_sms, ascending, heads_per_step, heads_interleaved, of_queries, _ = shipped_order(
            config, batch, seqlen_q, heads_q, seqlen_k, heads_k, *others
        )
        heads_interleaved, heads_per_step = (
            variant.order.get("heads_interleaved", heads_interleaved),
            variant.order.get("heads_per_step", heads_per_step),
        )
        ascending = variant.order.get("ascending", ascending)
        heads, n_blocks = batch * heads_k, -(-seqlen_k // config.tile_n)
        if (
            ("ascending" in variant.order and ascending > 0)
            or not 1 <= heads_interleaved <= heads
            or heads_per_step < 1
            or (heads_per_step > 1 and not config.by_keys)
            or (config.mask_kind == "varlen" and heads % heads_per_step)
        ):
            raise ValueError(
                f"{variant.name}: of {heads} heads {heads_interleaved} cannot descend, or {heads_per_step} not take turns (backward/order.py)"
            )
        if ascending > 0:
            ascending = max(0, heads - heads_interleaved) // heads_per_step * heads_per_step
        return (
            num_sms,
            ascending,
            heads_per_step,
            heads - ascending if ascending > 0 else heads_interleaved,
            of_queries,
            3 * num_sms // 2 + heads_per_step * n_blocks,
        )

    module = eight_bits if precision else plan if grad else forward
    shipped = module.config_of
    changed = (
        (lambda call: shipped(call).but(**variant.config)) if grad else (lambda call: dataclasses.replace(shipped(call), **variant.config))
    )
    with ExitStack() as patches:
        if variant.config:
            patches.enter_context(mock.patch.object(module, "config_of", changed))
        if variant.order:
            patches.enter_context(mock.patch.object(plan, "_order", order))
        yield


def kernels_of(workloads, variants: list[Variant], precision: str = "") -> list[tuple]:
    """What all of them need."""
    import torch

    from tilewise.backends.hopper import Hopper
    from tilewise.problem import Call

    found = []
    for workload in workloads:
        heads, dims = (workload.heads_q, workload.heads_k, workload.heads_k), (workload.head_dim, workload.head_dim, workload.head_dim_v)
        lengths = workload.seqlen_q, workload.seqlen_k, workload.seqlen_k
        q, k, v = (
            torch.empty((workload.batch, *sizes), dtype=workload.dtype, device="meta") for sizes in zip(lengths, heads, dims, strict=True)
        )
        for variant in variants:
            with in_place(variant, workload.grad, precision):
                found += Hopper().kernels(
                    Call(q=q, k=k, v=v, mask=workload.mask, scale=1.0, grad=workload.grad, precision=precision or None)
                )
    return found


def measure(workload, variants: list[Variant], others: list, budget: float, precision: str = "") -> dict:
    """A row: milliseconds of each, whether all runs of a variant gave the same bits, close to the base's, and whether these are the base's."""
    import torch

    from tilewise.bench.provenance import provenance
    from tilewise.bench.runner import call_of
    from tilewise.bench.timing import interleave

    device = torch.device("cuda")
    inputs = workload.inputs(2, device)
    calls = {}
    for variant in variants:
        with in_place(variant, workload.grad, precision):
            calls[variant.name] = as_bound(variant, bound(workload, inputs, precision), workload, precision)
    base, same, bits = calls["base"](), {}, {}
    for variant in variants:
        runs = [calls[variant.name]() for _ in range(RUNS)]
        equal = all(torch.equal(x, y) for run in runs for x, y in zip(runs[0], run, strict=True))
        same[variant.name] = equal and all(
            ((x - y).abs().max() <= CLOSE * y.abs().max()).item() for x, y in zip(runs[0], base, strict=True)
        )
        bits[variant.name] = all(torch.equal(x, y) for x, y in zip(runs[0], base, strict=True))
    for impl in others:
        if not impl.why_not(workload, device):
            calls[impl.name] = call_of(impl.prepare(workload, device), workload, inputs)
    stats = interleave(calls, budget_s=budget, device=device, clock="events")
    return {
        "workload": workload.id,
        "results": {name: {"ms": 1e3 * each.median, "p10": 1e3 * each.p10, "p90": 1e3 * each.p90} for name, each in stats.items()},
        "samples": min(each.samples for each in stats.values()),
        "same": same,
        "bits_of_base": bits,
        "variants": {variant.name: variant.config | variant.order for variant in variants},
        "environment": provenance(device),
    }


def as_bound(variant: Variant, call, workload, precision: str):
    """The call, as the variant has it each time: a backward pass with large tables, as documents have, is bound at every call."""
    if not workload.grad or workload.mask.kind in ("full", "band"):
        return call

    def again():
        with patched(variant, workload.grad, precision):
            return call()

    return again


def bound(workload, inputs, precision: str):
    """Our call as it is bound now: its gradients, or O and LSE. Gradients with large tables are bound again each time (`as_bound`)."""
    import torch

    from tilewise.backends.hopper import Hopper
    from tilewise.bench import find
    from tilewise.bench.runner import call_of

    if workload.grad:
        (ours,) = find("tilewise")
        gradients = call_of(ours.prepare(workload, inputs.q.device), workload, inputs)
        gradients()  # which binds it
        return gradients
    call = dataclasses.replace(workload.call(), q=inputs.q, k=inputs.k, v=inputs.v, precision=precision or None)
    kept = Hopper().bind(call)
    return torch.no_grad()(lambda: kept.results(call))


def line(row: dict) -> str:
    """A workload's times, each with its part of the base's, whose results are wrong or differ from run to run, and whose bits are others."""
    base = row["results"]["base"]["ms"]
    times = "  ".join(f"{name} {each['ms']:.4f} ({each['ms'] / base:.4f})" for name, each in row["results"].items())
    wrong = ", ".join(name for name, same in row["same"].items() if not same)
    others = ", ".join(name for name, same in row["bits_of_base"].items() if not same)
    return f"{row['workload']}: {times}{'; OTHER RESULTS: ' + wrong if wrong else ''}{'; other bits: ' + others if others else ''}"


if __name__ == "__main__":
    sys.exit(main())
