"""What decoding is measured on, the set `decode`: batches of sequences with a cache each, and new tokens that attend to it.

A call reads its cache once and computes little, so what counts is bytes a second, and they must come from memory: a cell has as many copies of
its caches as no L2 cache holds, and calls take turns with them.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.bench.sets.workload import DTYPE_NAMES, tokens

DECODE = "decode"  # of its rows
COLD_BYTES = 160_000_000  # of all copies together, on a GPU
MOST_COPIES = 320
BATCHES, LENGTHS = (1, 4, 16, 64, 256), (1024, 8192, 32768, 131072)
HEADS = (32, 8), (64, 8), (32, 32), (32, 1)
PAGES = 0, 64, 16, 256
LATENT, LATENT_V = 576, 512  # of MLA's absorbed form: its values are the first columns of its keys
SEED = 3


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One batch. `lengths`: tokens of each sequence, new ones among them; `page`: tokens of a page, 0 for contiguous caches.

    `head_dim_v`: where it is given, the cache is latent (MLA): V is that many first columns of K, and one cache holds both. `kind`: "even", "ragged",
    "latent", or "prefix", where the first `prefix` tokens are the same for all. ValueError for what cannot be.
    """

    lengths: tuple[int, ...]
    heads_q: int
    heads_k: int
    page: int = 0
    new: int = 1
    head_dim: int = 128
    prefix: int = 0
    dtype: torch.dtype = torch.bfloat16
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        if min(self.lengths, default=0) < max(self.new, self.prefix):
            raise ValueError(
                f"lengths are {self.lengths}; each sequence needs at least its {self.new} new tokens and the prefix of {self.prefix}"
            )
        if not self.page and (self.prefix or self.kind == "ragged"):
            raise ValueError(f"page is 0, and the batch is {self.kind}; such a batch has pages")
        if self.page and self.prefix % self.page:
            raise ValueError(f"prefix is {self.prefix}; it must be whole pages of {self.page}")
        if self.head_dim_v is not None and (self.heads_k != 1 or self.head_dim_v >= self.head_dim or len(set(self.lengths)) > 1):
            raise ValueError(
                f"head_dim_v is {self.head_dim_v}; a latent cache has one key head, not {self.heads_k}, more columns than values, "
                f"not {self.head_dim}, and sequences of one length"
            )

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def kind(self) -> str:
        if self.latent:
            return "latent"
        return "prefix" if self.prefix else "even" if len(set(self.lengths)) == 1 else "ragged"

    @property
    def latent(self) -> bool:
        return self.head_dim_v is not None

    @property
    def columns(self) -> int:
        """That a token has in the caches, for a key head."""
        return self.head_dim if self.latent else 2 * self.head_dim

    @property
    def tokens(self) -> int:
        """Distinct ones: of a prefix each once."""
        return sum(self.lengths) - (self.batch - 1) * self.prefix

    @property
    def title(self) -> str:
        """As `--only` takes it: `b16 8k 32:8 p64 q1`; p0 is contiguous."""
        return title_of(self.case)

    @property
    def case(self) -> dict[str, int | float | str]:
        """For rows; equal for equal work."""
        heads = {
            "heads_q": self.heads_q,
            "heads_k": self.heads_k,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v or self.head_dim,
        }
        sizes = {"batch": self.batch, "seqlen_q": self.new, "seqlen_k": self.longest, **heads}
        others = {"page": self.page, "tokens": self.tokens, "kind": self.kind}
        return {**sizes, "mask": "Causal()", "dtype": DTYPE_NAMES[self.dtype], "direction": DECODE, **others}

    @property
    def bytes(self) -> int:
        """K and V of each distinct token, once."""
        return self.tokens * self.heads_k * self.columns * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """On visible pairs; of a prefix those of all sequences."""
        pairs = sum(self.new * length - self.new * (self.new - 1) // 2 for length in self.lengths)
        return 2 * pairs * self.heads_q * (self.head_dim + (self.head_dim_v or self.head_dim))

    @property
    def pages(self) -> int:
        """That one copy of the caches has."""
        shared = self.prefix // self.page
        return shared + sum(-(-length // self.page) - shared for length in self.lengths)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of K's cache, and of V's where that is not a part of it."""
        lead = (self.pages, self.page) if self.page else (self.batch, self.longest)
        return *lead, self.heads_k, self.head_dim

    @property
    def copy_bytes(self) -> int:
        """Of K's and V's cache, unused tokens among them."""
        return math.prod(self.shape) // self.head_dim * self.columns * self.dtype.itemsize


def title_of(case: dict) -> str:
    """Of a cell, or of a row of one: `Cell.title`."""
    kind = "" if case["kind"] == "even" else f"{case['kind']}-"
    heads = f"{case['heads_q']}:{case['heads_k']}"
    return f"b{case['batch']} {kind}{tokens(int(case['seqlen_k']))} {heads} p{case['page']} q{case['seqlen_q']}"


def decode_cells(most_bytes: int | None = None) -> list[Cell]:
    """The set's cells with caches of at most `most_bytes` bytes: what tells most comes first."""
    first = [cell for page in PAGES for cell in _grid(HEADS[0], page, 1)]
    rest = [cell for heads in HEADS[1:] for page in PAGES for cell in _grid(heads, page, 1)]
    several = [cell for heads in HEADS for page in PAGES for cell in _grid(heads, page, 4)]
    everything = [*first, *ragged_cells(), prefix_cell(), *rest, *several, *latent_cells()]
    return [cell for cell in everything if most_bytes is None or cell.copy_bytes <= most_bytes]


def _grid(heads: tuple[int, int], page: int, new: int) -> list[Cell]:
    batches = [(batch, length) for length in LENGTHS for batch in BATCHES]
    return [Cell(lengths=(length,) * batch, heads_q=heads[0], heads_k=heads[1], page=page, new=new) for batch, length in batches]


def ragged_cells() -> list[Cell]:
    """Lengths drawn from a log-normal distribution with the mean 8k, 8k and 2k."""
    draw, found = torch.Generator().manual_seed(0), []
    for batch, mean in ((64, 8192), (16, 8192), (256, 2048)):
        z = torch.randn(batch, generator=draw, dtype=torch.float32, device="cpu").exp()
        lengths = tuple((z / z.mean() * mean).clamp(1, 65536).long().tolist())
        found += [Cell(lengths=lengths, heads_q=32, heads_k=8, page=page) for page in (16, 64)]
    return found


def prefix_cell() -> Cell:
    """64 sequences of 1k tokens behind 8k that all of them have."""
    return Cell(lengths=(8192 + 1024,) * 64, heads_q=32, heads_k=8, page=64, prefix=8192)


def latent_cells() -> list[Cell]:
    """MLA in pages of 64, as its servers have it: 16 heads (one of eight GPUs of a DeepSeek-V3) and all 128; one new token, and four."""
    one = [
        Cell(lengths=(length,) * batch, heads_q=heads, heads_k=1, page=64, head_dim=LATENT, head_dim_v=LATENT_V)
        for heads in (16, 128)
        for length in (4096, 16384)
        for batch in (1, 16, 64, 128)
    ]
    return one + [replace(cell, new=4) for cell in one if cell.batch == 64]


@dataclass(frozen=True)
class Caches:
    """The tensors of a cell, on one device."""

    cell: Cell
    q: Tensor  # (batch, new, heads_q, head_dim)
    copies: list[tuple[Tensor, Tensor]]  # K and V, each of `Cell.shape`; V of a latent cache is a view of K
    seqlens: Tensor  # (batch,) int32
    table: Tensor | None  # (batch, pages of the longest) int32, where there are pages

    @property
    def capacity(self) -> int:
        """Tokens that a sequence has room for."""
        return self.copies[0][0].shape[1] * (1 if self.table is None else self.table.shape[1])

    def keys(self, copy: int, b: int, head: slice) -> tuple[Tensor, Tensor]:
        """K and V (length, heads, head_dim) of a sequence, copied out of its pages."""
        k, v = self.copies[copy]
        length = self.cell.lengths[b]
        if self.table is None:
            return k[b, :length, head], v[b, :length, head]
        pages = self.table[b, : -(-length // self.cell.page)].long()
        k, v = (x[pages][:, :, head].flatten(0, 1)[:length] for x in (k, v))
        return k, v


class Pool:
    """Standard normal elements in memory, drawn once, out of which every cell's caches are cut."""

    def __init__(self, device: torch.device, cold_bytes: int | None = None) -> None:
        self.device = device
        self.cold_bytes = (COLD_BYTES if device.type == "cuda" else 0) if cold_bytes is None else cold_bytes
        self.numbers: list[Tensor] = []

    def caches(self, cell: Cell) -> Caches:
        """Raises OutOfMemoryError or RuntimeError where there is not the memory for one copy."""
        numel = math.prod(cell.shape)
        copies = max(1, min(MOST_COPIES, -(-self.cold_bytes // cell.bytes)))
        numbers = self._numbers(numel * copies, cell.dtype)
        k, v = ([x[i * numel : (i + 1) * numel].view(cell.shape) for i in range(copies)] for x in numbers)
        if cell.latent:
            v = [x[..., : cell.head_dim_v] for x in k]
        draw = torch.Generator(self.device).manual_seed(SEED)
        on = {"dtype": torch.float32, "device": self.device}
        q = torch.randn((cell.batch, cell.new, cell.heads_q, cell.head_dim), generator=draw, **on).to(cell.dtype)
        seqlens = torch.tensor(cell.lengths, dtype=torch.int32, device=self.device)
        table = _table(cell).to(self.device) if cell.page else None
        return Caches(cell, q, list(zip(k, v, strict=True)), seqlens, table)

    def _numbers(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if not self.numbers or self.numbers[0].numel() < numel or self.numbers[0].dtype != dtype:
            self.numbers = []
            draw = torch.Generator(self.device).manual_seed(SEED)
            for _ in range(2):
                x = torch.empty(numel, dtype=dtype, device=self.device)
                for part in x.split(1 << 29):  # torch's generators count in 32 bits
                    part.normal_(generator=draw)
                self.numbers.append(x)
        k, v = self.numbers
        return k, v


def _table(cell: Cell) -> Tensor:
    """Pages in random order, but for a prefix's, which all sequences begin with."""
    draw = torch.Generator().manual_seed(1)
    free = torch.randperm(cell.pages, generator=draw, dtype=torch.int32, device="cpu").tolist()
    shared = [free.pop() for _ in range(cell.prefix // cell.page)]
    table = torch.zeros((cell.batch, -(-cell.longest // cell.page)), dtype=torch.int32, device="cpu")
    for b, length in enumerate(cell.lengths):
        own = [free.pop() for _ in range(-(-length // cell.page) - len(shared))]
        table[b, : len(shared) + len(own)] = torch.tensor(shared + own, dtype=torch.int32, device="cpu")
    return table
