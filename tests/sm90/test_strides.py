"""Which tensors kernels read where they lie: strides that are multiples of 16 bytes, but for dimensions of size 1, where any will do."""

import pytest
import torch

from tilewise.sm90 import jit


def of(shape, strides, first=0, dtype=torch.bfloat16):
    return torch.zeros(4096, dtype=dtype).as_strided(shape, strides, first)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 5, 1, 64), (320, 64, 7, 1)), ((1, 5, 2, 64), (3, 128, 64, 1)), ((1, 1, 1, 8), (1, 1, 1, 1)), ((2, 3, 1, 1), (64, 8, 1, 9))],
    ids=str,
)
def test_one_entry_has_no_step(shape, strides):
    """A view tells the kernel of legal strides."""
    x = of(shape, strides)
    found = jit.aligned(x)
    assert jit.strided(x) and jit.in_place(x) and found.data_ptr() == x.data_ptr() and found.shape == x.shape and torch.equal(found, x)
    assert found.stride(-1) == 1 and not any(step * 2 % jit.BYTES for step in found.stride()[:-1])
    assert all(ours == theirs for ours, theirs, n in zip(found.stride(), strides, shape, strict=True) if n > 1)


@pytest.mark.parametrize(
    ("shape", "strides", "first"),
    [
        ((2, 5, 2, 64), (640, 128, 68, 1), 0),
        ((2, 5, 1, 8), (640, 64, 7, 2), 0),
        ((2, 5, 1, 64), (320, 64, 64, 1), 1),
        ((2, 1, 1, 8), (9, 1, 1, 1), 0),
    ],
    ids=str,
)
def test_what_lies_between_addresses_is_copied(shape, strides, first):
    x = of(shape, strides, first)
    found = jit.aligned(x)
    assert not jit.in_place(x) and found.data_ptr() != x.data_ptr() and found.is_contiguous() and torch.equal(found, x)


def test_what_lies_right_is_taken_as_it_is():
    x = of((2, 5, 2, 64), (640, 128, 64, 1))
    assert jit.aligned(x) is x and jit.readable(x) is x
