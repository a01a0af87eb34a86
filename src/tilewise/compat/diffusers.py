"""tilewise as an attention backend of diffusers: `register()`, then `set_attention_backend("tilewise")` of a model.

diffusers keeps its backends in a closed enumeration, so `register` adds a member to it by hand, and `remove()` takes that out again. UNet2DCondition,
DiT and whoever else calls torch's function never ask for a backend; `check` says so, and for them there is `tilewise.compat.sdpa.patch`.
"""

from typing import Any

from torch import Tensor
from torch.nn import Module

from tilewise.api import attention
from tilewise.compat import _asking
from tilewise.compat._attn_mask import BOTTOM_RIGHT, TOP_LEFT, mask_and_bias
from tilewise.compat._refusals import translate_errors
from tilewise.errors import ShapeError, UnsupportedError

NAME = "tilewise"
LAYER = 'the diffusers backend "tilewise"'


@translate_errors(LAYER, q="query", k="key", v="value", bias="attn_mask")
def backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What diffusers calls. Its native backend is the model: causal is top left, and a mask (batch, seqlen_k) is one of keys.

    Args:
        query: (batch, seqlen_q, heads_q, head_dim).  key, value: (batch, seqlen_k, heads_k, ...).
        attn_mask: bool (True: visible) or values to add, (batch, seqlen_k), or what broadcasts to (batch, heads_q, seqlen_q, seqlen_k).
        enable_gqa: heads_q may be a multiple of heads_k.
        return_lse: also return LSE (batch, seqlen_q, heads_q), as diffusers' flash backends do.

    Returns:
        (batch, seqlen_q, heads_q, head_dim_v).

    Raises:
        ShapeError, ValueError: what does not fit together.
        UnsupportedError: context parallelism.
    """
    if _parallel_config is not None:
        raise UnsupportedError(
            f"{LAYER}: _parallel_config is set, but context parallelism of diffusers is not served; call model.enable_parallelism with "
            "another backend, or none"
        )
    if is_causal and attn_mask is not None:
        raise ValueError(f"{LAYER}: attn_mask must be None where is_causal is True; write the causal part into attn_mask")
    if not enable_gqa and query.shape[-2] != key.shape[-2]:
        raise ShapeError(f"{LAYER}: query has {query.shape[-2]} heads and key {key.shape[-2]}; pass enable_gqa=True for grouped heads")
    mask, bias = None, None
    if attn_mask is not None:
        if attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        mask, bias = mask_and_bias(attn_mask, query, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]), LAYER)
    elif is_causal:
        mask = BOTTOM_RIGHT if query.shape[1] == key.shape[1] else TOP_LEFT
    result = attention(query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, return_lse=return_lse)
    return (result[0], result[1].transpose(1, 2)) if isinstance(result, tuple) else result


class Handle:
    """What `register` did; `remove()` undoes it."""

    def __init__(self) -> None:
        from diffusers.models import attention_dispatch

        names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
        if NAME in names._value2member_map_:
            raise RuntimeError(
                f"{LAYER} is registered already; remove() the handle that tilewise.compat.diffusers.register() returned first"
            )
        self._names, self._registry, self._on, self._before = names, registry, True, registry._active_backend
        member = str.__new__(names, NAME)
        vars(member).update(_name_=NAME.upper(), _value_=NAME, _sort_order_=len(names._member_names_))
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[NAME] = member
        self.member = member
        registry.register(member, constraints=[attention_dispatch._check_device, attention_dispatch._check_shape])(backend)

    def remove(self) -> None:
        """Take the backend out of diffusers, and make the one of before active again; a second call does nothing.

        A model that was set to it needs its `reset_attention_backend()` first.
        """
        if not self._on:
            return
        if self._registry._active_backend is self.member:  # set_attention_backend makes it that, and nothing of diffusers takes it back
            self._registry.set_active_backend(self._before)
        for table in (self._registry._backends, self._registry._constraints, self._registry._supported_arg_names):
            table.pop(self.member, None)
        self._names._member_names_.remove(self.member._name_)
        del self._names._member_map_[self.member._name_], self._names._value2member_map_[NAME]
        self._on = False


def register() -> Handle:
    """Add the backend "tilewise" to diffusers; the handle's `remove()` takes it out again.

    Raises ImportError without diffusers, RuntimeError where it is registered already.
    """
    return Handle()


def check(model: Module) -> None:
    """UnsupportedError where layers of a model compute attention by themselves: set_attention_backend changes nothing for those (DiT, UNets)."""
    _asking.check(model, "diffusers", "call it within tilewise.compat.sdpa.patch() instead")
