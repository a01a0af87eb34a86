"""Whether a change leaves the device code alone: PTX of a sample of all Hopper kernels, names taken out, before the change and after it.

Each kernel is compared by itself, with all those of the other side, so that it may move from one launch to another.

Where the table of kernels.json is up to date before the change, `git diff` of it after kernel_table.py says the same of every kernel.

    python tools/gpu/same_ptx.py before.json                # in a checkout of the commit before
    python tools/gpu/same_ptx.py after.json before.json     # here: says which kernels differ, and exits with 1 if any does

Needs no GPU, and three minutes on two cores.
"""

import itertools
import json
import os
import sys
from functools import cache
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/shared"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import pool
from kernel_facts import digest


@cache
def sample() -> dict[str, tuple]:
    """What `jit.build` takes, by name: rungs, every tile of the production kernels under two kinds of mask, changes of scores, dropout, biases."""
    import torch

    from tilewise.backends.hopper.backward import call as backward_call
    from tilewise.backends.hopper.backward import config as backward
    from tilewise.backends.hopper.backward.bias import call as bias
    from tilewise.backends.hopper.backward.repair import call as repairs
    from tilewise.backends.hopper.forward import call as forward_call
    from tilewise.backends.hopper.forward import config as forward
    from tilewise.ladder import RUNGS, VARIANTS

    found = {}
    for name, rung in {**RUNGS, **VARIANTS}.items():
        for dim, causal in ((64, True), (128, False)):
            found[f"{name} {dim} causal={causal}"] = rung, dim, causal
    changes = {"softcap": True, "alibi": True, "bias": torch.float32}
    for i, dims in enumerate(backward.TILES):
        for j in range(2):
            dtype, changed = (torch.bfloat16, torch.float16)[(i + j) % 2], changes if i % 3 == j else {}
            mask_kind = ("full", "causal", "band", "varlen", "tiles")[(i + 2 * j) % 5]
            key = f"forward {dims} {mask_kind} {dtype} {sorted(changed)}"
            found[key] = forward_call.LAUNCH, forward_call.arguments, forward.configure(dtype, *dims, mask_kind, **changed)
            mask_kind = ("full", "causal", "band", "varlen", "tiles")[(i + 2 * j) % 5]
            key = f"backward {dims} {mask_kind} {dtype} {sorted(changed)}"
            config = backward.configure(dtype, *dims, mask_kind, (1, 4096)[j], few=i % 4 == 3, **changed)
            found[key] = backward_call.LAUNCH, backward_call.arguments, config
            for launched in repairs.kernels(config):
                found[f"repair {dims} {mask_kind} {dtype} {sorted(changed)}"] = launched
    for dims, mask_kind, changed in (((64, 64), "band", {}), ((128, 128), "varlen", changes), ((256, 256), "tiles", {})):
        changed, named = changed | {"dropout": True}, f"{dims} {mask_kind} dropout {sorted(changed)}"
        found[f"forward {named}"] = (
            forward_call.LAUNCH,
            forward_call.arguments,
            forward.configure(torch.bfloat16, *dims, mask_kind, **changed),
        )
        config = backward.configure(torch.bfloat16, *dims, mask_kind, **changed)
        found[f"backward {named}"] = backward_call.LAUNCH, backward_call.arguments, config
        (found[f"repair {named}"],) = repairs.kernels(config)
    for rows, mask_kind in itertools.product((False, True), ("band", "varlen", "tiles")):
        shape = {"rows": rows, "whole": True, "chunks": 2, "chunks_v": 2}
        config = bias.Config(dtype=torch.bfloat16, bias=torch.float32, bias_pairs=False, mask_kind=mask_kind, dropout=rows, **shape)
        found[f"bias {rows} {mask_kind}"] = bias.LAUNCH, bias.arguments, config
    return found


def ptx_of(name: str) -> list[str]:
    """Digests of the PTX of a launch's kernels, in the order of their launches."""
    import tempfile

    from tilewise.sm90.jit import build

    first, *rest = sample()[name]
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir {folder}"
        kernel = build(first, *rest, options) if len(rest) == 2 and not hasattr(first, "compiled") else first.compiled(*rest, options)
        _, *kernels = kernel.__ptx__.split(".visible .entry")
        return [*map(digest, kernels)]


def main(out: str, before: str | None = None) -> int:
    found = dict(pool.each(ptx_of, [*sample()]))
    Path(out).write_text(json.dumps({name: found[name] for name in sample()}, indent=1))
    if before is None:
        return 0
    known = json.loads(Path(before).read_text())
    (gone, of_before), (new, of_after) = missing(known, found), missing(found, known)
    print(f"{of_after - len(new)} of {of_after} kernels are among the {of_before} of {before}", *new, sep="\n  new: ")
    print(f"{len(gone)} of these are none of them", *gone, sep="\n  gone: ")
    return bool(gone or new)


def missing(these: dict[str, list[str]], others: dict[str, list[str]]) -> tuple[list[str], int]:
    """Which kernels of these none of the others has the PTX of, and how many these are."""
    known = {ptx for kernels in others.values() for ptx in kernels}
    absent = [f"{name}, kernel {i}" for name, kernels in sorted(these.items()) for i, ptx in enumerate(kernels) if ptx not in known]
    return absent, sum(map(len, these.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
