"""Both ways to share a tile among warps give the formula's O, and their traffic is what can be counted by hand."""

import pytest
import torch

from tilewise.ladder.warp_splits import split_k, split_q


def inputs(rows, seqlen_k, head_dim=16, head_dim_v=8):
    draw = torch.Generator().manual_seed(0)
    return (
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in ((rows, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v))
    )


@pytest.mark.parametrize("split", [split_k, split_q])
@pytest.mark.parametrize("rows,seqlen_k,tile_n,warps", [(16, 32, 8, 4), (13, 29, 7, 4), (1, 5, 3, 2), (64, 64, 64, 1)])
def test_both_give_the_formula(split, rows, seqlen_k, tile_n, warps):
    q, k, v = inputs(rows, seqlen_k)
    want = torch.softmax(q @ k.T / 4, 1) @ v
    torch.testing.assert_close(split(q, k, v, tile_n=tile_n, warps=warps)[0], want, rtol=1e-12, atol=1e-13)


def test_traffic_of_a_step():
    q, k, v = inputs(16, 8)  # one step
    _, shared = split_q(q, k, v, tile_n=8, warps=4)
    assert shared.bytes == {"Q": 16 * 16 * 2, "K and V": 4 * 8 * (16 + 8) * 2} and shared.barriers == 0
    _, shared = split_k(q, k, v, tile_n=8, warps=4)
    statistics = 2 * (4 + 4 * 4) * 16 * 4  # maxima and sums: four writes, and each of four warps reads all four
    assert shared.bytes == {"Q": 4 * 16 * 16 * 2, "K and V": 8 * (16 + 8) * 2, "statistics": statistics, "partial O": 2 * 4 * 16 * 8 * 4}
    assert shared.barriers == 3
