"""Repairs, seen from torch: the kernel that follows those whose gradients it repairs, and its operands."""

from collections.abc import Callable

from tilewise.backends.hopper import changes
from tilewise.backends.hopper.backward import tables as backward_tables
from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.repair.config import RepairConfig
from tilewise.backends.hopper.operands import Band, Given, Gradients, Repaired, RepairScalars, Scratch, Spoiled
from tilewise.problem import Call
from tilewise.sm90 import jit

LAUNCH = "tilewise.backends.hopper.backward.repair.kernel:launch"


def kernels(config: Config) -> list[tuple]:
    """What `jit.compiled` takes, for gradients that kernels of that configuration compute; none where nothing is hidden."""
    return [(LAUNCH, arguments, RepairConfig.of(config))] if config.repairs else []


def bind(call: Call, config: Config, num_sms: int) -> tuple[Callable, RepairScalars] | None:
    """The launch, for gradients that kernels of that configuration compute, and its numbers."""
    launch = next((jit.compiled(*each) for each in kernels(config)), None)
    return None if launch is None else (launch, scalars_of(call, config, num_sms))


def repaired(given: Given, gradients: Gradients) -> Repaired:
    return Repaired(given.Q, given.K, given.V, given.dO, *gradients)


def spoiled(scratch: Scratch) -> Spoiled:
    return Spoiled(scratch.lse, scratch.minus_delta, scratch.spoiled)


def band(seen: Band) -> Band:
    """seen: what the kernels before it read."""
    *numbers, tables = seen
    return Band(*numbers, backward_tables.for_repairs(tables))


def scalars_of(call: Call, config: Config, num_sms: int) -> RepairScalars:
    """num_sms: multiprocessors of the GPU."""
    drawn, scale = changes.draw(call), call.scale * changes.rest(call)
    of_dV = 1.0 / config.enlarged * (1.0 if drawn is None else drawn.rescale)
    outer = changes.outer_log2(config, call.scale, call.softcap)
    return RepairScalars(scale, outer, config.enlarged, of_dV, int(config.looks), *config.repaired_parts, num_sms)


def arguments(config: RepairConfig) -> list:
    """Stand-ins for the launch's operands."""
    from tilewise.sm90.dsl import Float32, Int32

    dtype = changes.dsl(config.dtype)
    batch, seqlen_q, seqlen_k, heads_q, heads_k, dim, dim_v, rows, m_blocks = (jit.size() for _ in range(9))
    q, d_q = (jit.tensor(dtype, batch, seqlen_q, heads_q, dim) for _ in range(2))
    k, d_k = (jit.tensor(dtype, batch, seqlen_k, heads_k, dim) for _ in range(2))
    v, d_v = (jit.tensor(dtype, batch, seqlen_k, heads_k, dim_v) for _ in range(2))
    d_o = jit.tensor(dtype, batch, seqlen_q, heads_q, dim_v)
    statistics = (jit.tensor(Float32, batch, heads_q, rows) for _ in range(2))
    tables = backward_tables.for_repairs(backward_tables.stand_ins(config, batch, heads_q, seqlen_q, seqlen_k, m_blocks))
    return [
        Repaired(q, k, v, d_o, d_q, d_k, d_v),
        Spoiled(*statistics, jit.tensor(Int32, jit.size(), aligned=False)),
        RepairScalars(*(Float32(1.0) for _ in range(4)), *(Int32(0) for _ in range(4))),
        Band(*(Int32(0) for _ in range(6)), tables),
        changes.or_none(changes.stand_ins(config, seqlen_q, seqlen_k, heads_q)),
    ]
