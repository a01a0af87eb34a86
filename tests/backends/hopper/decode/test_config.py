"""How the decode kernel is cut."""

from dataclasses import replace

import pytest
import torch

from tilewise.backends.hopper.decode import latent
from tilewise.backends.hopper.decode.config import LATENT_TILES, LAUNCHED, TILES, configure, shipped

BF16 = torch.bfloat16
REGISTERS, THREADS, UNIT = 65536, 3 * 128, 8  # of a multiprocessor; of a block of three warpgroups; in which a thread gets registers


@pytest.mark.parametrize("dims", [*TILES, *LATENT_TILES], ids=str)
def test_warpgroups_ask_for_no_more_registers_than_their_launch_has(dims):
    """Or one waits for ever for what none gives back. The launch gets as many a thread as a multiprocessor has for it."""
    assert LAUNCHED == 3 * (REGISTERS // THREADS // UNIT * UNIT)
    assert latent.LEFT + latent.RIGHT + latent.LOADER <= LAUNCHED
    several = [config for config in shipped(BF16, *dims) if config.three]
    assert several or dims in [(96, 96), *LATENT_TILES]
    for config in several:
        assert sum(config.registers) <= LAUNCHED and not any(each % UNIT for each in config.registers)


def test_how_much_faster_a_block_is_alone():
    """In quarters, by hand: a tile of 64 keys at head_dim 128 has 2,520 clocks to come, and takes one warpgroup 1,252, and two 1,764."""
    e4m3 = {"cached": (torch.float8_e4m3fn, torch.float8_e4m3fn)}
    for dims, fields, expected in (
        ((128, 128), {}, 8),
        ((128, 128), {"consumers": 2}, 5),
        ((128, 128), e4m3, 5),
        ((64, 64), {}, 7),
        ((64, 64), {"few": True}, 5),
        ((64, 64), e4m3, 4),  # no faster
        ((256, 256), {}, 8),
        ((576, 512), {}, 7),
    ):
        assert configure(BF16, *dims, None, **fields).solo_speedup_x4 == expected


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"scales": ("head", "head")}, "scales are of caches in 8 bits"),
        ({"raw_stages": 2}, "is loaded in stages of its own"),
        ({"common": "even", "onto": True}, "join none"),
        ({"onto": True, "share": True}, "hold all tokens"),
        ({"bias": torch.bfloat16}, "are attention's"),
        ({"box": 24}, "a part of a tile"),
    ],
    ids=str,
)
def test_what_no_kernel_is(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(configure(torch.bfloat16, 128, 128, 64), **fields)
