"""What a rung's kernel is given of Q, K and V: the tensors as they are, or in e4m3 with the scales that they were divided by.

e4m3 has a sign, four bits of exponent and three of fraction: numbers up to 448, right to a sixteenth from 2^-6 on and to 2^-10 below. So it
matters little where a scale puts a tensor's largest element, and much how far below it the others are.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.sm90 import jit
from tilewise.sm90.key_order import transposed

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
KEYS = 128  # of a scale of K, and of a tile of K8


class Operands(NamedTuple):
    """A launch function's arguments before O and LSE, and those after."""

    tensors: tuple
    others: tuple


class Recipe(NamedTuple):
    """prepare(q, k, v, scale): the operands for q, k, v (heads, seqlen, head_dim) and scores times `scale`, ahead of the kernel; stand_ins(config,
    heads, seqlen): what stands for them as it is compiled.
    """

    prepare: Callable[[Tensor, Tensor, Tensor, float], Operands]
    stand_ins: Callable[..., Operands]


def as_they_are(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Operands:
    return Operands((*map(jit.aligned, (q, k, v)),), (scale / math.log(2),))


def stand_ins_of_bf16(config, heads, seqlen) -> Operands:
    """q, k, v; scale_log2."""
    from tilewise.sm90.dsl import BFloat16, Float32

    return Operands((*(jit.tensor(BFloat16, heads, seqlen, config.head_dim) for _ in range(3)),), (Float32(1.0),))


def rounded(x: Tensor, dim: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x as (e4m3, fp32 scale): the largest element along `dim`, which stays with size 1, becomes 448. Zeros get the scale 1."""
    x = x.float()
    largest = x.abs().amax(dim, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / LARGEST)
    return (x / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale  # older torch makes NaN of what rounding puts beyond 448


def per_tensor(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Operands:
    """One scale a tensor, V transposed. For finite elements: a NaN makes the scale of all others NaN."""
    (q8, scale_q), (k8, scale_k), (v8, scale_v) = (rounded(x, (0, 1, 2)) for x in (q, k, v))
    return Operands((q8, k8, transposed(v8)), (scale * float(scale_q * scale_k) / math.log(2), float(scale_v)))


def stand_ins_per_tensor(config, heads, seqlen) -> Operands:
    """q, k, and v with the keys last; scale_log2, scale_v."""
    from tilewise.sm90.dsl import Float8E4M3FN, Float32

    sizes = (seqlen, config.head_dim), (seqlen, config.head_dim), (config.head_dim, jit.size())
    return Operands((*(jit.tensor(Float8E4M3FN, heads, *size) for size in sizes),), (Float32(1.0), Float32(1.0)))


def incoherent(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Operands:
    """Q and K turned, K and V centred; a scale for each query, each KEYS keys and each channel of V. For finite elements.

    others: of each row the scale of its scores and what its LSE lacks, (heads, 2, seqlen); of each tile of keys its scale, (heads, tiles); of each
    channel of V its scale and its mean, (heads, 2, head_dim). fp32.
    """
    q, k, v = (x.float() for x in (q, k, v))
    centre_k, centre_v = (x.mean(1, keepdim=True) for x in (k, v))
    q8, scale_q = rounded(turned(q), 2)
    tiles = torch.nn.functional.pad(turned(k - centre_k), (0, 0, 0, -k.shape[1] % KEYS)).unflatten(1, (-1, KEYS))
    k8, scale_k = rounded(tiles, (2, 3))
    v8, scale_v = rounded(v - centre_v, 1)
    rows = torch.stack((scale_q[..., 0] * (scale / math.log(2)), (q * centre_k).sum(2) * scale), 1)
    channels = torch.cat((scale_v, centre_v), 1)
    return Operands(
        (q8, k8.flatten(1, 2)[:, : k.shape[1]].contiguous(), transposed(v8)), (rows, scale_k[:, :, 0, 0].contiguous(), channels)
    )


def stand_ins_of_incoherent(config, heads, seqlen) -> Operands:
    from tilewise.sm90.dsl import Float32

    tensors, _ = stand_ins_per_tensor(config, heads, seqlen)
    sizes = (2, seqlen), (jit.size(),), (2, config.head_dim)
    return Operands(tensors, (*(jit.tensor(Float32, heads, *size, aligned=False) for size in sizes),))


def turned(x: Tensor) -> Tensor:
    """x (..., head_dim) times an orthogonal matrix, that of Hadamard with random signs: products of two such are as before, and what stood out in one
    element is spread over all. head_dim: a power of two.
    """
    head_dim = x.shape[-1]
    signs = torch.randint(2, (head_dim,), generator=torch.Generator().manual_seed(head_dim), dtype=torch.float32, device="cpu") * 2 - 1
    x, half = x * signs.to(x.device), 1
    while half < head_dim:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x, half = torch.stack((a + b, a - b), -2).flatten(-3), 2 * half
    return x / math.sqrt(head_dim)


RECIPES = {
    "bf16": Recipe(as_they_are, stand_ins_of_bf16),
    "per_tensor": Recipe(per_tensor, stand_ins_per_tensor),
    "incoherent": Recipe(incoherent, stand_ins_of_incoherent),
}
