"""What a mask_mod or score_mod means apart from transforms of torch.func (vmap, grad, ...) that are under way around the call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, is_gradtrackingtensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode

from tilewise.compat.flex_axes import leaves, mapped
from tilewise.compat.flex_mods import INPUTS
from tilewise.errors import UnsupportedError


@contextmanager
def apart(what: str, mod: Callable, device: torch.device, score: torch.dtype | None = None) -> Iterator[None]:
    """Set the transforms aside, so that what is recorded and read within is plain tensors.

    Raises UnsupportedError, which calls `mod` `what`, where that would change its result: where it reads a tensor that is vmapped, or, with the dtype
    of scores, one that is differentiated. Masks have no derivative.
    """
    if not torch._C._are_functorch_transforms_active():
        yield
        return
    with temporarily_clear_interpreter_stack(), _Apart(score is not None) as seen:
        inputs = [torch.zeros((), dtype=torch.int64, device=device) for _ in INPUTS]
        with suppress(Exception):  # whatever a stranger's function raises
            mod(*(inputs if score is None else [torch.zeros((), dtype=score, device=device), *inputs]))
        if seen.refused:
            raise UnsupportedError(
                f"{what} reads a tensor of a transform of torch.func that is under way (vmap, grad, ...), which is not followed there; "
                "let it read tensors from outside of the transform, or call tilewise.attention(bias=...), which takes such tensors"
            )
        yield


class _Apart(TorchFunctionMode):
    """Puts plain tensors in the place of those that are differentiated. `refused`: it saw others of a transform, or with `grad` any."""

    def __init__(self, grad: bool) -> None:
        super().__init__()
        self.grad, self.refused = grad, False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        given = args, kwargs or {}
        args, kwargs = plain = mapped(given, _plain)
        self.refused |= any(map(is_functorch_wrapped_tensor, leaves(given if self.grad else plain, Tensor)))
        return function(*args, **kwargs)


def _plain(x: Any) -> Any:
    while isinstance(x, Tensor) and is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    return x
