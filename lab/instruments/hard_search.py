"""Search for the inputs that make attention slowest, beside normal ones of the same shape: composed at random, the worst then varied.

python lab/instruments/hard_search.py --seconds 120 [--out WORST.jsonl] [--device cuda] [--dtype bf16] [--head-dim 128] [--mask causal]
python lab/instruments/hard_search.py --replay WORST.jsonl ...        the same specs once more: after a change, or on another device

A spec says all that its inputs depend on: the size of q, k and v, how k's grows along the sequence, a jump of it somewhere, scores shifted
together by blocks, zeros, extremes; rows of NaN only with --nan. Candidates are a function of the seed, in their order, but for what half of them
vary: the worst so far, as timed. What is stored are the worst, timed again in turns with normal inputs, one JSON line each.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from tilewise.bench.peers.tilewise import Tilewise
from tilewise.bench.provenance import provenance
from tilewise.bench.runner import TIME_SEED, call_of
from tilewise.bench.sets import DTYPES, Workload, mask_from
from tilewise.bench.sets.distributions import LARGEST_PRODUCT, LARGEST_VALUE, Distribution, Inputs, Source
from tilewise.bench.timing import Stats, interleave
from tilewise.machine.roofline import DIRECTIONS

TOGETHER = 4  # candidates that are timed in turns with one call on normal inputs
SUSPECT = 1.1  # times the normal time
PARENTS = 6  # of the worst, those that are varied
PROFILES = ("flat", "causal_tiles", "falling", "steps", "saw")
BLOCKS = (1, 16, 64, 80, 128, 176, 256, 1024)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Scales are logarithms to base 2, places parts of the sequence; each field is one thing that is done to normal inputs."""

    seed: int = 0
    q: float = 0.0
    k: float = 0.0
    v: float = 0.0
    profile: str = "flat"  # how the size of keys goes along the sequence
    growth: float = 0.0  # its logarithm at most
    block: int = 128  # keys of a step of the profile, and of one sign
    jump: float = 0.0
    jump_at: float = 0.0
    jump_keys: int = 1
    shift: float = 0.0  # of all scores of a block of keys, for every query
    alternate: bool = False  # the shift's sign
    zeros: float = 0.0  # part of the numbers of q and k
    extremes: float = 0.0  # part of them
    extreme: float = 0.0
    nan_rows: float = 0.0  # part of the rows of v

    def change(self, x: Inputs, source: Source) -> Inputs:
        q, k, v = x.q * 2.0**self.q, x.k * 2.0**self.k, x.v * 2.0**self.v
        k = k * self._along(k.shape[1]).to(k.device)[:, None, None]
        for name, each in (("q", q), ("k", k)):
            each = torch.where(source.uniform(*each.shape) <= self.zeros, 0.0, each)
            each = torch.where(source.uniform(*each.shape) <= self.extremes, each.sign() * 2.0**self.extreme, each)
            q, k = (each, k) if name == "q" else (q, each)
        if self.shift:
            blocks = torch.arange(k.shape[1], device=k.device) // self.block
            sign = 1.0 - 2.0 * (blocks % 2) if self.alternate else torch.ones_like(blocks)
            part = abs(self.shift) ** 0.5 * q.shape[-1] ** -0.25  # in every channel: the products come to the shift, times the scale
            q, k = q + part, k + part * sign[:, None, None] * (1.0 if self.shift > 0 else -1.0)
        v = v.masked_fill((source.uniform(*v.shape[:3]) <= self.nan_rows)[..., None], torch.nan) if self.nan_rows else v
        q, k = (each.clamp(-LARGEST_PRODUCT, LARGEST_PRODUCT) for each in (q, k))
        return x._replace(q=q, k=k, v=v.clamp(-LARGEST_VALUE, LARGEST_VALUE))

    def _along(self, seqlen: int) -> torch.Tensor:
        """The factor of each key."""
        blocks = torch.arange(seqlen) // self.block
        part = torch.arange(seqlen) / max(1, seqlen - 1)
        logs = {
            "flat": torch.zeros(seqlen),
            "causal_tiles": part,
            "falling": 1.0 - part,
            "steps": blocks / blocks.max().clamp(min=1),
            "saw": (blocks % 4) / 3.0,
        }[self.profile] * self.growth
        start = int(self.jump_at * seqlen)
        logs[start : start + self.jump_keys] += self.jump
        return torch.exp2(logs)


DRAWN: dict[str, Callable[[random.Random], object]] = {
    "seed": lambda draw: draw.randrange(1 << 30),
    "q": lambda draw: draw.choice((0.0, draw.uniform(-4, 9))),
    "k": lambda draw: draw.choice((0.0, draw.uniform(-4, 9))),
    "v": lambda draw: draw.choice((0.0, 0.0, draw.uniform(-20, 20))),
    "profile": lambda draw: draw.choice(PROFILES),
    "growth": lambda draw: draw.uniform(0, 8),
    "block": lambda draw: draw.choice(BLOCKS),
    "jump": lambda draw: draw.choice((0.0, draw.uniform(0, 9))),
    "jump_at": lambda draw: draw.choice((0.0, 0.99, draw.random())),
    "jump_keys": lambda draw: 1 << draw.randrange(11),
    "shift": lambda draw: draw.choice((0.0, draw.uniform(-100, 100))),
    "alternate": lambda draw: draw.random() < 0.5,
    "zeros": lambda draw: draw.choice((0.0, 0.0, 0.5, 0.9, 0.99)),
    "extremes": lambda draw: draw.choice((0.0, 0.0, 0.001, 0.01, 0.1)),
    "extreme": lambda draw: draw.uniform(-30, 16),
}
NAN_ROWS = (0.0, 0.0001, 0.001, 0.01)


def fresh(draw: random.Random, nan: bool) -> Spec:
    """A spec of a few changes: most fields stay as they are, so that what is found is not a heap of everything."""
    named = draw.sample([name for name in DRAWN if name != "seed"], draw.randint(1, 6))
    return varied(Spec(), draw, ["seed", *named], nan)


def varied(spec: Spec, draw: random.Random, names: list[str], nan: bool) -> Spec:
    changed = {name: DRAWN[name](draw) for name in names}
    return replace(spec, **changed, nan_rows=draw.choice(NAN_ROWS) if nan else spec.nan_rows)


def candidate(seed: int, number: int, worst: list[Spec], nan: bool) -> Spec:
    """The `number`-th: every other one varies one or two fields of one of the worst."""
    draw = random.Random(f"{seed} {number}")
    if number % 2 == 0 or not worst:
        return fresh(draw, nan)
    return varied(draw.choice(worst[:PARENTS]), draw, draw.sample(list(DRAWN), draw.randint(1, 2)), nan)


class Trial:
    """One shape of attention, ready to be timed on any spec."""

    def __init__(self, workload: Workload, device: torch.device, attend=None):
        self.workload, self.device = workload, device
        self.attend = attend or Tilewise().prepare(workload, device)
        self.normal = replace(workload, dtype=torch.float32, direction="fwd").inputs(TIME_SEED, device)

    def inputs(self, spec: Spec) -> Inputs:
        workload = self.workload
        generator = torch.Generator(self.device).manual_seed(spec.seed)
        source = Source(generator, workload.dtype, workload.grad, (workload.seqlen_q, workload.seqlen_k))
        made = Distribution("composed", spec.change, finite=not spec.nan_rows)(self.normal, source)
        q, k, v, d_o = (x.to(workload.dtype) for x in made)
        return Inputs(*(x.requires_grad_(workload.grad) for x in (q, k, v)), d_o)

    def times(self, specs: list[Spec], budget_s: float) -> tuple[Stats, list[Stats]]:
        """Of normal inputs, and of each spec, in turns."""
        clock = "events" if self.device.type == "cuda" else "wall"
        calls = {number: call_of(self.attend, self.workload, self.inputs(spec)) for number, spec in enumerate([Spec(), *specs])}
        normal, *others = interleave(calls, budget_s=budget_s, device=self.device, clock=clock, once_above_s=1.0).values()
        return normal, others

    def slower(self, specs: list[Spec], budget_s: float) -> list[float]:
        """Times over normal; of the shortest samples, as whatever else runs only adds. What looks slow has to do so twice."""
        normal, stats = self.times(specs, budget_s)
        found = [each.best / normal.best for each in stats]
        if suspects := [number for number, ratio in enumerate(found) if ratio > SUSPECT]:
            normal, stats = self.times([specs[number] for number in suspects], budget_s)
            for number, each in zip(suspects, stats, strict=True):
                found[number] = min(found[number], each.best / normal.best)
        return found

    def search(self, seed: int, seconds: float, nan: bool, sample_s: float = 0.02) -> tuple[list[tuple[float, Spec]], int]:
        """(slow-down, spec) from the worst on, and how many were tried."""
        deadline, tried = time.monotonic() + seconds, 0
        found: list[tuple[float, Spec]] = []
        while time.monotonic() < deadline or not found:
            worst = [spec for _, spec in found]
            specs = [candidate(seed, tried + number, worst, nan) for number in range(TOGETHER)]
            found += zip(self.slower(specs, sample_s), specs, strict=True)
            found.sort(key=lambda pair: -pair[0])
            del found[256:]
            tried += TOGETHER
        return found, tried

    def rows(self, specs: list[Spec], budget_s: float) -> list[dict]:
        """The specs timed again, from the slowest on, ready to be stored."""
        environment, rows = provenance(self.device), []
        for start in range(0, len(specs), TOGETHER):
            some = specs[start : start + TOGETHER]
            normal, stats = self.times(some, budget_s)
            for spec, each in zip(some, stats, strict=True):
                slower = {"slower": each.best / normal.best, "median_s": each.median, "normal_median_s": normal.median}
                rows.append({**slower, "case": self.workload.case, "spec": asdict(spec), "environment": environment})
        return sorted(rows, key=lambda row: -row["slower"])


def described(spec: dict) -> str:
    """What of a spec is other than usual."""
    usual = asdict(Spec())
    parts = (
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in spec.items() if value != usual[name]
    )
    return ", ".join(parts) or "normal"


def stored(path: Path) -> list[Spec]:
    """The specs of a file of such rows."""
    known = {each.name for each in fields(Spec)}
    specs = (json.loads(line)["spec"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return [Spec(**{name: value for name, value in spec.items() if name in known}) for spec in specs]


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of searching (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=int, default=10, help="how many of the worst (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds to time one of those (default: %(default)g)")
    parser.add_argument("--nan", action="store_true", help="with rows of NaN in v")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="time the specs of this file, and search nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add what is found to this file, as JSON lines")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, help="(default: as many as make a hidden dimension of 2048)")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--mask", type=mask_from, default=mask_from("causal"), help="as tilewise bench takes it (default: causal)")
    parser.add_argument("--direction", choices=DIRECTIONS, default="fwd")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = options_of(argv)
    head_dim = options.head_dim
    sizes = {"batch": 1, "seqlen_q": options.seqlen, "heads_q": options.heads or max(1, 2048 // head_dim), "head_dim": head_dim}
    workload = Workload(name="hard-search", **sizes, mask=options.mask, dtype=DTYPES[options.dtype], direction=options.direction)
    trial = Trial(workload, options.device)
    if options.replay:
        specs = stored(options.replay)
    else:
        found, tried = trial.search(options.seed, options.seconds, options.nan)
        print(f"{workload.id}: {tried} tried; the worst, timed again:")
        specs = [spec for _, spec in found[: options.keep]]
    rows = trial.rows(specs, options.budget)
    for row in rows:
        print(f"{row['slower']:7.2f} x  {row['median_s'] * 1e3:9.3f} ms  {described(row['spec'])}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
