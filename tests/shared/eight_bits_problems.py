"""Calls in 8 bits for tests of kernels, and what they are held to: the emulation in torch, and its error against fp64."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise import attention, quantise
from tilewise.backends import eight_bits
from tilewise.backends.reference import Reference
from tilewise.backends.tiled import Tiled
from tilewise.bench.eight_bits import inputs
from tilewise.masks import Full, Mask
from tilewise.problem import Call

E4M3, FULL = torch.float8_e4m3fn, Full()
TILE = eight_bits.TILE
MOST_ERROR = 1.1  # over the emulation's: P lies on the other side of a boundary between two numbers of e4m3 now and then
MOST_OF_LSE = 1e-3  # in powers of e: with integers, the constant that leaves the exponent is rounded


@dataclass(frozen=True)
class Quantised:
    """way: a recipe, or "given": e4m3, or "given int8", with scales for what `per` says."""

    way: str = "int8"
    seqlen_q: int = 130
    seqlen_k: int = 150
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (64, 64)
    batch: int = 1
    mask: Mask = FULL
    dtype: torch.dtype = torch.bfloat16
    per: tuple[str, str, str] = ("tensor", "tensor", "tensor")
    scale: float | None = None
    row_max: bool = False

    def __str__(self) -> str:
        per = f" {'/'.join(self.per)}" if self.way.startswith("given") else ""
        return f"{self.way}{per} {self.seqlen_q}x{self.seqlen_k} {self.heads} {self.dims} {self.mask} {self.dtype}".replace("torch.", "")


def made(case: Quantised, device: str = "cpu", seed: int = 0) -> Call:
    """K and V have means, some channels of K large ones."""
    source = torch.Generator().manual_seed(seed)
    (heads_q, heads_k), (dim, dim_v) = case.heads, case.dims
    shapes = (case.seqlen_q, heads_q, dim), (case.seqlen_k, heads_k, dim), (case.seqlen_k, heads_k, dim_v)
    q, k, v = (torch.randn(case.batch, *shape, generator=source, dtype=torch.float32) for shape in shapes)
    k += 3.0 * torch.randn(dim, generator=source, dtype=torch.float32)
    v += torch.randn(dim_v, generator=source, dtype=torch.float32)
    q, k, v = (x.to(device=device, dtype=case.dtype) for x in (q, k, v))
    scale = dim**-0.5 if case.scale is None else case.scale
    call = Call(q=q, k=k, v=v, mask=case.mask, scale=scale, row_max=case.row_max)
    if not case.way.startswith("given"):
        return replace(call, precision=case.way)
    dtypes = (torch.int8,) * 2 if case.way.endswith("int8") else (E4M3, E4M3)
    fields: dict = {"out_dtype": case.dtype}
    for name, x, dtype, per in zip("qkv", (q, k, v), (*dtypes, E4M3), case.per, strict=True):
        fields[name], fields[f"{name}_scale"] = eight_bits.quantised(x.float(), dtype, per)
    return replace(call, **fields)


def spoil(call: Call) -> None:
    """In place: numbers that are not finite, a query of 0, a constant channel of V, and a sum that is beyond fp32, from bf16, in query 2."""
    call.q[0, 3, 0, 1], call.k[0, 7, 0, 3], call.v[0, 9, 0, 1] = math.inf, math.nan, -math.inf
    call.q[0, 4], call.v[..., 2] = 0.0, 5.0
    call.q[0, 2, 0, :2] = torch.finfo(call.q.dtype).max


def with_numbers_that_are_not_finite(call: Call) -> Call:
    """In one query, two keys and two values."""
    tensors = {name: getattr(call, name).clone() for name in "qkv"}
    bad = ("q", 3, 1, math.inf), ("k", -20, 5, math.nan), ("k", -5, 3, -math.inf), ("v", -30, 5, math.nan), ("v", -25, 6, math.inf)
    for name, token, channel, number in bad:
        x = tensors[name]
        if x.dtype == E4M3:
            x, number = x.view(torch.uint8), 0x7F
        x[0, token, 0, channel] = number
    return replace(call, **tensors)


def held(call: Call, o: Tensor, lse: Tensor, row_max: Tensor | None = None) -> None:
    """That results are the emulation's, but for rounding."""
    want, of_want, *largest = Tiled().forward(call)
    if call.precision is not None:
        exact, _, *_ = Reference().forward(replace(call, precision=None, out_dtype=torch.float64))
    else:
        exact, _, *_ = Reference().forward(replace(call, out_dtype=torch.float64))
    assert o.dtype == want.dtype and o.shape == want.shape
    assert (
        torch.equal(o.isnan(), want.isnan())
        and torch.equal(o.isinf(), want.isinf())
        and torch.equal(lse.isfinite(), of_want.isfinite())
        and torch.equal(lse.isnan(), of_want.isnan())
    )
    there = o.isfinite() & exact.isfinite()
    error, usual = (rms((x.double() - exact)[there]) for x in (o, want))
    assert error <= MOST_ERROR * usual + 1e-6, f"{error:.3g} from fp64; the emulation's error is {usual:.3g}"
    most = (usual + 1e-6) * 12.0  # of one number
    apart = (o.double() - want.double())[there].abs().max().item() if there.any() else 0.0
    assert apart <= most, f"{apart:.3g} from the emulation, whose error is {usual:.3g}"
    for name, got, expected in (("lse", lse, of_want), *((("row_max", row_max, largest[0]),) if row_max is not None else ())):
        close = (got - expected)[expected.isfinite()].abs()
        assert not close.numel() or close.max() <= MOST_OF_LSE, f"{name} is {close.max():.3g} from the emulation's"


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


NEEDLE_WAYS = "fp8", "int8", "int8_qk", "e4m3, per tensor"
QUERIES, LEAD = 128, 7.0  # a needle's score over the logarithm of all others' sum: its weight is 0.999
MOST_OFF = 0.1  # of O from the needle's V, relative


@dataclass(frozen=True)
class Needles:
    """Queries that each look for one key among all: another one, so that they try as many places. Others are normal with outliers
    (FlashAttention-3, section 4.3).
    """

    q: Tensor  # (1, QUERIES, 1, dim), bf16
    k: Tensor  # (1, keys, 1, dim)
    v: Tensor
    at: Tensor  # (QUERIES,): each query's needle; the first and the last key and those beside a tile's end among them


def needles(keys: int, dim: int, seed: int = 0, device: str = "cpu") -> Needles:
    q, k, v = (x[0, :, 0].to(device) for x in inputs("outliers", keys, dim, 1, QUERIES, seed))
    ends = torch.tensor([0, TILE - 1, TILE, keys - TILE, keys - 1])
    others = torch.randperm(keys, generator=torch.Generator().manual_seed(seed))
    at = torch.cat((ends, others[~torch.isin(others, ends)]))[:QUERIES].to(device)
    scale, wide = dim**-0.5, q.double()
    sums = (scale * wide @ k.double().T).logsumexp(-1)
    k[at] = (wide * ((sums + LEAD) / (scale * wide.square().sum(-1)))[:, None]).bfloat16()
    weights = (scale * wide @ k.double().T).softmax(-1).gather(1, at[:, None])
    assert bool((weights > 0.99).all())
    return Needles(*(x[None, :, None] for x in (q, k, v)), at)


def attend_by(way: str, problem: Needles) -> Tensor:
    """O (QUERIES, dim), by one of NEEDLE_WAYS."""
    tensors = problem.q, problem.k, problem.v
    if way in eight_bits.RECIPES:
        return attention(*tensors, precision=way)[0, :, 0]
    tensors, scales = zip(*(quantise(x, "fp8", per="tensor") for x in tensors), strict=True)
    return attention(*tensors, **dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)))[0, :, 0]


def not_found(o: Tensor, problem: Needles) -> list[int]:
    """Needles whose V is not, of all keys', the nearest to O, or is further from it than MOST_OFF of its norm."""
    o, v = o.double(), problem.v[0, :, 0].double()
    apart = torch.cdist(o, v)
    least, nearest = apart.min(1)
    found = (nearest == problem.at) & (least <= MOST_OFF * v[problem.at].norm(dim=-1))
    return problem.at[~found].tolist()
