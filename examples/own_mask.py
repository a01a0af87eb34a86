"""A mask of your own: sets of pairs by `& | - ~`, one a head range, a tensor of bools; how it looks, what it costs.

`python examples/own_mask.py`
"""

import torch

import tilewise as tw


def main() -> None:
    torch.manual_seed(0)
    n = 256
    q, k, v = (torch.randn(1, n, 4, 32) for _ in range(3))

    documents = tw.Documents([0, 100, 130, n])
    mask = documents & (
        tw.SlidingWindow(31, 0) | (tw.Causal() & tw.FirstKeys(4))
    )  # a window in each document, and the first one sees its beginning
    print(mask)
    print(mask.show(n, n, tile_m=16, tile_n=16))
    print(f"{mask.pairs(n, n):,} of {n * n:,} pairs are computed")

    i, j = torch.arange(n)[:, None], torch.arange(n)
    document = torch.bucketize(torch.arange(n), torch.tensor([100, 130]), right=True)
    seen = (document[:, None] == document) & (((i - j >= 0) & (i - j <= 31)) | ((j <= i) & (j < 4)))
    torch.testing.assert_close(tw.attention(q, k, v, mask=mask), tw.attention(q, k, v, mask=tw.Dense(seen)))
    print("a tensor of bools says the same, without skipping tiles by arithmetic")

    by_head = tw.PerHead({(0, 2): tw.Causal(), (2, 4): mask})
    print(tw.explain(q, k, v, mask=by_head))
    o = tw.attention(q, k, v, mask=by_head)
    torch.testing.assert_close(o[:, :, 2:], tw.attention(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], mask=mask))


if __name__ == "__main__":
    main()
