"""NaN and infinities: they reach what the formula has them reach, and only the tiles that hold them and hide pairs take the careful way."""

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tilewise.backends import Backend
from tilewise.backends.cpu import Cpu, abi, native
from tilewise.backends.reference import Reference
from tilewise.backends.tiled import Tiled
from tilewise.masks import Causal, Dense, Documents, FirstKeys, Full, SlidingWindow
from tilewise.problem import Call, DecodeCall
from tilewise.testing.cases import Case, make, random_mask, upstream
from tilewise.testing.conformance import run_hidden, run_scattered, run_spoiled

NAN, INF = float("nan"), float("inf")
SEQLEN, PANEL, KEY_BLOCK, ROW_BLOCK, GRAD_KEYS = 960, 48, 120, 96, 192  # AVX-512's tiles of so many keys
ISAS = pytest.mark.parametrize("isa", abi.ISAS[1:])
OTHERS: dict[str, Backend] = {"tiled": Tiled(32, 16), "reference": Reference()}
BACKENDS = pytest.mark.parametrize("name", (*abi.ISAS[1:], *OTHERS))
SINK = pytest.mark.parametrize("sink", (None, [0.5, -1.0], [30.0, 1e4]), ids=str)  # the last leaves live rows little, and none
DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)


def _backend(isa: str) -> Cpu:
    if isa not in native.library().isas:
        pytest.skip(f"this processor has no {isa}")
    return Cpu(isa)


def _careful(run) -> int:
    functions = native.library().functions
    before = functions.tw_careful_tiles()
    run()
    return functions.tw_careful_tiles() - before


def _counts(backend: Cpu, mask, dtype=torch.float32, rows=SEQLEN, **poison) -> tuple[int, int]:
    """Careful tiles of forward and backward with NaN in slices of rows of the operands that are named."""
    generator = torch.Generator().manual_seed(3)
    q, d_o = (torch.randn(1, rows, 1, 32, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, SEQLEN, 1, 32, generator=generator).to(dtype) for _ in range(2))
    operands = {"q": q, "k": k, "v": v, "d_o": d_o}
    for name, where in poison.items():
        operands[name][:, where] = NAN
    call = Call(q=q, k=k, v=v, mask=mask, scale=0.2)
    o, lse = backend.forward(call)
    return _careful(lambda: backend.forward(call)), _careful(lambda: backend.backward(call, o, lse, d_o, None))


@ISAS
@pytest.mark.parametrize(
    "mask", (Full(), Causal(), SlidingWindow(100, 0), random_mask(SEQLEN, SEQLEN)), ids=("full", "causal", "window", "dense")
)
def test_finite_numbers_need_no_care(isa, mask):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert _counts(_backend(isa), mask, dtype) == (0, 0)


@ISAS
def test_keys_of_no_tile_cost_nothing(isa):
    """Padding that a length hides, from a multiple of every block on."""
    assert _counts(_backend(isa), FirstKeys(720) & Causal(), k=slice(768, None), v=slice(768, None)) == (0, 0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_nan_sends_only_its_own_tiles_the_careful_way(dtype):
    """Of AVX-512's tiles, 48 rows by 120 or 192 keys, two keys touch those that hold them and hide pairs, whatever else is in the call."""
    backend, middle = _backend("avx512"), slice(500, 502)
    panels, diagonal = SEQLEN // PANEL, KEY_BLOCK // PANEL + 1
    forward, backward = _counts(backend, Causal(), dtype, v=middle)
    assert 0 < forward <= diagonal and backward == 0  # V's rows are only multiplied with single rows of dO in the backward
    forward, backward = _counts(backend, Causal(), dtype, k=middle)  # scores of hidden pairs are overwritten
    # Every later row sees NaN, so the forward's O is NaN; of the backward, K is only added up in dQ.
    assert forward == 0 and 0 < backward <= GRAD_KEYS // PANEL + 1
    hidden = FirstKeys(502) - FirstKeys(500)
    assert _counts(backend, Causal() - hidden, dtype, k=middle, v=middle) == (0, 0)  # one band ends before them, another begins after them
    assert _counts(backend, random_mask(SEQLEN, SEQLEN) - hidden, dtype, k=middle, v=middle) == (panels, panels)
    forward, backward = _counts(backend, random_mask(SEQLEN, SEQLEN), dtype, v=middle, k=middle)
    assert (forward, backward) == (panels, panels)  # one block of keys
    forward, backward = _counts(backend, Causal(), dtype, q=slice(500, 501), d_o=slice(500, 501))
    assert forward == 0 and 0 < backward <= 2 * (ROW_BLOCK // GRAD_KEYS + 2)
    assert _counts(backend, Full(), dtype, q=middle, k=middle, v=middle, d_o=middle) == (0, 0)


def test_few_queries_send_only_blocks_with_nan_the_careful_way():
    window = SlidingWindow(None, 700)  # the first rows do not see the last keys
    backend = _backend("avx512")
    assert _counts(backend, window, rows=3) == (0, 0)
    blocks = (SEQLEN + 127) // 128
    forward, backward = _counts(backend, Causal(), rows=3, k=slice(-2, None), v=slice(-2, None))
    assert (forward, backward) == (1, 1) and blocks > 1


CASES = [
    Case(seqlen_q=150, seqlen_k=300, head_dim=40, mask=Causal()),
    Case(seqlen_q=201, seqlen_k=201, head_dim=64, head_dim_v=48, mask=SlidingWindow(60, 3), lse_grad=True),
    Case(seqlen_q=230, seqlen_k=230, head_dim=32, mask=Documents((0, 40, 41, 130, 230)), softcap=3.0),
    Case(seqlen_q=150, seqlen_k=260, head_dim=72, mask=random_mask(150, 260), bias="hq"),
    Case(seqlen_q=150, seqlen_k=260, head_dim=16, mask=random_mask(150, 260) & Causal(), dropout=0.3, sink=True),
    Case(seqlen_q=130, seqlen_k=130, head_dim=24, mask=Full(), bias="q"),
    Case(seqlen_q=4, seqlen_k=700, head_dim=64, mask=SlidingWindow(500, 0)),
    Case(seqlen_q=5, seqlen_k=400, heads_q=6, head_dim=33, mask=Causal() - (FirstKeys(60) - FirstKeys(50))),
]


@pytest.mark.sampled(0.25)
@ISAS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_scattered_and_hidden_nan_against_the_oracle(isa, case):
    backend = _backend(isa)
    for dtype in ("fp32", "bf16", "fp16"):
        for run in (run_hidden, run_spoiled, run_scattered):
            run(backend, replace(case, dtype=dtype))


@ISAS
@pytest.mark.parametrize("value", (NAN, INF))
def test_a_block_of_keys_under_a_mask_that_hides_them_from_some(isa, value):
    """Rows before the block are as they are without it, bit for bit; of those that see it, O is NaN or infinite."""
    call = make(Case(seqlen_q=300, seqlen_k=300, head_dim=64, mask=Causal()))
    v = call.v.clone()
    v[:, 100:164] = value
    backend = _backend(isa)
    o, without = backend.forward(replace(call, v=v))[0], backend.forward(call)[0]
    assert torch.equal(o[:, :100], without[:, :100]) and not o[:, 100:].isfinite().any()


@ISAS
@pytest.mark.parametrize("case", CASES[:5], ids=lambda case: case.id)
def test_the_bits_do_not_depend_on_the_number_of_threads(isa, case, threads):
    backend, call, (d_o, d_lse) = _backend(isa), make(case), upstream(case)
    q, k, v = (x.clone() for x in (call.q, call.k, call.v))
    q[:, 20, 1], k[:, 100:103], v[:, 90:94, :, 1], d_o[:, 110, 0, 0] = NAN, NAN, INF, NAN
    call = replace(call, q=q, k=k, v=v)

    def everything() -> list[torch.Tensor]:
        o, lse = backend.forward(call)
        gradients = backend.backward(call, o, lse, d_o, d_lse, bias_grad=call.bias is not None)
        return [x.nan_to_num(7.0, 8.0, 9.0) for x in (o, lse, *gradients) if x is not None]

    threads(1)
    once = everything()
    for n in (2, 3, 8):
        threads(n)
        assert all(torch.equal(x, y) for x, y in zip(once, everything(), strict=True)), f"{n} threads"


@ISAS
@pytest.mark.parametrize(
    ("seqlen_q", "dtype"), [(24, torch.float32), (24, torch.bfloat16), (24, torch.float16), (2, torch.float32)], ids=str
)
def test_a_large_lse_bounds_its_gradients(isa, seqlen_q, dtype):
    """P is at most 1, though an LSE of 3e8 is rounded by 16: dV of ones is at most as many as queries see the key."""
    generator = torch.Generator("cpu").manual_seed(1)
    q, k, v = (torch.randn(1, seqlen, 2, 64, generator=generator) for seqlen in (seqlen_q, 40, 40))
    call = Call(q=(q * 1e4).to(dtype), k=(k * 1e4).to(dtype), v=v.to(dtype), mask=Full(), scale=0.125, grad=True)
    backend = _backend(isa)
    o, lse = backend.forward(call)
    assert lse.abs().max() > 1e8
    d_v = backend.backward(call, o, lse, torch.ones_like(o), None)[2]
    assert d_v.abs().max() <= seqlen_q * 1.01


def _with_dead_rows(rows: int, keys: int, all_of_them: bool, by_bias: bool, dtype, sink) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """A call, dO, and which rows have only scores of -inf, by their bias or by themselves; only those see the last key."""
    draw = torch.Generator().manual_seed(rows + keys)
    q, k, v, d_o = (torch.randn(1, n, heads, 24, generator=draw).to(dtype) for n, heads in ((rows, 2), (keys, 1), (keys, 1), (rows, 2)))
    dead = (torch.arange(rows) % 3 == 0) | all_of_them
    bias = torch.randn(1, 2, rows, keys, generator=draw).to(dtype)
    if by_bias:
        bias[:, :, dead] = -INF
    else:
        q[:, dead, :, 0], k[..., 0] = INF, -1.0
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen[:, -1] = dead
    mask, sink = Full() if all_of_them else Dense(seen), None if sink is None else torch.tensor(sink, dtype=dtype)
    return Call(q=q, k=k, v=v, mask=mask, scale=0.2, bias=bias if by_bias else None, sink=sink, grad=True), d_o, dead


@pytest.mark.sampled(0.5)
@BACKENDS
@DTYPES
@SINK
@pytest.mark.parametrize("by_bias", (True, False), ids=("bias", "query"))
def test_a_row_of_minus_infinities_sees_nothing(name, dtype, sink, by_bias):
    """What it sees, and its dO where its LSE tells, may be NaN: its O and gradients are 0, and those of others as ever."""
    backend, near = OTHERS.get(name) or _backend(name), {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    for rows, keys in ((1, 1), (1, 9), (9, 300), (70, 70), (300, 200)):
        for value, all_of_them in ((INF, True), (NAN, False)):
            call, d_o, dead = _with_dead_rows(rows, keys, all_of_them, by_bias, dtype, sink)
            clean, want = d_o.clone(), backend.forward(call)
            clean[:, dead] = 0.0
            want += backend.backward(call, *want, clean, torch.ones_like(want[1]), bias_grad=by_bias)
            call.v[:, -1, :, 3] = value
            if sink is None:
                d_o[:, dead] = value
            got = backend.forward(call)
            got += backend.backward(call, *got, d_o, torch.ones_like(got[1]), bias_grad=by_bias)
            torch.testing.assert_close(got, want, rtol=near, atol=near)
            assert not got[0][:, dead].any() and not got[2][:, dead].any(), "O and dQ"
            nothing = torch.tensor([-INF] * 2) if call.sink is None else call.sink.float()
            assert torch.equal(got[1][0][:, dead], nothing[:, None].expand(-1, int(dead.sum())))


@BACKENDS
@DTYPES
@SINK
def test_a_decoded_row_of_minus_infinities_sees_nothing(name, dtype, sink):
    """One sequence of two, of one block, several, and several splits of keys."""
    for queries, length in ((1, 1), (3, 9), (1, 300), (2, 2500)):
        draw = torch.Generator().manual_seed(length)
        q, k, v = (torch.randn(2, n, heads, 24, generator=draw).to(dtype) for n, heads in ((queries, 2), (length, 1), (length, 1)))
        q[0, ..., 0], k[..., 0], v[0, ::3, :, 1] = INF, -1.0, NAN
        lengths, sinks = torch.tensor([length, length], dtype=torch.int32), None if sink is None else torch.tensor(sink, dtype=dtype)
        if name in OTHERS:
            o, lse = tw.decode(q, k, v, cache_seqlens=lengths, sink=sinks, return_lse=True, backend=name)
        else:
            plain = dict.fromkeys(("page_table", "cu_seqlens_q", "cache_batch_idx", "leftpad", "tree", "split"))
            cache = {"q": q, "k_cache": k, "v_cache": v, "seqlens": lengths, "max_seqlen_q": queries, "shared_prefix": 0}
            o, lse = _backend(name).decode(DecodeCall(**cache, **plain, mask=Causal(), scale=0.2, sink=sinks))
        assert not o[0].any() and o[1].isfinite().all()
        nothing = torch.tensor([-INF] * 2) if sinks is None else sinks.float()
        assert torch.equal(lse[0], nothing[:, None].expand(-1, queries))
