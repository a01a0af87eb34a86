"""The Hopper backend: forward passes on an H100 or H200 by the kernel of forward.py, in NVIDIA's CuTe DSL.

The DSL is imported when the first kernel is compiled; without it, or without such a GPU, `why_not` says so.
"""

import math
from functools import cache

import torch
from torch import Tensor

from tilewise.backends.hopper import changes, documents, forecast, gradients, packing
from tilewise.backends.hopper.band import band_of
from tilewise.backends.hopper.config import TILES, configure, tile_dims
from tilewise.backends.hopper.repeat import Repeat
from tilewise.backends.hopper.tables import tables
from tilewise.hopper import compile as hopper
from tilewise.machines import H100, machine_for
from tilewise.masks import Causal
from tilewise.problem import Call, Gradients, Problem

__all__ = ["Hopper"]

SECTION_BYTES, MOST_SECTION_BYTES = 16 << 20, 40 << 20  # of the L2 cache's 50 MB, for keys and values that are read at the same time
REPEAT_BYTES = 256 << 10  # of a mask's tables: who repeats a call keeps them, and calls with larger ones take long
MORE_HEADS = 16  # than fit into the one that are considered


class Hopper:
    """The kernels of the ladder's end, for every shape that they cover."""

    name = "hopper"

    def why_not(self, problem: Problem) -> list[str]:
        """Sentences that say why this backend cannot run the problem; empty when it can."""
        if problem.device != "cuda":
            return [f"it computes on Hopper GPUs, the tensors are on {problem.device}"]
        wrong = []
        if problem.dtype not in (torch.bfloat16, torch.float16):
            wrong.append(f"it computes bf16 and fp16, not {problem.dtype}")
        dims = problem.head_dim, problem.head_dim_v
        if tile_dims(*dims) is None or any(dim % hopper.ALIGNMENT for dim in dims):
            wrong.append(
                f"it takes head_dim and head_dim_v up to {max(TILES)[0]} that are multiples of {hopper.ALIGNMENT}, not {dims[0]} and {dims[1]}"
            )
        if problem.dropout:
            wrong.append("it has no dropout yet")
        if problem.grad:
            wrong += [reason for reason in gradients.why_not(problem) if reason not in wrong]
        return wrong or hopper.why_not_here(problem.capability)

    def tile(self, call: Call) -> tuple[int, int]:
        """(tile_m, tile_n) of the kernel."""
        config = self._config(call)
        return config.tile_m, config.tile_n

    def describe(self) -> str:
        return "" if hopper.why_not_here() else f"CuTe DSL kernels for {hopper.ARCH}"

    def details(self, call: Call) -> list[str]:
        """The kernel's configuration and what may be expected of it, in sentences."""
        packed, machine = packing.pack(call), machine_for(call.q.device) or H100
        backward = gradients.lines(call, machine.sms) if call.grad else []
        if packed is None:
            return [*forecast.lines(self._config(call), call, machine), *backward]
        shared = "packing: the query heads of a group are rows of one tile, and read their keys once"
        return [shared, *forecast.lines(self._config(packed), packed, machine), *backward]

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q) in fp32."""
        documents.check(call.mask, call.seqlen_q, call.seqlen_k)
        if call.grad:
            gradients.check(call)
        o = torch.empty((*call.q.shape[:3], call.head_dim_v), dtype=call.q.dtype, device=call.q.device)
        lse = _empty_lse(call)
        packed = packing.pack(call)
        if packed is None:
            self._compute(call, o, lse)
        else:
            self._compute(packed, packing.rows_of(call, o), of_packed := _empty_lse(packed))
            packing.put_lse(call, lse, of_packed)
        return o, lse

    def _compute(self, call: Call, o: Tensor, lse: Tensor) -> None:
        """Write O and LSE."""
        if lse.numel() == 0 or call.seqlen_k == 0:
            o.zero_()
            if call.sink is None:
                lse.fill_(-math.inf)
            else:
                lse.copy_(call.sink[:, None].expand_as(lse))
            return
        config = self._config(call)
        q, scale = (call.q, call.scale) if config.modified else _positive_scale(call.q, call.scale)
        kernel = hopper.compiled(_launch(), arguments, config)
        with torch.cuda.device(q.device):
            tensors = [hopper.aligned(x) for x in (q, call.k, call.v)]
            kernel(*tensors, o, lse, *_workspace(q.device, config), *_rest(call, config, scale))

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """See gradients.py."""
        return gradients.backward(call, o, lse, d_o, d_lse, bias_grad)

    def repeat(self, call: Call) -> Repeat | None:
        """The short way for more calls like this one (see `repeats`)."""
        tensors, config = (call.q, call.k, call.v), self._config(call)
        if packing.pack(call) is not None:
            return None
        if call.scale <= 0.0 or call.q.numel() == 0 or call.k.numel() == 0 or not all(map(hopper.strided, tensors)):
            return None
        rest = _rest(call, config, call.scale)
        if sum(x.nbytes for x in rest if isinstance(x, Tensor)) > REPEAT_BYTES:
            return None
        kernel = hopper.compiled(_launch(), arguments, config)
        device = call.q.device
        return Repeat(call, kernel, rest, lambda: _workspace(device, config), self.backward)

    def kernels(self, call: Call) -> list[tuple]:
        """What `compile.compiled` takes, for every kernel that the call launches."""
        config = self._config(packing.pack(call) or call)
        ahead = [documents.kernel(config)] if config.sees == "rows" else []
        return [*ahead, (_launch(), arguments, config), *(gradients.kernels(call) if call.grad else [])]

    def _config(self, call: Call):
        sees = {"full": "all", "band": "interval"}.get(call.mask.kind, "runs")
        if isinstance(call.mask, Causal):
            sees = "until"
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
    """Stand-ins for `forward.launch`'s tensors, band and scale."""
    from tilewise.hopper.dsl import Float32, Int32

    dtype = changes.dsl(config.dtype)
    batch, seqlen_q, seqlen_k, heads_q, heads_k, dim, dim_v = (hopper.size() for _ in range(7))
    q, k = (hopper.tensor(dtype, batch, *sizes, dim) for sizes in ((seqlen_q, heads_q), (seqlen_k, heads_k)))
    v, o = (hopper.tensor(dtype, batch, *sizes, dim_v) for sizes in ((seqlen_k, heads_k), (seqlen_q, heads_q)))
    lse = hopper.tensor(Float32, batch, heads_q, seqlen_q, aligned=False)
    counter = hopper.tensor(Int32, 1, aligned=False)
    found = [hopper.tensor(Float32, hopper.size()), hopper.tensor(Int32, hopper.size(), aligned=False)] if config.shares else [None] * 2
    changed = changes.stand_ins(config, seqlen_q, seqlen_k, heads_q)
    sink = hopper.tensor(Float32, heads_q, aligned=False) if config.sink else None
    m_blocks, heads = hopper.size(), (batch, heads_q)
    order = (
        hopper.tensor(Int32, m_blocks if config.cluster == 1 else hopper.size(), aligned=False) if config.sees in ("rows", "runs") else None
    )
    tables = [None] * 5
    if config.sees == "runs":
        shapes = (hopper.size(), m_blocks, 3), (hopper.size(), 4), (hopper.size(), 6), (hopper.size(), config.tile_m, 4), heads
        tables = [hopper.tensor(Int32, *shape, aligned=False) for shape in shapes]
    ends = [None] * 2
    if config.sees == "rows":
        ends = [hopper.tensor(Int32, *shape, aligned=False) for shape in ((2, seqlen_q), (m_blocks, 4))]
    return [q, k, v, o, lse, counter, *found, *(Int32(0) for _ in range(8)), Float32(1.0), *changed, sink, order, *tables, *ends]


def _launch() -> str:
    """By name, so that a kernel from the cache needs no DSL."""
    return "tilewise.backends.hopper.forward:launch"


@cache
def _multiprocessors(device: torch.device) -> int:
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


def _workspace(device: torch.device, config) -> tuple[Tensor | None, ...]:
    """The counter and, where thread blocks share units, what they keep for each other (partials.py): likewise one a stream, as much as was needed."""
    if not config.shares:
        return _counter(device), None, None
    slots = 2 * (_multiprocessors(device) * config.blocks // config.cluster)
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
    a_head = 2 * keys * (config.head_dim + config.head_dim_v)
    least, most = SECTION_BYTES // a_head, MOST_SECTION_BYTES // a_head
    least = max(2 if config.sees == "rows" else 1, least)  # documents are shorter than all of them
    if least >= heads or heads % least == 0:
        return min(least, heads) * call.group
    return min(range(least, min(most, least + MORE_HEADS) + 1), key=lambda width: (-heads % width, -width), default=least) * call.group


def _rest(call: Call, config, scale: float) -> tuple:
    """What the kernel takes after its counter; of what tensors hold, it depends on a mask's alone."""
    band = 0, 0, 0, call.seqlen_k, 0, 0
    if config.sees in ("until", "interval"):
        band = band_of(call.mask, call.seqlen_q, call.seqlen_k)
    sizes = _section(call, config), _multiprocessors(call.q.device) * config.blocks
    return (
        *band,
        *sizes,
        changes.outer_log2(config, scale, call.softcap),
        *changes.factors(config, scale, call.softcap),
        *changes.operands(call),
        *_tables(call, config),
    )


def _tables(call: Call, config) -> tuple[Tensor | None, ...]:
    """What the kernel reads to know what is visible: the fields of visible.Tables."""
    made = [None] * 8
    if config.sees == "runs":
        planes = call.mask.planes(call.seqlen_q, call.seqlen_k, call.batch, call.heads_q)
        found = tables(planes, call.batch, call.heads_q, config.tile_m, config.tile_n, call.q.device)
        made[:6] = found.order, found.spans, found.runs, found.bands, found.bitmaps, found.planes
    if config.sees == "rows":
        made[0], *made[6:] = documents.rows_of(call.mask, call.seqlen_q, call.seqlen_k, config, call.q.device)
    return tuple(made)


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernel takes maxima of unscaled scores, so its scale is positive."""
    if scale > 0.0:
        return q, scale
    return (-q, -scale) if scale < 0.0 else (torch.zeros_like(q), 1.0)
