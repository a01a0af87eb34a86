"""Prefix trees: what each token sees, what goes with a tree, packing, planning, and losses and gradients of rollouts that were never shared."""

import pickle
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise import masks
from tilewise.errors import ShapeError
from tilewise.masks import Bands, Documents, PrefixTree, parse
from tilewise.masks.tiles import lower
from tilewise.testing.strategies import prefix_trees


def sees(tree, i, j):
    """Whether token i sees token j, from parents and lengths alone."""
    node_of = [node for node, length in enumerate(tree.lengths) for _ in range(length)]
    if max(i, j) >= len(node_of):
        return False
    path, node = [], node_of[i]
    while node >= 0:
        path = [node, *path]
        node = tree.parents[node]
    places = [place for node in path for place in range(tree.starts[node], tree.starts[node + 1]) if place <= i or node != node_of[i]]
    return j in places and (tree.window is None or len(places) - 1 - places.index(j) <= tree.window)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 14).flatmap(prefix_trees), st.integers(0, 3), st.integers(0, 3))
def test_each_token_sees_its_path(tree, more_q, more_k):
    total = tree.starts[-1]
    frame = total + more_q, total + more_k
    expected = torch.tensor([[sees(tree, i, j) for j in range(frame[1])] for i in range(frame[0])], dtype=torch.bool).reshape(frame)
    assert torch.equal(tree.dense(*frame), expected)
    assert tree.pairs(*frame) == expected.sum()  # so bands do not overlap
    tensors = []
    assert parse(tree.text(tensors)) == tree == pickle.loads(pickle.dumps(tree)) and not tensors


def test_trees_in_documents_lie_where_the_document_does():
    tree = PrefixTree([-1, 0, 0, 1], [3, 2, 4, 1], window=4)
    expected = torch.zeros(24, 26, dtype=torch.bool)
    expected[0:11, 0:12] = tree.dense(11, 12)
    expected[11:24, 12:26] = tree.dense(13, 14)
    assert torch.equal(Documents([0, 11, 24], [0, 12, 26], inner=tree).dense(24, 26), expected)


def test_a_depth_first_tree_is_a_band_a_node():
    tree = PrefixTree([-1, 0, 1, 1, 0, -1, 5], [5, 3, 2, 2, 4, 3, 1])
    assert len(tree.resolve(20, 20)) == 7
    breadth_first = PrefixTree([-1, 0, 0, 1, 2, 1], [2] * 6)
    assert len(breadth_first.resolve(12, 12)) == 9  # node 1 is seen in three places, node 2 in two


def drawn_tree(nodes, tokens, seed):
    """A depth-first tree of so many nodes and tokens, in which half of the nodes continue the one before them."""
    draw = random.Random(seed)
    path, parents = [], []
    for node in range(nodes):
        path = path[: draw.randint(1, len(path))] if path and draw.random() < 0.5 else path
        parents.append(path[-1] if path else -1)
        path.append(node)
    cuts = sorted(draw.sample(range(1, tokens), nodes - 1))
    return PrefixTree(parents, np.diff([0, *cuts, tokens]))


def test_planning_300_nodes_takes_less_than_20_ms():
    times = []
    for seed in range(5):
        tree = drawn_tree(300, 62_000, seed)
        start = time.perf_counter()
        region = PrefixTree(tree.parents, tree.lengths).resolve(62_000, 62_000)
        assert isinstance(region, Bands) and len(region) == 300
        lower(region, 128, 128)
        lower(region.transpose(), 128, 128)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.020, times


def test_what_goes_with_a_tree():
    #          root: 3 tokens -> a: 2 tokens -> (b: 1, nothing), c: 2
    tree = PrefixTree([-1, 0, 1, 1, 0], [3, 2, 1, 0, 2])
    assert tree.starts == (0, 3, 5, 6, 6, 8) and tree.leaves == (2, 3, 4)
    assert tree.position_ids().tolist() == [0, 1, 2, 3, 4, 5, 3, 4]
    assert tree.weights().tolist() == [3, 3, 3, 2, 2, 1, 1, 1]
    assert tree.weights([1.0, 10.0, 100.0]).tolist() == [111, 111, 111, 11, 11, 1, 100, 100]
    assert [tree.path(rollout).tolist() for rollout in range(3)] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 6, 7]]
    sources, targets = tree.predictions()
    assert list(zip(sources.tolist(), targets.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (2, 6), (6, 7)]
    assert PrefixTree([-1, 0, 1, -1], [0, 0, 2, 1]).predictions()[1].tolist() == [1]  # what begins a rollout is nobody's
    each = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    weights = tree.weights(each)
    assert weights.dtype == torch.float64
    assert torch.equal(torch.autograd.grad(weights.sum(), each)[0], torch.tensor([6.0, 5.0, 5.0], dtype=torch.float64))
    empty = PrefixTree([], [])
    assert empty.weights().shape == empty.position_ids().shape == empty.predictions()[0].shape == (0,)
    assert PrefixTree.group(4, [2, 3]) == PrefixTree([-1, 0, 0], [4, 2, 3]) == PrefixTree.group(4, torch.tensor([2, 3]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=8))
def test_packing_gives_every_list_back(sequences):
    tree, tokens, rollouts = PrefixTree.pack(sequences)
    assert sorted(rollouts) == list(range(len(sequences))) and len(tree.leaves) == len(sequences)
    for sequence, rollout in zip(sequences, rollouts, strict=True):
        path = tree.path(rollout)
        assert tokens[path].tolist() == sequence
        assert torch.equal(tree.position_ids()[path], torch.arange(len(sequence)))
    assert len(tokens) == tree.starts[-1] == len({tuple(each[:end]) for each in sequences for end in range(1, len(each) + 1)})
    assert tree.weights().sum() == sum(map(len, sequences))
    assert len(tree.resolve(len(tokens), len(tokens))) <= len(tree.parents)


def test_packing_takes_arrays_and_tensors():
    lists = [[1, 2, 3], [1, 2, 4], [5]]
    packed = PrefixTree.pack([lists[0], np.array(lists[1], np.int32), torch.tensor(lists[2])], window=2)
    assert packed.tree == PrefixTree([-1, 0, 0, -1], [2, 1, 1, 1], window=2)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5] and packed.rollouts == (0, 1, 2)


BAD = [
    (lambda: PrefixTree([-1, 1], [1, 1]), ValueError, r"parents\[1\] is 1; it must be an earlier node, or -1 for a root"),
    (lambda: PrefixTree([-2], [1]), ValueError, r"parents\[0\] is -2"),
    (lambda: PrefixTree([-1], [-1]), ValueError, r"lengths\[0\] is -1; it must be 0 or more tokens"),
    (lambda: PrefixTree([-1], [1, 1]), ShapeError, "one entry a node, got 1 and 2"),
    (lambda: PrefixTree([-1.0], [1]), ShapeError, r"PrefixTree: parents\[0\] must be an integer"),
    (lambda: PrefixTree([-1], [1], window=-1), ValueError, "window must be an integer, 0 or more, or None for unbounded, got -1"),
    (lambda: PrefixTree([-1, 0], [5, 4]).resolve(8, 9), ShapeError, "PrefixTree: lengths reaches position 9, but seqlen_q is 8"),
    (lambda: PrefixTree([-1, 0], [5, 4]).resolve(9, 8), ShapeError, "PrefixTree: lengths reaches position 9, but seqlen_k is 8"),
    (lambda: PrefixTree.group(3, 4), ShapeError, "PrefixTree.group: completions must be a list"),
    (lambda: PrefixTree.group(3, [4]).weights([1.0, 2.0]), ShapeError, r"rollouts must be of shape \(rollouts,\) = \(1,\), got \(2,\)"),
    (lambda: PrefixTree.pack([[1], []]), ShapeError, r"sequences\[1\] must be one or more integers .* got \[\]"),
    (lambda: PrefixTree.pack([[1.5]]), ShapeError, r"sequences\[0\] must be one or more integers"),
    (lambda: PrefixTree.pack([[[1, 2]]]), ShapeError, r"sequences\[0\] must be one or more integers"),
]


@pytest.mark.parametrize("make, error, message", BAD)
def test_bad_trees_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


class Tiny(torch.nn.Module):
    """A decoder of two layers: learned positions, attention that it is handed, and a head."""

    def __init__(self, vocabulary, dtype, heads=2, dim=16):
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.tokens, self.positions = torch.nn.Embedding(vocabulary, dim), torch.nn.Embedding(64, dim)
        self.mix = torch.nn.ModuleList(torch.nn.Linear(dim, 3 * dim) for _ in range(2))
        self.out = torch.nn.ModuleList(torch.nn.Linear(dim, dim) for _ in range(2))
        self.head = torch.nn.Linear(dim, vocabulary)
        self.to(dtype)

    def forward(self, tokens, positions, attend):
        x = self.tokens(tokens) + self.positions(positions)
        for mix, out in zip(self.mix, self.out, strict=True):
            q, k, v = mix(x)[None].unflatten(-1, (3, self.heads, -1)).unbind(2)
            x = x + torch.tanh(out(attend(q, k, v).flatten(2)[0]))
        return self.head(x)


@pytest.mark.parametrize("backend, dtype", [("reference", torch.float64), ("tiled", torch.float64), ("cpu", torch.float32)])
@pytest.mark.parametrize("window", [None, 4])
def test_losses_and_gradients_are_those_of_rollouts_alone(backend, dtype, window):
    """Of a GRPO-like loss: every rollout has an advantage and a mean over its own tokens."""
    draw = random.Random(1)
    prompts = [[draw.randrange(9) for _ in range(length)] for length in (7, 7, 12)]
    sequences = [prompt + [draw.randrange(9) for _ in range(draw.randint(1, 9))] for prompt in prompts for _ in range(4)]
    sequences += [sequences[0], sequences[1][:9]]  # one twice, and one that goes on
    advantages = torch.randn(len(sequences), dtype=dtype)

    def loss_of(logits, targets):
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    def attend_with(mask):
        return lambda q, k, v: tw.attention(q, k, v, mask=mask, backend=backend)

    model = Tiny(9, dtype)
    alone = torch.zeros((), dtype=dtype)
    for sequence, advantage in zip(sequences, advantages, strict=True):
        tokens = torch.tensor(sequence)
        mask = tw.Causal() if window is None else tw.SlidingWindow(window, 0)
        logits = model(tokens, torch.arange(len(tokens)), attend_with(mask))
        alone = alone + advantage * loss_of(logits[:-1], tokens[1:]).sum() / len(tokens)
    expected = torch.autograd.grad(alone, model.parameters())

    tree, tokens, rollouts = PrefixTree.pack(sequences, window)
    assert len(tokens) < sum(map(len, sequences)) / 1.5
    each = torch.zeros(len(sequences), dtype=dtype)
    each[list(rollouts)] = advantages / torch.tensor([len(sequence) for sequence in sequences])
    sources, targets = tree.predictions()
    logits = model(tokens, tree.position_ids(), attend_with(tree))
    shared = (loss_of(logits[sources], tokens[targets]) * tree.weights(each)[targets]).sum()
    tolerance = {"atol": 1e-12, "rtol": 1e-10} if dtype == torch.float64 else {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(shared, alone, **tolerance)
    for got, wanted in zip(torch.autograd.grad(shared, model.parameters()), expected, strict=True):
        torch.testing.assert_close(got, wanted, **tolerance)


def test_one_graph_serves_trees_whose_nodes_are_a_tensor():
    q, k, v = (torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3))
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda q, k, v, mask: tw.attention(q, k, v, mask=mask).square().sum(), fullgraph=True, backend=count, dynamic=True
    )
    for tree in (PrefixTree.group(20, [10, 6]), PrefixTree.group(9, [4, 4, 4, 19]), PrefixTree([-1, 0, 1, 1, 0], [9, 9, 9, 9, 1])):
        unread = tree.unread()
        assert unread == tree and torch.equal(unread.dense(40, 40), tree.dense(40, 40))
        tensors = []
        assert parse(unread.text(tensors), tensors).read() == tree
        got, wanted = compiled(q, k, v, unread), tw.attention(q, k, v, mask=tree).square().sum()
        torch.testing.assert_close(got, wanted)
        for a, b in zip(torch.autograd.grad(got, (q, k, v)), torch.autograd.grad(wanted, (q, k, v)), strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1
    assert PrefixTree([-1], [3], window=1).unread().text([]) == "DeviceTree(#0,1)"
    with pytest.raises(ShapeError, match=r"nodes must be a tensor \(2, nodes\) of int64"):
        masks.trees.DeviceTree(torch.zeros(3))
