"""Rollouts that share prefixes, as one tree and without sharing: what a step of reinforcement learning attends to."""

import itertools
import random

import torch

from tilewise.bench.sets.workload import Workload
from tilewise.machine.roofline import Direction
from tilewise.masks import Causal, Documents, PrefixTree

TOKENS = 62_000  # of the trees of many nodes
MOST_UNSHARED = 1 << 18  # tokens of rollouts end to end that are still timed


def trees(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """Groups of one prompt (4k + 16 x 1k, 1k + 64 x 512, 8k + 16 by Zipf's law) and trees of 60 and 300 nodes, with the heads of an 8B model.

    Each is there again with its rollouts as documents of their own, where these are not too many tokens: "unshared".
    """
    zipf = [round(8192 / rank) for rank in range(1, 17)]
    given = {
        "tree-4k-16x1k": PrefixTree.group(4096, [1024] * 16),
        "tree-1k-64x512": PrefixTree.group(1024, [512] * 64),
        "tree-8k-zipf": PrefixTree.group(8192, zipf),
        "tree-60-nodes": drawn(60, TOKENS),
        "tree-300-nodes": drawn(300, TOKENS),
    }
    sizes = {"batch": 1, "heads_q": 32, "heads_k": 8, "head_dim": 128, "dtype": dtype, "direction": direction}
    rows = []
    for name, tree in given.items():
        lengths = [len(tree.path(rollout)) for rollout in range(len(tree.leaves))]
        rows.append(Workload(name=name, seqlen_q=tree.starts[-1], mask=tree, **sizes))
        if sum(lengths) <= MOST_UNSHARED:
            apart = Documents([0, *itertools.accumulate(lengths)], inner=Causal())
            rows.append(Workload(name=f"{name}-unshared", seqlen_q=sum(lengths), mask=apart, **sizes))
    return rows


def drawn(nodes: int, tokens: int) -> PrefixTree:
    """A tree of `nodes` nodes, depth first, always the same: half of them continue the one before, as turns do, the others branch off from any
    of its ancestors. Lengths are those between cuts at random."""
    draw = random.Random(nodes)
    path: list[int] = []
    parents = []
    for node in range(nodes):
        if path and draw.random() < 0.5:
            path = path[: draw.randint(1, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    cuts = [0, *sorted(draw.sample(range(1, tokens), nodes - 1)), tokens]
    return PrefixTree(tuple(parents), tuple(end - start for start, end in itertools.pairwise(cuts)))
