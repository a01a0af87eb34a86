"""A view in a quarter of the time: without autograd, and without a version that it would share with the tensor."""

import torch

_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
# A part of a tensor's memory, of its dtype: (tensor, shape, strides, first), as compiled programs have it.
part = getattr(_guards, "_reinterpret_tensor", None) or (
    lambda x, shape, strides, first: x.as_strided(shape, strides, x.storage_offset() + first)
)
