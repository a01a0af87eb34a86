"""What `tilewise doctor`, `explain` and `run` do. They print text by themselves: who asks what is missing may lack what tables are made with."""

import json
import math
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict

import torch

from tilewise import __version__
from tilewise import explain as explained
from tilewise.cli import doctor as diagnosis
from tilewise.cli.codes import OK, UNUSABLE
from tilewise.errors import UnsupportedError


def require(device: torch.device) -> None:
    """Raise UnsupportedError where this machine has no such device."""
    if not any(device == found or device == torch.device(found.type) for found in map(torch.device, diagnosis.devices())):
        raise UnsupportedError(
            f"there is no device {device} here; {diagnosis.why_no_gpu() or 'tilewise doctor lists those that there are'}"
        )


def explain(options: Namespace) -> int:
    """Print what `tilewise.explain` says about the call that the options describe."""
    from tilewise.bench.sets import workloads_from
    from tilewise.masks import parse

    require(options.device)
    selected = {name: getattr(options, name) for name in ("batch", "seqlen", "heads", "head_dim", "dtype")}
    expression = "(" in options.mask  # an expression of constructors, rather than a short name
    selected["mask"] = "full" if expression else options.mask
    workload, *others = workloads_from(selected)
    if others:
        raise ValueError("explain describes one call: give one value for each option")
    mask = parse(options.mask, []) if expression else workload.mask
    shapes = (
        (workload.batch, workload.seqlen_q, workload.heads_q, workload.head_dim),
        (workload.batch, workload.seqlen_k, workload.heads_k, workload.head_dim),
        (workload.batch, workload.seqlen_k, workload.heads_k, workload.head_dim_v),
    )
    try:
        q, k, v = (torch.empty(shape, dtype=workload.dtype, device=options.device, requires_grad=options.grad) for shape in shapes)
    except (RuntimeError, TypeError):  # out of memory, or no int64
        gigabytes = sum(map(math.prod, shapes)) * workload.dtype.itemsize / 1e9
        raise MemoryError(
            f"q, k and v of this call would take {gigabytes:,.0f} GB, which {options.device} does not have; "
            "give a smaller --seqlen, --batch, --heads or --head-dim"
        ) from None
    explanation = explained(q, k, v, mask=mask, backend=options.backend)
    print(explanation)
    return OK


def doctor(options: Namespace) -> int:
    """Say what is here; UNUSABLE when no backend can run on any device."""
    devices, statuses = diagnosis.devices(), diagnosis.backends(diagnosis.devices())
    if options.json:
        found = {
            "tilewise": __version__,
            "machine": diagnosis.machine(),
            "devices": devices,
            "packages": diagnosis.packages(),
            "backends": [asdict(status) for status in statuses],
            "integrations": [asdict(each) for each in diagnosis.integrations()],
            "silent_models": diagnosis.compat.silent_models(),
        }
        print(json.dumps(found, indent=2))
    else:
        no_gpu = diagnosis.why_no_gpu()
        facts = diagnosis.machine() | devices | ({"GPU": f"none: {no_gpu}"} if no_gpu else {})
        packages = [(name, version or "not installed", diagnosis.PACKAGES[name]) for name, version in diagnosis.packages().items()]
        _section(f"tilewise {__version__}", facts.items())
        _section("Packages, and what they are for", packages)
        _section("Backends, for causal attention with gradients", map(_of_backend, statuses))
        _section("Integrations", map(_of_integration, diagnosis.integrations()))
        for name, models in diagnosis.compat.silent_models().items():
            if models:
                print(f"{len(models)} models of {name} compute attention by themselves, whatever they are told: {', '.join(models)}")
    return OK if any(status.usable for status in statuses) else UNUSABLE


def _section(title: str, rows: Iterable[tuple[str, ...]]) -> None:
    """A title, and rows with columns as wide as what is in them, but for the last."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    print(title)
    for *cells, last in rows:
        print("  ", *(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last, sep="  ")
    print()


def _of_backend(status: diagnosis.BackendStatus) -> tuple[str, ...]:
    verdict = f"yes  {status.description}".rstrip() if status.usable else f"no: {'; '.join(status.reasons)}"
    return status.name, status.device, verdict


def _of_integration(each) -> tuple[str, ...]:
    here = each.version or ("yes" if each.importable else "no")
    here = f"{here}, answered by tilewise" if each.installed else here
    return each.name, f"of {each.module}", f"here: {here}", f"tested with {each.tested}", each.use


def run(options: Namespace) -> int:
    """Become a program with its attention by tilewise."""
    from tilewise.cli import running

    return running.run(options)
