"""Speed does not depend on the data: a finite input takes at most 1.25 times as long as a normal one, NaN and infinities at most 3 times, or `ABOVE`.

`tilewise bench --set hard-inputs` has the whole table. To be run with nothing else on the GPU.
"""

import pytest
from alone import ALONE
from hard_inputs import MASKS, ratios
from hopper_problems import NEEDS_HOPPER

from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward import call as gradients
from tilewise.bench.sets.distributions import DISTRIBUTIONS
from tilewise.masks import Causal, SlidingWindow

pytestmark = NEEDS_HOPPER

# What a backward pass under a causal or window mask takes beyond those limits (docs/numerics.md, Repairs' time): may fall, not rise.
ABOVE = {"cauchy": 1.85, "largest scores": 3.5, "nan in v": 3.3, "inf in v": 3.3, "overflown": 4.5}
ABOVE_OF_WINDOWS = ABOVE | {"largest scores": 4.2, "nan in v": 3.6, "inf in v": 3.6, "overflown": 5.0}


@ALONE
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_input_is_slow(head_dim, mask, grad):
    found = ratios(Hopper(), gradients.backward, head_dim, mask, grad)
    limits = {name: DISTRIBUTIONS[name].limit for name in found}
    if grad and isinstance(mask, (Causal, SlidingWindow)):
        limits |= ABOVE_OF_WINDOWS if isinstance(mask, SlidingWindow) else ABOVE
    slow = {name: x for name, x in found.items() if x > limits[name]}
    assert not slow, slow
