"""Attention in 8 bits: quantised on the way, tensors in 8 bits already, a cache of half the size; how wrong each is.

`python examples/eight_bits.py`. On a CPU this shows the arithmetic; an H100 is also faster with it
(docs/guide/eight-bits.md).
"""

import torch
from torch import Tensor

import tilewise as tw


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 384, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    k[..., ::16] += 12  # channels far from 0, as models have them
    exact = tw.attention(q.double(), k.double(), v.double(), causal=True)

    def wrong(o: Tensor) -> float:
        """The root mean square of O - exact."""
        return float((o.double() - exact).square().mean().sqrt())

    errors = {
        name: wrong(tw.attention(q, k, v, causal=True, precision=name)) for name in (None, "int8_qk", "int8", "fp8")
    }
    for name, error in errors.items():
        print(f"precision={name!r:<10} {error:.1e}")
    assert errors[None] < errors["int8_qk"] < errors["int8"] < errors["fp8"]

    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (tw.quantise(x, "fp8", per="head") for x in (q, k, v))
    o = tw.attention(q8, k8, v8, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, causal=True)
    print(f"e4m3, a scale a head  {wrong(o):.1e}")

    (k_cache, k_scale), (v_cache, v_scale) = (tw.quantise(x, "fp8", per="token") for x in (k, v))
    scales = [scale.transpose(1, 2) for scale in (k_scale, v_scale)]  # (batch, tokens, heads), as the cache lies
    last = tw.decode(q[:, -1:], k_cache, v_cache, k_scale=scales[0], v_scale=scales[1])
    off = float((last.double() - exact[:, -1:]).square().mean().sqrt())
    print(f"a cache in e4m3       {off:.1e}, {k_cache.nbytes / k.nbytes:.0%} of the bytes")
    assert k_cache.nbytes * 2 == k.nbytes


if __name__ == "__main__":
    main()
