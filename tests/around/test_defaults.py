"""torch's default dtype and device, with and without autograd, are nobody's business: results are the same bits."""

from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import product

import torch
from surroundings import FUNCTIONS, SHARES, check_cells, check_equal, of, plain
from torch.autograd.graph import saved_tensors_hooks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DEVICES = {"cpu": nullcontext, "meta": lambda: torch.device("meta")}
MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
HOOKS = {"no": nullcontext, "copying": lambda: saved_tensors_hooks(torch.clone, lambda x: x)}


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@cache
def right(name: str, grad: bool):
    return plain(name, grad)


def cell(name: str, dtype: torch.dtype, device: str, mode: str, hooks: str) -> None:
    grad = mode == "grad"
    want = right(name, grad)
    for _ in range(3):  # the first is bound, the others are cached
        with default_dtype(dtype), DEVICES[device](), MODES[mode](), HOOKS[hooks]():
            got = of(FUNCTIONS[name], FUNCTIONS[name].make(), grad)
        check_equal([x.clone() for x in got], want)


CELLS = {
    f"{name}; {dtype}; {device}; {mode}; {hooks} hooks": partial(cell, name, dtype, device, mode, hooks)
    for name, dtype, device, mode, hooks in product(FUNCTIONS, DTYPES, DEVICES, MODES, HOOKS)
    if mode == "grad" or hooks == "no"
}


@SHARES
def test_cells(share):
    check_cells(__file__, share)
