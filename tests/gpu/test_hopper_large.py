"""Sizes at which 32 bits are too few, in the Hopper backend, on a GPU: more than 2**31 elements, more heads than a grid is high."""

import pytest
import torch

import tilewise as tw
from tilewise.masks import Documents, SlidingWindow
from tilewise.sm90.jit import why_not_here

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not_here()), reason="; ".join(why_not_here()))]

LIMIT = 1 << 31


def require_memory(gib: int):
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"it takes {gib} GiB of GPU memory")


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def test_tensors_of_more_than_2_to_the_31_elements():
    require_memory(40)
    seqlen, heads = (1 << 20) + 100, 17
    q, k, v = (normal(1, seqlen, heads, 128) for _ in range(3))
    assert q.numel() > LIMIT
    last = slice(seqlen - 1000, seqlen)
    for mask in (SlidingWindow(63, 0), SlidingWindow(63, 0) & Documents([0, seqlen])):  # as one band, and by runs of tiles
        o, lse = tw.attention(q, k, v, mask=mask, backend="hopper", return_lse=True)
        want, want_lse = tw.attention(q[:, last], k[:, last], v[:, last], mask=SlidingWindow(63, 0), backend="tiled", return_lse=True)
        torch.testing.assert_close(o[:, last][:, 64:], want[:, 64:], atol=1e-2, rtol=2e-2)
        torch.testing.assert_close(lse[..., last][..., 64:], want_lse[..., 64:], atol=1e-4, rtol=1e-4)
    cu = torch.tensor([0, seqlen - 1000, seqlen], device="cuda")
    o = tw.attention_varlen(q[0], k[0], v[0], cu, cu, mask=SlidingWindow(63, 0), backend="hopper")
    torch.testing.assert_close(o[last], want[0], atol=1e-2, rtol=2e-2)


def test_batches_of_more_than_2_to_the_31_elements():
    require_memory(40)
    q, k, v = (normal(1 << 14, 130, 8, 128) for _ in range(3))
    assert q.numel() > LIMIT
    o = tw.attention(q, k, v, causal=True, backend="hopper")
    torch.testing.assert_close(o[-2:], tw.attention(q[-2:], k[-2:], v[-2:], causal=True, backend="tiled"), atol=1e-2, rtol=2e-2)


def test_a_bias_of_more_than_2_to_the_31_elements():
    require_memory(12)
    seqlen = 46500
    q, k, v = (normal(1, seqlen, 1, 64) for _ in range(3))
    bias = torch.empty(1, 1, seqlen, seqlen, device="cuda", dtype=torch.bfloat16).normal_()
    assert bias.numel() > LIMIT
    o = tw.attention(q, k, v, bias=bias, backend="hopper")
    want = tw.attention(q[:, -200:], k, v, bias=bias[:, :, -200:], backend="tiled")
    torch.testing.assert_close(o[:, -200:], want, atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 5.0}, {"mask": SlidingWindow(1, 0) | SlidingWindow(0, 1)}], ids=str)
def test_more_batches_and_heads_than_a_grid_is_high(options):
    q, k, v = (normal(40_000, 3, 2, 64) for _ in range(3))
    o = tw.attention(q, k, v, **options, backend="hopper")
    picked = [0, 1, 32_767, 32_768, 39_999]
    want = tw.attention(q[picked], k[picked], v[picked], **options, backend="tiled")
    torch.testing.assert_close(o[picked], want, atol=1e-2, rtol=2e-2)
