"""Real English text that every Python carries: the language reference in `pydoc_data.topics`, read as bytes."""

from typing import NamedTuple

import torch
from torch import Tensor

HELD_OUT = 0.1  # the last tenth of the text is never trained on


class Batch(NamedTuple):
    """Bytes and the bytes that follow them, both (batch, context) int64."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(x.to(device) for x in self))


def corpus() -> Tensor:
    """The whole text as bytes, (length,) uint8: about 460 thousand, in the order of the topics' names."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """`text` cut in two, (training, held out)."""
    cut = int(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


def check_context(text: Tensor, context: int) -> None:
    """Raise ValueError when `text` is too short to hold one window of context + 1 bytes."""
    if len(text) <= context:
        raise ValueError(f"context is {context}, but the text holds {len(text)} bytes; a context below {len(text)} is needed")


def batch_at(text: Tensor, step: int, *, batch: int, context: int, seed: int) -> Batch:
    """The batch of one step: a pure function of (seed, step), so that every model that is compared reads the same bytes.

    Raises ValueError as `check_context`.
    """
    check_context(text, context)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context, (batch,), generator=generator, dtype=torch.int64, device="cpu")
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return Batch(windows[:, :-1], windows[:, 1:])
