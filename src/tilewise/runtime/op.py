"""How an operator of torch.library is declared: all that torch's transformations want to know of it follows from the NamedTuple of its operands.

An operator receives only what a graph can hold: tensors, numbers and a mask as text (see `Mask.text`), in which #i stands for mask_tensors[i].
Each has a twin, called `..._reading`, for calls that read values on the host; torch.compile leaves it out of CUDA graphs (graphs.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from tilewise import errors, tangents
from tilewise.runtime import graphs, vmaps

Written = Annotated[Tensor, "written"]  # an operand that the operator writes to
SCHEMA_TYPES = {
    Tensor: "Tensor", list[Tensor]: "Tensor[]", bool: "bool", int: "SymInt", float: "float", str: "str", torch.dtype: "ScalarType",
}  # fmt: skip
SCHEMA_TYPES |= {kind | None: f"{name}?" for kind, name in SCHEMA_TYPES.items()}
NO_TENSORS = {type(None), bool, int, float, str, torch.dtype}
IN_MESSAGES = {"d_o": "dO", "d_lse": "dLSE"}


def schema(operands: type[NamedTuple]) -> str:
    """The operands as torch's schema language has them, the first one that is written to as `Tensor(a!)`."""
    letters = iter("abcdefgh")
    types = [f"Tensor({next(letters)}!)" if kind == Written else SCHEMA_TYPES[kind] for kind in operands.__annotations__.values()]
    return ", ".join(map(" ".join, zip(types, operands._fields, strict=True)))


def named(given: NamedTuple) -> dict[str, Tensor]:
    """The tensors among the operands, and in their list, by their names."""
    found = {}
    for name, x in zip(given._fields, given, strict=True):
        if type(x) in NO_TENSORS:  # which takes a tenth of the time of isinstance(x, Tensor)
            continue
        if isinstance(x, Tensor):
            found[IN_MESSAGES.get(name, name)] = x
        elif isinstance(x, list | tuple):
            found |= {f"{name}[{n}]": each for n, each in enumerate(x)}
    return found


def held(given: Any) -> list[Tensor]:
    """The tensors that the mask holds."""
    return given.mask_tensors if "#" in given.mask else []


def filled(given: Any) -> Any:
    """Operands for a graph: with mask_tensors that are not empty, for AOTInductor knows no empty list. Where #i is not in the mask, nobody looks."""
    return given if given.mask_tensors else given._replace(mask_tensors=[given.q])


def declare(
    name: str,
    operands: type[NamedTuple],
    run: Callable[[Any], tuple[Tensor | None, ...]],
    *,
    fake: Callable[[Any], tuple[Tensor, ...] | None],
    results: int,
    tangent: Callable[[str, Tensor], None],
    vmap: Callable[..., tuple] | None = None,
    backward: Callable[..., Any] | None = None,
) -> tuple[CustomOpDef, CustomOpDef]:
    """The operator tilewise::`name` and its twin, which take `operands` one by one and return `results` results, all tensors.

    Args:
        run: gives the results of tensors that nobody looks at any more.
        fake: gives unwritten results of tensors without values; contiguous, as those of `run` have to be.
        tangent: raises an error for an operand, given with its name, that has a tangent of forward-mode differentiation.
        vmap: maps over the operator, its first argument; the others as `vmaps.register` has them.
        backward: as in `CustomOpDef.register_autograd`.
    """

    def declared(name: str, reads: bool) -> CustomOpDef:
        def refuse_tangents(*given) -> None:
            for each in named(operands._make(given)).items():
                tangent(*each)

        def kernel(*given):
            refuse_tangents(*given)
            asked = operands._make(given)
            errors.check_memory(**named(asked))
            return graphs.run_outside_pool(run, _with_copied_mask(asked) if reads else asked) or None  # as torch wants it of no result

        written = [name for name, kind in operands.__annotations__.items() if kind == Written]
        signature = f"({schema(operands)}) -> ({', '.join(['Tensor'] * results)})"
        tags = (torch.Tag.cudagraph_unsafe,) if reads else None
        op = torch.library.custom_op(f"tilewise::{name}", kernel, mutates_args=written, schema=signature, tags=tags)
        op.register_fake(lambda *given: fake(operands._make(given)))
        if vmap is not None:
            vmaps.register(op, name, partial(vmap, op))
        if backward is not None:
            op.register_autograd(backward)
        if not written:  # else torch counts there what is written
            tangents.watch(op, name, refuse_tangents)
        return op

    return declared(name, reads=False), declared(f"{name}_reading", reads=True)


def _with_copied_mask(given: Any) -> Any:
    """What was read of a tensor is kept until torch's operators write to it, which a graph's replay is not."""
    return given._replace(mask_tensors=[x.clone() for x in held(given)]) if "mask_tensors" in given._fields else given
