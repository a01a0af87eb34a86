"""What a call of a peer's function raises here: errors of both families, with the peer's argument names, the layer and the way out."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.compiler import is_compiling

from tilewise.errors import ShapeError, UnsupportedError

Function = TypeVar("Function", bound=Callable)


class ArgumentError(ShapeError, RuntimeError):
    """A wrong argument: a ShapeError, as tilewise raises, and a RuntimeError, as the peers' compiled code does."""


def answers(layer: str | None = None, /, **renamed: str) -> Callable[[Function], Function]:
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
            return begin + (words.sub(lambda found: renamed[found[1]], text) if words else text)

        @functools.wraps(function)
        def call(*args, **options):
            try:
                return function(*args, **options)
            except UnsupportedError as error:
                raise UnsupportedError(told(error))  # noqa: B904 (torch 2.11 cannot trace `from`)
            except ValueError as error:
                raise ArgumentError(told(error))  # noqa: B904

        return call

    return decorate


def refuse(given: Mapping[str, Any], ways_out: Mapping[str, str]) -> None:
    """UnsupportedError for the first argument in `given` that is not None; `ways_out` says by its name what to do instead."""
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(f"{name} is not supported; {ways_out[name]}")
