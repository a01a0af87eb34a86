"""The Hopper kernels, carried out without a GPU: right by the one tolerance, with the same bits whoever comes first, and without hidden NaN."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES
from emulator.memory import Fault

from tilewise.backends.hopper.backward import plan, tables
from tilewise.masks import Causal, Documents, FirstKeys, Full, Padding, PerHead, PrefixLM, PrefixTree, Slices, SlidingWindow
from tilewise.testing import conformance, tolerance
from tilewise.testing.cases import Case, make, random_mask, upstream

pytestmark = NEEDED

# Compiling a configuration takes ten times as long as carrying it out on a small problem: tests share configurations where they can, and a test's
# further ones are slow.
SMALL = dict(batch=1, seqlen_q=150, seqlen_k=150, heads_q=2, heads_k=1, head_dim=64, dtype="bf16")
DOCUMENTS = Documents((0, 20, 100), (0, 30, 130), inner=Causal())
ONE_HEAD = SMALL | dict(heads_q=1)
CAUSAL = Case(**ONE_HEAD | dict(head_dim=128, mask=Causal()))
CASES = [
    CAUSAL,
    Case(**SMALL | dict(mask=Full(), seqlen_q=70, seqlen_k=40, bias="hq", bias_hides=True, dtype="fp16")),
    Case(**ONE_HEAD | dict(mask=DOCUMENTS, seqlen_q=100, seqlen_k=130)),
    Case(**SMALL | dict(mask=SlidingWindow(20, 0), softcap=5.0, alibi="h", sink=True)),
    Case(**ONE_HEAD | dict(head_dim=72, head_dim_v=40, mask=SlidingWindow(40, 3))),
    Case(**ONE_HEAD | dict(batch=2, mask=Padding((130, 60)) & Causal())),  # packed documents: entries.py
]
MOVED = (
    (Causal("top_left", -70), 300, 500),
    (Causal(offset=-70), 300, 300),
    (Causal("top_left", 200), 40, 600),
    (SlidingWindow(40, 0, offset=-9), 200, 200),
    (SlidingWindow(30, 30, "top_left", 165), 300, 310),
    (Documents((0, 100, 160), (0, 90, 300), inner=SlidingWindow(30, 0, "top_left", 65)), 160, 300),
    (Documents((0, 100, 160), (0, 90, 300), inner=Causal(offset=-20)), 160, 300),
)
MORE = [
    Case(**ONE_HEAD | dict(head_dim=67, head_dim_v=37, mask=SlidingWindow(40, 3))),  # padded to 72 and 40
    *(
        Case(**SMALL | dict(batch=2, seqlen_k=190, mask=mask, **changes))
        for mask, changes in (
            (Padding(None, (0, 100)) & SlidingWindow(30, 2), {"alibi": "h"}),
            (Padding((0, 100), (50, 60), Causal()), {"sink": True, "head_dim": 59, "lse_grad": True}),
            (Padding((50, 100), (50, 60)) & Causal(), {}),  # by tables
        )
    ),
    *(Case(**SMALL | dict(mask=mask, seqlen_q=m, seqlen_k=n, head_dim=d)) for d in (64, 128) for mask, m, n in MOVED),
    # By tables, of heads that ascend and others that descend; keys that all queries see, with the longest walks.
    *(
        Case(**SMALL | dict(head_dim=d, heads_q=4, heads_k=4, seqlen_q=330, seqlen_k=330, mask=mask))
        for d, mask in ((64, SlidingWindow(60, 0) | FirstKeys(70)), (128, PrefixTree((-1, 0, 1, 0), (70, 90, 50, 120))))
    ),
    *(  # query heads of a group that see the same, and others that do not
        Case(**SMALL | dict(head_dim=d, heads_q=4, heads_k=2, mask=mask))
        for d in (64, 128)
        for mask in (PerHead({(0, 2): Causal(), (2, 4): FirstKeys(50)}), PerHead({(0, 1): Causal(), (1, 4): FirstKeys(50)}))
    ),
    Case(**SMALL | dict(mask=Full(), lse_grad=True, dtype="fp16")),
    Case(**ONE_HEAD | dict(head_dim=192, head_dim_v=128, mask=Full(), seqlen_k=300)),
    Case(**ONE_HEAD | dict(head_dim=256, mask=Causal())),
    Case(**SMALL | dict(mask=Causal(), seqlen_q=30, seqlen_k=140, bias="q", bias_hides=True, lse_grad=True)),
    Case(**SMALL | dict(mask=Full(), seqlen_q=70, seqlen_k=140, bias="h", lse_grad=True)),
    Case(**SMALL | dict(mask=Full(), seqlen_q=70, seqlen_k=40, bias="hq", bias_hides=True)),
    Case(**ONE_HEAD | dict(head_dim=40, mask=SlidingWindow(40, 3))),
    *(Case(**SMALL | dict(batch=2, seqlen_q=n, seqlen_k=300 // n, mask=mask)) for n in (1, 30, 300) for mask in (Full(), Causal())),
    *(
        Case(**SMALL | dict(head_dim=d, head_dim_v=v, mask=SlidingWindow(40, 3), dtype="fp16"))
        for d, v in ((72, 40), (96, 96), (128, 128), (192, 192))
    ),
    *(Case(**SMALL | dict(head_dim=d, mask=random_mask(150, 150), bias="hq", bias_hides=True)) for d in (64, 96, 128)),
    *(Case(**SMALL | dict(head_dim=d, mask=Full(), bias="hq", bias_hides=True)) for d in (64, 96, 128, 192, 256)),
    *(
        Case(**SMALL | dict(mask=mask, seqlen_q=100, seqlen_k=130, bias=bias, bias_hides=True))
        for mask, bias in ((DOCUMENTS, "hq"), (PrefixLM(30), "b"))
    ),
    *(Case(**SMALL | dict(head_dim=d, mask=PrefixLM(30), heads_q=4, heads_k=2)) for d in (64, 128, 256)),
    *(Case(**SMALL | dict(head_dim=d, mask=DOCUMENTS, seqlen_q=100, seqlen_k=130, alibi="h", diagonal=True)) for d in (96, 128)),
    *(Case(**SMALL | dict(seqlen_q=300, seqlen_k=n, heads_q=3, heads_k=3, mask=Full())) for n in (3, 128, 400)),
    Case(**ONE_HEAD | dict(seqlen_q=460, seqlen_k=20, mask=Full(), bias="hq", bias_hides=True)),
    *(
        Case(**SMALL | dict(batch=2, head_dim=d, head_dim_v=v, mask=mask, seqlen_k=n, bias=bias, wide=wide, **changes))
        for d, v, mask, n, bias, wide, changes in (
            (64, 64, Causal(), 290, "q", True, {}),
            (72, 40, Full(), 261, "h", False, {}),
            (128, 64, SlidingWindow(200, 9), 290, "bq", False, {"softcap": 5.0}),
            (256, 256, Full(), 261, "", True, {"alibi": "h"}),
        )
    ),
    *(
        Case(**SMALL | dict(head_dim=d, head_dim_v=v, mask=SlidingWindow(40, 3)))
        for d, v in ((8, 8), (40, 72), (64, 128), (104, 104), (136, 128))
    ),
    *(Case(**SMALL | dict(head_dim=d, mask=Causal(), softcap=5.0)) for d in (8, 40, 72)),
    *(Case(**SMALL | dict(head_dim=d, mask=DOCUMENTS, seqlen_q=100, seqlen_k=130, softcap=5.0, alibi="h")) for d in (104, 136, 200)),
]


class Recorded(Emulated):
    """Keeps what it computed last."""

    def backward(self, call, o, lse, *arguments, **named):
        grads = super().backward(call, o, lse, *arguments, **named)
        self.results = o, lse, *grads
        return grads


@pytest.mark.slow
def test_o_may_lie_with_its_heads_first():
    call = make(replace(CAUSAL, heads_q=2), 0)
    o, lse = Emulated().forward(call)
    out = torch.full_like(o, math.nan).transpose(1, 2).contiguous().transpose(1, 2)
    got, lse_too = Emulated().forward(replace(call, out=out))
    assert got is out and torch.equal(got, o) and torch.equal(lse, lse_too)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=lambda case: case.id)
def test_cases(case):
    """Hidden memory poisoned; the same bits whatever the copy engine and the tensor cores do first."""
    backends = [Recorded(pace, seed) for seed, pace in enumerate(PACES)]
    for backend in backends:
        conformance.run_hidden(backend, case)
        assert all(x is None or torch.equal(x, y) for x, y in zip(backends[0].results, backend.results, strict=True))


GROUPED = dict(batch=2, seqlen_q=140, seqlen_k=290, heads_q=6, heads_k=2, head_dim=128, dtype="bf16")
FEWER = GROUPED | dict(batch=1, seqlen_k=200, heads_q=4)
APART = [(SlidingWindow(40, 3), 64), (Causal(), 128), (Causal("top_left"), 72), (SlidingWindow(100, 9), 128), (Causal(), 96)]


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "head_dim"), APART, ids=str)
def test_heads_of_a_group_apart(mask, head_dim, monkeypatch):
    """As on long sequences: each query head has thread blocks of its own, and dK and dV are summed over the group, with the same bits at any pace."""
    for name in ("CACHE", "WINDOW_CACHE"):
        monkeypatch.setattr(plan, name, 0)
    case = Case(**(FEWER if (mask, head_dim) == APART[0] else GROUPED) | dict(mask=mask, head_dim=head_dim))
    assert plan.config_of(make(case, 0, grad=True)).block_per_q_head
    backends = [Recorded(pace, seed) for seed, pace in enumerate(PACES)]
    for backend in backends:
        conformance.run_hidden(backend, case)
        assert all(x is None or torch.equal(x, y) for x, y in zip(backends[0].results, backend.results, strict=True))
    conformance.run_spoiled(Emulated(), case)


UNEVEN = [
    (Documents([0, 30, 100, 140], inner=Causal()), 10, 64),
    pytest.param(Documents([0, 140], inner=Causal()), 10, 128, marks=pytest.mark.slow),
    *(pytest.param(Causal(), 5, dim, marks=pytest.mark.slow) for dim in (64, 192, 256)),
]


@pytest.mark.parametrize(("mask", "heads_q", "head_dim"), UNEVEN, ids=str)
def test_descending_heads_in_sections_of_three_and_two(mask, heads_q, head_dim, monkeypatch):
    """As grouped heads of documents take turns, and heads of long causal sequences."""
    for name, value in {"SHARING": 2, "FAR": 2, "LONG": 0}.items():
        monkeypatch.setattr(plan, name, value)
    case = Case(batch=1, seqlen_q=140, seqlen_k=140, heads_q=heads_q, heads_k=5, head_dim=head_dim, mask=mask, dtype="bf16")
    call = make(case, 0, grad=True)
    (_, turns), *_ = plan.Plan.of(call, plan.Gpu(4, 2 << 20)).turns
    assert turns.ascending == (plan.NONE_ASCENDS if heads_q > 5 else 0) and turns.heads_interleaved == 3
    conformance.run_hidden(Emulated(), case)


@pytest.mark.parametrize(("head_dim", "bias"), [(64, None), *(pytest.param(dim, "hq", marks=pytest.mark.slow) for dim in (64, 128, 256))])
def test_blocks_that_walk_anyhow(head_dim, bias, monkeypatch):
    """Under tables: sums wait for their turns, dQ has the same bits, and repairs and a bias's gradient find a visit, whatever the order."""

    def shuffled(n_block, m_block):
        return np.lexsort((np.random.default_rng(head_dim).permutation(len(m_block)), n_block))

    # Some queries see no key, some keys are unseen; lengths that no other test has, as tables are kept with masks.
    mask = Slices([(10, 200), (150, 311)], [(0, 150), (120, 280)], [0, 0]) - SlidingWindow(head_dim // 8, 0)
    case = Case(**SMALL | dict(seqlen_q=311, seqlen_k=290, head_dim=head_dim, mask=mask, bias=bias))
    found = []
    for walks in (tables._walks, shuffled):
        monkeypatch.setattr(tables, "_walks", walks)
        for plane in mask.planes(311, 290, case.batch, case.heads_q):
            plane.region.memo.clear()
        conformance.run_hidden(backend := Recorded(PACES[0], 0), case)
        _, _, dQ, *_ = backend.results
        found.append(dQ)
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(40, 3)], ids=repr)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_visible_nan_and_a_bias_of_infinity(head_dim, mask):
    conformance.run_spoiled(Emulated(), Case(**SMALL | dict(head_dim=head_dim, mask=mask, bias="hq")))


@pytest.mark.parametrize(
    ("mask", "head_dim"),
    [
        (Causal(), 128),
        pytest.param(Causal(), 64, marks=pytest.mark.slow),
        pytest.param(SlidingWindow(90, 3), 128, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_infinities_of_both_signs(mask, head_dim):
    """More than a warp's lanes apart."""
    conformance.run_overflown(Emulated(), Case(**SMALL | dict(mask=mask, head_dim=head_dim)))


SPOILED = [
    (Causal(), 64, {}),
    (SlidingWindow(70, 3), 128, {}),
    (Documents((0, 20, 150), inner=Causal()), 96, {}),
    (PrefixLM(30), 64, {}),
    (Full(), 64, {"bias": "hq", "bias_hides": True}),
    (Causal(), 256, {}),
    (SlidingWindow(70, 3), 40, {"dtype": "fp16"}),
]


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize(
    ("mask", "head_dim", "changes"),
    [pytest.param(*each, marks=pytest.mark.slow if i > 1 else ()) for i, each in enumerate(SPOILED)],
    ids=lambda x: repr(x) if not isinstance(x, dict) else "-".join(map(str, x.values())) or "plain",
)
def test_numbers_of_v_that_are_not_finite(mask, head_dim, changes):
    """In tiles that some rows see and others do not: they reach the rows that see them, and no others."""
    call = make(Case(**ONE_HEAD | dict(head_dim=head_dim, mask=mask) | changes), 0)
    v = call.v.clone()
    v[0, 3::37, 0, 1] = math.nan
    v[0, 5::31, 0, 2:] = math.inf
    v[0, 9::23, 0, 4::3] = -math.inf
    call = replace(call, v=v)
    tolerance.check_outputs(call, *Emulated().forward(call))


@pytest.mark.parametrize(
    ("mask", "dims", "dtype"),
    [
        (SlidingWindow(40, 3), (72, 40), "bf16"),
        pytest.param(Causal(), (40, 72), "fp16", marks=pytest.mark.slow),
        pytest.param(Causal(), (256, 256), "bf16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_numbers_of_dO_that_are_not_finite(mask, dims, dtype):
    """One in every seventh row, in another column each time: even and odd ones, seen by some keys of a tile and hidden from others."""
    case = Case(**ONE_HEAD | dict(head_dim=dims[0], head_dim_v=dims[1], mask=mask, dtype=dtype))
    call, (d_o, d_lse) = make(case, 0, grad=True), upstream(case, 0)
    d_o = d_o.clone()
    for query in range(3, call.seqlen_q, 7):
        d_o[0, query, :, query % dims[1]] = math.nan
    o, lse = Emulated().forward(call)
    grads = Emulated().backward(call, o, lse, d_o, d_lse)
    tolerance.check_gradients(call, grads, d_o, d_lse, tolerance.expected(call, d_o, d_lse))


@pytest.mark.slow
def test_infinities_of_dO_far_from_what_is_hidden():
    """What is NaN in most gradients is so by right, as nothing hidden in their tiles is; of both signs in one column, of one in another."""
    case = Case(**ONE_HEAD | dict(seqlen_q=300, seqlen_k=300, mask=SlidingWindow(160, 0)))
    call, (d_o, d_lse) = make(case, 0, grad=True), upstream(case, 0)
    d_o = d_o.clone()
    d_o[0, 250, :, 3:5], d_o[0, 248, :, 4] = math.inf, -math.inf
    o, lse = Emulated().forward(call)
    grads = Emulated().backward(call, o, lse, d_o, d_lse)
    assert grads.v[0, 100, 0].isinf().sum() == grads.v[0, 100, 0].isnan().sum() == 1
    tolerance.check_gradients(call, grads, d_o, d_lse, tolerance.expected(call, d_o, d_lse))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [128, 256])
def test_keys_that_no_query_looks_at(dim):
    """Probabilities that are tiny in all of a row need the range of their dtype: fp16's would be 0."""
    conformance.run_case(Emulated(), Case(**SMALL | dict(mask=Full(), seqlen_q=5, seqlen_k=100, head_dim=dim, scale=0.7)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seqlens", "mask"),
    [
        ((31, 400), SlidingWindow(50, 0)),
        ((129, 65), Causal()),  # one block of keys; half a tile of queries sees nothing
        ((130, 257), Causal("top_left")),
    ],
    ids=str,
)
def test_keys_that_nobody_sees(seqlens, mask):
    """16 rows of a gradient of which none sees anything, and whatever lies there."""
    for run in (conformance.run_hidden, conformance.run_spoiled):
        run(Emulated(), Case(**ONE_HEAD | dict(batch=2, seqlen_q=seqlens[0], seqlen_k=seqlens[1], mask=mask)))


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_scores_below_zero(dtype):
    """In all rows, in some, and in none; growing from tile to tile, so that maxima move, which are compared as integers only above 0."""
    call = make(Case(**ONE_HEAD | dict(mask=Full(), seqlen_q=130, seqlen_k=400, dtype=dtype)), 0)
    slope = torch.linspace(-0.2, -2.0, 400)[None, :, None, None]
    for signs in (torch.ones(130), torch.where(torch.arange(130) < 70, -1.0, 1.0), -torch.ones(130)):
        q = (call.q.abs() * signs[None, :, None, None]).to(call.q.dtype)
        k = (call.k.abs() * slope).to(call.k.dtype)
        tolerance.check_outputs(changed := replace(call, q=q, k=k), *Emulated().forward(changed))


LARGEST = [
    dict(mask=Causal(), softcap=5.0, alibi="h", sink=True, seqlen_k=200),
    dict(mask=Full(), seqlen_k=400),
    dict(mask=Full(), seqlen_k=300, head_dim=256),
    dict(mask=Causal(), head_dim=128),
    dict(mask=DOCUMENTS, seqlen_q=100, seqlen_k=130),
    dict(mask=random_mask(150, 150), softcap=2.0),
    dict(mask=SlidingWindow(40, 3), bias="hq", bias_hides=True, sink=True),
    dict(mask=Causal(), batch=2, seqlen_q=1, seqlen_k=300, heads_q=4, heads_k=2),
    dict(mask=Full(), batch=2, seqlen_q=30, seqlen_k=140),
]


@pytest.mark.parametrize(
    "changes",
    [pytest.param(each, marks=pytest.mark.slow if i else ()) for i, each in enumerate(LARGEST)],
    ids=lambda each: Case(**SMALL | each).id,
)
def test_largest_scores(changes):
    """Of scores as they come, of those that ascend from tile to tile or descend, and all below 0; beside NaN and an infinity, hidden and visible."""
    case = Case(**SMALL | changes)
    conformance.run_row_max(Emulated(), case)
    call = replace(make(case, 1), row_max=True)
    slope = torch.linspace(0.1, 2.0, case.seqlen_k)[None, :, None, None]
    for k in (call.k.abs() * slope, -call.k.abs() * slope.flip(1), call.k):
        changed = replace(call, q=call.q.abs(), k=k.to(call.k.dtype))
        if k is call.k:
            changed.k[0, case.seqlen_k // 3, 0, 2], changed.k[0, case.seqlen_k * 7 // 8, 0, 3] = math.inf, math.nan
        tolerance.check_row_max(changed, Emulated().forward(changed)[2])


def test_largest_scores_of_shared_units():
    """Thread blocks that have some of the keys each: the largest may be any one's."""
    call = replace(make(Case(**SMALL | dict(mask=Full(), seqlen_q=20, seqlen_k=2300, heads_q=1)), 2), row_max=True)
    backend = Emulated()
    for key in (0, 1100, 2299):
        call.k[:, key] = call.q[:, :1, :1, :].squeeze(2) * 3
        for value in (3.0, math.nan):
            call.k[:, key, 0, 0] = value
            tolerance.check_row_max(call, backend.forward(call)[2])


def without(pattern: str, instead: str = ""):
    """PTX with something else where the pattern matches, which it has to but in the launch of repairs alone."""

    def change(text: str) -> str:
        changed, n = re.subn(pattern, instead, text)
        assert n or "wgmma" not in text, f"there is no {pattern}"
        return changed

    return change


BROKEN = {
    "products are not waited for": without(r"wgmma\.wait_group\.sync\.aligned\s+\d+;"),
    "what the copy engine brings is not waited for": without(r"mbarrier\.try_wait\S+ +(\w+), \[[^;]*;", r"setp.eq.u32 \1, 0, 0;"),
    "what it takes away is not waited for": without(r"cp\.async\.bulk\.wait_group\.read\s+\d+;"),
    "a turn is given too early": without(r"cp\.async\.bulk\.wait_group\s+0;"),
    "the copy engine and tensor cores are not told of what threads write": without(r"fence\.proxy\.async[^;]*;"),
    "warps do not wait for each other": without(r"bar\.sync\s+[^;]*;"),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_kernel_without_a_wait_is_seen(change):
    """In the backward pass; of the paces one has to notice."""
    call, (d_o, d_lse) = make(CAUSAL, 0, grad=True), upstream(CAUSAL, 0)
    o, lse = Emulated().forward(call)
    healthy = Emulated().backward(call, o, lse, d_o, d_lse)
    seen = []
    for seed, pace in enumerate(PACES):
        try:
            broken = Emulated(pace, seed, change=change).backward(call, o, lse, d_o, d_lse)
            seen.append(not all(torch.equal(x, y) for x, y in zip(healthy[:3], broken[:3], strict=True)))
        except Fault:
            seen.append(True)
    assert any(seen)


FETCHED_TOGETHER = Case(**ONE_HEAD | dict(seqlen_q=500, seqlen_k=180, head_dim=128, mask=Full()))
"""The forward pass in clusters."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        FETCHED_TOGETHER,
        *(
            Case(**ONE_HEAD | dict(seqlen_q=2100, head_dim=d, head_dim_v=128, mask=mask))
            for d, mask in ((128, Causal("top_left")), (128, SlidingWindow(30, 50, "top_left")), (192, Causal("top_left")))
        ),
    ],
    ids=lambda case: case.id,
)
def test_clusters(case):
    found = [Emulated(pace, seed).forward(make(case, 0)) for seed, pace in enumerate(PACES)]
    assert all(torch.equal(x, y) for other in found for x, y in zip(found[0], other, strict=True))
    conformance.run_forward(Emulated(), case)


def test_a_thread_block_of_a_cluster_may_not_end_before_the_others():
    alone = without(r"barrier\.cluster\.wait;")
    with pytest.raises(Fault):
        for pace in PACES:
            Emulated(pace, change=alone).forward(make(FETCHED_TOGETHER, 0))


def test_a_thread_block_may_not_end_before_its_output_has_left():
    with pytest.raises(Fault, match="still read its shared memory"):
        Emulated("lazy", change=BROKEN["what it takes away is not waited for"]).forward(make(CAUSAL, 0))
