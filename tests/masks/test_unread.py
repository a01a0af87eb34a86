"""Documents whose cu_seqlens stay tensors: they mean what `Documents` means, with the same errors."""

import pytest
import torch

from tilewise.backends.tables.documents import by_rows, offsets
from tilewise.errors import ShapeError
from tilewise.masks import Causal, DeviceDocuments, Documents, FirstKeys, Full, SlidingWindow, parse

CU = torch.tensor([0, 3, 3, 20, 41], dtype=torch.int32)
KEYS = torch.tensor([0, 10, 12, 12, 50])


def test_it_is_what_it_reads_as():
    unread, read = DeviceDocuments(CU, KEYS, Causal()), Documents(CU, KEYS, inner=Causal())
    assert unread == read and hash(unread) == hash(read) and unread.read() == read
    assert unread.planes(45, 50) == read.planes(45, 50)
    assert (unread.dense(45, 50) == read.dense(45, 50)).all()
    tensors = []
    again = parse(unread.text(tensors), tensors)
    assert isinstance(again, DeviceDocuments) and again == unread and tensors[0] is CU
    assert ((unread & SlidingWindow(2, 0)).dense(45, 50) == (read & SlidingWindow(2, 0)).dense(45, 50)).all()


def test_a_combined_mask_is_told_apart_by_what_its_tensors_hold():
    one, other = (DeviceDocuments(cu, cu, Full()) & SlidingWindow(2, 0) for cu in (torch.tensor([0, 3, 9]), torch.tensor([0, 5, 9])))
    assert one != other and not torch.equal(one.dense(9, 9), other.dense(9, 9))


@pytest.mark.parametrize("wrong", [[1, 4], [0, 5, 4], [0, 51]])
def test_bad_values_raise_as_those_of_documents(wrong):
    wrong = torch.tensor(wrong)
    with pytest.raises(ShapeError) as expected:
        Documents(wrong).planes(45, 50)
    with pytest.raises(ShapeError) as found:
        DeviceDocuments(wrong, wrong, Full()).check(45, 50)
    assert str(found.value) == str(expected.value)


def test_values_are_checked_once_and_again_after_a_write():
    ends = torch.tensor([0, 10])
    mask = DeviceDocuments(ends, ends, Full())
    mask.check(20, 20)
    mask.check(20, 20)
    ends[1] = 30
    with pytest.raises(ShapeError, match="30"):
        mask.check(20, 20)


@pytest.mark.parametrize("inner", [Full(), Causal(), Causal("top_left"), SlidingWindow(3, 1), SlidingWindow(2, 0, offset=-2), Causal("top_left", 3),
                                   SlidingWindow(None, 2, "top_left"),
                                   Causal() & SlidingWindow(5, None, "top_left"), SlidingWindow(4, 0) & Full()], ids=repr)  # fmt: skip
def test_offsets_describe_the_inner_mask(inner):
    found, read = offsets(inner), Documents(CU, KEYS, inner=inner)
    assert by_rows(read)
    dense = read.dense(45, 50)
    for d in range(4):
        q0, q1, k0, k1 = int(CU[d]), int(CU[d + 1]), int(KEYS[d]), int(KEYS[d + 1])
        for row in range(q0, q1):
            place, left = row + k1 - q1, row + k0 - q0
            begin = max(k0, place + found.lo, left + found.lo_left)
            end = min(k1, place + found.hi + 1, left + found.hi_left + 1)
            assert dense[row].nonzero().flatten().tolist() == list(range(begin, end))


def test_other_inner_masks_go_another_way():
    assert not by_rows(Documents(CU, inner=FirstKeys(3)))
    assert not by_rows(Documents(CU, inner=Causal() | FirstKeys(3)))
    assert not by_rows(Causal())
