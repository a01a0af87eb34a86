"""The torch.library operators `tilewise::forward` and `tilewise::backward`: schema, fake kernels, autograd and vmap.

Everything that torch.compile, export, autocast, checkpointing and functorch need to know about attention stands here. An operator receives only
what a graph can hold: tensors, numbers and the mask as text (see `Mask.text`); it chooses the backend when it runs, not when it is traced.
An absent optional output is an empty tensor, because a schema cannot return None.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise import masks
from tilewise.dispatch import choose
from tilewise.problem import Call, Dropout

_ONCE = "attention has no second derivative here; torch.autograd.grad(..., create_graph=True) may be called, but not differentiated again"


def call_of(q, k, v, bias, alibi_slopes, sink, diagonal, rng, mask_tensors, mask, scale, softcap, dropout_p, deterministic, grad) -> Call:
    """The `Call` that the operands of `forward` (all but the backend) describe."""
    dropout = None
    if rng is not None and dropout_p > 0.0:
        seed, offset = rng.tolist()
        dropout = Dropout(dropout_p, seed, offset)
    return Call(
        q=q,
        k=k,
        v=v,
        mask=masks.parse(mask, mask_tensors),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        diagonal=diagonal,
        dropout=dropout,
        deterministic=deterministic,
        grad=grad,
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    diagonal: Tensor | None,
    rng: Tensor | None,
    mask_tensors: Sequence[Tensor],
    mask: str,
    scale: float | None,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    grad: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads_q, head_dim_v) and LSE (batch, heads_q, seqlen_q); arguments as in `Call`, rng int64 (seed, offset)."""
    call = call_of(q, k, v, bias, alibi_slopes, sink, diagonal, rng, mask_tensors, mask, scale, softcap, dropout_p, deterministic, grad)
    return choose(call.problem, backend).forward(call)


forward = torch.library.custom_op("tilewise::forward", _forward, mutates_args=())


@forward.register_fake
def _(q, k, v, *_args):
    batch, seqlen_q, heads_q, _ = q.shape
    o = q.new_empty((batch, seqlen_q, heads_q, v.shape[-1]))
    return o, q.new_empty((batch, heads_q, seqlen_q), dtype=_statistics(q.dtype))


def _statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _backward(
    o: Tensor,
    lse: Tensor,
    d_o: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    diagonal: Tensor | None,
    rng: Tensor | None,
    mask_tensors: Sequence[Tensor],
    mask: str,
    scale: float | None,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    bias_grad: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV, dBias (empty unless `bias_grad`) and dSink (empty without a sink), each shaped and typed as its input."""
    call = call_of(q, k, v, bias, alibi_slopes, sink, diagonal, rng, mask_tensors, mask, scale, softcap, dropout_p, deterministic, True)
    grads = choose(call.problem, backend).backward(call, o, lse, d_o, d_lse, bias_grad=bias_grad)
    absent = q.new_empty(0)
    return grads.q, grads.k, grads.v, absent if grads.bias is None else grads.bias, absent.clone() if grads.sink is None else grads.sink


backward = torch.library.custom_op("tilewise::backward", _backward, mutates_args=())


@backward.register_fake
def _(
    o,
    lse,
    d_o,
    d_lse,
    q,
    k,
    v,
    bias,
    alibi_slopes,
    sink,
    diagonal,
    rng,
    mask_tensors,
    mask,
    scale,
    softcap,
    p,
    deterministic,
    bias_grad,
    backend,
):
    def like(x: Tensor | None) -> Tensor:
        return q.new_empty(0) if x is None else x.new_empty(x.shape)

    return like(q), like(k), like(v), like(bias if bias_grad else None), like(sink)


def _setup_context(ctx, inputs, output):
    *tensors, mask_tensors, mask, scale, softcap, dropout_p, deterministic, _, backend = inputs
    ctx.save_for_backward(*output, *tensors, *mask_tensors)
    ctx.settings = (mask, scale, softcap, dropout_p, deterministic)
    ctx.backend, ctx.mask_tensors = backend, len(mask_tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_o, d_lse, backward=backward):
    o, lse, *tensors = ctx.saved_tensors
    tensors, mask_tensors = tensors[:8], tensors[8:]
    if d_o is None:
        d_o = torch.zeros_like(o)
    bias_grad = tensors[3] is not None and ctx.needs_input_grad[3]
    dq, dk, dv, d_bias, d_sink = backward(o, lse, d_o, d_lse, *tensors, mask_tensors, *ctx.settings, bias_grad, ctx.backend)
    d_sink = None if tensors[5] is None else d_sink
    return dq, dk, dv, d_bias if bias_grad else None, None, d_sink, *[None] * 10


def _differentiate_operator(ctx, d_o, d_lse):
    grads = list(_differentiate(ctx, d_o, d_lse))
    grads[8] = [None] * ctx.mask_tensors  # an operator wants one entry for each tensor of its list
    return tuple(grads)


forward.register_autograd(_differentiate_operator, setup_context=_setup_context)


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(_ONCE)


backward.register_autograd(_refuse_second_derivative)


def _watched(q: Tensor) -> bool:
    """Whether anything beside autograd must see the operators: a transform of torch.func, a dispatch mode (fake tensors, counters), a subclass."""
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0 or type(q) not in _PLAIN


_PLAIN = (Tensor, torch.nn.Parameter)


class _Forward(torch.autograd.Function):
    """`forward` outside traced graphs: for torch.func, whose transforms take this but not an operator's own autograd, and for plain eager
    calls, which skip the operator's 40 us."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*operands):
        return forward(*operands) if _watched(operands[0]) else _forward(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx, d_o, d_lse):
        return _differentiate(ctx, d_o, d_lse, _Backward.apply)


class _Backward(torch.autograd.Function):
    """`backward` for `_Forward`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*operands):
        return backward(*operands) if _watched(operands[0]) else _backward(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        _refuse_second_derivative(ctx, *grads)


def attend(*operands) -> tuple[Tensor, Tensor]:
    """O and LSE for the operands of `forward`, by the shortest way that all who watch allow."""
    if torch.compiler.is_compiling():
        return forward(*operands)
    if operands[-2] or _watched(operands[0]):
        return _Forward.apply(*operands)
    return _forward(*operands)


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """(batch, ...) mapped over `dim` becomes (size * batch, ...)."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(-1, *x.shape[2:])


def _vmap(op, batched: int, info, in_dims, args):
    """Map `op`, whose first `batched` operands have a batch dimension: fold the mapped dimension into it where no other operand minds."""
    size = info.batch_size
    plain = all(x is None or isinstance(x, str | float | bool) or (isinstance(x, list | tuple) and not x) for x in args[batched:])
    if plain and args[0].shape[0] > 0:
        folded = [None if x is None else _fold(x, dim, size) for x, dim in zip(args[:batched], in_dims, strict=False)]
        results = op(*folded, *args[batched:])
        return tuple(y.unflatten(0, (size, -1)) if y.dim() > 1 else y.expand(size, 0) for y in results), (0,) * len(results)
    pick = lambda x, dim, n: x if dim is None else x.select(dim, n)  # noqa: E731
    rows = []
    for n in range(size):
        row = [
            [pick(y, d, n) for y, d in zip(x, dim or [None] * len(x), strict=True)] if isinstance(x, list | tuple) else pick(x, dim, n)
            for x, dim in zip(args, in_dims, strict=True)
        ]
        rows.append(op(*row))
    return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])


forward.register_vmap(lambda info, in_dims, *args: _vmap(forward, 3, info, in_dims, args))
backward.register_vmap(lambda info, in_dims, *args: _vmap(backward, 7, info, in_dims, args))
