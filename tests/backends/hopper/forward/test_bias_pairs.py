"""When two neighbours of a bias may be fetched by one load."""

import functools

import torch

from tilewise.backends.hopper import changes
from tilewise.backends.hopper.changes import in_pairs
from tilewise.backends.hopper.forward.plan import config_of
from tilewise.masks import Full
from tilewise.problem import Call

zeros = functools.partial(torch.zeros, dtype=torch.bfloat16)


def copied(bias):
    q = zeros(1, 4, 2, 64)
    call = Call(q=q, k=q, v=q, mask=Full(), scale=1.0, bias=bias)
    return changes.scores(call, config_of(call), 1.0).bias


def test_pairs():
    whole = zeros(2, 2, 4, 10)
    assert in_pairs(whole) and copied(whole) is whole
    assert in_pairs(whole[:, :, :1]) and in_pairs(whole[:1].expand(5, 2, 4, 10))
    assert not in_pairs(whole[..., 1:9])  # begins at an odd number
    assert not in_pairs(zeros(2, 2, 4, 9))  # so does every second row
    assert not in_pairs(zeros(2, 2, 4, 11)[..., :10])
    assert not in_pairs(zeros(1, 1, 1, 9))  # the last number has no neighbour
    assert in_pairs(zeros(1, 1, 1, 11)[..., :10])  # there is but one row


def test_fp32_has_none():
    assert not in_pairs(torch.zeros(2, 2, 4, 10))


def test_pairs_of_a_bias_that_is_copied():
    strided = zeros(2, 2, 4, 20)[..., 1::2]
    assert in_pairs(strided) and in_pairs(copied(strided))
    assert not in_pairs(zeros(1, 1, 4, 18)[..., ::2])
