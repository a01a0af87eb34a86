"""Packed heads give what unpacked ones give, by the oracle."""

from dataclasses import replace

import pytest
import torch

from tilewise.backends.hopper import packing
from tilewise.backends.reference import Reference
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.testing.cases import Case, make


@pytest.mark.parametrize("mask", [Full(), Causal(), Causal(align="top_left"), SlidingWindow(5, 0), SlidingWindow(3, 4)], ids=repr)
@pytest.mark.parametrize(("seqlen_q", "heads"), [(1, (8, 2)), (1, (6, 1)), (5, (4, 1))])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sliced"])
def test_packed_is_the_same_attention(mask, seqlen_q, heads, layout):
    sizes = {"batch": 3, "seqlen_q": seqlen_q, "seqlen_k": 37, "heads_q": heads[0], "heads_k": heads[1], "head_dim": 16, "head_dim_v": 24}
    call = make(Case(mask=mask, dtype="fp32", layout=layout, **sizes))
    packed = packing.pack(call)
    if seqlen_q > 1 and mask != Full():
        assert packed is None
        return
    assert packed.q.shape[1] == call.group * seqlen_q and packed.heads_q == packed.heads_k == call.heads_k
    o, lse = Reference().forward(call)
    mine, mine_lse = torch.full(o.shape, torch.nan), torch.full_like(lse, torch.nan)

    def kernel(q, k, v, of_o, of_lse):
        o_packed, lse_packed = Reference().forward(replace(packed, q=q, k=k, v=v))
        of_o.copy_(o_packed)
        of_lse.copy_(lse_packed)

    packing.Views(call, packed).compute(kernel, call.q, call.k, call.v, mine, mine_lse, True)
    torch.testing.assert_close(mine, o)
    torch.testing.assert_close(mine_lse, lse)


def test_nothing_visible_leaves_no_key():
    call = make(Case(seqlen_q=1, seqlen_k=9, heads_q=4, heads_k=2, mask=SlidingWindow(0, 0, align="top_left") & ~Full(), dtype="fp32"))
    packed = packing.pack(call)
    assert packed is None or packed.seqlen_k == 0


@pytest.mark.parametrize("change", [{"heads_q": 2}, {"alibi": "h"}, {"sink": True}, {"bias": "hq"}, {"seqlen_q": 65}])
def test_what_is_not_packed(change):
    fields = {"seqlen_q": 1, "seqlen_k": 9, "heads_q": 4, "heads_k": 2, "mask": Causal(), "dtype": "fp32", **change}
    assert packing.pack(make(Case(**fields))) is None
