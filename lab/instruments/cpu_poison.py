"""What NaN, infinities and subnormal numbers cost on the CPU.

python lab/instruments/cpu_poison.py [--out ROWS.jsonl] [--isa ISA] [--only WORD ...]

Each row is the time of a call on poisoned operands over that of the same call on finite ones: one thread, process time, the calls in turns in one
process, the shortest of many. 2,048 tokens, 2 heads, head_dim 64; `few` is 4 queries.
  hidden      64 keys in the middle that the mask hides from everybody are NaN, or infinite, in K and V
  dead        64 queries that see nothing are NaN in Q and dO
  seen        what the mask shows to some: 64 keys; one number of a thousand, in V or in all four; one row of Q or dO; all of V
  subnormal   all of V is below the smallest normal number
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tilewise.backends.cpu import Cpu
from tilewise.bench.provenance import provenance
from tilewise.masks import Causal, Dense, Documents, FirstKeys, Full, SlidingWindow
from tilewise.problem import Call

SEQLEN, HEADS, DIM, FEW = 2048, 2, 64, 4
MIDDLE = slice(SEQLEN // 2 - 32, SEQLEN // 2 + 32)
NAN, INF = float("nan"), float("inf")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dense() -> Dense:
    """Four pairs of five, at random."""
    return Dense(torch.rand(SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(5)) < 0.8)


MASKS = {
    "causal": Causal,
    "window": lambda: SlidingWindow(511, 0),
    "documents": lambda: Documents((0, 700, 1000, 1500, SEQLEN)),
    "dense": dense,
    "full": Full,
    "few": lambda: SlidingWindow(SEQLEN - 600, 0),
}


@dataclass(frozen=True)
class Poisoned:
    """A call with its dO, and what was poisoned."""

    kind: str
    call: Call
    d_o: Tensor


def calls(mask: str, dtype: str) -> Iterator[tuple[Poisoned, Poisoned]]:
    """Finite and poisoned calls of the same problem."""
    generator = torch.Generator().manual_seed(1)
    rows = FEW if mask == "few" else SEQLEN
    sizes = rows, SEQLEN, SEQLEN, rows
    q, k, v, d_o = (torch.randn(1, n, HEADS, DIM, generator=generator).to(DTYPES[dtype]) for n in sizes)
    plain = Poisoned("finite", Call(q=q, k=k, v=v, mask=MASKS[mask](), scale=DIM**-0.5), d_o)
    keys = SEQLEN // 2 + 32
    hiding = MASKS[mask]() - (FirstKeys(keys) - FirstKeys(keys - 64))
    hidden = replace(plain, call=replace(plain.call, mask=hiding))
    if mask == "dense":
        shown = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool)
        shown[MIDDLE] = False
        blind = replace(plain, call=replace(plain.call, mask=dense() & Dense(shown)))
        yield blind, spoiled("dead: 64 rows of Q, dO", blind, "q d_o", MIDDLE)
    yield hidden, spoiled("hidden: 64 keys of K, V, NaN", hidden, "k v", MIDDLE)
    yield hidden, spoiled("hidden: 64 keys of K, V, inf", hidden, "k v", MIDDLE, INF)
    if mask == "few":
        return
    yield plain, spoiled("seen: 64 keys of K, V, NaN", plain, "k v", MIDDLE)
    yield plain, spoiled("seen: 64 keys of V, inf", plain, "v", MIDDLE, INF)
    yield plain, spoiled("seen: 1 in 1,000 of V", plain, "v", None)
    yield plain, spoiled("seen: 1 in 1,000 of Q, K, V, dO", plain, "q k v d_o", None)
    yield plain, spoiled("seen: a row of Q", plain, "q", slice(700, 701))
    yield plain, spoiled("seen: a row of dO", plain, "d_o", slice(700, 701))
    yield plain, spoiled("seen: all of V", plain, "v", slice(None))
    if dtype != "bf16":
        small = plain.call.v * (1e-39 if dtype == "fp32" else 1e-6)
        yield plain, replace(plain, kind="subnormal: all of V", call=replace(plain.call, v=small))


def spoiled(kind: str, of: Poisoned, operands: str, rows: slice | None, value: float = NAN) -> Poisoned:
    """With `value` in some rows of the operands, or scattered."""
    tensors = {name: (of.d_o if name == "d_o" else getattr(of.call, name)).clone() for name in operands.split()}
    for tensor in tensors.values():
        if rows is not None:
            tensor[:, rows] = value
        else:
            tensor[torch.rand(tensor.shape, generator=torch.Generator().manual_seed(2)) < 1e-3] = value
    d_o = tensors.pop("d_o", of.d_o)
    return Poisoned(kind, replace(of.call, **tensors), d_o)


def runs(backend: Cpu, poisoned: Poisoned, direction: str) -> Callable[[], object]:
    o, lse = backend.forward(poisoned.call)
    if direction == "fwd":
        return lambda: backend.forward(poisoned.call)
    return lambda: backend.backward(poisoned.call, o, lse, poisoned.d_o, None)


def ratio(one: Callable[[], object], other: Callable[[], object], budget_s: float) -> tuple[float, float]:
    """Shortest time of `one`, in seconds, and what `other` takes as multiples of it."""
    best, end = [float("inf")] * 2, time.perf_counter() + budget_s
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        rounds += 1
        for place, call in enumerate((one, other)):
            start = time.process_time()
            call()
            best[place] = min(best[place], time.process_time() - start)
    return best[0], best[1] / best[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=None, help="the instruction set; default: the best one")
    parser.add_argument("--mask", default=",".join(MASKS), help=f"of {', '.join(MASKS)}")
    parser.add_argument("--dtype", default=",".join(DTYPES), help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--only", default="", help="rows whose kind has this word")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds for each pair of calls")
    parser.add_argument("--out", type=Path, help="append the rows to this file, as JSON lines")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    backend = Cpu(options.isa)
    for mask in options.mask.split(","):
        for dtype in options.dtype.split(","):
            for finite, poisoned in calls(mask, dtype):
                if options.only not in poisoned.kind:
                    continue
                row = {"what": "poison", "isa": options.isa or "auto", "mask": mask, "dtype": dtype, "kind": poisoned.kind}
                for direction in ("fwd", "bwd"):
                    seconds, times = ratio(*(runs(backend, x, direction) for x in (finite, poisoned)), options.budget)
                    row |= {f"{direction}_finite_ms": round(seconds * 1e3, 4), f"{direction}_ratio": round(times, 3)}
                print(
                    f"{mask:10} {dtype:5} {poisoned.kind:34} forward {row['fwd_ratio']:6.2f}   backward {row['bwd_ratio']:6.2f}", flush=True
                )
                if options.out:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row | {"environment": provenance(torch.device("cpu"))}) + "\n")


if __name__ == "__main__":
    main()
