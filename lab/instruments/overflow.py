"""How long a call takes whose numbers have overflowed, as in fp16 training with a loss scale: all, a row or a number, or one in a thousand of either.

python lab/instruments/overflow.py ROWS.jsonl [--head-dims 64,128] [--seqlens 1024,4096]

One row a case on a Hopper GPU, in seconds: medians, of the forward pass with such q and of the backward pass with such dO. Where a mask hides
anything, what is not finite is looked at again (docs/hopper-backward.md); this shows how soon what is so by right is known to be.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward import call as gradients
from tilewise.bench.provenance import provenance
from tilewise.bench.timing import interleave
from tilewise.masks import Causal, Documents, Full, Mask, SlidingWindow
from tilewise.problem import Call

HEADS = 16


def spoiled(x: Tensor) -> dict[str, Tensor]:
    """As it is; and with overflows of several kinds."""
    row, number = x.clone(), x.clone()
    row[:, x.shape[1] // 2] = torch.nan
    number[:, x.shape[1] // 2, :, 3] = torch.inf
    rows = torch.where(torch.rand(x.shape[:3], device=x.device)[..., None] < 1e-3, torch.nan, x)
    numbers = torch.where(torch.rand(x.shape, device=x.device) < 1e-3, torch.inf * x.sign(), x)
    return {
        "usual": x,
        "all NaN": torch.full_like(x, torch.nan),
        "one row NaN": row,
        "one infinity": number,
        "a row in 1,000 NaN": rows,
        "a number in 1,000 infinite": numbers,
    }


def medians(function: Callable[[Tensor], object], x: Tensor) -> dict[str, float]:
    calls = {kind: partial(function, each) for kind, each in spoiled(x).items()}
    return {kind: stats.median for kind, stats in interleave(calls, budget_s=0.0, device="cuda", clock="events").items()}


def measure(head_dim: int, seqlen: int, mask: Mask) -> dict:
    q, k, v, d_o = (torch.randn(1, seqlen, HEADS, head_dim, device="cuda").half() for _ in range(4))
    call = Call(q=q, k=k, v=v, mask=mask, scale=head_dim**-0.5, grad=True)
    o, lse = Hopper().forward(call)
    return {
        "case": {"batch": 1, "seqlen": seqlen, "heads": HEADS, "head_dim": head_dim, "mask": repr(mask), "dtype": "fp16"},
        "forward_s": medians(lambda x: Hopper().forward(replace(call, q=x)), q),
        "backward_s": medians(lambda x: gradients.backward(call, o, lse, x, None), d_o),
    }


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--head-dims", type=numbers, default=[64, 128])
    parser.add_argument("--seqlens", type=numbers, default=[1024, 4096])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("overflow.py needs a Hopper GPU")
    environment = provenance("cuda")
    torch.manual_seed(0)
    with open(options.out, "a") as rows:
        for head_dim in options.head_dims:
            for seqlen in options.seqlens:
                for mask in Full(), Causal(), SlidingWindow(500, 0), Documents([0, seqlen // 3, seqlen], inner=Causal()):
                    rows.write(json.dumps(measure(head_dim, seqlen, mask) | {"environment": environment}) + "\n")
                    rows.flush()


if __name__ == "__main__":
    main()
