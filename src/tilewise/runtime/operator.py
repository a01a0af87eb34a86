"""The torch.library operators `tilewise::attention_forward` and `tilewise::attention_backward`: schema, fake kernels and autograd.

Everything that torch.compile, export, autocast, checkpointing and functorch need to know about attention stands here; vmaps.py adds vmap, tangents.py
the eye on forward-mode differentiation. An operator receives only what a graph can hold: tensors, numbers and the mask as text (see `Mask.text`); it
chooses the backend when it runs, not when it is traced.
An absent optional output is an empty tensor, because a schema cannot return None.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType

from tilewise import errors, masks
from tilewise.problem import Call, Dropout
from tilewise.runtime import by_document, graphs, saved
from tilewise.runtime.dispatch import choose
from tilewise.runtime.plain import mapped, watched
from tilewise.tangents import has_tangent, watch


class Operands(NamedTuple):
    """The operands of `forward`, in the order of its schema. Tensors as in `Call`; rng int64 (seed, offset); scale None is head_dim ** -0.5;
    out_dtype None is q's.

    `mask` is the mask's text, in which #i stands for mask_tensors[i]. In a graph these are never empty, as AOTInductor knows no empty list: a mask
    that holds no tensor gets q, and nobody looks at it. `grad` says whether a gradient may be asked for; `by_document` that bias and
    alibi_slopes are those of packed documents (runtime/by_document.py).
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

    @property
    def held(self) -> list[Tensor]:
        """The tensors that the mask holds."""
        return self.mask_tensors if "#" in self.mask else []


SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]", str: "str", str | None: "str?", bool: "bool"}
SCHEMA_TYPES |= {float: "float", float | None: "float?", torch.dtype | None: "ScalarType?"}
SCHEMA = ", ".join(f"{SCHEMA_TYPES[kind]} {name}" for name, kind in Operands.__annotations__.items())
AS_IN_CALL = tuple(name for name in Operands._fields if name in Call.__dataclass_fields__ and name not in ("mask", "scale"))
TENSORS = Operands._fields.index("mask_tensors")  # so many operands are single tensors, or None
BIAS, SINK = Operands._fields.index("bias"), Operands._fields.index("sink")


def call_of(given: Operands) -> Call:
    """The `Call` that the operands describe."""
    dropout = None
    if given.rng is not None and given.dropout_p > 0.0:
        dropout = Dropout(given.dropout_p, *given.rng.tolist())
    return Call(
        mask=masks.parse(given.mask, given.held),
        scale=given.q.shape[-1] ** -0.5 if given.scale is None else given.scale,
        dropout=dropout,
        **{name: getattr(given, name) for name in AS_IN_CALL},
    )


def named(given: NamedTuple) -> dict[str, Tensor | None]:
    """The tensors among an operator's operands by their names: all before its list `mask_tensors`, and those of the list."""
    mask_tensors = {f"mask_tensors[{n}]": x for n, x in enumerate(given.mask_tensors)}
    first = given._fields.index("mask_tensors")
    return dict(zip(given._fields, given[:first], strict=False)) | mask_tensors


def _forward(*operands, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """O (batch, seqlen_q, heads_q, head_dim_v), LSE and, with `row_max`, the rows' largest scores, both (batch, heads_q, seqlen_q).

    O is written into `out`, where that is given, and contiguous otherwise, as the fake kernels say.
    """
    given = Operands(*operands)
    call = call_of(given)
    if out is not None:
        call = replace(call, out=out)
    o, *statistics = _attend(call, given)
    lse, *largest = (x.contiguous() for x in statistics)
    o = o.contiguous() if out is None else o if o is out else out.copy_(o)
    return o, lse, largest[0] if largest else None


def _attend(call: Call, given: Operands) -> tuple[Tensor, ...]:
    """As `Backend.forward`."""
    return by_document.forward(call, given.backend) if given.by_document else choose(call.problem, given.backend).forward(call)


def _backward(o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool, *operands) -> tuple[Tensor, ...]:
    """dQ, dK, dV, dBias (empty unless `bias_grad`) and dSink (empty without a sink), each shaped and typed as its input."""
    given = Operands(*operands)
    of_batch = (None, None) if given.by_document else (given.bias, given.alibi_slopes)
    saved.check(*given[:3], o, lse, d_o, d_lse, (*of_batch, given.sink, given.diagonal))
    call = call_of(given)
    if given.precision is not None:  # straight through: P, whose rows must add up to 1, and delta are those of the inputs' own dtype
        call = replace(call, precision=None)
        o, lse, *_ = _attend(call, given)
    if given.by_document:
        grads = by_document.backward(call, given.backend, o, lse, d_o, d_lse, bias_grad=bias_grad)
    else:
        grads = choose(call.problem, given.backend).backward(call, o, lse, d_o, d_lse, bias_grad=bias_grad)
    return tuple(call.q.new_empty(0) if x is None else x.contiguous() for x in grads)


def _forward_kernel(*operands) -> tuple[Tensor, Tensor, Tensor]:
    """`_forward` of tensors that nobody has looked at; the largest scores empty where they are not wanted."""
    _refuse_tangents_forward(*operands)
    errors.check_memory(**named(Operands(*operands)))
    o, lse, row_max = graphs.apart(_forward, *operands)
    return o, lse, lse.new_empty(0) if row_max is None else row_max


def _backward_kernel(o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool, *operands) -> tuple[Tensor, ...]:
    """`_backward` of tensors that nobody has looked at."""
    _refuse_tangents_backward(o, lse, d_o, d_lse, bias_grad, *operands)
    errors.check_memory(o=o, lse=lse, dO=d_o, dLSE=d_lse, **named(Operands(*operands)))
    return graphs.apart(_backward, o, lse, d_o, d_lse, bias_grad, *operands)


def _refuse_tangents_forward(*operands) -> None:
    refuse_tangents(named(Operands(*operands)).values())


def _refuse_tangents_backward(*operands) -> None:
    refuse_tangents(_tensors(operands))


GRADIENTS = "Tensor o, Tensor lse, Tensor d_o, Tensor? d_lse, bool bias_grad"  # what `backward` takes before the operands


def _forward_operator(name: str, kernel, **options) -> torch.library.CustomOpDef:
    schema = f"({SCHEMA}) -> (Tensor, Tensor, Tensor)"
    op = torch.library.custom_op(f"tilewise::{name}", kernel, mutates_args=(), schema=schema, **options)
    op.register_fake(_fake_forward)
    return op


def _backward_operator(name: str, kernel, **options) -> torch.library.CustomOpDef:
    schema = f"({GRADIENTS}, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    op = torch.library.custom_op(f"tilewise::{name}", kernel, mutates_args=(), schema=schema, **options)
    op.register_fake(_fake_backward)
    return op


def _fake_forward(*operands):
    given = Operands(*operands)
    q, (batch, seqlen_q, heads_q, _) = given.q, given.q.shape
    lse = q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    o = q.new_empty((batch, seqlen_q, heads_q, given.v.shape[-1]), dtype=given.out_dtype or q.dtype)
    return o, lse, torch.empty_like(lse) if given.row_max else lse.new_empty(0)


def _fake_backward(o, lse, d_o, d_lse, bias_grad, *operands):
    given = Operands(*operands)
    inputs = (given.q, given.k, given.v, given.bias if bias_grad else None, given.sink)
    return tuple(given.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output):
    given, (o, lse, row_max) = Operands(*inputs), output
    ctx.save_for_backward(*saved.in_order(given[:TENSORS], given.held, o, lse))
    if row_max is not None:
        ctx.mark_non_differentiable(row_max)
    ctx.settings = given[TENSORS + 1 :]
    ctx.no_grads = [None] * len(given.mask_tensors)  # an operator wants one entry for each tensor of its list
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_o, d_lse, choose_way):
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    rest = TENSORS - 3
    given = Operands(q, k, v, *tensors[:rest], tensors[rest:], *ctx.settings)
    bias_grad = given.bias is not None and ctx.needs_input_grad[BIAS]
    grads = [None] * len(given)
    operands = o, lse, torch.zeros_like(o) if d_o is None else d_o, d_lse, bias_grad, *given
    *grads[:3], d_bias, d_sink = choose_way(operands)(*operands)
    grads[BIAS] = d_bias if bias_grad else None
    grads[SINK] = None if given.sink is None else d_sink
    return tuple(grads)


def _differentiate_by(op: torch.library.CustomOpDef):
    def differentiate(ctx, d_o, d_lse, _):
        grads = list(_differentiate(ctx, d_o, d_lse, lambda operands: op))
        grads[TENSORS] = ctx.no_grads
        return tuple(grads)

    return differentiate


def _tensors(operands: tuple) -> list[Tensor | None]:
    """All tensors among the operands of `backward`."""
    first = len(operands) - len(Operands._fields)
    return [*operands[: first - 1], *operands[first : first + TENSORS], *operands[first + TENSORS]]  # without bias_grad


def _way_back(operands: tuple):
    """The shortest way from the operands of `backward` to its results that all who watch allow."""
    tensors = _tensors(operands)
    if not watched(tensors):
        return _Backward.apply if torch.is_grad_enabled() else _backward  # without a gradient of its own nobody needs autograd
    return backward if mapped(tensors) else _Backward.apply


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
forward, backward = _forward_operator("attention_forward", _forward_kernel), _backward_operator("attention_backward", _backward_kernel)
forward_reading = _forward_operator("attention_forward_reading", graphs.afresh(_forward_kernel, Operands), **graphs.LEFT_OUT)
backward_reading = _backward_operator(
    "attention_backward_reading", graphs.afresh(_backward_kernel, Operands, GRADIENTS.count(",") + 1), **graphs.LEFT_OUT
)
for op, name, back in ((forward, "attention_forward", backward), (forward_reading, "attention_forward_reading", backward_reading)):
    op.register_autograd(_differentiate_by(back), setup_context=_setup_context)
    back.register_autograd(_refuse_second_derivative)
    watch(op, name, _refuse_tangents_forward)
    watch(back, name.replace("forward", "backward"), _refuse_tangents_backward)


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
    def backward(ctx, d_o, d_lse, _):
        return _differentiate(ctx, d_o, d_lse, _way_back)

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
    def backward(ctx, d_o, d_lse, _):
        return _differentiate(ctx, d_o, d_lse, _way_back)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_forward_mode()


class _Backward(torch.autograd.Function):
    """`backward` for `_Forward` and `_Eager`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*operands):
        return backward(*operands) if watched(_tensors(operands)) else _backward(*operands)

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
    return {each.key() for each in torch._C._functorch.get_interpreter_stack() or ()}


def traced() -> bool:
    """Whether a graph is being made of the call, by torch.compile, torch.export or torch.jit.trace: what it does must be an operator of it."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def gradients_on() -> bool:
    """Whether autograd records, or may when what torch.jit.trace records now runs."""
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None)


def filled(given):
    """Operands for a graph: with mask_tensors that are not empty."""
    return given if given.mask_tensors else given._replace(mask_tensors=[given.q])


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


def attend(operands: Operands, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """O, LSE and the rows' largest scores (None or empty without `row_max`), by the shortest way that all who watch allow.

    With `out`, which fits and takes no part in a gradient, O is written there.
    """
    tensors = *operands[:TENSORS], *operands.mask_tensors
    if out is not None:
        if not traced() and not watched((*tensors, out)):
            return _forward(*operands, out=out)
        o, *statistics = attend(operands)
        return out.copy_(o), *statistics
    if traced():
        refuse_tangents(tensors)
        operands, drawn = filled(operands), operands.rng is not None
        reads = graphs.reads(operands.q, operands.v, operands.mask, operands.held, operands.backend, drawn or operands.by_document)
        return (forward_reading if reads else forward)(*operands)
    if watched(tensors):
        errors.check_local(named(operands))
        if TransformType.Functionalize in (active := transforms()):
            if operands.grad or active & {TransformType.Grad, TransformType.Jvp}:
                raise errors.UnsupportedError(
                    "attention has no derivative under torch.func.functionalize, because torch gives an autograd.Function none; "
                    "leave functionalize out, or trace with torch.compile"
                )
            return forward(*operands)
        return forward(*operands) if mapped(tensors) else _Forward.apply(*operands)
    return _Eager.apply(*operands) if operands.grad else _forward(*operands)


def differentiate(
    o: Tensor, lse: Tensor, d_o: Tensor, given: Operands, d_lse: Tensor | None = None, bias_grad: bool = False
) -> tuple[Tensor, ...]:
    """dQ, dK, dV, dBias (empty unless `bias_grad`) and dSink (empty without a sink), by the shortest way that all who watch allow."""
    operands = o, lse, d_o, d_lse, bias_grad, *given
    return _way_back(operands)(*operands)
