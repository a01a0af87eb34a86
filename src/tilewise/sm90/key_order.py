"""In which order the keys of V lie for a product in 8 bits, and V so laid out; on the host.

A product in 8 bits takes P from registers four elements of a row at a time, while a thread's elements of S are pairs of neighbours, eight columns
apart. The sum over keys has no order of its own. So the four elements that a thread holds anyway count as neighbours, and the keys of V change
places accordingly, in every group of 16 alike. Q, K, masks and O know nothing of it.
"""

import torch
from torch import Tensor

GROUP = 16
ORDER = tuple(token for first in range(0, 8, 2) for token in (first, first + 1, first + 8, first + 9))
"""Which of a group's keys lies at each place: 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15."""


def transposed(v: Tensor) -> Tensor:
    """V (..., seqlen, head_dim_v) as (..., head_dim_v, seqlen rounded up to 16), keys in the product's order and contiguous, zeros after the last.

    Any dtype.
    """
    seqlen = v.shape[-2]
    places = torch.arange(-(-seqlen // GROUP) * GROUP, dtype=torch.int64, device=v.device).view(-1, GROUP)
    tokens = places[:, torch.tensor(ORDER, dtype=torch.int64, device=v.device)].flatten()
    there = tokens < seqlen
    found = torch.zeros((*v.shape[:-2], v.shape[-1], len(tokens)), dtype=v.dtype, device=v.device)
    if found.numel():
        bits = (found, v) if v.dtype.itemsize > 1 else (found.view(torch.uint8), v.view(torch.uint8))  # torch indexes few dtypes of 8 bits
        bits[0][..., there] = bits[1].mT[..., tokens[there]]
    return found
