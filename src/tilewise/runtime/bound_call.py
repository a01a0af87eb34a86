"""A call of attention that was bound, as a function of its tensors: with a gradient, and with tensors that its caller arranges in another way.

A gradient asks again whether its tensors are such as the call was bound to, because hooks on saved tensors may give back others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilewise.backends import Bound
from tilewise.problem import NO_EXTRAS
from tilewise.runtime import operator, plain, saved
from tilewise.views import part

PACKED = "packed"  # (total, heads, head_dim): no batch
BHSD, BHSD_INPUTS = "bhsd", "bhsd inputs"  # (batch, heads, seqlen, head_dim), all or q, k and v alone
INSIDE = {"": lambda x: x, PACKED: lambda x: x.unsqueeze(0)} | dict.fromkeys((BHSD, BHSD_INPUTS), lambda x: x.transpose(1, 2))
OUTSIDE = INSIDE | {PACKED: lambda x: x.squeeze(0)}


@dataclass(slots=True)
class BoundCall:
    """A checked call: what its backend bound, and the operator's operands but for the tensors, for gradients that fit that no more."""

    bound: Bound
    given: operator.Operands
    grad: bool
    return_lse: bool
    options: tuple
    present: tuple  # as `tensors_of` gives it
    check: Callable | None  # of the tensors: whether they are such, and nothing but autograd takes part; None: torch cannot say
    grad_enabled: bool | None  # whether autograd was on, which `check` does not ask; None: nothing requires grad
    layouts: tuple  # of the tensors, as `layout_of` gives them
    # By `present`: the check of what `way_back` has, and how dO lies for the backend, once that fitted.
    check_back: dict[tuple, tuple] = field(default_factory=dict)
    check_whole: tuple | None = None  # likewise of q, k, v, O, LSE and dO as the caller has them, and how each lies, of `gradients`
    draws: bool = False  # there is dropout
    # Without a gradient O shall lie in memory as (batch, heads, seqlen, head_dim_v), where the backend can have it so.
    heads_first: bool = False
    arrangement: str = ""  # of q, k, v and O as the caller has them: a key of INSIDE
    places: tuple = ()  # where it is arranged in another way: how q, k and v lie for the backend, and O for the caller, once that is known
    gradients: tuple = ()  # likewise how dQ, dK and dV lie for the caller
    # Whether the backend has the gradient of a call that asked for none, once someone wanted it (call_cache.gradients).
    backward_supported: bool | None = None
    of_outputs: str = field(default="", init=False)  # how O and dO are arranged: a key of INSIDE

    def __post_init__(self) -> None:
        self.of_outputs = "" if self.arrangement == BHSD_INPUTS else self.arrangement

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: tuple = NO_EXTRAS) -> Tensor | tuple[Tensor, Tensor]:
        """O, and LSE where the call returns it, arranged as q, k and v are. With dropout and no `Extras.rng`, the seed is drawn here."""
        if not (self.present or self.draws):
            extras = NO_EXTRAS
            if self.grad:
                return _with_gradient(self, q, k, v)
        else:
            bias, slopes, sink, rng, *rest = extras
            if slopes is not None:
                slopes = slopes_of(slopes)
            if self.draws and rng is None:
                rng = operator.random_state()
            extras = bias, slopes, sink, rng, *rest
        if self.grad:
            return _with_gradient(self, q, k, v, *extras)
        if not self.arrangement:
            results = self.bound.forward(q, k, v, extras, self.return_lse)
            return results if self.return_lse else results[0]
        *_, o, lse = self.compute(q, k, v, extras, self.return_lse)
        o, lse = self.outside(o, lse)
        return (o, lse) if self.return_lse else o

    def compute(self, q: Tensor, k: Tensor, v: Tensor, extras: tuple, with_lse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, O and LSE as the backend has them: parts of the caller's tensors, of which autograd knows nothing."""
        if not self.places:
            self.places = *(place_of(INSIDE[self.arrangement](x)) for x in (q, k, v)), None
        of_q, of_k, of_v, _ = self.places
        q, k, v = part(q, *of_q), part(k, *of_k), part(v, *of_v)
        return q, k, v, *self.bound.forward(q, k, v, extras, with_lse, self.heads_first)

    def outside(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """O as the caller has it, and LSE if it is returned."""
        if self.of_outputs:
            if self.places[3] is None:
                self.places = *self.places[:3], place_of(OUTSIDE[self.of_outputs](o))
            o = part(o, *self.places[3])
        if self.return_lse and self.arrangement == PACKED:
            lse = part(lse, lse.shape[1:], lse.stride()[1:], 0)
        return o, lse

    def inputs_and_o(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The caller's tensors as the backend has them, as views."""
        inside = INSIDE[self.arrangement]
        return inside(q), inside(k), inside(v), INSIDE[self.of_outputs](o)

    def backward(self, *operands) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Gradients of q, k and v are arranged as the caller has these: by parts, for they are nobody's yet."""
        found = self.bound.backward(*operands)
        if not self.arrangement:
            return found
        d_q, d_k, d_v, d_bias, d_sink = found
        if not self.gradients:
            self.gradients = tuple(place_of(OUTSIDE[self.arrangement](x)) for x in (d_q, d_k, d_v))
        of_q, of_k, of_v = self.gradients
        return part(d_q, *of_q), part(d_k, *of_k), part(d_v, *of_v), d_bias, d_sink


class _BoundCall(torch.autograd.Function):
    """A bound call with a gradient. To hooks it gives what the operator saves (`saved.in_order`); autograd itself has an eye on the caller's
    tensors, whether they are changed in place, while `ctx.parts` are these as the backend has them.
    """

    @staticmethod
    def forward(ctx, known, q, k, v, *extras):
        ctx.known, ctx.arrangement, ctx.parts = known, "", None  # that of the tensors that are saved
        arrangement, more = known.arrangement, extras or NO_EXTRAS
        if not arrangement:
            o, lse = known.bound.forward(q, k, v, more, True)
            ctx.save_for_backward(*saved.in_order((q, k, v, *extras), [], o, lse))
        else:
            *parts, o, lse = known.compute(q, k, v, more, True)
            if _top_saved_tensors_default_hooks(False) is not None:
                inside, outside = INSIDE[arrangement], OUTSIDE[known.of_outputs]
                ctx.save_for_backward(*saved.in_order((inside(q), inside(k), inside(v), *extras), [], o, lse))
                o, lse = outside(o).detach(), lse.squeeze(0).detach() if arrangement == PACKED else lse  # for autograd, views of nothing
            else:
                if known.of_outputs:  # O itself is none of the parts: it holds the graph that holds them
                    parts.append(o)
                ctx.arrangement, ctx.parts = arrangement, parts
                o, lse = known.outside(o, lse)
                ctx.save_for_backward(*saved.in_order((q, k, v, *extras), [], o, lse))
        if known.return_lse:
            ctx.set_materialize_grads(False)
            return o, lse
        return o

    @staticmethod
    def backward(ctx, d_o, d_lse=None):
        known, (q, k, v, o, lse, *extras) = ctx.known, ctx.saved_tensors
        parts, ctx.parts = ctx.parts, None  # they are gone behind this as what is saved is
        arrangement, extras = known.arrangement, extras or NO_EXTRAS
        bias_grad = extras[0] is not None and ctx.needs_input_grad[4]
        if ctx.arrangement:
            if parts is None or torch.is_grad_enabled() or is_compiling():
                q, k, v, o = known.inputs_and_o(q, k, v, o)
            elif known.of_outputs:
                q, k, v, o = parts
            else:
                q, k, v = parts
            if known.return_lse and arrangement == PACKED:
                lse = lse.unsqueeze(0)
        if arrangement == PACKED and d_lse is not None:
            d_lse = d_lse.unsqueeze(0)
        if d_o is None:
            d_o = OUTSIDE[known.of_outputs](torch.zeros_like(o))
        d_o, fits = way_back(known, q, k, v, o, lse, d_o, d_lse, extras)
        if fits:
            d_q, d_k, d_v, d_bias, d_sink = known.backward(q, k, v, o, lse, d_o, d_lse, extras, bias_grad)
        else:
            bias, slopes, sink, rng, *lengths = extras[:6]
            lengths = [x for x in lengths if x is not None]
            given = known.given._replace(q=q, k=k, v=v, bias=bias, alibi_slopes=slopes, sink=sink, rng=rng, mask_tensors=lengths)
            *of_inputs, d_bias, d_sink = operator.differentiate(o, lse, d_o, given, d_lse, bias_grad)
            d_q, d_k, d_v = map(OUTSIDE[arrangement], of_inputs)
        if extras is NO_EXTRAS:
            return None, d_q, d_k, d_v
        return None, d_q, d_k, d_v, d_bias if bias_grad else None, None, None if extras[2] is None else d_sink, *(None,) * 6

    @staticmethod
    def jvp(ctx, *tangents):
        operator.refuse_forward_mode()


# Without a look for wrappers of torch.func, which are not plain. (Helpers that compile have no torch, and nothing to call.)
_with_gradient: Callable = getattr(super(torch.autograd.Function, _BoundCall), "apply", _BoundCall)


def slopes_of(alibi_slopes: Tensor) -> Tensor:
    """As the operator takes them, (batch or 1, heads_q) fp32."""
    slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes.unsqueeze(0)
    return slopes if slopes.dtype == torch.float32 else slopes.float()


def way_back(
    known: BoundCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    d_o: Tensor,
    d_lse: Tensor | None,
    extras: Sequence[Tensor | None],
) -> tuple[Tensor, bool]:
    """dO, which comes as the caller has it, as the backend has it; and whether what the backend bound gives the gradients: the tensors lie as those
    of the forward did, and nothing but autograd looks on.

    Hooks on saved tensors may give back copies, and any gradient may arrive: that of a sum has strides of 0.
    """
    inside = INSIDE[known.of_outputs]
    if torch.is_grad_enabled():
        return inside(d_o), False
    tensors, present = tensors_of(q, k, v, extras)
    tensors = (*tensors, o, lse, d_o) if d_lse is None else (*tensors, o, lse, d_o, d_lse)
    for x in tensors:
        if x.is_nested:
            return inside(d_o), False
    kind = present, d_lse is None
    check, place = known.check_back.get(kind, (None, None))
    if check is not None and check(*tensors) and torch._C._len_torch_dispatch_stack() == 0 and forward_ad._current_level < 0:
        return d_o if place is None else part(d_o, *place), True
    others = (x for x in (*extras[:3], *extras[4:]) if x is not None)
    d_o, outside = inside(d_o), d_o
    if plain.needs_dispatch(tensors) or tuple(map(layout_of, (q, k, v, *others))) != known.layouts:
        return d_o, False
    like_o, like_lse = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
    results = [(o, like_o, q.dtype), (d_o, like_o, q.dtype), (lse, like_lse, torch.float32)]
    if d_lse is not None:
        results.append((d_lse, like_lse, torch.float32))
    for x, shape, dtype in results:
        if x.shape != shape or x.dtype != dtype or x.device != q.device or not (x is not lse or x.is_contiguous()):
            return d_o, False
    if q is not k and k is not v and (check := guard(*tensors)):  # it wants them apart
        known.check_back[kind] = check, None if d_o is outside else place_of(d_o)
    return d_o, True


def tensors_of(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], tuple]:
    """Those that are present, each once, as torch's check wants them, and which of `extras` these are; `rng` is none of them."""
    if extras is NO_EXTRAS:
        return (q, k, v), ()
    bias, slopes, sink, _, cu_seqlens_q, cu_seqlens_k, of_q, of_k, of_v = extras
    scaled = not of_q is of_k is of_v is None
    if bias is slopes is sink is cu_seqlens_q is None and not scaled:
        return (q, k, v), ()
    same = cu_seqlens_q is cu_seqlens_k
    present = bias is not None, slopes is not None and (True, slopes.requires_grad), sink is not None, same, cu_seqlens_q is not None
    found = [q, k, v]
    for x in (bias, slopes, sink, cu_seqlens_q, None if same else cu_seqlens_k):
        if x is not None:
            found.append(x)
    if not scaled:
        return tuple(found), present
    alike = of_k is of_q, of_v is of_q, of_v is of_k
    for x in (of_q, None if alike[0] else of_k, None if alike[1] or alike[2] else of_v):
        if x is not None:
            found.append(x)
    return tuple(found), (*present, of_q is not None, of_k is not None, of_v is not None, *alike)


def place_of(x: Tensor) -> tuple:
    """As `part` has it, of a view that begins where its base does."""
    return x.shape, x.stride(), 0


def layout_of(x: Tensor) -> tuple:
    return x.dtype, x.device, x.shape, x.stride()


def guard(*tensors: Tensor) -> Callable | None:
    """Whether tensors have the types, dtypes, devices, sizes, strides and need of gradients of these, and whether dispatch is as it is now."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError):  # torch's own business, which another version may do otherwise
        return None
