"""Tensors that are no plain ones, as any operand: their numbers lie elsewhere than at their address, or mean others."""

import tempfile
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.utils._pytree as pytree
from surroundings import FUNCTIONS, SHARES, check_cells, check_equal, check_refused, normal, of, plain, qkv
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tilewise as tw


class Wrapper(Tensor):
    """Holds another tensor, which it gives to whatever is called, as quantised weights do."""

    @staticmethod
    def __new__(cls, x: Tensor):
        made = Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)
        made.inner = x
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, cls) else x

        return function(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs or {}))


def negated(x: Tensor) -> Tensor:
    """The same numbers, as a view that means the negatives of what it holds."""
    return torch._neg_view(-x) if x.is_floating_point() else x


def zeros(x: Tensor) -> Tensor:
    """Zeros for which there is no memory."""
    return torch._efficientzerotensor(x.shape, dtype=x.dtype) if x.is_floating_point() else x


def freed(x: Tensor) -> Tensor:
    """What is left of a tensor whose memory was given back."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


@cache
def right(name: str):
    return plain(name, grad=False)


def replaced(name: str, operand: str, kind: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    tensors = FUNCTIONS[name].make()
    return tensors | {operand: kind(tensors[operand])}


def like_the_plain_one(name: str, operand: str, kind: Callable[[Tensor], Tensor]) -> None:
    """Results are those of the plain tensor with the same numbers, before and after plain calls."""
    ordinary = FUNCTIONS[name].make()
    ordinary[operand] = kind(ordinary[operand]) * 1 if kind is zeros else ordinary[operand]
    want = right(name) if kind is not zeros else of(FUNCTIONS[name], ordinary, grad=False)
    for _ in range(3):
        got = FUNCTIONS[name].call(**replaced(name, operand, kind))
        check_equal([x.inner if isinstance(x, Wrapper) else x.resolve_neg() for x in got], want)
        of(FUNCTIONS[name], ordinary, grad=False)


def gradients_beside(name: str, operand: str, kind: Callable[[Tensor], Tensor]) -> None:
    """The gradients of all other operands are those of the plain call."""
    function = FUNCTIONS[name]
    want = plain(name)
    others = [key for key in function.grads if key != operand]
    for _ in range(3):
        tensors = {key: x.detach().requires_grad_(key in others) for key, x in function.make().items()}
        tensors[operand] = kind(tensors[operand])
        outputs = function.call(**tensors)
        got = torch.autograd.grad(outputs, [tensors[key] for key in others], [normal(*x.shape, seed=9 + n) for n, x in enumerate(outputs)])
        right_ones = dict(zip(function.grads, want[len(outputs) :], strict=True))
        check_equal([x.inner if isinstance(x, Wrapper) else x.resolve_neg() for x in got], [right_ones[key] for key in others])
        of(function, function.make())


def refused(name: str, operand: str, kind: Callable[[Tensor], Tensor], *words: str) -> None:
    for _ in range(3):
        check_refused(lambda: FUNCTIONS[name].call(**replaced(name, operand, kind)), *words)
        of(FUNCTIONS[name], FUNCTIONS[name].make(), grad=False)


def nested(x: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor(list(x.unbind(0)), layout=layout)


OPERANDS = {(name, operand): x for name, function in FUNCTIONS.items() for operand, x in function.make().items()}
WORDS = {
    "nested": (nested, "nested"),
    "jagged": (partial(nested, layout=torch.jagged), "nested", "layout"),
    "sparse": (lambda x: x.to_sparse(), "layout", "sparse_coo"),
    "meta": (lambda x: x.to("meta"), "meta"),
    "freed": (freed, "has no memory"),
    "fake": (lambda x: FakeTensorMode().from_tensor(x), "FakeTensor", "fake", "Fake"),
}
CELLS = {}
for (name, operand), x in OPERANDS.items():
    where = f"{name}; {operand}"
    CELLS[f"wrapper; {where}"] = partial(like_the_plain_one, name, operand, Wrapper)
    CELLS[f"parameter; {where}"] = partial(like_the_plain_one, name, operand, lambda x: torch.nn.Parameter(x, requires_grad=False))
    if FUNCTIONS[name].grads:
        CELLS[f"wrapper, gradients; {where}"] = partial(gradients_beside, name, operand, Wrapper)
        CELLS[f"negated, gradients; {where}"] = partial(gradients_beside, name, operand, negated)
    if x.is_floating_point():
        if operand.endswith("_cache"):  # which is written
            CELLS[f"negated; {where}"] = partial(refused, name, operand, negated, f"append to {operand}.resolve_neg()")
        else:
            CELLS[f"negated; {where}"] = partial(like_the_plain_one, name, operand, negated)
        if operand.endswith("_cache") or operand == "out":
            CELLS[f"zeros; {where}"] = partial(refused, name, operand, zeros, "ZeroTensors are immutable")
        else:
            CELLS[f"zeros; {where}"] = partial(like_the_plain_one, name, operand, zeros)
        CELLS[f"mkldnn; {where}"] = partial(refused, name, operand, lambda x: x.to_mkldnn(), "layout")
    for kind, (make, *words) in WORDS.items():
        if not (kind == "nested" and operand == "shown"):
            CELLS[f"{kind}; {where}"] = partial(refused, name, operand, make, *words)


def all_fake() -> None:
    """Traced on fake tensors alone, everything has its shape."""
    for name, function in FUNCTIONS.items():
        with FakeTensorMode() as mode:
            got = function.call(**{key: mode.from_tensor(x) for key, x in function.make().items()})
        assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in right(name)], name


def freed_and_copied() -> None:
    """Where attention copies before it calls the operators, torch would read memory that is not there."""
    for name in qkv():
        tensors = qkv()
        tensors[name] = tensors[name].transpose(1, 3).contiguous().transpose(1, 3)
        tensors[name].untyped_storage().resize_(0)
        check_refused(lambda tensors=tensors: tw.attention(**tensors), "has no memory")
        with torch.autocast("cpu", torch.bfloat16):
            check_refused(lambda name=name: tw.attention(**replaced("attention", name, freed)), "has no memory")


def functional() -> None:
    """A tensor that stands for one that is written to, outside of the transform that makes such."""
    for name in ("attention", "decode", "decode, every operand"):
        tensors = {key: torch._to_functional_tensor(x) for key, x in FUNCTIONS[name].make().items()}
        check_equal([torch._from_functional_tensor(x) for x in FUNCTIONS[name].call(**tensors)], right(name))


def distributed() -> None:
    """Refused beside plain tensors and alone, with the way out, which works."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.experimental import local_map

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        place = [Replicate()]
        for name, operand in OPERANDS:
            if name != "merge":  # which is torch's own operations
                refused(name, operand, lambda x: distribute_tensor(x, mesh, place), "DTensor")
        spread = [distribute_tensor(x, mesh, place) for x in qkv().values()]
        check_refused(lambda: tw.attention(*spread), "local_map")
        mapped = local_map(partial(tw.attention, causal=True), out_placements=place, in_placements=(place,) * 3)
        check_equal([mapped(*spread).to_local()], right("attention"))
        check_refused(lambda: tw.decode(*spread), "local_map(tilewise.decode")
        dist.destroy_process_group()


CELLS |= {"all fake": all_fake, "freed, copied": freed_and_copied, "functional": functional, "DTensor": distributed}


@SHARES
def test_cells(share):
    check_cells(__file__, share)
