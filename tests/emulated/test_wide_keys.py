"""dK and dV of the Hopper kernels in fp32, carried out without a GPU: the sums that are rounded without."""

import math
from dataclasses import replace

import emulated_ranks
import pytest
import ranks
import torch
import wide_keys
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES

from tilewise.backends import tiled
from tilewise.backends.hopper.backward import plan
from tilewise.masks import Causal, Documents, Full, Padding, SlidingWindow
from tilewise.sm90 import jit
from tilewise.testing.cases import Case, make, random_mask, upstream

pytestmark = NEEDED

SMALL = dict(batch=1, seqlen_q=150, seqlen_k=190, heads_q=2, heads_k=1, dtype="bf16")
DOCUMENTS = Documents((0, 20, 150), (0, 60, 190), inner=Causal())
FIRST = Case(**SMALL | dict(seqlen_q=70, seqlen_k=181, mask=Full()))
MORE = [
    Case(**SMALL | dict(mask=SlidingWindow(40, 3), batch=2, dtype="fp16")),
    Case(**SMALL | dict(mask=Causal(), head_dim=128, seqlen_q=300)),
    Case(**SMALL | dict(mask=DOCUMENTS, head_dim=128, dtype="fp16")),
    Case(**SMALL | dict(mask=Causal("top_left"), head_dim=256)),
    Case(**SMALL | dict(mask=SlidingWindow(40, 3), head_dim=192, head_dim_v=128)),  # "lean"
    Case(**SMALL | dict(mask=Causal(), head_dim=96)),
    Case(**SMALL | dict(mask=Full(), seqlen_q=300, seqlen_k=77)),  # one block of keys, whose walk is shared
    Case(**SMALL | dict(mask=random_mask(150, 190), head_dim=192, head_dim_v=128, dtype="fp16")),
    Case(**SMALL | dict(mask=DOCUMENTS, head_dim=192)),
    Case(**SMALL | dict(mask=SlidingWindow(40, 3), head_dim=67, head_dim_v=37)),  # padded to 72 and 40, and cut
    Case(**SMALL | dict(mask=random_mask(150, 190), head_dim=128)),
    Case(**SMALL | dict(mask=Causal("top_left", -110), layout="bhsd", head_dim=128)),  # most keys nobody sees
    Case(**SMALL | dict(mask=Padding((130, 60)) & Causal(), batch=2)),  # packed documents: entries.py
    Case(**SMALL | dict(mask=DOCUMENTS, lse_grad=True)),
    Case(**SMALL | dict(mask=Causal(), softcap=5.0, alibi="h", sink=True)),
    Case(**SMALL | dict(mask=Full(), bias="hq", bias_hides=True)),
    Case(**SMALL | dict(mask=SlidingWindow(40, 3), dropout=0.3)),
    Case(**SMALL | dict(mask=random_mask(300, 190), seqlen_q=300)),  # by other tiles of queries than without
    Case(**SMALL | dict(mask=Full(), seqlen_q=300, seqlen_k=77, head_dim=128)),
    Case(**SMALL | dict(mask=Full(), seqlen_q=1100, seqlen_k=640, heads_q=1, heads_k=1)),  # blocks of the last wave are shared
]


class Behind(Emulated):
    """Behind a forward pass that need not be compiled."""

    def forward(self, call):
        return tiled.Tiled().forward(call)


@pytest.mark.parametrize("case", [FIRST, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=lambda case: case.id)
def test_they_round_to_what_is_given_without(case):
    wide_keys.held(Behind(), case)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_sums_are_exact(dims):
    wide_keys.sums_are_exact(Behind(), dims)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_of_a_group_apart(head_dim, monkeypatch):
    for name in ("CACHE", "WINDOW_CACHE"):
        monkeypatch.setattr(plan, name, 0)
    case = Case(**SMALL | dict(mask=Causal(), head_dim=head_dim, heads_q=6, heads_k=2))
    assert plan.config_of(make(case, grad=True)).block_per_q_head
    wide_keys.held(Behind(), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [MORE[0], MORE[1], MORE[3]], ids=lambda case: case.id)
def test_the_same_bits_whoever_comes_first(case):
    call, given = make(case, 0, grad=True), upstream(case, 0)
    first, *others = (wide_keys.both(Behind(pace, seed), call, *given)[1] for seed, pace in enumerate(PACES))
    assert all(torch.equal(x, y) for other in others for x, y in zip(first[:3], other[:3], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", [MORE[0], MORE[2], MORE[3], MORE[4]], ids=lambda case: case.id)
def test_visible_nan_and_infinities(case):
    """Repairs find and mend fp32 elements, too, and only those that hidden pairs have spoiled."""
    call, (d_o, d_lse) = make(case, 0, grad=True), upstream(case, 0)
    k, v, d_o = call.k.clone(), call.v.clone(), d_o.clone()
    k[:, 61], v[:, 75], v[:, 90, :, 1] = math.nan, math.nan, math.inf
    d_o[:, 30, :, -1], d_o[:, 99, :, 3], d_o[:, 101, :, 3] = math.nan, math.inf, -math.inf
    plain, wide = wide_keys.both(Behind(), replace(call, k=k, v=v), d_o, d_lse)
    assert wide.v.isnan().any() and wide.v.isfinite().any()
    wide_keys.same_bits_rounded(plain, wide)


def test_without_a_compiler_prebuilt_kernels_round(monkeypatch):
    call = replace(make(FIRST, grad=True), wide_keys=True)
    assert plan.config_of(call).wide_keys and not plan.config_of(replace(call, wide_keys=False)).wide_keys
    monkeypatch.setattr(jit, "why_no_compiler", lambda: ["there is none"])
    assert not plan.config_of(call).wide_keys


@pytest.mark.slow
def test_several_ranks_add_fp32():
    results = ranks.run(emulated_ranks.wide_keys, 2, seconds=600, timeout=600.0)
    errors = [result for result in results if result != "the same bits"]
    assert not errors, errors[0]
