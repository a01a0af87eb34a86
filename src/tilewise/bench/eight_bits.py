"""How wrong each way to multiply in 8 bits is: RMS errors of O against fp64, on four kinds of inputs, over several heads with keys of their own.

It is arithmetic, and so the same on every machine: the recipes are computed by their emulation (backends/tiled/eight_bits.py), for some queries
against all keys.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.eight_bits import RECIPES
from tilewise.backends.reference import Reference
from tilewise.backends.tiled import Tiled
from tilewise.masks import Full
from tilewise.problem import Call
from tilewise.quantising import quantise

PER_TENSOR = "per tensor"  # e4m3, a scale a tensor, and nothing else: what recipes are compared with
UNQUANTISED = "bf16"
WAYS = (UNQUANTISED, PER_TENSOR, *RECIPES)


def _normal(x: list[Tensor], draw: Callable[..., Tensor]) -> list[Tensor]:
    return x


def _outliers(x: list[Tensor], draw: Callable[..., Tensor]) -> list[Tensor]:
    """N(0, 1) + N(0, 100) Bernoulli(0.001): FlashAttention-3 (Shah et al. 2024), section 4.3."""
    return [t + 10.0 * draw(*t.shape) * (draw(*t.shape) > 3.0902) for t in x]


def _llm(x: list[Tensor], draw: Callable[..., Tensor]) -> list[Tensor]:
    """Four channels of K have a mean of 12, those of V means of deviation 1, and channels of Q and V are uneven, as in large models."""
    q, k, v = x
    dim, shift = q.shape[-1], torch.zeros_like(k[0, 0, 0])
    shift[:: max(dim // 4, 1)] = 12.0
    return [q * (0.5 * draw(dim)).exp(), k + shift, v * (0.5 * draw(v.shape[-1])).exp() + draw(v.shape[-1])]


def _peaky(x: list[Tensor], draw: Callable[..., Tensor]) -> list[Tensor]:
    """Scores of deviation 4: a row looks at few keys."""
    return [4.0 * x[0], *x[1:]]


INPUTS = {"outliers": _outliers, "normal": _normal, "llm": _llm, "peaky": _peaky}


def inputs(kind: str, seqlen_k: int, head_dim: int, heads: int, queries: int, seed: int = 0) -> list[Tensor]:
    """q (1, queries, heads, head_dim), k and v (1, seqlen_k, heads, head_dim) in bf16."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    made = INPUTS[kind]([draw(1, tokens, heads, head_dim) for tokens in (queries, seqlen_k, seqlen_k)], draw)
    return [x.bfloat16() for x in made]


@torch.no_grad()
def errors(kind: str, seqlen_k: int, head_dim: int, heads: int = 16, queries: int = 256, seed: int = 0) -> dict[str, float]:
    """By each of WAYS, the RMS error of O over all heads, before O is rounded to bf16 where a way is of 8 bits."""
    q, k, v = inputs(kind, seqlen_k, head_dim, heads, queries, seed)
    call = {"mask": Full(), "scale": head_dim**-0.5}
    exact = Reference().forward(Call(q=q.double(), k=k.double(), v=v.double(), **call))[0]
    eight = dict(zip(("q", "k", "v"), map(quantise, (q, k, v)), strict=True))
    given = {name: x for name, (x, _) in eight.items()} | {f"{name}_scale": scale for name, (_, scale) in eight.items()}
    wide = {"out_dtype": torch.float32}
    found = {UNQUANTISED: Tiled().forward(Call(q=q, k=k, v=v, **call))[0], PER_TENSOR: Tiled().forward(Call(**given, **wide, **call))[0]}
    found |= {name: Tiled().forward(Call(q=q, k=k, v=v, precision=name, **wide, **call))[0] for name in RECIPES}
    return {name: float((o.double() - exact).square().mean().sqrt()) for name, o in found.items()}
