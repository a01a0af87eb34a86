"""The set `hard-inputs`: what makes an attention slow or wrong is not its shape alone, so here one shape meets every distribution of inputs."""

import torch

from tilewise.bench.distributions import DISTRIBUTIONS, HIDDEN, NORMAL
from tilewise.bench.workloads import Workload
from tilewise.machine.roofline import Direction
from tilewise.masks import Causal, Documents, Full, Mask, SlidingWindow

NAME = "hard-inputs"
ON_A_CPU = {"seqlen": "512", "heads": "2"}


def hard_inputs(
    dtype: torch.dtype = torch.bfloat16,
    direction: Direction = "fwd",
    *,
    seqlen: int = 8192,
    heads: int | None = None,
    head_dims: tuple[int, ...] = (64, 128, 256),
    masks: tuple[Mask, ...] | None = None,
    data: tuple[str, ...] = tuple(DISTRIBUTIONS),
) -> list[Workload]:
    """Every distribution under every mask; without `heads` the hidden dimension is 2048, as in the papers' sweep.

    The masks: full, causal, a window of an eighth; and a padded sequence, which alone can hide something from all queries.
    """
    masks = (Full(), Causal(), SlidingWindow(max(1, seqlen // 8) - 1, 0), padded(seqlen)) if masks is None else masks
    return [
        Workload(
            name=NAME,
            batch=1,
            seqlen_q=seqlen,
            heads_q=heads or 2048 // head_dim,
            head_dim=head_dim,
            mask=mask,
            dtype=dtype,
            direction=direction,
            data=each,
            rms=True,
        )
        for head_dim in head_dims
        for mask in masks
        for each in data
        if each == NORMAL or (each in HIDDEN) == isinstance(mask, Documents)
    ]


def padded(seqlen: int) -> Documents:
    """The mask of a sequence whose last sixteenth, and a few tokens more, are padding."""
    return Documents([0, max(1, seqlen - seqlen // 16 - 5)], inner=Full())
