"""What is saved for the gradient: in which order, and whether what comes back fits together.

Hooks of torch.autograd.graph.saved_tensors_hooks may give back other tensors than they took, to offload or compress them, and checkpointing
recomputes them. Backends take strides from what they get, but rely on shapes, dtypes and devices.
"""

from torch import Tensor, float32, float64

from tilewise.errors import ShapeError


def in_order(operands: tuple[Tensor | None, ...], mask_tensors: list[Tensor], o: Tensor, lse: Tensor) -> tuple[Tensor | None, ...]:
    """`operands` begin with q, k, v. Every way of a call saves in this order, because checkpointing may recompute by another way than it came."""
    return *operands[:3], o, lse, *operands[3:], *mask_tensors


def check(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, **more: Tensor | None) -> None:
    """Refuse what does not fit to q. more: bias, alibi_slopes, sink and diagonal, as in `problem.Call`."""
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "dO": d_o} | {name: x for name, x in more.items() if x is not None}
    if q.dim() == 4 and not any(x.is_nested for x in tensors.values()) and _fit(q, k, v, o, lse, d_o) and _all_fit(q, k, **more):
        if d_lse is None or d_lse.shape == lse.shape:
            return
        tensors["dLSE"] = d_lse
    found = ", ".join(f"{name} {'nested' if x.is_nested else tuple(x.shape)} {x.dtype} on {x.device}" for name, x in tensors.items())
    raise ShapeError(
        f"what attention saved for its gradient does not fit together any more: {found}; torch.autograd.graph.saved_tensors_hooks must give back "
        "each tensor with the shape, dtype and device that it had"
    )


def _fit(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor) -> bool:
    dtype, device, shape = q.dtype, q.device, q.shape
    batch, seqlen_q, heads_q, head_dim = shape
    keys, like_o = (batch, *k.shape[1:3]), (batch, seqlen_q, heads_q, v.shape[-1])
    return (
        k.dtype == v.dtype == o.dtype == d_o.dtype == dtype
        and lse.dtype == (float64 if dtype == float64 else float32)
        and k.device == v.device == o.device == d_o.device == lse.device == device
        and k.shape == (*keys, head_dim)
        and v.shape == (*keys, v.shape[-1])
        and o.shape == d_o.shape == like_o
        and lse.shape == (batch, heads_q, seqlen_q)
    )


def _all_fit(
    q: Tensor, k: Tensor, *, bias: Tensor | None, alibi_slopes: Tensor | None, sink: Tensor | None, diagonal: Tensor | None
) -> bool:
    batch, seqlen_q, heads_q, _ = q.shape
    for x, sizes in (
        (bias, (batch, heads_q, seqlen_q, k.shape[1])),
        (alibi_slopes, (batch, heads_q)),
        (sink, (heads_q,)),
        (diagonal, (seqlen_q,)),
    ):
        if x is not None and not (
            x.device == q.device
            and x.dim() == len(sizes)
            and x.shape[-1] == sizes[-1]
            and all(got in (1, size) for got, size in zip(x.shape, sizes, strict=True))
        ):
            return False
    return True
