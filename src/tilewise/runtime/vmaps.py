"""How torch's two kinds of vmap see the operators: torch.func's, and the older one of batched gradients (`is_grads_batched=True`)."""

from collections.abc import Callable

import torch
from torch import _VF, Tensor
from torch._library.custom_ops import CustomOpDef

from tilewise.runtime.plain import MAPPED, mapped

BY_ENTRY = "Padding("  # in the text of a mask that differs by batch entry, though it holds no tensor
MOST_LEVELS = 64  # of vmaps within each other, torch's own bound


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """(batch, ...) mapped over `dim` becomes (size * batch, ...)."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def fold(batched: tuple[int, ...], op: Callable, size: int, in_dims: tuple, args: tuple):
    """Map `op`, with a batch dimension in its operands at `batched`: fold the mapped dimension into it where no other operand is a tensor."""
    others = [x for at, x in enumerate(args) if at not in batched]
    texts = [x for x in others if isinstance(x, str)]
    if not any(isinstance(x, Tensor) for x in others) and not any("#" in text or BY_ENTRY in text for text in texts):
        folded = [_fold(x, in_dims[at], size) if at in batched and x is not None else x for at, x in enumerate(args)]
        batch = args[0].shape[0] if in_dims[0] is None else args[0].movedim(in_dims[0], 0).shape[1]
        results = tuple(y.reshape(size, batch, *y.shape[1:]) if y.dim() > 1 else y.expand(size, 0) for y in op(*folded))
        return results, (0,) * len(results)
    if size == 0:
        raise ValueError("torch.vmap over a dimension of size 0 works for q, k and v alone, not with bias, sink or other tensor operands")
    return one_by_one(op, size, in_dims, args)


def one_by_one(op: Callable, size: int, in_dims: tuple, args: tuple):
    """Map `op` by a call for each of `size` entries."""
    rows = [op(*(_pick(x, dim, n) for x, dim in zip(args, in_dims, strict=True))) for n in range(size)]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])


def _pick(x, dim, n: int):
    """Entry n of an operand, or of each tensor of a list, along the dimension it is mapped over."""
    if isinstance(x, list | tuple):
        return [_pick(y, d, n) for y, d in zip(x, dim or [None] * len(x), strict=True)]
    return x if dim is None else x.select(dim, n)


def _unwrapped(x, level: int):
    """(x without the dimension that is mapped at this level, 0), or (x, None) where none is; of a list, two lists."""
    if isinstance(x, list | tuple):
        return tuple(map(list, zip(*(_unwrapped(y, level) for y in x), strict=True))) or ([], [])
    if isinstance(x, Tensor):
        value = _VF._remove_batch_dim(x, level, 0, 0)
        if value.shape[0] > 0:  # else nothing was mapped at this level, and x expanded to 0 entries
            return value, 0
    return x, None


def _batched(rule: Callable, *args):
    """`rule` on tensors that the older vmap has wrapped: its innermost level is mapped over here, and others when the operator is called again."""
    wrapped = [x for x, _ in _pairs(args, [[None] * len(x) if isinstance(x, list | tuple) else None for x in args]) if mapped([x])]
    for level in range(MOST_LEVELS, 0, -1):
        if any(_unwrapped(x, level)[1] == 0 for x in wrapped):
            values, in_dims = zip(*(_unwrapped(x, level) for x in args), strict=True)
            size = next(x.shape[0] for x, dim in _pairs(values, in_dims) if dim is not None)
            results, _ = rule(size, in_dims, values)
            return tuple(_VF._add_batch_dim(y, 0, level) for y in results)
    raise RuntimeError("attention cannot map over 0 gradients or entries here; use torch.func.vmap")


def _pairs(values, in_dims):
    """Each operand, or tensor of a list, with the dimension that it is mapped over."""
    for x, dim in zip(values, in_dims, strict=True):
        yield from zip(x, dim, strict=True) if isinstance(dim, list) else [(x, dim)]


_library = torch.library.Library("tilewise", "FRAGMENT")  # what is registered lives as long as this


def register(op: CustomOpDef, name: str, rule: Callable) -> None:
    """Let both kinds of vmap map `op`, called tilewise::`name`, by `rule`, which takes the number of entries, for each operand the dimension that
    is mapped over, and the operands, and gives the results and their mapped dimensions.
    """
    op.register_vmap(lambda info, in_dims, *args: rule(info.batch_size, in_dims, args))
    if MAPPED is not None:
        _library.impl(name, lambda *args: _batched(rule, *args), "Batched")
