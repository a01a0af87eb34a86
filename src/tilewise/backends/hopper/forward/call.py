"""The forward pass on Hopper, seen from torch: which kernel a call runs, and what the kernel takes."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.hopper import changes, packing, short
from tilewise.backends.hopper.bound import Bound
from tilewise.backends.hopper.forward import plan as planning
from tilewise.backends.hopper.forward import rows
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.plan import Plan
from tilewise.backends.hopper.operands import Band, RowTables, Scores, Tensors, Work
from tilewise.backends.hopper.stand_ins import StandIns
from tilewise.backends.tables import documents, runs
from tilewise.masks import DeviceDocuments
from tilewise.masks.constructors import check_lengths
from tilewise.problem import Call
from tilewise.sm90 import jit

LAUNCH = "tilewise.backends.hopper.forward.kernel:launch"  # by name, so that a kernel from the cache needs no DSL


def forward(call: Call, config: Config | None = None) -> tuple[Tensor, ...]:
    """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q) in fp32, and so row_max where the call wants it; by
    `config` in place of the call's own.
    """
    return bind(call, config=config).results(call)


def bind(call: Call, gradients: Callable | None = None, config: Config | None = None) -> Bound:
    """The call's kernel and arguments; `gradients(call)` binds its gradients (bound.py)."""
    packed = packing.pack(call)
    computed = packed or call
    if 0 in (computed.batch, computed.heads_q, computed.seqlen_q, computed.seqlen_k):
        return without_keys(call, gradients)
    device = call.q.device
    plan = Plan.of(computed, planning.num_sms(device), config)
    kernel, scale = jit.compiled(LAUNCH, arguments, plan.config), call.scale
    if scale <= 0.0 and not plan.config.modified:
        kernel, scale = _with_a_positive_scale(kernel, scale)
    work = lambda: work_of(plan, device)  # noqa: E731
    return Bound(call, kernel, work, packed=packed, gradients=gradients, **seen_and_scored(computed, plan, scale))


def without_keys(call: Call, gradients: Callable | None = None) -> Bound:
    """Of rows that see nothing, or of none: O is 0, LSE that of the sink."""

    def compute(tensors: tuple[Tensor, ...], _work: tuple[()], scores: Scores) -> None:
        *_, o, lse = tensors
        o.zero_()
        if scores.row_max is not None:
            scores.row_max.fill_(-math.inf)
        if scores.sink is None:
            lse.fill_(-math.inf)
        else:
            lse.copy_(scores.sink[:, None].expand_as(lse))

    def made(bias: Tensor | None, slopes: Tensor | None, sink: Tensor | None, *_others: Tensor | None) -> tuple[Scores]:
        return (Scores(0.0, None, None, None, None, None, sink, None, 0),)

    return Bound(call, compute, tuple, rest=(), made=made, gradients=gradients, kept=False)


def seen_and_scored(call: Call, plan: Plan, scale: float) -> dict:
    """What else `Bound` takes for the call: it says what is seen and what becomes of scores."""
    found, config = {}, plan.config
    if isinstance(call.mask, DeviceDocuments) and config.mask_kind == "varlen":
        found["ahead"], bands, reads = _ahead(call, plan), (), False
    else:
        bands, reads = (band_seen(call, plan),), isinstance(call.mask, DeviceDocuments)
    if call.row_max or not call.bias is call.alibi_slopes is call.sink is call.dropout is None:
        rest, found["made"] = bands, _maker(call, config, scale)
    else:
        rest = *bands, changes.scores(call, config, scale)
    reads = reads or call.row_max or call.diagonal is not None
    return found | {"rest": rest, "kept": not reads and sum(x.nbytes for x in jit.tensors_of(rest)) <= short.TABLE_BYTES}


def _ahead(call: Call, plan: Plan) -> Callable:
    """`Bound.ahead` of packed documents: what is seen is found on the GPU first."""
    mask, config, seqlen_q, seqlen_k, device = call.mask, plan.config, call.seqlen_q, call.seqlen_k, call.q.device
    find, shapes = rows.finder(documents.offsets(mask.inner), seqlen_k, config), rows.shapes(seqlen_q, config)

    def begin(stream: int | None) -> tuple[Band, Callable[[Tensor, Tensor], None]]:
        if stream is None:
            made = written = rows.Rows(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))
        else:
            made = rows.Rows(*short.shared("rows", shapes, torch.int32, device, stream))
            written = rows.Rows(*(short.as_operand(x, x.is_cuda) for x in made))

        def run(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, checked: bool = False) -> None:
            if not (checked or short.capturing()):
                check_lengths(cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k)
            find(documents.on_device(cu_seqlens_q, device), documents.on_device(cu_seqlens_k, device), written)

        return Band(*plan.band, _tables(made)), run

    return begin


def _maker(call: Call, config: Config, scale: float) -> Callable:
    """What makes the scores' bundle from the tensors of `problem.Extras`, which may leave the random state to the call."""
    outer, inner, factor = changes.numbers(call, config, scale)
    shift, drawn, pairs = call.seqlen_k - call.seqlen_q, changes.drawer(call), config.bias_pairs
    diagonal = changes.diagonal_of(call)

    def made(bias, slopes, sink, rng, *lengths):
        bias, slopes = changes.readable(bias, slopes, pairs)
        return (Scores(outer, inner, factor, bias, slopes, diagonal, changes.dense(sink), None, shift, drawn(rng)),)

    return made


def kernels(call: Call) -> list[jit.Kernel]:
    """Every kernel that the call launches."""
    config = planning.config_of(packing.pack(call) or call)
    ahead = [rows.kernel(config)] if config.mask_kind == "varlen" else []
    return [*ahead, jit.Kernel(LAUNCH, arguments, config)]


def arguments(config) -> list:
    """Stand-ins for the launch's operands."""
    return [*map(StandIns(config), (Tensors, Work, Band, Scores))]


_COUNTERS: dict[tuple, Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """What the thread blocks of a launch draw from: one a stream, since launches on one stream do not overlap; a graph gets its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _COUNTERS[key]


_PARTIALS: dict[tuple, tuple[Tensor, Tensor]] = {}


def work_of(plan: Plan, device: torch.device) -> Work:
    """For the current stream: the counter and, where thread blocks share units, what they keep for each other (partials.py)."""
    if not plan.partials:
        return Work(_counter(device), None, None, plan.section, plan.blocks)
    key = device, torch.cuda.current_stream(device).cuda_stream
    kept = None if torch.cuda.is_current_stream_capturing() else _PARTIALS.get(key)
    if kept is None or any(have.numel() < size for have, size in zip(kept, plan.partials, strict=True)):
        elements, arrivals = plan.partials
        kept = torch.empty(elements, dtype=torch.float32, device=device), torch.zeros(arrivals, dtype=torch.int32, device=device)
        if not torch.cuda.is_current_stream_capturing():
            _PARTIALS[key] = kept
    return Work(_counter(device), *kept, plan.section, plan.blocks)


def band_seen(call: Call, plan: Plan) -> Band:
    """Which keys each row sees: by numbers, or by tables."""
    config, tables = plan.config, RowTables()
    if config.mask_kind == "tiles":
        planes = call.mask.planes(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q)
        made = runs.tables(planes, call.batch, call.heads_q, config.tile_m, config.tile_n, call.q.device)
        tables = RowTables(made.order, made.spans, made.runs, made.bands, made.bitmaps, made.planes)
    if config.mask_kind == "varlen":
        tables = _tables(rows.rows_of(call.mask, call.seqlen_q, call.seqlen_k, config, call.q.device))
    return Band(*plan.band, tables)


def _tables(found: rows.Rows) -> RowTables:
    order, ends, walks = found
    return RowTables(order, None, None, None, None, None, ends, walks)


def _with_a_positive_scale(kernel: Callable, scale: float) -> tuple[Callable, float]:
    """The kernel takes maxima of unscaled scores, so its scale is positive: of other queries."""
    turned = positive(scale)

    def compute(tensors: tuple[Tensor, ...], *rest) -> None:
        q, *others = tensors
        kernel((turned(q), *others), *rest)

    return compute, -scale if scale < 0.0 else 1.0


def positive(scale: float) -> Callable[[Tensor], Tensor]:
    """What makes queries that have by a positive scale the scores that the given ones have by `scale`, which is not positive."""
    return torch.neg if scale < 0.0 else torch.zeros_like
