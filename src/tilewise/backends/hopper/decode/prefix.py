"""A prefix that all sequences have: its keys are read once, for the rows of all of them, and what they give is joined with each sequence's own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.backends.hopper.decode.config import latent_dims
from tilewise.backends.hopper.decode.operands import Prior
from tilewise.backends.tables.window import FAR, window_of
from tilewise.masks import Full
from tilewise.problem import DecodeCall

LEAST_SAVED = 30 << 20  # bytes that need not be read again; fewer take less time than another launch

_LENGTHS: dict[tuple[torch.device, int], dict[int, Tensor]] = {}  # by stream


@dataclass(frozen=True, kw_only=True)
class Common(DecodeCall):
    """The prefix alone: all queries as those of one sequence. Its keys lie where the longest sequence with queries has them. The GPU finds out
    which that is, for others may have ended.
    """

    all_seqlens: Tensor
    all_cu_seqlens_q: Tensor | None

    @property
    def kind(self) -> str:
        """As `Config.common`."""
        return "even" if self.all_cu_seqlens_q is None else "packed"


def pays(call: DecodeCall) -> bool:
    """Whether the prefix is worth a launch of its own: where every query sees all of it, and distances from it do not matter."""
    window = window_of(call.mask)
    if call.shared_prefix < 1 or call.leftpad is not None or call.alibi_slopes is not None or window is None or window.lo > -FAR:
        return False
    _, _, heads_k, dim = call.k_cache.shape
    if any(x is not None and x.dim() == 2 for x in (call.k_scale, call.v_scale)):  # of each sequence
        return False
    of_token = heads_k * dim * call.k_cache.element_size()
    if not latent_dims(dim, call.v_cache.shape[3]):
        of_token += heads_k * call.v_cache.shape[3] * call.v_cache.element_size()
    return (call.seqlens.shape[0] - 1) * call.shared_prefix * of_token >= LEAST_SAVED


def of(call: DecodeCall) -> Common:
    """The launch of the prefix. Scales of V, but for those of tokens, are for the call's own launch, which multiplies all of O."""
    q = call.q.reshape(1, -1, *call.q.shape[-2:])
    changed = {"q": q, "max_seqlen_q": q.shape[1], "cu_seqlens_q": None, "mask": Full(), "tree": None, "sink": None, "shared_prefix": 0}
    if call.v_scale is not None and call.v_scale.dim() < 2:
        changed["v_scale"] = None
    changed |= {"seqlens": _length(call.shared_prefix, q.device), "all_seqlens": call.seqlens, "all_cu_seqlens_q": call.cu_seqlens_q}
    return Common(**vars(call) | changed)


def prior(call: DecodeCall, o: Tensor, lse: Tensor, early: int = 0) -> Prior:
    """What `of(call)` gave, (1, rows, heads, head_dim_v) and (1, heads, rows), as the call's own launch takes it."""
    if call.cu_seqlens_q is not None:
        return Prior(o, lse, call.shared_prefix, early)
    batch, seqlen_q = call.q.shape[:2]
    return Prior(o[0].unflatten(0, (batch, seqlen_q)), lse[0].unflatten(1, (batch, seqlen_q)).transpose(0, 1), call.shared_prefix, early)


def _length(n: int, device: torch.device) -> Tensor:
    """(1,) int32, filled by this stream, for another one may be far behind; a graph that is captured fills its own, where there is none yet."""
    kept = _LENGTHS.setdefault((device, n), {})
    if torch.cuda.is_current_stream_capturing():
        return next(iter(kept.values())) if kept else _filled(n, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    if stream not in kept:
        kept[stream] = _filled(n, device)
    return kept[stream]


def _filled(n: int, device: torch.device) -> Tensor:
    return torch.full((1,), n, dtype=torch.int32, device=device)
