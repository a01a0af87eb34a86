"""What the elements of a workload are like: `DISTRIBUTIONS`, from the standard normal ones to those that make attention slow or wrong.

Each is a function of standard normal inputs in fp32, made from a seeded generator on the inputs' own device; rounding to the workload's dtype
comes after it. `finite` tells those with finite inputs, and finite results by exact arithmetic, from those that hold NaN or infinities;
`limit` is how many times the time on normal inputs an implementation may take, if its speed is to be called independent of the data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 128  # keys that kernels usually take at once, about
LARGEST_PRODUCT = 2.0**58  # q and k up to this have scores that fp32 can hold, whatever head_dim is
LARGEST_VALUE = 2.0**100  # and v up to this has sums that it can hold
FINITE_LIMIT, NON_FINITE_LIMIT = 1.25, 3.0


class Inputs(NamedTuple):
    """q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_k, head_dim), v (..., head_dim_v), d_o shaped as the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor


@dataclass(frozen=True)
class Source:
    """What a distribution may ask for besides normal inputs."""

    generator: torch.Generator
    dtype: torch.dtype  # the workload's
    grad: bool
    ends: tuple[int, int]  # queries and keys from there on are padding: no pair of them is visible

    @property
    def largest(self) -> float:
        return min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device=self.generator.device)

    def uniform(self, *shape: int) -> Tensor:
        """In (0, 1]."""
        return 1.0 - torch.rand(*shape, generator=self.generator, dtype=torch.float32, device=self.generator.device)


Change = Callable[[Inputs, Source], Inputs]


@dataclass(frozen=True)
class Distribution:
    name: str
    change: Change
    finite: bool = True
    subnormal: bool = False  # results are so small that arithmetic may take them for 0, and errors say nothing

    @property
    def limit(self) -> float:
        return FINITE_LIMIT if self.finite else NON_FINITE_LIMIT

    def __call__(self, normal: Inputs, source: Source) -> Inputs:
        made = self.change(normal, source)
        if not self.finite or made is normal:
            return made
        return Inputs(*(x.clamp(-source.largest, source.largest) for x in made))


def _normal(x: Inputs, source: Source) -> Inputs:
    return x


def _of_each(change: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """`change` of q, then of k, then of v."""
    return Inputs(change(x.q), change(x.k), change(x.v), x.d_o)


def _outliers(x: Inputs, source: Source) -> Inputs:
    """N(0, 1) + N(0, 100) Bernoulli(0.001): FlashAttention-3 (Shah et al. 2024), section 4.3; one in 1,000 has a term of deviation 10 added."""

    def with_outliers(t: Tensor) -> Tensor:
        return t + 10.0 * source.normal(*t.shape) * (source.uniform(*t.shape) <= 0.001)

    return _of_each(with_outliers, x)


def _queries_times(factor: float) -> Change:
    return lambda x, source: x._replace(q=x.q * factor)


def _first_key(x: Inputs, source: Source) -> Inputs:
    """The first key is 12 times as long: most queries look at it, or at all but it."""
    k = x.k.clone()
    k[:, 0] *= 12.0
    return x._replace(k=k)


def _student(x: Inputs, source: Source) -> Inputs:
    """Student's t with 2 degrees of freedom, N / sqrt(chi2 / 2): its variance is infinite."""
    return _of_each(lambda t: t * (-source.uniform(*t.shape).log()).clamp(min=1e-12).rsqrt(), x)


def _log_normal(x: Inputs, source: Source) -> Inputs:
    """exp(N): all positive, so all scores of a row are far above zero."""
    return _of_each(torch.exp, x)


def _cauchy(x: Inputs, source: Source) -> Inputs:
    """N / N: not even a mean; in dtypes of few exponents some reach the largest number."""
    return _of_each(lambda t: t / source.normal(*t.shape).abs().clamp(min=1e-12), x)


def _massive_channels(x: Inputs, source: Source) -> Inputs:
    """Two channels of q and k are 50 times the others, as the activations of large models have them."""
    q, k = x.q.clone(), x.k.clone()
    channels = (3 % q.shape[-1], q.shape[-1] // 2)
    for t in q, k:
        t[..., channels] *= 50.0
    return x._replace(q=q, k=k)


def _ramp(length: int, device: torch.device, last: float) -> Tensor:
    return torch.linspace(1.0, last, length, dtype=torch.float32, device=device)[:, None, None]


def _growing_keys(x: Inputs, source: Source) -> Inputs:
    """Keys grow along the sequence up to 16 times: each tile of keys brings larger scores than all before it."""
    return x._replace(k=x.k * _ramp(x.k.shape[1], x.k.device, 16.0))


def _shrinking_keys(x: Inputs, source: Source) -> Inputs:
    """The same for who goes through the keys from the end."""
    return x._replace(k=x.k * _ramp(x.k.shape[1], x.k.device, 16.0).flip(0))


def _rising_tiles(x: Inputs, source: Source) -> Inputs:
    """The scores of each tile of keys are 12 above those of the one before, for every query: each maximum moves at each tile."""
    size, tile = float(x.q.shape[-1]), torch.arange(x.k.shape[1], dtype=torch.int64, device=x.k.device) // TILE
    q, k = x.q.clone(), x.k.clone()
    q[..., 0] = size**0.25
    k[..., 0] = 12.0 * tile[:, None] * size**0.25
    return x._replace(q=q, k=k)


def _falling_tiles(x: Inputs, source: Source) -> Inputs:
    rising = _rising_tiles(x, source)
    return rising._replace(k=rising.k.flip(1))


def _late_jump(x: Inputs, source: Source) -> Inputs:
    """The last keys are 16 times as long: maxima that had settled move once, at the end."""
    k = x.k.clone()
    k[:, -max(1, k.shape[1] // 64) :] *= 16.0
    return x._replace(k=k)


def _huge_scores(x: Inputs, source: Source) -> Inputs:
    """Each query scores about 40 more with one key, at random among the eighth of the sequence before its own place, so that all masks show it."""
    (batch, seqlen_q, heads_q, size), (_, seqlen_k, heads_k, _) = x.q.shape, x.k.shape
    rows, device = min(seqlen_q, seqlen_k), x.q.device
    last = torch.arange(rows, dtype=torch.int64, device=device)[None, :, None] + seqlen_k - rows
    back = source.uniform(batch, rows, heads_k) * (last + 1).clamp(max=max(1, seqlen_k // 8))
    place = (last - (back.ceil().long() - 1)).clamp(min=0)[..., None].expand(-1, -1, -1, size)
    towards = x.q[:, seqlen_q - rows :, :: heads_q // heads_k]
    towards = 40.0 * size**0.5 * towards / towards.square().sum(-1, keepdim=True)
    return x._replace(k=x.k.scatter_add(1, place, towards))


def _alternating_signs(x: Inputs, source: Source) -> Inputs:
    """All scores of a tile of keys are about 16, those of the next about -16, and so on."""
    size = x.q.shape[-1]
    sign = 1.0 - 2.0 * ((torch.arange(x.k.shape[1], dtype=torch.int64, device=x.k.device) // TILE) % 2)
    shared = 4.0 * size**-0.25  # in every channel: the product of two such vectors, times the scale, is 16
    return x._replace(q=x.q + shared, k=x.k + shared * sign[:, None, None])


def _constant(x: Inputs, source: Source) -> Inputs:
    """All scores are equal, to the last bit: q is 1, and each key's channels are 1 + e and 1 - e in turns, in steps that every dtype has."""
    half = x.k.shape[-1] // 2
    e = (x.k[..., :half] * 16.0).round().clamp(-32.0, 32.0) / 64.0
    k = torch.ones_like(x.k)
    k[..., 0 : 2 * half : 2] += e
    k[..., 1 : 2 * half : 2] -= e
    return x._replace(q=torch.ones_like(x.q), k=k)


def _tiny(x: Inputs, source: Source) -> Inputs:
    """All inputs are subnormal numbers of the dtype, or zero."""
    smallest = max(torch.finfo(source.dtype).smallest_normal, torch.finfo(torch.float32).smallest_normal)
    return Inputs(*(t.clamp(-4.0, 4.0) * (smallest / 8.0) for t in x))


def _largest(t: Tensor, most: float, source: Source) -> Tensor:
    """Half the largest number to the largest, of either sign."""
    return t.sign() * (0.5 + 0.5 * source.uniform(*t.shape)) * min(most, source.largest)


def _largest_scores(x: Inputs, source: Source) -> Inputs:
    """q and k near the dtype's largest number, as far as fp32 holds their products: every softmax is all or nothing."""
    return x._replace(q=_largest(x.q, LARGEST_PRODUCT, source), k=_largest(x.k, LARGEST_PRODUCT, source))


def _largest_values(x: Inputs, source: Source) -> Inputs:
    """v near the dtype's largest number, as far as fp32 holds sums of it; dO is small, so that gradients stay finite in fp16."""
    return x._replace(v=_largest(x.v, LARGEST_VALUE, source), d_o=x.d_o * 2.0**-12)


def _in_some_values(bad: float) -> Change:
    """One row of v in 1,000, at least one of each head, has `bad` in every fourth channel; infinities are of either sign."""

    def change(x: Inputs, source: Source) -> Inputs:
        v = x.v.clone()
        chosen = source.uniform(*v.shape[:3]) <= 0.001
        chosen[:, v.shape[1] // 2] = True
        quarter = v[..., ::4]
        quarter[chosen] = bad * quarter[chosen].sign() if bad == bad else bad
        return x._replace(v=v)

    return change


def _in_last_keys(bad: float) -> Change:
    """The last keys and their values are `bad`: causal masks and windows hide them from all queries but the last."""

    def change(x: Inputs, source: Source) -> Inputs:
        k, v = x.k.clone(), x.v.clone()
        last = max(1, k.shape[1] // 64)
        k[:, -last:], v[:, -last:] = bad, bad
        return x._replace(k=k, v=v)

    return change


def _in_padding(bad: float) -> Change:
    """All that lies beyond the end of the last document is `bad`, and no visible pair reads it: results are finite."""

    def change(x: Inputs, source: Source) -> Inputs:
        made = Inputs(*(t.clone() for t in x))
        for t, end in zip(made, (source.ends[0], source.ends[1], source.ends[1], source.ends[0]), strict=True):
            t[:, end:] = bad
        return made

    return change


def _overflown(x: Inputs, source: Source) -> Inputs:
    """A step of training in fp16 with a loss scale that was too large: a tenth of dO (without a backward pass, of q) is infinite."""
    spoiled = (x.d_o if source.grad else x.q) * 4e4
    spoiled = torch.where(spoiled.abs() > torch.finfo(torch.float16).max, spoiled.sign() * torch.inf, spoiled)
    return x._replace(d_o=spoiled) if source.grad else x._replace(q=spoiled)


NORMAL = "normal"
_ALL = (
    Distribution(NORMAL, _normal),
    Distribution("outliers", _outliers),
    Distribution("q x4", _queries_times(4.0)),
    Distribution("q x16", _queries_times(16.0)),
    Distribution("q x64", _queries_times(64.0)),
    Distribution("first key x12", _first_key),
    Distribution("student t", _student),
    Distribution("log-normal", _log_normal),
    Distribution("cauchy", _cauchy),
    Distribution("massive channels", _massive_channels),
    Distribution("growing keys", _growing_keys),
    Distribution("shrinking keys", _shrinking_keys),
    Distribution("rising tiles", _rising_tiles),
    Distribution("falling tiles", _falling_tiles),
    Distribution("late jump", _late_jump),
    Distribution("huge scores", _huge_scores),
    Distribution("alternating signs", _alternating_signs),
    Distribution("constant", _constant),
    Distribution("tiny", _tiny, subnormal=True),
    Distribution("largest scores", _largest_scores),
    Distribution("largest values", _largest_values),
    Distribution("nan in v", _in_some_values(torch.nan), finite=False),
    Distribution("inf in v", _in_some_values(torch.inf), finite=False),
    Distribution("nan in last keys", _in_last_keys(torch.nan), finite=False),
    Distribution("inf in last keys", _in_last_keys(torch.inf), finite=False),
    Distribution("overflown", _overflown, finite=False),
    Distribution("hidden nan", _in_padding(torch.nan), finite=False),
    Distribution("hidden inf", _in_padding(torch.inf), finite=False),
)
DISTRIBUTIONS = {each.name: each for each in _ALL}
HIDDEN = ("hidden nan", "hidden inf")  # those that want a mask with padding
