"""Where a block's loops over tiles of keys meet: every tile that is loaded is taken once, or the launch would wait for ever."""

import itertools

import pytest
import torch

from tilewise.hopper.compile import why_no_compiler

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler()))


@pytest.mark.parametrize("sees", ["until", "interval", "rows"])
@pytest.mark.parametrize("changes", [{}, {"softcap": True}], ids=["from zero", "as it is"])
def test_loops_meet(changes, sees):
    from tilewise.backends.hopper import config
    from tilewise.backends.hopper.forward import seams
    from tilewise.backends.hopper.visible import Walk

    made = config.configure(torch.bfloat16, 128, 128, sees, **changes)
    assert made.from_zero == (not changes)
    for first, last, a, b in itertools.product(range(5), repeat=4):
        free = min(max(a, first), last)
        if first >= last or (sees == "until" and (first, free) != (0, 0)):
            continue
        walk = Walk(first, last, free, min(max(b, free), last), first, last)
        masked, unmasked = seams.__wrapped__(walk, last - 1, made)
        assert first <= masked <= unmasked <= last - 1
        assert sees != "until" or masked == first  # there is no loop for what lies before
        assert set(range(masked, unmasked)) <= set(range(walk.free_first, walk.free_last))
        if made.from_zero and masked < unmasked:  # the tile ahead was seen whole, by every row
            assert unmasked < walk.free_last
