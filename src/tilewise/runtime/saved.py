"""What is saved for the gradient: in which order, and whether what comes back fits together.

Hooks of torch.autograd.graph.saved_tensors_hooks may give back other tensors than they took, to offload or compress them, and checkpointing
recomputes them. Backends take strides from what they get, but rely on shapes, dtypes and devices.
"""

from torch import Tensor, float32, float64

from tilewise.errors import ShapeError


def in_order(operands: tuple[Tensor | None, ...], mask_tensors: list[Tensor], o: Tensor, lse: Tensor) -> tuple[Tensor | None, ...]:
    """`operands` begin with q, k, v. Every way of a call saves in this order, because checkpointing may recompute by another way than it came."""
    return *operands[:3], o, lse, *operands[3:], *mask_tensors


def check(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, rest: tuple[Tensor | None, ...]
) -> None:
    """Refuse what does not fit to q. rest: bias, alibi_slopes, sink and diagonal, as in `problem.Call`."""
    try:
        if _fit(q, k, v, o, lse, d_o) and (d_lse is None or d_lse.shape == lse.shape) and _rest_fits(q, k, *rest):
            return
    except (RuntimeError, ValueError):  # a nested tensor, which has no shape, or a q of other dimensions
        pass
    names = ("q", "k", "v", "o", "lse", "dO", "dLSE", "bias", "alibi_slopes", "sink", "diagonal")
    tensors = {name: x for name, x in zip(names, (q, k, v, o, lse, d_o, d_lse, *rest), strict=True) if x is not None}
    found = ", ".join(f"{name} {'nested' if x.is_nested else tuple(x.shape)} {x.dtype} on {x.device}" for name, x in tensors.items())
    raise ShapeError(
        f"what attention saved for its gradient does not fit together any more: {found}; torch.autograd.graph.saved_tensors_hooks must give back "
        "each tensor with the shape, dtype and device that it had"
    )


def _fit(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor) -> bool:
    dtype, device, keys, values = q.dtype, q.device, k.shape, v.shape
    batch, seqlen_q, heads_q, head_dim = q.shape
    like_o = (batch, seqlen_q, heads_q, values[-1])
    return (
        k.dtype == v.dtype == o.dtype == d_o.dtype == dtype
        and lse.dtype == (float64 if dtype == float64 else float32)
        and k.device == v.device == o.device == d_o.device == lse.device == device
        and keys == (batch, keys[1], keys[2], head_dim)
        and values[:-1] == keys[:-1]
        and o.shape == like_o
        and d_o.shape == like_o
        and lse.shape == (batch, heads_q, seqlen_q)
    )


def _rest_fits(
    q: Tensor, k: Tensor, bias: Tensor | None, alibi_slopes: Tensor | None, sink: Tensor | None, diagonal: Tensor | None
) -> bool:
    batch, seqlen_q, heads_q, _ = q.shape
    if bias is not None and not _spans(bias, q, (batch, heads_q, seqlen_q, k.shape[1])):
        return False
    if alibi_slopes is not None and not _spans(alibi_slopes, q, (batch, heads_q)):
        return False
    return (sink is None or _spans(sink, q, (heads_q,))) and (diagonal is None or _spans(diagonal, q, (seqlen_q,)))


def _spans(x: Tensor, q: Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether x has these sizes, or 1 in place of all but the last."""
    shape = x.shape
    if len(shape) != len(sizes) or shape[-1] != sizes[-1] or x.device != q.device:
        return False
    for got, size in zip(shape, sizes, strict=True):  # noqa: SIM110 (takes half as long)
        if got != 1 and got != size:
            return False
    return True
