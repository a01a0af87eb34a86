"""Hooks on saved tensors: what they give back may lie otherwise, and gradients are those of the plain call; or it does not fit, and is refused."""

import tempfile
from functools import cache, partial
from pathlib import Path

import torch
from surroundings import FUNCTIONS, SHARES, check_cells, check_close, check_equal, check_refused, normal, of, plain
from test_tensors import Wrapper
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import tilewise as tw


def dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def spread(x: Tensor) -> Tensor:
    """The same numbers at every second place."""
    wide = torch.full((*x.shape, 2), 7, dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def turned(x: Tensor) -> Tensor:
    """The same numbers in the opposite order of dimensions."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def to_disk(x: Tensor) -> tuple[Path, bool]:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        torch.save(x, file)
    return Path(file.name), x.requires_grad


def from_disk(packed: tuple[Path, bool]) -> Tensor:
    path, requires_grad = packed
    x = torch.load(path)
    path.unlink()
    return x.requires_grad_(requires_grad)


def negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x) if x.is_floating_point() else x


HOOKS = {
    "copying": (dense, lambda x: x),
    "spread out": (spread, lambda x: x),
    "turned": (lambda x: x, turned),
    "negated": (lambda x: x, negated),
    "wrapped": (lambda x: x, lambda x: x if x.requires_grad else Wrapper(x)),
    "to disk": (to_disk, from_disk),
}


@cache
def right(name: str):
    return plain(name)


def same_gradients(name: str, hooks: str) -> None:
    for _ in range(3):
        with saved_tensors_hooks(*HOOKS[hooks]):
            got = of(FUNCTIONS[name], FUNCTIONS[name].make())
        check_equal(got, right(name))
        of(FUNCTIONS[name], FUNCTIONS[name].make())


def views(hooks: str) -> None:
    """q, k and v are views of one tensor, whose strides a copy has not."""

    def gradient(*hooks) -> Tensor:
        x = normal(2, 33, 3, 4, 16).requires_grad_()
        with saved_tensors_hooks(*hooks) if hooks else torch.enable_grad():
            o = tw.attention(*x.unbind(2), causal=True)
        return torch.autograd.grad(o, x, normal(*o.shape, seed=1))[0]

    want = gradient()
    for _ in range(3):
        check_equal([gradient(*HOOKS[hooks]), gradient()], [want, want])


UNFIT = {
    "another dtype": lambda x: x.bfloat16() if x.is_floating_point() else x,
    "another shape": lambda x: x[:, :1] if x.dim() == 4 else x,
    "another sink": lambda x: x[:1] if x.dim() == 1 and x.is_floating_point() else x,
    "a nested tensor": lambda x: torch.nested.nested_tensor(list(x.unbind(0))) if x.dim() == 4 else x,
}


def unfit(name: str, how: str) -> None:
    for _ in range(3):
        with saved_tensors_hooks(UNFIT[how], lambda x: x):
            check_refused(lambda: of(FUNCTIONS[name], FUNCTIONS[name].make()), "saved_tensors_hooks")
        of(FUNCTIONS[name], FUNCTIONS[name].make())


def freed_meanwhile() -> None:
    """The memory of k goes before the gradient comes, and comes back for the second."""
    tensors = {name: x.requires_grad_() for name, x in FUNCTIONS["attention"].make().items()}
    for _ in range(3):
        o = tw.attention(**tensors, causal=True)
        k, storage = tensors["k"].detach().clone(), tensors["k"].untyped_storage()
        size = storage.size()
        storage.resize_(0)
        run = partial(torch.autograd.grad, o, list(tensors.values()), normal(*o.shape, seed=9), retain_graph=True)
        check_refused(run, "has no memory")
        storage.resize_(size)
        tensors["k"].data.copy_(k)
        tensors["v"].data.copy_(FUNCTIONS["attention"].make()["v"])
        check_equal(run(), right("attention")[1:])


def compiled(name: str) -> None:
    """The operator's own gradient."""
    function = FUNCTIONS[name]
    run = function._replace(call=torch.compile(function.call, backend="aot_eager", fullgraph=True))
    with saved_tensors_hooks(*HOOKS["copying"]):
        check_close(of(run, function.make()), right(name))


WITH_GRADIENTS = [name for name, function in FUNCTIONS.items() if function.grads]
CELLS = {f"{name}; {hooks}": partial(same_gradients, name, hooks) for name in WITH_GRADIENTS for hooks in HOOKS}
CELLS |= {f"views; {hooks}": partial(views, hooks) for hooks in HOOKS}
CELLS |= {
    f"{name}; {how}": partial(unfit, name, how) for name in ("attention", "attention, every operand", "attention_varlen") for how in UNFIT
}
del CELLS["attention; another sink"]  # it has none
CELLS |= {f"{name}; compiled": partial(compiled, name) for name in ("attention", "attention, lse")}
CELLS["freed"] = freed_meanwhile


@SHARES
def test_cells(share):
    check_cells(__file__, share)
