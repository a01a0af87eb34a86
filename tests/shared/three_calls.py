"""A call three times, on fresh memory: the bits of O, LSE and gradients are those of the first call, and within the tolerance, on any backend."""

from contextlib import contextmanager

import torch
from decode_fuzz import kind as decode_kind
from decode_fuzz import problem as decode_problem
from hypothesis import currently_in_test_context, note
from hypothesis import strategies as st
from sampled import SEED

import tilewise as tw
from tilewise.masks import Documents
from tilewise.problem import Gradients
from tilewise.runtime import call_cache, decode_cache
from tilewise.testing import tolerance
from tilewise.testing.cases import DTYPES, Case, make, upstream
from tilewise.testing.strategies import band_masks
from tilewise.testing.tolerance import Expected

NAMES = "q", "k", "v", "bias", "sink"


@contextmanager
def fresh_is_nan():
    """What torch leaves uninitialised is NaN within, and calls stay plain."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def thrice(run) -> dict[str, torch.Tensor]:
    """What `run` gives, a dict of tensors, in each of three calls. It makes its tensors itself, and what it gives is alive until the end."""
    if currently_in_test_context():
        note(f"TILEWISE_TEST_SEED={SEED}")
    call_cache.forget()
    decode_cache.forget()
    first, *others = [run() for _ in range(3)]
    for n, again in enumerate(others, 2):
        for name, x in first.items():
            same = x.dtype == again[name].dtype and torch.equal(x.nan_to_num(nan=7.0), again[name].nan_to_num(nan=7.0))
            assert same, f"{name} of call {n} differs from that of the first"
    return first


def attention(case: Case, backend: str, grad: bool, return_lse: bool, made: list, device: str = "cpu") -> dict[str, torch.Tensor]:
    """O, LSE and gradients of tensors that are made here."""
    call, (d_o, d_lse) = make(case, 1, device, grad), upstream(case, 1, device)
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


def hold_attention(case: Case, return_lse: bool, backend: str, device: str = "cpu", expect: Expected | None = None) -> Expected:
    """With and without gradients, within the tolerance; what is expected, for another backend."""
    bits = None
    for grad in (False, True):
        made: list = []
        found = thrice(lambda: attention(case, backend, grad, return_lse, made, device))  # noqa: B023
        assert bits is None or torch.equal(bits, found["o"]), f"{backend}: O differs with a gradient from that without"
        bits = found["o"]
    call, d_o, d_lse, _ = made[0]
    d_lse = d_lse if return_lse else None
    expect = tolerance.expected(call, d_o, d_lse) if expect is None else expect
    tolerance.hold("o", found["o"], expect.o)
    if return_lse:
        tolerance.check_lse("lse", found["lse"], expect.lse)
    tolerance.check_gradients(call, Gradients(*(found.get(f"d{name}") for name in NAMES)), d_o, d_lse, expect)
    return expect


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


def varlen(problem: dict, backend: str, grad: bool, return_lse: bool, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
    draw, words, (heads_q, heads_k) = torch.Generator().manual_seed(3), problem["words"], problem["heads"]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32) for lengths in problem["lengths"])
    number, rounded = len(cu_q) - 1, DTYPES[problem["dtype"]]
    new = lambda *shape: torch.randn(shape, generator=draw).to(rounded).to(device, dtype)  # noqa: E731
    leaves = {"q": new(int(cu_q[-1]) + 2, heads_q, 24), "k": new(int(cu_k[-1]) + 1, heads_k, 24), "v": new(int(cu_k[-1]) + 1, heads_k, 16)}
    leaves |= {"bias": new(number, heads_q, 1, max(*problem["lengths"][1], 1))} if "bias" in words else {}
    leaves |= {"sink": new(heads_q)} if "sink" in words else {}
    slopes = torch.rand(number, heads_q, generator=draw).to(device)
    more = {"alibi_slopes": slopes} if "slopes of documents" in words else {"alibi_slopes": slopes[0]} if "alibi_slopes" in words else {}
    more |= {"seqused_k": torch.tensor([n // 2 for n in problem["lengths"][1]], device=device)} if "seqused_k" in words else {}
    more |= {"dropout_p": 0.3, "dropout_seed": 5} if "dropout" in words else {}
    more |= {"batch_invariant": True} if "batch_invariant" in words else {}
    more |= {"softcap": 2.0} if "softcap" in words else {}
    leaves = {name: x.requires_grad_(grad) for name, x in leaves.items()}
    found = tw.attention_varlen(
        cu_seqlens_q=cu_q.to(device),
        cu_seqlens_k=cu_k.to(device),
        mask=problem["mask"],
        backend=backend,
        return_lse=return_lse,
        **leaves,
        **more,
    )
    found = found if return_lse else (found,)
    o, results = found[0], dict(zip(("o", "lse"), (x.detach() for x in found), strict=False))
    if grad:
        o.backward(torch.randn(o.shape, generator=draw).to(rounded).to(device, dtype))
        results |= {f"d{name}": x.grad for name, x in leaves.items()}
    return results


def hold_varlen(problem: dict, expected: dict[str, torch.Tensor], backend: str, grad: bool, return_lse: bool, device: str = "cpu") -> None:
    """Near what fp64 gives."""
    dtype = DTYPES[problem["dtype"]]
    found, eps = thrice(lambda: varlen(problem, backend, grad, return_lse, dtype, device)), torch.finfo(dtype).eps
    for name, x in found.items():
        apart = 0.5 if name == "lse" and problem["dtype"] in ("bf16", "fp16") else 30.0  # LSE is in fp32 there
        largest = float(expected[name].nan_to_num(posinf=0.0, neginf=0.0).abs().max()) if x.numel() else 0.0
        torch.testing.assert_close(x.double().cpu(), expected[name].double(), atol=apart * eps * (1.0 + largest), rtol=0.0, equal_nan=True)


def hold_decode(
    number: int, return_lse: bool, kernels: bool = False, device: str = "cpu", most: int = 300, backend: str | None = None
) -> None:
    """Decode and what it appends, as decode_fuzz.py draws it by its number; tests of the fuzzer hold the same problems to the oracle."""

    def run():
        given = decode_problem(decode_kind(number, kernels=kernels), number, device, most).given
        found = tw.decode(**given, return_lse=return_lse, backend=backend)
        caches = {name: given[name].float() for name in ("k_cache", "v_cache")}
        return dict(zip(("o", "lse"), found if return_lse else (found,), strict=False)) | caches

    thrice(run)
