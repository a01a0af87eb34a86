"""The forward pass in 8 bits, seen from torch: what it covers, which kernels a call runs, and what they take."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from tilewise.backends.eight_bits import RECIPES
from tilewise.backends.hopper import changes, short, visibility
from tilewise.backends.hopper.bound import Bound
from tilewise.backends.hopper.eight_bits import scratch
from tilewise.backends.hopper.eight_bits.config import (
    FEW_KEYS,
    GROUP,
    LONG,
    TILES,
    Config,
    QuantiserConfig,
    configure,
    configure_quantiser,
    tile_dims,
)
from tilewise.backends.hopper.eight_bits.operands import GIVEN_V, MADE_V, OF_GROUPS, Given, Made, OfTokens, Scales, Tensors
from tilewise.backends.hopper.forward import call as sixteen_bits
from tilewise.backends.hopper.forward import plan as planning
from tilewise.backends.hopper.forward import rows
from tilewise.backends.hopper.forward.plan import Plan
from tilewise.backends.hopper.operands import Band, Scores, Work
from tilewise.backends.hopper.stand_ins import Floats, StandIns
from tilewise.backends.tables import documents
from tilewise.errors import UnsupportedError
from tilewise.masks import DeviceDocuments, Documents
from tilewise.problem import Call, Problem
from tilewise.sm90 import jit
from tilewise.views import part

LAUNCH = "tilewise.backends.hopper.eight_bits.kernel:launch"  # by name, so that a kernel from the cache needs no DSL
QUANTISE = "tilewise.backends.hopper.eight_bits.quantiser:launch"
TRANSPOSE = "tilewise.backends.hopper.eight_bits.quantiser:launch_transpose"
E4M3 = torch.float8_e4m3fn
KEPT_BYTES = 8 << 20  # more scratch is allocated anew; its kernels take longer than that
MULTIPLE = jit.BYTES  # of head dims in 8 bits, as the copy engine loads the rows


def why_not(problem: Problem) -> list[str]:
    """Sentences that say why no kernel is for a problem in 8 bits; empty where there is one."""
    wrong, dims = [], (problem.head_dim, problem.head_dim_v)
    if tile_dims(*dims) is None:
        wrong.append(f"it takes head_dim and head_dim_v up to {max(TILES)[0]}, not {dims[0]} and {dims[1]}")
    if problem.precision is not None:
        return wrong
    if (problem.v_dtype or problem.dtype) != E4M3:
        wrong.append(f"beside q in {problem.dtype} it takes v in float8_e4m3fn, not {problem.v_dtype or problem.dtype}")
    if any(dim % MULTIPLE for dim in dims):
        wrong.append(f"in 8 bits it takes head_dim and head_dim_v that are multiples of {MULTIPLE}, not {dims[0]} and {dims[1]}")
    return wrong


def forward(call: Call, config: Config | None = None) -> tuple[Tensor, ...]:
    """O (batch, seqlen_q, heads_q, head_dim_v), LSE (batch, heads_q, seqlen_q) in fp32, and so row_max where the call wants it; by `config` in place
    of the call's own.
    """
    return bind(call, config).results(call)


def bind(call: Call, config: Config | None = None) -> Bound:
    """The call's kernels and arguments, as forward/call.py has them; it has no gradients."""
    if 0 in (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k):
        return sixteen_bits.without_keys(call)
    device = call.q.device
    plan = Plan.of(call, planning.num_sms(device), config or config_of(call))
    prepare, scale = (by_quantiser if call.precision is not None else by_transposer)(call)
    attend, found = jit.compiled(LAUNCH, arguments, plan.config), sixteen_bits.seen_and_scored(call, plan, scale)
    if call.precision is None:
        found["made"] = _with_scales(call, found.get("made"))
    elif isinstance(call.mask, DeviceDocuments):
        found["made"] = _with_ends(call, found.get("made"))
    elif ends_ahead(call):
        found["kept"] = False  # where they end is no tensor of the caller's

    def compute(tensors: tuple[Tensor, ...], work: Work, band: Band, scores: Scores, beside: object = None) -> None:
        q, k, v, o, lse = tensors
        made, scales, values = prepare(q, k, v, beside)
        attend((*made, o, lse, values), scales, work, band, scores)

    return Bound(call, compute, lambda: sixteen_bits.work_of(plan, device), **found)


def config_of(call: Call, **fields) -> Config:
    """fields: of `Config`, in place of the usual."""
    return configure(
        RECIPES[call.precision].qk if call.precision is not None else call.q.dtype,
        call.out_dtype or call.q.dtype,
        call.head_dim,
        call.head_dim_v,
        visibility.mask_kind(call.mask),
        long=call.seqlen_q > LONG,
        few=call.seqlen_k <= FEW_KEYS,
        centred=call.precision is not None,
        wide_values=_wide_values(call),
        tiles_of_values=call.v_scale is not None and call.v_scale.dim() == 3,
        **_tokens(call),
        sink=call.sink is not None,
        row_max=call.row_max,
        **changes.fields(call),
        **fields,
    )


def _tokens(call: Call) -> dict[str, bool]:
    """Which of K and V have a scale for each token, as `Config` has it."""
    _, k, v = call.scales or (None, None, None)
    return {"tokens_k": k == "token", "tokens_v": v == "token"}


def _wide_values(call: Call) -> bool:
    """Whether P and V are multiplied in 16 bits."""
    return call.precision is not None and RECIPES[call.precision].pv is None


def quantiser_of(call: Call, **fields) -> QuantiserConfig:
    """fields: of `QuantiserConfig`, in place of the usual."""
    head_dim, _ = tile_dims(call.head_dim, call.head_dim_v)
    usual = {"ends": ends_ahead(call), "values": not _wide_values(call)}
    return configure_quantiser(call.q.dtype, RECIPES[call.precision].qk, head_dim, **usual | fields)


def operands_of(call: Call) -> tuple[Callable[[], tuple], float]:
    """What makes `Made`, `Scales` and `Tensors.values` of the call itself, and the softmax's scale."""
    prepare, scale = (by_quantiser if call.precision is not None else by_transposer)(call)
    beside = None
    if call.precision is None:
        (beside,) = _with_scales(call, None)(*call.extras)
    elif isinstance(call.mask, DeviceDocuments):
        (beside,) = _with_ends(call, None)(*call.extras)
    return partial(prepare, call.q, call.k, call.v, beside), scale


def by_quantiser(call: Call, config: QuantiserConfig | None = None) -> tuple[Callable, float]:
    """What makes operands of a call with `precision`, by `config` in place of its own; the softmax's scale, without the rotation's growth.

    It takes q, k, v and, where they are a tensor of the caller's, `Given.ends`, and gives `Made`, `Scales` and `Tensors.values`.
    """
    config, scale = config or quantiser_of(call), call.scale
    launch, make = jit.compiled(QUANTISE, quantiser_arguments, config), scratch.of_quantiser(call, config)
    turned, factor = (None, scale) if scale > 0.0 else (sixteen_bits.positive(scale), -scale if scale < 0.0 else 1.0)
    known = _ends(call) if config.ends and not isinstance(call.mask, DeviceDocuments) else None

    def begin(stream: int | None) -> tuple:
        made, _, channels = bundles = make(stream)
        on_gpu = stream is not None and channels.is_cuda
        return _operands(bundles, on_gpu), _operands(made, on_gpu)

    at_hand = short.by_stream(call.q.device.index, begin, make.bytes <= KEPT_BYTES)

    def prepare(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None = None) -> tuple:
        bundles, made = at_hand()
        launch((q if turned is None else turned(q), k, v, known if ends is None else ends), *bundles, factor)
        return made, bundles[1], v

    return prepare, factor / config.head_dim


def by_transposer(call: Call) -> tuple[Callable, float]:
    """Likewise of a call in 8 bits; what makes its operands takes q, k, v and the scales, as `scales_given` has them, spread."""
    config, negated = transposer_of(call), call.scale <= 0.0
    if negated:
        _check_negative(call)
    launch, make = jit.compiled(TRANSPOSE, transpose_arguments, config), scratch.of_transposer(call, config)

    def begin(stream: int | None) -> tuple:
        found = make(stream)
        return _operands(found, stream is not None and found[0].is_cuda)

    at_hand = short.by_stream(call.q.device.index, begin, make.bytes <= KEPT_BYTES)

    def prepare(q: Tensor, k: Tensor, v: Tensor, scales: Sequence[Tensor]) -> tuple:
        transposed, *made = at_hand()
        tokens, scales = with_tokens(scales, *made)
        q, k, v = q.view(torch.int8), k.view(torch.int8), v.view(torch.int8)
        launch(v, transposed, tokens)
        return (q ^ -128 if negated else q, k, transposed), scales, v

    return prepare, -call.scale if negated else call.scale


def _check_negative(call: Call) -> None:
    """Of q in e4m3 another sign is another bit."""
    if call.q.dtype != E4M3:
        raise UnsupportedError(
            f"scale must be positive beside q in int8, whose -128 has no negative, got {call.scale}; negate q and its scale's sign"
        )


def _operands(bundle: Sequence, on_gpu: bool) -> tuple:
    """Each of the bundle's fields by `short.as_operand`."""
    return tuple([short.as_operand(x, on_gpu) for x in bundle])


def _with_ends(call: Call, made: Callable | None) -> Callable:
    """What makes `Given.ends` of the tensors of `problem.Extras`, behind what `made` makes of them."""
    device = call.q.device

    def all_made(bias, slopes, sink, rng, cu_seqlens_q, cu_seqlens_k, *_scales):
        found = () if made is None else made(bias, slopes, sink, rng)
        return *found, documents.on_device(cu_seqlens_k, device)

    return all_made


def _with_scales(call: Call, made: Callable | None) -> Callable:
    """Likewise the scales, as `scales_given` has them, spread."""
    device, of_one = call.q.device, torch.empty((), dtype=torch.float32, device="meta")
    spreads = [spread(of_one if x is None else x, shape) for x, shape in scales_given(call)]
    layouts = [(x.shape, x.stride(), 0) for x in spreads]

    def begin(stream: int | None) -> tuple:
        found = [part(one(device), *layout) for layout in layouts]
        return _operands(found, stream is not None and found[0].is_cuda)

    ones = short.by_stream(device.index, begin)

    def all_made(bias, slopes, sink, rng, cu_seqlens_q, cu_seqlens_k, *scales):
        found = () if made is None else made(bias, slopes, sink, rng)
        return *found, [one if x is None else part(x, *layout) for x, one, layout in zip_longest(scales, ones(), layouts)]

    return all_made


def ends_ahead(call: Call) -> bool:
    """Whether keys that count may end before the tensors do, behind the last of packed documents."""
    mask = call.mask
    return isinstance(mask, DeviceDocuments) or (isinstance(mask, Documents) and mask.cu_seqlens_k[-1] < call.seqlen_k)


def _ends(call: Call) -> Tensor:
    """As `Given` has it, of `Documents`."""
    return torch.full((1,), call.mask.cu_seqlens_k[-1], dtype=torch.int32, device=call.k.device)


def with_tokens(
    scales: Sequence[Tensor], columns: Tensor | None, weights: Tensor | None, units: Tensor | None
) -> tuple[OfTokens | None, Scales]:  # fmt: skip
    """What is transposed along with V, and the kernel's scales. scales: `scales_given`, spread; the others: as `OfTokens` has them."""
    q, k, v, *ones = scales
    if columns is None and weights is None:
        return None, Scales(q, k, v, *(None,) * 6)
    of_k, of_v = k if columns is not None else None, v if weights is not None else None
    if columns is not None:
        (k,) = ones
    return OfTokens(of_k, of_v, columns, weights, units), Scales(q, k, v if units is None else units, *(None,) * 4, columns, weights)


def scales_given(call: Call) -> list[tuple[Tensor | None, tuple[int, int, int]]]:
    """The scales of q, k and v, and the shapes that they are spread to; where k's are of tokens, the groups have none, which comes last."""
    batch, heads_k, tokens = call.batch, call.heads_k, _tokens(call)
    of_groups, of_tokens = (batch, heads_k, -(-call.seqlen_k // GROUP)), (batch, heads_k, call.seqlen_k)
    found = [
        (call.q_scale, (batch, call.heads_q, call.seqlen_q)),
        (call.k_scale, of_tokens if tokens["tokens_k"] else of_groups),
        (call.v_scale, of_tokens if tokens["tokens_v"] else of_groups),
    ]
    return [*found, (None, of_groups)] if tokens["tokens_k"] else found


def transposer_of(call: Call) -> QuantiserConfig:
    head_dim, _ = tile_dims(call.head_dim_v, call.head_dim_v)
    return configure_quantiser(torch.int8, torch.int8, head_dim, **_tokens(call))


def spread(scale: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """(batch, heads, tokens or groups), without copies."""
    shaped = scale if scale.dim() == 3 else scale[..., None] if scale.dim() == 2 else scale[None, None, None]
    return shaped.expand(shape)


_ONES: dict[torch.device, Tensor] = {}


def one(device: torch.device) -> Tensor:
    """1, fp32 (), in place of a scale that is not there: made once, but what a CUDA graph captures makes its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.ones((), dtype=torch.float32, device=device)
    if device not in _ONES:
        made = torch.ones((), dtype=torch.float32, device=device)
        torch.cuda.current_stream(device).synchronize()  # other streams may use it next
        _ONES[device] = made
    return _ONES[device]


def kernels(call: Call) -> list[jit.Kernel]:
    """Every kernel that the call launches."""
    config = config_of(call)
    ahead = [rows.kernel(config)] if config.mask_kind == "varlen" else []
    if call.precision is not None:
        ahead.append(jit.Kernel(QUANTISE, quantiser_arguments, quantiser_of(call)))
    else:
        ahead.append(jit.Kernel(TRANSPOSE, transpose_arguments, transposer_of(call)))
    return [*ahead, jit.Kernel(LAUNCH, arguments, config)]


def arguments(config: Config) -> list:
    """Stand-ins for the launch's operands."""
    made = StandIns(config)
    scales = made(Scales) if config.centred else made(Scales, v=OF_GROUPS)
    return [made(Tensors), scales, *map(made, (Work, Band, Scores))]


def quantiser_arguments(config: QuantiserConfig) -> list:
    """Stand-ins for the quantiser's operands; the scales that it writes lie densely."""
    made, of_rows, of_groups = StandIns(config), Floats("batch heads_q seqlen_q"), Floats("batch heads_k groups")
    of_channels = Floats("batch heads_k head_dim_v") if config.values else None
    scales = made(Scales, q=of_rows, k=of_groups, v=of_channels, centre=of_channels, shift=of_rows, columns=None, weights=None)
    return [made(Given), made(Made), scales, made(Floats(f"batch heads_k _ {config.head_dim}", aligned=True)), made(float)]


def transpose_arguments(config: QuantiserConfig) -> list:
    """Stand-ins for V, as it is given and as it is written, and for scales of tokens."""
    *v, of_tokens = map(StandIns(config), (GIVEN_V, MADE_V, OfTokens))
    return [*v, changes.or_none(of_tokens)]
