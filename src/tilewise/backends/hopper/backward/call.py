"""The backward pass on Hopper, seen from torch: which problems it takes, what it allocates, and the call of the compiled kernels."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends.hopper import changes, operands, short
from tilewise.backends.hopper.backward import plan as planning
from tilewise.backends.hopper.backward import tables as backward_tables
from tilewise.backends.hopper.backward.bias import call as bias_gradient
from tilewise.backends.hopper.backward.bound import Bound, Found
from tilewise.backends.hopper.backward.config import TILES, Config, tile_dims
from tilewise.backends.hopper.backward.repair import call as repairs
from tilewise.backends.hopper.backward.sink import call as sink_gradient
from tilewise.backends.hopper.operands import Band, Changes, Given, KeyTables, RepairScalars, Scalars, Scratch, Turns
from tilewise.backends.hopper.stand_ins import StandIns
from tilewise.backends.tables import documents
from tilewise.errors import UnsupportedError
from tilewise.machine.sheets import H100
from tilewise.masks import DeviceDocuments
from tilewise.problem import Call, Gradients, Problem, gradient_like
from tilewise.sm90 import jit

LAUNCH = "tilewise.backends.hopper.backward.kernel:launch"  # by name, so that a kernel from the cache needs no DSL


def why_not(problem: Problem) -> list[str]:
    """Sentences that say why these kernels cannot compute the problem's gradients; empty when they can."""
    wrong = []
    dims = problem.head_dim, problem.head_dim_v
    if tile_dims(*dims) is None:
        largest = max(TILES)
        wrong.append(f"its backward pass takes head_dim up to {largest[0]} and head_dim_v up to {largest[1]}, not {dims[0]} and {dims[1]}")
    return wrong


def check(call: Call) -> None:
    """Raise UnsupportedError for more heads than a grid of thread blocks can have."""
    if call.heads_q > planning.MOST:
        raise UnsupportedError(
            f"q has {call.heads_q} heads; backend 'hopper' computes gradients of at most {planning.MOST}: divide them among several calls, "
            "or pass backend='tiled'"
        )


WALKS = {
    "full": "over all tiles of {} queries",
    "causal": "over tiles of {} queries, from those that begin to see them on",
    "band": "over tiles of {} queries, from the first to the last that see them",
    "varlen": "over tiles of {} queries, which the GPU finds from cu_seqlens",
    "tiles": "over tiles of {} queries, from tables",
}


def lines(call: Call, num_sms: int = H100.sms) -> list[str]:
    """What the backward pass will do, in sentences; num_sms: multiprocessors of the GPU."""
    config = planning.config_of(call)
    walk = WALKS[config.mask_kind].format(config.tile_m)
    sums = "dQ written by who computes it" if config.one_block else "dQ by a kernel of its own"
    if config.sums:
        size = 4 * call.batch * call.heads_q * -(-call.seqlen_q // config.tile_m) * config.elements_of_sum(call.head_dim)
        sums = f"dQ summed up in fp32 ({size / 1e6:,.1f} MB) in one order, so that every run gives the same bits"
    _, shares, parts = planning.shared(config, call, num_sms)
    if config.block_per_q_head:
        size = 4 * parts * planning.elements_of_part(config)
        sums += (
            f"; each query head by thread blocks of its own, and a group's dK and dV summed up in fp32 ({size / 1e6:,.1f} MB), in one order"
        )
    elif parts:
        size, where = 4 * parts * planning.elements_of_part(config), "" if config.one_block else ", where dQ goes later"
        sums += f"; the last blocks shared by {shares} thread blocks each, whose parts of dK and dV take {size / 1e6:,.1f} MB{where}"
    found = [f"backward: blocks of {config.tile_n} keys walk {walk}; {sums}"]
    if call.bias is not None:
        size = bias_gradient.bytes_of_sums(call, num_sms)
        memory = f"; then, with dQ's memory free again, its sums take {size / 1e6:,.1f} MB" if size else ""
        found.append(f"backward: the bias's gradient, if it is asked for, by a kernel that computes S and dP once more{memory}")
    return found


def kernels(call: Call) -> list[jit.Kernel]:
    """Of what finds out what packed documents see, of repairs, the three main kernels in one, a sink's and a bias's."""
    return [*_kernels(call), *([] if call.bias is None else bias_gradient.kernels(call))]


def ahead(call: Call) -> list[list[jit.Kernel]]:
    """Of `kernels`, those that the gradients of this call are likely to launch: groups that may be compiled side by side."""
    if call.q.numel() == 0 or call.k.numel() == 0:
        return []
    config = planning.config_of(call)
    sink = [] if call.sink is None else [sink_gradient.kernel(call)]
    groups = [[jit.Kernel(LAUNCH, arguments, config), *_tables(config)], [*repairs.kernels(config), *sink]]  # what takes long, first
    if call.bias is not None and call.bias.requires_grad:
        groups.append([bias_gradient.kernel(call, planning.gpu_of(call.q.device).num_sms)])
    return [*filter(None, groups)]


def _kernels(call: Call) -> list[jit.Kernel]:
    """All but a bias's."""
    config = planning.config_of(call)
    sink = [] if call.sink is None else sink_gradient.kernels(call)
    return [*_tables(config), *repairs.kernels(config), jit.Kernel(LAUNCH, arguments, config), *sink]


def _tables(config: Config) -> list[jit.Kernel]:
    """Of what finds out what packed documents see."""
    return [backward_tables.kernel(config)] if config.mask_kind == "varlen" else []


def backward(call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
    """Contiguous dQ, dK, dV in the dtype of q, with `call.wide_keys` dK and dV in fp32 where a compiler is installed; see
    `backends.Backend.backward`. It also allocates two fp32 values a row and dQ in fp32, or what `lines` says instead.
    """
    with torch.cuda.device(call.q.device):  # where tables are made
        bound = bind(call, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"))
    given = (*(jit.readable(x) for x in (call.q, call.k, call.v, o)), jit.rows(lse), jit.readable(d_o))
    d_lse = None if d_lse is None else d_lse.to(torch.float32)
    return Gradients(*bound(*given, d_lse, call.extras, bias_grad))


class WithoutKeys:
    """Gradients where there is no key, or no query."""

    kept = False

    def __call__(self, q, k, v, o, lse, d_o, d_lse, extras, bias_grad) -> tuple[Tensor | None, ...]:
        bias, _, sink, *_ = extras
        return *(x.new_zeros(x.shape) for x in (q, k, v)), torch.zeros_like(bias) if bias_grad else None, _sink_alone(sink, d_lse)


def bind(call: Call, gradient: Callable[[Tensor], Tensor] = gradient_like) -> Bound | WithoutKeys:
    """The kernels of the call's gradients and their arguments; `gradient` says how an input's gradient lies."""
    if call.q.numel() == 0 or call.k.numel() == 0:
        return WithoutKeys()
    gpu = planning.gpu_of(call.q.device)
    plan, of_documents = planning.Plan.of(call, gpu), isinstance(call.mask, DeviceDocuments)
    config = plan.config
    rows = of_documents and config.mask_kind == "varlen"
    tables = None if rows else backward_tables.of_call(call, config)
    reads = call.diagonal is not None or (of_documents and not rows)
    kept = not reads and len(plan.turns) == 1 and (rows or sum(x.nbytes for x in jit.tensors_of(tables)) <= short.TABLE_BYTES)
    repair = repairs.bind(call, config, gpu.num_sms)  # before the other one, which a helper may be compiling
    kernel, scalars = jit.compiled(LAUNCH, arguments, config), functools.partial(scalars_of, call, plan)
    if len(plan.turns) > 1:
        kernel, repair = _in_parts(plan, kernel, repair), None
    seen = _finder(call, plan) if rows else Band(*plan.band, tables)
    changed = any(x is not None for x in (call.bias, call.alibi_slopes, call.dropout))
    return Bound(
        call,
        kernel,
        plan,
        scalars,
        seen,
        _changer(call, config) if changed else changes.or_none(changes.changes(call, config)),
        repair=repair,
        of_bias=None if call.bias is None else _bias_of(call, gpu.num_sms),
        of_sink=None if call.sink is None else sink_gradient.bind(call, config.natural),
        gradient=gradient,
        kept=kept,
    )


def _in_parts(plan: planning.Plan, kernel: Callable, repair: tuple[Callable, RepairScalars] | None) -> Callable:
    """The kernels for more batch entries than a grid has, launch by launch. What is to be repaired is known until the next one."""

    def compute(
        given: Given, gradients: operands.Gradients, scratch: Scratch, _: Turns, scalars: Scalars, seen: Band, changed: Changes | None
    ):
        for part, turns in plan.turns:
            *tensors, of_changed = (bundle and _of_batch(bundle, part) for bundle in (given, gradients, scratch, changed))
            of_part = seen._replace(tables=backward_tables.of_batch(seen.tables, part))
            kernel(*tensors, turns, scalars, of_part, of_changed)
            if repair is not None:
                (launch, numbers), (of_given, of_gradients, of_scratch) = repair, tensors
                bundles = repairs.repaired(of_given, of_gradients), repairs.spoiled(of_scratch)
                launch(*bundles, numbers, repairs.band(of_part), of_changed)

    return compute


def scalars_of(call: Call, plan: planning.Plan, has_d_lse: bool) -> Scalars:
    return Scalars(
        call.scale * changes.rest(call),
        changes.outer_log2(plan.config, call.scale, call.softcap),
        int(has_d_lse),
        plan.last_q,
        plan.last_k,
    )


def _bias_of(call: Call, num_sms: int) -> Callable:
    """The gradient of a bias. Its kernel is not asked for before the gradient is."""
    like, kept = replace(call, q=None, k=None, v=None, bias=None, alibi_slopes=None, sink=None), []

    def compute(given: Given, scratch: Scratch, changed: Changes) -> Tensor:
        if not kept:
            of_call = {"q": given.Q, "k": given.K, "v": given.V, "bias": changed.bias, "alibi_slopes": changed.slopes}
            kept.append(bias_gradient.bind(replace(like, **of_call), num_sms))
        return kept[0](given, scratch, changed)

    return compute


def _finder(call: Call, plan: planning.Plan) -> Callable[[bool], Found]:
    """`Bound.find` of packed documents, on the current device."""
    config, device = plan.config, call.q.device
    new, find = backward_tables.finder(documents.offsets(call.mask.inner), call.seqlen_q, call.seqlen_k, config, device, current=True)

    def begin(keeps: bool) -> Found:
        *columns, _ = made = new()
        written = [short.as_operand(x, x.is_cuda) for x in made] if keeps else made

        def look(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
            find(documents.on_device(cu_seqlens_q, device), documents.on_device(cu_seqlens_k, device), written)

        return Band(*plan.band, backward_tables.of_documents(backward_tables.Columns(*columns), config)), look

    return begin


def _changer(call: Call, config: Config) -> Callable[..., Changes]:
    """What makes the scores' bundle from the tensors of `problem.Extras`."""
    like, pairs = changes.changes(call, config), call.bias is not None and changes.in_pairs(call.bias)
    inner, factor, shift, diagonal, drawn = like.inner, like.factor, like.shift, like.diagonal, changes.drawer(call)

    def changed(bias, slopes, sink, rng, *_others) -> Changes:
        return Changes(inner, factor, *changes.readable(bias, slopes, pairs), diagonal, shift, drawn(rng))

    return changed


def _of_batch(bundle: tuple, part: slice) -> tuple:
    """The same for some of the batch entries; what is broadcast over them, or has none, stays as it is."""
    whole = {"spoiled", "counter", "partial", "diagonal"}
    cut = {
        name: x[part]
        for name, x in bundle._asdict().items()
        if isinstance(x, Tensor) and name not in whole and not (name in ("bias", "slopes") and x.shape[0] == 1)
    }
    if draw := getattr(bundle, "draw", None):
        cut["draw"] = draw._replace(first=draw.first + part.start * draw.heads)
    return bundle._replace(**cut)


def _sink_alone(sink: Tensor | None, d_lse: Tensor | None) -> Tensor | None:
    """Without a key the sink is the whole log-sum-exp; one of -inf takes part in nothing."""
    if sink is None or d_lse is None:
        return None if sink is None else torch.zeros_like(sink)
    nothing = (sink == -math.inf)[:, None]
    return d_lse.float().masked_fill(nothing, 0.0).sum((0, 2)).to(sink.dtype)


def arguments(config: Config) -> list:
    """Stand-ins for the launch's operands."""
    made = StandIns(config)
    gradients = made(operands.Gradients, **repairs.of_keys(config))
    return [made(Given), gradients, *map(made, (Scratch, Turns, Scalars)), made(Band, tables=KeyTables), changes.or_none(made(Changes))]
