"""Rollouts that share prefixes, laid end to end once: the mask of such a tree, what goes with it, and the packer that finds the tree.

A node is a run of tokens that the same rollouts pass through. A token sees its ancestors' runs whole and its own causally, which is what it
would see in each of its rollouts alone. The keys of a node are seen by the tokens below it, and where a tree is packed depth first these are one
run of queries: a band a node.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from tilewise.errors import ShapeError
from tilewise.masks.arguments import Integers, check_count, check_fits, integers
from tilewise.masks.band_tables import INF
from tilewise.masks.bands import Bands
from tilewise.masks.bitmap import values
from tilewise.masks.mask import Blocks, Mask


class PackedTree(NamedTuple):
    """Token lists as a tree: `tokens` (total,) int64 on the CPU in the tree's order, and `rollouts[i]`, which of the tree's rollouts list i is."""

    tree: "PrefixTree"
    tokens: Tensor
    rollouts: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class PrefixTree(Mask):
    """Rollouts with shared prefixes: each token sees its ancestors' tokens, and its own node's up to itself.

    parents: (nodes,) the node that each one continues, an earlier one, or -1 for a root; trees with several roots are as good. lengths: (nodes,)
    tokens, 0 or more. Nodes lie end to end in this order from position 0 on; tokens beyond see nothing and are seen by nobody. Depth first is best
    (a node's descendants right behind it, as `pack` has them): then the mask is a band a node. window: at most this many tokens before itself are
    seen, counted along the rollout, as `SlidingWindow(window, 0)` is without a tree; `& SlidingWindow(...)` would count packed positions, as ALiBi
    does.

    A rollout is a path from a root to a leaf, and rollouts are in the order of their leaves. One that ends where others go on has a leaf of 0 tokens.
    """

    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    window: int | None = None

    if TYPE_CHECKING:  # it takes more than it keeps

        def __init__(self, parents: Integers, lengths: Integers, window: int | None = None) -> None: ...

    def __post_init__(self) -> None:
        for name in ("parents", "lengths"):
            object.__setattr__(self, name, tuple(integers(f"PrefixTree: {name}", getattr(self, name), 1)))
        if len(self.parents) != len(self.lengths):
            raise ShapeError(f"PrefixTree: parents and lengths must have one entry a node, got {len(self.parents)} and {len(self.lengths)}")
        for node, (parent, length) in enumerate(zip(self.parents, self.lengths, strict=True)):
            if not -1 <= parent < node:
                raise ValueError(f"PrefixTree: parents[{node}] is {parent}; it must be an earlier node, or -1 for a root")
            if length < 0:
                raise ValueError(f"PrefixTree: lengths[{node}] is {length}; it must be 0 or more tokens")
        if self.window is not None:
            object.__setattr__(self, "window", check_count("PrefixTree: window", self.window, otherwise=", or None for unbounded"))
        window = "" if self.window is None else f",window={self.window}"
        self._set("runs", f"PrefixTree({list(self.parents)},{list(self.lengths)}{window})".replace(" ", ""))

    @classmethod
    def group(cls, prompt: int, completions: Sequence[int], window: int | None = None) -> "PrefixTree":
        """A prompt of `prompt` tokens, and completions of it (a group of GRPO): rollout i is the prompt and completion i."""
        each = integers("PrefixTree.group: completions", completions, 1)
        return cls((-1,) + (0,) * len(each), (prompt, *each), window)

    @classmethod
    def pack(cls, sequences: Iterable[Any], window: int | None = None) -> PackedTree:
        """The tree of token lists, each a list, array or tensor of integers (length,): whatever a prefix has in common is there once.

        Raises ShapeError for one that is something else, or has no token.
        """
        root = _grown([_tokens(place, sequence) for place, sequence in enumerate(sequences)])
        parents, runs, rollouts = [], [], {}
        for parent, run, ends in _depth_first(root):
            if ends is not None:
                rollouts[ends] = len(rollouts)
            parents.append(parent)
            runs.append(run)
        tokens = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *runs]))
        return PackedTree(cls(tuple(parents), tuple(map(len, runs)), window), tokens, tuple(rollouts[each] for each in sorted(rollouts)))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """(nodes + 1,) where each node's tokens begin, and the end of the last."""
        return (0, *accumulate(self.lengths))

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """(rollouts,) the node at which each rollout ends."""
        inner = set(self.parents)
        return tuple(node for node in range(len(self.parents)) if node not in inner)

    def unread(self) -> "DeviceTree":
        """The same mask with its nodes in a tensor, for calls that torch.compile traces: other trees are then other values, not other graphs."""
        return DeviceTree(torch.tensor([self.parents, self.lengths], dtype=torch.int64, device="cpu"), self.window)

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """(tokens,) int64, each token's place in its rollouts: what rotary and learned positions are made of."""
        return self._by_token(np.array(self._depths, np.int64) - self.starts[:-1], device) + torch.arange(
            self.starts[-1], dtype=torch.int64, device=device
        )

    def predictions(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(sources, targets), (tokens - first ones,) int64 each: the token at targets[i] is predicted by what the model gives at sources[i].

        A token is the target of the one before it in its rollouts, so the last token of a shared prefix predicts several; first tokens of rollouts
        are nobody's.
        """
        before = np.arange(-1, self.starts[-1] - 1)
        for node, parent in enumerate(self.parents):
            if self.lengths[node]:
                while parent >= 0 and not self.lengths[parent]:
                    parent = self.parents[parent]
                before[self.starts[node]] = -1 if parent < 0 else self.starts[parent + 1] - 1
        targets = np.flatnonzero(before >= 0)
        return torch.from_numpy(before[targets]).to(device), torch.from_numpy(targets).to(device)

    def weights(self, rollouts: Tensor | Sequence[float] | None = None, device: torch.device | str | None = None) -> Tensor:
        """(tokens,) how much each token counts, so that a sum over tokens is the sum over rollouts: how many rollouts pass through it.

        rollouts: (rollouts,) values, such as advantages or 1 / length, of which a token has the sum over its rollouts; a tensor keeps its dtype
        and device (unless `device` is given) and its gradient. None: ones in fp32. Raises ShapeError for another number of them.
        """
        each = torch.ones(len(self.leaves), dtype=torch.float32, device="cpu") if rollouts is None else rollouts
        each = each if isinstance(each, Tensor) else torch.tensor(each, dtype=torch.float32, device="cpu")
        if tuple(each.shape) != (len(self.leaves),):
            raise ShapeError(f"rollouts must be of shape (rollouts,) = ({len(self.leaves)},), got {tuple(each.shape)}")
        each = each if device is None else each.to(device)
        pairs = [(node, number) for number, leaf in enumerate(self.leaves) for node in self._ancestry(leaf)]
        node, number = torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2).T.to(each.device)
        of_node = torch.zeros(len(self.parents), dtype=each.dtype, device=each.device).index_add(0, node, each[number])
        return of_node.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64, device=each.device), output_size=self.starts[-1])

    def path(self, rollout: int, device: torch.device | str = "cpu") -> Tensor:
        """(length,) int64, where a rollout's tokens lie: `x[tree.path(i)]` is what rollout i alone would have; IndexError where there is none."""
        nodes = [*self._ancestry(self.leaves[rollout])][::-1]
        return torch.cat([torch.arange(self.starts[node], self.starts[node + 1], dtype=torch.int64, device=device) for node in nodes])

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        """(nodes,) how many tokens the ancestors of each node have."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + self.lengths[parent])
        return tuple(depths)

    def _ancestry(self, node: int) -> Iterator[int]:
        """The node and its ancestors, up to the root."""
        while node >= 0:
            yield node
            node = self.parents[node]

    def _by_token(self, of_node: ndarray, device: torch.device | str) -> Tensor:
        return torch.from_numpy(np.repeat(of_node, self.lengths)).to(device)

    def _place(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> Bands:
        check_fits("PrefixTree: lengths", self.starts[-1], "seqlen_q", blocks.q1 - blocks.q0)
        check_fits("PrefixTree: lengths", self.starts[-1], "seqlen_k", blocks.k1 - blocks.k0)
        bands = self._whole() if self.window is None else self._within(self.window)
        table = np.array(bands, np.int64).reshape(-1, 6)
        q0, k0 = blocks.q0, blocks.k0
        moved = table + np.stack([q0, q0, k0, k0, k0 - q0, k0 - q0], axis=1)[:, None]
        moved[..., 4:] = np.where(np.abs(table[:, 4:]) < INF, moved[..., 4:], table[:, 4:])
        return Bands.of(moved.reshape(-1, 6), seqlen_q, seqlen_k, disjoint=True)

    def _whole(self) -> list[tuple[int, ...]]:
        """A band for each node and run of queries below it."""
        below: list[list[tuple[int, int]]] = [[piece] for piece in pairwise(self.starts)]
        bands = []
        for node in reversed(range(len(self.parents))):
            k0, k1 = self.starts[node : node + 2]
            runs = _joined(below[node])
            bands += [(*run, k0, k1, -INF, 0) for run in runs]
            if self.parents[node] >= 0:
                below[self.parents[node]] += runs
        return bands[::-1]

    def _within(self, window: int) -> list[tuple[int, ...]]:
        """A band for each node and ancestor that its first token still reaches."""
        moved = [start - depth for start, depth in zip(self.starts, self._depths, strict=False)]  # packed positions minus those of rollouts
        bands = []
        for node, depth in enumerate(self._depths):
            for other in self._ancestry(node):
                if self._depths[other] + self.lengths[other] + window <= depth:
                    break
                bands.append((*self.starts[node : node + 2], *self.starts[other : other + 2], moved[other] - moved[node] - window, 0))
        return bands


@dataclass(frozen=True, eq=False, repr=False)
class DeviceTree(Mask):
    """`PrefixTree(*nodes, window)` of a tensor (2, nodes) int64 that is read when the mask is first needed, not where a call is traced."""

    nodes: Tensor
    window: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, Tensor) or self.nodes.dtype != torch.int64 or self.nodes.dim() != 2 or self.nodes.shape[0] != 2:
            raise ShapeError(f"DeviceTree: nodes must be a tensor (2, nodes) of int64: parents and lengths, got {self.nodes!r:.100}")
        self._set("runs", None)

    def read(self) -> PrefixTree:
        parents, lengths = values(self.nodes)
        return PrefixTree(parents, lengths, self.window)

    def _write(self, tensors: list[Tensor]) -> str:
        tensors.append(self.nodes)
        return f"DeviceTree(#{len(tensors) - 1}{'' if self.window is None else f',{self.window}'})"

    def _key(self):
        return self.read()._key()

    def _place(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> Bands:
        return self.read()._place(blocks, seqlen_q, seqlen_k)


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint half-open ranges in order, neighbours as one, without empty ones."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], last
        elif first < last:
            joined.append((first, last))
    return joined


@dataclass
class _Run:
    """A node that still grows: its tokens, the nodes that go on by their first tokens, and the numbers of the sequences that end here."""

    tokens: ndarray
    children: "dict[int, _Run]" = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    def split(self, at: int) -> None:
        """Give the tokens from `at` on to a node below, with all that follows."""
        rest = _Run(self.tokens[at:], self.children, self.ends)
        self.tokens, self.children, self.ends = self.tokens[:at], {int(rest.tokens[0]): rest}, []


def _tokens(place: int, sequence: Any) -> ndarray:
    tokens = sequence.detach().cpu().numpy() if isinstance(sequence, Tensor) else np.asarray(sequence)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise ShapeError(
            f"PrefixTree.pack: sequences[{place}] must be one or more integers in a list, array or tensor of one dimension, got {sequence!r:.100}"
        )
    return tokens.astype(np.int64)


def _grown(sequences: list[ndarray]) -> _Run:
    """The radix tree of token lists, below a root without tokens."""
    root = _Run(np.zeros(0, np.int64))
    for number, sequence in enumerate(sequences):
        node, at = root, 0
        while at < len(sequence):
            child = node.children.get(int(sequence[at]))
            if child is None:
                child = node.children[int(sequence[at])] = _Run(sequence[at:])
            shared = min(len(child.tokens), len(sequence) - at)
            apart = np.flatnonzero(child.tokens[:shared] != sequence[at : at + shared])
            shared = int(apart[0]) if len(apart) else shared
            if shared < len(child.tokens):
                child.split(shared)
            node, at = child, at + shared
        node.ends.append(number)
    return root


def _depth_first(root: _Run) -> Iterator[tuple[int, ndarray, int | None]]:
    """(parent, tokens, the sequence that ends here or None) of each node below `root`; a node has a sequence of its own where it is a leaf."""
    numbered, stack = 0, [(-1, child) for child in reversed(root.children.values())]
    while stack:
        parent, node = stack.pop()
        leaf = len(node.ends) == 1 and not node.children
        yield parent, node.tokens, node.ends[0] if leaf else None
        below = [] if leaf else [_Run(node.tokens[:0], ends=[end]) for end in node.ends]
        stack += [(numbered, child) for child in reversed([*below, *node.children.values()])]
        numbered += 1
