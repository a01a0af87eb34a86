"""The same call three times, on fresh memory: the bits of O, LSE and gradients are those of the first call, and within the tolerance.

The first call is bound, and the others are served by what it was bound to. Problems are random, by a seed of the day, which a failure shows; where
tests may be slow there are hundreds.
"""

import pytest
import torch
from decode_fuzz import kind as decode_kind
from decode_fuzz import problem as decode_problem
from hypothesis import currently_in_test_context, given, note, seed, settings
from hypothesis import strategies as st
from sampled import SEED

import tilewise as tw
from tilewise.compat import flash_attn, sdpa
from tilewise.masks import Documents
from tilewise.problem import Gradients
from tilewise.runtime import call_cache, decode_cache
from tilewise.testing import tolerance
from tilewise.testing.cases import DTYPES, Case, make, masks, upstream
from tilewise.testing.strategies import band_masks, cases, cumulative

TODAY = int(SEED)
BACKENDS = {"reference": tuple(DTYPES), "tiled": tuple(DTYPES), "cpu": ("fp32", "bf16", "fp16")}
SHORT = st.one_of(st.sampled_from([0, 1, 2, 17, 64, 65]), st.integers(0, 100))
NAMES = "q", "k", "v", "bias", "sink"
few = settings(max_examples=5)
many = settings(max_examples=150)


def random(*strategies, how):
    """A test of random problems, quickly and again with many."""

    def tests(test):
        quick, slow = (seed(TODAY)(how_many(given(*strategies)(test))) for how_many in how)
        return quick, pytest.mark.slow(slow)

    return tests


@pytest.fixture(autouse=True)
def fresh_is_nan():
    """What torch leaves uninitialised is NaN, and calls stay plain."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def thrice(run) -> dict[str, torch.Tensor]:
    """What `run` gives, a dict of tensors, in each of three calls. It makes its tensors itself, and what it gives is alive until the end."""
    if currently_in_test_context():
        note(f"TILEWISE_TEST_SEED={TODAY}")
    call_cache.forget()
    decode_cache.forget()
    first, *others = [run() for _ in range(3)]
    for n, again in enumerate(others, 2):
        for name, x in first.items():
            same = x.dtype == again[name].dtype and torch.equal(x.nan_to_num(nan=7.0), again[name].nan_to_num(nan=7.0))
            assert same, f"{name} of call {n} differs from that of the first"
    return first


def attention(case: Case, backend: str, grad: bool, return_lse: bool, made: list) -> dict[str, torch.Tensor]:
    """O, LSE and gradients of tensors that are made here."""
    call, (d_o, d_lse) = make(case, seed=1, grad=grad), upstream(case, seed=1)
    leaves = {name: x if (x := getattr(call, name)) is None else x.detach().requires_grad_(grad) for name in NAMES}
    seeds = {} if call.dropout is None else {"dropout_seed": call.dropout.seed, "dropout_offset": call.dropout.offset}
    found = tw.attention(
        **leaves, mask=case.mask, scale=case.scale, softcap=case.softcap, alibi_slopes=call.alibi_slopes, dropout_p=case.dropout, backend=backend,
        return_lse=return_lse, **seeds,
    )  # fmt: skip
    found = found if return_lse else (found,)
    made.append((call, d_o, d_lse, found))
    results = dict(zip(("o", "lse"), (x.detach() for x in found), strict=False))
    if grad:
        with_lse = return_lse and case.lse_grad
        torch.autograd.backward(found if with_lse else found[0], (d_o, d_lse) if with_lse else d_o)
        results |= {f"d{name}": x.grad for name, x in leaves.items() if x is not None}
    return results


def hold_attention(case: Case, return_lse: bool) -> None:
    """On every backend that takes it, with and without gradients and LSE."""
    expect = None
    for backend, dtypes in BACKENDS.items():
        if case.dtype not in dtypes:
            continue
        bits = None
        for grad in (False, True):
            made: list = []
            found = thrice(lambda: attention(case, backend, grad, return_lse, made))  # noqa: B023
            assert bits is None or torch.equal(bits, found["o"]), f"{backend}: O differs with a gradient from that without"
            bits = found["o"]
        call, d_o, d_lse, _ = made[0]
        d_lse = d_lse if return_lse else None
        expect = tolerance.expected(call, d_o, d_lse) if expect is None else expect
        tolerance.hold("o", found["o"], expect.o)
        if return_lse:
            tolerance.check_lse("lse", found["lse"], expect.lse)
        tolerance.check_gradients(call, Gradients(*(found.get(f"d{name}") for name in NAMES)), d_o, d_lse, expect)


@random(cases(lengths=SHORT), st.booleans(), how=(few, many))
def attentions(case, return_lse):
    hold_attention(case, return_lse)


test_attention, test_attention_many_times = attentions


@st.composite
def documents(draw) -> Case:
    """Packed documents as a mask, alone in their batch or not."""
    total_q, total_k, number = draw(st.integers(1, 200)), draw(st.integers(1, 300)), draw(st.integers(1, 5))
    cu_q = cumulative(draw, total_q, number)
    cu_k = cumulative(draw, total_k, number) if draw(st.booleans()) else None
    inner = draw(band_masks(0, 0, 0).filter(lambda mask: not isinstance(mask, Documents)))
    length = max(total_q, total_k) if cu_k is None else total_k
    return Case(
        batch=draw(st.integers(1, 2)), seqlen_q=total_q, seqlen_k=length, mask=Documents(cu_q, cu_k, inner),
        dtype=draw(st.sampled_from(tuple(DTYPES))),
        head_dim=draw(st.sampled_from([8, 32, 33])), alibi=draw(st.sampled_from([None, "h", "bh"])), sink=draw(st.booleans()),
        bias=draw(st.sampled_from([None, None, "hq"])), softcap=draw(st.sampled_from([0.0, 2.0])), dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
        lse_grad=draw(st.booleans()),
    )  # fmt: skip


@random(documents(), st.booleans(), how=(few, many))
def documents_as_masks(case, return_lse):
    hold_attention(case, return_lse)


test_documents, test_documents_many_times = documents_as_masks


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(masks(45, 70))))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mask(number, dtype):
    hold_attention(Case(seqlen_q=45, seqlen_k=70, head_dim=24, mask=masks(45, 70)[number], dtype=dtype, alibi="h"), True)


@st.composite
def packed(draw) -> dict:
    number, heads = draw(st.integers(1, 5)), draw(st.sampled_from([(2, 2), (4, 1), (6, 2)]))
    lengths = [[draw(st.sampled_from([0, 1, 5, 17, 70])) for _ in range(number)] for _ in range(2)]
    names = "alibi_slopes", "slopes of documents", "bias", "sink", "seqused_k", "dropout", "batch_invariant", "softcap"
    return {
        "lengths": lengths if draw(st.booleans()) else lengths[:1] * 2,
        "heads": heads,
        "dtype": draw(st.sampled_from(tuple(DTYPES))),
        "words": draw(st.sets(st.sampled_from(names), max_size=3)),
        "mask": draw(band_masks(0, 0, 0).filter(lambda mask: not isinstance(mask, Documents))),
    }


def varlen(problem: dict, backend: str, grad: bool, return_lse: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw, words, (heads_q, heads_k) = torch.Generator().manual_seed(3), problem["words"], problem["heads"]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32) for lengths in problem["lengths"])
    number, rounded = len(cu_q) - 1, DTYPES[problem["dtype"]]
    new = lambda *shape: torch.randn(shape, generator=draw).to(rounded).to(dtype)  # noqa: E731
    leaves = {"q": new(int(cu_q[-1]) + 2, heads_q, 24), "k": new(int(cu_k[-1]) + 1, heads_k, 24), "v": new(int(cu_k[-1]) + 1, heads_k, 16)}
    leaves |= {"bias": new(number, heads_q, 1, max(*problem["lengths"][1], 1))} if "bias" in words else {}
    leaves |= {"sink": new(heads_q)} if "sink" in words else {}
    slopes = torch.rand(number, heads_q, generator=draw)
    more = {"alibi_slopes": slopes} if "slopes of documents" in words else {"alibi_slopes": slopes[0]} if "alibi_slopes" in words else {}
    more |= {"seqused_k": torch.tensor([n // 2 for n in problem["lengths"][1]])} if "seqused_k" in words else {}
    more |= {"dropout_p": 0.3, "dropout_seed": 5} if "dropout" in words else {}
    more |= {"batch_invariant": True} if "batch_invariant" in words else {}
    more |= {"softcap": 2.0} if "softcap" in words else {}
    leaves = {name: x.requires_grad_(grad) for name, x in leaves.items()}
    found = tw.attention_varlen(
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, mask=problem["mask"], backend=backend, return_lse=return_lse, **leaves, **more
    )
    found = found if return_lse else (found,)
    o, results = found[0], dict(zip(("o", "lse"), (x.detach() for x in found), strict=False))
    if grad:
        o.backward(torch.randn(o.shape, generator=draw).to(rounded).to(dtype))
        results |= {f"d{name}": x.grad for name, x in leaves.items()}
    return results


@random(packed(), st.booleans(), st.booleans(), how=(few, many))
def varlens(problem, grad, return_lse):
    expected = varlen(problem, "reference", grad, return_lse, torch.float64)
    for backend, dtypes in BACKENDS.items():
        if problem["dtype"] in dtypes:
            found = thrice(lambda: varlen(problem, backend, grad, return_lse, DTYPES[problem["dtype"]]))  # noqa: B023
            eps = torch.finfo(DTYPES[problem["dtype"]]).eps
            for name, x in found.items():
                apart = 0.5 if name == "lse" and problem["dtype"] in ("bf16", "fp16") else 30.0  # LSE is in fp32 there
                largest = float(expected[name].nan_to_num(posinf=0.0, neginf=0.0).abs().max()) if x.numel() else 0.0
                torch.testing.assert_close(
                    x.double(), expected[name].double(), atol=apart * eps * (1.0 + largest), rtol=0.0, equal_nan=True
                )


test_varlen, test_varlen_many_times = varlens


@random(st.integers(0, 1 << 30), st.booleans(), how=(settings(max_examples=8), many))
def decodes(number, return_lse):
    """Decode and what it appends; tests/test_decode_fuzz.py holds the same problems to the oracle."""

    def run():
        given = decode_problem(decode_kind(number, kernels=False), number).given
        found = tw.decode(**given, return_lse=return_lse)
        caches = {name: given[name].float() for name in ("k_cache", "v_cache")}
        return dict(zip(("o", "lse"), found if return_lse else (found,), strict=False)) | caches

    thrice(run)


test_decode, test_decode_many_times = decodes


@random(cases(lengths=SHORT.filter(bool), dtypes=("fp32", "bf16", "fp16")), st.booleans(), how=(few, many))
def drop_ins(case, grad):
    """SDPA's and flash_attn's functions: the same bits again, and each other's and `attention`'s where these can be called so."""
    if case.batch == 0:
        return

    def inputs():
        call = make(case, seed=1)
        return [x.detach().requires_grad_(grad) for x in (call.q, call.k, call.v)]

    def results(o, x):
        gradients = torch.autograd.grad(o, x, torch.ones_like(o)) if grad else ()
        return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients), strict=False))

    def by_sdpa():
        x = inputs()
        o = sdpa.scaled_dot_product_attention(*(each.transpose(1, 2) for each in x), enable_gqa=True, scale=case.scale)
        return results(o.transpose(1, 2), x)

    def by_flash_attn():
        x = inputs()
        return results(flash_attn.flash_attn_func(*x, softmax_scale=case.scale), x)

    def directly():
        x = inputs()
        return results(tw.attention(*x, scale=case.scale), x)

    one, *others = (thrice(run) for run in (directly, by_sdpa, by_flash_attn))
    assert all(torch.equal(other[name], one[name]) for other in others for name in one)


test_drop_ins, test_drop_ins_many_times = drop_ins
