"""Whether an installed wheel computes with its own kernel: `python tools/wheel_check.py`, from any folder but the checkout's src."""

import sys
from pathlib import Path

import torch

import tilewise as tw

q, k, v = (torch.randn(1, 65, heads, 32, requires_grad=True) for heads in (4, 2, 2))
o = tw.attention(q, k, v, causal=True, backend="cpu")  # raises where the wheel has no kernel
o.sum().backward()
want = tw.attention(*(x.detach().double() for x in (q, k, v)), causal=True, backend="reference")
assert (o - want).abs().max() < 1e-5 and all(x.grad.isfinite().all() for x in (q, k, v))
print(f"tilewise {tw.__version__} of {Path(tw.__file__).parent} on {torch.__version__}, Python {sys.version.split()[0]}")
