"""Plans, without a process: every token is held once, what one rank gives another takes, what is seen is fetched; shares, traffic and time."""

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from distributed_cases import families

import tilewise as tw
from tilewise import distributed
from tilewise.distributed import planning, solver
from tilewise.distributed.axis import Routes
from tilewise.distributed.planning import LAYOUTS, Plan, chunk_edges
from tilewise.testing.packs import pack


def seen_by(plan: Plan) -> list[set[int]]:
    """The keys that the queries of each group see, pair by pair."""
    shape = plan.q.length, plan.k.length
    dense = plan.mask.dense(*shape).reshape(-1, *shape).any(0)
    return [
        set(torch.cat([dense[first:last] for first, last in ((0, 0), *rows)]).any(0).nonzero().flatten().tolist()) for rows in plan.rows
    ]


def check(plan: Plan, dense: bool) -> None:
    world, sharing = plan.place.world, plan.sharing
    for axis in (plan.q, plan.k):
        held = torch.cat([axis.places(rank) for rank in range(world)])
        assert torch.equal(held.sort().values, torch.arange(axis.length))
    computed = np.concatenate([np.arange(*rows) for group in plan.rows for rows in group] + [np.zeros(0, int)])
    assert np.array_equal(np.sort(computed), np.arange(plan.q.length))
    wanted = [plan.needs[rank // sharing] for rank in range(world)]
    routes = [Routes.of(plan.k, wanted, rank) for rank in range(world)]
    for giver in range(world):
        mine = plan.k.places(giver)
        for taker in range(world):
            assert torch.equal(mine[routes[giver].give[taker]], routes[taker].take[giver])
    for rank, group in enumerate(seen_by(plan) if dense else []):
        for each in range(rank * sharing, (rank + 1) * sharing):
            assert set(torch.cat(routes[each].take).tolist()) == group, "what is fetched is what is seen"


def test_a_thousand_random_packs():
    rng = np.random.default_rng(51)
    for number in range(1000):
        n, world = int(rng.integers(1, 700)), int(rng.integers(1, 10))
        cuts = np.sort(rng.integers(0, n + 1, int(rng.integers(0, 9))))
        inner = [tw.Causal(), tw.Full(), tw.SlidingWindow(int(rng.integers(0, 60)), 0), tw.PrefixLM(int(rng.integers(0, 40)))][number % 4]
        mask = tw.Documents([0, *cuts.tolist(), n], inner=inner)
        options = {"heads": (12, 6), "head_dim": 64, "layout": LAYOUTS[number // 4 % 4], "tile": int(rng.choice([1, 8, 96]))}
        one, other = (distributed.plan(mask, n, (rank, world), **options) for rank in (0, world - 1))
        assert one.digest == other.digest and one.q.ranges == other.q.ranges
        check(one, dense=number % 5 == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(families(1000)))
def test_every_family(name, layout):
    for world in (1, 3, 4):
        check(distributed.plan(families(1000)[name], 1000, (0, world), heads=(4, 4), layout=layout, tile=16), dense=True)


def test_cross_attention_holds_keys_in_order():
    plan = distributed.plan(tw.Causal(), (500, 801), (1, 4), heads=(4, 4))
    check(plan, dense=True)
    assert plan.k.ranges == (((0, 201),), ((201, 402),), ((402, 603),), ((603, 801),)) and plan.seqlen_k == 201


def test_queries_of_a_tile_stay_together():
    for n, ranks, tile in ((65536, 8, 128), (1000, 3, 96), (95, 4, 96), (97, 2, 96), (1 << 20, 64, 128), (0, 2, 96)):
        edges = chunk_edges(n, ranks, tile)
        assert edges[0] == 0 and edges[-1] == n and (edges[1:-1] % tile == 0).all() and (np.diff(edges) >= min(tile, n)).all()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_hold_equally_many_tokens_where_tiles_go_round(world):
    for n in (16384, 65536, 131072):
        plan = distributed.plan(tw.Causal(), n, (0, world), heads=(64, 8), tile=128)
        assert {plan.q.count(rank) for rank in range(world)} == {n // world}


@pytest.mark.parametrize(("total", "world"), [(65536, 4), (65536, 8), (131072, 8), (1 << 20, 8)])
def test_shares_are_equal_and_little_is_fetched(total, world):
    rng = np.random.default_rng(42)
    reports = []
    for _ in range(20):
        mask = tw.Documents(pack(total, rng), inner=tw.Causal())
        reports.append(distributed.plan(mask, total, (0, world), heads=(64, 8), tile=128).report())
    assert max(report.imbalance for report in reports) <= 1.02
    assert np.mean([report.traffic for report in reports]) <= 0.25


def test_shares_of_dense_masks():
    for mask, most in ((tw.Full(), 1.0), (tw.Causal(), 1.001), (tw.SlidingWindow(1023, 0), 1.02)):
        for world in (2, 4, 8):
            report = distributed.plan(mask, 65536, (0, world), heads=(64, 8), tile=128).report()
            assert report.imbalance <= most, (mask, world)
    assert report.traffic < 0.03, "a window fetches its neighbours"


def test_a_million_tokens_in_five_hundred_documents_are_planned_in_milliseconds():
    rng = np.random.default_rng(1)
    taken = []
    for _ in range(12):
        ends = np.sort(rng.integers(0, 1 << 20, 499)).tolist()
        mask = tw.Documents([0, *ends, 1 << 20], inner=tw.Causal())
        start = time.perf_counter()
        plan = distributed.plan(mask, 1 << 20, (0, 8), heads=(64, 8), tile=128)
        taken.append(time.perf_counter() - start)
        assert plan.report().imbalance <= 1.02
    assert min(taken) < 5e-3, [f"{1e3 * each:.1f} ms" for each in taken]


def test_no_collective_and_the_same_plan_everywhere(monkeypatch):
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "all_to_all_single"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: pytest.fail("a plan needs no collective"))
    plans = [distributed.plan(tw.Causal(), 4096, (rank, 4), heads=(8, 2)) for rank in range(4)]
    assert len({plan.digest for plan in plans}) == 1
    assert all(plan.q.ranges == plans[0].q.ranges for plan in plans)
    changed = [
        distributed.plan(tw.Full(), 4096, (0, 4), heads=(8, 2)),
        distributed.plan(tw.Causal(), 4000, (0, 4), heads=(8, 2)),
        distributed.plan(tw.Causal(), 4096, (0, 4), heads=(8, 4)),
        distributed.plan(tw.Causal(), 4096, (0, 4), heads=(8, 2), layout="contiguous"),
    ]
    assert len({plan.digest for plan in [plans[0], *changed]}) == 5


def test_a_report_reads_well():
    plan = distributed.plan(tw.Causal(), 4096, (0, 2), heads=(8, 2), layout="zigzag", tile=128)
    text, report = str(plan.report()), plan.report()
    assert "2 ranks; largest share of the pairs 1.000 of the mean; keys fetched 0.75 of an all-gather" in text
    assert report.picture == 16 * "0" + 32 * "1" + 16 * "0" and sum(report.pairs) == 8 * tw.Causal().pairs(4096, 4096)
    assert report.tokens == (2048, 2048) and report.fetched == (2048, 1024)


def test_exchanges_never_make_a_plan_worse():
    rng = np.random.default_rng(3)
    costs = solver.Costs.of(8, 128)
    for _ in range(50):
        n, ranks = int(rng.integers(5, 60)), int(rng.integers(2, 6))
        load, needs = rng.integers(0, 10**6, n), rng.integers(0, 200, (n, n))
        owner = solver.solve(load, needs, ranks, costs)
        counts = np.bincount(owner, minlength=ranks)
        assert np.ptp(counts) <= 1 and counts.sum() == n
        assert np.array_equal(owner, solver.solve(load, needs, ranks, costs))
        seconds = [
            solver._seconds(np.bincount(each, weights=load, minlength=ranks), needs, each, ranks, costs)
            for each in (owner, solver.contiguous(n, ranks))
        ]
        assert seconds[0] <= seconds[1] * (1 + 1e-12) or seconds[0] <= costs.pair * load.sum() / ranks * solver.FAIR


def test_what_others_get_is_counted_from_needs():
    owner, needs = np.array([0, 0, 1, 1]), np.array([[9, 2, 3, 0], [1, 9, 5, 0], [0, 0, 9, 9], [4, 0, 9, 9]])
    assert solver.received(needs, owner, 2).tolist() == [5, 4]
    assert solver.received(needs, owner, 3).tolist() == [5, 4, 0]


WRONG = [
    ({"mesh": (2, 2)}, ValueError, "mesh=(rank, world) must have rank < world"),
    ({"mesh": "cp"}, ValueError, "mesh must be a DeviceMesh, a process group or (rank, world), got str 'cp'"),
    ({"heads": (6, 4)}, ValueError, "heads must be (heads_q, heads_k) with heads_q a multiple of heads_k"),
    ({"heads": 4}, ValueError, "heads must be (heads_q, heads_k), got 4"),
    ({"head_dim": 0}, ValueError, "head_dim must be an integer, 1 or more"),
    ({"layout": "ring"}, ValueError, "layout must be one of 'auto', 'contiguous', 'zigzag', 'ulysses', got 'ring'"),
    ({"seqlen": -1}, ValueError, "seqlen_q must be an integer, 0 or more"),
    ({"seqlen": (1, 2, 3)}, ValueError, "seqlen must be a length, or (seqlen_q, seqlen_k)"),
    ({"tile": 0}, ValueError, "tile must be an integer, 1 or more"),
    ({"mask": tw.Documents([0, 4000])}, tw.ShapeError, "reaches position 4000"),
    ({"mask": torch.ones(3, 3, dtype=torch.bool)}, tw.ShapeError, "mask must be a tilewise mask"),
]


@pytest.mark.parametrize(("change", "error", "words"), WRONG)
def test_wrong_arguments(change, error, words):
    given = {"mask": tw.Causal(), "seqlen": 1000, "mesh": (0, 2), "heads": (4, 2)} | change
    with pytest.raises(error) as caught:
        distributed.plan(given.pop("mask"), given.pop("seqlen"), given.pop("mesh"), **given)
    assert words in str(caught.value)


def test_wrong_tensors():
    plan = distributed.plan(tw.Causal(), 200, (0, 1), heads=(4, 2), head_dim=8)
    q, k = torch.randn(1, 200, 4, 8), torch.randn(1, 200, 2, 8)
    wrong = [
        ((q[:, :100], k, k), {}, tw.ShapeError, "q has 100 tokens, but rank 0 of 1 holds 200 of the plan's 200"),
        ((q, k[:, :9], k[:, :9]), {}, tw.ShapeError, "k has 9 tokens"),
        ((q[:, :, :2], k, k), {}, tw.ShapeError, "q has 2 heads, the plan was made for heads=(4, 2)"),
        ((q, k, k), {"dropout_p": 0.1}, ValueError, "dropout_seed must be given, the same number on all ranks"),
        ((q, k, torch.randn(1, 200, 2, 8).half()), {}, tw.ShapeError, "v"),
        ((q[..., :4], k, k), {}, tw.ShapeError, "k has head_dim 8"),
        ((q, k, k), {"sink": torch.zeros(5)}, tw.ShapeError, "sink"),
        ((q, k, k), {"alibi_slopes": torch.zeros(5)}, tw.ShapeError, "alibi_slopes"),
        ((q, k, k), {"stages": 3}, ValueError, "stages must divide the 2 key heads that a rank computes, got 3"),
        ((q, k, k), {"return_lse": 1}, ValueError, "return_lse"),
        ((q, k, k.double()), {}, tw.ShapeError, "v"),
        ((q, k, k), {"bias": torch.zeros(7, 9)}, tw.ShapeError, "bias has"),
    ]
    for tensors, options, error, words in wrong:
        with pytest.raises(error) as caught:
            distributed.attention(*tensors, plan, **options)
        assert words in str(caught.value)
    with pytest.raises(ValueError, match=r"plan must be what tilewise\.distributed\.plan returns"):
        distributed.attention(q, k, k, "plan")
    with pytest.raises(tw.ShapeError, match="x has 100 tokens along dim 1, the plan 200"):
        plan.dispatch(q[:, :100])
    looked_at = replace(plan, place=planning.Place(0, 2, None, "cpu"), state={})
    with pytest.raises(tw.UnsupportedError, match=r"this plan was made for \(rank, world\), to be looked at"):
        looked_at.check_runs(torch.device("cpu"))


def test_a_second_derivative_is_refused():
    plan = distributed.plan(tw.Causal(), 100, (0, 1), heads=(2, 2), head_dim=8)
    q = torch.randn(1, 100, 2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(distributed.attention(q, q, q, plan).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_keys_are_parted_only_where_memory_asks():
    """First a part of the heads at a time, and parts of the keys only where those of one head are too many."""
    plan = distributed.plan(tw.Causal(), 10_000, (0, 4), heads=(32, 8), head_dim=128)
    of_head = 10_000 * 2 * 128 * 2
    assert plan.report().pieces == (1, 1) and plan.report().at_once == 8 * of_head
    for bound, pieces in ((8, (1, 1)), (7.99, (2, 1)), (3, (4, 1)), (1, (8, 1)), (0.99, (8, 2)), (0.1, (8, 12))):
        report = plan.report(most_bytes=int(bound * of_head))
        assert report.pieces == pieces and report.at_once <= bound * of_head, (bound, report)
        assert f"in {pieces[0]} parts of heads and {pieces[1]} of keys" in str(report)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="most_bytes must be"):
            plan.report(most_bytes=wrong)
    tiny = plan.report(most_bytes=1)  # a tile of one head is the least
    assert tiny.pieces == (8, 79) and tiny.at_once == 128 * 2 * 128 * 2
    assert plan.report(4, most_bytes=of_head, batch=2).pieces == (8, 5)
    parts = plan.key_parts(79)
    assert parts[0] == (0, 128) and parts[-1] == (9984, 10_000) and all(a[1] == b[0] for a, b in pairwise(parts))
