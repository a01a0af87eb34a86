"""What a mask is: the language of its constructors, its text, its bands and bits, the tiles that it touches."""

from tilewise.masks.bands import Band, Bands
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.constructors import (
    Causal,
    ChunkedCausal,
    Chunks,
    DeviceDocuments,
    Documents,
    FirstKeys,
    PerHead,
    PrefixLM,
    Slices,
    SlidingWindow,
    parse,
)
from tilewise.masks.dense import Dense
from tilewise.masks.mask import Full, Mask, Plane
from tilewise.masks.padding import Padding
from tilewise.masks.part import Part
from tilewise.masks.trees import PackedTree, PrefixTree

__all__ = [
    "Band",
    "Bands",
    "Bitmap",
    "Causal",
    "ChunkedCausal",
    "Chunks",
    "Dense",
    "DeviceDocuments",
    "Documents",
    "FirstKeys",
    "Full",
    "Mask",
    "PackedTree",
    "Padding",
    "Part",
    "PerHead",
    "Plane",
    "PrefixLM",
    "PrefixTree",
    "Slices",
    "SlidingWindow",
    "parse",
]
