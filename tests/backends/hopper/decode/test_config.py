"""How the decode kernel is cut."""

import pytest
import torch

from tilewise.backends.hopper.decode import latent
from tilewise.backends.hopper.decode.config import LATENT_TILES, LAUNCHED, TILES, shipped

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
