"""Steps of one token of a transformers model, on `tilewise.decode`: what is seen is in tensors, which nobody reads."""

from typing import NamedTuple

import torch
from torch import Tensor

import tilewise as tw
from tilewise.masks import Causal, Mask, SlidingWindow
from tilewise.runtime import graphs


class Step(NamedTuple):
    """What one query of each entry sees, in tensors, so that the next step is the same program, and a CUDA graph can hold it."""

    lengths: Tensor  # (batch,) int32: keys up to the query's own
    leftpad: Tensor | None  # (batch,) int32: keys before the first token, `lengths` at most
    left: int | None  # keys before the query, at most

    @property
    def mask(self) -> Mask:
        return Causal() if self.left is None else SlidingWindow(self.left, 0)


def step(bounds: tuple[int | None, int | None], batch: int, at: Tensor, present: Tensor | None) -> Step | None:
    """Of queries at key `at`, () or (1,), that see a band up to it; present: (batch, keys), true where a key is a token. None where tokens are not
    side by side up to the query.
    """
    lengths = (at + 1).to(torch.int32).reshape(-1).expand(batch).contiguous()
    leftpad = None
    if present is not None:
        present = present.to(torch.bool)
        leftpad = present.to(torch.int32).argmax(dim=1).to(torch.int32).minimum(lengths)
        key = torch.arange(present.shape[1], dtype=torch.int32, device=present.device)
        if not bool(((present == (key >= leftpad[:, None])) | (key >= lengths[:, None])).all()):
            return None
    return Step(lengths, leftpad, None if bounds[0] is None else -bounds[0])


def decodes(step: Step, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None) -> bool:
    """Whether `tilewise.decode` takes them, with lengths that nobody reads; it has no gradient."""
    if q.shape[1] != 1 or not q.shape[0] == k.shape[0] == step.lengths.shape[0]:
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, s_aux)):
        return False
    return q.dtype == k.dtype == v.dtype and not graphs.decode_reads(q, k, v, "Causal()", [], None, check=False)


def decoded(step: Step, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, softcap: float | None, s_aux: Tensor | None) -> Tensor:
    """(batch, 1, heads, head_dim_v)."""
    # A mask is made for layers of all devices.
    lengths, leftpad = (None if x is None else x.to(q.device) for x in (step.lengths, step.leftpad))
    sink = None if s_aux is None else s_aux.reshape(-1)
    options = {"scale": scaling, "softcap": softcap or 0.0, "sink": sink, "mask": step.mask}
    return tw.decode(q, k, v, cache_seqlens=lengths, leftpad=leftpad, **options)
