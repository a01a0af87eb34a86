"""What only the AMX kernels have: permission, planes of bf16, the calls that they leave to others, and the choice between the two."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from tilewise.backends.cpu import Cpu, native
from tilewise.backends.reference import eager
from tilewise.masks import Causal, Documents, FirstKeys, Full, PrefixLM, SlidingWindow
from tilewise.problem import Call
from tilewise.testing.cases import Case, make, upstream
from tilewise.testing.conformance import run_case


@pytest.fixture(autouse=True)
def _amx(kernel):
    if "amx" not in native.library().isas:
        pytest.skip("this processor has no amx, or the system does not permit it")


def _everything(isa: str, call: Call, d_o: torch.Tensor) -> list[torch.Tensor]:
    backend = Cpu(isa)
    o, lse = backend.forward(call)
    return [o, lse, *(x for x in backend.backward(call, o, lse, d_o, None, bias_grad=True) if x is not None)]


def _inputs(dtype: torch.dtype, seqlen: int = 100, bias: bool = False) -> tuple[Call, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    q, k, v, d_o = (torch.randn(1, seqlen, 2, 40, generator=generator).to(dtype) for _ in range(4))
    given = torch.randn(1, 1, seqlen, seqlen, generator=generator).to(dtype) if bias else None
    return Call(q=q, k=k, v=v, mask=Causal(), scale=0.2, bias=given), d_o


def _assert_same(results, others, what: str = "") -> None:
    assert len(results) == len(others)
    for place, (x, y) in enumerate(zip(results, others, strict=True)):
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num()), f"result {place} {what}"


def _assert_alike(results, others) -> None:
    assert len(results) == len(others)
    for place, (x, y) in enumerate(zip(results, others, strict=True)):
        near = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 0.2}[others[0].dtype]
        torch.testing.assert_close(x, y, rtol=near, atol=near, equal_nan=True, msg=lambda text, place=place: f"result {place}: {text}")


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("operand", ("q", "k", "v", "d_o"))
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_nan_and_infinity_reach_what_they_reach_on_avx512(dtype, operand, value):
    """Whatever is finite there is close to it here, the gradient of the bias included, which a second run by AVX-512 would add to."""
    call, d_o = _inputs(dtype, bias=True)
    (d_o if operand == "d_o" else getattr(call, operand))[0, 60, 1, 3] = value
    if operand != "d_o":
        return _assert_alike(_everything("amx", call, d_o), _everything("avx512", call, d_o))
    o, lse = Cpu("avx512").forward(call)  # the forward never meets it
    gradients = (Cpu(isa).backward(call, o, lse, d_o, None, bias_grad=True)[:4] for isa in ("amx", "avx512"))
    _assert_alike(*gradients)


def test_an_infinite_ds_of_fp32_is_left_to_avx512():
    """It does not split into planes. The other way round it is: NaN stays NaN in all of them, and tiles do the rest."""
    call, d_o = _inputs(torch.float32)
    d_o[0, 60, 1, 3] = float("inf")
    o, lse = Cpu("avx512").forward(call)
    _assert_same(*(Cpu(isa).backward(call, o, lse, d_o, None)[:3] for isa in ("amx", "avx512")))
    d_o[0, 60, 1, 3] = float("nan")
    dv = [Cpu(isa).backward(call, o, lse, d_o, None).v.nan_to_num() for isa in ("amx", "avx512")]
    assert not torch.equal(*dv) and torch.allclose(*dv, atol=1e-5)


SEVERAL_BANDS = [
    PrefixLM(10),
    SlidingWindow(20, 0) | FirstKeys(4),
    Documents((0, 5, 9, 14, 20, 26, 33, 47, 65)),  # more bands in a panel than are computed at once
    Documents((0, 18, 30, 65)) | FirstKeys(3),
    (SlidingWindow(40, 0) - SlidingWindow(3, 3)) | FirstKeys(1),
]


@pytest.mark.parametrize("mask", SEVERAL_BANDS, ids=repr)
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_bands_of_one_tile_together(mask, dtype):
    """Bands whose tiles of keys touch are computed at once; others, and those beyond four, one after another."""
    for seqlen_q, seqlen_k in ((18, 65), (65, 65), (100, 300)):
        if "Documents" in repr(mask) and (seqlen_q, seqlen_k) != (65, 65):
            continue  # documents end with the sequence
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 3, "heads_k": 3, "head_dim": 96}
        run_case(Cpu("amx"), Case(batch=2, mask=mask, dtype=dtype, **sizes))


@pytest.mark.parametrize("value", (3.4e38, 1e-33))
def test_fp32_that_does_not_split_is_left_to_avx512(value):
    """The largest numbers would round to infinity; the last planes of the smallest would be 0."""
    call, d_o = _inputs(torch.float32)
    call.v[0, 60, 1, 3] = value
    _assert_same(_everything("amx", call, d_o)[:2], _everything("avx512", call, d_o)[:2])


def test_fp32_is_as_exact_as_it_is_without():
    """Sums of six products of bf16 planes, against fp64: at most a quarter worse than fp32's own products."""
    call, d_o = _inputs(torch.float32, seqlen=500)
    double = Call(q=call.q.double(), k=call.k.double(), v=call.v.double(), mask=Causal(), scale=0.2)
    exact = eager(double)[0]
    errors = [(_everything(isa, call, d_o)[0].double() - exact).norm() for isa in ("amx", "avx512")]
    assert errors[0] <= 1.25 * errors[1]


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
def test_several_blocks_of_everything(dtype):
    """More keys than a block and a chunk hold, more rows than a tile, neither a multiple of anything."""
    run_case(
        Cpu("amx"), Case(batch=1, seqlen_q=611, seqlen_k=1003, heads_q=2, heads_k=1, head_dim=72, head_dim_v=56, mask=Causal(), dtype=dtype)
    )


@pytest.mark.parametrize("dtype", ("fp32", "fp16", "bf16"))
def test_the_bits_do_not_depend_on_the_number_of_threads(dtype, threads):
    case = Case(batch=1, seqlen_q=700, seqlen_k=900, heads_q=4, heads_k=2, mask=Causal(), dtype=dtype, bias="q", lse_grad=True)
    call, (d_o, _) = make(case), upstream(case)
    threads(1)
    once = _everything("amx", call, d_o)
    for n in (2, 3, 8):
        threads(n)
        _assert_same(once, _everything("amx", call, d_o), f"of {n} threads")


@pytest.mark.parametrize("mask", (Full(), Causal(), SlidingWindow(100, 0), Documents((0, 300, 310, 1100))), ids=repr)
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_chunks_of_a_head_in_one_thread_and_shared_out(dtype, mask, threads):
    """One thread takes all of a head's chunks, finds delta in the first that sees a row and stores dQ in the last; eight share them out.
    Rows that see nothing are in no chunk."""
    sizes = {"seqlen_k": 1100, "heads_q": 2, "heads_k": 2, "head_dim": 128, "head_dim_v": 128}
    for sink in (False, True):
        case = Case(batch=2, seqlen_q=1400 if mask == Causal() else 1100, mask=mask, dtype=dtype, sink=sink, **sizes)
        call, (d_o, _) = make(case), upstream(case)
        threads(8)
        shared = _everything("amx", call, d_o)
        threads(1)
        _assert_same(shared, _everything("amx", call, d_o))
    run_case(Cpu("amx"), Case(batch=2, seqlen_q=1100 if "Documents" in repr(mask) else 700, mask=mask, dtype=dtype, **sizes))


def test_small_calls_are_left_to_avx512_unless_amx_is_asked_for():
    found = native.library()
    if found.forced:
        pytest.skip("TILEWISE_CPU_ISA is set")
    small, large = (Call(q=q, k=q, v=q, mask=Full(), scale=0.3) for q in (torch.randn(1, n, 1, 64) for n in (40, 600)))
    forward = {isa: [Cpu(isa).forward(call)[0] for call in (small, large)] for isa in (None, "amx", "avx512")}
    assert torch.equal(forward[None][0], forward["avx512"][0]) and not torch.equal(forward[None][0], forward["amx"][0])
    assert torch.equal(forward[None][1], forward["amx"][1]) and not torch.equal(forward[None][1], forward["avx512"][1])
    assert Cpu().describe().startswith("amx")


@pytest.mark.parametrize(("seqlen", "backward"), ((64, "avx512"), (100, "avx512"), (128, "amx"), (130, "avx512"), (192, "amx")))
def test_fp32_backward_is_left_to_avx512_where_tiles_would_be_empty(seqlen, backward):
    if native.library().forced:
        pytest.skip("TILEWISE_CPU_ISA is set")
    q = torch.randn(8, seqlen, 2, 32)
    assert Cpu().details(Call(q=q, k=q, v=q, mask=Full(), scale=0.3))[0] == f"instruction set: avx512 forward, {backward} backward"


def test_without_permission_the_next_best_runs():
    """Linux refuses the tiles to a process with a signal stack that is too small for them; nothing fails then."""
    script = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
from tilewise.backends.cpu import Cpu, native
from tilewise.backends.reference import eager
print(Cpu().describe(), "amx" in native.library().isas)
"""
    environment = {**os.environ, "TILEWISE_CPU_LIBRARY": str(native.library().path)}
    environment.pop("TILEWISE_CPU_ISA", None)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("avx512_bf16 ") and done.stdout.split()[-1] == "False", done.stdout


def test_permission_is_asked_for_once_and_held():
    """ARCH_GET_XCOMP_PERM names the tiles once the library is loaded."""
    mask = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask)) == 0
    assert mask.value >> 18 & 1
