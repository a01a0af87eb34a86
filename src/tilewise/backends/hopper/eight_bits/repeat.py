"""The short way for more calls in 8 bits like one before: kernels, plan and the cut of scratch are remembered, which small calls have in common."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch

from tilewise.backends.hopper import short
from tilewise.backends.hopper.eight_bits import call as eight_bits
from tilewise.backends.hopper.eight_bits import scratch
from tilewise.backends.hopper.forward import call as sixteen_bits
from tilewise.backends.hopper.forward import plan as planning
from tilewise.backends.hopper.forward.plan import Plan
from tilewise.backends.hopper.repeat import Repeat
from tilewise.backends.tables import documents
from tilewise.masks import Documents, Unread
from tilewise.problem import Call
from tilewise.sm90 import jit
from tilewise.views import part

KEPT_BYTES = 8 << 20  # more scratch is allocated anew; its kernels take longer than that


def repeat(call: Call) -> Repeat | None:
    """As forward/call.py has it, of calls without gradients."""
    if call.row_max or call.scale <= 0.0 or 0 in (call.q.numel(), call.k.numel(), call.v.numel()):
        return None
    if not all(map(jit.strided, (call.q, call.k, call.v))):
        return None
    if isinstance(call.mask, Documents) and call.mask.cu_seqlens_k[-1] < call.seqlen_k:  # whose ends are no tensor of the caller's
        return None
    device, quantises = call.q.device, call.precision is not None
    plan = Plan.of(call, planning.num_sms(device), eight_bits.config_of(call))
    run, scale = (_by_quantiser if quantises else _by_transposer)(call, plan)
    found = sixteen_bits.again(call, plan, scale)
    if found is None:
        return None
    if not quantises:
        found["made"] = _with_scales(call, found.get("made"))
    elif isinstance(call.mask, Unread):
        found["made"] = _with_ends(call, found.get("made"))
    return Repeat(call, run, lambda: sixteen_bits.work_of(plan, device), None, **found)


def _by_quantiser(call: Call, plan: Plan) -> tuple[Callable, float]:
    """What computes calls with `precision` from (q, k, v, O, LSE), Work, Band, Scores and, where there are any, `Given.ends`; the softmax's scale."""
    config, scale = eight_bits.quantiser_of(call), call.scale
    quantise = jit.compiled(eight_bits.QUANTISE, eight_bits.quantiser_arguments, config)
    attend = jit.compiled(eight_bits.LAUNCH, eight_bits.arguments, plan.config)
    make = scratch.of_quantiser(call, config)

    def begin(stream: int | None) -> tuple:
        made, _, channels = bundles = make(stream)
        on_gpu = stream is not None and channels.is_cuda
        return _operands(bundles, on_gpu), _operands(made, on_gpu)

    at_hand = short.by_stream(call.q.device.index, begin, make.bytes <= KEPT_BYTES)

    def run(tensors, work, band, scores, ends=None):
        q, k, v, o, lse = tensors
        bundles, made = at_hand()
        quantise((q, k, v, ends), *bundles, scale)
        attend((*made, o, lse, v), bundles[1], work, band, scores)

    return run, scale / config.head_dim


def _by_transposer(call: Call, plan: Plan) -> tuple[Callable, float]:
    """Likewise of tensors in 8 bits, whose scales come last."""
    config = eight_bits.transposer_of(call)
    transpose = jit.compiled(eight_bits.TRANSPOSE, eight_bits.transpose_arguments, config)
    attend = jit.compiled(eight_bits.LAUNCH, eight_bits.arguments, plan.config)
    make = scratch.of_transposer(call, config)

    def begin(stream: int | None) -> tuple:
        found = make(stream)
        return _operands(found, stream is not None and found[0].is_cuda)

    at_hand = short.by_stream(call.q.device.index, begin, make.bytes <= KEPT_BYTES)

    def run(tensors, work, band, scores, scales):
        q, k, v, o, lse = tensors
        turned, *made = at_hand()
        tokens, scales = eight_bits.with_tokens(scales, *made)
        q, k, v = q.view(torch.int8), k.view(torch.int8), v.view(torch.int8)
        transpose(v, turned, tokens)
        attend((q, k, turned, o, lse, v), scales, work, band, scores)

    return run, call.scale


def _operands(bundle: Sequence, on_gpu: bool) -> tuple:
    """Each of the bundle's fields by `short.as_operand`."""
    return tuple([short.as_operand(x, on_gpu) for x in bundle])


def _with_ends(call: Call, made: Callable | None) -> Callable:
    """What makes `Given.ends` of the tensors of `repeats.Beside`, behind what `made` makes of them."""
    device = call.q.device

    def all_made(bias, slopes, sink, rng, cu_seqlens_q, cu_seqlens_k):
        found = () if made is None else made(bias, slopes, sink, rng)
        return *found, documents.on_device(cu_seqlens_k, device)

    return all_made


def _with_scales(call: Call, made: Callable | None) -> Callable:
    """Likewise the scales, as `scales_given` has them, spread."""
    device, of_one = call.q.device, torch.empty((), dtype=torch.float32, device="meta")
    spread = [eight_bits.spread(of_one if x is None else x, shape) for x, shape in eight_bits.scales_given(call)]
    layouts = [(x.shape, x.stride(), 0) for x in spread]

    def begin(stream: int | None) -> tuple:
        found = [part(eight_bits.one(device), *layout) for layout in layouts]
        return _operands(found, stream is not None and found[0].is_cuda)

    ones = short.by_stream(device.index, begin)

    def all_made(bias, slopes, sink, rng, cu_seqlens_q, cu_seqlens_k, *scales):
        found = () if made is None else made(bias, slopes, sink, rng)
        return *found, [one if x is None else part(x, *layout) for x, one, layout in zip_longest(scales, ones(), layouts)]

    return all_made
