"""The peers' arguments in tilewise's words: windows, scales, empty rows' LSE, head dims, lengths within packed sequences."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilewise import api
from tilewise.errors import ShapeError, UnsupportedError, check_number, check_size, check_tensor
from tilewise.masks import ChunkedCausal, Mask, SlidingWindow

FULL_WINDOW = (-1, -1)
HEAD_DIM_MULTIPLE = {"cuda": 8}  # by device type: what kernels there load at once, in 16-bit numbers


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

    def keywords(self) -> dict[str, Any]:
        causal, mask, scale, softcap, alibi_slopes, sink = self
        return {"causal": causal, "mask": mask, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "sink": sink}


def options(
    causal, window_size, softmax_scale, softcap, *, chunk: int = 0, alibi_slopes: Tensor | None = None, sink: Tensor | None = None
) -> Options:
    """The peers' arguments, checked. `window_size` is (left, right), either negative or None for unbounded, of anything that int() takes."""
    try:
        left, right = (-1 if side is None else int(side) for side in window_size)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"window_size must be two integers (left, right), -1 for unbounded, got {window_size!r}") from error
    causal, mask = (_visible if is_compiling() else _kept)(bool(causal), left, right, int(chunk))
    if isinstance(softmax_scale, Tensor):
        softmax_scale = float(softmax_scale)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
    softcap = 0.0 if softcap is None else softcap
    check_number("softcap", softcap)
    return Options(causal, mask, softmax_scale, max(softcap, 0.0), alibi_slopes, sink)


def _visible(causal: bool, left: int, right: int, chunk: int) -> tuple[bool, Mask | None]:
    """`causal` and `mask` of `api.attention`."""
    right = 0 if causal else right
    causal, mask = causal or (left < 0 and right == 0), None
    if left >= 0 or right > 0 or (right == 0 and not causal):
        mask, causal = SlidingWindow(None if left < 0 else left, None if right < 0 else right), False
    if not chunk:
        return causal, mask
    if not causal and (mask is None or right != 0):
        raise UnsupportedError(
            f"attention_chunk={chunk} is supported with causal=True only; without it call tilewise.attention with a mask of tilewise.Slices"
        )
    return False, ChunkedCausal(chunk) if mask is None else ChunkedCausal(chunk) & mask


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


def padded(x: Tensor) -> Tensor:
    """x with zeros behind its last dimension up to what the device's kernels load at once; they change neither scores nor other outputs."""
    return x if _aligned(x) else torch.nn.functional.pad(x, (0, -x.shape[-1] % HEAD_DIM_MULTIPLE[x.device.type]))


def _aligned(x: Tensor) -> bool:
    return not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] % HEAD_DIM_MULTIPLE.get(x.device.type, 1) == 0


def _ready(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, given: Options, axes: tuple[str, ...]
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """q, k, v as kernels want them: padded, and with `qv`, the scores' second part, beside q, and v beside k; as they are where nothing asks."""
    if qv is None and _aligned(q) and _aligned(v):
        return q, k, v, given  # the checks are the function's own
    names = (*axes, "heads", "head_dim")
    for name, x in (("q", q), ("k", k), ("v", v)) + ((("qv", qv),) if qv is not None else ()):
        check_tensor(name, x, names, memory=False)
    given = with_scale(given, q, qv)
    if qv is not None:
        check_size("qv", "head_dim_v", qv.shape[-1], v.shape[-1], "v")
        q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    check_size("k", "head_dim", k.shape[-1], q.shape[-1], "q")
    return padded(q), padded(k), padded(v), given


def attend(q: Tensor, k: Tensor, v: Tensor, given: Options, *, qv: Tensor | None = None, **more) -> tuple[Tensor, Tensor]:
    """`api.attention` of (batch, seqlen, heads, head_dim) and its LSE, with -inf for empty rows."""
    one, two, three, given = _ready(q, k, v, qv, given, ("batch", "seqlen"))
    o, lse = api.attention(one, two, three, **given.keywords(), **more, return_lse=True)
    return o[..., : v.shape[-1]] if three is not v else o, lse


class Packed(NamedTuple):
    """The lengths of packed sequences: `cu_seqlens` (sequences + 1,), and how much of each is there (sequences,), None for all."""

    cu_seqlens: Tensor
    used: Tensor | None = None

    @classmethod
    def of_batch(cls, x: Tensor, used: Tensor | None = None) -> "Packed":
        """The lengths of (batch, seqlen, ...) once its first two dimensions are one."""
        batch, seqlen = x.shape[:2]
        return cls(torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen, used)

    def check(self, name: str) -> None:
        """Refuse lengths in use that are not within their sequences; without them there is nothing to check here."""
        if self.used is None:
            return
        check_tensor(name, self.used, ("sequences",), api.INDEX_DTYPES)
        check_size(name, "sequences", self.used.shape[0], self.cu_seqlens.shape[0] - 1, f"cu_seqlens{name[-2:]}")
        if not is_compiling() and bool(((self.used > self.cu_seqlens.diff()) | (self.used < 0)).any()):
            lengths = self.cu_seqlens.diff().tolist()
            raise ShapeError(f"{name} must be between 0 and the length of each sequence, {lengths}, got {self.used.tolist()}")


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, of_q: Packed, of_k: Packed, given: Options, *, qv: Tensor | None = None, **more
) -> tuple[Tensor, Tensor]:
    """`api.attention_varlen` of (total, heads, head_dim) and its LSE (heads, total_q), with -inf for empty rows.

    Slopes of ALiBi that differ by sequence take a call for each. Rows and keys that are not in use see and are seen by nothing.
    """
    one, two, three, given = _ready(q, k, v, qv, given, ("total",))
    slopes = given.alibi_slopes
    apart = isinstance(slopes, Tensor) and slopes.dim() == 2
    if of_q.used is None and of_k.used is None and not apart:
        o, lse = api.attention_varlen(one, two, three, of_q.cu_seqlens, of_k.cu_seqlens, **given.keywords(), **more, return_lse=True)
        return o[..., : v.shape[-1]] if three is not v else o, lse
    for name, cu in (("cu_seqlens_q", of_q.cu_seqlens), ("cu_seqlens_k", of_k.cu_seqlens)):
        check_tensor(name, cu, ("sequences + 1",), api.INDEX_DTYPES)
    check_size("cu_seqlens_k", "length", of_k.cu_seqlens.shape[0], of_q.cu_seqlens.shape[0], "cu_seqlens_q")
    of_q.check("seqused_q")
    of_k.check("seqused_k")
    cu_q, cu_k = _with_gaps(of_q, of_k)
    if apart:
        check_size("alibi_slopes", "batch", slopes.shape[0], of_q.cu_seqlens.shape[0] - 1, "cu_seqlens_q")
        o, lse = _one_by_one(one, two, three, cu_q, cu_k, given, more)
    else:
        o, lse = api.attention_varlen(one, two, three, cu_q, cu_k, **given.keywords(), **more, return_lse=True)
    return o[..., : v.shape[-1]] if three is not v else o, lse


def _with_gaps(of_q: Packed, of_k: Packed) -> tuple[Tensor, Tensor]:
    """cu_seqlens in which what is not in use lies in sequences of its own: three a sequence, its pairs in use, its other rows, its other keys."""
    if of_q.used is None and of_k.used is None:
        return of_q.cu_seqlens, of_k.cu_seqlens

    def bounds(packed: Packed, rows: bool) -> Tensor:
        starts, ends = packed.cu_seqlens[:-1], packed.cu_seqlens[1:]
        stop = ends if packed.used is None else starts + packed.used.to(starts.dtype)
        return torch.cat((torch.stack((starts, stop, ends if rows else stop), 1).flatten(), packed.cu_seqlens[-1:]))

    return bounds(of_q, True), bounds(of_k, False)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, given: Options, more: dict) -> tuple[Tensor, Tensor]:
    """A call for each sequence, with its own slopes of ALiBi."""
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    per = (
        (len(starts_q) - 1) // given.alibi_slopes.shape[0] if given.alibi_slopes.shape[0] else 1
    )  # sequences that share slopes: see _with_gaps
    parts, options = [], given.keywords()
    for n, (q0, q1, k0, k1) in enumerate(zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)):
        options["alibi_slopes"] = given.alibi_slopes[n // per]
        parts.append(api.attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **options, **more, return_lse=True))
    rest = q.shape[0] - starts_q[-1]
    o = [o[0] for o, _ in parts] + [q.new_zeros(rest, q.shape[1], v.shape[-1])]
    lse = [lse[0] for _, lse in parts]
    statistics = lse[0].dtype if lse else torch.float32
    return torch.cat(o), torch.cat([*lse, torch.full((q.shape[1], rest), -torch.inf, dtype=statistics, device=q.device)], 1)
