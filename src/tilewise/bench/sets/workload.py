"""What is measured: `Workload`, one attention by its sizes, mask, dtype, direction and inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewise.bench.sets.distributions import DISTRIBUTIONS, NORMAL, Inputs, Source
from tilewise.machine.roofline import DIRECTIONS, Direction, Shape, flops, hbm_bytes, paper_flops
from tilewise.masks import Causal, Documents, Full, Mask
from tilewise.problem import Call, Problem

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALL = slice(None)
AXES = "bhqk"  # of a bias: batch, query heads, queries, keys
Attend = Callable[..., Tensor]  # attend(q, k, v, **extras) -> o, all (batch, seqlen, heads, head_dim); the extras of `Workload.extras`


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention to time. `seqlen_k`, `heads_k` and `head_dim_v` default to the query's; `name` says which sweep or model it is from.

    `scale` None is head_dim ** -0.5. `bias` names the axes along which an additive bias varies, of "bhqk" in this order and with k: "hqk" is a
    bias of (1, heads_q, seqlen_q, seqlen_k); `bias_grad`: a backward pass computes its gradient, too. `sink`: a learnable logit a head. `alibi`: with
    `slopes`. `data` names the distribution of the inputs (distributions.py). `rms`: the errors of all that is computed are measured, too.

    Raises ValueError naming the field that makes no sense.
    """

    name: str
    batch: int
    seqlen_q: int
    heads_q: int
    head_dim: int
    seqlen_k: int = 0
    heads_k: int = 0
    head_dim_v: int = 0
    mask: Mask = field(default_factory=Full)
    dtype: torch.dtype = torch.float32
    direction: Direction = "fwd"
    data: str = NORMAL
    rms: bool = False
    scale: float | None = None
    softcap: float = 0.0
    sink: bool = False
    bias: str | None = None
    bias_grad: bool = False
    alibi: bool = False

    def __post_init__(self):
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction is {self.direction!r}; it must be one of {', '.join(DIRECTIONS)}")
        if self.data not in DISTRIBUTIONS:
            raise ValueError(f"data is {self.data!r}; it must be one of {', '.join(DISTRIBUTIONS)}")
        if self.bias is not None and (self.bias[-1:] != "k" or self.bias != "".join(axis for axis in AXES if axis in self.bias)):
            raise ValueError(f"bias is {self.bias!r}; it must be None or axes out of {AXES!r}, in this order and with k, as in 'hqk'")
        if self.bias_grad and self.bias is None:
            raise ValueError("bias_grad is True and bias is None; give the axes of the bias, as in bias='hqk'")
        if self.alibi and self.bias is not None:
            raise ValueError(f"alibi is True and bias is {self.bias!r}; give one of them: the check adds ALiBi as a bias")
        if self.changes and (self.data != NORMAL or self.rms):
            given = f"data is {self.data!r}, rms is {self.rms}"
            raise ValueError(f"{given}, and scores are changed by {', '.join(self.changes)}; that takes data={NORMAL!r} and rms=False")
        for given, default in (("seqlen_k", self.seqlen_q), ("heads_k", self.heads_q), ("head_dim_v", self.head_dim)):
            object.__setattr__(self, given, getattr(self, given) or default)
        if self.heads_q % self.heads_k:
            raise ValueError(f"heads_q is {self.heads_q} and heads_k is {self.heads_k}; heads_q must be a multiple of heads_k")

    @property
    def case(self) -> dict[str, int | float | str]:
        """The workload as JSON-ready values; equal for equal work, whatever its name."""
        sizes = {name: getattr(self, name) for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "head_dim_v")}
        mask = getattr(self.mask, "source", None) or f"{self.mask.kind} mask of {self.shape.pairs} pairs"
        others = {} if self.data == NORMAL else {"data": self.data}  # rows from before there were others have none
        return {**sizes, "mask": mask, "dtype": DTYPE_NAMES[self.dtype], "direction": self.direction, **others, **self.changes}

    @property
    def changes(self) -> dict[str, int | float | str]:
        """What makes scores other than q.k / sqrt(head_dim), as JSON-ready values; the absent are left out."""
        bias = None if self.bias is None else self.bias + (" with gradient" if self.bias_grad else "")
        found = {"scale": self.scale, "softcap": self.softcap or None, "sink": 1 if self.sink else None, "bias": bias}
        found["alibi"] = 1 if self.alibi else None
        return {name: value for name, value in found.items() if value is not None}

    def lacking(self, *has: str) -> list[str]:
        """Why an implementation that has these of "scale", "softcap", "sink", "bias", "bias gradient", "alibi" cannot serve; empty where it can."""
        needs = [*self.changes, *(["bias gradient"] if self.bias_grad and self.grad else [])]
        missing = [name for name in needs if name not in has]
        if "bias" in missing:
            missing = [name for name in missing if name != "bias gradient"]
        return [f"it has no {'ALiBi' if name == 'alibi' else name}" for name in missing]

    def problem(self, device: torch.device) -> Problem:
        """What `why_not` of backends and rungs is asked about."""
        return Problem(
            device=device.type,
            dtype=self.dtype,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            group=self.heads_q // self.heads_k,
            mask=self.mask.kind,
            softcap=self.softcap > 0.0,
            bias=self.bias is not None,
            sink=self.sink,
            alibi=self.alibi,
            grad=self.grad,
        )

    def call(self) -> Call:
        """The call, on tensors that hold nothing."""

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device="meta")

        return Call(
            q=empty(self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            k=empty(self.batch, self.seqlen_k, self.heads_k, self.head_dim),
            v=empty(self.batch, self.seqlen_k, self.heads_k, self.head_dim_v),
            mask=self.mask,
            scale=self.softmax_scale,
            softcap=self.softcap,
            bias=empty(*self.bias_shape) if self.bias else None,
            alibi_slopes=torch.empty(1, self.heads_q, dtype=torch.float32, device="meta") if self.alibi else None,
            sink=empty(self.heads_q) if self.sink else None,
            grad=self.grad,
        )

    @property
    def softmax_scale(self) -> float:
        """What multiplies the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def slopes(self) -> list[float]:
        """ALiBi's, a head: 2 ** (-8 / heads_q), and each the one before times the first (Press et al. 2022)."""
        return [2.0 ** (-8.0 * (head + 1) / self.heads_q) for head in range(self.heads_q)]

    def alibi_bias(self, rows: Tensor, heads: slice = ALL) -> Tensor:
        """What ALiBi adds to the scores of these query rows, (1, heads, rows, seqlen_k) in fp32."""
        rows = rows[:, None] + (self.seqlen_k - self.seqlen_q)
        distance = (rows - torch.arange(self.seqlen_k, dtype=torch.int64, device=rows.device)).abs()
        slopes = torch.tensor(self.slopes[heads], dtype=torch.float32, device=rows.device)
        return (-slopes[:, None, None] * distance)[None]

    @property
    def id(self) -> str:
        heads = str(self.heads_q) if self.heads_q == self.heads_k else f"{self.heads_q}/{self.heads_k}"
        seqlen = str(self.seqlen_q) if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        head_dim = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        sizes = f"b{self.batch} s{seqlen} h{heads} d{head_dim}"
        others = "".join(f", {text}" for text in (*([] if self.data == NORMAL else [self.data]), *change_words(self.changes)))
        return f"{self.name} {sizes} {_short(str(self.case['mask']))} {self.case['dtype']} {self.direction}{others}"

    @property
    def shape(self) -> Shape:
        return Shape(
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            heads_q=self.heads_q,
            heads_k=self.heads_k,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            pairs=self.mask.pairs(self.seqlen_q, self.seqlen_k, self.batch, self.heads_q),
        )

    @property
    def flops(self) -> int:
        """On the visible pairs."""
        return flops(self.shape, self.direction)

    @property
    def paper_flops(self) -> int | None:
        """In the papers' convention, which exists for full and causal masks of equal lengths only."""
        if self.mask not in (Full(), Causal()) or self.seqlen_q != self.seqlen_k:
            return None
        return paper_flops(self.shape, self.mask == Causal(), self.direction)

    @property
    def bytes(self) -> int:
        """Every operand moved once; a bias is read in each pass, and its gradient written."""
        bias = math.prod(self.bias_shape) * self.dtype.itemsize if self.bias else 0
        times = {"fwd": 1, "bwd": 1 + self.bias_grad, "fwd+bwd": 2 + self.bias_grad}[self.direction]
        return hbm_bytes(self.shape, "once", self.direction) + times * bias

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """(batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k); of a workload with a bias."""
        assert self.bias is not None
        sizes = zip(AXES, (self.batch, self.heads_q, self.seqlen_q, self.seqlen_k), strict=True)
        return tuple(size if axis in self.bias else 1 for axis, size in sizes)

    @property
    def documents(self) -> tuple[list[int], list[int], bool] | None:
        """(cu_seqlens_q, cu_seqlens_k, causal) where every token is in a document and each is full or causal, which is what packed kernels take."""
        mask = self.mask
        if not isinstance(mask, Documents) or mask.inner not in (Full(), Causal()) or self.batch != 1:
            return None
        starts_q, starts_k = _starts(mask)
        whole = (starts_q[-1], starts_k[-1]) == (self.seqlen_q, self.seqlen_k)
        return (starts_q, starts_k, mask.inner == Causal()) if whole else None

    def hidden(self, device: torch.device) -> Tensor | None:
        """What the mask hides, as a dense tensor; None where that is nothing."""
        return None if self.mask == Full() else ~self.mask.dense(self.seqlen_q, self.seqlen_k).to(device)

    @property
    def grad(self) -> bool:
        return self.direction != "fwd"

    @property
    def finite(self) -> bool:
        """Whether the inputs hold neither NaN nor infinities."""
        return DISTRIBUTIONS[self.data].finite

    def inputs(self, seed: int, device: torch.device | str = "cpu", heads_first: bool = False) -> Inputs:
        """Fresh tensors of the workload's distribution; q, k, v take gradients when the direction has a backward.

        `heads_first`: the same elements, stored as (batch, heads, seqlen, head_dim). Where `scale` is given, q has it taken out, over the usual
        one: models without a scale begin with such weights, and scores are of the usual size.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def normal(seqlen: int, heads: int, dim: int) -> Tensor:
            return torch.randn(self.batch, seqlen, heads, dim, generator=generator, dtype=torch.float32, device=device)

        q = normal(self.seqlen_q, self.heads_q, self.head_dim)
        k = normal(self.seqlen_k, self.heads_k, self.head_dim)
        v = normal(self.seqlen_k, self.heads_k, self.head_dim_v)
        d_o = normal(self.seqlen_q, self.heads_q, self.head_dim_v)
        ends = (self.seqlen_q, self.seqlen_k)
        if isinstance(self.mask, Documents):
            starts_q, starts_k = _starts(self.mask)
            ends = (starts_q[-1], starts_k[-1])
        made = DISTRIBUTIONS[self.data](Inputs(q, k, v, d_o), Source(generator, self.dtype, self.grad, ends))
        if self.scale:
            made = made._replace(q=made.q * (self.head_dim**-0.5 / self.scale))
        q, k, v, d_o = (x.to(self.dtype) for x in made)
        if heads_first:
            q, k, v, d_o = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, d_o))
        return Inputs(*(x.requires_grad_(self.grad) for x in (q, k, v)), d_o)

    def extras(self, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The tensors that a call takes other than q, k and v, by the names of `tilewise.attention`: "bias" of `bias_shape`, "sink" (heads_q,),
        and "alibi_slopes" (heads_q,) fp32, which are `slopes`.

        Standard normal elements in the workload's dtype; a sink takes a gradient where the direction has a backward, a bias with `bias_grad`.
        """
        generator = torch.Generator(device).manual_seed(seed + 1_000_003)  # a stream of its own, whatever `inputs` draws
        shapes = {"bias": self.bias_shape if self.bias else None, "sink": (self.heads_q,) if self.sink else None}
        wants = {"bias": self.grad and self.bias_grad, "sink": self.grad}
        drawn = {
            name: torch.randn(*shape, generator=generator, dtype=torch.float32, device=device).to(self.dtype).requires_grad_(wants[name])
            for name, shape in shapes.items()
            if shape is not None
        }
        fixed = {"alibi_slopes": torch.tensor(self.slopes, dtype=torch.float32, device=device)} if self.alibi else {}
        return drawn | fixed


def change_words(changes: dict) -> list[str]:
    """`Workload.changes`, or a case that holds them, in words: "softcap 50", "sink", "bias hqk with gradient", "ALiBi"."""
    words = {"scale": "scale {:g}", "softcap": "softcap {:g}", "sink": "sink", "bias": "bias {}", "alibi": "ALiBi"}
    return [text.format(changes[name]) for name, text in words.items() if name in changes]


def tokens(number: int) -> str:
    """8k, or 1000."""
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def _starts(mask: Documents) -> tuple[list[int], list[int]]:
    """cu_seqlens_q and cu_seqlens_k."""
    assert mask.cu_seqlens_k is not None  # since its __post_init__
    return list(mask.cu_seqlens_q), list(mask.cu_seqlens_k)


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
