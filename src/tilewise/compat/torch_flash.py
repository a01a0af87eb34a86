"""tilewise under torch's CUDA flash attention: SDPA, varlen_attn and context_parallel run on our kernels.

torch (2.11 and later) has a registry of flash attention implementations. One that is activated overrides aten's flash operators on CUDA devices;
below are these operators by their names, with torch's arguments and layouts: (batch, heads, seqlen, head_dim) where they are called
scaled_dot_product, else (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with cum_seq_q and cum_seq_k. Causal is bottom right:
torch's SDPA, which aligns top left, sends causal calls with different lengths elsewhere.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.api import attention, operands
from tilewise.compat.sdpa import laid_out_as
from tilewise.decoding import decode
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Full, Mask, SlidingWindow
from tilewise.masks.constructors import DeviceDocuments
from tilewise.problem import NO_EXTRAS, Extras
from tilewise.runtime import bound_call, call_cache, operator
from tilewise.runtime.call_cache import Options
from tilewise.varlen import attention_varlen
from tilewise.views import allocator

LAYER = "tilewise.compat.torch_flash"
FRONTEND = "torch flash"  # of call_cache.Options
_allocator = functools.cache(allocator)
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # the former is faster, but there with CUDA alone


class Handle:
    """What `register` did; `remove()` undoes it, and deactivates the implementation where it is active."""

    def __init__(self, name: str) -> None:
        from torch.nn.attention import _registry

        self.name, self._registry = name, _registry
        self._before = _registry._FLASH_ATTENTION_IMPLS.get(name)
        self._activate: _Activation | None = _Activation(self)
        torch.nn.attention.register_flash_attention_impl(name, register_fn=self._activate)

    def remove(self) -> None:
        """Take the name out of torch's registry, or put back what it stood for; a second call does nothing."""
        if self._activate is None:
            return
        active = self._registry._FLASH_ATTENTION_ACTIVE
        if active is not None and active[0] == self.name and isinstance(active[1], Kernels):
            torch.nn.attention.restore_flash_attention_impl()
        registered = self._registry._FLASH_ATTENTION_IMPLS
        if registered.get(self.name) is self._activate:
            before = self._before
            while isinstance(before, _Activation) and before.handle._activate is None:  # removed meanwhile
                before = before.handle._before
            if before is None:
                del registered[self.name]
            else:
                registered[self.name] = before
        self._activate = None


def register(name: str = "tilewise") -> Handle:
    """Offer tilewise to `torch.nn.attention.activate_flash_attention_impl(name)`; nothing changes before that call.

    A name that torch knows, such as "FA3", stands for tilewise from then on: for those who activate that one themselves.
    """
    return Handle(name)


class _Activation:
    """What torch calls to activate the implementation."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __call__(self) -> "Kernels":
        return Kernels("CUDA")


class Kernels:
    """aten's flash operators on one kind of device (torch's name of a dispatch key) as tilewise's, until `remove()`."""

    def __init__(self, key: str) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", key)
        for kernel in KERNELS:
            if hasattr(torch.ops.aten, kernel.__name__):  # torch 2.11 has not all
                self._library.impl(kernel.__name__, kernel, key)

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _below_autograd(kernel: Callable) -> Callable:
    """The kernel without gradients, which are made above it; torch.no_grad() takes 1 us more."""

    @functools.wraps(kernel)
    def run(*operands, **options):
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return kernel(*operands, **options)
        finally:
            torch._C._set_grad_enabled(before)

    return run


@_below_autograd
def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | int | None, ...]:
    """(O, LSE, None, None, max_q, max_k, rng_state, unused, debug_mask), O laid out as query."""
    _check_forward(dropout_p, return_debug_mask)
    options = Options(is_causal, scale, 0.0, 0.0, False, None, None, None, True, FRONTEND)
    if (known := call_cache.find(query, key, value, options)) is not None:
        o, lse = known(query, key, value)
    else:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        o, lse = attention(q, k, v, causal=is_causal, scale=scale, return_lse=True)
        o, call = o.transpose(1, 2), (q, k, v, options._replace(frontend=""), NO_EXTRAS)
        heads_first = query.stride(1) > query.stride(2)
        call_cache.bind_as(bound_call.BHSD, query, key, value, options, NO_EXTRAS, call, heads_first)
    return laid_out_as(o, query), lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each laid out as these."""
    options = Options(is_causal, scale, 0.0, 0.0, False, None, None, None, True, FRONTEND)
    grads = call_cache.gradients(query, key, value, out, logsumexp, grad_out, options)
    if grads is None:
        d_o, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        grads = _gradients(d_o, q, k, v, o, logsumexp, Causal() if is_causal else Full(), dropout_p, scale)
        grads = tuple(grad.transpose(1, 2) for grad in grads)
    return _laid_out(grads, query, key, value)


@_below_autograd
def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """(O, LSE, rng_state, unused, debug_mask); LSE (batch, heads, seqlen_q), packed (heads, total_q)."""
    _check_forward(dropout_p, return_debug_mask)
    if num_splits:
        raise UnsupportedError(
            f"{LAYER}: num_splits must be None or 0, got {num_splits}: tilewise itself decides how many blocks share the keys of a row, and does not "
            "promise that results are independent of the batch; leave num_splits out"
        )
    mask = _window(is_causal, window_size_left, window_size_right)
    if block_table is not None:
        o, lse = _paged(query, key, value, cum_seq_q, mask, scale, seqused_k, alibi_slopes, block_table)
    elif cum_seq_q is None:
        if seqused_k is not None:
            raise UnsupportedError(
                f"{LAYER}: seqused_k goes with cum_seq_q and cum_seq_k; cut the keys of plain batches, or use tilewise.decode"
            )
        o, lse = attention(query, key, value, mask=mask, scale=scale, alibi_slopes=alibi_slopes, return_lse=True)
    else:
        if alibi_slopes is not None:
            raise UnsupportedError(
                f"{LAYER}: alibi_slopes with cum_seq_q is not passed on; call tilewise.attention_varlen(alibi_slopes=...)"
            )
        qkv, cu = (query, key, value), (cum_seq_q, _starts(cum_seq_k))
        o, lse = attention_varlen(*qkv, *cu, seqused_k=seqused_k, mask=mask, scale=scale, return_lse=True)
    return laid_out_as(o, query), lse, *_unused(query)


def _flash_attention_forward_no_dropout_inplace(out: Tensor, *operands, **options) -> Tensor:
    """LSE; O goes into `out`. The other arguments are those of `_flash_attention_forward`."""
    o, lse, *_ = _flash_attention_forward(*operands, **options)
    out.copy_(o)
    return lse


@_below_autograd
def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each laid out as these."""
    mask = _window(is_causal, window_size_left, window_size_right)
    options, extras = Options(False, scale, 0.0, 0.0, False, None, None, mask, True), Extras(cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k)
    grads = call_cache.gradients(query, key, value, out, logsumexp, grad_out, options, extras)
    if grads is not None:
        pass
    elif cum_seq_q is None:
        grads = _gradients(grad_out, query, key, value, out, logsumexp, mask, dropout_p, scale)
    else:
        d_o, q, k, v, o, lse = (x[None] for x in (grad_out, query, key, value, out, logsumexp))
        mask = DeviceDocuments(cum_seq_q, _starts(cum_seq_k), mask)
        grads = tuple(x.squeeze(0) for x in _gradients(d_o, q, k, v, o, lse, mask, dropout_p, scale))
    return _laid_out(grads, query, key, value)


KERNELS = (
    _scaled_dot_product_flash_attention,
    _scaled_dot_product_flash_attention_backward,
    _flash_attention_forward,
    _flash_attention_backward,
    _flash_attention_forward_no_dropout_inplace,
)


def _check_forward(dropout_p: float, return_debug_mask: bool) -> None:
    if dropout_p > 0.0:
        raise UnsupportedError(
            f"{LAYER}: dropout_p must be 0, got {dropout_p}; torch.nn.attention.restore_flash_attention_impl() gives torch's kernels back, and "
            "tilewise.attention(dropout_p=...) has dropout of its own"
        )
    if return_debug_mask:
        raise UnsupportedError(f"{LAYER}: return_debug_mask must be False; no kernel of tilewise writes probabilities down")


def _unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_mask, which nobody reads where there is no dropout."""
    dtype, device = torch.uint64, query.device
    if query.is_cuda and device.index != _current_device():
        return query.new_empty(2, dtype=dtype), query.new_empty((), dtype=dtype), query.new_empty(0)
    empty = _allocator(device)
    return empty((2,), (1,), dtype), empty((), (), dtype), empty((0,), (1,), query.dtype)


@functools.lru_cache(256)
def _window(is_causal: bool, left: int | None, right: int | None) -> Mask:
    """Bottom right; None and what is below 0 are unbounded. The same object for the same window, by which repeated calls are known soonest."""
    left, right = (None if size is None or size < 0 else int(size) for size in (left, right))
    if is_causal:
        right = 0
    if left is None and right is None:
        return Full()
    return Causal() if left is None and right == 0 else SlidingWindow(left, right)


def _starts(cum_seq_k: Tensor | None) -> Tensor:
    """cum_seq_k, which has to be there."""
    if cum_seq_k is None:
        raise UnsupportedError(
            f"{LAYER}: cum_seq_k must say where the keys of each sequence begin, got None, which only a block_table allows"
        )
    return cum_seq_k


def _operands(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> operator.Operands:
    options = {"softcap": 0.0, "alibi_slopes": None, "sink": None, "backend": None, "dropout": (0.0, None, 0)}
    return operands(q, k, v, mask, scale=scale, deterministic=torch.are_deterministic_algorithms_enabled(), **options)


@_below_autograd
def _gradients(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Mask, dropout_p: float, scale: float | None
) -> tuple[Tensor, ...]:
    _check_forward(dropout_p, False)
    return operator.differentiate(o, lse, d_o, _operands(q, k, v, mask, scale)._replace(grad=True))[:3]


def _laid_out(grads: tuple[Tensor, ...], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that lie as torch's fake kernels say: those of the short way do already."""
    d_q, d_k, d_v = grads
    if d_q.stride() == query.stride() and d_k.stride() == key.stride() and d_v.stride() == value.stride():
        return d_q, d_k, d_v
    return laid_out_as(d_q, query), laid_out_as(d_k, key), laid_out_as(d_v, value)


def _paged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    mask: Mask,
    scale: float | None,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    block_table: Tensor,
) -> tuple[Tensor, Tensor]:
    """O and LSE of packed queries against pages (pages, page_size, heads_k, head_dim)."""
    if cum_seq_q is None or seqused_k is None:
        raise UnsupportedError(
            f"{LAYER}: block_table needs cum_seq_q, which queries are each sequence's, and seqused_k, how many keys each has; got None"
        )
    return decode(
        query,
        key,
        value,
        cu_seqlens_q=cum_seq_q,
        cache_seqlens=seqused_k,
        page_table=block_table,
        causal=False,
        mask=mask,
        scale=scale,
        alibi_slopes=alibi_slopes,
        return_lse=True,
    )
