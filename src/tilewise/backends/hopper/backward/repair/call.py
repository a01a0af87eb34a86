"""Repairs, seen from torch: the kernel that repairs the gradients of the kernels before it, and its operands."""

from collections.abc import Callable

from tilewise.backends.hopper import changes
from tilewise.backends.hopper.backward import tables as backward_tables
from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.backward.repair.config import RepairConfig
from tilewise.backends.hopper.operands import Band, Changes, Given, Gradients, KeyTables, Repaired, RepairScalars, Scratch, Spoiled
from tilewise.backends.hopper.stand_ins import Floats, StandIns
from tilewise.problem import Call
from tilewise.sm90 import jit

LAUNCH = "tilewise.backends.hopper.backward.repair.kernel:launch"


def kernels(config: Config) -> list[jit.Kernel]:
    """For gradients that kernels of that configuration compute; none where nothing is hidden."""
    return [jit.Kernel(LAUNCH, arguments, RepairConfig.of(config))] if config.repairs else []


def bind(call: Call, config: Config, num_sms: int) -> tuple[Callable, RepairScalars] | None:
    """The launch, for gradients that kernels of that configuration compute, and its scalars."""
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
    made = StandIns(config)
    seen = band(made(Band, tables=KeyTables))
    return [made(Repaired, **of_keys(config)), made(Spoiled), made(RepairScalars), seen, changes.or_none(made(Changes))]


def of_keys(config: Config | RepairConfig) -> dict:
    """What dK and dV are annotated with in place of what operands.py has."""
    if not config.wide_keys:
        return {}
    sizes = {"dK": "batch seqlen_k heads_k head_dim", "dV": "batch seqlen_k heads_k head_dim_v"}
    return {name: Floats(each, aligned=True) for name, each in sizes.items()}
