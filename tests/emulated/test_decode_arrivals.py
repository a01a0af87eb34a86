"""Which thread blocks add up a unit's pieces, carried out without a GPU: the bits are the same whichever and however many; as test_decode.py."""

import pytest
import torch
from decode_problems import DecodeCase, held, made
from emulator.backend import NEEDED
from emulator.machine import PACES
from emulator.warp import Warp
from test_decode import run

from tilewise.backends.hopper.decode.call import Cut

pytestmark = NEEDED

FOREVER = 1 << 30  # polls
RANGE = 0, 20, FOREVER


class Watched:
    """What blocks do with the words of a unit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sharing: list[int] = []  # how many blocks share a unit, as each of them says
        self.left = 0  # blocks that have waited long enough
        count, swap = Warp.count_global, Warp.swap_global

        def counted(warp, addresses, m, kind, most):
            self.sharing.append(int(most[0]) + 1)
            return count(warp, addresses, m, kind, most)

        def swapped(warp, addresses, m, kind, compared, value):
            before = swap(warp, addresses, m, kind, compared, value)
            self.left += int(before[0] == compared[0])
            return before

        monkeypatch.setattr(Warp, "count_global", counted)
        monkeypatch.setattr(Warp, "swap_global", swapped)

    def taken(self) -> tuple[tuple[int, ...], int]:
        """What has been seen since the last time."""
        found = tuple(sorted(set(self.sharing))), self.left
        self.sharing, self.left = [], 0
        return found


CASES = [
    (DecodeCase(lengths=(900, 3), heads=(9, 1), dims=(64, 40), queries=2), 16, 14),
    # All but the last piece's block share. Of more than 24, 48 and 96 pieces; with two warpgroups; with pieces of a fixed size.
    pytest.param(DecodeCase(lengths=(2000, 40), heads=(9, 1), dims=(64, 64), queries=2, sink=True), 32, 30, marks=pytest.mark.slow),
    pytest.param(DecodeCase(lengths=(3800,), heads=(5, 1), dims=(64, 64), queries=2), 60, 59, marks=pytest.mark.slow),
    pytest.param(DecodeCase(lengths=(6600,), heads=(7, 1), dims=(64, 64)), 104, 103, marks=pytest.mark.slow),
    pytest.param(DecodeCase(lengths=(500,), heads=(17, 1), dims=(128, 128), queries=5), 7, 6, marks=pytest.mark.slow),
    pytest.param(DecodeCase(lengths=(900, 100), heads=(24, 1), dims=(64, 64), queries=4, split=64), 6, 5, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("case", "slots", "blocks"), CASES, ids=str)
def test_blocks_share_a_unit_or_leave_it_to_the_last(case, slots, blocks, monkeypatch):
    """Where the copy engine is slow some blocks come late: those that wait but shortly leave before, and others leave none."""
    call, watched, want, seen = made(case), Watched(monkeypatch), None, {}
    for polls in RANGE:
        for seed, pace in enumerate(PACES):
            found = run(call, pace, seed, slots, Cut(rows=128, elements_per_extra_tile=1 << 20, solo_speedup_x4=0, polls=polls))
            seen[polls, pace] = watched.taken()
            if want is None:
                held(call, *(want := found))
            assert all(map(torch.equal, found, want))
    assert {seen[FOREVER, pace] for pace in PACES} == {((blocks,), 0)}
    some, left = seen[0, "lazy"]
    assert not some and left >= blocks - 1
    some, left = seen[20, "lazy"]
    assert some and 1 < min(some) < blocks and left > 0


def test_blocks_with_more_to_do_wait_for_no_others(monkeypatch):
    """Nor does the last one of a unit add up what others wait for; of several units each has words of its own."""
    call = made(DecodeCase(lengths=(900, 700, 3, 400), heads=(9, 1), dims=(64, 40), queries=(2, 4, 0, 1)))
    watched, want = Watched(monkeypatch), run(call, slots=13, cut=Cut(elements_per_extra_tile=1 << 20, solo_speedup_x4=0, polls=1))
    held(call, *want)
    for polls in (0, FOREVER):
        for seed, pace in enumerate(PACES):
            watched.taken()
            assert all(
                map(torch.equal, run(call, pace, seed, 13, Cut(elements_per_extra_tile=1 << 20, solo_speedup_x4=0, polls=polls)), want)
            )
    assert watched.taken() == ((4,), 0)
