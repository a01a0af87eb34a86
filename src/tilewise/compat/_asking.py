"""Models of transformers and diffusers that never ask for an implementation of attention, and so never run on tilewise: told by their source."""

import inspect
import re
from pathlib import Path
from typing import NamedTuple

from torch import nn

from tilewise.compat import _finder
from tilewise.errors import UnsupportedError


class Peer(NamedTuple):
    """How a peer's models ask: by this function, in these files below its `models`."""

    asks: str
    files: tuple[str, ...]
    of_attention: re.Pattern  # what files with layers of attention have
    by_folder: bool  # a model is a folder, not a file


PEERS = {
    "transformers": Peer("ALL_ATTENTION_FUNCTIONS", ("*/modeling_*.py",), re.compile(r"^class \w*Attention\w*\(", re.MULTILINE), True),
    "diffusers": Peer(
        "dispatch_attention_fn",
        ("transformers/*.py", "unets/*.py"),
        re.compile(r"^class \w*Attention\w*\(|^from .*\battention\w* import|\bAttention\(", re.MULTILINE),
        False,
    ),
}
OF_MODELS = re.compile(r"^class \w+\([^)]*\b(PreTrainedModel|\w*ModelMixin|\w+Model)\b", re.MULTILINE)
BESIDE = re.compile(r"^from \.(\w+) import", re.MULTILINE)
NAMED = re.compile(r"Attn|Attention")
COMPUTES = re.compile(r"\bsoftmax\(|scaled_dot_product_attention\(|\bbmm\(|\beinsum\(")


def silent(name: str) -> tuple[str, ...]:
    """The models of an installed peer with no file that asks; empty where the peer is not here. Nothing is imported."""
    peer, spec = PEERS[name], _finder.real_spec(name)
    if spec is None or spec.origin is None:
        return ()
    root, asking, others = Path(spec.origin).parent / "models", set(), set()
    for file in sorted(found for pattern in peer.files for found in root.glob(pattern)):
        text = file.read_text(encoding="utf-8", errors="replace")
        beside = [file.with_name(f"{each}.py") for each in BESIDE.findall(text)]  # with the layers it is made of
        asks = peer.asks in text or any(peer.asks in each.read_text(encoding="utf-8") for each in beside if each.is_file())
        if asks or (OF_MODELS.search(text) and peer.of_attention.search(text)):
            (asking if asks else others).add(file.parent.name if peer.by_folder else file.stem)
    return tuple(sorted(others - asking))


def check(model: nn.Module, name: str, way_out: str) -> None:
    """UnsupportedError that names the classes of a model's layers, and of their processors, which compute attention without asking."""
    layers = (getattr(module, "processor", None) or module for module in model.modules())  # which diffusers' layers leave it to
    kinds = {type(each) for each in layers if NAMED.search(type(each).__name__) and not type(each).__module__.startswith("torch.")}
    sources = {kind.__name__: _source(kind) for kind in kinds}
    found = [each for each, source in sources.items() if COMPUTES.search(source) and PEERS[name].asks not in source]
    if found:
        raise UnsupportedError(
            f"{type(model).__name__} computes attention by itself in {', '.join(sorted(found))}, and does not ask {name} for an implementation; "
            f"{way_out}"
        )


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
