from dataclasses import replace

import pytest
import torch

from tilewise.backends.reference import Reference
from tilewise.masks import Causal, Documents, Full, PerHead, SlidingWindow
from tilewise.testing import conformance, poison
from tilewise.testing.cases import Case, make, upstream
from tilewise.testing.mutants import Mutant


def test_fresh_memory_is_poison():
    with poison.memory():
        for x in (torch.empty(3, 4), torch.empty_like(torch.ones(5)), torch.ones(2).new_empty(7), torch.empty_strided((2, 3), (1, 2))):
            assert x.isnan().all()
        assert (torch.empty(4, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
        assert torch.empty(2, 0).shape == (2, 0) and torch.empty(3, dtype=torch.bool).shape == (3,)
        assert torch.equal(torch.zeros(3), torch.tensor([0.0, 0.0, 0.0])) and torch.full((2,), 5).tolist() == [5, 5]
        kept = torch.empty(2, 3, 4).transpose(0, 2)
        assert torch.empty_like(kept).stride() == kept.stride()


def test_memory_is_as_before_afterwards():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(KeyError), poison.memory():
        raise KeyError
    assert (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory) == before


@pytest.mark.parametrize("allocate", [torch.empty, torch.zeros], ids=["empty", "zeros"])
@pytest.mark.parametrize(("offset", "side"), [(-1, "before"), (12, "after")])
def test_writing_past_an_allocation_is_noticed(allocate, offset, side):
    with (
        pytest.raises(AssertionError, match=f"1 elements {side} an allocation of 12 torch.float32 elements were overwritten"),
        poison.memory(),
    ):
        x = allocate(3, 4)
        x.as_strided((1,), (1,), x.storage_offset() + offset).fill_(0.0)
    with poison.memory():
        x = allocate(3, 4)
        x.fill_(1.0)


@pytest.mark.parametrize("shape", [(4,), (2, 5), (2, 7, 3, 8), (0, 3, 2, 8)])
def test_guarded_inputs(shape):
    x = torch.randn(shape, dtype=torch.bfloat16) if shape != (4,) else torch.tensor([1.0, torch.nan, torch.inf, 2.0])
    guard = poison.Guarded(x)
    assert guard.view.shape == x.shape and torch.equal(guard.view.nan_to_num(), x.nan_to_num()) and guard.view.stride(-1) == 1
    guard.verify("q")
    if x.numel():
        beyond = guard.view.as_strided((1,), (1,), guard.view.storage_offset() + guard.view.shape[-1])
        assert beyond.isnan().all()
        beyond.fill_(0.0)
        with pytest.raises(AssertionError, match="q: 1 elements outside the tensor were overwritten"):
            guard.verify("q")
        beyond.fill_(torch.nan)
        guard.view[(0,) * len(shape)] = 77.0
        with pytest.raises(AssertionError, match="q: an input was modified"):
            guard.verify("q")


def test_guard_takes_every_tensor_of_a_call():
    call, guards = poison.guard(make(Case(bias="h", alibi="h", sink=True)))
    assert set(guards) == {"q", "k", "v", "bias", "alibi_slopes", "sink"} and call.q is guards["q"].view


def test_hide_poisons_what_nobody_sees():
    case = Case(batch=1, seqlen_q=6, seqlen_k=8, mask=Documents([0, 2, 2, 5], [0, 0, 3, 6], inner=Full()), bias="bhq", lse_grad=True)
    call, (d_o, d_lse) = make(case), upstream(case)
    hidden, hidden_d_o, hidden_d_lse = poison.hide(call, d_o, d_lse)
    rows = [0, 1, 5]  # of the document without keys, and of none
    assert (~hidden.q.isfinite()).all(-1).all(-1)[0].nonzero().flatten().tolist() == rows
    assert (~hidden_d_o.isfinite()).all(-1).all(-1)[0].nonzero().flatten().tolist() == rows
    assert (~hidden_d_lse.isfinite()).all(1)[0].nonzero().flatten().tolist() == rows
    keys = [0, 1, 2, 6, 7]  # of the document without queries, and of none
    for x in (hidden.k, hidden.v):
        assert (~x.isfinite()).all(-1).all(-1)[0].nonzero().flatten().tolist() == keys
    assert torch.equal(hidden.bias.isfinite(), call.mask.dense(6, 8).expand(1, 4, 6, 8))
    assert torch.equal(hidden.q[:, 2:5], call.q[:, 2:5]) and torch.equal(hidden.k[:, 3:6], call.k[:, 3:6])


def test_hide_knows_heads_and_broadcasting():
    """A key is hidden only where no head of the group sees it; a broadcast bias only where nobody reads it."""
    mask = PerHead({(0, 1): SlidingWindow(0, 0), (1, 4): Causal(align="top_left")})
    call = make(Case(batch=1, seqlen_q=4, seqlen_k=8, mask=mask, bias="h"))
    hidden, _, _ = poison.hide(call, upstream(Case(batch=1, seqlen_q=4, seqlen_k=8))[0])
    assert hidden.k.isfinite().all(-1)[0].T.tolist() == [[True] * 8, [True] * 4 + [False] * 4]
    assert hidden.bias.isfinite()[0, :, 0].tolist() == [[False] * 4 + [True] * 4] + [[True] * 4 + [False] * 4] * 3


def test_the_gradient_of_lse_stays_where_a_sink_makes_it_count():
    case = Case(batch=1, seqlen_q=8, seqlen_k=4, mask=Causal(), sink=True, lse_grad=True)
    call, (d_o, d_lse) = make(case), upstream(case)
    assert torch.equal(poison.hide(call, d_o, d_lse)[2], d_lse)
    assert not poison.hide(replace(call, sink=None), d_o, d_lse)[2].isfinite().all()


def test_nothing_is_hidden_without_a_mask():
    call, (d_o, _) = make(Case()), upstream(Case())
    hidden, hidden_d_o, _ = poison.hide(call, d_o)
    assert all(torch.equal(x, y) for x, y in ((call.q, hidden.q), (call.k, hidden.k), (call.v, hidden.v), (d_o, hidden_d_o)))


class Overreaching(Reference):
    """Reads q one row too far, or writes beside its input."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def forward(self, call):
        q = call.q
        if self.fault == "reads":
            q = q.as_strided(q.shape, q.stride(), q.storage_offset() + q.stride(1))
        if self.fault == "writes":
            q.as_strided((1,), (1,), q.storage_offset() - 1).fill_(0.0)
        if self.fault == "modifies":
            q[0, 0, 0, 0] += 1.0
        return super().forward(replace(call, q=q))


@pytest.mark.parametrize(("fault", "message"), [("reads", "nan"), ("writes", "outside the tensor"), ("modifies", "input was modified")])
def test_overreaching_backends_are_caught(fault, message):
    with pytest.raises(AssertionError, match=message):
        conformance.run_hidden(Overreaching(fault), Case())


def test_hidden_poison_catches_a_zero_times_nan():
    case = Case(seqlen_q=40, seqlen_k=40, mask=SlidingWindow(3, 0, align="top_left") & Documents([0, 30]))
    conformance.run_case(Mutant("nan_times_zero"), case)
    with pytest.raises(AssertionError, match="nan, expected"):
        conformance.run_hidden(Mutant("nan_times_zero"), case)
