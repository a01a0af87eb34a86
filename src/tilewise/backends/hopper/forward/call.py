"""The forward pass on Hopper, seen from torch: which kernel a call runs, and what the kernel takes."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.hopper import changes, packing, short
from tilewise.backends.hopper.forward import plan as planning
from tilewise.backends.hopper.forward import rows
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.plan import Plan
from tilewise.backends.hopper.operands import Band, RowTables, Scores, Tensors, Work
from tilewise.backends.hopper.repeat import Repeat
from tilewise.backends.hopper.short import REPEAT_BYTES
from tilewise.backends.tables import documents, runs
from tilewise.masks import Unread
from tilewise.masks.constructors import check_lengths
from tilewise.problem import Call
from tilewise.sm90 import jit

LAUNCH = "tilewise.backends.hopper.forward.kernel:launch"  # by name, so that a kernel from the cache needs no DSL


def forward(call: Call, config: Config | None = None) -> tuple[Tensor, ...]:
    """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q) in fp32, and so row_max where the call wants it; by
    `config` in place of the call's own.
    """
    o = output(call)
    statistics = empty_statistics(call)
    packed = packing.pack(call)
    if packed is None:
        _compute(call, o, *statistics, config=config)
    else:
        of_packed = empty_statistics(packed)
        _compute(packed, packing.rows_of(call, o), *of_packed, config=config)
        for of_call, each in zip(statistics, of_packed, strict=True):
            packing.put_statistic(call, of_call, each)
    return o, *statistics


def output(call: Call) -> Tensor:
    """The call's own, where the kernel can write there."""
    out = call.out
    if out is not None and jit.in_place(out) and packing.pack(call) is None:
        return out
    return torch.empty((*call.q.shape[:3], call.head_dim_v), dtype=call.out_dtype or call.q.dtype, device=call.q.device)


def _compute(call: Call, o: Tensor, lse: Tensor, row_max: Tensor | None = None, *, config: Config | None) -> None:
    """Write O, LSE and, where it is given, row_max."""
    if lse.numel() == 0 or call.seqlen_k == 0:
        return without_keys(call, o, lse, row_max)
    plan = Plan.of(call, planning.num_sms(call.q.device), config)
    q, scale = (call.q, call.scale) if plan.config.modified else positive_scale(call.q, call.scale)
    kernel = jit.compiled(LAUNCH, arguments, plan.config)
    with torch.cuda.device(q.device):
        tensors = Tensors(*(jit.aligned(x) for x in (q, call.k, call.v)), o, lse)
        kernel(tensors, work_of(plan, q.device), band_seen(call, plan), changes.scores(call, plan.config, scale, row_max))


def without_keys(call: Call, o: Tensor, lse: Tensor, row_max: Tensor | None) -> None:
    """Of rows that see nothing, or of none."""
    o.zero_()
    if row_max is not None:
        row_max.fill_(-math.inf)
    if call.sink is None:
        lse.fill_(-math.inf)
    else:
        lse.copy_(call.sink[:, None].expand_as(lse))


def repeat(call: Call, gradients: Callable) -> Repeat | None:
    """The short way for more calls like this one (see runtime/repeats.py); `gradients(call)` gives that of their gradients."""
    packed = packing.pack(call)
    computed = packed or call
    if call.row_max or call.scale <= 0.0 or computed.q.numel() == 0 or computed.k.numel() == 0:
        return None
    if not all(map(jit.strided, (computed.q, computed.k, computed.v))):
        return None
    device = call.q.device
    plan = Plan.of(computed, planning.num_sms(device))
    work, kernel = lambda: work_of(plan, device), jit.compiled(LAUNCH, arguments, plan.config)
    found = again(computed, plan, call.scale)
    if found is None:
        return None
    return Repeat(call, kernel, work, gradients, packed=packed, **found)


def again(call: Call, plan: Plan, scale: float) -> dict | None:
    """What `Repeat` takes beside for calls like this one, which says what is seen and what becomes of scores; None where tables of that take much
    memory.
    """
    found, config = {}, plan.config
    if isinstance(call.mask, Unread):
        if config.sees != "rows":
            return None
        found, bands = {"ahead": _ahead(call, plan)}, ()
    else:
        bands = (band_seen(call, plan),)
    if all(x is None for x in (call.bias, call.alibi_slopes, call.sink, call.dropout)):
        rest = *bands, changes.scores(call, config, scale)
    else:
        rest, found["made"] = bands, _maker(call, config, scale)
    return None if sum(x.nbytes for x in jit.tensors_of(rest)) > REPEAT_BYTES else found | {"rest": rest}


def _ahead(call: Call, plan: Plan) -> Callable:
    """`Repeat.ahead` of packed documents: what is seen is found on the GPU first."""
    mask, config, seqlen_q, seqlen_k, device = call.mask, plan.config, call.seqlen_q, call.seqlen_k, call.q.device
    find, shapes = rows.finder(documents.offsets(mask.inner), seqlen_k, config), rows.shapes(seqlen_q, config)

    def begin(stream: int | None) -> tuple[Band, Callable[[Tensor, Tensor], None]]:
        if stream is None:
            made = written = rows.Rows(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))
        else:
            made = rows.Rows(*short.shared("rows", shapes, torch.int32, device, stream))
            written = rows.Rows(*(short.as_operand(x, x.is_cuda) for x in made))

        def run(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
            if not short.capturing():
                check_lengths(cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k)
            find(documents.on_device(cu_seqlens_q, device), documents.on_device(cu_seqlens_k, device), written)

        return Band(*plan.band, _tables(made)), run

    return begin


def _maker(call: Call, config: Config, scale: float) -> Callable:
    """What makes the scores' bundle from the tensors of `repeats.Beside`."""
    outer, inner, factor = changes.numbers(call, config, scale)
    shift, drawn, pairs = call.seqlen_k - call.seqlen_q, changes.drawer(call), config.bias_pairs

    def made(bias, slopes, sink, rng, *lengths):
        bias, slopes = changes.readable(bias, slopes, pairs)
        sink = None if sink is None else sink.float().contiguous()
        return (Scores(outer, inner, factor, bias, slopes, None, sink, None, shift, drawn(rng)),)

    return made


def kernels(call: Call) -> list[tuple]:
    """What `jit.compiled` takes, for every kernel that the call launches."""
    config = planning.config_of(packing.pack(call) or call)
    ahead = [rows.kernel(config)] if config.sees == "rows" else []
    return [*ahead, (LAUNCH, arguments, config)]


def empty_statistics(call: Call) -> list[Tensor]:
    """LSE and, where the call wants it, row_max."""
    shape = call.batch, call.heads_q, call.seqlen_q
    return [torch.empty(shape, dtype=torch.float32, device=call.q.device) for _ in range(1 + call.row_max)]


def arguments(config) -> list:
    """Stand-ins for the launch's operands."""
    from tilewise.sm90.dsl import Float32

    dtype = changes.dsl(config.dtype)
    batch, seqlen_q, seqlen_k, heads_q, heads_k, dim, dim_v = (jit.size() for _ in range(7))
    q, k = (jit.tensor(dtype, batch, *sizes, dim) for sizes in ((seqlen_q, heads_q), (seqlen_k, heads_k)))
    v, o = (jit.tensor(dtype, batch, *sizes, dim_v) for sizes in ((seqlen_k, heads_k), (seqlen_q, heads_q)))
    lse = jit.tensor(Float32, batch, heads_q, seqlen_q, aligned=False)
    return [Tensors(q, k, v, o, lse), *stand_ins(config, batch, seqlen_q, seqlen_k, heads_q)]


def stand_ins(config, batch, seqlen_q, seqlen_k, heads_q) -> tuple[Work, Band, Scores]:
    """What is the same for all dtypes. The lengths are symbols."""
    from tilewise.sm90.dsl import Float32, Int32

    *changed, _, draw = changes.stand_ins(config, seqlen_q, seqlen_k, heads_q)
    sink = jit.tensor(Float32, heads_q, aligned=False) if config.sink else None
    row_max = jit.tensor(Float32, batch, heads_q, seqlen_q, aligned=False) if config.row_max else None
    scored = Scores(Float32(1.0), *changed, sink, row_max, Int32(0), draw)
    return _stand_in_of_work(config), _stand_in_of_band(config, batch, heads_q, seqlen_q), scored


def _stand_in_of_work(config) -> Work:
    from tilewise.sm90.dsl import Float32, Int32

    found = [jit.tensor(Float32, jit.size()), jit.tensor(Int32, jit.size(), aligned=False)] if config.shares else [None] * 2
    return Work(jit.tensor(Int32, 1, aligned=False), *found, Int32(0), Int32(0))


def _stand_in_of_band(config, batch, heads_q, seqlen_q) -> Band:
    from tilewise.sm90.dsl import Int32

    m_blocks = jit.size()
    shapes = {}
    if config.sees in ("rows", "runs"):
        shapes["order"] = (m_blocks if config.cluster == 1 else jit.size(),)
    if config.sees == "rows":
        shapes |= {"rows": (2, seqlen_q), "walks": (m_blocks, 4)}
    if config.sees == "runs":
        shapes |= {"spans": (jit.size(), m_blocks, 3), "runs": (jit.size(), 4), "bands": (jit.size(), 6)}
        shapes |= {"bitmaps": (jit.size(), config.tile_m, 4), "planes": (batch, heads_q)}
    tables = RowTables(**{name: jit.tensor(Int32, *shape, aligned=False) for name, shape in shapes.items()})
    return Band(*(Int32(0) for _ in range(6)), tables)


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
    if config.sees == "runs":
        planes = call.mask.planes(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q)
        made = runs.tables(planes, call.batch, call.heads_q, config.tile_m, config.tile_n, call.q.device)
        tables = RowTables(made.order, made.spans, made.runs, made.bands, made.bitmaps, made.planes)
    if config.sees == "rows":
        tables = _tables(rows.rows_of(call.mask, call.seqlen_q, call.seqlen_k, config, call.q.device))
    return Band(*plan.band, tables)


def _tables(found: rows.Rows) -> RowTables:
    order, ends, walks = found
    return RowTables(order, None, None, None, None, None, ends, walks)


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernel takes maxima of unscaled scores, so its scale is positive."""
    if scale > 0.0:
        return q, scale
    return (-q, -scale) if scale < 0.0 else (torch.zeros_like(q), 1.0)
