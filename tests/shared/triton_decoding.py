"""Kernels of the Triton backend's decode and append, as calls of these launch them on GPUs that need not be here."""

from unittest import mock

import torch
from torch import Tensor

from tilewise.backends.triton import append, decode, merging, prefix
from tilewise.backends.triton import config as configs
from tilewise.backends.triton.launch import Kernel
from tilewise.masks import Causal
from tilewise.problem import AppendCall, DecodeCall, Rotary, Share

KERNELS = "decode", "merge", "append"
QUERIES = {"one": 1, "chunk": 16}  # of a sequence: of a call that writes one token, or reads a prompt in pieces
HEADS, GROUP, MANY, BATCH = 2, 4, 64, 2
LENGTH = 600  # of which there is more than one part
LATENT = 576, 512  # head_dim and head_dim_v of keys that are values as well
BITS = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
TOKENS = 64  # of a page


def kernel(case) -> Kernel:
    """Of a case of triton_inventory.py, whose mask is a word of QUERIES. Its feature: "paged", or "rows" where a tile's keys are of several pages;
    "e4m3" or "int8" of the cache; "ragged", "tree", "rotary", "ranks", "latent"; "group", of many heads; "scores", with all that changes them;
    "prefix", the part that is of all sequences, or "joined", the rest beside it; several with +.
    """
    of_table, words = configs.config_of_decode, case.feature.split("+")
    with (
        mock.patch.object(configs, "config_of_decode", lambda *given: case.chosen or of_table(*given)),
        mock.patch.object(decode, "of_device", lambda device: case.target),
        mock.patch.object(append, "of_device", lambda device: case.target),
        mock.patch.object(prefix, "LEAST_SAVED", 1),
    ):
        if case.kernel == "append":
            return append.bind(_append(case, words)).kernel(case.aligned)
        bound = prefix.bind(_decode(case, words))
        if isinstance(bound, prefix.Prefixed):
            bound = bound.first if "prefix" in words else bound.rest
        if case.kernel == "merge":
            return merging.kernel(bound.dim_v, bound.out_dtype, case.aligned, bound.sequences > 0)
        return bound.kernel(case.aligned, bound.latent)


def _ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="cpu")


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _shapes(case, words: list[str]) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
    """Caches, a page table and new tokens' keys and values, all of which hold nothing."""
    stored = next((BITS[word] for word in words if word in BITS), case.dtype)
    dims = LATENT if case.head_dim == LATENT[0] else (case.head_dim, case.head_dim)
    page = TOKENS if "paged" in words else 5 if "rows" in words else 0
    places, queries = (page, LENGTH // page) if page else (LENGTH, 0), QUERIES[case.mask]
    caches = [_numbers(BATCH * max(places[1], 1), places[0], HEADS, dim, dtype=stored) for dim in dims]
    lead = (BATCH * queries,) if "ragged" in words else (BATCH, queries)
    return caches, _ints(BATCH, places[1]) if page else None, [_numbers(*lead, HEADS, dim, dtype=stored) for dim in dims]


def _decode(case, words: list[str]) -> DecodeCall:
    caches, table, (new, _) = _shapes(case, words)
    heads = HEADS * (MANY if "group" in words else GROUP)
    queries, bits = QUERIES[case.mask], caches[0].dtype != case.dtype
    changes: dict = {"softcap": 30.0, "alibi_slopes": _numbers(1, heads), "sink": _numbers(heads)}
    scales = {"k_scale": _numbers(*caches[0].shape[:3]), "v_scale": _numbers(HEADS)}
    return DecodeCall(
        q=_numbers(*new.shape[:-2], heads, new.shape[-1], dtype=case.dtype),
        k_cache=caches[0],
        v_cache=caches[0][..., : LATENT[1]] if "latent" in words else caches[1],
        seqlens=_ints(BATCH),
        page_table=table,
        cu_seqlens_q=_ints(BATCH + 1) if "ragged" in words else None,
        max_seqlen_q=queries,
        cache_batch_idx=None,
        leftpad=None,
        tree=torch.ones(1, queries, queries, dtype=torch.bool, device="cpu") if "tree" in words else None,
        shared_prefix=LENGTH // 2 if {"prefix", "joined"} & set(words) else 0,
        split=None,
        mask=Causal(),
        scale=1.0,
        rotary=Rotary(_numbers(LENGTH, 16), _numbers(LENGTH, 16), False) if "rotary" in words else None,
        share=Share(1, 2, 16) if "ranks" in words else None,
        **(changes if "scores" in words else {}),
        **(scales if bits else {}),
    )


def _append(case, words: list[str]) -> AppendCall:
    caches, table, new = _shapes(case, words)
    return AppendCall(
        k_cache=caches[0],
        v_cache=caches[1],
        k=new[0],
        v=new[1],
        cache_seqlens=_ints(BATCH),
        page_table=table,
        cache_batch_idx=None,
        cu_seqlens=_ints(BATCH + 1) if "ragged" in words else None,
        rotary_cos=_numbers(LENGTH, 16) if "rotary" in words else None,
        rotary_sin=_numbers(LENGTH, 16) if "rotary" in words else None,
        rotary_first=None,
        interleaved=False,
        share=Share(1, 2, 16) if "ranks" in words else None,
    )
