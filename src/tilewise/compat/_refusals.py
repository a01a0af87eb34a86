"""What a call of a peer's function raises here: errors of both families, with the peer's argument names, the layer and the way out."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.compiler import is_compiling

from tilewise.errors import ShapeError, UnsupportedError

Function = TypeVar("Function", bound=Callable)
PACKAGE = __name__.rpartition(".")[0] + "."


class ArgumentError(ShapeError, RuntimeError):
    """A wrong argument: a ShapeError, as tilewise raises, and a RuntimeError, as the peers' compiled code does."""


def translate_errors(layer: str | None = None, /, **renamed: str) -> Callable[[Function], Function]:
    """Errors of the decorated function name it (as `layer`, where that is given) and its own arguments, `renamed` from those of tilewise.

    A ValueError becomes an ArgumentError; an UnsupportedError, which is a RuntimeError already, stays one. torch's compiler sees the text as it was.
    """
    words = re.compile(rf"\b({'|'.join(renamed)})\b") if renamed else None

    def decorate(function):
        begin = f"{layer or f'{function.__module__}.{function.__name__}'}: "

        def told(error: Exception) -> str:
            if is_compiling():  # which traces no operation on a text that holds lengths, and neither str(error) nor str of a string
                return error.args[0]
            text = "".join(map(str, error.args[:1])).removeprefix(begin)
            if text.startswith(PACKAGE):  # of another drop-in, which this one calls
                text = text.partition(": ")[2]
            return begin + (words.sub(lambda found: renamed[found[1]], text) if words else text)

        return _guarded(function, told)

    return decorate


# Who calls a function with whatever it takes reads __code__ or inspect.getfullargspec, which know nothing of __wrapped__ or __signature__: the guard
# has the parameters of what it guards. torch 2.11 cannot trace `raise ... from`.
GUARD = """\
def guard(_function, _told):
    def {name}{parameters}:
        try:
            return _function({arguments})
        except UnsupportedError as _error:
            raise UnsupportedError(_told(_error))
        except ValueError as _error:
            raise ArgumentError(_told(_error))
    return {name}
"""


def _guarded(function: Function, told: Callable[[Exception], str]) -> Function:
    """`function` behind a function of the same parameters and defaults, which raises its errors as `told`."""
    taken = inspect.signature(function).parameters.values()
    parameters = inspect.Signature([each.replace(default=each.empty, annotation=each.empty) for each in taken])
    passed = {inspect.Parameter.KEYWORD_ONLY: "{0}={0}", inspect.Parameter.VAR_POSITIONAL: "*{0}", inspect.Parameter.VAR_KEYWORD: "**{0}"}
    arguments = ", ".join(passed.get(each.kind, "{0}").format(each.name) for each in taken)
    text = GUARD.format(name=function.__name__, parameters=parameters, arguments=arguments)
    made: dict[str, Any] = {}
    exec(compile(text, f"<{__name__} of {function.__name__}>", "exec"), globals(), made)
    call = made["guard"](function, told)
    functools.update_wrapper(call, function)
    given = {each.name: each.default for each in taken if each.default is not each.empty}
    by_keyword = {each.name for each in taken if each.kind is each.KEYWORD_ONLY}
    call.__defaults__ = tuple(x for name, x in given.items() if name not in by_keyword) or None
    call.__kwdefaults__ = {name: x for name, x in given.items() if name in by_keyword} or None
    return call


def refuse(given: Mapping[str, Any], ways_out: Mapping[str, str]) -> None:
    """UnsupportedError for the first argument in `given` that is not None; `ways_out` says by its name what to do instead."""
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(f"{name} is not supported; {ways_out[name]}")
