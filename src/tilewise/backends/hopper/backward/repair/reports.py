"""The list of parts of gradients that are not finite, as the kernels that write gradients fill it.

An entry is ROWS rows of a gradient and a part of its columns (Config.repaired_parts). Its number is 0 or above for a part of both dK and dV, below
0 for a part of dQ.
"""

from tilewise.backends.hopper.backward.config import Config
from tilewise.sm90.dsl import Constexpr, Int32, arch, cute

ROWS = 16  # of an entry


@cute.jit
def report_keys(tensors, n0: Int32, part: Int32, head_k: Int32, batch: Int32, config: Constexpr[Config]):
    """Append an entry to the list, by a warp: a part of the columns of dK or dV, of the ROWS keys from n0 on, is not finite. Its number is 0 or
    above.
    """
    if n0 < tensors.K.shape[1]:
        report(tensors.spoiled, number_of(tensors.K, n0, part, head_k, batch, config.repaired_parts[1]))


@cute.jit
def report_queries(tensors, row0: Int32, part: Int32, head: Int32, batch: Int32, config: Constexpr[Config]):
    """Likewise for dQ of the ROWS queries from row0 on. The entry's number is below 0."""
    if row0 < tensors.Q.shape[1]:
        report(tensors.spoiled, -1 - number_of(tensors.Q, row0, part, head, batch, config.repaired_parts[0]))


@cute.jit
def report(spoiled: cute.Tensor, number: Int32):
    """Append a number to the list. spoiled: (1 + .,) int32, the count of entries, then their numbers."""
    if arch.lane_idx() == 0:
        place = arch.inline_ptx(
            "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[spoiled.iterator.toint()]
        )
        spoiled[1 + place] = number


@cute.jit
def number_of(mX: cute.Tensor, row0: Int32, part: Int32, head: Int32, batch: Int32, parts: Constexpr[int]) -> Int32:
    """The number of an entry: batch, head, group of ROWS rows, part, the last fastest. mX: (batch, seqlen, heads, head_dim)."""
    return ((batch * mX.shape[2] + head) * cute.ceil_div(mX.shape[1], ROWS) + row0 // ROWS) * parts + part
