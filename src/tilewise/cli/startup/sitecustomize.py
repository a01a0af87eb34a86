"""What Python imports first in every process below `tilewise run`: it waits for torch, transformers and diffusers, and then lets tilewise serve them.

`tilewise run` puts this file's folder on PYTHONPATH. Nothing is imported here that a program did not ask for, so that processes without torch start
as fast as they did. A module of this name that stood on the path is run after it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable


def serve() -> None:
    from tilewise.compat import everywhere

    everywhere.serve()


def serve_torch() -> None:
    if "tilewise" not in sys.modules:  # else it asked for torch, and serves when it is there
        serve()


def serve_transformers() -> None:
    import tilewise.compat.transformers

    tilewise.compat.transformers.register()


def serve_diffusers() -> None:
    import tilewise.compat.diffusers

    tilewise.compat.diffusers.register()


STEPS: dict[str, Callable[[], None]] = {
    "torch": serve_torch,
    "tilewise": serve,
    "transformers.modeling_utils": serve_transformers,
    "diffusers.models.attention_dispatch": serve_diffusers,
}


class Then(importlib.abc.Loader):
    """A module's own loader, and a step when the module is there."""

    def __init__(self, loader: importlib.abc.Loader, step: Callable[[], None]) -> None:
        self.loader, self.step = loader, step

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader  # as if nobody had been here
        self.loader.exec_module(module)
        try:
            self.step()
        except Exception as error:  # the program goes on as it would without us
            print(f"tilewise run: {module.__name__} is not served: {type(error).__name__}: {error}", file=sys.stderr)


class Waiting(importlib.abc.MetaPathFinder):
    """First in sys.meta_path: finds the modules of STEPS by the others."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in STEPS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None and not isinstance(spec.loader, Then):
            spec.loader = Then(spec.loader, STEPS[fullname])
        return spec


def run_the_next() -> None:
    """The sitecustomize that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if not any(type(finder).__name__ == Waiting.__name__ and type(finder).__module__ == __name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, Waiting())
    run_the_next()
