"""What else is imported from `flash_attn.flash_attn_interface`: its autograd functions, which some call by `apply`, and the extension.

`apply` takes every argument of the function that the class stands for, by place, and last whether gradients are wanted (is_grad_enabled), as
FlashAttention 2.8's.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from tilewise.compat import flash_attn, flash_attn_2_cuda

__all__ = [
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "flash_attn_gpu",
    "maybe_contiguous",
    "round_multiple",
]

flash_attn_gpu = SimpleNamespace(**{name: getattr(flash_attn_2_cuda, name) for name in flash_attn_2_cuda.__all__})


def maybe_contiguous(x):
    """x, or where its last dimension has gaps a copy without; None is None. No function here needs it."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def round_multiple(x, m):
    """The least multiple of m that is no less than x."""
    return -(-x // m) * m


def _applied(name: str, function: Callable) -> type:
    count = function.__code__.co_argcount + 1

    def apply(*args):
        if len(args) != count:
            raise TypeError(
                f"{name}.apply takes the {count - 1} arguments of {function.__name__} and is_grad_enabled, by place, got {len(args)}; "
                f"call {function.__name__}"
            )
        *given, is_grad_enabled = args
        with torch.set_grad_enabled(bool(is_grad_enabled) and torch.is_grad_enabled()):
            return function(*given)

    doc = f"`apply` is `{function.__name__}`; nothing else of an autograd function is here."
    return type(name, (), {"apply": staticmethod(apply), "__doc__": doc, "__module__": __name__})


FlashAttnFunc = _applied("FlashAttnFunc", flash_attn.flash_attn_func)
FlashAttnKVPackedFunc = _applied("FlashAttnKVPackedFunc", flash_attn.flash_attn_kvpacked_func)
FlashAttnQKVPackedFunc = _applied("FlashAttnQKVPackedFunc", flash_attn.flash_attn_qkvpacked_func)
FlashAttnVarlenFunc = _applied("FlashAttnVarlenFunc", flash_attn.flash_attn_varlen_func)
FlashAttnVarlenKVPackedFunc = _applied("FlashAttnVarlenKVPackedFunc", flash_attn.flash_attn_varlen_kvpacked_func)
FlashAttnVarlenQKVPackedFunc = _applied("FlashAttnVarlenQKVPackedFunc", flash_attn.flash_attn_varlen_qkvpacked_func)
