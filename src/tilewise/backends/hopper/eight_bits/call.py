"""The forward pass in 8 bits, seen from torch."""

from tilewise.backends.hopper.eight_bits.config import Config, QuantiserConfig
from tilewise.backends.hopper.eight_bits.operands import Given, Made, Scales, Tensors
from tilewise.backends.hopper.operands import Band, RowTables, Scores, Work
from tilewise.backends.hopper import changes
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
    sums = jit.tensor(Float32, batch, heads_k, jit.size(), 4, padded)
    return [Given(*given), Made(q, k, jit.tensor(Int8, batch, heads_k, dim_v, tokens)), scales, sums, Float32(1.0)]
