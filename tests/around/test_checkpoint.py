"""Checkpointing: what a call saves is the same whichever way it takes, and recomputing gives the gradients of the plain call."""

from functools import partial
from itertools import product

import pytest
import torch
from surroundings import FUNCTIONS, check_equal, normal, plain, qkv, with_gradients
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.runtime import call_cache

WITH_GRADIENTS = [name for name, function in FUNCTIONS.items() if function.grads]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"mask": tw.SlidingWindow(2, 1), "softcap": 4.0},
    "heads": {"mask": {(0, 1): tw.Causal(), (1, 4): tw.Full()}, "scale": 0.3},
    "dense": {"mask": tw.Dense(normal(5, 7) > 0)},
    "documents": {"mask": tw.Documents([0, 2, 5], [0, 4, 7])},
}


@pytest.fixture(autouse=True)
def cold():
    call_cache.forget()
    torch._dynamo.reset()


def checkpointed(name: str, **how) -> list[Tensor]:
    """The results of a checkpointed call, with its gradients."""
    function = FUNCTIONS[name]
    leaves = {key: x.detach().clone().requires_grad_(key in function.grads) for key, x in function.make().items()}
    outputs = checkpoint(lambda *tensors: function.call(**dict(zip(leaves, tensors, strict=True))), *leaves.values(), **how)
    return with_gradients(outputs, [leaves[key] for key in function.grads])


@pytest.mark.parametrize("early_stop", (True, False))
@pytest.mark.parametrize("reentrant", (True, False))
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_results_are_those_of_the_plain_call(name, reentrant, early_stop):
    want = plain(name)
    call_cache.forget()
    with set_checkpoint_early_stop(early_stop):
        for _ in range(3):
            check_equal(checkpointed(name, use_reentrant=reentrant), want)


def saved_by(run) -> list[tuple]:
    seen = []

    def pack(x: Tensor) -> Tensor:
        seen.append((x.shape, x.dtype, x.device))
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        run()
    return seen


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_every_way_saves_the_same(options):
    def run():
        return tw.attention(**{name: x.requires_grad_() for name, x in qkv().items()}, **options)

    def watched():
        with FlopCounterMode(display=False):
            run()

    first, again, short, operators = (saved_by(way) for way in (run, run, run, watched))
    assert first == again == short == operators
    assert len(first) == 5 + ("dense" in str(options["mask"]).lower() if "mask" in options else 0)


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_cold_calls_of_changing_lengths(options):
    fixed = "mask" in options and not isinstance(options["mask"], tw.SlidingWindow | dict)
    for batch, seqlen_q, seqlen_k in product((1, 2), (5,) if fixed else (5, 1, 9), (7,) if fixed else (9, 40)):
        results = []
        for wrap in (lambda run, *x: run(*x), partial(checkpoint, use_reentrant=False)):
            leaves = [x.detach().clone().requires_grad_() for x in qkv(batch, seqlen_q, seqlen_k).values()]
            results.append(with_gradients((wrap(partial(tw.attention, **options), *leaves),), leaves))
            call_cache.forget()
        check_equal(*results)


@pytest.mark.parametrize("policy", (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_SAVE))
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_selective(name, policy):
    """Whether attention's operator, or all others, are saved."""
    want = plain(name)
    for ours in (True, False):

        def choose(_, operator, *args, ours=ours, **kwargs):
            return policy if operator.name().startswith("tilewise") == ours else CheckpointPolicy.PREFER_RECOMPUTE

        for _ in range(2):
            contexts = partial(create_selective_checkpoint_contexts, choose)
            check_equal(checkpointed(name, use_reentrant=False, context_fn=contexts), want)


class Block(nn.Module):
    """Attention with grouped heads and a perceptron, as a transformer has them, (batch, seqlen, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(32, 64)
        self.out, self.mlp = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(x).unflatten(-1, (-1, 8)).split((4, 2, 2), dim=2)
        x = x + self.out(tw.attention(q, k, v, causal=True).flatten(2))
        return x + self.mlp(x)


def train(wrap, lengths=(6, 9, 6), dtype=torch.float32) -> list[Tensor]:
    """The gradients after steps of changing lengths."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(3)).to(dtype)
    for n, seqlen in enumerate(lengths):
        x = normal(2, seqlen, 32, seed=n).to(dtype)
        for block in blocks:
            x = wrap(block, x)
        x.square().mean().backward()
    return [x.grad for x in blocks.parameters()]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("reentrant", (True, False))
def test_a_transformer_trains_the_same(reentrant, dtype):
    want = train(lambda block, x: block(x), dtype=dtype)
    call_cache.forget()
    check_equal(train(partial(checkpoint, use_reentrant=reentrant) if not reentrant else _reentrant, dtype=dtype), want)


def _reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x if x.requires_grad else x.requires_grad_(), use_reentrant=True)


def test_a_checkpoint_within_a_compiled_function_and_around_one():
    def run(q, k, v):
        return tw.attention(q, k, v, causal=True).square()

    def inside(q, k, v):
        return checkpoint(run, q, k, v, use_reentrant=False)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    results = []
    for way in (run, torch.compile(inside, backend="aot_eager", fullgraph=True), lambda *x: checkpoint(compiled, *x, use_reentrant=False)):
        leaves = [x.detach().clone().requires_grad_() for x in qkv().values()]
        results.append(with_gradients((way(*leaves),), leaves))
    check_equal(results[1], results[0])
    check_equal(results[2], results[0])


def test_counting_while_recomputing():
    """The forward is plain, and what is recomputed in the backward is watched."""
    want = plain("attention")
    for _ in range(2):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in qkv().items()}
        o = checkpoint(lambda **x: tw.attention(**x, causal=True), **leaves, use_reentrant=False)
        with FlopCounterMode(display=False):
            check_equal(with_gradients((o,), list(leaves.values())), want)


def test_policies_find_attention_by_its_name():
    """Selective checkpointing that keeps what has "attention" in its name computes it once."""
    seen = []

    def policy(ctx, op, *args, **kwargs):
        kept = "attention" in str(op)
        if kept:
            seen.append((str(op), ctx.is_recompute))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    q = torch.randn(1, 9, 2, 8, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    o = checkpoint(lambda x: tw.attention(x * 2, x, x, causal=True), q, use_reentrant=False, context_fn=contexts)
    got = torch.autograd.grad(o.sum(), q)[0]
    assert ("tilewise.attention_forward.default", False) in seen
    assert torch.equal(got, torch.autograd.grad(tw.attention(q * 2, q, q, causal=True).sum(), q)[0])
