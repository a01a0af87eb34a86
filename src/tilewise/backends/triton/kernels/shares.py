"""Keys of a cache that holds a rank's share of every sequence: `problem.Share` in kernels. WORLD 1: the cache holds all, and nothing is computed."""

import triton
import triton.language as tl

FARTHEST = tl.constexpr((1 << 30) - 1)  # position; with what a window adds it still has 32 bits


@triton.jit
def held(tokens, RANK: tl.constexpr, WORLD: tl.constexpr, RUN: tl.constexpr):
    """How many of a sequence's first `tokens` tokens, 0 or more, the rank holds."""
    if WORLD > 1:
        tokens = tokens // (RUN * WORLD) * RUN + tl.minimum(tl.maximum(tokens % (RUN * WORLD) - RANK * RUN, 0), RUN)
    return tokens


@triton.jit
def place_of(keys, RANK: tl.constexpr, WORLD: tl.constexpr, RUN: tl.constexpr):
    """The positions of keys in their sequence."""
    if WORLD > 1:
        keys = (keys // RUN * WORLD + RANK) * RUN + keys % RUN
    return keys
