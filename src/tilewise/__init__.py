"""tilewise: exact attention that never stores the score matrix. Shapes are (batch, seqlen, heads, head_dim)."""

from tilewise.api import attention, attention_varlen, explain
from tilewise.decoding import append, decode
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import (
    Band,
    Causal,
    ChunkedCausal,
    Dense,
    Documents,
    FirstKeys,
    Full,
    Mask,
    Padding,
    PerHead,
    PrefixLM,
    Slices,
    SlidingWindow,
)
from tilewise.merge import merge
from tilewise.quantising import quantise

__version__ = "0.1.0"

__all__ = [
    "Band",
    "Causal",
    "ChunkedCausal",
    "Dense",
    "Documents",
    "FirstKeys",
    "Full",
    "Mask",
    "Padding",
    "PerHead",
    "PrefixLM",
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
