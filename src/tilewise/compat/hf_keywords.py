"""Keywords that models of transformers hand on to the attention interface: which are served, which mean nothing here, which are refused.

A model hands on whatever its caller gave and it did not know itself, so what says which keys are visible comes along with the caller's labels.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tilewise.compat.hf_masks import Frame
from tilewise.compat.hf_pairs import Origin, Pairs
from tilewise.errors import UnsupportedError
from tilewise.masks import Mask, SlidingWindow

DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # hf_documents.py keeps their documents apart
SERVED = frozenset({*DOCUMENTS, "max_length_q", "max_length_k", "position_ids", "sliding_window"})
OF_CACHES = "a cache in pages, which only transformers' own implementations serve"
REFUSED = {  # whatever they hold
    "output_attentions": "the weights of attention, which are never formed",
    "sinks": "sinks of each query's own",
    "indices": "keys that an indexer chose for each query",
    "block_indices": "blocks of keys that an indexer chose for each query",
    "head_mask": "weights for heads",
    "window_size": "a window that the model's own mask does not have",
    "cu_seqlens": "documents, by a name that is none of this interface (cu_seq_lens_q and cu_seq_lens_k are)",
    "cu_seqlens_q": "documents, by a name that is none of this interface (cu_seq_lens_q is)",
    "cu_seqlens_k": "documents, by a name that is none of this interface (cu_seq_lens_k is)",
} | dict.fromkeys(("block_table", "page_table", "cache_seqlens", "k_cache", "v_cache"), OF_CACHES)
LABELS = ("labels", "shift_labels", "num_items_in_batch", "loss_weights", "completion_mask", "assistant_masks")
OF_TOKENIZERS = ("token_type_ids", "special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length")
OF_MODELS = ("input_ids", "inputs_embeds", "attention_mask", "cache_position", "position_embeddings")  # which the mask knows already
HARMLESS = frozenset((*LABELS, *OF_TOKENIZERS, *OF_MODELS))
HELD = (Tensor, BlockMask, Mask)

ignored: set[str] = set()  # by `register`


def read(given: Mapping[str, Any], module: torch.nn.Module, query: Tensor, key: Tensor, pairs: Any, causal: bool) -> Any:
    """`pairs`, the mask of the call, or a window in place of None; UnsupportedError for keywords that are refused.

    A mask is what the model says of `is_causal`, too: transformers makes it by that, and some layers pass another (Moonshine).
    """
    check(given, module)
    window = given.get("sliding_window")
    return pairs if window is None else _windowed(window, module, query, key, pairs, causal)


def _windowed(window: int, module: torch.nn.Module, query: Tensor, key: Tensor, pairs: Any, causal: bool) -> Any:
    """What flash attention understands by sliding_window: as many tokens up to a query, and where it is not causal, as many from it on."""
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"sliding_window must be an integer from 1 on, or None, got {window!r}")
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if pairs is not None:
        own = window >= seqlen_k or window == getattr(module, "sliding_window", None)
        if not own and window != getattr(getattr(module, "config", None), "sliding_window", None):  # by layer, configs do not say
            raise UnsupportedError(
                f"sliding_window={window} is not the layer's own, and the model made its mask without it; set it in the model's config, or pass "
                "attention_mask=tilewise.compat.transformers.as_attention_mask(tilewise.SlidingWindow(...), batch, seqlen_q, seqlen_k)"
            )
        return pairs  # with the window in it, if the layer has one
    if window >= max(seqlen_q, seqlen_k):
        return None
    keys = min(seqlen_q, seqlen_k) if causal and seqlen_q > 1 else seqlen_k  # as without a window, places behind are empty
    right = 0 if causal else window - 1
    mask = SlidingWindow(window - 1, right, "top_left" if causal and 1 < seqlen_q != keys else "bottom_right")
    origin = Origin(frame=Frame(seqlen_q, keys), bounds=(1 - window, right))
    return Pairs((mask,), (query.shape[0], 1, seqlen_q, seqlen_k), keys, origin=origin)


def check(given: Mapping[str, Any], module: torch.nn.Module) -> None:
    """UnsupportedError for the first keyword that is refused, or that is not known and holds what could say which keys are visible."""
    for name, value in given.items():
        if value is None or value is False or name in SERVED:
            continue
        if name in REFUSED:
            raise UnsupportedError(
                f'{name} asks for {REFUSED[name]}, which tilewise does not have; use attn_implementation="eager" for this model'
            )
        if name in HARMLESS or name in ignored or not _tells(value):
            continue
        if name not in _of_models(type(module).__module__):
            raise UnsupportedError(
                f"{name} is a keyword that tilewise does not know, and its value, of type {type(value).__name__}, could say which keys are visible; "
                f"take it out of the model's inputs, or say that it does not: tilewise.compat.transformers.register(ignore=({name!r},))"
            )


def _tells(value: Any) -> bool:
    """Whether a value could say something of each token or pair."""
    if isinstance(value, Tensor):
        return value.dim() > 0
    if isinstance(value, (list, tuple)):
        return any(isinstance(x, HELD) for x in value)
    if isinstance(value, dict):
        return any(isinstance(x, HELD) for x in value.values())
    return isinstance(value, HELD) or (callable(value) and not isinstance(value, torch.nn.Module))


@torch.compiler.assume_constant_result
def _of_models(module: str) -> frozenset[str]:
    """What `forward` of the models that are loaded takes, by name: what one part of a model hands on to another is that part's own."""
    of_this = module.rpartition(".")[0]
    names = [name for name in sys.modules if name.startswith("transformers.models.") or name.rpartition(".")[0] == of_this]
    return frozenset().union(*(_of_file(name) for name in names if ".modeling_" in name or name == module))


_files: dict[str, frozenset[str]] = {}


def _of_file(module: str) -> frozenset[str]:
    if module not in _files:
        kinds = [x for x in vars(sys.modules[module]).values() if isinstance(x, type) and issubclass(x, torch.nn.Module)]
        forwards = [kind.__dict__["forward"] for kind in kinds if kind.__module__ == module and "forward" in kind.__dict__]
        _files[module] = frozenset(name for forward in forwards for name in inspect.signature(forward).parameters)
    return _files[module]
