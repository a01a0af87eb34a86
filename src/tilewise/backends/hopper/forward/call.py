"""The forward pass on Hopper, seen from torch: which kernel a call runs, and what the kernel takes."""

import math
from functools import cache

import torch
from torch import Tensor

from tilewise.backends.hopper import changes, packing
from tilewise.backends.hopper.forward import rows
from tilewise.backends.hopper.forward.config import Config, configure
from tilewise.backends.hopper.operands import Band, RowTables, Scores, Tensors, Work
from tilewise.backends.hopper.repeat import Repeat
from tilewise.backends.tables import documents, runs
from tilewise.backends.tables.band import band_of
from tilewise.masks import Causal
from tilewise.problem import Call
from tilewise.sm90 import jit

LAUNCH = "tilewise.backends.hopper.forward.kernel:launch"  # by name, so that a kernel from the cache needs no DSL
SECTION_BYTES, MOST_SECTION_BYTES = 16 << 20, 40 << 20  # of the L2 cache's 50 MB, for keys and values that are read at the same time
REPEAT_BYTES = 256 << 10  # of a mask's tables: who repeats a call keeps them, and calls with larger ones take long
EXTRA_HEADS = 16  # how many more heads than the smallest section holds are considered for it


def forward(call: Call, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q) in fp32, by `config` in place of the call's own."""
    o = torch.empty((*call.q.shape[:3], call.head_dim_v), dtype=call.q.dtype, device=call.q.device)
    lse = _empty_lse(call)
    packed = packing.pack(call)
    if packed is None:
        _compute(call, o, lse, config)
    else:
        _compute(packed, packing.rows_of(call, o), of_packed := _empty_lse(packed), config)
        packing.put_lse(call, lse, of_packed)
    return o, lse


def _compute(call: Call, o: Tensor, lse: Tensor, config: Config | None) -> None:
    """Write O and LSE."""
    if lse.numel() == 0 or call.seqlen_k == 0:
        o.zero_()
        if call.sink is None:
            lse.fill_(-math.inf)
        else:
            lse.copy_(call.sink[:, None].expand_as(lse))
        return
    config = config or config_of(call)
    q, scale = (call.q, call.scale) if config.modified else _positive_scale(call.q, call.scale)
    kernel = jit.compiled(LAUNCH, arguments, config)
    with torch.cuda.device(q.device):
        tensors = Tensors(*(jit.aligned(x) for x in (q, call.k, call.v)), o, lse)
        kernel(tensors, _work(call, config), _band(call, config), changes.scores(call, config, scale))


def repeat(call: Call, backward) -> Repeat | None:
    """The short way for more calls like this one, whose gradients are `backward`'s (see runtime/repeats.py)."""
    tensors, config = (call.q, call.k, call.v), config_of(call)
    if packing.pack(call) is not None:
        return None
    if call.scale <= 0.0 or call.q.numel() == 0 or call.k.numel() == 0 or not all(map(jit.strided, tensors)):
        return None
    rest = _band(call, config), changes.scores(call, config, call.scale)
    if sum(x.nbytes for x in jit.tensors_of(rest)) > REPEAT_BYTES:
        return None
    sizes, device = (_section(call, config), _num_sms(call.q.device) * config.blocks), call.q.device
    return Repeat(call, jit.compiled(LAUNCH, arguments, config), rest, lambda: Work(*_workspace(device, config), *sizes), backward)


def kernels(call: Call) -> list[tuple]:
    """What `jit.compiled` takes, for every kernel that the call launches."""
    config = config_of(packing.pack(call) or call)
    ahead = [rows.kernel(config)] if config.sees == "rows" else []
    return [*ahead, (LAUNCH, arguments, config)]


def config_of(call: Call):
    """The configuration for the call as it is given; where heads are packed as rows, ask for the packed call's."""
    sees = {"full": "all", "band": "interval"}.get(call.mask.kind, "runs")
    if isinstance(call.mask, Causal):
        sees = "causal"
    elif documents.by_rows(call.mask):
        sees = "rows"
    return configure(
        call.q.dtype,
        call.head_dim,
        call.head_dim_v,
        sees,
        _queries(call, sees),
        call.seqlen_k,
        **changes.fields(call),
        bias_pairs=call.bias is not None and changes.in_pairs(call.bias),
        sink=call.sink is not None,
    )


def _queries(call: Call, sees: str) -> int:
    """Of a sequence, or of what it consists of, as `config.Choice` counts them."""
    if sees == "rows":
        return documents.longest(call.mask)
    if sees == "interval":
        *_, lo, hi = band_of(call.mask, call.seqlen_q, call.seqlen_k)
        return min(call.seqlen_q, hi - lo + 1)
    return call.seqlen_q


def _empty_lse(call: Call) -> Tensor:
    return torch.empty((call.batch, call.heads_q, call.seqlen_q), dtype=torch.float32, device=call.q.device)


def arguments(config) -> list:
    """Stand-ins for the launch's operands."""
    from tilewise.sm90.dsl import Float32, Int32

    dtype = changes.dsl(config.dtype)
    batch, seqlen_q, seqlen_k, heads_q, heads_k, dim, dim_v, m_blocks = (jit.size() for _ in range(8))
    q, k = (jit.tensor(dtype, batch, *sizes, dim) for sizes in ((seqlen_q, heads_q), (seqlen_k, heads_k)))
    v, o = (jit.tensor(dtype, batch, *sizes, dim_v) for sizes in ((seqlen_k, heads_k), (seqlen_q, heads_q)))
    lse = jit.tensor(Float32, batch, heads_q, seqlen_q, aligned=False)
    found = [jit.tensor(Float32, jit.size()), jit.tensor(Int32, jit.size(), aligned=False)] if config.shares else [None] * 2
    work = Work(jit.tensor(Int32, 1, aligned=False), *found, Int32(0), Int32(0))
    *changed, _ = changes.stand_ins(config, seqlen_q, seqlen_k, heads_q)
    sink = jit.tensor(Float32, heads_q, aligned=False) if config.sink else None
    shapes = {}
    if config.sees in ("rows", "runs"):
        shapes["order"] = (m_blocks if config.cluster == 1 else jit.size(),)
    if config.sees == "rows":
        shapes |= {"rows": (2, seqlen_q), "walks": (m_blocks, 4)}
    if config.sees == "runs":
        shapes |= {"spans": (jit.size(), m_blocks, 3), "runs": (jit.size(), 4), "bands": (jit.size(), 6)}
        shapes |= {"bitmaps": (jit.size(), config.tile_m, 4), "planes": (batch, heads_q)}
    tables = RowTables(**{name: jit.tensor(Int32, *shape, aligned=False) for name, shape in shapes.items()})
    band = Band(*(Int32(0) for _ in range(6)), tables)
    return [Tensors(q, k, v, o, lse), work, band, Scores(Float32(1.0), *changed, sink, Int32(0))]


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


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


def _work(call: Call, config) -> Work:
    """For the current stream."""
    device = call.q.device
    return Work(*_workspace(device, config), _section(call, config), _num_sms(device) * config.blocks)


def _workspace(device: torch.device, config) -> tuple[Tensor | None, ...]:
    """The counter and, where thread blocks share units, what they keep for each other (partials.py): likewise one a stream, as much as was needed."""
    if not config.shares:
        return _counter(device), None, None
    slots = 2 * (_num_sms(device) * config.blocks // config.cluster)
    sizes = slots * config.partial_numbers, slots * config.cluster * config.tile_m // 16
    key = device, torch.cuda.current_stream(device).cuda_stream
    kept = None if torch.cuda.is_current_stream_capturing() else _PARTIALS.get(key)
    if kept is None or any(have.numel() < size for have, size in zip(kept, sizes, strict=True)):
        numbers = torch.empty(sizes[0], dtype=torch.float32, device=device)
        kept = numbers, torch.zeros(sizes[1], dtype=torch.int32, device=device)
        if not torch.cuda.is_current_stream_capturing():
            _PARTIALS[key] = kept
    return _counter(device), *kept


def _section(call: Call, config) -> int:
    """Heads whose tiles are mixed, longest first: about as many as share the L2 cache, and none left over for a short last section, whose first
    tiles would keep a few multiprocessors busy for long. One where all tiles are alike.
    """
    if config.sees == "all":
        return 1
    heads, keys = call.batch * call.heads_k, call.seqlen_k
    if config.sees == "interval":
        *_, lo, hi = band_of(call.mask, call.seqlen_q, call.seqlen_k)
        keys = min(keys, 2 * (hi - lo + 1))
    a_head = config.dtype.itemsize * keys * (config.head_dim + config.head_dim_v)
    least, most = SECTION_BYTES // a_head, MOST_SECTION_BYTES // a_head
    least = max(2 if config.sees == "rows" else 1, least)  # documents are shorter than all of them
    if least >= heads or heads % least == 0:
        return min(least, heads) * call.group
    return min(range(least, min(most, least + EXTRA_HEADS) + 1), key=lambda width: (-heads % width, -width), default=least) * call.group


def _band(call: Call, config) -> Band:
    """Which keys each row sees: by numbers, or by tables."""
    if config.sees in ("causal", "interval"):
        return Band(*band_of(call.mask, call.seqlen_q, call.seqlen_k), RowTables())
    tables = RowTables()
    if config.sees == "runs":
        planes = call.mask.planes(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q)
        made = runs.tables(planes, call.batch, call.heads_q, config.tile_m, config.tile_n, call.q.device)
        tables = RowTables(made.order, made.spans, made.runs, made.bands, made.bitmaps, made.planes)
    if config.sees == "rows":
        order, *made = rows.rows_of(call.mask, call.seqlen_q, call.seqlen_k, config, call.q.device)
        tables = RowTables(order, None, None, None, None, None, *made)
    return Band(0, 0, 0, call.seqlen_k, 0, 0, tables)


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernel takes maxima of unscaled scores, so its scale is positive."""
    if scale > 0.0:
        return q, scale
    return (-q, -scale) if scale < 0.0 else (torch.zeros_like(q), 1.0)
