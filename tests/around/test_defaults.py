"""torch's default dtype and device, with and without autograd, are nobody's business: results are the same bits."""

from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import product

import torch
from surroundings import FUNCTIONS, check_cells, check_equal, of, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DEVICES = {"cpu": nullcontext, "meta": lambda: torch.device("meta")}
MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


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


def cell(name: str, dtype: torch.dtype, device: str, mode: str) -> None:
    grad = mode == "grad"
    want = right(name, grad)
    for _ in range(3):  # the long way, then the short ones
        with default_dtype(dtype), DEVICES[device](), MODES[mode]():
            got = of(FUNCTIONS[name], FUNCTIONS[name].make(), grad)
        check_equal([x.clone() for x in got], want)


CELLS = {
    f"{name}; {dtype}; {device}; {mode}": partial(cell, name, dtype, device, mode)
    for name, dtype, device, mode in product(FUNCTIONS, DTYPES, DEVICES, MODES)
}


def test_cells():
    check_cells(__file__)
