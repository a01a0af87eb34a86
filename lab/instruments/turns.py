"""A model of the backward pass's turns on Hopper: how long thread blocks take that wait for each other at dQ. Needs no GPU.

    python lab/instruments/turns.py                          the trees of the set `trees`, and masks of other kinds, in the order of `plan.Plan`
    python lab/instruments/turns.py --heads 16 --group 1     with other heads

So many slots take blocks in the order of their numbers. A block visits its tiles of queries one by one, each for VISIT, and ends a visit when the
block whose turn is before its own has ended there, and LATENCY has passed. What is printed is the time next to that of as many visits without waits.
On an H200 it was within 14 % of five trees' gradients (lab/2026-11-29.md). It knows nothing of caches and memory.
"""

import argparse
import heapq

import numpy as np
import torch

from tilewise.backends.hopper.backward import plan, tables
from tilewise.bench.sets.trees import trees
from tilewise.masks import Causal, ChunkedCausal, FirstKeys, Mask, PrefixLM, SlidingWindow
from tilewise.problem import Call

SLOTS = 132
VISIT, LATENCY, BLOCK = 2.3e-3, 1e-3, 3e-3  # ms: of 64 queries of a head with 128 keys, of a turn, of a block's prologue and epilogue
OTHERS = {
    "sink and window": (Causal() & (SlidingWindow(1023, 0) | FirstKeys(128)), 32768),
    "prefix of 2,048": (PrefixLM(2048), 8192),
    "chunks of 8,192": (ChunkedCausal(8192), 32768),
    "two windows": (SlidingWindow(300, 0) | SlidingWindow(1300, -1000), 16384),
}


def walks(mask: Mask, seqlen_q: int, seqlen_k: int, config) -> list[np.ndarray]:
    """The tiles of queries that each block of keys visits, one after another."""
    regions = [plane.region.transpose() for plane in mask.planes(seqlen_q, seqlen_k, 1, 1)]
    visits, *_, spans = tables._visits(regions, config.tile_n, config.tile_m, in_turns=True)
    return [visits[first:last, 0] for first, last in spans[0]]


def numbers(blocks: int, heads: int, together: int):
    """(head, block) of each thread block, as order.block_of has them."""
    for first in range(0, heads, together):
        for block in range(blocks):
            for head in range(first, min(first + together, heads)):
                yield head, block


def milliseconds(of_blocks: list[np.ndarray], heads: int, group: int, apart: bool, together: int) -> tuple[float, float]:
    """With turns, and without any wait. apart: a block walks with one query head of its group after another."""
    tiles = max(int(walk.max(initial=-1)) for walk in of_blocks) + 1
    free, ended, visits = [0.0] * SLOTS, np.full((heads * group, tiles), -np.inf), 0
    for head, block in numbers(len(of_blocks), heads, together):
        walk, now = of_blocks[block], heapq.heappop(free) + BLOCK
        members, each = (group, VISIT) if apart else (1, VISIT * group)
        spent = np.arange(1, len(walk) + 1) * each
        for row in ended[head * group : head * group + members] if len(walk) else ():
            row[walk] = np.maximum.accumulate(np.concatenate([[now], row[walk] + LATENCY - spent]))[1:] + spent
            now = row[walk[-1]]
        visits += len(walk) * group
        heapq.heappush(free, now)
    return max(free), visits * VISIT / SLOTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8, help="of keys (default: %(default)s)")
    parser.add_argument("--group", type=int, default=4, help="query heads for each (default: %(default)s)")
    options = parser.parse_args()
    masks = {each.name: (each.mask, each.seqlen_q) for each in trees() if "unshared" not in each.name} | OTHERS
    for name, (mask, seqlen) in masks.items():
        q, k = (torch.empty(1, seqlen, n, 128, dtype=torch.bfloat16, device="meta") for n in (options.heads * options.group, options.heads))
        found = plan.Plan.of(Call(q=q, k=k, v=k, mask=mask, scale=1.0, grad=True), plan.Gpu(SLOTS, 0))
        config, of_blocks = found.config, walks(mask, seqlen, seqlen, found.config)
        took, least = milliseconds(of_blocks, options.heads, options.group, config.q_heads_in_turn, found.turns[0][1].heads_interleaved)
        up = any(len(walk) > 1 and walk[0] < walk[-1] for walk in of_blocks)
        print(f"{name:18} {took:7.1f} ms, {took / least:5.2f} of {least:5.1f}   {'up' if up else 'down'}")


if __name__ == "__main__":
    main()
