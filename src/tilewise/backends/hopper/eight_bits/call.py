"""The forward pass in 8 bits, seen from torch."""

import torch
from torch import Tensor

from tilewise.backends.hopper import changes, visibility
from tilewise.backends.hopper.eight_bits.config import CHUNK, CHUNKS, GROUP, TOKENS, Config, QuantiserConfig, configure, tile_dims
from tilewise.backends.hopper.eight_bits.operands import Given, Made, Scales, Tensors
from tilewise.backends.hopper.forward import call as bf16
from tilewise.backends.hopper.forward import plan as planning
from tilewise.backends.hopper.forward.plan import Plan
from tilewise.backends.hopper.operands import Band, RowTables, Scores, Work
from tilewise.problem import Call
from tilewise.sm90 import jit

LAUNCH = "tilewise.backends.hopper.eight_bits.kernel:launch"  # by name, so that a kernel from the cache needs no DSL


def arguments(config: Config) -> list:
    """Stand-ins for the launch's operands."""
    from tilewise.sm90.dsl import Float32, Int8, Int32

    batch, seqlen_q, seqlen_k, tokens, heads_q, heads_k, dim, dim_v = (jit.size() for _ in range(8))
    q, k = jit.tensor(Int8, batch, seqlen_q, heads_q, dim), jit.tensor(Int8, batch, seqlen_k, heads_k, dim)
    v, o = jit.tensor(Int8, batch, heads_k, dim_v, tokens), jit.tensor(changes.dsl(config.out), batch, seqlen_q, heads_q, dim_v)
    lse = jit.tensor(Float32, batch, heads_q, seqlen_q, aligned=False)
    of_channels = [jit.tensor(Float32, batch, heads_k, dim_v) if config.centred else None for _ in range(2)]
    scales = Scales(
        jit.tensor_of_any_strides(Float32, batch, heads_q, seqlen_q),
        jit.tensor_of_any_strides(Float32, batch, heads_k, jit.size()),
        of_channels[0] if config.centred else jit.tensor_of_any_strides(Float32, batch, heads_k, dim_v),
        of_channels[1],
        jit.tensor(Float32, batch, heads_q, seqlen_q, aligned=False) if config.centred else None,
    )
    found = [jit.tensor(Float32, jit.size()), jit.tensor(Int32, jit.size(), aligned=False)] if config.shares else [None] * 2
    work = Work(jit.tensor(Int32, 1, aligned=False), *found, Int32(0), Int32(0))
    band = Band(*(Int32(0) for _ in range(6)), RowTables())
    return [Tensors(q, k, v, o, lse), scales, work, band, Scores(Float32(1.0), None, None, None, None, None, None, None, Int32(0))]


QUANTISE = "tilewise.backends.hopper.eight_bits.quantiser:launch"


def quantiser_arguments(config: QuantiserConfig) -> list:
    """Stand-ins for the quantiser's operands."""
    from tilewise.sm90.dsl import Float32, Int8

    dtype, padded = changes.dsl(config.given), config.head_dim
    batch, seqlen_q, seqlen_k, tokens, heads_q, heads_k, dim, dim_v = (jit.size() for _ in range(8))
    given = (jit.tensor(dtype, batch, *sizes) for sizes in ((seqlen_q, heads_q, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim_v)))
    q, k = (jit.tensor(Int8, batch, *sizes, padded) for sizes in ((seqlen_q, heads_q), (seqlen_k, heads_k)))
    of_rows = [jit.tensor(Float32, batch, heads_q, seqlen_q, aligned=False) for _ in range(2)]
    of_channels = [jit.tensor(Float32, batch, heads_k, dim_v, aligned=False) for _ in range(2)]
    scales = Scales(of_rows[0], jit.tensor(Float32, batch, heads_k, jit.size(), aligned=False), *of_channels, of_rows[1])
    channels = jit.tensor(Float32, batch, heads_k, jit.size(), padded)
    return [Given(*given), Made(q, k, jit.tensor(Int8, batch, heads_k, dim_v, tokens)), scales, channels, Float32(1.0)]


def quantise(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, scale: float) -> tuple[Made, Scales]:
    """Q, K and V of 16 bits as the forward kernel takes them. dtype: of Q and K; scale: of the softmax."""
    (batch, seqlen_q, heads_q, dim), (_, seqlen_k, heads_k, dim_v) = q.shape, v.shape
    config = QuantiserConfig(given=q.dtype, dtype=dtype, head_dim=tile_dims(dim, dim_v)[0])

    def empty(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=kind, device=q.device)

    sizes = (heads_q, seqlen_q), (heads_k, seqlen_k)
    of_tokens = (empty(torch.int8, batch, *each, config.head_dim).transpose(1, 2) for each in sizes)
    made = Made(*of_tokens, empty(torch.int8, batch, heads_k, dim_v, -(-seqlen_k // TOKENS) * TOKENS))
    of_rows = [empty(torch.float32, batch, heads_q, seqlen_q) for _ in range(2)]
    of_channels = [empty(torch.float32, batch, heads_k, dim_v) for _ in range(2)]
    scales = Scales(of_rows[0], empty(torch.float32, batch, heads_k, -(-seqlen_k // GROUP)), *of_channels, of_rows[1])
    channels = empty(torch.float32, batch, heads_k, 2 + 2 * min(-(-seqlen_k // CHUNK), CHUNKS), config.head_dim)
    kernel = jit.compiled(QUANTISE, quantiser_arguments, config)
    kernel(Given(*(jit.aligned(x) for x in (q, k, v))), made, scales, channels, scale)
    return made, scales


def attend(call: Call, made: Made, scales: Scales, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads_q, head_dim_v) and LSE (batch, heads_q, seqlen_q) fp32. call: the mask, scale and dtypes of what was quantised."""
    device, out = call.q.device, call.out_dtype or call.q.dtype
    plan = plan_of(call, made, scales, config)
    o = torch.empty((*call.q.shape[:3], call.head_dim_v), dtype=out, device=device)
    lse = torch.empty((call.batch, call.heads_q, call.seqlen_q), dtype=torch.float32, device=device)
    kernel = jit.compiled(LAUNCH, arguments, plan.config)
    band = Band(*plan.band, RowTables())
    kernel(
        Tensors(*made, o, lse),
        scales,
        bf16._work(plan, device),
        band,
        changes.scores(call, plan.config, call.scale / plan.config.head_dim if scales.centre is not None else call.scale),
    )
    return o, lse


def plan_of(call: Call, made: Made, scales: Scales, config: Config | None = None) -> Plan:
    if config is None:
        out = call.out_dtype or call.q.dtype
        dtype = torch.int8 if scales.centre is not None else torch.float8_e4m3fn
        config = configure(dtype, out, call.head_dim, call.head_dim_v, visibility.sees(call.mask), centred=scales.centre is not None)
    return Plan.of(call, planning.num_sms(call.q.device), config)
