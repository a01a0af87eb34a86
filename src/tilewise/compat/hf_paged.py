"""transformers' own server (`model.generate_batch`, continuous batching) on tilewise: its cache in pages, and who may ask for it.

transformers lets eager, sdpa and flash attention alone serve so, by their names: `admit` puts the names that are registered among them, and
`dismiss` takes them out. A batch is packed sequences. Where each has one new token, it is written to its page, and keys are read in their pages by
`decode`; else transformers has written the new ones and gathered what each sequence sees. Written for transformers 5.24; where an earlier one has
no such server, there is nothing to admit to.
"""

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from tilewise.decoding import append, decode
from tilewise.errors import UnsupportedError
from tilewise.masks import SlidingWindow
from tilewise.varlen import attention_varlen

try:
    from transformers.generation.continuous_batching import cache, continuous_api, initialization
except ImportError:
    cache = continuous_api = initialization = None

_theirs: list[tuple[Any, str, Any]] = []  # what stood where ours does: its owner, its name and itself


def serves(given: Mapping[str, Any]) -> bool:
    """Whether a call of attention is one of the server's, by its keywords."""
    return given.get("read_index") is not None and given.get("write_index") is not None


def attend(
    query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any], mask: Any, scale: float | None, softcap: float, sink: Tensor | None
) -> Tensor:
    """(1, tokens, heads, head_dim_v) of packed sequences, as transformers' interface wants it.

    query: (1, heads, tokens, head_dim).  key, value: (1, heads_k, keys, ...) of all sequences, or the new ones where there is a block table.
    given: the call's keywords, as the cache's `update` left them: lengths of this layer, and its pages where they are read in place.
    """
    if mask is not None:
        raise UnsupportedError("attention_mask cannot be given where transformers serves from pages; each sequence is causal there")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    window, options = given.get("sliding_window"), {"scale": scale, "softcap": softcap, "sink": sink}
    options["mask"] = None if window is None else SlidingWindow(window - 1, 0)
    cu_q, cu_k, pages = given["cu_seq_lens_q"], given["cu_seq_lens_k"], given.get("block_table")
    if pages is None or given.get("k_cache") is None:
        return attention_varlen(q, k, v, cu_q, cu_k, causal=True, **options)[None]
    lengths = cu_k.diff()[: q.shape[0]]  # with the new token; 0 for padding
    caches = given["k_cache"], given["v_cache"]
    slots = _slots(lengths - 1, pages, caches[0].shape[1])
    for pool, new in zip(caches, (k, v), strict=True):  # which are one memory, moved by some pages: what one names the other does not
        append(pool, pool[..., :0], new, new[..., :0], slots=slots)
    return decode(q[:, None], *caches, cache_seqlens=lengths, page_table=pages, **options).transpose(0, 1)


def _slots(places: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """(sequences,) where a token at that place of each sequence lies, page * page_size + place in it; negative where it has none."""
    page = pages.gather(1, places.clamp(min=0).div(page_size, rounding_mode="floor").long()[:, None]).squeeze(1)
    return (page * page_size + places % page_size).where((places >= 0) & (page >= 0), -1)


def admit(names: Container[str]) -> None:
    """Let models with one of these implementations serve; `names` is looked at when they do."""
    if _theirs or cache is None or continuous_api is None or initialization is None:
        return
    manager, kept = continuous_api.ContinuousBatchingManager, cache
    switch, ensure = manager.switch_to_cb_friendly_attn, initialization.ensure_decode_fast_path_is_available
    _theirs.append((manager, "switch_to_cb_friendly_attn", switch))
    _theirs.append((initialization, "ensure_decode_fast_path_is_available", ensure))

    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation not in names:
            switch(self, model, *args, **kwargs)

    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> None:
        kinds = kept.group_layers_by_attn_type(config)
        in_pages = all(kept.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds)
        if config._attn_implementation not in names or not in_pages:
            ensure(config, cb_config, user_requested)

    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
    initialization.ensure_decode_fast_path_is_available = ensure_decode_fast_path_is_available


def dismiss() -> None:
    """Undo `admit`."""
    for owner, name, before in _theirs:
        setattr(owner, name, before)
    _theirs.clear()
