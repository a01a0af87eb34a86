"""What the Hopper backward pass takes, and by which kernels; without a GPU."""

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends.hopper import Hopper, changes, short
from tilewise.backends.hopper.backward import bound, plan
from tilewise.backends.hopper.backward import call as gradients
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.repair import call as repairs
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Dense, DeviceDocuments, Documents, FirstKeys, Full, Part, PerHead, PrefixLM, PrefixTree, SlidingWindow
from tilewise.problem import LEAST_SOFTCAP, Call

H100, H200 = (plan.Gpu(132, again) for _, again in plan.AGAIN)
CU = torch.tensor([0, 3, 9], dtype=torch.int32)
SEES = {
    Full(): "full",
    SlidingWindow(None, None): "full",
    Causal(): "causal",
    SlidingWindow(5, 0): "band",
    Documents((0, 3, 9)): "varlen",
    Documents((0, 3, 9), inner=Causal() & SlidingWindow(2, None, "top_left")): "varlen",
    DeviceDocuments(CU, CU, SlidingWindow(4, 4)): "varlen",
    Documents((0, 3, 9), inner=PrefixLM(2)): "tiles",
    DeviceDocuments(CU, CU, FirstKeys(1)): "tiles",
    PrefixLM(4): "tiles",
    Dense(torch.ones(9, 9, dtype=torch.bool)): "tiles",
    PerHead({(0, 2): Causal(), (2, 4): FirstKeys(3)}): "tiles",
}


def _call(mask, seqlen_k=9, **changes):
    q, k = (torch.empty(1, seqlen, heads, 64, dtype=torch.bfloat16, device="meta") for seqlen, heads in ((9, 4), (seqlen_k, 2)))
    return Call(q=q, k=k, v=k, mask=mask, scale=1.0, grad=True, **changes)


@pytest.mark.parametrize("mask", SEES, ids=repr)
def test_every_mask_is_taken(mask):
    call = _call(mask)
    assert gradients.why_not(call.problem) == []
    assert plan.config_of(call) == backward_config.configure(torch.bfloat16, 64, 64, SEES[mask], few=True)
    assert plan.config_of(_call(mask, 129)) == backward_config.configure(torch.bfloat16, 64, 64, SEES[mask])
    launched = [launch for launch, *_ in Hopper().kernels(call)]
    assert launched[-1] == gradients.LAUNCH
    (line,) = (line for line in Hopper().details(call) if line.startswith("backward"))
    assert ("cu_seqlens" in line) == (SEES[mask] == "varlen") and ("tables" in line) == (SEES[mask] == "tiles")
    assert (launched.count("tilewise.backends.hopper.backward.intervals:launch") == 1) == (SEES[mask] == "varlen")


def test_keys_of_one_block_need_no_sum():
    few, summed = (plan.config_of(_call(Full(), seqlen_k)) for seqlen_k in (128, 129))
    assert few.one_block and not summed.one_block and few.elements_of_sum(64) < summed.elements_of_sum(64)
    assert "written by who computes it" in "".join(gradients.lines(_call(Full(), 128)))
    with pytest.raises(TypeError, match="this configuration has no finishes"):
        few.but(finishes=True)
    for dims, mask_kind in itertools.product(backward_config.TILES, {*SEES.values()}):
        few = backward_config.configure(torch.bfloat16, *dims, mask_kind, few=True)
        assert not few.sums and few.one_block == (max(dims) <= 128 or (dims, mask_kind) == ((192, 128), "full"))
        for softcap, bias, (alibi, diagonal) in itertools.product(
            (False, True), (None, torch.float32), ((False, False), (True, False), (True, True))
        ):
            changes = {"softcap": softcap, "bias": bias, "alibi": alibi, "diagonal": diagonal}
            assert not backward_config.configure(torch.bfloat16, *dims, mask_kind, few=True, **changes).sums


def test_a_visit_is_too_late_for_dQ_from_registers():
    fields = {"dtype": torch.bfloat16, "head_dim": 64, "head_dim_v": 64, "tile_m": 64, "tile_n": 128, "dq": "direct"}
    with pytest.raises(ValueError, match="directly"):
        backward_config.Config.of(mask_kind="tiles", **fields)
    backward_config.Config.of(mask_kind="varlen", **fields)


def test_the_last_wave_is_shared_where_it_then_ends_earlier():
    """16 heads of 16,384 tokens are 2,048 blocks on 132 multiprocessors: 15 waves and 68 blocks, of which thirds take two rounds."""
    config = backward_config.configure(torch.bfloat16, 128, 128, "full", 16384).but(shares=True)

    def shared(seqlen_q, heads, config=config):
        q, k = (torch.empty(1, seqlen, heads, 128, dtype=torch.bfloat16, device="meta") for seqlen in (seqlen_q, 16384))
        return plan.shared(config, Call(q=q, k=k, v=k, mask=Full(), scale=1.0, grad=True), 132)

    assert shared(16384, 16) == (1980, 3, 2 * 68)
    assert shared(16384, 33) == (33 * 128, 1, 0)  # whole waves
    assert shared(80, 16) == (2048, 1, 0)  # a walk of one tile
    assert shared(16384, 16, config.but(shares=False)) == (2048, 1, 0)


@pytest.mark.parametrize(
    ("dim", "heads", "seqlen", "on_h100", "on_h200"),
    [
        (64, 128, 4096, 11, 16),
        (64, 32, 16384, 5, 16),
        (64, 32, 65536, 2, 8),
        (128, 128, 2048, 11, 16),
        (128, 32, 8192, 5, 16),
        (128, 16, 16384, 4, 8),
        (128, 3, 1 << 20, 1, 1),
        (64, 32, 256, 32, 32),
    ],
)
def test_heads_that_take_turns_without_a_mask(dim, heads, seqlen, on_h100, on_h200):
    """Eight blocks of each at a time, unless these would fetch each tile anew, or all that they read fits into the L2 cache."""
    config = backward_config.configure(torch.bfloat16, dim, dim, "full", seqlen)
    assert [plan._side_by_side(config, heads, 1, seqlen, gpu) for gpu in (H100, H200)] == [on_h100, on_h200]


@pytest.mark.parametrize(
    ("heads", "seqlens", "mask", "apart"),
    [
        ((64, 8, 128), (8192, 8192), Causal(), True),
        ((32, 8, 128), (2048, 2048), Causal(), True),
        ((32, 8, 128), (1024, 1024), Causal(), False),
        ((32, 8, 128), (512, 16384), Causal(), False),
        ((32, 8, 128), (8192, 8192), SlidingWindow(1024, 0), True),
        ((64, 8, 64), (4096, 4096), SlidingWindow(128, 0), False),
        ((64, 8, 128), (8192, 8192), Full(), False),
        ((64, 64, 128), (8192, 8192), Causal(), False),
        ((16, 8, 256), (8192, 8192), Causal(), False),
    ],
)
def test_heads_of_a_group_are_apart_where_their_walks_read_much(heads, seqlens, mask, apart):
    q, k = (torch.empty(1, n, h, heads[2], dtype=torch.bfloat16, device="meta") for n, h in zip(seqlens, heads[:2], strict=True))
    call = Call(q=q, k=k, v=k, mask=mask, scale=1.0, grad=True)
    found = plan.Plan.of(call, H100)
    assert found.config.block_per_q_head == apart
    blocks = -(-seqlens[1] // found.config.tile_n) * heads[1]
    assert found.parts == (blocks if apart else 0) and (found.scratch[-1] is not None) >= apart
    assert ("each query head by thread blocks of its own" in "".join(gradients.lines(call))) == apart


def test_few_queries_have_many_heads_take_turns():
    """Blocks of keys that add to the same few tiles of dQ would wait for each other: two tiles for each multiprocessor keep them apart."""
    config = backward_config.configure(torch.bfloat16, 128, 128, "causal", 512)
    for heads_q, heads_k, expected in ((32, 8, 9), (32, 32, 33), (8, 1, 4)):
        _, ascending, heads_per_step, heads_interleaved, *_ = plan._order(config, 4, 512, heads_q, 16384, heads_k, H100, False)
        assert (
            heads_per_step == min(expected, ascending or expected)
            and heads_interleaved >= expected
            and ascending % heads_per_step == 0
            and ascending + heads_interleaved == 4 * heads_k
        )


TREE, SINK = PrefixTree.group(1024, [512] * 6), SlidingWindow(100, 0) | FirstKeys(64)


@pytest.mark.parametrize(("heads", "heads_interleaved"), [(8, 8), (33, 33), (66, 33), (100, 34)])
def test_all_heads_descend_under_tables(heads, heads_interleaved):
    """About so many together that a head has OF_A_HEAD blocks at a time."""
    q, k = (torch.empty(1, 4096, n, 128, dtype=torch.bfloat16, device="meta") for n in (heads * 2, heads))
    for mask in (TREE, SINK, PrefixLM(2000)):
        _, ascending, _, found, *_ = plan.Plan.of(Call(q=q, k=k, v=k, mask=mask, scale=1.0, grad=True), H100).turns[0][1]
        assert (ascending, found) == (0, heads_interleaved)


@pytest.mark.parametrize(
    ("mask", "apart"),
    [
        (PrefixLM(9), False),
        (PerHead({(0, 4): Causal(), (4, 8): FirstKeys(9)}), False),
        (PerHead({(0, 3): Causal(), (3, 8): FirstKeys(9)}), True),
        (Part(SlidingWindow(99, 0), 900, [(0, 900)]), True),
        (Part(SlidingWindow(9999, 0), 900, [(0, 900)]), False),
    ],
    ids=str,
)
def test_a_group_walks_together_where_its_heads_see_the_same_and_much(mask, apart):
    for dim in (64, 128, 192):
        q, k = (torch.empty(2, 900, heads, dim, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
        assert plan.config_of(Call(q=q, k=k, v=k, mask=mask, scale=1.0, grad=True)).q_heads_in_turn == (apart or dim > 128)
        assert not plan.config_of(Call(q=q, k=q, v=q, mask=mask, scale=1.0, grad=True)).q_heads_in_turn or dim > 128


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(99, 0), TREE, SINK, PerHead({(0, 3): Causal(), (3, 8): FirstKeys(9)})], ids=str)
def test_parts_add_to_dq_in_one_order(mask, dim):
    """That of the whole call, whatever their rows and heads: all heads descend. Those of a group walk as they do there."""
    apart = set()
    for rows in ([(0, 4096)], [(0, 64), (3840, 4096)], [(128, 192)]):
        for first, last in ((0, 8), (0, 4), (4, 8)):
            part = Part(mask, 4096, rows, (first, last, 8))
            for heads_k, batch in (((last - first) // 4, 1), (last - first, 3)):
                q, k = (
                    torch.empty(batch, n, h, dim, dtype=torch.bfloat16, device="meta")
                    for n, h in ((part.length, last - first), (4096, heads_k))
                )
                found = plan.Plan.of(Call(q=q, k=k, v=k, mask=part, scale=1.0, grad=True), H100)
                assert found.turns[0][1].ascending == 0
                apart |= {found.config.q_heads_in_turn} if heads_k < last - first else set()
    assert apart == {isinstance(mask, PerHead | SlidingWindow)}


def test_a_board_is_known_by_its_cache(monkeypatch):
    for size, gpu in ((50 << 20, H100), (60 << 20, H200), (1 << 20, H100), (126 << 20, H200)):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _, size=size: SimpleNamespace(multi_processor_count=132, L2_cache_size=size)
        )
        assert plan.gpu_of.__wrapped__(torch.device("cuda")) == gpu


def test_what_is_shared_has_room_where_dQ_goes():
    """Parts of dK and dV, 128 KB each at head_dim 128, lie in dQ until it is written, or take no more than it would in fp32."""
    for seqlen_q, seqlen_k, heads, shares in ((4096, 2048, 8, 1), (4096, 512, 8, 3), (16384, 4096, 2, 2), (4096, 77, 3, 11)):
        q, k = (torch.empty(1, seqlen, heads, 128, dtype=torch.bfloat16, device="meta") for seqlen in (seqlen_q, seqlen_k))
        call = Call(q=q, k=k, v=k, mask=Full(), scale=1.0, grad=True)
        config = plan.config_of(call) if seqlen_k < 128 else backward_config.configure(torch.bfloat16, 128, 128, "full", 16384)
        _, found, parts = plan.shared(config, call, 132)
        (own,), lends = plan._scratch(config, call, 1, parts)[6:], plan.lends(config, parts)
        assert lends == (parts > 0 and seqlen_k > 128) and (own is None) == lends
        place = bound.place_of_parts(config, parts, q).shape if lends else own[0]
        assert found == shares and math.prod(place) == parts * 128 * 256 <= q.numel() // (1 if config.one_block else 2)
    with pytest.raises(ValueError, match="thread blocks are persistent"):
        config.but(dq="staged", finishes=True)


def test_explain_says_what_sharing_takes():
    """Of 16 heads of 16,384 tokens 68 blocks are left for a last wave, in three parts each, of which two lie in memory."""
    q = torch.empty(1, 16384, 16, 128, dtype=torch.bfloat16, device="meta")
    call = Call(q=q, k=q, v=q, mask=Full(), scale=1.0, grad=True)
    (line,) = gradients.lines(call)
    assert f"by 3 thread blocks each, whose parts of dK and dV take {2 * 68 * 128 * 256 * 4 / 1e6:.1f} MB, where dQ goes later" in line
    (line,) = gradients.lines(replace(call, mask=Causal()))
    assert "shared" not in line


def test_more_heads_than_a_grid_has_are_refused():
    q = torch.empty(1, 1, 65536, 8, dtype=torch.bfloat16, device="meta")
    call = Call(q=q, k=q, v=q, mask=Full(), scale=1.0, grad=True)
    with pytest.raises(UnsupportedError, match="q has 65536 heads; backend 'hopper' computes gradients of at most 65535"):
        Hopper().forward(call)
    gradients.check(replace(call, q=q[:, :, 1:], k=q[:, :, 1:], v=q[:, :, 1:]))


def test_what_multiplies_scores_is_normal_in_fp32():
    """With 0, which fp32 makes of 1e-46, a hidden score of -inf would be NaN."""
    plain = plan.config_of(_call(Causal()))
    numbers = [changes.outer_log2(plain, scale, 0.0) for scale in (0.0, 1e-46, -1e-46, 0.125, 1e300)]
    assert numbers == [changes.LEAST, changes.LEAST, -changes.LEAST, 0.125 / math.log(2), changes.FLOAT_MAX]
    capped = plan.config_of(_call(Causal(), softcap=1e-46))
    assert changes.outer_log2(capped, 0.125, 1e-46) == LEAST_SOFTCAP / math.log(2)


def test_the_sink_without_keys_has_the_whole_gradient_of_the_log_sum_exp(monkeypatch):
    """But for one of -inf, which takes part in nothing: as autograd finds for log(exp(sink)) alone."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    q, sink = torch.zeros(2, 3, 4, 64), torch.tensor([0.5, -math.inf, 3.0, -math.inf])
    d_lse = torch.randn(2, 4, 3)
    d_lse[:, 3] = math.nan
    call = Call(q=q, k=q[:, :0], v=q[:, :0], mask=Full(), scale=1.0, grad=True, sink=sink)
    found = gradients.backward(call, q, sink[:, None].expand(2, 4, 3), q, d_lse).sink
    expected = d_lse.sum((0, 2))
    expected[[1, 3]] = 0.0
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("mask_kind", "heads", "group", "seqlen", "heads_per_step"),
    [
        ("causal", 128, 1, 4096, 8),
        ("causal", 64, 1, 8192, 4),
        ("causal", 32, 1, 16384, 2),
        ("causal", 32, 1, 1 << 16, 1),
        ("causal", 128, 4, 1024, 1),
        ("varlen", 12, 1, 4096, 6),
        ("varlen", 7, 1, 4096, 7),
        ("varlen", 13, 1, 4096, 1),
    ],
)
def test_ascending_heads_take_turns_as_far_as_the_cache_holds_them(mask_kind, heads, group, seqlen, heads_per_step):
    """Divisors of the ascending heads, and of all heads where the GPU decides which ascend."""
    config = backward_config.configure(torch.bfloat16, 64, 64, mask_kind, seqlen)
    _, ascending, found, heads_interleaved, *_ = plan._order(config, 1, seqlen, heads * group, seqlen, heads, H200, False)
    assert (found, ascending % found, ascending + heads_interleaved) == (heads_per_step, 0, heads)
    assert mask_kind != "varlen" or heads % found == 0


@pytest.mark.parametrize(
    ("mask_kind", "heads", "group", "seqlen", "expected"),
    [
        ("causal", 16, 1, 1 << 17, (0, 4)),
        ("causal", 6, 1, 1 << 17, (0, 6)),
        ("causal", 16, 1, 1 << 15, (14, 2)),
        ("varlen", 8, 4, 1 << 17, (plan.NONE_ASCENDS, 8)),
        ("varlen", 21, 2, 4096, (plan.NONE_ASCENDS, 11)),
        ("full", 16, 1, 1 << 15, (0, 8)),
        ("full", 16, 1, 1 << 16, (0, 2)),
        ("full", 8, 4, 1 << 16, (0, 1)),
    ],
)
def test_heads_descend_where_the_cache_does_not_hold_one_or_a_group_shares_keys(mask_kind, heads, group, seqlen, expected):
    config = backward_config.configure(torch.bfloat16, 128, 128, mask_kind, seqlen)
    _, ascending, _, heads_interleaved, *_ = plan._order(config, 1, seqlen, heads * group, seqlen, heads, H200, False)
    assert (ascending, heads_interleaved) == expected


def test_dQ_by_a_kernel_of_its_own_knows_no_turns():
    config = backward_config.configure(torch.bfloat16, 256, 256, "causal", 1024)
    assert plan._order(config, 1, 1024, 8, 1024, 8, H200, False)[1:3] == (0, 1)


def test_parts_of_a_large_batch_have_orders_of_their_own(monkeypatch):
    calls = []
    monkeypatch.setattr(gradients.jit, "compiled", lambda launch, *_: lambda *given: calls.append((launch, given)))
    monkeypatch.setattr(plan, "gpu_of", lambda _: H200)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    for name, stand_in in {"current_device": lambda: None, "capturing": lambda: False}.items():
        monkeypatch.setattr(short, name, stand_in)
    batch = plan.MOST + 21
    q = torch.zeros(batch, 2, 1, 8, dtype=torch.bfloat16)
    gradients.backward(Call(q=q, k=q, v=q, mask=Causal(), scale=1.0, grad=True), q, torch.zeros(batch, 1, 2), q, None)
    assert [(launch, given.Q.shape[0]) for launch, (given, *_) in calls] == [
        (launch, n) for n in (plan.MOST, 21) for launch in (gradients.LAUNCH, repairs.LAUNCH)
    ]
    launched = [given for launch, given in calls if launch == gradients.LAUNCH]
    repaired = [given for launch, given in calls if launch == repairs.LAUNCH]
    for (given, found, *_), (bundle, *_) in zip(launched, repaired, strict=True):
        assert all(x is y for x, y in zip(bundle, (given.Q, given.K, given.V, given.dO, *found), strict=True))
    for given, _, _, turns, *_ in launched:
        assert turns.ascending % turns.heads_per_step == 0 and turns.ascending + turns.heads_interleaved == given.Q.shape[0]
