"""The bits of a mask that a thread keeps of a row: those of its own numbers."""

import random

import pytest

from tilewise.sm90.jit import why_no_compiler

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler()))


@pytest.mark.parametrize("first", [0, 2, 4, 6])
def test_a_threads_numbers_of_a_bitmaps_row(first):
    from tilewise.backends.hopper.visible.keys import gathered
    from tilewise.sm90 import fragments

    draw = random.Random(first)
    for row in (0, (1 << 128) - 1, *(draw.getrandbits(128) for _ in range(200))):
        words = [row >> 32 * w & 0xFFFFFFFF for w in range(4)]
        signed = [word - (word >> 31 << 32) for word in words]  # as int32 holds them
        expect = sum((row >> first + fragments.column(c) & 1) << c for c in range(32))
        assert gathered([word >> first for word in signed]) == expect
