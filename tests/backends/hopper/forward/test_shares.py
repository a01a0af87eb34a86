"""How the units that are left over are shared: forward/scheduler.py's arithmetic, run on the host by the DSL."""

import itertools

import pytest
import torch

from tilewise.sm90.jit import why_no_compiler

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler()))
TURNS = 3


@pytest.fixture(scope="module")
def cut():
    """(first, share, pieces): pieces[cluster, turn] is (which, first, last, slot, begin, end)."""
    from cutlass.cute.runtime import from_dlpack

    from tilewise.backends.hopper.forward import scheduler
    from tilewise.sm90.dsl import Int32, cute, cutlass

    @cute.jit
    def fill(found: cute.Tensor, shares: cute.Tensor, units: Int32, tiles: Int32, clusters: Int32):
        shared = scheduler.shared_of(units, tiles, clusters, 128)
        shares[0], shares[1] = shared.first, shared.share
        for cluster in cutlass.range(clusters, unroll=1):
            for turn in cutlass.range(TURNS, unroll=1):
                which, span = scheduler.piece(cluster, turn, units - shared.first, shared)
                begin, end = span.slots
                numbers = which, span.first, span.last, span.slot, begin, end
                for i in cutlass.range_constexpr(6):
                    found[cluster, turn, i] = numbers[i]

    def run(units, tiles, clusters):
        found, shares = torch.full((clusters, TURNS, 6), -7, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        fill(from_dlpack(found), from_dlpack(shares), units, tiles, clusters)
        return (*shares.tolist(), found.tolist())

    return run


CASES = [
    *((units, tiles, clusters) for units in (1024, 2752, 3072) for tiles in (1, 8, 26, 205) for clusters in (66, 132)),
    *itertools.product((1, 2, 7, 65, 66, 67, 131), (1, 3, 4, 5, 17, 128), (66, 132)),
    (5, 1000, 7),
    (6, 3, 7),
    (14, 9, 7),
]


def test_every_tile_is_visited_once_and_every_piece_has_a_slot(cut):
    for units, tiles, clusters in CASES:
        first, share, pieces = cut(units, tiles, clusters)
        left = units - first
        assert first % clusters == 0 and 0 <= left < clusters
        slots, visited = {}, {}
        for cluster in range(clusters):
            assert pieces[cluster][TURNS - 1][0] == left, "no third piece"
            had = 0
            for which, n0, n1, slot, begin, end in pieces[cluster][: TURNS - 1]:
                if which == left:
                    continue
                assert 0 <= which < left and 0 <= n0 < n1 <= tiles and begin <= slot < end and slot not in slots
                slots[slot] = which
                visited.setdefault(which, []).append((slot, n0, n1, begin, end))
                had += n1 - n0
            assert had <= share
        assert set(visited) == set(range(left)) and all(slot < 2 * clusters for slot in slots)
        for parts in visited.values():
            parts.sort()
            assert [slot for slot, *_ in parts] == list(
                range(*parts[0][3:])
            )  # all that the last one to come waits for, in the order of keys
            assert parts[0][1] == 0 and parts[-1][2] == tiles and all(a[2] == b[1] for a, b in itertools.pairwise(parts))


def test_who_has_how_much(cut):
    """By hand: 2,048 units are 1,024 for pairs, of which 66 pairs have 15 each, and 34 of 64 tiles are left: 33 tiles a pair."""
    assert cut(1024, 64, 66)[:2] == (990, 33)
    assert cut(1024, 103, 132)[:2] == (924, 79)
    assert cut(1024, 4, 66)[:2] == (990, 4)
    assert cut(16, 128, 132)[:2] == (0, 16) and cut(1, 128, 132)[:2] == (0, 8)  # few queries: up to sixteen clusters a unit
    assert cut(132, 64, 132)[:1] == (132,)
