"""Which closures of the installed transformers mean what hf_masks.py takes them to mean."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from transformers import masking_utils

from tilewise.compat import hf_masks
from tilewise.compat.hf_masks import Frame


@cache
def understood() -> frozenset[str]:
    """The closures of hf_masks.CAPTURED that in this transformers hide the pairs that they are taken to hide."""
    return frozenset(kind for kind in hf_masks.CAPTURED if _agrees(kind))


def _agrees(kind: str) -> bool:
    try:
        function, frame = _example(kind)
        tree = hf_masks.read(function)
        masks = None if tree is None else hf_masks.by_row(tree, None, 2, frame)
        if masks is None:
            return False
        seen = torch.stack([mask.dense(*frame[:2]) for mask in masks]).expand(2, -1, -1)
        want = masking_utils.sdpa_mask(2, *frame, function, allow_is_causal_skip=False, device="cpu")
    except (AttributeError, TypeError, ValueError, IndexError):  # it is gone, or other than it was
        return False
    return want is not None and torch.equal(seen, want[:, 0])


def _example(kind: str) -> tuple[Callable, Frame]:
    """A closure of this kind, alone or with those that it needs, for a batch of 2."""

    def integers(*rows) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    causal, make = masking_utils.causal_mask_function, getattr(masking_utils, kind)
    packed = masking_utils.packed_sequence_mask_function(integers([0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]))
    blocks = masking_utils.blockwise_overlay(integers([-1, 0, 0, -1, 1, 1, 1, 0], [0, 0, -1, -1, -1, -1, 2, 2]))
    apart, square = Frame(5, 7, q_offset=3, k_offset=1), Frame(6, 6)
    examples = {
        "causal_mask_function": (causal, apart),
        "bidirectional_mask_function": (masking_utils.bidirectional_mask_function, apart),
        "chunked_overlay": (lambda: make(3, integers(0, 2)), apart),
        "blockwise_overlay": (blocks, apart),
        hf_masks.PACKED: (packed, square),
        hf_masks.REMAPPED: (
            lambda: masking_utils.and_masks(make(causal, integers([0, 1, 0, 1, 2, 0], [3, 4, 5, 6, 0, 1])), packed),
            square,
        ),
        "and_masks": (lambda: make(causal, blocks), apart),
        "or_masks": (lambda: make(causal, blocks), apart),
    }
    function, frame = examples.get(kind, (lambda: make(2), apart))
    return (function() if function.__name__ == "<lambda>" else function), frame
