"""What the kernels in 8 bits cover, and how they are cut."""

from dataclasses import replace

import pytest
import torch
from eight_bits_problems import Quantised, made

from tilewise.backends.eight_bits import RECIPES, signs
from tilewise.backends.hopper import Hopper, coverage
from tilewise.backends.hopper.eight_bits import call as eight_bits
from tilewise.backends.hopper.eight_bits.config import (
    CHUNK,
    FEW_KEYS,
    GROUP,
    TILES_OF_WIDE_VALUES,
    configure,
    configure_quantiser,
    sign_words,
)
from tilewise.errors import UnsupportedError


def refused(call, **changes) -> str:
    return "; ".join(coverage.refused(replace(call.problem, device="cuda", **changes)))


def test_what_is_covered():
    assert Hopper.eight_bits
    given = (*(Quantised("given", per=("token", *each)) for each in (("tile", "head"), ("token", "token"))), Quantised("given int8"))
    for case in (*(Quantised(recipe) for recipe in RECIPES), *given):
        call = replace(made(case), softcap=2.0, sink=torch.zeros(2), alibi_slopes=torch.zeros(1, 2))
        assert refused(call) == ""
        assert eight_bits.kernels(call)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (Quantised(dims=(264, 64)), {}, "it takes head_dim and head_dim_v up to 256, not 264 and 64"),
        (Quantised("given", dims=(72, 64)), {}, "in 8 bits it takes head_dim and head_dim_v that are multiples of 16, not 72 and 64"),
        (
            Quantised("given"),
            {"v_dtype": torch.bfloat16},
            "beside q in torch.float8_e4m3fn it takes v in float8_e4m3fn, not torch.bfloat16",
        ),
    ],
    ids=str,
)
def test_what_is_not_covered(case, changes, message):
    assert message in refused(made(case), **changes)


def test_a_negative_scale_beside_int8():
    with pytest.raises(UnsupportedError, match="scale must be positive beside q in int8"):
        eight_bits.by_transposer(made(Quantised("given int8", scale=-1.0)))


@pytest.mark.parametrize("dims", TILES_OF_WIDE_VALUES, ids=str)  # and so of others
@pytest.mark.parametrize("mask_kind", ["full", "causal", "band", "varlen", "tiles"])
def test_tiles_lie_in_groups_of_keys_and_fit_shared_memory(dims, mask_kind):
    for changes in ({}, {"softcap": True}, {"wide_values": True}, {"wide_values": True, "softcap": True}, {"tokens_k": True}):
        config = configure(torch.int8, torch.bfloat16, *dims, mask_kind, centred=True, **changes)
        assert GROUP % config.tile_n == 0 and config.pieces_of_O > 0


@pytest.mark.parametrize("fields", [{"promote": False}, {"pingpong": True}, {"wide_values": True, "promote": True}], ids=str)
def test_pieces_are_refused_where_nothing_makes_them(fields):
    with pytest.raises(ValueError, match=r"pieces=2 goes with promote, without wide_values and pingpong, got .*; leave pieces at 1"):
        configure(torch.int8, torch.bfloat16, 256, 256, "full", **{"pieces": 2} | fields)


@pytest.mark.parametrize("way", ["int8", "fp8", "given", "int8_qk"])
def test_a_wide_v_is_promoted_where_there_are_many_keys_or_it_is_not_centred(way):
    """In pieces of one launch; V of 16 bits never is."""
    for seqlen_k in (FEW_KEYS, FEW_KEYS + 1):
        call = made(Quantised(way, 1, seqlen_k, heads=(1, 1), dims=(256, 200)))
        config = eight_bits.config_of(call)
        promoted = way == "given" or (way in ("int8", "fp8") and seqlen_k > FEW_KEYS)
        assert (config.promote, config.pieces) == ((True, 2) if promoted else (False, 1))
        assert [launch for launch, _, _ in eight_bits.kernels(call)].count(eight_bits.LAUNCH) == 1


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_signs_of_the_rotation(dim):
    """Bits k and 16 + k of a word are the k-th pair's, of a thread's 32 numbers: the channels in their order are those of the contract."""
    config, found = configure_quantiser(torch.bfloat16, torch.int8, dim), {}
    for sharer, words in enumerate(sign_words(config)):
        for n in range(config.numbers):
            negative = words[n // 32] >> (n % 32 // 2 + 16 * (n % 2)) & 1
            found[config.channel(n) + CHUNK * sharer] = -1.0 if negative else 1.0
    assert [found[channel] for channel in range(dim)] == signs(dim, torch.device("cpu")).tolist() and len(found) == dim
