"""The torch.library operators `tilewise::attention_forward` and `tilewise::attention_backward`: operands, fake kernels and autograd.

Everything that torch.compile, export, autocast, checkpointing and functorch need to know about attention alone stands here; of every operator, in
op.py. An operator chooses the backend when it runs, not when it is traced.
An absent optional output is an empty tensor, because a schema cannot return None.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._library.custom_ops import CustomOpDef

from tilewise import errors, masks
from tilewise.problem import Call, Dropout
from tilewise.runtime import by_document, graphs, op, saved, vmaps
from tilewise.runtime.dispatch import choose
from tilewise.runtime.plain import mapped, needs_dispatch
from tilewise.tangents import has_tangent


class Operands(NamedTuple):
    """The operands of `forward`, in the order of its schema. Tensors as in `Call`; rng int64 (seed, offset); scale None is head_dim ** -0.5;
    out_dtype None is q's.

    `grad` says whether a gradient may be asked for; `by_document` that bias and alibi_slopes are those of packed documents (by_document.py).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    diagonal: Tensor | None
    rng: Tensor | None
    mask_tensors: list[Tensor]
    mask: str
    scale: float | None
    softcap: float
    dropout_p: float
    deterministic: bool
    grad: bool
    row_max: bool
    by_document: bool
    precision: str | None
    out_dtype: torch.dtype | None
    backend: str | None


OF_GRADIENTS = {"o": Tensor, "lse": Tensor, "d_o": Tensor, "d_lse": Tensor | None, "bias_grad": bool}
OF_BACKWARD = [*OF_GRADIENTS.items(), *Operands.__annotations__.items()]
BackwardOperands = NamedTuple("BackwardOperands", OF_BACKWARD)
AS_IN_CALL = tuple(name for name in Operands._fields if name in Call.__dataclass_fields__ and name not in ("mask", "scale"))
TENSORS = Operands._fields.index("mask_tensors")  # this many operands are single tensors, or None
GradientTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dQ, dK, dV, dBias and dSink, the last two empty where there is none
BIAS, SINK = Operands._fields.index("bias"), Operands._fields.index("sink")


def call_of(given: Operands | BackwardOperands) -> Call:
    """The `Call` that the operands describe."""
    dropout, mask = None, masks.parse(given.mask, op.held(given))
    if given.rng is not None and given.dropout_p > 0.0:
        seed, offset = given.rng.tolist()
        dropout = Dropout(given.dropout_p, seed, offset, mask if isinstance(mask, masks.Part) else None)
    return Call(
        mask=mask,
        scale=given.q.shape[-1] ** -0.5 if given.scale is None else given.scale,
        dropout=dropout,
        **{name: getattr(given, name) for name in AS_IN_CALL},
    )


def _forward(given: Operands, out: Tensor | None = None, wide_keys: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """O (batch, seqlen_q, heads_q, head_dim_v), LSE and, with `row_max`, the rows' largest scores, both (batch, heads_q, seqlen_q).

    O is written into `out`, where that is given, and contiguous otherwise, as the fake kernels say.
    """
    call = call_of(given)
    if out is not None or wide_keys:
        call = replace(call, out=out, wide_keys=wide_keys)
    o, *statistics = _attend(call, given)
    lse, *largest = (x.contiguous() for x in statistics)
    o = o.contiguous() if out is None else o if o is out else out.copy_(o)
    return o, lse, largest[0] if largest else None


def _attend(call: Call, given: Operands | BackwardOperands) -> tuple[Tensor, ...]:
    """As `Backend.forward`."""
    return by_document.forward(call, given.backend) if given.by_document else choose(call.problem, given.backend).forward(call)


def _backward(given: BackwardOperands, wide_keys: bool = False) -> GradientTensors:
    """dQ, dK, dV, dBias (empty unless `bias_grad`) and dSink (empty without a sink), each shaped and typed as its input.

    With `wide_keys` dK and dV may be fp32.
    """
    o, lse, d_o, d_lse, bias_grad, q, k, v, *_ = given
    of_batch = (None, None) if given.by_document else (given.bias, given.alibi_slopes)
    saved.check(q, k, v, o, lse, d_o, d_lse, (*of_batch, given.sink, given.diagonal))
    call = call_of(given)
    if wide_keys:
        call = replace(call, wide_keys=True)
    if given.precision is not None:  # straight through: P, with rows that must add up to 1, and delta are those of the inputs' own dtype
        call = replace(call, precision=None)
        o, lse, *_ = _attend(call, given)
    if given.by_document:
        grads = by_document.backward(call, given.backend, o, lse, d_o, d_lse, bias_grad=bias_grad)
    else:
        grads = choose(call.problem, given.backend).backward(call, o, lse, d_o, d_lse, bias_grad=bias_grad)
    d_q, d_k, d_v, d_bias, d_sink = grads
    d_bias, d_sink = (q.new_empty(0) if x is None else x.contiguous() for x in (d_bias, d_sink))
    return d_q.contiguous(), d_k.contiguous(), d_v.contiguous(), d_bias, d_sink


def _results(given: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Those of `_forward`; the largest scores empty where they are not wanted."""
    o, lse, row_max = _forward(given)
    return o, lse, lse.new_empty(0) if row_max is None else row_max


def _fake_results(given: Operands) -> tuple[Tensor, Tensor, Tensor]:
    q, (batch, seqlen_q, heads_q, _) = given.q, given.q.shape
    lse = q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    o = q.new_empty((batch, seqlen_q, heads_q, given.v.shape[-1]), dtype=given.out_dtype or q.dtype)
    return o, lse, torch.empty_like(lse) if given.row_max else lse.new_empty(0)


def _fake_gradients(given: BackwardOperands) -> tuple[Tensor, ...]:
    inputs = (given.q, given.k, given.v, given.bias if given.bias_grad else None, given.sink)
    return tuple(given.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output):
    given, (o, lse, row_max) = Operands(*inputs), output
    tensors: tuple = given[:TENSORS]
    ctx.save_for_backward(*saved.in_order(tensors, op.held(given), o, lse))
    if row_max is not None:
        ctx.mark_non_differentiable(row_max)
    ctx.settings = given[TENSORS + 1 :]
    ctx.no_grads = [None] * len(given.mask_tensors)  # an operator wants one entry for each tensor of its list
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_o: Tensor | None, d_lse: Tensor | None, back: Callable[[BackwardOperands], tuple]) -> list[Tensor | None]:
    """What autograd wants of each operand, by what gives the results of `backward`."""
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    rest = TENSORS - 3
    given = Operands._make((q, k, v, *tensors[:rest], tensors[rest:], *ctx.settings))
    bias_grad = given.bias is not None and ctx.needs_input_grad[BIAS]
    grads: list = [None] * len(given)
    *grads[:3], d_bias, d_sink = back(BackwardOperands(o, lse, torch.zeros_like(o) if d_o is None else d_o, d_lse, bias_grad, *given))
    grads[BIAS] = d_bias if bias_grad else None
    grads[SINK] = None if given.sink is None else d_sink
    return grads


def _differentiate_by(back: CustomOpDef) -> Callable:
    def differentiate(ctx, d_o, d_lse, _):
        grads = _differentiate(ctx, d_o, d_lse, lambda given: back(*given))
        grads[TENSORS] = ctx.no_grads
        return tuple(grads)

    return differentiate


def _by_shortest_way(given: BackwardOperands) -> GradientTensors:
    """The results of `backward`, by the shortest way that all who watch allow."""
    tensors = op.named(given).values()
    if needs_dispatch(tensors):
        return (backward if mapped(tensors) else _Backward.apply)(*given)
    return _Backward.apply(*given) if torch.is_grad_enabled() else _backward(given)  # without a gradient of its own nobody needs autograd


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(
        "attention has no second derivative here; torch.autograd.grad(..., create_graph=True) may be called, but not differentiated again"
    )


def refuse_forward_mode():
    raise RuntimeError("attention has no forward-mode derivative (jvp, jacfwd, hessian); use reverse mode: torch.func.grad, vjp or jacrev")


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Refuse tensors with tangents where torch would drop those: in a compiled program, or without autograd."""
    if any(x is not None and has_tangent(x) for x in tensors):
        refuse_forward_mode()


# Selective checkpointing looks for "attention" in names.
forward, forward_reading = op.declare(
    "attention_forward",
    Operands,
    _results,
    fake=_fake_results,
    results=3,
    tangent=lambda name, x: refuse_tangents([x]),
    vmap=partial(vmaps.fold, (0, 1, 2)),  # q, k, v
)
backward, backward_reading = op.declare(
    "attention_backward",
    BackwardOperands,
    _backward,
    fake=_fake_gradients,
    results=5,
    tangent=lambda name, x: refuse_tangents([x]),
    vmap=partial(vmaps.fold, (0, 1, 2, 3, 5, 6, 7)),  # o, lse, d_o, d_lse, q, k, v
    backward=_refuse_second_derivative,
)
forward.register_autograd(_differentiate_by(backward), setup_context=_setup_context)
forward_reading.register_autograd(_differentiate_by(backward_reading), setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The derivative of `forward` outside of graphs."""

    @staticmethod
    def backward(ctx, d_o, d_lse, _):
        return tuple(_differentiate(ctx, d_o, d_lse, _by_shortest_way))

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_forward_mode()


class _Forward(_Attention):
    """`forward` for torch.func: its transforms take this but not an operator's own autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*operands):
        return forward(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _setup_context(ctx, inputs, output)


class _Eager(_Attention):
    """`forward` for plain eager calls, without the operator's 40 us, and without torch's 30 us for a context set up apart."""

    @staticmethod
    def forward(ctx, *operands):
        output = _forward(Operands(*operands))
        _setup_context(ctx, operands, output)
        return output


class _Backward(torch.autograd.Function):
    """`backward` for `_Attention`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*operands):
        given = BackwardOperands(*operands)
        return backward(*given) if needs_dispatch(op.named(given).values()) else _backward(given)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        _refuse_second_derivative(ctx, *grads)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_forward_mode()


def transforms() -> set:
    """The kinds of torch.func's transforms that are active."""
    return {each.key() for each in get_interpreter_stack() or ()}


def traced() -> bool:
    """Whether a graph is being made of the call, by torch.compile, torch.export or torch.jit.trace: what it does must be an operator of it."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def gradients_on() -> bool:
    """Whether autograd records, or may when what torch.jit.trace records now runs."""
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None)


def random_state(seed: int | None = None, offset: int = 0) -> Tensor:
    """(2,) int64 on the CPU: the seed (drawn from torch's generator where None) and the offset of the counter."""
    for name, x, bits, otherwise in (
        ("dropout_seed", 0 if seed is None else seed, 63, ", or None to draw one"),
        ("dropout_offset", offset, 32, ""),
    ):
        if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < 2**bits:
            raise ValueError(f"{name} must be an integer in [0, 2**{bits}){otherwise}, got {x!r}")
    new = {"dtype": torch.int64, "device": "cpu"}  # whatever torch's defaults are
    if seed is not None:
        return torch.tensor([seed, offset], **new)
    drawn = torch.randint(0, 2**62, (1,), **new)
    return torch.cat((drawn, drawn.clamp(offset, offset)))  # torch.compile moves a tensor of one constant to the GPU, but not `drawn`


def attend(operands: Operands, out: Tensor | None = None, wide_keys: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """O, LSE and the rows' largest scores (None or empty without `row_max`), by the shortest way that all who watch allow.

    With `out`, which fits and takes no part in a gradient, O is written there. With `wide_keys`, for those who call `differentiate` so themselves,
    nothing is recorded for autograd, and a backend may compile those gradients meanwhile.
    """
    tensors: tuple = (*operands[:TENSORS], *operands.mask_tensors)
    if out is not None:
        if not traced() and not needs_dispatch((*tensors, out)):
            return _forward(operands, out)
        o, lse, row_max = attend(operands)
        return out.copy_(o), lse, row_max
    if traced():
        refuse_tangents(tensors)
        return (forward_reading if graphs.reads(operands) else forward)(*op.filled(operands))
    if needs_dispatch(tensors):
        errors.check_local(op.named(operands))
        if TransformType.Functionalize in (active := transforms()):
            if operands.grad or active & {TransformType.Grad, TransformType.Jvp}:
                raise errors.UnsupportedError(
                    "attention has no derivative under torch.func.functionalize, because torch gives an autograd.Function none; "
                    "leave functionalize out, or trace with torch.compile"
                )
            return forward(*operands)
        return forward(*operands) if mapped(tensors) else _Forward.apply(*operands)
    return _Eager.apply(*operands) if operands.grad and not wide_keys else _forward(operands, wide_keys=wide_keys)


def differentiate(
    o: Tensor,
    lse: Tensor,
    d_o: Tensor,
    given: Operands,
    d_lse: Tensor | None = None,
    bias_grad: bool = False,
    wide_keys: bool = False,
) -> GradientTensors:
    """dQ, dK, dV, dBias (empty unless `bias_grad`) and dSink (empty without a sink), by the shortest way that all who watch allow.

    With `wide_keys` dK and dV are fp32 where nobody watches and the backend can.
    """
    asked = BackwardOperands(o, lse, d_o, d_lse, bias_grad, *given)
    if wide_keys and not torch.is_grad_enabled() and not needs_dispatch(op.named(asked).values()):
        return _backward(asked, wide_keys=True)
    return _by_shortest_way(asked)
