"""What is computed: `Problem`, the identity of a compiled kernel, and `Call` and `DecodeCall`, one set of tensors to compute it on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import EIGHT_BITS, check_memory
from tilewise.masks import DeviceDocuments, Mask, Part

INT32 = 2**31 - 1
Values = TypeVar("Values", np.int64, np.ndarray, Tensor)
LEAST_SOFTCAP = 1e-30  # scores of at most so much weigh 1, as those of less do, and it is far from where fp32 is flushed to 0
MOST_SOFTCAP = 1e38  # to scores below 1e34 it is as any larger one


def in_fp32(softcap: float) -> float:
    """A softcap as fp32 holds it, in base 2 as well, and not flushed to 0, which means none; 0 for none."""
    return min(max(softcap, LEAST_SOFTCAP), MOST_SOFTCAP) if softcap > 0.0 else 0.0


class Dropout(NamedTuple):
    """Counter-based dropout: the pair (query i, key j) of (batch b, head h) is kept by a pure function of these and (b, h, i, j)."""

    p: float
    seed: int
    offset: int
    part: Part | None = None  # where i and h are counted in a larger call: its rows and heads that these are

    def drawn_by(self, rng: Tensor) -> "Dropout":
        """With the random state of another call, (2,) int64 on the CPU: seed and offset."""
        seed, offset = rng.tolist()
        return Dropout(self.p, seed, offset, self.part)

    def rows(self, device: torch.device | str) -> Tensor | None:
        """i of each query, (seqlen_q,) int64; None where they are 0, 1, ..."""
        if self.part is None:
            return None
        return torch.cat([torch.arange(*ends, dtype=torch.int64, device=device) for ends in ((0, 0), *self.part.rows)])

    def heads(self, heads_q: int) -> tuple[int, int]:
        """h of the first query head, and how many heads there are, of which the call has heads_q."""
        if self.part is None or self.part.heads is None:
            return 0, heads_q
        first, _, every = self.part.heads
        return first, every


class Share(NamedTuple):
    """The tokens of every sequence that one of `world` ranks holds in its cache, one behind another: those at positions p with
    p // interleave % world == rank. So a rank's keys ascend in position, and the first n tokens of a sequence are its first `held(n)` keys.
    """

    rank: int
    world: int
    interleave: int

    @overload
    def held(self, tokens: int) -> int: ...
    @overload
    def held(self, tokens: Values) -> Values: ...
    def held(self, tokens):
        """How many of a sequence's first `tokens` tokens the rank holds, below 0 none; of an array or a tensor; values stay where they are."""
        if isinstance(tokens, int):
            return int(self.held(np.int64(tokens)))
        turn = self.interleave * self.world
        rest = (tokens % turn - self.rank * self.interleave).clip(0, self.interleave)
        return (tokens // turn * self.interleave + rest).clip(0, None)

    def holds(self, position: Tensor) -> Tensor:
        """Whether the rank holds the token at a position."""
        return position // self.interleave % self.world == self.rank

    def positions(self, keys: Tensor) -> Tensor:
        """Of keys, counted as the rank's cache does, the positions in their sequence."""
        return (keys // self.interleave * self.world + self.rank) * self.interleave + keys % self.interleave


class Extras(NamedTuple):
    """The tensors of a call of attention besides q, k and v, as its caller gave them. A plain tuple of these does as well."""

    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    rng: Tensor | None = (
        None  # (2,) int64 on the CPU, the seed and offset of dropout: new at each call; None for those of the call that was bound
    )
    cu_seqlens_q: Tensor | None = None  # of documents, which the backend leaves on the device
    cu_seqlens_k: Tensor | None = None
    q_scale: Tensor | None = None  # of elements of 8 bits
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


NO_EXTRAS = Extras()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is computed, without anything that changes from call to call (no length, no batch, no tensor).

    A compiled kernel is looked up by (Problem, Config, architecture), so nothing data-dependent may ever be added here.
    """

    device: str  # torch device type: "cpu", "cuda", ...
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    group: int  # heads_q // heads_k
    mask: str  # Mask.kind: "full", "band", "runs", "bitmap"
    softcap: bool = False
    bias: bool = False
    alibi: bool = False
    sink: bool = False
    dropout: bool = False
    grad: bool = False
    deterministic: bool = False
    capability: tuple[int, int] | None = None  # of the CUDA device; None: of the current one
    k_dtype: torch.dtype | None = None  # where it is not `dtype`, which is q's
    v_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None  # of O
    row_max: bool = False
    precision: str | None = None  # the recipe by which 16-bit inputs are quantised: a name of backends/eight_bits.py's RECIPES
    scales: tuple[str, str, str] | None = None  # of q, k and v in 8 bits: "tensor", "head", "token" or "tile" each; None: no scale
    dropout_of_part: bool = False  # whether dropout counts the rows and heads of a larger call (`Dropout.part`)

    @property
    def eight_bits(self) -> bool:
        """Whether elements of 8 bits are multiplied: given ones, or those of `precision`."""
        return self.precision is not None or self.dtype in EIGHT_BITS

    @property
    def mixed(self) -> list[str]:
        """A sentence where not all of q, k, v and O have one dtype, for backends that want that."""
        others = {"k": self.k_dtype, "v": self.v_dtype, "the output": self.out_dtype}
        wrong = [f"{name} in {dtype}" for name, dtype in others.items() if dtype not in (None, self.dtype)]
        return [f"it takes one dtype for all tensors, not {', '.join(wrong)} beside q in {self.dtype}"] if wrong else []


@dataclass(frozen=True, kw_only=True)
class Call:
    """The checked arguments of one attention call, as every backend receives them.

    Shapes: q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_k, head_dim), v (batch, seqlen_k, heads_k, head_dim_v),
    bias (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k), alibi_slopes (batch or 1, heads_q) fp32, sink (heads_q,).
    Packed documents arrive as batch 1 with a `Documents` mask.

    Where q, k and v are float8_e4m3fn (or int8; v e4m3, or the dtype of O), each is multiplied by its scale, fp32, None for 1: () one for all,
    (batch, heads) of its own heads, (batch, heads, tokens), or of k and v (batch, heads_k, ceil(seqlen_k / 128)). `precision` quantises q, k and v
    of 16 bits instead. The arithmetic is backends/eight_bits.py's.

    `diagonal` (seqlen_q,) int64 is the distance ALiBi counts from: key j is `|i + diagonal[i] - j|` away from query i.
    None means `seqlen_k - seqlen_q` for every row (bottom-right alignment); packed documents have one value a document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float
    softcap: float = 0.0
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    diagonal: Tensor | None = None
    dropout: Dropout | None = None
    deterministic: bool = False
    grad: bool = False
    out_dtype: torch.dtype | None = None  # of O, where it is not q's
    precision: str | None = None
    row_max: bool = False  # whether the forward also gives each row's largest score
    out: Tensor | None = None  # shaped, typed and placed as O: a backend that can write O there returns it; others need not look
    wide_keys: bool = False  # dK and dV may come in fp32, for those who add others to them; a backend that rounds them need not look

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[1]

    @property
    def seqlen_k(self) -> int:
        return self.k.shape[1]

    @property
    def heads_q(self) -> int:
        return self.q.shape[2]

    @property
    def heads_k(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[3]

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_k

    @property
    def problem(self) -> Problem:
        return _problem(
            self.q.device.type,
            self.q.dtype,
            self.q.shape[3],
            self.v.shape[3],
            self.q.shape[2] // self.k.shape[2],
            self.mask.kind,
            self.softcap > 0.0,
            self.bias is not None,
            self.alibi_slopes is not None,
            self.sink is not None,
            self.dropout is not None,
            self.grad,
            self.deterministic,
            _capability(self.q.device) if self.q.is_cuda else None,
            None if self.k.dtype == self.q.dtype else self.k.dtype,
            None if self.v.dtype == self.q.dtype else self.v.dtype,
            None if self.out_dtype == self.q.dtype else self.out_dtype,
            self.row_max,
            self.precision,
            self.scales,
            self.dropout is not None and self.dropout.part is not None,
        )

    @property
    def extras(self) -> Extras:
        """Its tensors besides q, k and v."""
        ends = self.mask.ends() if isinstance(self.mask, DeviceDocuments) else (None, None)
        return Extras(self.bias, self.alibi_slopes, self.sink, None, *ends, self.q_scale, self.k_scale, self.v_scale)

    @property
    def scales(self) -> tuple[str, str, str] | None:
        """What the scales are for, as `Problem` has it."""
        if self.q_scale is self.k_scale is self.v_scale is None:
            return None
        sides = (self.q_scale, self.seqlen_q), (self.k_scale, self.seqlen_k), (self.v_scale, self.seqlen_k)
        return _scaled(*sides[0]), _scaled(*sides[1]), _scaled(*sides[2])


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """Attention of the newest tokens against a cache; all tensors on one device, nothing read on the host. Index tensors are int32 or int64."""

    q: Tensor  # (batch, seqlen_q, heads_q, head_dim), or with cu_seqlens_q (total_q, heads_q, head_dim)
    k_cache: Tensor  # (entries, capacity, heads_k, head_dim), or with page_table (pages, page_size, heads_k, head_dim)
    v_cache: Tensor  # likewise, with head_dim_v; both in q's dtype, or float8_e4m3fn or int8 each
    seqlens: Tensor  # (batch,): tokens of each sequence on all ranks, new ones included; clamped to [0, capacity] where it is used
    page_table: Tensor | None  # (batch, max_pages)
    cu_seqlens_q: Tensor | None  # (batch + 1,)
    max_seqlen_q: int  # no sequence has more query tokens
    cache_batch_idx: Tensor | None  # (batch,): the entry of k_cache that holds a sequence
    leftpad: Tensor | None  # (batch,): the first token that may be seen
    tree: Tensor | None  # (batch or 1, new, new) bool: which of the newest `new` tokens see which
    shared_prefix: int  # this many first tokens are the same for all sequences (the same pages)
    split: int | None  # keys of one piece, where results must not depend on the rest of the batch
    mask: Mask  # aligned to each sequence's own length, bottom right
    scale: float
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # (batch or 1, heads_q) fp32
    sink: Tensor | None = None  # (heads_q,) fp32
    k_scale: Tensor | None = (
        None  # fp32, of 8-bit caches: (), (heads_k,), (batch, heads_k) or k_cache's shape without its last dimension; None: 1
    )
    v_scale: Tensor | None = None  # likewise
    rotary: "Rotary | None" = None  # by which q is yet to be rotated
    out_dtype: torch.dtype | None = None  # of O, where it is not q's: fp32, in which a backend may give it; others round
    share: Share | None = None  # the tokens that are in the caches; None: all. Lengths, leftpad and the mask speak of positions

    @property
    def tensors(self) -> "DecodeTensors":
        """Its tensors, as those of a call of `decode` with its new tokens written."""
        cos, sin, _ = self.rotary or (None, None, None)
        return DecodeTensors(*_of_call(self), rotary_cos=cos, rotary_sin=sin)

    @property
    def like(self) -> "DecodeCall":
        """The call without its tensors, so that it holds no memory, for `again`."""
        return self.again(_NOTHING, None)

    def again(self, given: tuple, seqlens: Tensor | None) -> "DecodeCall":
        """The call of other tensors that are laid out as its own: those of DecodeTensors, and `seqlens`, new tokens included."""
        found = self.__dict__.copy()
        found.update(zip(OF_CALL, given, strict=False), seqlens=seqlens)
        if self.rotary is not None:
            found["rotary"] = Rotary._make((*_rotary_of(given), self.rotary.interleaved))
        other = object.__new__(type(self))  # as `dataclasses.replace`, in a fifth of its time
        object.__setattr__(other, "__dict__", found)
        return other

    def in_int32(self) -> "DecodeCall":
        """With index tensors in int32; what does not fit stays as far out of every range."""
        names = "seqlens", "page_table", "cu_seqlens_q", "cache_batch_idx", "leftpad"
        wide = {name: x for name in names if (x := getattr(self, name)) is not None and x.dtype != torch.int32}
        return replace(self, **{name: x.clamp(-INT32, INT32).to(torch.int32) for name, x in wide.items()}) if wide else self


class DecodeTensors(NamedTuple):
    """The tensors of `decode` as its caller gave them, but for slopes, which are as in DecodeCall. A plain tuple of these does as well.

    Those of DecodeCall are first.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    seqlens: Tensor | int | None  # before k and v are appended
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad: Tensor | None
    tree: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    out: Tensor | None = None

    @staticmethod
    def getter(*names: str) -> Callable[[tuple], tuple[Tensor | None, ...]]:
        """What gets the tensors of these names from a tuple of all."""
        return itemgetter(*map(DecodeTensors._fields.index, names))


OF_CALL = DecodeTensors._fields[: DecodeTensors._fields.index("k")]
_NOTHING = (None,) * len(DecodeTensors._fields)
_of_call, _rotary_of = attrgetter(*OF_CALL), DecodeTensors.getter("rotary_cos", "rotary_sin")


class Rotary(NamedTuple):
    """Tables for the positions of queries, the last of their sequences, below 0 as 0 and beyond the tables as their last."""

    cos: Tensor  # (seqlen_rotary, rotary_dim / 2)
    sin: Tensor
    interleaved: bool


@dataclass(frozen=True, kw_only=True)
class AppendCall:
    """New keys and values on their way into a cache, where they have a place there; all tensors on one device, nothing read on the host.

    Index tensors are int32 or int64. A token's place is its number among its sequence's new ones, behind the tokens that the sequence has.
    """

    k_cache: Tensor  # (entries, capacity, heads_k, head_dim), or with page_table (pages, page_size, heads_k, head_dim)
    v_cache: Tensor  # likewise, with head_dim_v
    k: Tensor  # (batch, new, heads_k, head_dim), or with cu_seqlens (total_new, heads_k, head_dim)
    v: Tensor  # likewise, with head_dim_v
    cache_seqlens: Tensor  # (batch,): tokens before
    page_table: Tensor | None  # (batch, max_pages)
    cache_batch_idx: Tensor | None  # (batch,): the entry of k_cache that holds a sequence
    cu_seqlens: Tensor | None  # (batch + 1,): where the new tokens of each sequence begin
    rotary_cos: Tensor | None  # (seqlen_rotary, rotary_dim / 2)
    rotary_sin: Tensor | None
    rotary_first: Tensor | None  # (batch,): the position of the first new token, in place of cache_seqlens
    interleaved: bool
    share: Share | None = None  # the tokens that have a place; None: all

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but rotary_first, in order."""
        return _of_append(self)


_of_append = attrgetter(*list(AppendCall.__dataclass_fields__)[:-3])


def _scaled(scale: Tensor | None, tokens: int) -> str:
    """What a scale is for, by its dimensions."""
    if scale is None or scale.dim() == 0:
        return "tensor"
    return "head" if scale.dim() == 2 else "token" if scale.shape[2] == tokens else "tile"


def one_sink(sink: Tensor | None) -> Tensor | None:
    """Sinks (tokens, heads_q) as one a head, which counts for as much as all of them; anything else as it is."""
    if not isinstance(sink, Tensor) or sink.is_nested or sink.layout != torch.strided or sink.dim() != 2:
        return sink
    if not sink.is_floating_point() or sink.itemsize < 2:
        return sink
    if not torch.compiler.is_compiling() and not sink.is_meta:
        check_memory(sink=sink)  # torch's own operations would read where there is none
    return sink.to(torch.promote_types(sink.dtype, torch.float32)).logsumexp(0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=4096)
def _problem(*fields) -> Problem:
    """The same object for the same fields: making one takes 3 us, finding it a tenth of that."""
    return Problem(**dict(zip(Problem.__dataclass_fields__, fields, strict=True)))


def gradient_like(x: Tensor) -> Tensor:
    """A tensor on the meta device that lies in memory as a gradient of x should: as x, where that is dense, for autograd copies a leaf's gradient
    that lies otherwise; contiguous where x's rows are not. `torch.empty_like` would import sympy for it, which takes 0.4 s, or 2 without bytecode.
    """
    strides, step = [0] * x.dim(), 1
    for i in sorted(reversed(range(x.dim())), key=x.stride):
        strides[i], step = step, step * max(x.shape[i], 1)
    if strides[-1] != 1:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    dense = x.stride(-1) == 1 and all(size <= 1 or a == b for size, a, b in zip(x.shape, strides, x.stride(), strict=True))
    return torch.empty_strided(x.shape, x.stride() if dense else strides, dtype=x.dtype, device="meta")


class Gradients(NamedTuple):
    """Gradients of one call, shaped and typed as the inputs (but see `Call.wide_keys`); None where there is no input or no gradient was asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None
