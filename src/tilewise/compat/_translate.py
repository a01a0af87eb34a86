"""The peers' arguments in tilewise's words: windows, scales, empty rows' LSE, head dims of caches, lengths within packed sequences."""

from functools import lru_cache
from typing import Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilewise import api
from tilewise.errors import DTYPES, EIGHT_BITS, ShapeError, check_like, check_number, check_size, check_tensor
from tilewise.masks import ChunkedCausal, Chunks, Mask, SlidingWindow
from tilewise.runtime import call_cache
from tilewise.varlen import attention_varlen

NO_INTEGER = (TypeError, ValueError, OverflowError, RuntimeError)  # what int() raises, of tensors too
FULL_WINDOW = (-1, -1)
SCALES = {"q_scale", "k_scale", "v_scale"}  # which the peers have by sequence
HEAD_DIM_MULTIPLE = {"cuda": 8}  # by device type: what kernels there load at once, in 16-bit elements


class Keywords(TypedDict):
    """`Options`, in the names of `api.attention`."""

    causal: bool
    mask: Mask | None
    scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    sink: Tensor | None


class Options(NamedTuple):
    """What every one of the peers' functions says of the scores, in the names of `api.attention`."""

    causal: bool
    mask: Mask | None
    scale: float | None
    softcap: float
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None

    @property
    def local(self) -> bool:
        """Whether a query's position matters."""
        return self.causal or self.mask is not None

    def keywords(self) -> Keywords:
        causal, mask, scale, softcap, alibi_slopes, sink = self
        return {"causal": causal, "mask": mask, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "sink": sink}


def options(
    causal, window_size, softmax_scale, softcap, *, chunk: int = 0, alibi_slopes: Tensor | None = None, sink: Tensor | None = None
) -> Options:
    """The peers' arguments, checked; causal and window_size as in `visible`."""
    causal, mask = visible(causal, window_size, chunk)
    if isinstance(softmax_scale, Tensor):
        softmax_scale = float(softmax_scale)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
    softcap = 0.0 if softcap is None else softcap
    check_number("softcap", softcap)
    return Options(causal, mask, softmax_scale, max(softcap, 0.0), alibi_slopes, sink)


def visible(causal, window_size, chunk: int = 0) -> tuple[bool, Mask | None]:
    """`causal` and `mask` of `api.attention`. `window_size` is (left, right), either negative or None for unbounded."""
    left, right = window(window_size)
    if type(chunk) is not int:
        chunk = integer("attention_chunk", chunk, "an integer, 0 for none")
    return (_visible if is_compiling() else _kept)(bool(causal), -1 if left is None else left, -1 if right is None else right, chunk)


def window(window_size, unbounded: str = "-1") -> tuple[int | None, int | None]:
    """`window_size`, checked: each side an int or None. `unbounded` is the peer's word for that."""
    try:
        if type(window_size) is tuple and window_size == FULL_WINDOW:
            return FULL_WINDOW
        left, right = window_size
        return None if left is None else _whole(left), None if right is None else _whole(right)
    except NO_INTEGER as error:
        raise ShapeError(f"window_size must be two integers (left, right), {unbounded} for unbounded, got {window_size!r}") from error


def integer(name: str, x, expected: str) -> int:
    """x as an int; ShapeError, which says what is expected, where it is none."""
    try:
        return _whole(x)
    except NO_INTEGER as error:
        raise ShapeError(f"{name} must be {expected}, got {x!r}") from error


def _whole(x) -> int:
    """x of any type that holds an integer, as an int. Raises one of `NO_INTEGER`."""
    if (found := int(x)) != x:
        raise ValueError(f"{x!r} is no integer")
    return found


def core_options(given: Options, *, dropout_p: float, deterministic: bool, with_lse: bool) -> call_cache.Options:
    """Those of `api.attention` or `attention_varlen`."""
    return call_cache.Options(given.causal, given.scale, given.softcap, dropout_p, deterministic, None, None, given.mask, with_lse)


def _visible(causal: bool, left: int, right: int, chunk: int) -> tuple[bool, Mask | None]:
    right = 0 if causal else right
    causal, mask = causal or (left < 0 and right == 0), None
    if left >= 0 or right > 0 or (right == 0 and not causal):
        mask, causal = SlidingWindow(None if left < 0 else left, None if right < 0 else right), False
    if chunk <= 0:
        return causal, mask
    chunks = ChunkedCausal(chunk) if causal else Chunks(chunk)
    return False, chunks if mask is None else chunks & mask


_kept = lru_cache(256)(_visible)  # the same object for the same window, by which repeated calls are known soonest


def with_scale(given: Options, q: Tensor, qv: Tensor | None = None) -> Options:
    """The default scale, by the head dims as the caller has them."""
    if given.scale is not None or not isinstance(q, Tensor) or q.dim() < 1 or q.shape[-1] == 0:
        return given
    return given._replace(scale=(q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5)


def positive_infinity(lse: Tensor) -> Tensor:
    """LSE with +inf for rows that see no key, FlashAttention-2's convention."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def negative_infinity(lse: Tensor) -> Tensor:
    """The way back: what +inf stands for, as tilewise has it."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def unpacked(name: str, x: Tensor, axes: tuple[str, ...], dtypes: tuple[torch.dtype, ...] = DTYPES) -> tuple[Tensor, ...]:
    """The tensors that x holds side by side in its third-last dimension, which `axes` names by their number."""
    check_tensor(name, x, axes, dtypes)
    if x.shape[-3] != int(axes[-3]):
        raise ShapeError(f"{name} must be ({', '.join(axes)}), which holds {' and '.join(name)}, got shape {tuple(x.shape)}")
    return x.unbind(-3)


def padded(x: Tensor) -> Tensor:
    """x with zeros behind its last dimension up to what the device's decoding kernels load at once; they change neither scores nor other outputs."""
    multiple = HEAD_DIM_MULTIPLE.get(x.device.type, 1)
    return x if x.shape[-1] % multiple == 0 else torch.nn.functional.pad(x, (0, -x.shape[-1] % multiple))


def _with_second_part(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, given: Options, axes: tuple[str, ...]
) -> tuple[Tensor, Tensor, Options]:
    """q with `qv`, the scores' second part, next to it, and k with v next to it."""
    if qv is None:
        return q, k, given  # the checks are the function's own
    for name, x in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        check_tensor(name, x, (*axes, "heads", "head_dim"), memory=False)
    given = with_scale(given, q, qv)
    check_second_part(q, v, qv)
    check_size("k", "head_dim", k.shape[-1], q.shape[-1], "q")
    return torch.cat((q, qv), -1), torch.cat((k, v), -1), given


def check_second_part(q: Tensor, v: Tensor, qv: Tensor, values: str = "v") -> None:
    """Refuse a `qv` that does not fit q and v, which are checked."""
    check_like("qv", qv, q)
    check_size("qv", "shape before head_dim", qv.shape[:-1], q.shape[:-1], "q")
    check_size("qv", "head_dim_v", qv.shape[-1], v.shape[-1], values)


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, given: Options, *, qv: Tensor | None = None, with_lse: Literal[True] = True, **more
) -> tuple[Tensor, Tensor]: ...
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, given: Options, *, qv: Tensor | None = None, with_lse: bool, **more
) -> tuple[Tensor, Tensor | None]: ...
def attend(
    q: Tensor, k: Tensor, v: Tensor, given: Options, *, qv: Tensor | None = None, with_lse: bool = True, **more
) -> tuple[Tensor, Tensor | None]:
    """`api.attention` of (batch, seqlen, heads, head_dim) and its LSE, with -inf for empty rows; None where it is not wanted."""
    q, k, given = _with_second_part(q, k, v, qv, given, ("batch", "seqlen"))
    if with_lse:
        return api.attention(q, k, v, **given.keywords(), **more, return_lse=True)
    return api.attention(q, k, v, **given.keywords(), **more), None


class Packed(NamedTuple):
    """The lengths of packed sequences: `cu_seqlens` (sequences + 1,), and how much of each is there (sequences,), None for all."""

    cu_seqlens: Tensor
    used: Tensor | None = None

    @classmethod
    def of_batch(cls, x: Tensor, used: Tensor | None = None) -> "Packed":
        """The lengths of (batch, seqlen, ...) once its first two dimensions are one."""
        batch, seqlen = x.shape[:2]
        return cls(torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen, used)

    def without(self, tokens: int) -> "Packed":
        """The lengths where `tokens` tokens before the first sequence are left out."""
        return self._replace(cu_seqlens=self.cu_seqlens - tokens) if tokens else self

    def check(self, name: str) -> None:
        """Refuse lengths in use that are not within their sequences."""
        if self.used is None:
            return
        check_tensor(name, self.used, ("sequences",), api.INDEX_DTYPES)
        check_size(name, "sequences", self.used.shape[0], self.cu_seqlens.shape[0] - 1, f"cu_seqlens{name[-2:]}")
        known = type(self.used) is Tensor and not is_compiling()  # a fake tensor has no values
        if known and bool(((self.used > self.cu_seqlens.diff()) | (self.used < 0)).any()):
            lengths = self.cu_seqlens.diff().tolist()
            raise ShapeError(f"{name} must be between 0 and the length of each sequence, {lengths}, got {self.used.tolist()}")


@overload
def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_q: Packed,
    of_k: Packed,
    given: Options,
    *,
    qv: Tensor | None = None,
    with_lse: Literal[True] = True,
    **more,
) -> tuple[Tensor, Tensor]: ...
@overload
def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_q: Packed,
    of_k: Packed,
    given: Options,
    *,
    qv: Tensor | None = None,
    with_lse: bool,
    **more,
) -> tuple[Tensor, Tensor | None]: ...
def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, of_q: Packed, of_k: Packed, given: Options, *, qv: Tensor | None = None, **more
) -> tuple[Tensor, Tensor | None]:
    """`attention_varlen` of (total, heads, head_dim) and its LSE (heads, total_q), with -inf for empty rows; None where it is not wanted.

    Rows and keys that are not in use, or lie before the first sequence or behind the last, see and are seen by nothing.
    """
    try:
        return _attend_packed(q, k, v, of_q, of_k, given, qv, **more)
    except ShapeError:  # which the core has for sequences that begin above 0
        first_q, first_k = first_tokens(of_q.cu_seqlens, of_k.cu_seqlens)
        if not (first_q or first_k):
            raise
    for name, packed, x in (("q", of_q, q), ("k", of_k, k)):
        if (end := int(packed.cu_seqlens[-1])) > x.shape[0]:
            raise ShapeError(f"cu_seqlens_{name} reaches position {end}, but {name} has {x.shape[0]} tokens; it must not go beyond them")
    of_q, of_k = of_q.without(first_q), of_k.without(first_k)
    o, lse = _attend_packed(q[first_q:], k[first_k:], v[first_k:], of_q, of_k, given, qv if qv is None else qv[first_q:], **more)
    return with_front(o, lse, first_q)


def first_tokens(*cu_seqlens: Tensor) -> list[int]:
    """Where the first sequence begins, of each of cu_seqlens; 0 where nobody may look, and of what is no cu_seqlens. Waits for the device."""
    known = [x for x in cu_seqlens if isinstance(x, Tensor) and not x.is_meta]
    if len(known) < len(cu_seqlens) or is_compiling() or (any(x.is_cuda for x in known) and torch.cuda.is_current_stream_capturing()):
        return [0] * len(cu_seqlens)
    return [max(int(x[0]), 0) if x.dim() == 1 and x.shape[0] and x.dtype in api.INDEX_DTYPES else 0 for x in known]


@overload
def with_front(o: Tensor, lse: Tensor, rows: int) -> tuple[Tensor, Tensor]: ...
@overload
def with_front(o: Tensor, lse: Tensor | None, rows: int) -> tuple[Tensor, Tensor | None]: ...
def with_front(o: Tensor, lse: Tensor | None, rows: int) -> tuple[Tensor, Tensor | None]:
    """O (total, heads, head_dim) and LSE (heads, total) with `rows` rows before them that see no key."""
    pad = torch.nn.functional.pad
    return pad(o, (0, 0, 0, 0, rows, 0)), None if lse is None else pad(lse, (rows, 0), value=-torch.inf)


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, of_q: Packed, of_k: Packed, given: Options, qv: Tensor | None, with_lse: bool = True, **more
) -> tuple[Tensor, Tensor | None]:
    """`attend_packed`, of sequences that begin at 0."""
    q, k, given = _with_second_part(q, k, v, qv, given, ("total",))
    options = given.keywords()
    cu_q, cu_k, seqused_k = in_use(of_q, of_k)
    if of_q.used is not None:
        slopes = given.alibi_slopes
        if isinstance(slopes, Tensor) and slopes.dim() == 2:
            options["alibi_slopes"] = slopes.repeat_interleave(3, 0)
        more |= {name: more[name].repeat_interleave(3, 0) for name in SCALES & more.keys()}
    if with_lse:
        return attention_varlen(q, k, v, cu_q, cu_k, seqused_k=seqused_k, **options, **more, return_lse=True)
    return attention_varlen(q, k, v, cu_q, cu_k, seqused_k=seqused_k, **options, **more), None


def in_use(of_q: Packed, of_k: Packed) -> tuple[Tensor, Tensor, Tensor | None]:
    """cu_seqlens_q, cu_seqlens_k and seqused_k of `attention_varlen`; where of_q says what is in use, of three times the sequences."""
    if of_q.used is None:
        return of_q.cu_seqlens, of_k.cu_seqlens, of_k.used
    for name, packed in (("q", of_q), ("k", of_k)):
        check_tensor(f"cu_seqlens_{name}", packed.cu_seqlens, ("sequences + 1",), api.INDEX_DTYPES)
        packed.check(f"seqused_{name}")
    check_size("cu_seqlens_k", "length", of_k.cu_seqlens.shape[0], of_q.cu_seqlens.shape[0], "cu_seqlens_q")
    return *_with_gaps(of_q, of_k), None


def flattened(
    tensors: tuple[Tensor, ...], cu_seqlens: Tensor | None, used: Tensor | None
) -> tuple[tuple[Tensor, ...], Packed, torch.Size | None]:
    """Packed tensors, as they are with cu_seqlens, else of batches (batch, seqlen, ...); their lengths; and (batch, seqlen), None of the former."""
    if cu_seqlens is not None:
        return tensors, Packed(cu_seqlens, used), None
    axes = "batch", "seqlen", "heads", "head_dim"
    for x in tensors:
        check_tensor("q, k and v without cu_seqlens", x, axes, (*DTYPES, *EIGHT_BITS))
    return tuple(x.flatten(0, 1) for x in tensors), Packed.of_batch(tensors[0], used), tensors[0].shape[:2]


def into(out: Tensor, given: Tensor | None, name: str) -> Tensor:
    """`out`, written into `given` where that is a tensor."""
    if given is None:
        return out
    check_size(name, "shape", given.shape, out.shape, "q with v's head_dim")
    return given.copy_(out)


def _with_gaps(of_q: Packed, of_k: Packed) -> tuple[Tensor, Tensor]:
    """cu_seqlens in which what is not in use lies in sequences of its own: three a sequence, its pairs in use, its other rows, its other keys."""

    def bounds(packed: Packed, rows: bool) -> Tensor:
        starts, ends = packed.cu_seqlens[:-1], packed.cu_seqlens[1:]
        stop = ends if packed.used is None else starts + packed.used.to(starts.dtype)
        return torch.cat((torch.stack((starts, stop, ends if rows else stop), 1).flatten(), packed.cu_seqlens[-1:]))

    return bounds(of_q, True), bounds(of_k, False)
