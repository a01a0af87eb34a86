"""Random calls of decode on the CPU (decode_fuzz.py), in poisoned memory: some every time, many where tests may be slow."""

import pytest
import torch
from decode_fuzz import checked, kind, problem

import tilewise as tw
from tilewise.testing import poison

FEW, MANY, AT_ONCE = 48, 3000, 250


def poisoned(**words):
    with poison.memory():
        return tw.decode(**words)


def held(seed: int) -> None:
    made = problem(kind(seed, kernels=False), seed)
    try:
        # torch's products in fp64 may depend on where a tensor begins
        checked(made, alone=made.call.q.dtype != torch.float64, run=poisoned)
    except Exception as failure:
        failure.add_note(f"seed {seed}: {made}")
        raise


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("seed", range(FEW))
def test_random_calls(seed):
    held(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, MANY, AT_ONCE))
def test_many_random_calls(first):
    for seed in range(first, first + AT_ONCE):
        held(seed)


def lengthened(**words):
    lengths = words["cache_seqlens"]
    return tw.decode(**words | {"cache_seqlens": (lengths - 1).clamp(min=0) if isinstance(lengths, torch.Tensor) else lengths})


def other_rows(**words):
    o, *rest = (found,) if isinstance(found := tw.decode(**words), torch.Tensor) else found
    return (o + 0.01 * o.abs().amax(), *rest)


@pytest.mark.parametrize("broken", [lengthened, other_rows])
def test_what_is_wrong_is_found(broken):
    """A token too few is seen, and O is off by a hundredth."""
    found = 0
    for seed in range(20):
        try:
            checked(problem(kind(seed, kernels=False), seed), alone=False, run=broken)
        except (AssertionError, tw.ShapeError):
            found += 1
    assert found > 10
