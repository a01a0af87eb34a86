"""FlashAttention-3's 8-bit contract in tilewise's words: e4m3 tensors, and a factor for each sequence and key head, which a group shares."""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.errors import EIGHT_BITS, ShapeError, UnsupportedError, check_heads, check_size, check_tensor


def scales(
    q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None, qv: Tensor | None = None
) -> dict[str, Tensor]:
    """q_scale, k_scale and v_scale of `api.attention` and `attention_varlen`, of those descales (batch, heads_k) that are given."""
    given = {"q_scale": q_descale, "k_scale": k_descale, "v_scale": v_descale}
    found = {name: x for name, x in given.items() if x is not None}
    for name, x in found.items():
        check_tensor(name, x, ("batch", "heads_k"))
        check_size(name, "heads_k", x.shape[1], k.shape[-2], "k")
    if found and qv is not None:
        raise UnsupportedError(f"qv is not supported with {next(iter(found))}; pass q, k, v and qv in bf16, each times its descale")
    if "q_scale" in found:
        found["q_scale"] = found["q_scale"].repeat_interleave(q.shape[-2] // k.shape[-2], dim=1)
    return found


class _Forward(torch.autograd.Function):
    """O of 8-bit tensors that require a gradient, which the peer attends with and then cannot differentiate."""

    @staticmethod
    def forward(ctx, o: Tensor, *tensors: Tensor) -> Tensor:
        return o.view_as(o)

    @staticmethod
    def backward(ctx, grad):
        raise UnsupportedError("q, k and v of 8 bits have no gradient; attend with them in 16 bits, or detach them")


def forward_only(attend: Callable[..., tuple[Tensor, Tensor | None]], q: Tensor, k: Tensor, v: Tensor, *rest, **options):
    """`attend`; of 8-bit q, k and v, the forward pass: going back raises UnsupportedError."""
    tensors = q, k, v
    if q.dtype not in EIGHT_BITS or not any(x.requires_grad for x in tensors):
        return attend(*tensors, *rest, **options)
    o, lse = attend(*(x.detach() for x in tensors), *rest, **options)
    return _Forward.apply(o, *tensors), lse


def wide_queries(q: Tensor, k_cache: Tensor, q_descale: Tensor | None, cu_seqlens_q: Tensor | None) -> Tensor:
    """The queries of a call on an 8-bit cache as `decoding.decode` takes them: in bf16, times their descale (batch, heads_k)."""
    if q.dtype not in EIGHT_BITS:
        if q_descale is not None:
            raise ShapeError(f"q_scale is for tensors of 8 bits, but q is {q.dtype}; leave it out")
        return q
    wide = q.float()
    if q_descale is not None:
        check_tensor("q_scale", q_descale, ("batch", "heads_k"))
        check_size("q_scale", "batch", q_descale.shape[0], q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1, "q")
        check_size("q_scale", "heads_k", q_descale.shape[1], k_cache.shape[-2], "k_cache")
        check_heads(q.shape[-2], k_cache.shape[-2])
        by_head = q_descale.float().repeat_interleave(q.shape[-2] // k_cache.shape[-2], dim=1)
        if cu_seqlens_q is None:
            wide = wide * by_head[:, None, :, None]
        else:
            owner = torch.searchsorted(cu_seqlens_q[1:].long(), torch.arange(q.shape[0], dtype=torch.int64, device=q.device), right=True)
            wide = wide * by_head[owner.clamp(max=by_head.shape[0] - 1)][..., None]
    return wide.bfloat16()
