"""The Triton backend's speed does not depend on the data: a finite input takes at most 1.25 times as long as a normal one,
and NaN that a mask hides at most 3 times.

NaN and infinities that are seen, for which its kernels run a second time, are printed (-s), and held to nothing. To be run with nothing else
on the GPU.
"""

import pytest
from alone import ALONE
from hard_inputs import MASKS, ratios
from needs_triton import NEEDS_TRITON

from tilewise.backends.triton import Triton
from tilewise.bench.sets.distributions import DISTRIBUTIONS, HIDDEN

pytestmark = NEEDS_TRITON


@ALONE
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_finite_input_is_slow(head_dim, mask, grad):
    found = ratios(Triton(), Triton().backward, head_dim, mask, grad)
    pass_ = "backward" if grad else "forward"
    print(f"head_dim {head_dim}, {mask!r:.40}, {pass_}: " + ", ".join(f"{name} {x:.2f}" for name, x in found.items()))
    held = {name: x for name, x in found.items() if DISTRIBUTIONS[name].finite or name in HIDDEN}
    slow = {name: x for name, x in held.items() if x > DISTRIBUTIONS[name].limit}
    assert not slow, slow
