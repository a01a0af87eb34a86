"""What a kernel does with scores before the softmax, and with what that makes of them, in its configuration: one definition for all kernels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ScoreChanges:
    """The fields of every `Config` that score changes decide."""

    softcap: bool = False
    bias: torch.dtype | None = None  # its dtype, where there is one
    alibi: bool = False
    diagonal: bool = False  # ALiBi's distance counts from a row's own place
    dropout: bool = False  # of probabilities

    def __post_init__(self) -> None:
        if self.diagonal and not self.alibi:
            raise ValueError("a row's own place is ALiBi's")

    @property
    def natural(self) -> bool:
        """Whether P is taken from logits in natural units; otherwise from scores that still lack a factor (scores/logits.py)."""
        return self.alibi or self.bias is not None

    @property
    def modified(self) -> bool:
        return self.softcap or self.natural
