"""What the decode kernel of latent caches covers, and how it is cut."""

from dataclasses import replace

import pytest
import torch
from decode_problems import DecodeCase, made

from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode import extents, prefix
from tilewise.backends.hopper.decode.config import LATENT_TILES, TILE_M, configure, latent_dims, shipped
from tilewise.problem import Rotary

CALL = made(DecodeCase(lengths=(5, 9), heads=(16, 1), dims=(576, 512), latent=True))
PAGES = made(DecodeCase(lengths=(5, 9), heads=(16, 1), dims=(576, 512), latent=True, page=12))
SHARED = 232_448 - 3072  # bytes of shared memory, but for barriers and small numbers


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"v_cache": CALL.v_cache.clone()}, "with head_dim 576 v_cache has to be a view of the same memory, k_cache[..., :512]"),
        ({"v_cache": CALL.k_cache[..., 64:]}, "with head_dim 576 v_cache has to be a view of the same memory, k_cache[..., :512]"),
        ({"k_cache": PAGES.k_cache, "v_cache": PAGES.v_cache, "page_table": PAGES.page_table}, "a multiple of 8 tokens, not of 12"),
        ({"rotary": Rotary(*torch.zeros(2, 9, 32), False)}, "it rotates no queries of head_dim 576"),
        ({"v_cache": CALL.k_cache[..., :500]}, "that are multiples of 8, not 576 and 500"),
        ({"k_cache": CALL.k_cache[..., :512], "q": CALL.q[..., :512], "v_cache": CALL.k_cache}, "multiples of 8, not 512 and 576"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_what_it_does_not_cover(changes, sentence):
    (broadcast,) = decoding.why_not(replace(CALL, **changes))
    assert broadcast.endswith(sentence)
    assert decoding.bind(replace(CALL, **changes)) is None


def test_views_are_known_whatever_the_steps_of_single_heads():
    latent = torch.zeros(2, 9, 576, dtype=torch.bfloat16)
    k, v = latent.unsqueeze(2), latent[..., :512].unsqueeze(2)
    assert k.stride() != v.stride() and extents.latent(replace(CALL, k_cache=k, v_cache=v))
    assert not extents.latent(replace(CALL, k_cache=k, v_cache=torch.zeros(2, 9, 1, 512, dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("dims", "tile"),
    [
        ((576, 512), (576, 512)),
        ((288, 256), (320, 256)),
        ((448, 384), (576, 512)),
        ((256, 256), None),
        ((584, 512), None),
        ((264, 272), None),
    ],
    ids=str,
)
def test_tiles(dims, tile):
    assert latent_dims(*dims) == tile


@pytest.mark.parametrize("dims", LATENT_TILES, ids=str)
def test_what_it_takes_fits_into_shared_memory(dims):
    for page_size, box in ((None, 0), (8, 8), (48, 16), (64, 64), (256, 64)):
        config = configure(torch.bfloat16, *dims, page_size)
        assert config.latent and config.box == box and config.threads == 256 and decoding.kernel_of(config).launch == decoding.LATENT
        of_Q, of_P, of_K = TILE_M * config.head_dim, TILE_M * config.tile_n, config.tile_n * config.head_dim
        assert config.kv_stages >= 2 and 2 * (of_Q + of_P + config.kv_stages * of_K) <= SHARED
    assert all(config.latent for config in shipped(torch.bfloat16, *dims))
    assert decoding.shipped(torch.bfloat16, *dims)


def test_rows_side_by_side_read_a_tile_together(monkeypatch):
    monkeypatch.setattr(decoding.plan, "num_sms", lambda device: 132)
    for queries, heads, columns in ((1, 16, 1), (4, 16, 1), (1, 128, 2), (2, 128, 4), (3, 128, 6), (1, 80, 2)):
        call = made(DecodeCase(lengths=(5, 9), heads=(heads, 1), queries=queries, dims=(576, 512), latent=True))
        need = decoding._need(call, decoding.config_of(call))
        assert (need.columns, need.blocks) == (columns, 132 // columns)
    for queries, heads, columns in (((1, 300), 16, 1), ((1, 300), 128, 2), ((1, 300), 80, 2)):
        call = made(DecodeCase(lengths=(5, 9), heads=(heads, 1), queries=queries, dims=(576, 512), latent=True))
        assert decoding._need(call, decoding.config_of(call)).columns == columns


def test_a_prefix_saves_what_is_read_once(monkeypatch):
    call = made(DecodeCase(lengths=(200, 200, 200), heads=(16, 1), dims=(576, 512), latent=True, prefix=128))
    monkeypatch.setattr(prefix, "LEAST_SAVED", 2 * 128 * 576 * 2)
    assert prefix.pays(call) and not prefix.pays(replace(call, shared_prefix=127))
