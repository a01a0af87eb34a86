"""Answering `import flash_attn`: modules and metadata under a peer's name, switched on and off; a real install is never replaced.

A finder in `sys.meta_path` gives out modules that hold the names of ours, and for `importlib.metadata` a distribution that says which they are. It
stands last, so that whatever is really there wins. FlashAttention-4 alone leaves `flash_attn` a namespace package: then it stands first, and its
`flash_attn` searches their directories too, so that `flash_attn.cute` remains theirs.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType

from tilewise.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What an install answers to: modules by name with those of ours that they take names from, and the distribution."""

    name: str
    package: str  # looked for as a real install
    distribution: str
    version: str
    modules: dict[str, tuple[str, ...]]

    @property
    def top_level(self) -> str:
        return self.package.partition(".")[0]

    @property
    def top_levels(self) -> list[str]:
        return [name for name in self.modules if "." not in name]


OURS = "tilewise.compat."
KEPT = ("__version__", "__all__", "__doc__", "__getattr__")
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="flash_attn",
            package="flash_attn",
            distribution="flash-attn",
            version="2.8.4+tilewise",
            modules={
                "flash_attn": ("flash_attn",),
                "flash_attn.flash_attn_interface": ("flash_attn", "flash_attn_passes", "flash_attn_functions"),
                "flash_attn.bert_padding": ("bert_padding",),
                "flash_attn.layers": (),
                "flash_attn.layers.rotary": ("rotary",),
                "flash_attn.ops": (),  # which vLLM looks for wherever it finds flash_attn
                "flash_attn.ops.triton": (),
                "flash_attn.ops.triton.rotary": ("rotary",),
                "flash_attn_2_cuda": ("flash_attn_2_cuda",),
            },
        ),
        Peer(
            name="flash_attn_3",
            package="flash_attn_interface",
            distribution="flash_attn_3",
            version="3.0.0+tilewise",
            modules={
                "flash_attn_interface": ("flash_attn_3", "flash_attn_3_passes"),
                "flash_attn_3": ("flash_attn_3",),  # which transformers, diffusers and Transformer Engine look for
                "flash_attn_3.flash_attn_interface": ("flash_attn_3", "flash_attn_3_passes"),
            },
        ),
        Peer(
            name="flash_attn_cute",
            package="flash_attn.cute",
            distribution="flash-attn-4",
            version="4.0.0+tilewise",
            modules={
                "flash_attn": (),
                "flash_attn.cute": ("flash_attn_cute",),
                "flash_attn.cute.interface": ("flash_attn_cute",),
            },
        ),
        Peer(
            name="sageattention",
            package="sageattention",
            distribution="sageattention",
            version="2.2.0+tilewise",
            modules={"sageattention": ("sageattention",), "sageattention.core": ("sageattention",)},
        ),
    )
}


class Distribution(metadata.Distribution):
    """Metadata of a peer that is answered: name, version and top-level module; it has no files."""

    def __init__(self, peer: Peer):
        self.peer = peer

    def read_text(self, filename):
        summary = "Summary: answered by tilewise.compat"
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {self.peer.distribution}\nVersion: {self.peer.version}\n{summary}\n",
            "top_level.txt": "".join(f"{name}\n" for name in self.peer.top_levels),
        }
        return texts.get(filename)

    def locate_file(self, path):
        return Path(__file__).parent / path


@dataclass(eq=False, repr=False)
class _Finder(Loader):
    """The entry in sys.meta_path; `searched` are directories of a namespace package that lies below our `flash_attn`."""

    installed: dict[str, Peer] = field(default_factory=dict)
    searched: dict[str, list[str]] = field(default_factory=dict)
    displaced: dict[str, ModuleType] = field(default_factory=dict)  # modules of sys.modules that ours took the place of

    def sources(self, fullname: str) -> tuple[str, ...] | None:
        """Those of our modules that the module takes names from; None where it is not ours to give."""
        found = [peer.modules[fullname] for peer in self.installed.values() if fullname in peer.modules]
        return tuple(dict.fromkeys(name for names in found for name in names)) if found else None

    def find_spec(self, fullname, path=None, target=None):
        if self.sources(fullname) is None:
            return None
        inside = any(name.startswith(f"{fullname}.") for peer in self.installed.values() for name in peer.modules)
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=f"tilewise.compat ({', '.join(self.installed)})", is_package=inside)
        if inside:
            spec.submodule_search_locations = list(self.searched.get(fullname, ()))
        return spec

    def find_distributions(self, context=None) -> Iterator[metadata.Distribution]:
        wanted = None if context is None or context.name is None else _normal(context.name)
        for peer in self.installed.values():
            if wanted in (None, _normal(peer.distribution)):
                yield Distribution(peer)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        for name in self.sources(module.__name__) or ():
            ours = importlib.import_module(f"{OURS}{name}")
            module.__dict__.update(
                {key: value for key, value in vars(ours).items() if key in KEPT or not (key[:2] == "__" or _is_module(value))}
            )
            if names := module.__dict__.get("__all__"):  # a module among them is one of the package's own, or is left out
                module.__dict__["__all__"] = [key for key in names if not _is_module(getattr(ours, key, None))]
        inside = f"{module.__name__}."
        for loaded in [name for name in sys.modules if name.startswith(inside) and "." not in name[len(inside) :]]:
            setattr(module, loaded[len(inside) :], sys.modules[loaded])  # theirs, imported before
        for child in [name for peer in self.installed.values() for name in peer.modules if name.rpartition(".")[0] == module.__name__]:
            importlib.import_module(child)

    def forget(self) -> None:
        """Take our modules out of sys.modules, and out of the packages that hold them."""
        for name in [name for name, module in sys.modules.items() if _is_ours(module)]:
            module = sys.modules.pop(name)
            parent, _, last = name.rpartition(".")
            if vars(sys.modules.get(parent, object)).get(last) is module:
                delattr(sys.modules[parent], last)


FINDER = _Finder()


def _normal(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def installed(name: str) -> bool:
    return name in FINDER.installed


def real_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module of that name is found without us, importing nothing; of a module within a package, by the package's directories."""
    spec, path, full = None, None, ""
    for part in name.split("."):
        full = f"{full}.{part}".lstrip(".")
        loaded = sys.modules.get(full)
        known = FINDER.displaced.get(full) if loaded is None or _is_ours(loaded) else loaded
        spec = getattr(known, "__spec__", None)
        if spec is None:
            finders = (finder for finder in sys.meta_path if finder is not FINDER and hasattr(finder, "find_spec"))
            spec = next((found for finder in finders if (found := finder.find_spec(full, path)) is not None), None)
        if spec is None and known is not None:
            return importlib.machinery.ModuleSpec(full, None, origin="sys.modules")
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def real_version(distribution: str) -> str | None:
    """The version of a distribution that is really installed, None where there is none."""
    found = (
        each
        for finder in sys.meta_path
        if finder is not FINDER and hasattr(finder, "find_distributions")
        for each in _of(finder, distribution)
    )
    return next((each.version for each in found), None)


def _of(finder, distribution: str) -> Iterator[metadata.Distribution]:
    return finder.find_distributions(metadata.DistributionFinder.Context(name=distribution))


def _namespace(spec: importlib.machinery.ModuleSpec) -> list[str] | None:
    """The directories of a namespace package; None for all else."""
    return spec.submodule_search_locations if spec.origin is None else None


def _is_module(value) -> bool:
    return isinstance(value, ModuleType)


def _is_ours(module: ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "loader", None) is FINDER


def install(name: str) -> None:
    """Answer to the peer called `name` from now on; UnsupportedError where it is really there. Once is as good as twice."""
    peer = PEERS[name]
    if installed(name):
        return
    for package in (peer.package, *(each for each in peer.top_levels if each != peer.top_level)):
        found = real_spec(package)
        if found is not None and _namespace(found) is None:
            where = found.origin or "sys.modules"
            raise UnsupportedError(
                f"compat.install({name!r}): a real {package} is there ({where}), which is not replaced; uninstall {peer.distribution}, "
                f"or import the functions by name: from tilewise.compat import {name}"
            )
    over = real_spec(peer.top_level)
    directories = None if over is None else _namespace(over)
    FINDER.forget()  # what is shared with another peer is made anew, with the names of both
    if directories is not None:
        FINDER.searched[peer.top_level] = list(directories)
        if peer.top_level in sys.modules:
            FINDER.displaced[peer.top_level] = sys.modules.pop(peer.top_level)
    FINDER.installed[name] = peer
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
    sys.meta_path.insert(0 if FINDER.searched else len(sys.meta_path), FINDER)


def uninstall(name: str) -> None:
    """Leave sys.modules, sys.meta_path and metadata as they were before `install`."""
    if FINDER.installed.pop(name, None) is None:
        return
    FINDER.forget()
    if FINDER.installed:
        return
    sys.meta_path.remove(FINDER)
    sys.modules.update(FINDER.displaced)
    packages = set(FINDER.searched)
    FINDER.displaced.clear()
    FINDER.searched.clear()
    for loaded in [loaded for loaded in sys.modules if loaded.count(".") == 1 and loaded.partition(".")[0] in packages]:
        parent, _, last = loaded.partition(".")
        setattr(importlib.import_module(parent), last, sys.modules[loaded])  # theirs, first imported below our package
