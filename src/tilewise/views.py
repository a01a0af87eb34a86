"""Views and allocations with little overhead, as compiled programs have them.

A view is without autograd, and without a version that it would share with the tensor.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
# A part of a tensor's memory, of its dtype: (tensor, shape, strides, first), in half the time of a view.
part = getattr(_guards, "_reinterpret_tensor", None) or (
    lambda x, shape, strides, first: x.as_strided(shape, strides, x.storage_offset() + first)
)


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What makes a tensor of a shape, strides and dtype on the current device: for CUDA, 1 us faster than torch.empty."""
    fast = getattr(_guards, f"_empty_strided_{device.type}", None)
    return fast or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))
