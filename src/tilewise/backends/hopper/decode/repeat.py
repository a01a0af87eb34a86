"""Calls of decode like one before: kernel, workspace and numbers are remembered by what they depend on, which is no tensor's content or length."""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.hopper import short
from tilewise.backends.hopper.decode import config, pools, prefix
from tilewise.backends.hopper.decode.config import (
    CHUNK,
    FEW_KEYS,
    LEAST_BOX,
    LONG,
    MANY_ROWS,
    OVERLAPPED_TILE,
    TILE_M,
    TILES,
    WIDE,
    latent_dims,
    tile_dims,
)
from tilewise.backends.hopper.decode.operands import Lengths, Prior, Tables, Tensors, Window, Work
from tilewise.backends.hopper.decode.window import FAR, window_of
from tilewise.backends.hopper.operands import Scores
from tilewise.problem import DecodeCall, DecodeTensors
from tilewise.sm90.jit import aligned, in_place
from tilewise.views import part

MOST = 1024  # calls that are remembered

Decoded = tuple[Tensor, Tensor]


class Decoder:
    """Calls that differ in tensors, their lengths and strides, on whichever stream is current.

    Workspace is kept, one a stream, whose launches follow each other. A CUDA graph may be replayed on any stream, so what it captures gets its own.
    """

    def __init__(
        self, call: DecodeCall, kernel: Callable, window: Window, scores: Scores, workspace: Callable[[], Work], out: torch.dtype
    ) -> None:
        """`kernel(Tensors, Lengths, workspace(), window, prior, scores)` computes a call, ragged queries as one entry's, into an O of `out`, with
        its own slopes and sink in the scores.
        """
        self.kernel, self.workspace, self.out = kernel, workspace, out
        self.window, self.scores = window, scores._replace(slopes=None, sink=None)
        self.device = call.q.device.index
        self.empty = short.allocator(call.q.device)
        self.ragged = call.cu_seqlens_q is not None
        self.by_call = call.alibi_slopes is not None or call.sink is not None
        self.at_hand = short.by_stream(self.device, self._begin)

    def __call__(self, call: DecodeCall, prior: Prior | None = None) -> Decoded:
        """O like q with head_dim_v, and LSE (batch, heads_q, seqlen_q) or (heads_q, total_q) fp32."""
        if short.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(call, prior)
        o, lse = (self.empty(*layout) for layout in self.results(call))
        work, window, scores = self.at_hand()
        q, of_q, of_lse = (x.unsqueeze(0) for x in (call.q, o, lse)) if self.ragged else (call.q, o, lse)
        tensors = q, in_bits(call.k_cache), in_bits(call.v_cache), of_q, of_lse, tables_of(call), *scales_of(call)
        self.launch(tensors, lengths_of(call), work, window, prior, self.with_own(scores, call.alibi_slopes, call.sink))
        return o, lse

    def repeat(self, call: DecodeCall, with_lse: bool) -> "Repeated":
        return Repeated(self, call, with_lse)

    def results(self, call: DecodeCall) -> tuple[tuple, tuple]:
        """What makes O and LSE: shape, strides and dtype."""
        *rows, heads, _ = call.q.shape
        shapes = (*rows, heads, call.v_cache.shape[3]), (heads, *rows) if self.ragged else (rows[0], heads, rows[1])
        return tuple((shape, short.strides(shape), dtype) for shape, dtype in zip(shapes, (self.out, torch.float32), strict=True))

    def _begin(self, stream: int | None) -> tuple:
        """Workspace, window and scores."""
        found = self.workspace(), self.window, self.scores
        if stream is None:
            return found
        work, window, scores = (short.as_operand(each, True) for each in found)
        return work, window, self.scores if self.by_call else scores

    def with_own(self, scores: Scores, slopes: Tensor | None, sink: Tensor | None) -> Scores:
        """The scores with a call's slopes and sink."""
        if not self.by_call:
            return scores
        slopes, sink = (None if x is None else x.float().contiguous() for x in (slopes, sink))
        return scores._replace(slopes=slopes, sink=sink)

    def launch(self, tensors: tuple, lengths: tuple, work: Work, window: Window, prior: Prior | None, scores: Scores) -> Tensor:
        """O, which is another tensor than the one given where the kernel cannot write there."""
        q, k, v, o, lse, tables, *scales = tensors
        try:
            self.kernel(tensors, lengths, work, window, prior, scores)
        except ValueError:  # where one is not laid out as the kernel wants it: its function looks, before it launches anything
            prior = prior and prior._replace(early=0)
            lengths = Lengths(*(x if x is None else x.contiguous() for x in lengths))
            tables = tables and Tables(*(x.contiguous() for x in tables))
            if not in_place(o):
                o = torch.empty(o.shape, dtype=o.dtype, device=o.device)
            k, v = pools.readable(k, v, paged=lengths.pages is not None)
            self.kernel(Tensors(aligned(q), k, v, o, lse, tables, *scales), lengths, work, window, prior, scores)
        return o


class Repeated:
    """Calls that are laid out as one call was, as `Backend.repeat_decode` has them."""

    def __init__(self, decoder: Decoder, call: DecodeCall, with_lse: bool) -> None:
        self.decoder, self.with_lse, self.device = decoder, with_lse, call.q.device
        self.o, self.lse = decoder.results(call)
        self.scales = [None if x is None else (x.shape, x.stride(), 0) for x in scales_of(call)]
        self.bits = torch.float8_e4m3fn in (call.k_cache.dtype, call.v_cache.dtype)
        self.at_hand = short.by_stream(decoder.device, self._begin)

    def __call__(self, given: tuple, seqlens: Tensor, out: Tensor | None) -> Decoded:
        decoder = self.decoder
        if short.current_device() != decoder.device:
            with torch.cuda.device(decoder.device):
                return self(given, seqlens, out)
        lse, work, window, scores = self.at_hand()
        q, k, v, _, pages, cu_seqlens_q, entries, leftpad, tree, slopes, sink, k_scale, v_scale, _, _, cos, sin, _ = given
        o = decoder.empty(*self.o) if out is None else out
        if lse is None:
            lse = decoder.empty(*self.lse)
        if self.bits:
            k, v = in_bits(k), in_bits(v)
        if k_scale is not None:
            k_scale = part(k_scale, *self.scales[0])
        if v_scale is not None:
            v_scale = part(v_scale, *self.scales[1])
        if tree is not None:
            tree = tree.view(torch.uint8)
        tables = None if cos is None else (cos, sin)
        of_q, of_o, of_lse = (x.unsqueeze(0) for x in (q, o, lse)) if decoder.ragged else (q, o, lse)
        tensors = of_q, k, v, of_o, of_lse, tables, k_scale, v_scale
        lengths = seqlens, pages, cu_seqlens_q, entries, leftpad, tree, None, None
        if decoder.by_call:
            scores = decoder.with_own(scores, slopes, sink)
        written = decoder.launch(tensors, lengths, work, window, None, scores)
        if written is not of_o:
            o = written[0] if decoder.ragged else written
        return o, lse

    def _begin(self, stream: int | None) -> tuple:
        """Where LSE goes that nobody wants, and what the decoder has at hand."""
        unread = None
        if stream is not None and not self.with_lse:
            (unread,) = short.shared("unread", self.lse[:1], torch.float32, self.device, stream)
            unread = unread if self.decoder.ragged else short.as_operand(unread, True)
        return unread, *self.decoder.at_hand()


class Prefixed:
    """Two launches: of the prefix that all sequences have, and of the rest."""

    def __init__(self, first: Decoder, rest: Decoder) -> None:
        self.first, self.rest = first, rest

    def __call__(self, call: DecodeCall) -> Decoded:
        found = self.first(prefix.of(call))
        return self.rest(call, prefix.prior(call, *found, early=0 if self.rest.by_call else 1))

    def repeat(self, call: DecodeCall, with_lse: bool) -> Callable[[tuple, Tensor, Tensor | None], Decoded]:
        like = call.again((None,) * len(DecodeTensors._fields), None)  # which keeps no memory
        return lambda given, seqlens, out: self(like.again(given, seqlens))


def lengths_of(call: DecodeCall) -> Lengths:
    tree = None if call.tree is None else call.tree.view(torch.uint8)
    found = Lengths(call.seqlens, call.page_table, call.cu_seqlens_q, call.cache_batch_idx, call.leftpad, tree)
    if isinstance(call, prefix.Common):
        return found._replace(all_seqlens=call.all_seqlens, all_cu_seqlens_q=call.all_cu_seqlens_q)
    return found


def tables_of(call: DecodeCall) -> Tables | None:
    return None if call.rotary is None else Tables(call.rotary.cos, call.rotary.sin)


def latent(call: DecodeCall) -> bool:
    """Whether V is the first columns of K, in the same memory."""
    k, v = call.k_cache, call.v_cache
    if v.data_ptr() != k.data_ptr() or v.shape[3] > k.shape[3]:
        return False
    return all(ours == theirs or size == 1 for ours, theirs, size in zip(v.stride(), k.stride(), v.shape, strict=True))


def in_bits(cache: Tensor) -> Tensor:
    """The cache, in 8 bits as int8."""
    return cache.view(torch.int8) if cache.dtype == torch.float8_e4m3fn else cache


def scales_of(call: DecodeCall) -> tuple[Tensor | None, Tensor | None]:
    """Of K and V, fp32: (batch, heads_k), or as the cache's tokens and heads lie."""

    def spread(scale: Tensor | None) -> Tensor | None:
        return scale if scale is None or scale.dim() == 3 else scale.expand(call.seqlens.shape[0], call.k_cache.shape[2])

    return spread(call.k_scale), spread(call.v_scale)


def few_keys(call: DecodeCall) -> bool:
    """Whether there is room for few only. With a split tiles are the same in every batch, as bits would not be."""
    return call.split is None and call.seqlens.shape[0] * capacity_of(call) * call.k_cache.shape[2] <= FEW_KEYS


def capacity_of(call: DecodeCall) -> int:
    """Tokens of a sequence, at most."""
    return call.k_cache.shape[1] * (1 if call.page_table is None else call.page_table.shape[1])


def rows_of_unit(call: DecodeCall) -> int:
    """`config.rows_of_unit`, where that was measured; two products' otherwise, and where more rows have two warpgroups, of which one would idle."""
    q, k, ragged = call.q, call.k_cache, call.cu_seqlens_q is not None
    if call.split is not None or ragged or k.dtype != q.dtype or tile_dims(q.shape[-1], call.v_cache.shape[3]) is None or 0 in k.shape:
        return 2 * TILE_M
    if q.shape[1] * (q.shape[2] // k.shape[2]) > 2 * TILE_M:
        return 2 * TILE_M
    return config.rows_of_unit(call.seqlens.shape[0] * k.shape[2] * capacity_of(call))


def rows_of(call: DecodeCall) -> dict:
    """What `Config` has of the rows of a sequence: nothing where they are few.

    With two warpgroups a tile of keys serves twice as many rows. Of ragged queries the host knows the sum only: what may be one chunk beside single
    tokens is slower where later rows see later keys, unless it is large. Bits do not depend on it.
    """
    dims, window = tile_dims(call.q.shape[-1], call.v_cache.shape[3]), window_of(call.mask)
    if dims is None or window is None or call.q.numel() == 0 or 0 in call.k_cache.shape:
        return {}
    group, ragged = call.q.shape[-2] // call.k_cache.shape[2], call.cu_seqlens_q is not None
    rows, batch, total = group * (call.max_seqlen_q if ragged else call.q.shape[1]), call.seqlens.shape[0], group * call.q.shape[0]
    if rows <= TILE_M or (ragged and max(total - batch * TILE_M, total - batch * group - MANY_ROWS + 1) <= 0):
        return {}
    gathers, found = call.page_table is not None and call.k_cache.shape[1] % LEAST_BOX, {}  # to gather takes registers
    if dims in WIDE and call.k_cache.dtype == call.q.dtype and not gathers:
        found = {"consumers": 2} | (CHUNK if rows > 2 * TILE_M else {})
        average = total // max(batch, 1) if ragged else rows
        if found.get("overlap") and call.split is None and average < LONG and TILES[dims] < OVERLAPPED_TILE:
            found["tile_n"] = TILES[dims]
    if rows > TILE_M * found.get("consumers", 1) and (window.lo > -FAR or window.hi < FAR):
        found["rising"] = True
    return found


_KNOWN: dict[tuple, Decoder | Prefixed | None] = {}


def decode(call: DecodeCall, decoder: Callable[[DecodeCall], Decoder | Prefixed | None]) -> Decoded | None:
    """By the decoder of calls like this one; None where there is none."""
    found = known(call, decoder)
    return None if found is None else found(call)


def known(call: DecodeCall, decoder: Callable[[DecodeCall], Decoder | Prefixed | None]) -> Decoder | Prefixed | None:
    """The decoder of calls like this one, which `decoder(call)` makes the first time; None where it makes none."""
    key = _key(call)
    if key not in _KNOWN:
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        _KNOWN[key] = decoder(call)
    return _KNOWN[key]


def _key(call: DecodeCall) -> tuple:
    """What a decoder depends on, and whether the kernel covers a call."""
    q, k, v, ragged = call.q, call.k_cache, call.v_cache, call.cu_seqlens_q is not None
    indices = call.seqlens, call.page_table, call.cu_seqlens_q, call.cache_batch_idx, call.leftpad
    there = *(None if x is None else x.dtype for x in indices), *(x is None for x in (call.tree, call.alibi_slopes, call.sink))
    sizes = q.shape[-2:], k.shape[2:], v.shape[3], call.max_seqlen_q if ragged else q.shape[1], 0 in q.shape, 0 in k.shape
    paged = 0 if call.page_table is None else k.shape[1]
    counts = (k.shape[1], None if call.page_table is None else call.page_table.shape[1]) if call.split or call.shared_prefix else ()
    options = call.split, call.shared_prefix, call.mask, call.scale, call.softcap
    rotary = call.rotary and (
        call.rotary.cos.shape[1],
        call.rotary.cos.shape[0] > 0,
        call.rotary.cos.dtype,
        call.rotary.sin.dtype,
        call.rotary.interleaved,
    )
    return (
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        ragged,
        call.seqlens.shape[0],
        paged,
        *sizes,
        latent_dims(k.shape[3], v.shape[3]) is not None and latent(call),
        there,
        rotary,
        *(None if x is None else x.dim() for x in (call.k_scale, call.v_scale)),
        few_keys(call),
        tuple(rows_of(call).items()),
        rows_of_unit(call),
        counts,
        *options,
    )
