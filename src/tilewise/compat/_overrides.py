"""How torch itself knows a Python function that stands in for one of its own: what may override it, what scripts it, and its tables of functions.

torch's own functions offer each call to the modes and subclasses of `__torch_function__`, which tell them apart by identity.
"""

import functools
from collections.abc import Callable
from types import CellType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.compiler import is_compiling
from torch.jit._builtins import _register_builtin

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_has = torch.overrides.has_torch_function_variadic


def _overridden(*args) -> bool:
    """Whether a mode is on, or one of the arguments overrides functions."""
    if not is_compiling():
        return _has(*args)
    if (
        torch._C._len_torch_function_stack() > 0 and torch._C._is_torch_function_mode_enabled()
    ):  # traced, the other looks at arguments alone
        return True
    return torch._C._is_torch_function_enabled() and _has(*args)


def overridable(
    theirs: Callable,
    but: Callable[[Any], bool],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """The decorated function can be overridden as `theirs`, for which it stands in, by all arguments `but` those it knows better.

    Who overrides is offered the decorated function, which torch's name stands for by then. Those that took `theirs` along when torch's name still
    stood for it, and torch's own ragged tensors, are offered that.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
            if _overridden(*args, *options.values()):
                relevant = [x for x in (*args, *options.values()) if not but(x)]
                if _overridden(*relevant):
                    offered = call if is_compiling() else _offered(call, theirs, relevant)
                    return torch.overrides.handle_torch_function(offered, relevant, *args, **options)
            return function(*args, **options)

        return call

    return decorate


def _offered(ours: Callable, theirs: Callable, relevant: list) -> Callable:
    """Which of the two the first of those who override looks for."""
    modes = torch.overrides._get_current_function_mode_stack()
    if modes:
        return theirs if _holds(modes[-1], theirs) else ours
    ragged = any(isinstance(x, torch.Tensor) and x.is_nested for x in relevant)
    return theirs if ragged or _holds(torch.overrides._get_overloaded_args(relevant)[0], theirs) else ours


def _holds(handler: Any, function: Callable) -> bool:
    """Whether a mode or an overriding object compares with `function`, as an attribute or a name in its `__torch_function__`, or by a table there."""
    method = getattr(type(handler).__torch_function__, "__func__", type(handler).__torch_function__)
    code = getattr(method, "__code__", None)
    values = [*getattr(handler, "__dict__", {}).values(), *(x for each in type(handler).__mro__[:-1] for x in vars(each).values())]
    if code is not None:
        values += [method.__globals__[name] for name in code.co_names if name in method.__globals__]
        values += [cell.cell_contents for cell in method.__closure__ or () if cell != _EMPTY]
    return any(
        x is function or (isinstance(x, dict | set | frozenset | list | tuple) and any(each is function for each in x)) for x in values
    )


_EMPTY = CellType()  # a cell that holds nothing yet


def scripted_as(ours: Callable, operator: str) -> None:
    """Let torch.jit.script take `ours` for torch's operator, "aten::...", as it takes the function that `ours` stands in for."""
    _register_builtin(ours, operator)


def renew_tables() -> None:
    """Let torch list its overridable functions anew, which it keeps by identity, after a name of its own has come to stand for another."""
    for table in (torch.overrides.get_testing_overrides, torch.overrides._get_overridable_functions, torch.overrides._get_tensor_methods):
        if hasattr(table, "cache_clear"):
            table.cache_clear()
