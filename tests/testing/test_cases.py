import re

import pytest
import torch

from tilewise.masks import Causal, Documents, SlidingWindow
from tilewise.testing.cases import DTYPES, FILLS, FULL, LAYOUTS, LOWEST, QUICK, Case, make, upstream


def test_ids_are_readable_and_unique():
    case = Case(head_dim=72, head_dim_v=40, mask=Causal(), dtype="bf16", softcap=2.0, sink=True)
    assert case.id == "b2-q65k129-h4/2-d72v40-causal-bf16-softcap2-sink"
    window = Case(mask=SlidingWindow(3, 0) & Documents([0, 5]), bias="", alibi="h", layout="sliced")
    assert window.id == "b2-q65k129-h4/2-d64-slidingwindow.3.0.and.documents.0.5-fp32-bias-alibih-sliced"
    ids = [case.id for case in FULL]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-z0-9./-]+", id) for id in ids)


def test_long_masks_have_short_ids():
    one, other = (Case(mask=Documents([*range(100), last])).id for last in (101, 102))
    assert one != other and len(one) < 120


def test_quick_covers_everything():
    assert set(QUICK) <= set(FULL) and 60 <= len(QUICK) <= 120
    assert {case.dtype for case in QUICK} == set(DTYPES) and {case.layout for case in QUICK} == set(LAYOUTS) - {"inner"}
    assert {case.mask.kind for case in QUICK} == {"full", "band", "runs", "bitmap"}
    assert {1, 3, 40, 64, 72, 128, 256} <= {case.head_dim for case in QUICK}
    assert (
        {0, 1} <= {case.seqlen_q for case in QUICK} and {0, 1} <= {case.seqlen_k for case in QUICK} and 0 in {case.batch for case in QUICK}
    )
    for dtype in ("fp32", "bf16"):
        cases = [case for case in QUICK if case.dtype == dtype]
        for feature in ("softcap", "alibi", "sink", "dropout", "lse_grad", "head_dim_v"):
            assert any(getattr(case, feature) for case in cases), (dtype, feature)
        assert any(case.bias is not None for case in cases)
        assert any(case.heads_q > case.heads_k == 1 for case in cases) and any(case.heads_q > case.heads_k > 1 for case in cases)
        assert any(case.seqlen_q > case.seqlen_k for case in cases) and any(case.seqlen_q < case.seqlen_k for case in cases)


def test_filled_biases_are_finite_and_leave_every_row_a_key():
    filled = [case for case in FULL if case.bias_fill is not None]
    assert {case.dtype for case in filled if case in QUICK} == {"fp32", "bf16", "fp16"} and {case.dtype for case in filled} == set(DTYPES)
    assert Case(bias="q", bias_fill=LOWEST).id.endswith("fp32-biasq-fill-3.40282e38")
    for case in filled:
        call = make(case)
        fill = torch.tensor(max(case.bias_fill, torch.finfo(call.bias.dtype).min), dtype=torch.float64).to(call.bias.dtype)
        share = (call.bias == fill).double().mean()
        assert call.bias.isfinite().all() and 0.25 < share < 0.4 and (call.bias[..., -1, : case.seqlen_k // 2] == fill).all()
        seen = call.mask.dense(case.seqlen_q, case.seqlen_k) & (call.bias != fill)
        assert seen.any(-1).all()
    assert {fill["bias_fill"] for fill in FILLS} == {-1e30, LOWEST, -1e4}


def test_random_inputs_are_reproducible_and_fresh():
    case = Case(sink=True, bias="h", alibi="bh")
    once, again, other = make(case, 1), make(case, 1), make(case, 2)
    for name in ("q", "k", "v", "bias", "sink", "alibi_slopes"):
        assert torch.equal(getattr(once, name), getattr(again, name)) and not torch.equal(getattr(once, name), getattr(other, name))
    assert not torch.equal(once.q, upstream(case, 1)[0][..., :64])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    case = Case(layout=layout, heads_k=4)
    call = make(case)
    shapes = {"q": (2, 65, 4, 64), "k": (2, 129, 4, 64), "v": (2, 129, 4, 64)}
    assert {name: tuple(getattr(call, name).shape) for name in shapes} == shapes
    stride = call.q.stride()
    assert (stride[3] == 1) == (layout != "inner")
    assert (stride[0] == 0) == (layout == "expanded") and (stride[1] < stride[2]) == (layout == "bhsd")
    assert call.q.is_contiguous() == (layout == "bshd") and upstream(case)[0].stride() == stride
    with pytest.raises(ValueError, match="layout must be one of"):
        make(Case(layout="other"))


def test_a_call_has_what_the_case_says():
    call = make(
        Case(mask=Causal(), scale=0.5, softcap=2.0, bias="hq", alibi="bh", diagonal=True, sink=True, wide=True, dropout=0.1, dtype="bf16")
    )
    assert (call.scale, call.softcap, call.dropout.p, call.mask) == (0.5, 2.0, 0.1, Causal())
    assert call.bias.shape == (1, 4, 65, 129) and call.bias.dtype == call.sink.dtype == torch.float32
    assert call.alibi_slopes.shape == (2, 4) and call.diagonal.shape == (65,) and call.diagonal.dtype == torch.int64
    plain = make(Case())
    assert plain.scale == 64**-0.5 and plain.bias is plain.sink is plain.dropout is plain.diagonal is plain.alibi_slopes is None
