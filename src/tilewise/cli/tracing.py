"""`python -m tilewise.cli.tracing NAME ...`: what the warps of a rung do, and when.

`python -m tilewise.cli.tracing k5 k6 --seqlen 4096 --head-dim 128 --out DIR` runs the rungs with stamps (ladder/stamps.py) and writes, for
each, the events (.npz), a file for Perfetto or chrome://tracing (.json.gz) and a picture (.svg). Given .npz files it draws them again, and
needs no GPU.
"""

import argparse
import sys
from pathlib import Path

import torch

from tilewise.errors import UnsupportedError
from tilewise.ladder import ALIASES, BACKWARD_RUNGS, RUNGS, VARIANTS
from tilewise.ladder.backward_rung import FORWARD
from tilewise.ladder.tracing import Trace
from tilewise.ladder.tracing_picture import draw


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tilewise.cli.tracing", description="Trace rungs of the ladder on a Hopper GPU.")
    parser.add_argument(
        "names", nargs="+", help="rungs or variants (k2 .. k8, b1 .. b3), 'all', or .npz files of earlier traces to draw again"
    )
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        for trace in _traces(arguments):
            place = arguments.out / trace.case.name
            for path in (trace.save(f"{place}.npz"), trace.save(f"{place}.json.gz"), draw(trace, Path(f"{place}.svg"))):
                print(path, flush=True)
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _traces(arguments: argparse.Namespace):
    forward = {**RUNGS, **VARIANTS}
    known = [*forward, *BACKWARD_RUNGS]
    asked: list[str] = arguments.names
    names = [name for name in known if name != "k1"] if asked == ["all"] else [ALIASES.get(name, name) for name in asked]
    if unknown := [name for name in names if name not in known and not name.endswith(".npz")]:
        raise UnsupportedError(f"no rung is called {unknown[0]!r}; there are {', '.join(known)}")
    heads = max(1, 16384 // arguments.seqlen) * (2048 // arguments.head_dim)  # 16,384 tokens, hidden 2048
    for name in names:
        if name.endswith(".npz"):
            yield Trace.load(name)
            continue
        forward.get(name, FORWARD).require(torch.bfloat16, arguments.head_dim, "cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        shape = heads, arguments.seqlen, arguments.head_dim
        q, k, v, d_o = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4))
        if (backward := BACKWARD_RUNGS.get(name)) is not None:
            o, lse = backward.attend(q, k, v, arguments.causal, arguments.head_dim**-0.5)
            yield backward.trace(q, k, v, o, lse, d_o, arguments.causal)
        else:
            yield forward[name].trace(q, k, v, arguments.causal)


if __name__ == "__main__":
    sys.exit(main())
