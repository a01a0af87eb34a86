"""How many heads are mixed: units in the order of schedule.part, each taken by the first multiprocessor that is free."""

import heapq

import pytest
import torch

from tilewise.backends.hopper.forward.plan import _section, config_of
from tilewise.masks import Causal, DeviceDocuments, Documents, Full, SlidingWindow
from tilewise.problem import Call

MULTIPROCESSORS = 132
CAUSAL = Causal()
A_UNIT = 1.5  # tiles that a unit's beginning and end take, about


def made(batch=1, seqlen=8192, heads=16, heads_k=None, head_dim=128, head_dim_v=None, mask=CAUSAL):
    shapes = (heads, head_dim), (heads_k or heads, head_dim), (heads_k or heads, head_dim_v or head_dim)
    q, k, v = (torch.empty((batch, seqlen, *shape), dtype=torch.bfloat16, device="meta") for shape in shapes)
    call = Call(q=q, k=k, v=v, mask=mask, scale=1.0)
    return call, config_of(call)


def busy(call, config):
    """The share of their time that multiprocessors have work, for a causal mask or a window of the last keys."""
    tile_m, width = config.cluster * config.tile_m, getattr(call.mask, "left", None)
    rows = -(-call.seqlen_q // tile_m)
    first = [0 if width is None else max(0, row * tile_m - width) // config.tile_n for row in range(rows)]
    tiles = [-(-(row + 1) * tile_m // config.tile_n) - first[row] for row in range(rows)]
    heads, section = call.batch * call.heads_q, _section(call, config)
    units = [
        tiles[row] + A_UNIT
        for begin in range(0, heads, section)
        for row in reversed(range(rows))
        for _ in range(min(section, heads - begin))
    ]
    done = [0.0] * (MULTIPROCESSORS * config.blocks // config.cluster)
    for unit in units:
        heapq.heapreplace(done, done[0] + unit)
    return sum(units) / len(done) / max(done)


def test_pairs_of_blocks_where_there_are_queries_for_both():
    assert [made(seqlen=n)[1].cluster for n in (2048, 2049)] == [1, 2]
    assert [made(seqlen=8192, mask=SlidingWindow(n, 0))[1].cluster for n in (1023, 4095)] == [1, 2]
    few, many = ((torch.empty((1, n, 4, 128), dtype=torch.bfloat16, device="meta")) for n in (100, 8192))
    assert config_of(Call(q=few, k=many, v=many, mask=CAUSAL, scale=1.0)).cluster == 1


def test_short_tiles_only_where_keys_are_few():
    few, many = ((torch.empty((1, n, 4, 64), dtype=torch.bfloat16, device="meta")) for n in (100, 8192))
    assert [config_of(Call(q=few, k=k, v=k, mask=CAUSAL, scale=1.0)).tile_m for k in (few, many)] == [64, 192]


@pytest.mark.parametrize(
    "sizes",
    [
        *(
            {"seqlen": seqlen, "batch": 16384 // seqlen, "heads": 2048 // dim, "head_dim": dim}
            for dim in (64, 128, 256)
            for seqlen in (2048, 16384)
        ),
        {"head_dim": 192, "head_dim_v": 128},
        {"heads": 32, "heads_k": 8, "batch": 4, "seqlen": 4096},
        {"seqlen": 16384, "mask": SlidingWindow(4095, 0)},
        {"seqlen": 16384, "mask": SlidingWindow(1023, 0), "heads": 32, "head_dim": 64},
    ],
    ids=str,
)
def test_nobody_waits_for_long_at_the_end(sizes):
    assert busy(*made(**sizes)) > 0.965


def test_three_heads_at_a_time_would_end_badly(monkeypatch):
    """As many as fit the cache, and one left over: what 192/128 had."""
    call, config = made(head_dim=192, head_dim_v=128)
    assert _section(call, config) == 8
    monkeypatch.setitem(globals(), "_section", lambda call, config: 3)
    assert busy(call, config) < 0.9


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"seqlen": 1},
        {"seqlen": 100_000},
        {"heads": 48, "heads_k": 6},
        {"heads": 7},
        {"mask": SlidingWindow(0, 0)},
        {"batch": 3, "heads": 5},
    ],
    ids=str,
)
def test_whole_groups_of_heads(sizes):
    call, config = made(**sizes)
    width = _section(call, config)
    assert width % call.group == 0 and 0 < width <= call.batch * call.heads_q


def test_masks_without_an_order():
    assert _section(*made(mask=Full())) == 1
    assert _section(*made(seqlen=32768, mask=Documents((0, 24576, 32768), inner=Causal()))) == 2


def test_documents_are_taken_in_pairs_of_thread_blocks_where_walks_are_long():
    """Windows count, and lengths that were left on their device do once they have been checked."""
    x = torch.empty((1, 8192, 4, 128), dtype=torch.bfloat16, device="meta")
    ends = torch.tensor([0, 4096, 8192])

    def cluster(mask):
        return config_of(Call(q=x, k=x, v=x, mask=mask, scale=1.0)).cluster

    unread = DeviceDocuments(ends, ends, CAUSAL)
    assert cluster(unread) == 1
    unread.check(8192, 8192)
    assert cluster(unread) == 2
    assert [cluster(Documents(ends, inner=inner)) for inner in (CAUSAL, Full(), SlidingWindow(4000, 0), SlidingWindow(1023, 0))] == [
        2,
        2,
        2,
        1,
    ]
    assert cluster(Documents([0, 3000, 5000, 8000], inner=CAUSAL)) == 1
