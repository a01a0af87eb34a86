"""A call's tensors and scalars as the kernel's argument struct."""

import ctypes
import threading
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from tilewise.backends.cpu import abi
from tilewise.backends.philox import keep_scale, threshold
from tilewise.problem import Call, Dropout, in_fp32

CPU = torch.device("cpu")  # torch takes the name in half a microsecond more
DTYPES = {torch.float32: abi.FP32, torch.bfloat16: abi.BF16, torch.float16: abi.FP16}
_WORD = 0xFFFFFFFF


def add_dropout(args: abi.Args, dropout: Dropout) -> Tensor | None:
    """Give the arguments dropout; what must stay alive while they are used."""
    p, seed, offset, _ = dropout
    args.dropout_key[:] = seed & _WORD, seed >> 32 & _WORD
    args.dropout_offset = offset & _WORD
    args.dropout_threshold = min(threshold(p), _WORD)
    args.dropout_rescale = keep_scale(p)
    args.first_head, args.all_heads = dropout.heads(args.heads_q)
    if (rows := dropout.rows(CPU)) is not None:
        args.rows = rows.data_ptr()
    return rows


def add_tensors(args: abi.Args, bias: Tensor | None, alibi_slopes: Tensor | None, sink: Tensor | None) -> tuple[abi.Args, list]:
    """`args` with these, and what must stay alive while they are used."""
    keep = []
    if bias is not None:
        bias = rows(bias if bias.dtype in DTYPES else bias.float())
        set_broadcast(args.bias, bias)
        args.bias_dtype = DTYPES[bias.dtype]
        keep.append(bias)
    add_per_head(args, alibi_slopes, sink, keep)
    return args, keep


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, isa: int) -> abi.Args:
    """Arguments for q (batch, seqlen_q, heads_q, head_dim), k (batch or pages, seqlen_k or page, heads_k, head_dim) and v, nothing else."""
    args = abi.Args.from_buffer_copy(_template(q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, scale, softcap, isa))
    args.threads = torch.get_num_threads()
    args.q.data, args.k.data, args.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
    return args


@lru_cache(maxsize=256)
def _template(
    q_shape, q_stride, k_shape, k_stride, v_shape, v_stride, dtype: torch.dtype, scale: float, softcap: float, isa: int
) -> abi.Args:
    """What does not change from call to call of one shape; copying it is cheaper than filling thirty fields."""
    batch, seqlen_q, heads_q, head_dim = q_shape
    args = abi.Args(
        abi.ABI_VERSION, isa, DTYPES[dtype], 1, batch, seqlen_q, k_shape[1], heads_q, k_shape[2], head_dim, v_shape[3], scale, in_fp32(softcap)
    )  # fmt: skip
    for field, stride in ((args.q, q_stride), (args.k, k_stride), (args.v, v_stride)):
        field.batch, field.seq, field.head, _ = stride
    return args


def add_per_head(args: abi.Args, alibi_slopes: Tensor | None, sink: Tensor | None, keep: list) -> None:
    """ALiBi slopes (batch or 1, heads_q) and the sink (heads_q,), in fp32."""
    if alibi_slopes is not None:
        slopes = in_order(alibi_slopes.float())
        args.alibi_slopes, args.alibi_batch = slopes.data_ptr(), args.heads_q if slopes.shape[0] > 1 else 0
        keep.append(slopes)
    if sink is not None:
        sink = in_order(sink.detach().float())
        args.sink = sink.data_ptr()
        keep.append(sink)


def in_order(x: Tensor) -> Tensor:
    """x contiguous, at a multiple of its element size, which torch.frombuffer's tensors need not be; the kernel reads all but rows so."""
    x = x.contiguous()
    return x if x.data_ptr() % x.element_size() == 0 else x.clone()


def rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, and holding its values themselves, not their negatives (Tensor.is_neg)."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def in_rows(call: Call) -> Call:
    """The call with such q, k and v."""
    q, k, v = rows(call.q), rows(call.k), rows(call.v)
    return call if q is call.q and k is call.k and v is call.v else replace(call, q=q, k=k, v=v)


def set_tensor(field: abi.TensorArg, x: Tensor) -> None:
    field.data = x.data_ptr()
    field.batch, field.seq, field.head, _ = x.stride()


def set_broadcast(field: abi.TensorArg, bias: Tensor) -> None:
    """A bias (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k): stride 0 along what it broadcasts over."""
    field.data = bias.data_ptr()
    field.batch, field.head, field.seq = (0 if size == 1 else step for size, step in zip(bias.shape[:3], bias.stride()[:3], strict=True))


class _Kept(threading.local):
    """The last workspace of this thread: fresh pages cost more than the kernel's work on short sequences."""

    workspace: Tensor | None = None


_kept = _Kept()
KEEP_BYTES = 16 << 20


def add_workspace(args: abi.Args, size) -> Tensor:
    """The memory that a function wants, 64-byte aligned in args.workspace; it must stay alive while that runs."""
    memory, args.workspace = workspace(size(ctypes.byref(args)))
    return memory


def workspace(size: int) -> tuple[Tensor, int]:
    """Memory of at least `size` bytes, and the address in it at which they start, 64-byte aligned."""
    memory = _kept.workspace
    if memory is None or memory.shape[0] < size + 64:
        memory = torch.empty(size + 64, dtype=torch.uint8, device=CPU)
        if size + 64 <= KEEP_BYTES:
            _kept.workspace = memory
    return memory, -(-memory.data_ptr() // 64) * 64
