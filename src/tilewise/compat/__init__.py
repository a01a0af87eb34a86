"""What people already call, answered by tilewise; each peer is imported only in the file that is named after it.

Nothing here computes attention: these modules translate arguments, check them, and refuse what cannot be had, saying what to do instead.
Import them by name, `from tilewise.compat import flash_attn`, which changes nothing elsewhere; `install` makes `import flash_attn` find them.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from tilewise.compat import _asking, _finder
from tilewise.errors import UnsupportedError

__all__ = ["Integration", "install", "silent_models", "status", "uninstall"]


@dataclass(frozen=True, kw_only=True)
class Integration:
    """One peer: `module` is looked for, `version` is that of its distribution (None where there is none), `tested` the one it was read or run
    in, `use` how to have it, `installed` whether `install` answers for it now."""

    name: str
    module: str
    importable: bool
    version: str | None
    tested: str
    use: str
    installed: bool


_TABLE = {  # the file here: (module, distribution, versions tested)
    "flash_attn": ("flash_attn", "flash-attn", "2.8.4"),
    "flash_attn_3": ("flash_attn_interface", "flash_attn_3", "source of 2026-08-15"),
    "flash_attn_cute": ("flash_attn.cute", "flash-attn-4", "source of 2026-08-15"),
    "sageattention": ("sageattention", "sageattention", "source of 2.2.0"),
    "transformers": ("transformers", "transformers", "5.24.0"),
    "sdpa": ("torch", "torch", "2.13.0, 2.14.1"),
    "torch_flash": ("torch", "torch", "2.13.0"),
    "flex": ("torch", "torch", "2.13.0, 2.14.1"),
    "diffusers": ("diffusers", "diffusers", "0.42.1"),
    "xformers": ("xformers", "xformers", "0.0.35"),
    "cuequivariance": ("cuequivariance_torch", "cuequivariance-torch", "source of 0.13.0"),
    "vllm": ("vllm", "vllm", "0.26.0"),
    "sglang": ("sglang", "sglang", "0.5.17"),
}

_USE = {  # of those that `install` has not; `from tilewise.compat import transformers` would hide the real one
    "transformers": 'tilewise.compat.transformers.register(), then attn_implementation="tilewise"',
    "sdpa": "with tilewise.compat.sdpa.patch(): ...",
    "torch_flash": 'tilewise.compat.torch_flash.register(), then torch.nn.attention.activate_flash_attention_impl("tilewise")',
    "flex": "from tilewise.compat.flex import flex_attention",
    "diffusers": 'tilewise.compat.diffusers.register(), then set_attention_backend("tilewise")',
    "xformers": "from tilewise.compat.xformers import memory_efficient_attention",
    "cuequivariance": "from tilewise.compat.cuequivariance import triangle_attention",
    "vllm": 'vllm.LLM(..., attention_backend="CUSTOM")',
    "sglang": 'sglang.Engine(..., attention_backend="tilewise")',
}


def _use(name: str) -> str:
    return _USE.get(name) or f"from {__name__} import {name}, or compat.install({name!r})"


def install(*names: str) -> None:
    """Answer `import flash_attn` ("flash_attn"), `import flash_attn_interface` ("flash_attn_3"), `import flash_attn.cute` ("flash_attn_cute"),
    `import sageattention` ("sageattention").

    Also `importlib.util.find_spec` and `importlib.metadata` answer for them. Call it before whatever asks: libraries remember what they found.
    `uninstall` takes it back.

    Raises:
        ValueError: no name, or one that is none of these.
        UnsupportedError: a real package of that name is there; none of `names` is then installed by this call.
    """
    if not names:
        raise ValueError(f"compat.install takes one or more names of {', '.join(_finder.PEERS)}, got none")
    _check(names, "install")
    before = [name for name in names if _finder.installed(name)]
    try:
        for name in names:
            _finder.install(name)
    except UnsupportedError:
        for name in set(names).difference(before):
            _finder.uninstall(name)
        raise


def uninstall(*names: str) -> None:
    """Take `install` back, of all names where none is given; sys.modules, sys.meta_path and metadata are as before. Not installed is no error."""
    _check(names, "uninstall")
    for name in names or tuple(_finder.PEERS):
        _finder.uninstall(name)


def status() -> list[Integration]:
    """Every integration of this package, and whether its peer is here; peers are looked up, never imported."""
    return [
        Integration(
            name=name,
            module=module,
            importable=_finder.real_spec(module) is not None,
            version=_finder.real_version(distribution),
            tested=tested,
            use=_use(name),
            installed=_finder.installed(name),
        )
        for name, (module, distribution, tested) in _TABLE.items()
        if find_spec(f"{__name__}.{name}") is not None
    ]


def silent_models() -> dict[str, tuple[str, ...]]:
    """The models of transformers and diffusers that compute attention by themselves, so that naming an implementation changes nothing for them.

    Told by the source of what is installed, which is not imported. `tilewise.compat.transformers.check(model)` tells it of a model, and likewise
    that of diffusers.
    """
    return {name: _asking.silent(name) for name in _asking.PEERS}


def _check(names: tuple[str, ...], function: str) -> None:
    for name in names:
        if name not in _finder.PEERS:
            way_out = f"; use {name} by {_use(name)}" if name in _TABLE else ""
            raise ValueError(f"compat.{function} takes names of {', '.join(_finder.PEERS)}, got {name!r}{way_out}")
