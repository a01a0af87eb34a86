"""Calls of decode with their kernel, workspace and scalars, found by what these depend on, which is no tensor's content or length."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from tilewise.backends.hopper import short
from tilewise.backends.hopper.decode import pools, prefix
from tilewise.backends.hopper.decode.operands import Lengths, Prior, Tables, Tensors, Work
from tilewise.backends.hopper.operands import Scores
from tilewise.backends.tables.window import Window
from tilewise.problem import DecodeCall, DecodeTensors
from tilewise.sm90.jit import aligned, in_place
from tilewise.views import part

MOST = 1024  # calls that are kept
READ = DecodeTensors.getter(
    "q", "k_cache", "v_cache", "page_table", "cu_seqlens_q", "cache_batch_idx", "leftpad", "tree", "alibi_slopes", "sink", "k_scale", "v_scale",
    "rotary_cos", "rotary_sin",
)  # fmt: skip

Decoded = tuple[Tensor, Tensor]
Bound = TypeVar("Bound")


class Decoder:
    """Calls of one launch, as `Backend.bind_decode` has them, on whichever stream is current.

    Workspace is kept, one a stream, as its launches follow each other. A CUDA graph may be replayed on any stream, so what it captures gets its own.
    """

    def __init__(
        self, call: DecodeCall, kernel: Callable, window: Window, scores: Scores, workspace: Callable[[], Work], out: torch.dtype
    ) -> None:
        """`kernel(Tensors, Lengths, workspace(), window, prior, scores)` computes a call, ragged queries as one entry's, into an O of `out`, with
        its own slopes and sink in the scores.
        """
        self.kernel, self.workspace = kernel, workspace
        self.window, self.share, self.scores = window, call.share, scores._replace(slopes=None, sink=None)
        self.device = call.q.device.index
        self.empty = short.allocator(call.q.device)
        self.ragged = call.cu_seqlens_q is not None
        self.by_call = call.alibi_slopes is not None or call.sink is not None
        self.bits = torch.float8_e4m3fn in (call.k_cache.dtype, call.v_cache.dtype)
        self.scales = [None if x is None or x.dim() == 3 else (x.shape, x.stride(), 0) for x in scales_of(call)]
        *rows, heads, _ = call.q.shape
        shapes = (*rows, heads, call.v_cache.shape[3]), (heads, *rows) if self.ragged else (rows[0], heads, rows[1])
        self.o, self.lse = ((shape, short.strides(shape), dtype) for shape, dtype in zip(shapes, (out, torch.float32), strict=True))
        self.at_hand = [short.by_stream(self.device, partial(self._begin, with_lse)) for with_lse in (False, True)]

    def __call__(
        self,
        given: tuple,
        seqlens: Tensor,
        out: Tensor | None = None,
        with_lse: bool = True,
        prior: Prior | None = None,
        all_seqlens: Tensor | None = None,
        all_cu_seqlens_q: Tensor | None = None,
    ) -> Decoded:
        """prior, all_seqlens, all_cu_seqlens_q: of the launches of `Prefixed`, as operands.py has them."""
        if short.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(given, seqlens, out, with_lse, prior, all_seqlens, all_cu_seqlens_q)
        lse, work, window, scores = self.at_hand[with_lse]()
        q, k, v, pages, cu_seqlens_q, entries, leftpad, tree, slopes, sink, k_scale, v_scale, cos, sin = READ(given)
        o = self.empty(*self.o) if out is None else out
        if lse is None:
            lse = self.empty(*self.lse)
        if self.bits:
            k, v = in_bits(k), in_bits(v)
        of_k, of_v = self.scales
        if of_k is not None:
            k_scale = part(k_scale, *of_k)
        if of_v is not None:
            v_scale = part(v_scale, *of_v)
        if tree is not None:
            tree = tree.view(torch.uint8)
        tables = None if cos is None else (cos, sin)
        of_q, of_o, of_lse = (x.unsqueeze(0) for x in (q, o, lse)) if self.ragged else (q, o, lse)
        tensors = of_q, k, v, of_o, of_lse, tables, k_scale, v_scale
        lengths = seqlens, pages, cu_seqlens_q, entries, leftpad, tree, all_seqlens, all_cu_seqlens_q, self.share
        if self.by_call:
            slopes, sink = (None if x is None else x.float().contiguous() for x in (slopes, sink))
            scores = scores._replace(slopes=slopes, sink=sink)
        written = self._launch(tensors, lengths, work, window, prior, scores)
        if written is not of_o:
            o = written[0] if self.ragged else written
        return o, lse

    def _begin(self, with_lse: bool, stream: int | None) -> tuple:
        """Where LSE goes that nobody wants, or None; workspace, window and scores."""
        found, unread = (self.workspace(), self.window, self.scores), None
        if stream is None:
            return None, *found
        if not with_lse:
            (unread,) = short.shared("unread", self.lse[:1], torch.float32, self.device, stream)
            unread = unread if self.ragged else short.as_operand(unread, True)
        work, window, scores = (short.as_operand(each, True) for each in found)
        return unread, work, window, self.scores if self.by_call else scores

    def _launch(self, tensors: tuple, lengths: tuple, work: Work, window: Window, prior: Prior | None, scores: Scores) -> Tensor:
        """O, which is another tensor than the one given where the kernel cannot write there."""
        try:
            self.kernel(tensors, lengths, work, window, prior, scores)
        except ValueError:  # where one is not laid out as the kernel wants it: its function looks, before it launches anything
            q, k, v, o, lse, tables, *scales = tensors
            prior = prior and prior._replace(early=0)
            lengths = Lengths(*(x.contiguous() if isinstance(x, Tensor) else x for x in lengths))
            tables = tables and Tables(*(x.contiguous() for x in tables))
            if not in_place(o):
                o = torch.empty(o.shape, dtype=o.dtype, device=o.device)
            k, v = pools.readable(k, v, paged=lengths.pages is not None)
            self.kernel(Tensors(aligned(q), k, v, o, lse, tables, *scales), lengths, work, window, prior, scores)
            return o
        return tensors[3]


class Prefixed:
    """Two launches: of the prefix that all sequences have, and of the rest."""

    def __init__(self, call: DecodeCall, first: Decoder, rest: Decoder) -> None:
        self.like, self.first, self.rest = call.like, first, rest

    def __call__(self, given: tuple, seqlens: Tensor, out: Tensor | None = None, with_lse: bool = True) -> Decoded:
        call = self.like.again(given, seqlens)
        common = prefix.of(call)
        everyone = {"all_seqlens": common.all_seqlens, "all_cu_seqlens_q": common.all_cu_seqlens_q}
        prior = prefix.prior(call, *self.first(common.tensors, common.seqlens, **everyone), early=0 if self.rest.by_call else 1)
        return self.rest(given, seqlens, out, with_lse, prior)


def in_bits(cache: Tensor) -> Tensor:
    """The cache, in 8 bits as int8."""
    return cache.view(torch.int8) if cache.dtype == torch.float8_e4m3fn else cache


def scales_of(call: DecodeCall) -> tuple[Tensor | None, Tensor | None]:
    """Of K and V, fp32: (batch, heads_k), or as the cache's tokens and heads lie."""

    def spread(scale: Tensor | None) -> Tensor | None:
        return scale if scale is None or scale.dim() == 3 else scale.expand(call.seqlens.shape[0], call.k_cache.shape[2])

    return spread(call.k_scale), spread(call.v_scale)


_KEPT: dict[tuple, object] = {}


def kept(key: tuple, make: Callable[[], Bound]) -> Bound:
    """What `make()` gave the first time for this key, which says all that it depends on."""
    if key not in _KEPT:
        if len(_KEPT) >= MOST:
            _KEPT.clear()
        _KEPT[key] = make()
    return _KEPT[key]
