"""What is measured: `Workload`, the papers' sweep, sweeps that two cores can do, and the attention of models people run."""

import itertools
import math
import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tilewise.bench.distributions import DISTRIBUTIONS, NORMAL, Inputs, Source
from tilewise.machine.roofline import DIRECTIONS, Direction, Shape, flops, hbm_bytes, paper_flops
from tilewise.masks import Causal, Documents, FirstKeys, Full, Mask, PrefixLM, SlidingWindow
from tilewise.problem import Call, Problem

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
AXES = "bhqk"  # of a bias: batch, query heads, queries, keys


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention to time. `seqlen_k`, `heads_k` and `head_dim_v` default to the query's; `name` says which sweep or model it is from.

    `scale` None is head_dim ** -0.5. `bias` names the axes along which an additive bias varies, of "bhqk" in this order and with k: "hqk" is a
    bias of (1, heads_q, seqlen_q, seqlen_k); `bias_grad`: a backward pass computes its gradient, too. `sink`: a learnable logit a head.
    `data` names the distribution of the inputs (distributions.py). `rms`: the errors of all that is computed are measured, beside the check.

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

    def __post_init__(self):
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction is {self.direction!r}; it must be one of {', '.join(DIRECTIONS)}")
        if self.data not in DISTRIBUTIONS:
            raise ValueError(f"data is {self.data!r}; it must be one of {', '.join(DISTRIBUTIONS)}")
        if self.bias is not None and (self.bias[-1:] != "k" or self.bias != "".join(axis for axis in AXES if axis in self.bias)):
            raise ValueError(f"bias is {self.bias!r}; it must be None or axes out of {AXES!r}, in this order and with k, as in 'hqk'")
        if self.bias_grad and self.bias is None:
            raise ValueError("bias_grad is True and bias is None; give the axes of the bias, as in bias='hqk'")
        if self.changes and (self.data != NORMAL or self.rms):
            given = f"data is {self.data!r}, rms is {self.rms}"
            raise ValueError(f"{given}, and scores are changed by {', '.join(self.changes)}; that takes data={NORMAL!r} and rms=False")
        for given, default in (("seqlen_k", self.seqlen_q), ("heads_k", self.heads_q), ("head_dim_v", self.head_dim)):
            object.__setattr__(self, given, getattr(self, given) or default)
        if self.heads_q % self.heads_k:
            raise ValueError(f"heads_q is {self.heads_q} and heads_k is {self.heads_k}; heads_q must be a multiple of heads_k")

    @property
    def case(self) -> dict[str, int | str]:
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
        return {name: value for name, value in found.items() if value is not None}

    def lacking(self, *has: str) -> list[str]:
        """Why an implementation that has these of "scale", "softcap", "sink", "bias" and "bias gradient" cannot serve; empty where it can."""
        needs = [*self.changes, *(["bias gradient"] if self.bias_grad and self.grad else [])]
        missing = [name for name in needs if name not in has]
        if "bias" in missing:
            missing = [name for name in missing if name != "bias gradient"]
        return [f"it has no {name}" for name in missing]

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
            grad=self.grad,
        )

    def call(self) -> Call:
        """The call, on tensors that hold nothing."""

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device="meta")

        k_and_v = (empty(self.batch, self.seqlen_k, self.heads_k, dim) for dim in (self.head_dim, self.head_dim_v))
        extras = {"bias": empty(*self.bias_shape) if self.bias else None, "sink": empty(self.heads_q) if self.sink else None}
        q, scale = empty(self.batch, self.seqlen_q, self.heads_q, self.head_dim), self.softmax_scale
        k, v = k_and_v
        return Call(q=q, k=k, v=v, mask=self.mask, scale=scale, softcap=self.softcap, grad=self.grad, **extras)

    @property
    def softmax_scale(self) -> float:
        """What multiplies the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def id(self) -> str:
        heads = str(self.heads_q) if self.heads_q == self.heads_k else f"{self.heads_q}/{self.heads_k}"
        seqlen = str(self.seqlen_q) if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        head_dim = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        sizes = f"b{self.batch} s{seqlen} h{heads} d{head_dim}"
        others = "".join(f", {text}" for text in (*([] if self.data == NORMAL else [self.data]), *change_words(self.changes)))
        return f"{self.name} {sizes} {_short(self.case['mask'])} {self.case['dtype']} {self.direction}{others}"

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
        sizes = zip(AXES, (self.batch, self.heads_q, self.seqlen_q, self.seqlen_k), strict=True)
        return tuple(size if axis in self.bias else 1 for axis, size in sizes)

    @property
    def grad(self) -> bool:
        return self.direction != "fwd"

    @property
    def finite(self) -> bool:
        """Whether the inputs hold neither NaN nor infinities."""
        return DISTRIBUTIONS[self.data].finite

    def inputs(self, seed: int, device: torch.device | str = "cpu", heads_first: bool = False) -> Inputs:
        """Fresh tensors of the workload's distribution; q, k, v take gradients when the direction has a backward.

        `heads_first`: the same numbers in memory that is (batch, heads, seqlen, head_dim). Where `scale` is given, q has it taken out, over the usual
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
            ends = (self.mask.cu_seqlens_q[-1], self.mask.cu_seqlens_k[-1])
        made = DISTRIBUTIONS[self.data](Inputs(q, k, v, d_o), Source(generator, self.dtype, self.grad, ends))
        if self.scale:
            made = made._replace(q=made.q * (self.head_dim**-0.5 / self.scale))
        q, k, v, d_o = (x.to(self.dtype) for x in made)
        if heads_first:
            q, k, v, d_o = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, d_o))
        return Inputs(*(x.requires_grad_(self.grad) for x in (q, k, v)), d_o)

    def extras(self, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The tensors that a call takes beside q, k and v, by the names of `tilewise.attention`: "bias" of `bias_shape`, "sink" (heads_q,).

        Standard normal numbers in the workload's dtype; a sink takes a gradient where the direction has a backward, a bias with `bias_grad`.
        """
        generator = torch.Generator(device).manual_seed(seed + 1_000_003)  # numbers of their own, whatever `inputs` draws
        shapes = {"bias": self.bias_shape if self.bias else None, "sink": (self.heads_q,) if self.sink else None}
        wants = {"bias": self.grad and self.bias_grad, "sink": self.grad}
        return {
            name: torch.randn(*shape, generator=generator, dtype=torch.float32, device=device).to(self.dtype).requires_grad_(wants[name])
            for name, shape in shapes.items()
            if shape is not None
        }


def change_words(changes: dict) -> list[str]:
    """`Workload.changes`, or a case that holds them, in words: "softcap 50", "sink", "bias hqk with gradient"."""
    words = {"scale": "scale {:g}", "softcap": "softcap {:g}", "sink": "sink", "bias": "bias {}"}
    return [text.format(changes[name]) for name, text in words.items() if name in changes]


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def paper_sweep(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """FA2 section 4.1, FA3 section 4.1: hidden dimension 2048, 16,384 tokens in all, head_dim 64 to 256, with and without causal mask."""
    return _sweep("papers", (512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256), 2048, 16384, dtype, direction)


def ladder_sweep(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """The papers' sweep without head_dim 256, which the ladder has no kernels for."""
    return ladder_cells(dtype=dtype, direction=direction)


def ladder_cells(
    seqlens=(512, 1024, 2048, 4096, 8192, 16384), head_dims=(128, 64), causal=(False, True), dtype=torch.bfloat16, direction="fwd"
) -> list[Workload]:
    """Cells of the ladder's sweep, at any length: hidden dimension 2048, and as many sequences as make 16,384 tokens, at least one."""
    cells = _sweep("ladder", seqlens, head_dims, 2048, 16384, dtype, direction)
    return [cell for cell in cells if (cell.mask == Causal()) in causal]


def cpu_sweep(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """The papers' sweep cut down to seconds on two cores: hidden dimension 512, 4,096 tokens, head_dim 64 and 128."""
    return _sweep("cpu", (512, 1024, 2048, 4096), (64, 128), 512, 4096, dtype, direction)


def mask_shapes(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """What skipping tiles is worth: the same 8,192 tokens under masks that hide more and more of the score matrix; grouped heads."""
    packed = Documents([0, 1024, 1536, 3584, 4096, 4224, 6272, 8192], inner=Causal())
    sizes = {"batch": 1, "seqlen_q": 8192, "heads_q": 8, "heads_k": 2, "head_dim": 64}
    masks = (Causal(), SlidingWindow(1023, 0), packed, SlidingWindow(127, 0) | FirstKeys(4))
    return [Workload(name="masks", **sizes, mask=mask, dtype=dtype, direction=direction) for mask in masks]


def _sweep(name, seqlens, head_dims, hidden, tokens, dtype, direction) -> list[Workload]:
    return [
        Workload(
            name=name,
            batch=max(1, tokens // seqlen),
            seqlen_q=seqlen,
            heads_q=hidden // head_dim,
            head_dim=head_dim,
            mask=mask,
            dtype=dtype,
            direction=direction,
        )
        for head_dim in head_dims
        for mask in (Full(), Causal())
        for seqlen in seqlens
    ]


def gpu_shapes(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """What the papers' sweep leaves out on a GPU: windows, grouped heads, keys wider than values, and 32,768 tokens of packed documents."""

    def made(name: str, seqlen: int, heads: int, head_dim: int = 128, mask: Mask | None = None, **other) -> Workload:
        sizes = {"batch": 1, "seqlen_q": seqlen, "heads_q": heads, "head_dim": head_dim, **other}
        return Workload(name=name, mask=mask or Causal(), dtype=dtype, direction=direction, **sizes)

    rows = [made("gpu-window", 16384, 2048 // dim, dim, SlidingWindow(width - 1, 0)) for dim in (128, 64) for width in (1024, 4096)]
    rows += [made("gpu-gqa", 4096, 32, batch=4, heads_k=8), made("gpu-wide", 8192, 16, 192, head_dim_v=128)]
    zipf = [round(6762 / rank) for rank in range(1, 72)]
    zipf[0] += 32768 - sum(zipf)
    packed = {"1k": [1024] * 32, "128": [128] * 256, "zipf": zipf, "long": [24576] + [256] * 32}
    return rows + [
        made(f"gpu-documents-{name}", 32768, 16, mask=Documents([0, *itertools.accumulate(lengths)], inner=Causal()))
        for name, lengths in packed.items()
    ]


def gpu_cross(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """Cross-attention of an image's tokens to the 77 of a text."""
    sizes = [(4096, 10, 64), (1024, 20, 64), (4096, 8, 96), (4096, 8, 128), (1024, 16, 128), (4096, 8, 192)]
    return [
        Workload(
            name="gpu-cross", batch=8, seqlen_q=seqlen, seqlen_k=77, heads_q=heads, head_dim=dim, head_dim_v=min(dim, 128),
            mask=Full(), dtype=dtype, direction=direction,
        )
        for seqlen, heads, dim in sizes
    ]  # fmt: skip


def fp8_sweep(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """The papers' sweep from 2,048 tokens on, for contenders in 8 bits (eight_bit_impls.py) beside those in 16; with errors."""
    return [replace(cell, rms=True) for cell in _sweep("fp8", (2048, 8192, 16384), (64, 128, 256), 2048, 16384, dtype, direction)]


def fp8_small(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """The same for the emulation on a CPU, which is checked rather than timed there."""
    return [replace(cell, rms=True) for cell in _sweep("fp8-small", (256, 512), (64, 128), 256, 512, dtype, direction)]


def cpu_table(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """Every kind of work that the CPU kernel is held to a target in; what is about one dtype or direction appears in that one only."""

    def made(name: str, seqlen: int, heads: int, head_dim: int, mask: Mask | None = None, **other) -> Workload:
        sizes = {"batch": 1, "seqlen_q": seqlen, "heads_q": heads, "head_dim": head_dim, **other}
        return Workload(name=name, mask=mask or Full(), dtype=dtype, direction=direction, **sizes)

    causal, both = Causal(), (Full(), Causal())
    if dtype == torch.float16:
        return [made("cpu-dense", 1024, 8, 64, mask) for mask in both]
    lengths = (1024, 2048, 4096, 8192) if dtype == torch.float32 else (1024, 4096)
    rows = [made("cpu-dense", seqlen, 8, 64, mask) for mask in both for seqlen in lengths]
    rows += [made("cpu-dense", seqlen, 4, 128, mask) for mask in both for seqlen in (1024, 4096)]
    rows += [made("cpu-gqa", 1024, heads_q, 128, causal, heads_k=heads_k) for heads_q, heads_k in ((32, 8), (16, 2))]
    rows += [made("cpu-window", 16384, 2, 64, SlidingWindow(1023, 0)), made("cpu-wide", 1024, 8, 192, causal, head_dim_v=128)]
    rows += [made("cpu-BERT", 128, 12, 32, batch=8), made("cpu-ViT", 197, 12, 64, batch=16)]
    if direction == "fwd":
        rows.append(made("cpu-decode", 1, 8, 64, seqlen_k=16384))
        rows += [made("cpu-tiny", 7, 1, 64)] if dtype == torch.float32 else []
    return rows


def cpu_packed(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """Sixteen documents of 32 to 2,048 tokens in one sequence, for `sdpa:padded` and `sdpa:loop`."""
    lengths = random.Random(16)
    cu_seqlens = [0, 2048]
    for _ in range(15):
        cu_seqlens.append(cu_seqlens[-1] + lengths.randint(32, 700))
    mask = Documents(cu_seqlens, inner=Causal())
    sizes = {"batch": 1, "seqlen_q": cu_seqlens[-1], "heads_q": 8, "head_dim": 64}
    return [Workload(name="cpu-packed", mask=mask, dtype=dtype, direction=direction, **sizes)]


LONGEST = 11  # of a sequence drawn at random, the logarithm to base 2


def cpu_random(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """Twenty shapes and masks drawn at random, none of more than some tens of milliseconds; others for another dtype or direction."""
    return _drawn("cpu-random", random.Random(f"{dtype} {direction}"), LONGEST, dtype, direction)


def cpu_seeds(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """The same of three other seeds, and as many with few queries (1 to 32), where Python and threads count and blocks are ragged."""
    seeds = [f"{dtype} {direction} {seed}" for seed in (1, 2, 3)]
    rows = [row for seed in seeds for row in _drawn("cpu-seeds", random.Random(seed), LONGEST, dtype, direction)]
    return rows + [row for seed in seeds for row in _drawn("cpu-seeds-few", random.Random(seed + " few"), 5, dtype, direction)]


def _drawn(name: str, draw: random.Random, log_q: int, dtype: torch.dtype, direction: Direction) -> list[Workload]:
    """Twenty workloads of at most 2^log_q queries and 2^LONGEST keys."""
    rows: list[Workload] = []
    while len(rows) < 20:
        seqlen_q, seqlen_k = (round(2 ** draw.uniform(0, log)) for log in (log_q, LONGEST))
        heads_k, group, batch = draw.choice((1, 2, 4, 7)), draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 5, 16))
        head_dim = draw.choice((16, 32, 40, 64, 64, 80, 96, 128, 128, 192))
        mask, square = (
            draw.choice((Full(), Full(), Causal(), Causal(), SlidingWindow(draw.randint(0, 300), 0), PrefixLM(10))),
            draw.random() < (0.7 if log_q == LONGEST else 0.3),
        )
        sizes = {"batch": batch, "seqlen_q": seqlen_q, "heads_q": heads_k * group, "heads_k": heads_k, "head_dim": head_dim}
        made = Workload(name=name, **sizes, seqlen_k=seqlen_q if square else seqlen_k, mask=mask, dtype=dtype, direction=direction)
        if 4 * made.seqlen_q * made.seqlen_k * made.batch * made.heads_q * head_dim < 1e10:
            rows.append(made)
    return rows


SETS = {
    "papers": paper_sweep,
    "ladder": ladder_sweep,
    "cpu": cpu_sweep,
    "masks": mask_shapes,
    "gpu-shapes": gpu_shapes,
    "gpu-cross": gpu_cross,
    "fp8": fp8_sweep,
    "fp8-small": fp8_small,
    "cpu-table": cpu_table,
    "cpu-packed": cpu_packed,
    "cpu-random": cpu_random,
    "cpu-seeds": cpu_seeds,
}
