"""What the tests of torch's attention by tilewise share: inputs, signatures against schemas, torch's dispatcher as it is."""

import inspect

import torch
from torch import Tensor


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check_signature(function, operator) -> None:
    """The names, the defaults, and what must be named, of an operator's schema; behind these, what a later torch has, by name with a default."""
    kinds = inspect.Parameter
    arguments, parameters = operator._schema.arguments, inspect.signature(function).parameters
    assert len(arguments) <= len(parameters)
    assert all(x.kind == kinds.KEYWORD_ONLY and x.default is None for x in list(parameters.values())[len(arguments) :])
    for argument, (name, parameter) in zip(arguments, parameters.items(), strict=False):
        assert name == argument.name
        assert parameter.default == (argument.default_value if argument.has_default_value() else kinds.empty), name
        assert parameter.kind == (kinds.KEYWORD_ONLY if argument.kwarg_only else kinds.POSITIONAL_OR_KEYWORD), name


def kernels(names) -> list[str]:
    """The kernel of each dispatch key, for each of these aten operators, as torch's dispatcher lists them."""
    return [torch._C._dispatch_dump_table(f"aten::{name}") for name in names]
