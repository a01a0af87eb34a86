"""O and LSE over disjoint sets of keys, put together by one kernel: parts of a call, or of ranks."""

import functools

import torch
from torch import Tensor

from tilewise.backends.triton import config as configs
from tilewise.backends.triton.kernels import decode as kernels
from tilewise.backends.triton.launch import Kernel, launcher
from tilewise.backends.triton.targets import interpreted, of_device

CONFIG = configs.Config(4, 16, 4, 1)
MULTIPLE = 16  # of elements, that rows and parts are apart where loads are wide


@functools.cache
def kernel(dim: int, dtype: torch.dtype, aligned: bool, by_length: bool = False) -> Kernel:
    """`kernels.merge` for rows of `dim` elements, which it writes in `dtype`."""
    whole = configs.power(dim)
    constants = {"TILE_M": CONFIG.tile_m, "V_DIM": whole, "V_COLUMNS": dim if whole != dim else 0, "BY_LENGTH": by_length}
    constants |= {"EMULATED": interpreted()}
    return Kernel(kernels.merge, tuple(constants.items()), (("q", torch.float32), ("o", dtype)), CONFIG, aligned)


def merge(partial_o: Tensor, partial_lse: Tensor, o: Tensor, lse: Tensor, parts_of: Tensor | None = None) -> None:
    """Write O (..., heads, dim) and LSE (batch, heads, seqlen_q) or (heads, rows) from fp32 parts (parts, rows, dim) and (parts, rows), which may be
    apart; rows are O's, in their order, or with parts_of (batch, 2) int32 a sequence's: the number of its first part, and how many. All on the
    current device.
    """
    parts, _, dim = partial_o.shape
    rows, (heads, seqlen_q) = lse.numel(), lse.shape[-2:]
    aligned = not any(x.data_ptr() % 16 for x in (partial_o, o)) and not any(step % MULTIPLE for step in (dim, partial_o.stride(0)))
    arguments = {"partial_o": partial_o, "partial_lse": partial_lse, "parts_of": parts_of, "splits": parts}
    arguments |= {"o": o, "lse": lse, "rows_of_all": rows}
    arguments |= {"o_row": dim, "partial_o_part": partial_o.stride(0), "partial_lse_part": partial_lse.stride(0)}
    arguments |= {"heads": heads, "seqlen_q": seqlen_q, "lse_batch": heads * seqlen_q, "lse_head": seqlen_q}
    launcher(kernel(dim, o.dtype, aligned, parts_of is not None), of_device(o.device))(-(-rows // CONFIG.tile_m), arguments)
