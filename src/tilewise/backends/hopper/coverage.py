"""What the Hopper kernels cover, on whatever machine, and which of them a call launches."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from tilewise.backends.hopper import entries, widths
from tilewise.backends.hopper.backward import call as backward
from tilewise.backends.hopper.decode import call as decode
from tilewise.backends.hopper.decode.config import LEAST_BOX, latent_dims
from tilewise.backends.hopper.decode.config import tile_dims as cached_tile_dims
from tilewise.backends.hopper.eight_bits import call as eight_bits
from tilewise.backends.hopper.forward import call as forward
from tilewise.backends.hopper.forward.config import TILES, tile_dims
from tilewise.backends.tables.window import window_of
from tilewise.masks import Mask
from tilewise.problem import Call, Problem
from tilewise.sm90 import jit


def refused(problem: Problem) -> list[str]:
    """Sentences that say why no kernel is for the problem; empty where there are some."""
    if problem.device != "cuda":
        return [f"it computes on Hopper GPUs, the tensors are on {problem.device}"]
    if problem.eight_bits:
        of_gradients = backward.why_not(replace(problem, precision=None)) if problem.grad else []
        return [*eight_bits.why_not(problem), *of_gradients]
    wrong = problem.mixed
    if problem.dtype not in (torch.bfloat16, torch.float16):
        wrong.append(f"it computes bf16 and fp16, not {problem.dtype}")
    dims = problem.head_dim, problem.head_dim_v
    if tile_dims(*dims) is None:
        others = f", except to decode with v_cache = k_cache[..., :{dims[1]}]" if latent(problem) else ""
        wrong.append(f"it takes head_dim and head_dim_v up to {max(TILES)[0]}, not {dims[0]} and {dims[1]}{others}")
    if problem.dropout_of_part:
        wrong.append("its dropout counts the call's own rows and heads, not those of a larger call (masks.Part)")
    if problem.grad:
        wrong += [reason for reason in backward.why_not(problem) if reason not in wrong]
    return wrong


def latent(problem: Problem) -> bool:
    """Whether only decode covers the problem, of caches with values that are the first columns of their keys."""
    alike = problem.device == "cuda" and problem.dtype in (torch.bfloat16, torch.float16) and not problem.mixed
    return alike and latent_dims(problem.head_dim, problem.head_dim_v) is not None


def cuts_sequences(problem: Problem, mask: Mask, page_size: int | None, in_keys: bool) -> bool:
    """Whether the sequences that `decode` gets are calls of their own, cut by lengths on the host: what `decode.why_not` says of dtypes, head dims,
    pages and masks, without tensors. As in `Backend.reads_decode`.
    """
    dims, cached = (problem.head_dim, problem.head_dim_v), problem.k_dtype or problem.dtype
    if any(dim % (jit.BYTES // cached.itemsize) for dim in dims) or window_of(mask) is None:
        return True
    if latent_dims(*dims) is not None and cached == problem.dtype:
        return not in_keys or (page_size or 0) % LEAST_BOX > 0
    return cached_tile_dims(*dims) is None


def launched(call: Call) -> Call:
    """The call that the kernels are given in place of this one; the same where they take it as it is."""
    fitting = widths.of_call(call)
    if call.problem.eight_bits:
        return fitting
    return entries.fold(fitting) or fitting


def kernels(call: Call) -> list[jit.Kernel]:
    """Every kernel that the call launches."""
    call = launched(call)
    if call.problem.eight_bits:
        of_gradients = kernels(replace(call, precision=None)) if call.grad and call.precision else []  # which are those of 16 bits
        return [*eight_bits.kernels(call), *of_gradients]
    return [*forward.kernels(call), *(backward.kernels(call) if call.grad else [])]


DECODE = {"softcap": "softcap", "alibi": "alibi", "sink": "sinks"}  # what changes scores, as the kernel's Config has it


def of_decode(dtype: torch.dtype, head_dim: int, head_dim_v: int, mask: Mask, extras: Iterable[str] = ()) -> list[jit.Kernel]:
    """The kernels that decode; none where they do not cover that."""
    if window_of(mask) is None or not DECODE.keys() >= set(extras):
        return []
    return decode.shipped(dtype, head_dim, head_dim_v, [DECODE[name] for name in extras])
