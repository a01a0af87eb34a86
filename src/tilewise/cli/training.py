"""What `tilewise bench train` does: steps of a GPT's training with each contender."""

from argparse import Namespace
from functools import partial

import torch
from rich.console import Console

from tilewise.bench import append, find, ours
from tilewise.bench.tables.training import training_table
from tilewise.bench.training import CONTENDERS, MODELS, SEQLENS, SIZES, TOKENS, Plan, attention_of, train
from tilewise.cli import ahead
from tilewise.cli.codes import FAILED, OK, UNUSABLE
from tilewise.cli.output import require_writable

FIXED = ("batch", "heads", "head_dim", "mask", "causal", "dtype", "direction", "data", "set", "only")
LIMIT_S = 240.0


def run(options: Namespace, console: Console, device: torch.device) -> int:
    """Measure; FAILED when ours is wrong, UNUSABLE when nothing trained."""
    if given := [name for name in FIXED if getattr(options, name) is not None]:
        raise ValueError(f"train fixes what is computed, so {', '.join(given)} cannot be given with it; model, layers and seqlen can")
    names = (options.model or MODELS).split(",")
    if unknown := [name for name in names if name not in SIZES]:
        raise ValueError(f"model is {unknown[0]!r}; each item of its comma-separated list must be one of {', '.join(SIZES)}")
    seqlens = _lengths(options.seqlen) if options.seqlen else list(SEQLENS)
    if len(options.names) > 1 and options.impl:
        raise ValueError("the contenders are named twice, as arguments and by --impl; give one of them")
    impls = find(",".join(options.names[1:]) or options.impl or CONTENDERS)
    if options.out:
        require_writable(options.out)
    sizes = [SIZES[name] for name in names]
    if options.ahead:
        workloads = [attention_of(size, seqlen, 1) for size in sizes for seqlen in seqlens]
        ahead.run(console, workloads, impls, device, options.processes)
    rows = train(
        sizes,
        seqlens,
        impls,
        device=device,
        plan=Plan(
            budget_s=options.budget_s,
            limit_s=options.limit or LIMIT_S,
            tokens=options.tokens or TOKENS,
            layers=options.layers,
            autocast=options.autocast,
            compiled=options.compiled,
        ),
        keep=partial(append, options.out) if options.out else None,
        progress=lambda text: console.print(text, highlight=False),
    )
    console.print(training_table(rows), highlight=False, markup=False, soft_wrap=True)
    if options.out:
        console.print(f"{len(rows)} rows appended to {options.out}", highlight=False, soft_wrap=True)
    if any(row.passed is False and ours(row.impl) for row in rows):
        return FAILED
    return OK if any(row.median_s is not None for row in rows) else UNUSABLE


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(item) for item in text.split(",")]
    except ValueError:
        lengths = [0]
    if min(lengths) < 1:
        raise ValueError(f"seqlen is {text!r}; of train it must be a comma-separated list of positive numbers")
    return lengths
