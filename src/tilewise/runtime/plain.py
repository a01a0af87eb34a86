"""Which calls are plain: nothing but autograd takes part, and every tensor's elements lie at its address, as its strides say.

Only of a plain tensor may an address be taken. A subclass, a fake, batched, functional, negated or zero tensor may look like one, but keeps its
elements elsewhere, or means others by them; such a call goes through the operators, where torch hands each kind to whoever knows it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.errors import MADE_OF_MEMORY

MAPPED = torch._C._parse_dispatch_key("Batched") if hasattr(torch, "_remove_batch_dim") else None  # None: a torch without the older vmap


def needs_dispatch(tensors: Iterable[Tensor | None]) -> bool:
    """Whether anything but autograd must see the operators: a transform of torch.func, forward-mode differentiation, a dispatch mode (fake
    tensors, counters), or a tensor that is not plain.
    """
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0 or forward_ad._current_level >= 0:
        return True
    try:
        for x in tensors:  # strided ones, and not nested
            if x is not None and (type(x) not in MADE_OF_MEMORY or x.is_neg() or (x.data_ptr() == 0 and x.numel() > 0)):
                return True
    except RuntimeError:  # it has no storage
        return True
    return False


def mapped(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a tensor is batched by the vmap of torch.autograd.grad(..., is_grads_batched=True), which is older than torch.func's."""
    return MAPPED is not None and any(isinstance(x, Tensor) and torch._C._dispatch_keys(x).has(MAPPED) for x in tensors)
