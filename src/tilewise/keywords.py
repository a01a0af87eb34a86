"""The keywords of the public functions as types, so that their overloads can say in a line what comes back for which flag; nothing is computed here.

Each `...Options` holds the keywords of one function but for its `return_` flags (tests/docs/test_types.py compares them with its signature).
"""

from collections.abc import Mapping
from typing import TypedDict

from torch import Tensor

from tilewise.masks import Mask


class Scores(TypedDict, total=False):
    """What every function takes."""

    scale: float | None
    softcap: float
    sink: Tensor | None
    backend: str | None


class Cached(Scores, total=False):
    """What attention and decode have in common."""

    causal: bool
    k_scale: Tensor | None
    v_scale: Tensor | None


class Trained(Scores, total=False):
    """What goes with gradients."""

    bias: Tensor | None
    alibi_slopes: Tensor | None
    dropout_p: float
    dropout_seed: int | None
    dropout_offset: int
    deterministic: bool


class Everywhere(Cached, Trained, total=False):
    """What attention and attention_varlen have in common."""

    precision: str | None
    q_scale: Tensor | None
    out: Tensor | None


class AttentionOptions(Everywhere, total=False):
    mask: Mask | Mapping[tuple[int, int], Mask] | None


class VarlenOptions(Everywhere, total=False):
    mask: Mask | None
    seqused_k: Tensor | None
    page_table: Tensor | None
    batch_invariant: bool
    cp_rank: int
    cp_world: int
    cp_interleave: int


class FromCaches(Cached, total=False):
    """What decode has on one process and on several."""

    mask: Mask | None
    page_table: Tensor | None
    k: Tensor | None
    v: Tensor | None
    cu_seqlens_q: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad: Tensor | None
    tree: Tensor | None
    split: int | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    interleaved: bool
    alibi_slopes: Tensor | None


class DecodeOptions(FromCaches, total=False):
    cache_seqlens: Tensor | int | None
    shared_prefix: int
    out: Tensor | None
    check: bool
    cp_rank: int
    cp_world: int
    cp_interleave: int


class ShardedOptions(Trained, total=False):
    """Of distributed.attention."""

    stages: int
    most_bytes: int | None


class ShardedDecodeOptions(FromCaches, total=False):
    """Of distributed.decode, but for cache_seqlens, which has to be given."""

    interleave: int
