"""Variants of the Hopper backward pass, in turns in one process, beside other contenders, on a machine with a Hopper GPU.

python lab/instruments/variants.py, and

    --variant "two rows: stages=4, pairwise=False"    names of backward.config.Config.of that differ from what ships
    --variant "turns: together=8, abreast=4"          and of the order: descending heads, at least; ascending heads that take turns

What ships is measured first, as "base". A variant's gradients are compared with each other bit by bit, RUNS times, and with the base's within CLOSE;
a row says whether they have the base's bits, too, as where all that differs is when things are done. Kernels are compiled ahead, side by
side. Workloads are chosen by --set, --dtype and --direction as in `tilewise bench`, and of these by --only, patterns of their ids.
"""

import argparse
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from choices import named
from counters import calls_of, require_hopper, with_workloads
from rows import compile_ahead

RUNS = 8  # of a variant, compared with each other
ORDER = "together", "abreast"
CLOSE = 2**-7  # of the largest number: gradients are rounded to eight bits


class Variant(NamedTuple):
    name: str
    config: dict  # as backward.config.Config.but takes them
    order: dict  # of ORDER


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", default=[], type=variant_from, metavar="'NAME: FIELD=VALUE, ...'")
    with_workloads(parser, "papers", "bwd", impls="fa4")
    parser.add_argument("--budget", type=float, default=0.2, metavar="SECONDS", help="to time one of them (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append a row for each workload, as JSON lines")
    arguments = parser.parse_args(argv)
    variants = [Variant("base", {}, {}), *arguments.variant]
    if len({variant.name for variant in variants}) < len(variants):
        parser.error("variants have names of their own, and what ships is called base")
    try:
        chosen = calls_of(arguments)
    except ValueError as error:
        parser.error(str(error))
    require_hopper()
    workloads = list(dict.fromkeys(workload for workload, _ in chosen))
    compile_ahead(kernels_of(workloads, variants))
    for workload in workloads:
        row = measure(workload, variants, [impl for of, impl in chosen if of == workload], arguments.budget)
        print(line(row), flush=True)
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return 0


def variant_from(text: str) -> Variant:
    """Raises ArgumentTypeError for what is no variant."""
    from tilewise.backends.hopper.backward.config import names

    name, found = named(text, [*names(), *ORDER], "backward.config and the order")
    order = {field: found.pop(field) for field in ORDER if field in found}
    return Variant(name, found, order)


@contextmanager
def in_place(variant: Variant):
    """The backward pass as the variant has it."""
    from tilewise.backends.hopper.backward import plan

    shipped_config, shipped_order = plan.config_of, plan._order

    def order(config, batch, seqlen_q, heads_q, seqlen_k, heads_k, *others):
        num_sms, ascending, abreast, together, of_queries, _ = shipped_order(config, batch, seqlen_q, heads_q, seqlen_k, heads_k, *others)
        together, abreast = variant.order.get("together", together), variant.order.get("abreast", abreast)
        heads, n_blocks = batch * heads_k, -(-seqlen_k // config.tile_n)
        if not 1 <= together <= heads or abreast < 1 or (abreast > 1 and not config.by_keys) or (config.sees == "rows" and heads % abreast):
            raise ValueError(f"{variant.name}: of {heads} heads {together} cannot descend, or {abreast} not take turns (backward/order.py)")
        ascending = max(0, heads - together) // abreast * abreast if ascending else 0
        return num_sms, ascending, abreast, heads - ascending if ascending else together, of_queries, 3 * num_sms // 2 + abreast * n_blocks

    with (
        mock.patch.object(plan, "config_of", lambda call: shipped_config(call).but(**variant.config)),
        mock.patch.object(plan, "_order", order if variant.order else shipped_order),
    ):
        yield


def kernels_of(workloads, variants: list[Variant]) -> list[tuple]:
    """What all of them need, of both passes."""
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
            with in_place(variant):
                found += Hopper().kernels(Call(q=q, k=k, v=v, mask=workload.mask, scale=1.0, grad=True))
    return found


def measure(workload, variants: list[Variant], others: list, budget: float) -> dict:
    """A row: milliseconds of each, whether all runs of a variant gave the same bits, close to the base's, and whether these are the base's."""
    import torch

    from tilewise.bench import find
    from tilewise.bench.provenance import provenance
    from tilewise.bench.runner import call_of
    from tilewise.bench.timing import interleave

    device = torch.device("cuda")
    inputs = workload.inputs(2, device)
    (ours,) = find("tilewise")
    shipped = call_of(ours.prepare(workload, device), workload, inputs)
    calls = {variant.name: calling(shipped, variant) for variant in variants}
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


def calling(shipped, variant: Variant):
    """A call of the shipped backward pass, as the variant has it."""

    def call():
        with in_place(variant):
            return shipped()

    return call


def line(row: dict) -> str:
    """A workload's times, each with its part of the base's, whose gradients are wrong or differ from run to run, and whose bits are others."""
    base = row["results"]["base"]["ms"]
    times = "  ".join(f"{name} {each['ms']:.4f} ({each['ms'] / base:.4f})" for name, each in row["results"].items())
    wrong = ", ".join(name for name, same in row["same"].items() if not same)
    others = ", ".join(name for name, same in row["bits_of_base"].items() if not same)
    return f"{row['workload']}: {times}{'; OTHER GRADIENTS: ' + wrong if wrong else ''}{'; other bits: ' + others if others else ''}"


if __name__ == "__main__":
    sys.exit(main())
