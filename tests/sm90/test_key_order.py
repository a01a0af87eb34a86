"""The order of V's keys for products in 8 bits: what a thread holds of S is what the instruction wants of it of P."""

import pytest
import torch

from tilewise.sm90 import key_order


def test_the_order_is_the_one_in_which_a_thread_has_the_columns_of_S():
    """PTX ISA, "Register Fragments" of wgmma: of 8 columns of D, lane q of a row has 2 q and 2 q + 1; of A in 8 bits, 4 q and the next three."""
    of_D = [[8 * half + 2 * q + i for half in range(2) for i in range(2)] for q in range(4)]
    of_A = [[4 * q + i for i in range(4)] for q in range(4)]
    assert [[key_order.ORDER[place] for place in places] for places in of_A] == of_D
    assert sorted(key_order.ORDER) == [*range(key_order.GROUP)]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bfloat16])
@pytest.mark.parametrize("seqlen", [0, 1, 9, 16, 17, 40])
def test_transposed(seqlen, dtype):
    """Also of a view; behind the last key there are zeros, whatever lies there in memory."""
    whole = torch.arange(2 * (seqlen + 3) * 6, dtype=torch.int64).view(2, seqlen + 3, 6).remainder(100).to(dtype)
    v = whole[:, :seqlen, 1:]
    found = key_order.transposed(v)
    assert found.shape == (2, 5, -(-seqlen // 16) * 16) and found.dtype == dtype and found.is_contiguous()
    for place in range(found.shape[-1]):
        token = place // 16 * 16 + key_order.ORDER[place % 16]
        want = v[:, token].float() if token < seqlen else torch.zeros(2, 5)
        assert torch.equal(found[:, :, place].float(), want)
