"""The compiler is told what to keep before anything can import it, as it reads its environment once; and these tests want what it compiles."""

import ast
import inspect
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable

import pytest

from tilewise.sm90.jit import why_no_compiler

if not why_no_compiler() and "cutlass" not in sys.modules:
    _kept = tempfile.TemporaryDirectory(prefix="tilewise-compile-")  # lives as long as this module does
    os.environ.update(CUTE_DSL_ARCH="sm_90a", CUTE_DSL_KEEP="cubin", CUTE_DSL_DUMP_DIR=_kept.name, TILEWISE_CACHE="0")


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
