"""Which thread block of a decode launch computes what (decode/scheduler.py), carried out alone: every tile once, pieces in order, no later than
equal shares by the model that chooses.
"""

import random
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from emulator.backend import NEEDED, Emulated

from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode.config import configure
from tilewise.backends.hopper.decode.operands import Lengths, Tensors, Work
from tilewise.backends.tables.window import FAR, Window
from tilewise.sm90 import jit

pytestmark = NEEDED

TILE = PAGE = 64
MOST = 48  # pieces of a block
CONFIG = configure(torch.bfloat16, 128, 128, PAGE)


class Piece(NamedTuple):
    sequence: int
    head: int
    row0: int
    first: int
    last: int
    number: int
    count: int
    origin: int
    slot: int
    whole: int


class Launch(NamedTuple):
    """rows: of a unit; queries: tokens of a sequence, of which each has `group` rows."""

    lengths: tuple[int, ...]
    columns: int = 1
    blocks: int = 12
    heads: int = 1
    rows: int = 64
    queries: int = 1
    group: int = 1
    least: int = 1
    window: int = FAR

    @property
    def row_tiles(self) -> int:
        return -(-self.queries * self.group // self.rows)

    def tiles(self, length: int) -> range:
        first = max(0, length - self.queries - self.window) // TILE
        return range(first, max(-(-length // TILE), first + 1))

    @property
    def units(self) -> dict[tuple[int, int, int], range]:
        """(sequence, head, first row): tiles of keys."""
        heads, steps = range(self.heads), range(0, self.row_tiles * self.rows, self.rows)
        return {(b, head, row0): self.tiles(n) for b, n in enumerate(self.lengths) for head in heads for row0 in steps}

    def of_column(self) -> list[int]:
        """Tiles of the units of a column."""
        each = self.heads // self.columns * self.row_tiles
        return [len(self.tiles(n)) for n in self.lengths for _ in range(each)]


def arguments(config):
    from tilewise.sm90.dsl import Int32

    tensors, lengths, work, window, *_ = decoding.arguments(config)
    return [jit.tensor(Int32, *(jit.size() for _ in range(4)), aligned=False), tensors, lengths, work, window]


def pieces(launch: Launch, alone: int) -> list[list[Piece]]:
    """Of each block, one column after the other."""
    batch, ints = len(launch.lengths), {"dtype": torch.int32, "device": "cpu"}
    found = torch.full((launch.columns, launch.blocks, MOST, len(Piece._fields)), -1, **ints)
    numbers = {"dtype": torch.bfloat16, "device": "cpu"}
    q, k = torch.zeros(batch, launch.queries, launch.heads * launch.group, 8, **numbers), torch.zeros(1, PAGE, launch.heads, 8, **numbers)
    sums, lse = (torch.zeros(*shape, dtype=torch.float32, device="cpu") for shape in ((1, launch.rows, 8), (2, 1, launch.rows)))
    table = torch.zeros(batch, -(-max(*launch.lengths, 1) // PAGE), **ints)
    lengths = Lengths(torch.tensor(launch.lengths, **ints), table, None, None, None, None)
    grid = launch.columns, launch.blocks
    work = Work(sums, lse, torch.zeros(1, **ints), *grid, launch.queries, launch.least, 0, 0, 1, 0, alone, 0)
    of_q = torch.zeros(batch, launch.heads * launch.group, launch.queries, dtype=torch.float32, device="cpu")
    given = found, Tensors(q, k, k, q, of_q), lengths, work, Window(-launch.window, 0)
    Emulated().compiled("device_functions:launch_pieces", arguments, CONFIG)(*given)
    return [[Piece(*each) for each in block if each[0] >= 0] for block in found.flatten(0, 1).tolist()]


def sound(launch: Launch, found: list[list[Piece]]) -> None:
    """Each unit's tiles once, in pieces of following blocks in the order of keys, each with a slot of its own, and each unit with a counter."""
    parts, slots, counters, units = {}, {}, {}, launch.units
    of_blocks = launch.columns * launch.blocks
    for g, block in enumerate(found):
        for piece in block:
            unit = piece[:3]
            parts.setdefault(unit, []).append((g, piece))
            assert piece.head // (launch.heads // launch.columns) == g // launch.blocks
            if piece.count > 1:
                assert 0 <= piece.slot < 2 * of_blocks and slots.setdefault(piece.slot, unit) == unit
                assert 0 <= piece.origin < of_blocks and counters.setdefault(piece.origin, unit) == unit
    assert set(parts) == set(units)
    assert len(slots) == sum(len(each) for each in parts.values() if len(each) > 1)
    for unit, each in parts.items():
        assert [piece.number for _, piece in each] == list(range(len(each))) and all(piece.count == len(each) for _, piece in each)
        assert all(before + 1 == g for (before, _), (g, _) in pairwise(each))
        assert [n for _, piece in each for n in range(piece.first, piece.last)] == list(units[unit])


def through(loads: list[int], blocks: int, faster: float) -> float:
    """When blocks with so many tiles are done that share what memory brings alike, in tiles as a block without others goes through them."""
    left, time, before = sorted(x for x in loads if x), 0.0, 0
    for i, load in enumerate(left):
        time += (load - before) * max(1.0, faster * (len(left) - i) / blocks)
        before = load
    return time


def held_to_the_model(launch: Launch, found: list[list[Piece]], alone: int) -> bool:
    """That whole units are done no later than equal shares, both of which take what memory does: these one more unit, and the sum of pieces.

    Returns whether they are whole.
    """
    (whole,) = {piece.whole for block in found for piece in block}
    if not whole:
        return False
    units, blocks = launch.of_column(), launch.blocks
    faster = max(alone / 4 / launch.row_tiles, 1.0)
    even = max(-(-sum(units) // blocks), launch.least)
    for column in range(launch.columns):
        mine = found[column * blocks : (column + 1) * blocks]
        assert all(piece.count == 1 for block in mine for piece in block)
        time = through([sum(piece.last - piece.first for piece in block) for block in mine], blocks, faster)
        assert time <= max(faster * sum(units) / blocks, even) + 2 * CONFIG.fixed + launch.least
    return True


K = 1024


CHOICES = {
    "whole, although two blocks might share each": (Launch((K,) * 64, blocks=132, least=2), True, 64),
    "two units of a sequence": (Launch((K,) * 64, blocks=132, queries=2, group=64, least=4), True, 128),
    "two units a block": (Launch((K,) * 256, blocks=132, least=2), True, 128),
    "some of one tile": (Launch((1, *(200,) * 20, 1), blocks=22, least=2), True, 22),
    "of a window": (Launch((8 * K,) * 8, blocks=12, window=1000), True, 8),
    "equal, as whole ones take too long": (Launch((8 * K,) * 64, blocks=132, least=2), False, 132),
    "equal, although it takes long to add many rows up": (Launch((8 * K,) * 64, blocks=132, least=8), False, 132),
    "equal, as it is a unit for each block": (Launch((K,) * 16, columns=8, blocks=16, heads=8, least=2), False, 128),
    "equal, as it is two units for each block": (Launch((K,) * 32, columns=8, blocks=16, heads=8, least=2), False, 128),
    "equal, as half of the blocks would be idle": (Launch((4 * K,) * 4, columns=2, blocks=16, heads=4, least=2), False, 32),
    "equal, as one is long": (Launch((100 * K, *(K,) * 20), blocks=132, least=2), False, 132),
    "equal, as it is one unit": (Launch((8 * K,), blocks=132), False, 128),
    "equal, as lengths are ragged": (Launch(tuple(range(0, 4 * K, 50)), blocks=66, least=2), False, 66),
}


@pytest.mark.parametrize(("launch", "whole", "blocks"), CHOICES.values(), ids=CHOICES)
def test_what_is_chosen(launch, whole, blocks):
    """Whether units are whole, and how many blocks have anything to do."""
    found = pieces(launch, CONFIG.alone)
    sound(launch, found)
    assert held_to_the_model(launch, found, CONFIG.alone) == whole
    assert sum(map(bool, found)) == blocks


def drawn(draw: random.Random) -> Launch:
    columns, batch = draw.choice((1, 1, 2)), draw.choice((1, 2, 3, 5, 9, 20, 40, 90))
    even, spread = draw.choice((100, 1000, 5000, 30_000)), draw.choice((0.0, 0.05, 0.3, 1.0))
    lengths = tuple(0 if draw.random() < 0.05 else int(even * (1 + spread * draw.uniform(-1, 1))) for _ in range(batch))
    rows = draw.choice((16, 64))
    return Launch(
        lengths,
        columns=columns,
        blocks=draw.choice((7, 16, 33, 66, 132)) // columns,
        heads=columns * draw.choice((1, 1, 2)),
        rows=rows,
        queries=draw.choice((1, 3)),
        group=draw.choice((4, rows)),
        least=draw.choice((1, 2, 8)),
        window=draw.choice((FAR, FAR, 700)),
    )


def choices(seed: int, count: int) -> list[bool]:
    """Whether units are whole in so many launches, each of which is checked with equal shares, too."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        launch, alone = drawn(draw), draw.choice((CONFIG.alone, CONFIG.alone, 6, 4))
        if len(launch.of_column()) < MOST // 3 * launch.blocks:
            sound(launch, pieces(launch, 0))
            sound(launch, chosen := pieces(launch, alone))
            found.append(held_to_the_model(launch, chosen, alone))
    return found


def test_lengths_at_random():
    assert set(choices(0, 12)) == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_more_lengths_at_random(seed):
    found = choices(seed, 150)
    assert 20 < sum(found) < len(found) - 20
