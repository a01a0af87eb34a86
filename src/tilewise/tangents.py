"""Tangents of forward-mode differentiation: who has one, and that none is lost on the way to an operator, which passes no tangents on."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import is_gradtrackingtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]  (torch documents it, and does not list it)

AUTOGRAD = torch._C._dispatch_key_parse("AutogradFunctionality")
BESIDE_AUTOGRAD = torch._C.DispatchKey.ADInplaceOrView
_library = torch.library.Library("tilewise", "FRAGMENT")  # what is registered lives as long as this


def has_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation is under way and gave x a tangent; also below autograd, which by itself would not see it there."""
    if forward_ad._current_level < 0:
        return False
    if is_compiling():
        return forward_ad.unpack_dual(x).tangent is not None
    if x.is_inference():
        return False
    see = torch._C._SetExcludeDispatchKeyGuard
    with see(AUTOGRAD, False), see(BESIDE_AUTOGRAD, False):  # which a look at a tangent needs
        return forward_ad.unpack_dual(x).tangent is not None


def _transformed(x) -> bool:
    """Whether x belongs to a derivative of torch.func that is under way."""
    return isinstance(x, Tensor) and is_gradtrackingtensor(x)


def watch(op: CustomOpDef, name: str, check: Callable[..., None]) -> None:
    """Call `check` on the operands of each call of `op`, called tilewise::`name`, where they still have the tangents of torch.func's transforms.

    Those take a tensor's tangent from it before the operator's own kernel runs, and a graph that holds the operator calls nothing else.
    """

    def kernel(keyset, *operands):
        if forward_ad._current_level >= 0 and any(map(_transformed, operands)):
            check(*operands)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op._opoverload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *operands)

    _library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)
