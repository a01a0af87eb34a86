"""The torch.library operators `tilewise::forward` and `tilewise::backward`: schema, fake kernels, autograd and vmap.

Everything that torch.compile, export, autocast, checkpointing and functorch need to know about attention stands here. An operator receives only
what a graph can hold: tensors, numbers and the mask as text (see `Mask.text`); it chooses the backend when it runs, not when it is traced.
An absent optional output is an empty tensor, because a schema cannot return None.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import masks
from tilewise.dispatch import choose
from tilewise.problem import Call, Dropout


class Operands(NamedTuple):
    """The operands of `forward`, in the order of its schema. Tensors as in `Call`; rng int64 (seed, offset); scale None is head_dim ** -0.5.

    `mask` is the mask's text, in which #i stands for mask_tensors[i]; `grad` says whether a gradient may be asked for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    diagonal: Tensor | None
    rng: Tensor | None
    mask_tensors: list[Tensor]
    mask: str
    scale: float | None
    softcap: float
    dropout_p: float
    deterministic: bool
    grad: bool
    backend: str | None


SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sink, Tensor? diagonal, Tensor? rng, Tensor[] mask_tensors, "
    "str mask, float? scale, float softcap, float dropout_p, bool deterministic, bool grad, str? backend"
)
TENSORS = Operands._fields.index("mask_tensors")  # so many operands are single tensors, or None
BIAS, SINK = Operands._fields.index("bias"), Operands._fields.index("sink")


def call_of(given: Operands) -> Call:
    """The `Call` that the operands describe."""
    dropout = None
    if given.rng is not None and given.dropout_p > 0.0:
        seed, offset = given.rng.tolist()
        dropout = Dropout(given.dropout_p, seed, offset)
    return Call(
        q=given.q,
        k=given.k,
        v=given.v,
        mask=masks.parse(given.mask, given.mask_tensors),
        scale=given.q.shape[-1] ** -0.5 if given.scale is None else given.scale,
        softcap=given.softcap,
        bias=given.bias,
        alibi_slopes=given.alibi_slopes,
        sink=given.sink,
        diagonal=given.diagonal,
        dropout=dropout,
        deterministic=given.deterministic,
        grad=given.grad,
    )


def _forward(*operands) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads_q, head_dim_v) and LSE (batch, heads_q, seqlen_q)."""
    given = Operands(*operands)
    call = call_of(given)
    o, lse = choose(call.problem, given.backend).forward(call)
    return o.contiguous(), lse.contiguous()  # as the fake kernels say, whatever the backend finds natural


def _backward(o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool, *operands) -> tuple[Tensor, ...]:
    """dQ, dK, dV, dBias (empty unless `bias_grad`) and dSink (empty without a sink), each shaped and typed as its input."""
    given = Operands(*operands)
    call = call_of(given)
    grads = choose(call.problem, given.backend).backward(call, o, lse, d_o, d_lse, bias_grad=bias_grad)
    return tuple(call.q.new_empty(0) if x is None else x.contiguous() for x in grads)


forward = torch.library.custom_op("tilewise::forward", _forward, mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)")
backward = torch.library.custom_op(
    "tilewise::backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor o, Tensor lse, Tensor d_o, Tensor? d_lse, bool bias_grad, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@forward.register_fake
def _(q, k, v, *_args):
    batch, seqlen_q, heads_q, _ = q.shape
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((batch, seqlen_q, heads_q, v.shape[-1])), q.new_empty((batch, heads_q, seqlen_q), dtype=statistics)


@backward.register_fake
def _(o, lse, d_o, d_lse, bias_grad, *operands):
    given = Operands(*operands)
    inputs = (given.q, given.k, given.v, given.bias if bias_grad else None, given.sink)
    return tuple(given.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output):
    given = Operands(*inputs)
    ctx.save_for_backward(*output, *given[:TENSORS], *given.mask_tensors)
    ctx.settings, ctx.mask_tensors = given[TENSORS + 1 :], len(given.mask_tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_o, d_lse, backward=backward):
    o, lse, *tensors = ctx.saved_tensors
    given = Operands(*tensors[:TENSORS], tensors[TENSORS:], *ctx.settings)
    bias_grad = given.bias is not None and ctx.needs_input_grad[BIAS]
    grads = [None] * len(given)
    *grads[:3], d_bias, d_sink = backward(o, lse, torch.zeros_like(o) if d_o is None else d_o, d_lse, bias_grad, *given)
    grads[BIAS] = d_bias if bias_grad else None
    grads[SINK] = None if given.sink is None else d_sink
    return tuple(grads)


def _differentiate_operator(ctx, d_o, d_lse):
    grads = list(_differentiate(ctx, d_o, d_lse))
    grads[TENSORS] = [None] * ctx.mask_tensors  # an operator wants one entry for each tensor of its list
    return tuple(grads)


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(
        "attention has no second derivative here; torch.autograd.grad(..., create_graph=True) may be called, but not differentiated again"
    )


def refuse_forward_mode():
    raise RuntimeError("attention has no forward-mode derivative (jvp, jacfwd, hessian); use reverse mode: torch.func.grad, vjp or jacrev")


forward.register_autograd(_differentiate_operator, setup_context=_setup_context)
backward.register_autograd(_refuse_second_derivative)


def watched(q: Tensor) -> bool:
    """Whether anything beside autograd must see the operators: a transform of torch.func, a dispatch mode (fake tensors, counters), a subclass."""
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0 or type(q) not in PLAIN


PLAIN = (Tensor, torch.nn.Parameter)


class _Forward(torch.autograd.Function):
    """`forward` for torch.func, whose transforms take this but not an operator's own autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*operands):
        return forward(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx, d_o, d_lse):
        return _differentiate(ctx, d_o, d_lse, _Backward.apply)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_forward_mode()


class _Eager(torch.autograd.Function):
    """`forward` for plain eager calls, without the operator's 40 us, and without torch's 30 us for a context set up apart."""

    @staticmethod
    def forward(ctx, *operands):
        output = _forward(*operands)
        _setup_context(ctx, operands, output)
        return output

    @staticmethod
    def backward(ctx, d_o, d_lse):
        once = not torch.is_grad_enabled() and not watched(d_lse if d_o is None else d_o)  # nobody differentiates again, or looks on
        return _differentiate(ctx, d_o, d_lse, _backward if once else _Backward.apply)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_forward_mode()


class _Backward(torch.autograd.Function):
    """`backward` for `_Forward` and `_Eager`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*operands):
        return backward(*operands) if watched(operands[0]) else _backward(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        _refuse_second_derivative(ctx, *grads)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_forward_mode()


def traced() -> bool:
    """Whether a graph is being made of the call, by torch.compile, torch.export or torch.jit.trace: what it does must be an operator of it."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def gradients_on() -> bool:
    """Whether autograd records, or may when what torch.jit.trace records now runs."""
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None)


def attend(operands: Operands) -> tuple[Tensor, Tensor]:
    """O and LSE, by the shortest way that all who watch allow."""
    if traced():
        return forward(*operands)
    if watched(operands.q):
        return _Forward.apply(*operands)
    return _Eager.apply(*operands) if operands.grad else _forward(*operands)


def differentiate(o: Tensor, lse: Tensor, d_o: Tensor, given: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of a forward without bias or sink, by the way that all who watch allow."""
    return _Backward.apply(o, lse, d_o, None, False, *given)[:3]


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """(batch, ...) mapped over `dim` becomes (size * batch, ...)."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _vmap(op, info, in_dims, args, batched: tuple[int, ...]):
    """Map `op`, whose operands at `batched` have a batch dimension: fold the mapped dimension into it where no other operand is a tensor."""
    size = info.batch_size
    others = (x for at, x in enumerate(args) if at not in batched)
    if not any(isinstance(x, Tensor) or (isinstance(x, list | tuple) and x) for x in others):
        folded = [_fold(x, in_dims[at], size) if at in batched and x is not None else x for at, x in enumerate(args)]
        batch = args[0].shape[0] if in_dims[0] is None else args[0].movedim(in_dims[0], 0).shape[1]
        results = tuple(y.reshape(size, batch, *y.shape[1:]) if y.dim() > 1 else y.expand(size, 0) for y in op(*folded))
        return results, (0,) * len(results)
    if size == 0:
        raise ValueError("torch.vmap over a dimension of size 0 works for q, k and v alone, not with bias, sink or other tensor operands")
    rows = [op(*(_pick(x, dim, n) for x, dim in zip(args, in_dims, strict=True))) for n in range(size)]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])


def _pick(x, dim, n: int):
    """Entry n of an operand, or of each tensor of a list, along the dimension it is mapped over."""
    if isinstance(x, list | tuple):
        return [_pick(y, d, n) for y, d in zip(x, dim or [None] * len(x), strict=True)]
    return x if dim is None else x.select(dim, n)


forward.register_vmap(lambda info, in_dims, *args: _vmap(forward, info, in_dims, args, (0, 1, 2)))
backward.register_vmap(lambda info, in_dims, *args: _vmap(backward, info, in_dims, args, (0, 1, 2, 3, 5, 6, 7)))
