"""The needle test: many queries, each of which wants one key of very many."""

import torch
from torch import Tensor

NEEDLES = 100
SCORE = 16.0  # of a query and the key that it wants; at 128k keys that leaves it nine tenths of the row's weight


def made(seqlen_k: int, head_dim: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """q (1, NEEDLES, 1, head_dim), k and v (1, seqlen_k, 1, head_dim) in bf16, and the values that the queries want (NEEDLES, head_dim).

    Keys and values are normal, but for the values that are wanted, which are 1 or -1 in each channel, and the length of their keys, which is usual. A
    query is a multiple of its key. Scores are for the usual scale.
    """
    source = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(seqlen_k, head_dim, generator=source, dtype=torch.float32, device="cpu") for _ in range(2))
    place = torch.randperm(seqlen_k, generator=source, device="cpu")[:NEEDLES]
    k[place] *= head_dim**0.5 / k[place].norm(dim=1, keepdim=True)
    wanted = torch.randn(NEEDLES, head_dim, generator=source, dtype=torch.float32, device="cpu").sign()
    v[place] = wanted
    return [x[None, :, None].bfloat16() for x in (SCORE * head_dim**-0.5 * k[place], k, v)], wanted


def found(o: Tensor, wanted: Tensor) -> int:
    """How many rows of O (1, NEEDLES, 1, head_dim) are nearest to what they want, and near it."""
    rows = o[0, :, 0].float().cpu()
    near = (rows - wanted).norm(dim=1) < 0.25 * wanted.norm(dim=1)
    return int((near & ((rows @ wanted.T).argmax(1) == torch.arange(NEEDLES, dtype=torch.int64, device="cpu"))).sum())
