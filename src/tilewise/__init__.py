"""tilewise: exact attention that never stores the score matrix. Shapes are (batch, seqlen, heads, head_dim)."""

import importlib
from typing import TYPE_CHECKING, Any

from tilewise.api import attention, explain
from tilewise.decoding import append, decode
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import (
    Band,
    Causal,
    ChunkedCausal,
    Chunks,
    Dense,
    Documents,
    FirstKeys,
    Full,
    Mask,
    Padding,
    Part,
    PerHead,
    PrefixLM,
    PrefixTree,
    Slices,
    SlidingWindow,
)
from tilewise.merge import merge
from tilewise.quantising import quantise
from tilewise.varlen import attention_varlen

if TYPE_CHECKING:
    from tilewise import distributed as distributed

__version__ = "0.2.0"

__all__ = [
    "Band",
    "Causal",
    "ChunkedCausal",
    "Chunks",
    "Dense",
    "Documents",
    "FirstKeys",
    "Full",
    "Mask",
    "Padding",
    "Part",
    "PerHead",
    "PrefixLM",
    "PrefixTree",
    "ShapeError",
    "Slices",
    "SlidingWindow",
    "UnsupportedError",
    "append",
    "attention",
    "attention_varlen",
    "decode",
    "explain",
    "merge",
    "quantise",
]


def __getattr__(name: str) -> Any:
    """`tilewise.distributed`, which imports torch.distributed, when it is first asked for."""
    if name == "distributed":
        return importlib.import_module("tilewise.distributed")
    raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
