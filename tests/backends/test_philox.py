import pytest
import torch

from tilewise.backends import philox
from tilewise.problem import Dropout

ONES = 0xFFFFFFFF

# Known answers of Philox-4x32-10 (Random123, kat_vectors): counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter, key, output):
    assert tuple(int(word) for word in philox.philox([torch.tensor(c) for c in counter], key)) == output


def test_known_answer_in_a_vector():
    counter = [torch.tensor([0, c, ONES]) for c in KNOWN_ANSWERS[2][0]]
    words = philox.philox(counter, KNOWN_ANSWERS[2][1])
    assert tuple(int(word[1]) for word in words) == KNOWN_ANSWERS[2][2]


def keep(dropout, i0, i1, j0, j1, batch=range(2), heads=range(3)):
    return philox.keep(dropout, batch, heads, i0, i1, j0, j1, 3, "cpu")


def test_the_counter_layout():
    """One pair by hand: (b, h, i, j) = (1, 2, 5, 11) of 3 heads reads word 3 of block 2."""
    dropout = Dropout(0.5, seed=(7 << 32) + 9, offset=(1 << 40) + 4)
    words = philox.philox([torch.tensor(c) for c in (2, 5, 1 * 3 + 2, 4)], (9, 7))
    kept = int(words[3]) >= 2**31
    assert bool(keep(dropout, 0, 8, 0, 16)[1, 2, 5, 11]) == kept


@pytest.mark.parametrize("tile", [1, 3, 4, 7, 16])
def test_any_tiling_gives_the_same_mask(tile):
    dropout = Dropout(0.4, seed=123, offset=5)
    whole = keep(dropout, 0, 20, 0, 33)
    assert whole.shape == (2, 3, 20, 33) and whole.dtype == torch.bool
    for i0 in range(0, 20, 6):
        for j0 in range(0, 33, tile):
            i1, j1 = min(i0 + 6, 20), min(j0 + tile, 33)
            assert torch.equal(keep(dropout, i0, i1, j0, j1), whole[:, :, i0:i1, j0:j1])
    assert torch.equal(keep(dropout, 2, 9, 3, 30, batch=range(1, 2), heads=range(0, 3, 2)), whole[1:2, ::2, 2:9, 3:30])
    assert torch.equal(keep(dropout, 2, 9, 3, 30, batch=torch.tensor([1, 0]), heads=torch.tensor([2])), whole[[1, 0]][:, [2], 2:9, 3:30])


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_draw(size):
    assert keep(Dropout(0.5, 1, 2), 4, 4 + size[0], 4, 4 + size[1]).shape == (2, 3, *size)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept(p):
    kept = keep(Dropout(p, seed=3, offset=0), 0, 200, 0, 200).double()
    sigma = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - (1 - p)) < 5 * sigma
    assert abs(kept.mean((0, 1, 2)) - (1 - p)).max() < 6 * (p * (1 - p) / 1200) ** 0.5  # no key is favoured
    assert abs(kept.mean((0, 1, 3)) - (1 - p)).max() < 6 * (p * (1 - p) / 1200) ** 0.5  # and no query


def test_the_ends_of_the_range():
    assert keep(Dropout(0.0, 1, 1), 0, 50, 0, 50).all() and philox.keep_scale(0.0) == 1.0
    assert not keep(Dropout(1.0, 1, 1), 0, 50, 0, 50).any() and philox.keep_scale(1.0) == 0.0
    assert philox.threshold(0.25) == 2**30


@pytest.mark.parametrize("other", [Dropout(0.5, 2, 0), Dropout(0.5, 1 + (1 << 32), 0), Dropout(0.5, 1, 1), Dropout(0.5, -1, 0)])
def test_seed_and_offset_change_the_mask(other):
    same = keep(Dropout(0.5, 1, 0), 0, 64, 0, 64) == keep(other, 0, 64, 0, 64)
    assert 0.45 < same.double().mean() < 0.55


def test_heads_and_batch_entries_differ():
    kept = keep(Dropout(0.5, 1, 0), 0, 64, 0, 64).flatten(0, 1)
    same = (kept[:, None] == kept[None]).double().mean((2, 3))
    assert (same.fill_diagonal_(0.5) - 0.5).abs().max() < 0.05
