"""A bound call plays what its first call launched: with other tensors its bits are those of a call that is bound anew (Triton's interpreter)."""

from dataclasses import replace

import append_problems
import decode_problems
import pytest
import torch
from append_problems import AppendCase
from decode_problems import DecodeCase

from tests.shared.interpreted import interpreted
from tilewise.errors import ShapeError
from tilewise.masks import Causal, ChunkedCausal, DeviceDocuments, Documents, Full, SlidingWindow
from tilewise.problem import Call
from tilewise.testing import poison
from tilewise.testing.cases import Case, make, upstream

pytest.importorskip("triton")

SIZES = {"batch": 1, "seqlen_q": 33, "seqlen_k": 40, "heads_q": 2, "heads_k": 1, "head_dim": 40, "dtype": "fp16"}
CASES = [
    Case(**SIZES, mask=Causal()),
    Case(**SIZES | {"head_dim": 96, "head_dim_v": 64}, mask=SlidingWindow(20, 3), softcap=5.0, lse_grad=True),
    Case(**SIZES, mask=ChunkedCausal(16), alibi="bh"),
    Case(**SIZES, mask=Full(), bias="hq", sink=True),
    Case(**SIZES | {"dtype": "fp32"}, mask=Causal(), sink=True, dropout=0.3),
    Case(**SIZES, mask=Documents([0, 7, 33], [0, 30, 40], inner=Causal())),
]


def plays(case: Case, unread: bool = False, precision: str | None = None) -> list[tuple]:
    """What tapes there are after three calls: by key whether each is whole."""
    from tilewise.backends.triton import Triton

    def fresh(seed: int) -> Call:
        call = replace(make(case, seed, grad=precision is None), precision=precision)
        if unread:
            ends = [torch.tensor(x, dtype=torch.int32) for x in ([0, 7 + seed, 33], [0, 30 + seed, 40])]
            return replace(call, mask=DeviceDocuments(*ends, Causal()))
        return call

    bound = None
    for seed in range(3):
        call, (d_o, d_lse) = fresh(seed), upstream(case, seed)
        bound = bound or Triton().bind(call)
        extras = call.extras
        if call.dropout is not None:
            extras = extras._replace(rng=torch.tensor([call.dropout.seed, call.dropout.offset]))
        with poison.memory():
            for way in (bound, Triton().bind(call)):
                o, lse = way.forward(call.q, call.k, call.v, extras, True, heads_first=seed == 2)
                gradients = ()
                if call.grad:
                    gradients = way.backward(call.q, call.k, call.v, o, lse, d_o, d_lse, extras, call.bias is not None)
                found = [x for x in (o, lse, *gradients) if x is not None]
                if way is bound:
                    played = found
        for mine, right in zip(played, found, strict=True):
            assert torch.equal(mine, right), (seed, case.id)
    return [(key[0][0], tape.plays) for key, tape in bound.tapes._known.items()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases(case):
    found = interpreted(plays, case)
    assert found == [("forward", True), ("backward", True), ("forward", True), ("backward", True)]  # O lies in two ways


def test_packed_documents():
    found = interpreted(plays, CASES[-1], True)
    assert all(whole for _, whole in found)


@pytest.mark.parametrize("precision", ["int8", "int8_qk", "fp8"])
def test_eight_bits(precision):
    found = interpreted(plays, replace(CASES[0], head_dim=64, dtype="bf16"), False, precision)
    assert found == [("forward", True)] * 2


def test_memory_that_was_given_back_is_refused():
    with pytest.raises(ShapeError, match="has no memory"):
        interpreted(given_back)


def given_back() -> None:
    """By a call that others like it came before."""
    from tilewise.backends.triton import Triton

    x, y = (torch.randn(1, 40, 2, 32) for _ in range(2))
    bound = Triton().bind(Call(q=x, k=x, v=y, mask=Causal(), scale=1.0))
    for _ in range(2):
        bound.forward(x, x, y, (None,) * 9, True)
    y.untyped_storage().resize_(0)
    bound.forward(x, x, y, (None,) * 9, True)


def test_one_tensor_for_all_is_told_from_three():
    assert interpreted(one_for_all)


def one_for_all() -> bool:
    """A first call of q for k and v does not speak for those after it."""
    from tilewise.backends.triton import Triton

    x, y, z = torch.randn(3, 1, 40, 2, 32).unbind()
    bound, extras = Triton().bind(Call(q=x, k=x, v=x, mask=Causal(), scale=1.0)), (None,) * 9
    bound.forward(x, x, x, extras, True)
    found = bound.forward(x, y, z, extras, True)[0]
    return torch.equal(found, Triton().forward(Call(q=x, k=y, v=z, mask=Causal(), scale=1.0))[0])


DECODES = [
    DecodeCase(
        lengths=(70, 1, 300, 9), queries=(3, 1, 0, 30), heads=(6, 2), page=16, softcap=5.0, alibi=True, sink=True, dtype=torch.float16
    ),
    DecodeCase(lengths=(70, 3, 0, 130), queries=7, tree=7, leftpad=(5, 0, 0, 20), heads=(2, 1)),
    DecodeCase(lengths=(400, 20), split=100, entries=True),
    DecodeCase(lengths=(40,), dims=(576, 512), latent=True),
]


@pytest.mark.parametrize("case", DECODES, ids=str)
def test_decode(case):
    assert interpreted(decodes, case) == [True]


def decodes(case: DecodeCase) -> list[bool]:
    from tilewise.backends.triton.decode import Decoder

    bound = None
    for seed in range(3):
        torch.manual_seed(seed)
        call = decode_problems.made(case, seed=seed)
        bound = bound or Decoder(call)
        found, want = (way(call.tensors, call.seqlens) for way in (bound, Decoder(call)))
        assert all(map(torch.equal, found, want))
    return [tape.plays for tape in bound.tapes._known.values()]


def test_append():
    assert interpreted(appends) == [True]


def appends() -> list[bool]:
    from tilewise.backends.triton.append import Appender

    case, bound = AppendCase(lengths=(5, 70), new=2, dims=(64, 64), rotary=32, dtype=torch.float32), None
    for seed in range(3):
        torch.manual_seed(seed)
        call, other = append_problems.made(case), append_problems.made(case)
        bound = bound or Appender(call)
        for name in ("k", "v", "k_cache", "v_cache"):
            getattr(call, name).normal_()
            getattr(other, name).copy_(getattr(call, name))
        ends = bound(call.tensors, call.rotary_first), Appender(other)(other.tensors, other.rotary_first)
        assert torch.equal(*ends) and torch.equal(call.k_cache, other.k_cache) and torch.equal(call.v_cache, other.v_cache)
    return [tape.plays for tape in bound.tapes._known.values()]
