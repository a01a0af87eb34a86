"""What a mask_mod or score_mod of flex_attention computes: its operations, recorded in one call, and the mask that they describe.

`record` calls the function once, on stand-ins of one element. `Program.mask` then runs the operations on whole axes: a value may depend on the query
alone, on the key alone, or on their distance key - query, and a bool of these is a set of rows, of columns or of diagonals. Sets combine as
masks do. What is none of that raises `Unrecognised`, and so does an operation that on whole axes is another than on single elements (`extra_dims`).
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from tilewise.compat.flex_axes import SAME, Axes, Unrecognised, Value, held, leaves, mapped
from tilewise.masks import Bands, Mask, PerHead
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.dense import Packed

aten = torch.ops.aten
INPUTS = ("b", "h", "q_idx", "kv_idx")
LOOKS_INSIDE = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default)
# By element, as those that torch says it of.
BY_ELEMENT = {*SAME, aten.floor_divide.default, aten.masked_fill.Tensor, aten.rsub.Tensor}
BY_ELEMENT |= {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
NEW = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
IGNORES_NUMBERS = {*NEW, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}  # of the tensors among its arguments
LISTED = {aten.isin.Tensor_Tensor: 1, aten.bucketize.Tensor: 1, aten.searchsorted.Tensor: 0}  # by element, but for this argument
REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dim, aten.all.dim)
ASKS_SHAPE = {Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.__len__}
# To torch's stubs they are no descriptors.
ASKS_SHAPE |= {Tensor.shape.__get__, Tensor.ndim.__get__}  # pyright: ignore[reportAttributeAccessIssue]
APPROXIMATE = "approx::tanh"  # which attention-gym registers for its softcap


class Ref(NamedTuple):
    """A tensor of the program: an input's name, or the number of a step."""

    at: int | str


class Step(NamedTuple):
    """One aten operation; tensors of the program are `Ref`s, all others are captured. `extra` is what `extra_dims` says of it, `writes` what
    `_writes` said of the captured ones when it ran.
    """

    function: OpOverload
    args: tuple
    kwargs: dict
    extra: int | None = 0
    writes: int = 0

    def arguments(self, tensors: dict) -> tuple[tuple, dict]:
        """args and kwargs with tensors in the place of `Ref`s."""
        return tuple(mapped(tree, lambda x: tensors[x.at] if isinstance(x, Ref) else x) for tree in (self.args, self.kwargs))


class Tracer(Tensor):
    """A stand-in of one number that remembers which tensor of the program it is."""

    @staticmethod
    def __new__(cls, inner: Tensor, steps: list[Step], at: int | str):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor, steps: list[Step], at: int | str) -> None:
        self.number, self.steps, self.at = inner, steps, at

    def __repr__(self) -> str:
        return f"Tracer({self.at})"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in ASKS_SHAPE:
            raise Unrecognised("asks for the shape of its indices, which is another for these stand-ins")
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in LOOKS_INSIDE:
            raise Unrecognised("decides by the values of its indices")
        if function._schema.is_mutable:
            raise Unrecognised(f"writes to a tensor ({function})")
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise Unrecognised(f"draws random numbers ({function})")
        tensors = leaves((args, kwargs), Tensor)
        traced = [x for x in tensors if isinstance(x, Tracer)]
        result = function(*mapped(args, _inner), **mapped(kwargs, _inner))
        if not isinstance(result, Tensor):
            raise Unrecognised(f"calls {function}, which gives no single tensor")
        steps = traced[0].steps
        extra = extra_dims(function, args, traced, result)
        steps.append(Step(function, mapped(args, _ref), mapped(kwargs, _ref), extra, _writes(tensors)))
        return Tracer(result, steps, len(steps) - 1)


def extra_dims(function: OpOverload, args: tuple, traced: list[Tracer], result: Tensor) -> int | None:
    """How many dimensions `result` has behind that of the stand-ins; None where whole axes in their place may give something else.

    A row of a captured table has one, and a sum over its last dimension takes it away.
    """
    extra, found = {max(x.dim() - 1, 0) for x in traced}, max(result.dim() - 1, 0)
    captured = [x for x in leaves(args, Tensor) if not isinstance(x, Tracer)]
    if function is aten.index.Tensor:
        table, places = args
        whole = not isinstance(table, Tracer) and extra == {0}
        return found if whole and all(_is_place(x) for x in places) else None
    if function in LISTED:
        listed = args[LISTED[function]]
        return 0 if isinstance(listed, Tensor) and not isinstance(listed, Tracer) and listed.dim() < 2 and extra == {found} == {0} else None
    if function in REDUCTIONS and len(args) > 1:
        dims = args[1] if isinstance(args[1], list | tuple) else [args[1]]
        return found if dims and all(-max(extra) <= dim < 0 for dim in dims) else None
    if function in NEW:
        return 0 if result.dim() == 0 else None
    if function in BY_ELEMENT or torch.Tag.pointwise in function.tags or function.name() == APPROXIMATE:
        return found if extra == {found} and all(x.dim() <= found for x in captured) else None
    return None


def _writes(tensors: Iterable[Tensor]) -> int:
    """How often torch's operators wrote to the captured ones among these."""
    return sum(x._version for x in tensors if not isinstance(x, Tracer) and not x.is_inference())


def _is_place(index: Any) -> bool:
    """Whether an index into a table is one number, traced or not."""
    numbers = isinstance(index, Tensor) and index.dtype not in (torch.bool, torch.uint8)
    return numbers and index.dim() <= (1 if isinstance(index, Tracer) else 0)


def _inner(x: Any) -> Any:
    return x.number if isinstance(x, Tracer) else x


def _ref(x: Any) -> Any:
    return Ref(x.at) if isinstance(x, Tracer) else x


Result = Ref | Tensor | bool | float  # of a mod


@dataclass(frozen=True)
class Program:
    """The steps of a mod, and which of its tensors is the result."""

    steps: tuple[Step, ...]
    result: Result

    def captured(self) -> list[Tensor]:
        """The tensors that the mod brings along."""
        return [x for step in self.steps for x in leaves((step.args, step.kwargs), Tensor)]

    def uses(self, result: Result | None = None) -> set[str]:
        """The inputs that the result (default: the program's) depends on."""
        reached: dict[int | str, set[str]] = {name: {name} for name in (*INPUTS, "score")}
        for number, step in enumerate(self.steps):
            reached[number] = set() if step.function in IGNORES_NUMBERS else set().union(*(reached[ref.at] for ref in refs(step)))
        result = self.result if result is None else result
        return reached[result.at] if isinstance(result, Ref) else set()

    def digest(self) -> bytes:
        """Equal for programs that give the same values for the same indices, as far as their captured tensors hold the same now.

        Raises Unrecognised where that cannot be said: of operators that are not torch's own, and of objects of unknown content.
        """
        seen: dict[int, str] = {}
        foreign = next((step.function for step in self.steps if step.function.namespace not in ("aten", "prims")), None)
        if foreign is not None:
            raise Unrecognised(f"calls {foreign}, which may depend on more than its arguments")
        written = [f"{step.function.name()}({_written(step.args, seen)},{_written(step.kwargs, seen)})" for step in self.steps]
        text = "\n".join([str(torch.get_default_dtype()), *written, _written(self.result, seen)])
        return hashlib.sha256(text.encode()).digest()

    def mask(self, b: int, h: int, seqlen_q: int, seqlen_k: int, result: Result | None = None) -> Mask:
        """The pairs of one batch entry and head for which the result is true. Raises Unrecognised."""
        axes = Axes(seqlen_q, seqlen_k)
        return axes.lifted(self._run(axes, _integers(b), _integers(h), self.result if result is None else result))

    def along(self, heads: int, seqlen_q: int, seqlen_k: int, result: Result) -> Value:
        """The result along one axis, for each head: values (heads or 1, length of the axis). Raises Unrecognised."""
        found = self._run(Axes(seqlen_q, seqlen_k), _integers(0), torch.arange(heads, dtype=torch.int64, device="cpu")[:, None], result)
        if not isinstance(found, Value):
            raise Unrecognised("gives numbers that depend on query and key apart")
        return found

    def _run(self, axes: Axes, b: Tensor, h: Tensor, result: Result) -> "Value | Mask":
        if not isinstance(result, Ref):
            return Value(None, held([result]))
        tensors: dict[int | str, Value | Mask] = dict(zip(INPUTS, axes.inputs(b, h), strict=True))
        for number in sorted(self.needed(result)):
            step = self.steps[number]
            if step.extra != 0:
                raise Unrecognised(f"is not one number from step to step ({step.function})")
            tensors[number] = axes.step(step.function, *step.arguments(tensors))
        return tensors[result.at]

    def needed(self, result: Ref) -> set[int]:
        """The steps that a result depends on."""
        needed, ahead = set(), [result]
        while ahead:
            at = ahead.pop().at
            if isinstance(at, int) and at not in needed:
                needed.add(at)
                ahead += refs(self.steps[at])
        return needed


def refs(step: Step) -> list[Ref]:
    """The tensors of the program that a step reads."""
    return leaves((step.args, step.kwargs), Ref)


SIMPLE = int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format  # repr says all of these


def _written(x: Any, seen: dict[int, str]) -> str:
    """An argument as text, a captured tensor by its content, which is kept in `seen` by id."""
    if isinstance(x, Ref):
        return f"%{x.at}"
    if type(x) in SIMPLE:
        return f"{type(x).__name__} {x!r}"
    if isinstance(x, list | tuple):
        return f"[{','.join(_written(each, seen) for each in x)}]"
    if isinstance(x, dict):
        return f"{{{','.join(f'{name}:{_written(each, seen)}' for name, each in x.items())}}}"
    if type(x) not in (Tensor, torch.nn.Parameter):
        raise Unrecognised(f"holds a {type(x).__name__}, whose content is not known")
    if id(x) not in seen:
        seen[id(x)] = f"{x.dtype} {x.device} {tuple(x.shape)} {tensor_digest(x).hex()}"
    return seen[id(x)]


def tensor_digest(x: Tensor) -> bytes:
    """A digest of the elements of a strided tensor. Raises Unrecognised where it has none to read."""
    try:
        return hashlib.sha256(x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data).digest()
    except (RuntimeError, TypeError, NotImplementedError) as error:  # sparse, quantised
        raise Unrecognised(f"holds a tensor whose elements cannot be read: {error}") from error


def record(mod: Callable, device: torch.device, score: torch.dtype | None = None) -> Program:
    """The steps of a mask_mod, or with the dtype of scores those of a score_mod. Raises Unrecognised."""
    names = INPUTS if score is None else ("score", *INPUTS)
    dtypes = {"score": score}
    steps: list[Step] = []
    grad = score is not None and torch.is_grad_enabled()  # of what a score_mod computes from a tensor before it indexes it
    with torch.set_grad_enabled(grad):
        inputs = [Tracer(torch.zeros(1, dtype=dtypes.get(name, torch.int64), device=device), steps, name) for name in names]
        try:
            result = mod(*inputs)
        except Unrecognised:
            raise
        except Exception as error:  # whatever a stranger's function raises on stand-ins
            raise Unrecognised(f"cannot be followed: {type(error).__name__}: {error}") from error
    if any(step.writes != _writes(leaves((step.args, step.kwargs), Tensor)) for step in steps):
        raise Unrecognised("writes to a tensor that it has read")
    return Program(tuple(steps), _ref(result))


def _integers(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cpu")


def pairs_of(program: Program, result: Result, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Mask:
    """The pairs for which a result of the program is true, as one mask for all batch entries and heads. Raises Unrecognised."""
    uses = program.uses(result)
    entries, each_head = range(batch if "b" in uses else 1), range(heads if "h" in uses else 1)
    masks = [[program.mask(b, h, seqlen_q, seqlen_k, result) for h in each_head] for b in entries]
    by_head = [_merged(each) for each in masks]
    if all(each == by_head[0] for each in by_head):
        merged = by_head[0]
        return merged[0][1] if len(merged) == 1 else PerHead({(each.start, each.stop): mask for each, mask in merged})
    bits = np.stack([np.stack([_bits(mask.resolve(seqlen_q, seqlen_k)) for mask in each]) for each in masks])
    return Packed(torch.from_numpy(bits), seqlen_k)  # masks by batch entry have no other form


def _bits(region: Bands | Bitmap) -> np.ndarray:
    return (region if isinstance(region, Bitmap) else Bitmap.of_bands(region)).bits


def _merged(masks: Iterable[Mask]) -> list[tuple[range, Mask]]:
    """Neighbours that are equal, once."""
    found: list[tuple[range, Mask]] = []
    for number, mask in enumerate(masks):
        if found and found[-1][1] == mask:
            found[-1] = range(found[-1][0].start, number + 1), mask
        else:
            found.append((range(number, number + 1), mask))
    return found
