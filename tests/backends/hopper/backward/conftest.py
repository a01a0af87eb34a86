"""Functions of the device, run on the host."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable

import pytest


@pytest.fixture(scope="session")
def in_python() -> Callable[[Iterable[str], dict], None]:
    """Makes functions of a kernel, which are arithmetic, functions of Python in a namespace: from their source, as the DSL changes the code of those
    that it has compiled.
    """

    def define(names: Iterable[str], namespace: dict) -> None:
        for name in names:
            (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(namespace[name])))).body
            function.decorator_list, function.returns = [], None
            for argument in function.args.args:
                argument.annotation = None
            exec(compile(ast.Module([function], []), name, "exec"), namespace)

    return define
