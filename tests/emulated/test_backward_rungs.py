"""The ladder's rungs for gradients, carried out without a GPU: right by the one tolerance, whoever comes first."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from emulator.backend import NEEDED, Emulated
from emulator.machine import PACES
from emulator.memory import Fault

from tilewise.backends import tiled
from tilewise.ladder import BACKWARD_RUNGS, BackwardRung
from tilewise.ladder.rung import Rung
from tilewise.masks import Causal, Full
from tilewise.testing import conformance, tolerance
from tilewise.testing.cases import Case, make, upstream

pytestmark = NEEDED


class Climbed:
    """A rung as a backend, behind a forward pass of the CPU's; `whole`: behind the rung's own. Keeps what it computed last."""

    def __init__(self, rung: BackwardRung, pace: str = "random", seed: int = 0, whole: bool = False, **more) -> None:
        self.rung, self.whole, self.emulated = rung, whole, Emulated(pace, seed, **more)

    def why_not(self, problem) -> list[str]:
        return []

    def forward(self, call):
        if not self.whole:
            return tiled.Tiled().forward(call)
        with self.emulated.on_gpu(), mock.patch.object(Rung, "reasons", lambda *_: []):
            return self.rung.forward(call)

    def backward(self, *given, **named):
        with self.emulated.on_gpu():
            self.found = self.rung.backward(*given, **named)
        return self.found


def case(seqlen, heads, head_dim, mask):
    return Case(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=heads, heads_k=heads, head_dim=head_dim, mask=mask, dtype="bf16")


FIRST = case(150, 1, 64, Causal())
MORE = case(200, 1, 128, Full()), case(1, 1, 64, Full()), case(300, 1, 128, Causal()), case(65, 2, 64, Full()), case(260, 1, 64, Full())
MORE += (case(520, 1, 64, Causal()),)


@pytest.mark.parametrize("name", BACKWARD_RUNGS)
@pytest.mark.parametrize("case", [FIRST, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)], ids=lambda case: case.id)
def test_cases(name, case):
    """With fewer multiprocessors than blocks, which have to wait for none that has not begun."""
    climbed = [Climbed(BACKWARD_RUNGS[name], pace, seed, slots=2) for seed, pace in enumerate(PACES)]
    for each in climbed:
        conformance.run_hidden(each, case)
    same = ("q", "k", "v") if BACKWARD_RUNGS[name].ordered else ("k", "v")
    assert all(torch.equal(getattr(climbed[0].found, x), getattr(each.found, x)) for each in climbed for x in same)


@pytest.mark.parametrize("name", BACKWARD_RUNGS)
def test_keys_that_do_not_exist(name):
    """Where all scores are so far below 0 that P of a key of zeros, with a score of 0, would be infinite."""
    call, (d_o, _) = make(case(70, 1, 64, Full()), 0, grad=True), upstream(case(70, 1, 64, Full()), 0)
    call = replace(call, q=(call.q.abs() * -8).bfloat16(), k=(call.k.abs() * 8).bfloat16())
    climbed = Climbed(BACKWARD_RUNGS[name])
    o, lse = climbed.forward(call)
    assert lse.max() < -90
    tolerance.check_gradients(call, climbed.backward(call, o, lse, d_o, None), d_o)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD_RUNGS)
def test_behind_its_own_forward_pass(name):
    conformance.run_hidden(Climbed(BACKWARD_RUNGS[name], whole=True), FIRST)


def without(pattern: str, instead: str = ""):
    """PTX with something else where the pattern matches, which it has to."""

    def change(text: str) -> str:
        changed, n = re.subn(pattern, instead, text)
        if not n:
            raise LookupError(f"there is no {pattern}")
        return changed

    return change


BROKEN = {
    "products are not waited for": without(r"wgmma\.wait_group\.sync\.aligned\s+\d+;"),
    "what the copy engine brings is not waited for": without(r"mbarrier\.try_wait\S+ +(\w+), \[[^;]*;", r"setp.eq.u32 \1, 0, 0;"),
    "the tensor cores are not told of what threads write": without(r"fence\.proxy\.async[^;]*;"),
    "warps do not wait for each other's dS": without(r"^([\s\S]*?wgmma[\s\S]*?)bar\.sync\s+[^;]*;", r"\1"),
    "dQ of the last block alone": without(r"red\.relaxed\.gpu\.global\.add\.v2\.f32", "st.global.v2.f32"),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "b1" else pytest.mark.slow) for name in BACKWARD_RUNGS])
def test_a_broken_kernel_is_seen(name, change):
    """Of the paces one has to notice."""
    with pytest.raises((AssertionError, Fault)):
        for seed, pace in enumerate(PACES):
            conformance.run_hidden(Climbed(BACKWARD_RUNGS[name], pace, seed, change=change), FIRST)


OUT_OF_TURN = {
    "nobody waits for a turn": without(r"(ld\.acquire\S* +(%r\d+),(?:[^;]*;){1,2}?\s*setp\.ne\.b32\s+%p\d+, %r\d+), %r\d+;", r"\1, \2;"),
    "a warp adds before its turn has come": without(r"(ld\.acquire(?:[^;]*;){4,5}?\s*)bar\.sync\s+[^;]*;", r"\1"),
}


@pytest.mark.slow
def test_additions_out_of_turn_are_seen():
    """Four blocks of keys add to a tile. The bits of dQ say in which order, where some pace has another one."""
    four = case(420, 1, 64, Full())
    call, (d_o, _) = make(four, 0, grad=True), upstream(four, 0)

    def runs(change):
        for seed, pace in enumerate(("random", "random", "random", "eager", "lazy")):
            climbed = Climbed(BACKWARD_RUNGS["b3"], pace, seed, change=change)
            yield climbed.backward(call, *climbed.forward(call), d_o, None).q

    def same(change) -> bool:
        first, *others = runs(change)
        return all(torch.equal(first, other) for other in others)

    assert same(str)
    assert not [what for what, change in OUT_OF_TURN.items() if same(change)]
