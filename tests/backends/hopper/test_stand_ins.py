"""What the compiler is given for operands, by their annotations."""

from types import SimpleNamespace
from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

from tilewise.backends.hopper.stand_ins import Floats, Ints, Of, StandIns, When

pytest.importorskip("cutlass")


class Pair(NamedTuple):
    first: int
    second: float


class Bundle(NamedTuple):
    q: Annotated[Tensor, Of("batch 3 _ _", aligned=True)]
    k: Annotated[Tensor, Floats(lambda config: f"batch {config.tile}", scattered=True)]
    bias: Annotated[Tensor | None, Of("_", "bias")]
    table: Annotated[Tensor | None, When("mask_kind", ("varlen", "tiles")), Ints("batch")]
    pairs: Annotated[Pair | None, When("alibi")]
    words: tuple[int, int] | None = None


def made(**fields):
    given = {"dtype": torch.float16, "bias": None, "mask_kind": "full", "alibi": False, "tile": 8}
    return StandIns(SimpleNamespace(**given | fields))


def test_one_name_is_one_length():
    make = made()
    q, k, *_ = make(Bundle)
    batch, three, *others = q.shape
    assert three == 3 and k.shape == (batch, 8) and k.shape[0] is batch is make(Ints("batch")).shape[0]
    assert len({id(size) for size in (batch, *others)}) == 3 and made()(Ints("batch")).shape[0] is not batch


def test_dtypes_and_strides():
    q, k, *_ = made()(Bundle)
    assert [x.element_type.width for x in (q, k)] == [16, 32] and [x._assumed_align for x in (q, k)] == [16, 4]
    assert q.stride[-1] == 1 and not isinstance(k.stride[-1], int) and [step.divisibility for step in q.stride[:-1]] == [8] * 3


def test_what_a_configuration_does_without():
    _, _, bias, table, pairs, words = made()(Bundle)
    assert bias is table is pairs is None and len(words) == 2
    _, _, bias, table, pairs, _ = made(bias=torch.float32, mask_kind="tiles", alibi=True)(Bundle)
    assert bias.element_type.width == 32 and table.shape and isinstance(pairs, Pair) and pairs.second.value == 1.0


def test_a_launch_may_have_another_annotation():
    *_, bias, table, pairs, words = made()(Bundle, bias=Ints("batch"), pairs=Pair, words=None)
    assert bias.shape and table is words is None and pairs.first.value == 0
