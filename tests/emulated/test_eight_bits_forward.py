"""The forward pass in 8 bits, carried out without a GPU: the quantiser's bits are the contract's, the results the emulation's, at any pace.

Compiling a configuration takes longer than carrying it out: a quick test has few, and the others are slow.
"""

import math
from dataclasses import replace

import pytest
import torch
from eight_bits_problems import E4M3, Quantised, held, made, spoil, with_numbers_that_are_not_finite
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES

import tilewise
from tilewise import api
from tilewise.backends import eight_bits as arithmetic
from tilewise.backends.hopper import short
from tilewise.backends.hopper.eight_bits import call as eight_bits
from tilewise.backends.hopper.eight_bits.operands import Made, Scales
from tilewise.masks import Causal, Documents, Full, PrefixLM, SlidingWindow
from tilewise.runtime import call_cache, operator
from tilewise.sm90 import key_order

pytestmark = NEEDED

QUICK = [
    Quantised(seqlen_q=70, seqlen_k=150, mask=Causal()),
    Quantised("int8_qk", seqlen_q=70, seqlen_k=150, mask=Causal()),
    Quantised("given", 70, 40, per=("token", "tile", "head"), mask=Causal()),
]
WIDE = [
    *(
        Quantised(way, 140, 150, dims=(d, d), mask=mask)
        for d in (64, 128, 256)
        for way in ("int8", "int8_qk", "fp8", "given")
        for mask in (Full(), Causal())
    ),
    *(Quantised("int8", n, k, heads=(1, 1)) for n, k in ((1, 1), (3, 15), (2, 16), (40, 17), (10, 127), (10, 129), (130, 400))),
    Quantised("fp8", 200, 30, mask=Causal()),  # rows that see nothing
    Quantised("int8", 130, 300, mask=SlidingWindow(40, 3), dims=(72, 40)),
    Quantised("fp8", 130, 300, batch=2, heads=(4, 2), dtype=torch.float16, scale=-0.2),
    Quantised("int8_qk", 200, 30, mask=Causal()),
    Quantised("int8_qk", 130, 300, batch=2, heads=(4, 2), dtype=torch.float16, scale=-0.2),
    Quantised("int8_qk", 130, 300, mask=SlidingWindow(40, 3), dims=(96, 96), row_max=True),
    Quantised("int8_qk", 130, 300, dims=(96, 96), dtype=torch.float16),
    Quantised("int8_qk", 130, 300, mask=Causal(), dims=(192, 128)),
    Quantised("given", 130, 300, batch=2, heads=(4, 2), per=("head", "head", "head"), scale=-0.2),
    Quantised("given", 130, 400, per=("tensor", "tile", "tile"), mask=Causal()),
    Quantised("given", 130, 400, per=("head", "tensor", "tile"), dims=(256, 256)),
    Quantised("given int8", 130, 300, batch=2, heads=(4, 2), per=("token", "tile", "tensor")),
    Quantised("given int8", 130, 300, batch=2, heads=(4, 2), per=("token", "token", "head")),
    Quantised("given", 130, 400, per=("head", "tensor", "token"), dims=(128, 128)),
    Quantised("given int8", 130, 300, per=("head", "token", "token"), dims=(256, 256), mask=Causal()),
    Quantised("given", 70, 150, per=("token", "token", "token"), mask=Causal()),
    Quantised("given", 3, 1, per=("token", "token", "token")),
    Quantised("int8", 130, 300, row_max=True, mask=Causal()),
]


def run(call, pace: str = "random", seed: int = 0, **tuning):
    with Emulated(pace, seed).on_gpu():
        return eight_bits.forward(call, eight_bits.config_of(call, **tuning))


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in WIDE)], ids=str)
def test_cases(case):
    call = made(case)
    results = [run(call, pace, seed) for seed, pace in enumerate(PACES)]
    held(call, *results[0])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"cluster": 2},
        {"pingpong": True},
        {"promote": False},
        {"tile_m": 192, "promote": False},
        {"tile_m": 192, "pieces": 2},
        {"tile_m": 192, "pieces": 2, "cluster": 2},
        {"kv_stages": 2},
    ],
)
@pytest.mark.parametrize("mask", [Full(), Causal()])
def test_schedules(fields, mask):
    call = made(Quantised(seqlen_q=300, seqlen_k=400, mask=mask))
    results = [run(call, pace, seed, **fields) for seed, pace in enumerate(PACES)]
    held(call, *results[0])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.fixture
def many_keys(monkeypatch):
    """Few of them count as many."""
    monkeypatch.setattr(eight_bits, "FEW_KEYS", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(Quantised(way, 140, 400, dims=(256, 256), mask=mask) for way in ("int8", "fp8", "given") for mask in (Full(), Causal())),
        Quantised("given", 140, 400, dims=(256, 256), per=("head", "token", "tile"), mask=Causal()),
        Quantised("given int8", 140, 400, dims=(256, 256), per=("token", "tile", "token")),
        Quantised("int8", 200, 400, dims=(256, 256), mask=SlidingWindow(40, 3), row_max=True),
        Quantised("int8", 200, 30, dims=(240, 200), heads=(4, 2), batch=2, dtype=torch.float16, mask=Causal()),
        Quantised("fp8", 3, 1, dims=(256, 256)),
    ],
    ids=str,
)
def test_promoted_in_pieces(case, many_keys):
    call = made(case)
    assert eight_bits.config_of(call).pieces == 2
    results = [run(call, pace, seed, cluster=1 + seed % 2) for seed, pace in enumerate(PACES)]
    held(call, *results[0])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["int8", "given"])
@pytest.mark.parametrize("mask", [Documents((0, 20, 60, 100), (0, 90, 90, 300)), PrefixLM(30), PrefixLM(200)], ids=repr)
def test_masks_of_tables_in_pieces(mask, way, many_keys):
    call = made(Quantised(way, 100, 300, dims=(256, 256), mask=mask))
    held(call, *run(call))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["int8", "given"])
def test_changed_scores_in_pieces(way, many_keys):
    call = replace(made(Quantised(way, 70, 300, dims=(256, 256), mask=Causal(), row_max=True)), **CHANGES)
    held(call, *run(call))


CHANGES = {"sink": torch.tensor([0.5, 3.0]), "alibi_slopes": torch.tensor([[0.1, 0.5]]), "softcap": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("names", [["sink"], ["softcap"], ["alibi_slopes"], [*CHANGES]], ids="-".join)
@pytest.mark.parametrize(
    "case",
    [
        Quantised("given", 70, 150),
        Quantised("fp8", 70, 150, mask=Causal(), row_max=True),
        Quantised("int8_qk", 70, 150, mask=Causal(), row_max=True),
        Quantised("given int8", 70, 150, mask=Causal(), row_max=True, per=("token", "token", "token")),
    ],
    ids=str,
)
def test_changed_scores(case, names):
    call = replace(made(case), **{name: CHANGES[name] for name in names})
    held(call, *run(call))


ENDS = (0, 20, 20, 70), (0, 30, 70, 130)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["int8", "int8_qk"])
def test_packed_documents(on_gpu, monkeypatch, way):
    """In one launch of the quantiser and one of the kernel: what lies behind the last document is not there; by the short way for other lengths."""
    monkeypatch.setattr(api, "_on_gpu", lambda *cu_seqlens: True)
    call = made(Quantised(way, seqlen_q=80, seqlen_k=150))
    for ends in (ENDS, ((0, 0, 60, 60), (0, 0, 80, 80))):
        q, k, v = (x.clone() for x in (call.q[0], call.k[0], call.v[0]))
        for x, end in zip((q, k, v), (ends[0][-1], ends[1][-1], ends[1][-1]), strict=True):
            x[end:] = 1e30
        cu_seqlens = [torch.tensor(x, dtype=torch.int32) for x in ends]
        o, lse = tilewise.attention_varlen(q, k, v, *cu_seqlens, causal=True, precision=way, return_lse=True)
        given = {name: x[None] for name, x in zip("qkv", (q, k, v), strict=True)}
        held(replace(call, **given, mask=Documents(*ends, inner=Causal())), o[None], lse[None])
        if ends == ENDS:
            monkeypatch.setattr(operator, "attend", None)  # the operator
    assert len(call_cache._KNOWN) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["int8", "int8_qk"])
@pytest.mark.parametrize("mask", [Documents((0, 20, 100), (0, 30, 130), inner=Causal()), Documents(*ENDS), PrefixLM(30)], ids=repr)
def test_masks_of_tables(mask, way):
    call = made(Quantised(way, seqlen_q=100, seqlen_k=130, mask=mask))
    held(call, *run(call))


@pytest.fixture
def on_gpu(monkeypatch):
    """As `Emulated.on_gpu`, for public calls, the cached ones as well, whose memory is poisoned."""

    def poisoned(device):
        def new(shape, strides, dtype):
            return torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(math.nan if dtype.is_floating_point else -7)

        return new

    for name, stand_in in {"current_device": lambda: None, "current_stream": lambda _: 0, "capturing": lambda: False}.items():
        monkeypatch.setattr(short, name, stand_in)
    monkeypatch.setattr(short, "as_operand", lambda bundle, _: bundle)
    monkeypatch.setattr(short, "allocator", poisoned)
    for module in (operator, call_cache):
        monkeypatch.setattr(module, "choose", lambda problem, name: Emulated())
    call_cache.forget()
    with Emulated().on_gpu():
        yield
    call_cache.forget()


REPEATED = [
    (QUICK[2], {}),
    (QUICK[0], {}),
    (QUICK[1], {}),
    (Quantised("given", 70, 150, per=("token", "token", "token"), mask=Causal()), {}),
    (Quantised("given int8", 30, 140, per=("head", "tensor", "token"), dims=(128, 128)), {}),
    (Quantised("fp8", 20, 140, batch=2), {"softcap": 2.0}),
    (Quantised("given", 30, 140, per=("head", "tensor", "tile"), dims=(256, 256)), {}),
    (Quantised("given", 70, 150), {"sink": torch.tensor([0.5, 3.0]), "alibi_slopes": torch.tensor([0.1, 0.5])}),
]


def behind_a_number(x):
    """x, and one number in memory before it."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    ("case", "options"), [REPEATED[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in REPEATED[1:])], ids=str
)
def test_calls_like_one_before(on_gpu, monkeypatch, case, options):
    """Cached, on other tensors, scales among them: the bits of a call bound anew. What does not begin at a multiple of 16 bytes is copied."""
    for seed in range(3):
        call = made(case, seed=seed)
        if seed == 2:
            call = replace(call, q=behind_a_number(call.q), v=behind_a_number(call.v))
        names = "precision", *(f"{name}_scale" for name in "qkv")
        given = {name: getattr(call, name) for name in names} | options | {"mask": case.mask, "scale": call.scale}
        found = tilewise.attention(call.q, call.k, call.v, **given, return_lse=True)
        monkeypatch.setattr(operator, "attend", None)  # the operator
        call = replace(call, **options | ({"alibi_slopes": options["alibi_slopes"][None]} if "alibi_slopes" in options else {}))
        assert all(map(torch.equal, found, eight_bits.forward(call)))
    assert len(call_cache._KNOWN) == 1


SPOILED = [
    Quantised(seqlen_q=70, seqlen_k=150, mask=Causal()),
    Quantised("given", 150, 150, mask=SlidingWindow(40, 3)),
    Quantised("fp8", 150, 150, dtype=torch.float16, mask=PrefixLM(30)),
    Quantised(seqlen_q=150, seqlen_k=300),
    Quantised("int8_qk", 70, 150, mask=Causal()),
    Quantised("int8_qk", 150, 150, dtype=torch.float16, mask=SlidingWindow(40, 3)),
    Quantised("int8_qk", 150, 300),
]


@pytest.mark.parametrize("case", [SPOILED[0], *(pytest.param(case, marks=pytest.mark.slow) for case in SPOILED[1:])], ids=str)
def test_numbers_that_are_not_finite(case):
    """They reach the rows that see them, and no others: as NaN, but for infinities of V in 16 bits."""
    call = with_numbers_that_are_not_finite(made(case))
    o, lse = run(call)
    held(call, o, lse)
    assert o.isinf().any() == (case.way == "int8_qk" and case.mask != Full())
    assert o.isnan().any() and (case.mask == Full() or not lse.isnan().all())


@pytest.mark.parametrize("way", ["given", pytest.param("given int8", marks=pytest.mark.slow)])
def test_scales_of_tokens_of_any_size_and_sign(way):
    """Nothing of a token whose scale is 0; NaN for the rows that see one whose scale is not finite, and for no others."""
    call, source = made(Quantised(way, 150, 200, per=("token",) * 3, mask=SlidingWindow(40, 3))), torch.Generator().manual_seed(5)
    k, v = (x * torch.randn(x.shape, generator=source, dtype=torch.float32) for x in (call.k_scale, call.v_scale))
    k[..., 130], v[..., 3], v[..., 128:190] = 0.0, 0.0, 0.0
    k[..., 195], v[..., 100], v[..., 50] = math.nan, math.inf, math.nan
    call = replace(call, k_scale=k, v_scale=v)
    o, lse = run(call)
    held(call, o, lse)
    assert o.isnan().any(-1).any(-1).sum() < 150 and lse.isnan().any()


@pytest.mark.parametrize("zero", [(1,), pytest.param((0, 3), marks=pytest.mark.slow)])
def test_values_whose_scale_is_0(zero):
    """They count as keys, and add nothing; whichever numbers have that scale."""
    call = made(Quantised("given", 10, 400, per=("tensor", "tensor", "tile"), heads=(1, 1)))
    call.v_scale[..., list(zero)] = 0.0
    held(call, *run(call))


def test_scales_that_are_nan():
    """They reach the rows that see their group, and no others."""
    call = made(Quantised("given int8", 150, 300, per=("token", "tile", "head"), mask=SlidingWindow(40, 3)))
    call.q_scale[0, 1, 3], call.k_scale[0, 0, 1] = math.nan, math.nan
    o, lse = run(call)
    held(call, o, lse)
    assert 0 < lse.isnan().sum() < lse.numel()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["int8", "int8_qk", "fp8"])
def test_queries_that_are_not_finite_and_see_nothing(way):
    call = made(Quantised(way, 70, 40, mask=Causal()))
    call.q[0, 3, 0, 1], call.q[0, 50, 1, 2] = math.nan, math.inf
    o, lse = run(call)
    held(call, o, lse)
    assert not o[:, :30].any() and o[0, 50, 1].isnan().all()


def operands_of(call):
    with Emulated().on_gpu():
        make, factor = eight_bits.operands_of(call)
        made, scales, _ = make()
        return Made(*made), Scales(*scales), factor


BITS = [
    Quantised(),
    Quantised(mask=Documents((0, 50, 130), (0, 20, 131))),
    Quantised("fp8", 5, 15),
    Quantised(seqlen_k=1500, dims=(72, 40)),
    Quantised(dims=(256, 256), dtype=torch.float16),
    Quantised("fp8", 130, 300, batch=2, heads=(4, 2), dims=(128, 128)),
    Quantised("int8_qk", 130, 300),
    Quantised("int8_qk", 5, 150, dims=(128, 128), mask=Documents((0, 5), (0, 131))),
    Quantised("int8_qk", 5, 300, dims=(256, 256), dtype=torch.float16),
]


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("case", [*BITS[:2], *(pytest.param(case, marks=pytest.mark.slow) for case in BITS[2:])], ids=str)
def test_the_quantiser_gives_the_contracts_bits(case, spoiled):
    call = made(case)
    call.k[:, -9:] = 0.0
    if spoiled:
        spoil(call)
    found, scales, factor = operands_of(call)
    want = arithmetic.operands_of(call)
    assert torch.equal(found.Q, want.q.view(torch.int8)) and torch.equal(found.K, want.k.view(torch.int8))
    pairs = [(scales.q, want.q_scale), (scales.k, want.k_scale)]
    if want.v_channel is None:
        assert found.V is scales.v is scales.centre is None
    else:
        assert torch.equal(found.V, key_order.transposed(want.v.transpose(1, 2)).view(torch.int8))
        pairs += [(scales.v, want.v_channel), (scales.centre, want.v_centre)]
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    rows = [i for i in range(call.seqlen_q) if i != 2]
    torch.testing.assert_close(scales.shift[..., rows], want.shift[..., rows], rtol=1e-4, atol=1e-4, equal_nan=True)
    if want.key_nan is not None:
        lost = scales.lost.isnan()
        assert torch.equal(lost[..., : call.seqlen_k], want.key_nan) and not lost[..., call.seqlen_k :].any()
        tiles = lost.unflatten(-1, (-1, arithmetic.TILE)).any(-1)
        assert torch.equal(scales.whole.isnan(), tiles) and torch.equal(scales.whole[~tiles], scales.k[~tiles])
    assert factor == want.factor


@pytest.mark.parametrize(
    "dim, seqlen", [(64, 17), pytest.param(256, 300, marks=pytest.mark.slow), pytest.param(112, 128, marks=pytest.mark.slow)]
)
def test_values_that_are_given_are_transposed(dim, seqlen):
    call = made(Quantised("given", 3, seqlen, dims=(dim, dim), heads=(2, 2), batch=2))
    operands, *_ = operands_of(call)
    assert torch.equal(operands.V, key_order.transposed(call.v.transpose(1, 2)).view(torch.int8))


@pytest.mark.parametrize("seqlen", [17, pytest.param(300, marks=pytest.mark.slow)])
def test_scales_of_tokens_become_their_groups(seqlen):
    call = made(Quantised("given", 3, seqlen, per=("token",) * 3, heads=(2, 2), batch=2))
    call.v_scale[0, 1, 7:9] = torch.tensor([-1e6, math.nan])
    call.v_scale[1, 0, :128] = 0.0
    _, scales, _ = operands_of(call)
    for name, given in (("columns", call.k_scale), ("weights", call.v_scale)):
        found, behind = getattr(scales, name).split((seqlen, -seqlen % 128), dim=2)
        if name == "weights":
            assert (scales.v > 0.0).all() and (found.nan_to_num().abs() <= 1.0).all()
            found = found * scales.v.repeat_interleave(128, dim=2)[..., :seqlen]
        torch.testing.assert_close(found, given, rtol=1e-6, atol=0.0, equal_nan=True)
        assert not behind.any()
    assert scales.v[0, 1, 0] == 1e6 and scales.v[1, 0, 0] == 1.0


def test_what_is_exact_in_e4m3_is_exact():
    """One key seen by each row: O is its value, LSE its score."""
    call = made(Quantised("given", 70, 70, mask=SlidingWindow(0, 0)))
    ones = {f"{name}_scale": None for name in "qkv"}
    q, k = (
        torch.randint(-4, 5, x.shape, generator=torch.Generator().manual_seed(i)).float().to(E4M3) for i, x in enumerate((call.q, call.k))
    )
    call = replace(call, q=q, k=k, **ones)
    o, lse = run(call)
    assert torch.equal(o, call.v.float().expand(-1, -1, 2, -1).to(o.dtype))
    scores = torch.einsum("bqhd,bqgd->bhq", q.double(), k.double()) * call.scale
    torch.testing.assert_close(lse, scores.float(), rtol=1e-6, atol=1e-5)
