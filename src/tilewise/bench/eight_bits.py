"""How wrong each way to multiply in 8 bits is: RMS errors of O against fp64, on four kinds of inputs, over several heads with keys of their own.

It is arithmetic, and so the same on every machine: the recipes are computed by their emulation (backends/tiled/eight_bits.py), for some queries
against all keys. `video_errors` is about values far from 0 at the lengths of videos, and next to another library's recipe.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.eight_bits import E4M3, INT8, MOST, RECIPES, quantised, spread
from tilewise.backends.reference import Reference
from tilewise.backends.tiled import Tiled
from tilewise.masks import Full
from tilewise.problem import Call
from tilewise.quantising import quantise

PER_TENSOR = "per tensor"  # e4m3, a scale a tensor, and nothing else: what recipes are compared with
UNQUANTISED = "bf16"
SAGE = "sage"
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


def video_inputs(mean: float, seqlen_k: int, queries: int = 48, heads: int = 1, seed: int = 0) -> list[Tensor]:
    """q (1, queries, heads, 128), k and v (1, seqlen_k, heads, 128) in bf16: values about `mean`, of deviation 1; queries of deviation 3, which see
    few keys; channels of K about 8."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, heads, 128, generator=generator, dtype=torch.float32, device="cpu") for n in (queries, seqlen_k, seqlen_k))
    k[..., ::16] += 8.0
    return [x.bfloat16() for x in (3.0 * q, k, v + mean)]


def sage(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O in fp64 by what SageAttention 2 rounds (its source of 2.2.0): K about its mean and Q in int8, K by 128 keys and Q by token (finer than
    there), V in e4m3 by channels, P in e4m3 times 448 for a row's largest, and its sum after rounding, which is the more exact of its two ways."""
    q, k, v = (x[0].transpose(0, 1).float() for x in (q, k, v))  # (heads, tokens, head_dim)
    (q8, q_scale), (k8, k_scale) = (
        quantised(x.transpose(0, 1)[None], INT8, per) for x, per in ((q, "token"), (k - k.mean(1, keepdim=True), "tile"))
    )
    q, k = (x[0].transpose(0, 1).double() * spread(scale, x.shape[1])[0, ..., None].double() for x, scale in ((q8, q_scale), (k8, k_scale)))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    p = (MOST[E4M3] * (scores - scores.amax(-1, keepdim=True)).exp()).float().to(E4M3).double()
    channel = v.abs().amax(1, keepdim=True) / MOST[E4M3]
    o = p @ ((v / channel).to(E4M3).double() * channel.double()) / p.sum(-1, keepdim=True)
    return o.transpose(0, 1)[None]


@torch.no_grad()
def video_errors(mean: float, seqlen_k: int, queries: int = 48) -> dict[str, float]:
    """As `errors`, with `sage` among the ways; of one head."""
    q, k, v = video_inputs(mean, seqlen_k, queries)
    return {**_errors(q, k, v), SAGE: _rms(sage(q, k, v) - _exact(q, k, v))}


@torch.no_grad()
def errors(kind: str, seqlen_k: int, head_dim: int, heads: int = 16, queries: int = 256, seed: int = 0) -> dict[str, float]:
    """By each of WAYS, the RMS error of O over all heads, before O is rounded to bf16 where a way is of 8 bits."""
    q, k, v = inputs(kind, seqlen_k, head_dim, heads, queries, seed)
    return _errors(q, k, v)


def _errors(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    call = {"mask": Full(), "scale": q.shape[-1] ** -0.5}
    eight = dict(zip(("q", "k", "v"), map(quantise, (q, k, v)), strict=True))
    given = {name: x for name, (x, _) in eight.items()} | {f"{name}_scale": scale for name, (_, scale) in eight.items()}
    wide = {"out_dtype": torch.float32}
    found = {UNQUANTISED: Tiled().forward(Call(q=q, k=k, v=v, **call))[0], PER_TENSOR: Tiled().forward(Call(**given, **wide, **call))[0]}
    found |= {name: Tiled().forward(Call(q=q, k=k, v=v, precision=name, **wide, **call))[0] for name in RECIPES}
    exact = _exact(q, k, v)
    return {name: _rms(o.double() - exact) for name, o in found.items()}


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Reference().forward(Call(q=q.double(), k=k.double(), v=v.double(), mask=Full(), scale=q.shape[-1] ** -0.5))[0]


def _rms(difference: Tensor) -> float:
    return float(difference.square().mean().sqrt())
