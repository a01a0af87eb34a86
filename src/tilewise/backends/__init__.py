"""The Backend protocol: what a backend offers, and the sentences it gives when it cannot."""

from typing import Protocol

from torch import Tensor

from tilewise.problem import Call, Gradients, Problem


class Backend(Protocol):
    """One way to compute attention. Backends never import each other.

    A backend may also have `decode` (few queries against a cache read in place; see `backends.cpu.cache.decode`), `describe() -> str`
    (what it runs on here, in a few words), `details(call) -> list[str]` (its kernel for that call, in sentences), and `repeat(call)`: a shorter
    way for calls that differ in nothing but what q, k and v hold, or None (see `repeats`).
    """

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """Sentences that say why this backend cannot run `problem`; empty when it can."""

    def tile(self, call: Call) -> tuple[int, int] | None:
        """(tile_m, tile_n) that this backend would use for `call`; None where it does not tile."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q), fp32 (fp64 for fp64 inputs)."""

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """Gradients given the forward's outputs and the gradients that reach them; the bias's only where `bias_grad` asks for it."""
