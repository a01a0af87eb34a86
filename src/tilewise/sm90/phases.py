"""What a warp of a traced kernel may be doing, and where it notes it: the vocabulary that kernels and pictures share.

A traced kernel writes int32 pairs into `events`, (blocks, WARPS, SLOTS, 2), zero before: in a warp's slot 0 (multiprocessor, Phase.PLACE),
then (clock, phase) each time it enters a phase, and at last (clock, Phase.END) and (nanoseconds, Phase.TIME). The clock is the
multiprocessor's own, its low 32 bits; the nanoseconds are the machine's, and tell how long a clock lasts. A warp with all slots full
notes nothing more.
"""

from enum import IntEnum

WARPS = 16  # of a block, at most
SLOTS = 1024  # of a warp; a power of two


class Phase(IntEnum):
    """From its stamp to the warp's next."""

    NONE = 0
    PLACE = 1
    TIME = 2
    START = 3  # prologue
    EMPTY = 4  # the loader waits for an empty stage
    LOAD = 5  # asks for a tile, or copies it
    WAIT = 6  # for a tile
    TURN = 7  # for its turn
    ISSUE = 8  # both products at once
    SCORES = 9  # S = Q K^T, until it is there; backward with dP
    SOFTMAX = 10  # with the wait for O, where both products were issued at once; backward P and dS
    OUTPUT = 11  # O += P V, until it is there; backward what is added to dV, dQ and dK
    STORE = 12
    END = 13
    ADD = 14  # to a sum that other blocks add to, too
