"""The cases every implementation is held to: `Case` says what is computed in a readable id, `make` draws random tensors for it.

QUICK covers every feature, mask, dtype, memory layout and odd shape at least once, in seconds; FULL crosses them.
"""

import itertools
import re
import zlib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tilewise.backends.reference import lse_dtype
from tilewise.masks import (
    Causal,
    ChunkedCausal,
    Dense,
    Documents,
    FirstKeys,
    Full,
    Mask,
    Padding,
    PerHead,
    PrefixLM,
    PrefixTree,
    Slices,
    SlidingWindow,
)
from tilewise.problem import Call, Dropout

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = ("bshd", "bhsd", "sliced", "expanded", "inner")
OPERATORS = {"&": ".and.", "|": ".or.", "-": ".minus.", "~": ".not."}
SLUG_LIMIT = 60
LOWEST = float(torch.finfo(torch.float32).min)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is computed; see `Call` for the meaning of the fields that are not explained here."""

    batch: int = 2
    seqlen_q: int = 65
    seqlen_k: int = 129
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None  # None: as head_dim
    mask: Mask = field(default_factory=Full)
    dtype: str = "fp32"  # a key of DTYPES
    scale: float | None = None  # None: head_dim ** -0.5
    softcap: float = 0.0
    bias: str | None = None  # the dimensions that it does not broadcast over, of "bhq"; "" broadcasts over all three
    bias_hides: bool = False  # some of the bias is -inf, one whole row of it included
    bias_fill: float | None = None  # what hides keys instead, as additive masks do: finite, at most as low as the bias's dtype goes
    alibi: str | None = None  # "h" one slope a head, "bh" one a batch entry and head
    diagonal: bool = False
    sink: bool = False
    wide: bool = False  # bias and sink in fp32, whatever q is
    dropout: float = 0.0
    lse_grad: bool = False  # a gradient reaches LSE
    layout: str = "bshd"  # one of LAYOUTS, how q, k, v and d_o lie in memory

    @property
    def id(self) -> str:
        """Such as b2-q65k129-h4/2-d72v40-causal-bf16-softcap2-sink; what has its default value is left out."""
        value = f"v{self.head_dim_v}" if self.head_dim_v not in (None, self.head_dim) else ""
        parts = [
            f"b{self.batch}",
            f"q{self.seqlen_q}k{self.seqlen_k}",
            f"h{self.heads_q}/{self.heads_k}",
            f"d{self.head_dim}{value}",
            mask_slug(self.mask),
            self.dtype,
        ]
        parts += [f"{name}{getattr(self, name):g}" for name in ("scale", "softcap", "dropout") if getattr(self, name)]
        parts += [f"{name}{getattr(self, name)}" for name in ("bias", "alibi") if getattr(self, name) is not None]
        parts += [] if self.bias_fill is None else [f"fill{self.bias_fill:g}".replace("+", "")]
        parts += [name.replace("_", "") for name in ("bias_hides", "diagonal", "sink", "wide", "lse_grad") if getattr(self, name)]
        return "-".join(parts + [self.layout] * (self.layout != "bshd"))


def mask_slug(mask: Mask) -> str:
    """A mask's expression in letters, digits and dots; long ones are cut and end in a checksum."""
    tensors: list[Tensor] = []
    text = mask.text(tensors)
    for index, tensor in enumerate(tensors):
        text = text.replace(f"#{index}", "x".join(map(str, tensor.shape)))
    for sign, word in OPERATORS.items():
        text = text.replace(sign, word)
    slug = re.sub(r"[^a-z0-9]+", ".", text.lower()).strip(".")
    return slug if len(slug) <= SLUG_LIMIT else f"{slug[:SLUG_LIMIT]}.{zlib.crc32(slug.encode()):08x}"


def make(case: Case, seed: int = 0, device: torch.device | str = "cpu", grad: bool = False) -> Call:
    """The case's call on normal random tensors."""
    draw = _Draw(case, seed, device)
    head_dim_v = case.head_dim_v or case.head_dim
    q = draw.rows(case.seqlen_q, case.heads_q, case.head_dim)
    k = draw.rows(case.seqlen_k, case.heads_k, case.head_dim)
    v = draw.rows(case.seqlen_k, case.heads_k, head_dim_v)
    aux = torch.float32 if case.wide else q.dtype
    return Call(
        q=q,
        k=k,
        v=v,
        mask=case.mask,
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        softcap=case.softcap,
        bias=None if case.bias is None else _bias(case, case.bias, draw, aux).to(device),
        alibi_slopes=None if case.alibi is None else draw.uniform(case.batch if "b" in case.alibi else 1, case.heads_q).to(device) / 4,
        sink=draw.normal(case.heads_q).to(aux).to(device) if case.sink else None,
        diagonal=draw.integers(case.seqlen_q).to(device) if case.diagonal else None,
        dropout=Dropout(case.dropout, seed=(seed << 33) + 5, offset=7) if case.dropout else None,
        grad=grad,
    )


def upstream(case: Case, seed: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None]:
    """Random gradients of O, in the case's layout, and of LSE (None unless the case has `lse_grad`)."""
    draw = _Draw(case, seed + 1_000_003, device)
    d_o = draw.rows(case.seqlen_q, case.heads_q, case.head_dim_v or case.head_dim)
    d_lse = draw.normal(case.batch, case.heads_q, case.seqlen_q).to(lse_dtype(d_o.dtype)).to(device)
    return d_o, d_lse if case.lse_grad else None


class _Draw:
    """Random tensors of one case; drawn on the CPU, so that every device gets the same."""

    def __init__(self, case: Case, seed: int, device: torch.device | str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def integers(self, n: int) -> Tensor:
        return torch.randint(-n, n + 1, (n,), generator=self.generator, dtype=torch.int64, device="cpu")

    def rows(self, seqlen: int, heads: int, dim: int) -> Tensor:
        """(batch, seqlen, heads, dim) in the case's dtype and layout."""
        batch, dtype = self.case.batch, DTYPES[self.case.dtype]
        match self.case.layout:
            case "bshd":
                return self.normal(batch, seqlen, heads, dim).to(self.device, dtype)
            case "bhsd":
                return self.normal(batch, heads, seqlen, dim).to(self.device, dtype).transpose(1, 2)
            case "sliced":
                return self.normal(batch, seqlen + 3, heads + 1, dim + 8).to(self.device, dtype)[:, 3:, 1:, :dim]
            case "expanded":
                return self.normal(1, seqlen, heads, dim).to(self.device, dtype).expand(batch, -1, -1, -1)
            case "inner":
                return self.normal(batch, seqlen, heads, 2 * dim).to(self.device, dtype)[..., ::2]
        raise ValueError(f"layout must be one of {LAYOUTS}, got {self.case.layout!r}")


def _bias(case: Case, axes: str, draw: _Draw, dtype: torch.dtype) -> Tensor:
    """A filled row keeps unfilled keys at its end: of a row of -1e30 alone neither fp64 nor fp32 keeps a score, nor P = exp(s - LSE)."""
    sizes = zip("bhq", (case.batch, case.heads_q, case.seqlen_q), strict=True)
    bias = draw.normal(*(size if name in axes else 1 for name, size in sizes), case.seqlen_k)
    if case.bias_hides:
        bias[draw.uniform(*bias.shape) < 0.3] = -torch.inf
        bias[..., -1:, :] = -torch.inf
    bias = bias.to(dtype)
    if case.bias_fill is not None:
        fill = max(case.bias_fill, torch.finfo(dtype).min)
        bias[draw.uniform(*bias.shape) < 0.3] = fill
        bias[..., -1:, : case.seqlen_k // 2] = fill
    return bias


def random_mask(seqlen_q: int, seqlen_k: int, batch: int | None = None, heads: int | None = None) -> Dense:
    """A seeded random boolean mask with a last row that sees nothing."""
    shape = (seqlen_q, seqlen_k) if batch is None or heads is None else (batch, heads, seqlen_q, seqlen_k)
    shown = torch.rand(shape, generator=torch.Generator().manual_seed(17), dtype=torch.float32, device="cpu") < 0.6
    shown[..., -1:, :] = False
    return Dense(shown)


def masks(seqlen_q: int, seqlen_k: int) -> list[Mask]:
    """Every kind of mask, for batch 2, lengths of at least 16 and 4 query heads."""
    n = min(seqlen_q, seqlen_k)
    return [
        Full(),
        Causal(),
        Causal(align="top_left"),
        SlidingWindow(n // 3, 0),
        SlidingWindow(7, 5, align="top_left"),
        SlidingWindow(None, 3),
        SlidingWindow(2, None),
        PrefixLM(n // 2),
        FirstKeys(5),
        ChunkedCausal(n // 4),
        PrefixTree((-1, 0, 1, 1, 0), (n // 4, n // 5, n // 6, n // 7, n // 8)),
        Documents((0, 3, 3, n // 2, n - 1), inner=Causal()),
        Documents((0, 1, n // 2, seqlen_q), (0, n // 3, n // 3, seqlen_k), inner=SlidingWindow(4, 0)),
        Documents((0, n // 2, n), inner=Causal()) & (SlidingWindow(6, 0) | FirstKeys(2)),
        Full() - SlidingWindow(3, 3),
        Slices(((0, n // 2), (n // 3, n)), ((0, n), (n // 2, n)), (1, 3)),
        PerHead({(0, 1): Causal(), (1, 4): SlidingWindow(9, 2)}),
        random_mask(seqlen_q, seqlen_k),
        random_mask(seqlen_q, seqlen_k, batch=2, heads=4),
        random_mask(seqlen_q, seqlen_k) & Causal(),
        Padding((seqlen_k, n // 2)) & Causal(),
        Padding((0, n // 2), (3, n // 3), SlidingWindow(n // 4, 2)) - FirstKeys(n // 2),
    ]


FEATURES: tuple[dict, ...] = (
    {"softcap": 2.0},
    {"scale": 0.6, "lse_grad": True},
    {"bias": "bhq"},
    {"bias": "h"},
    {"bias": "q", "bias_hides": True},
    {"bias": ""},
    {"alibi": "h"},
    {"alibi": "bh", "diagonal": True},
    {"sink": True, "lse_grad": True},
    {"dropout": 0.3},
    {"softcap": 3.0, "bias": "hq", "alibi": "h", "sink": True, "dropout": 0.2, "lse_grad": True},
    {"bias": "b", "sink": True, "wide": True},
)

# Fills of additive masks. Every query must see a few dozen keys, of which some stay unfilled.
FILLS: tuple[dict, ...] = (
    {"bias": "bhq", "bias_fill": -1e30},
    {"bias": "hq", "bias_fill": LOWEST, "wide": True},
    {"bias": "bq", "bias_fill": -1e4, "lse_grad": True},
    {"bias": "q", "bias_fill": LOWEST, "sink": True},
)

SHAPES: tuple[dict, ...] = (
    {"batch": 1, "seqlen_q": 1, "seqlen_k": 1, "heads_q": 1, "heads_k": 1, "head_dim": 1},
    {"batch": 1, "seqlen_q": 1, "seqlen_k": 300, "heads_q": 8, "heads_k": 1, "head_dim": 128},
    {"batch": 2, "seqlen_q": 300, "seqlen_k": 1, "heads_q": 2, "heads_k": 2, "head_dim": 64},
    {"batch": 3, "seqlen_q": 31, "seqlen_k": 33, "heads_q": 3, "heads_k": 3, "head_dim": 3, "head_dim_v": 5},
    {"batch": 2, "seqlen_q": 129, "seqlen_k": 65, "heads_q": 6, "heads_k": 2, "head_dim": 40},
    {"batch": 1, "seqlen_q": 64, "seqlen_k": 257, "heads_q": 4, "heads_k": 1, "head_dim": 72, "head_dim_v": 40},
    {"batch": 1, "seqlen_q": 128, "seqlen_k": 128, "heads_q": 2, "heads_k": 1, "head_dim": 128},
    {"batch": 1, "seqlen_q": 70, "seqlen_k": 90, "heads_q": 2, "heads_k": 2, "head_dim": 256},
    {"batch": 1, "seqlen_q": 77, "seqlen_k": 50, "heads_q": 2, "heads_k": 1, "head_dim": 192, "head_dim_v": 128},
    {"batch": 1, "seqlen_q": 1000, "seqlen_k": 1000, "heads_q": 2, "heads_k": 1, "head_dim": 64},
)

EMPTY: tuple[dict, ...] = (
    {"seqlen_q": 0},
    {"seqlen_k": 0},
    {"seqlen_k": 0, "sink": True, "lse_grad": True},
    {"batch": 0},
    {"seqlen_q": 0, "seqlen_k": 0},
)


def _turns(*names: str):
    """dtype names, again and again: neighbours in a list get different ones."""
    return itertools.cycle(names)


def _quick() -> list[Case]:
    base = Case(seqlen_q=45, seqlen_k=70, head_dim=32, head_dim_v=24)
    turns = _turns("fp32", "bf16", "fp16")
    cases = [Case(**shape, mask=mask, dtype=next(turns)) for mask in (Full(), Causal()) for shape in SHAPES]
    turns = _turns("fp32", "bf16")
    for seqlen_q, seqlen_k in ((45, 70), (70, 45)):
        shaped = replace(base, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        cases += [replace(shaped, mask=mask, dtype=next(turns)) for mask in masks(seqlen_q, seqlen_k)]
        next(turns)
    turns = _turns("bf16", "fp32", "fp16")
    for mask in (Causal(), SlidingWindow(20, 4)):
        cases += [replace(base, mask=mask, dtype=next(turns), **feature) for feature in FEATURES]
        next(turns)
    cases += [replace(base, dtype=dtype, **empty) for dtype in ("fp32", "bf16") for empty in EMPTY]
    layouts = ("bhsd", "sliced", "expanded")
    cases += [replace(base, mask=Causal(), dtype=dtype, layout=layout) for dtype in ("fp32", "bf16") for layout in layouts]
    turns = _turns("fp32", "bf16", "fp16")
    cases += [replace(base, mask=mask, dtype=next(turns), **fill) for mask, fill in zip((Causal(), Full()) * 2, FILLS, strict=True)]
    everything = FEATURES[-2]
    cases += [replace(base, dtype="fp64"), replace(base, dtype="fp64", mask=Causal(), **everything)]
    return cases


def _full() -> list[Case]:
    cases = []
    for dtype in DTYPES:
        cases += [Case(**shape, mask=mask, dtype=dtype) for shape in SHAPES for mask in (Full(), Causal(), SlidingWindow(17, 3))]
        for seqlen_q, seqlen_k in ((100, 163), (163, 100), (128, 128)):
            shaped = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype)
            cases += [replace(shaped, mask=mask) for mask in masks(seqlen_q, seqlen_k)]
            picked = (Full(), Causal(), masks(seqlen_q, seqlen_k)[12], random_mask(seqlen_q, seqlen_k))
            cases += [replace(shaped, mask=mask, **feature) for mask in picked for feature in FEATURES]
        cases += [Case(seqlen_q=100, seqlen_k=163, dtype=dtype, mask=mask, **fill) for mask in (Full(), Causal()) for fill in FILLS]
        cases += [Case(dtype=dtype, mask=Causal(), layout=layout) for layout in LAYOUTS[1:4]]
        cases += [Case(dtype=dtype, head_dim=head_dim, mask=Causal()) for head_dim in (1, 2, 7, 8, 16, 33, 80, 96, 112, 160, 255)]
        cases += [Case(dtype=dtype, **empty) for empty in EMPTY]
    return cases


QUICK: list[Case] = _quick()
FULL: list[Case] = list(dict.fromkeys(QUICK + _full()))
