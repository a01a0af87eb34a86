"""What is made once for a mask, mostly tensors on the GPU, and how long it stays there."""

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

Made = TypeVar("Made")
_OF_GRAPHS: dict[int, object] = {}  # by identity


def kept(memo: dict, key: Hashable, make: Callable[[], Made]) -> Made:
    """memo[key], made where it is not there."""
    found = memo.get(key)
    if found is None:
        found = memo[key] = make()
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        hold(found)
    return found


def hold(made: object) -> None:
    """Keep for ever what a CUDA graph reads, as it may be replayed after every other reference to the mask is gone."""
    _OF_GRAPHS[id(made)] = made
