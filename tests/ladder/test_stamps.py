"""A rung's source with stamps: before which calls they stand, and that nothing else changes. No GPU and no DSL."""

import ast
import re

import pytest

from tilewise.ladder import BACKWARD_RUNGS, RUNGS
from tilewise.ladder.stamps import possible, source_of, with_stamps
from tilewise.sm90.phases import Phase

MODULES = sorted({rung.module for rung in RUNGS.values()} - {"k1_naive"})
OF_GRADIENTS = [rung.module for rung in BACKWARD_RUNGS.values()]


def stamps_of(source: str, function: str) -> list[str]:
    """Phases and the calls between them, in order."""
    text = ast.unparse(next(node for node in ast.parse(source).body if getattr(node, "name", "") == function))
    return re.findall(r"Phase\.(\w+)|(wait_group\(\d\)|\w+_wait|fragments\.\w+)\(?", text)


def words(source: str, function: str) -> str:
    return " ".join(phase or call for phase, call in stamps_of(source, function))


def test_one_step_of_k5():
    assert words(with_stamps(source_of("k5_warp_specialised")), "step") == (
        "WAIT consumer_wait SCORES fragments.scores wait_group(0) SOFTMAX fragments.hide fragments.online_softmax fragments.round_into "
        "fragments.scale_rows WAIT consumer_wait OUTPUT fragments.product wait_group(0)"
    )


def test_both_products_in_flight():
    """In K6 no stamp stands between the products, nor where one would move exponentials across the wait for O."""
    assert words(with_stamps(source_of("k6_pingpong")), "step") == (
        "WAIT consumer_wait TURN ISSUE fragments.scores consumer_wait fragments.product SCORES wait_group(1) SOFTMAX "
        "fragments.hide fragments.online_softmax wait_group(0) fragments.round_into fragments.scale_rows"
    )


def test_one_step_of_b3():
    """No stamp stands between the three products of which the first adds to dV."""
    assert words(with_stamps(source_of("b3_ordered")), "step") == (
        "WAIT consumer_wait consumer_wait ISSUE fragments.scores fragments.product SCORES wait_group(0) SOFTMAX WAIT OUTPUT fragments.product "
        "fragments.scores fragments.product wait_group(0) TURN ADD"
    )


@pytest.mark.parametrize("module", [*MODULES, *OF_GRADIENTS])
def test_without_its_stamps_it_is_the_rung(module):
    found = with_stamps(source_of(module))
    assert found.count("trace.start(events)") == 1 and "trace.stop(stamps)" in found
    kept = [
        line
        for line in found.splitlines()
        if not re.match(r" *(trace\.|stamps = )|from tilewise\.sm90(\.phases)? import (trace|Phase)$", line)
    ]
    text = re.sub(r", (stamps: trace\.Stamps|events: cute\.Tensor|stamps|events)(?=[,)])", "", "\n".join(kept))
    assert ast.unparse(ast.parse(text)) == ast.unparse(ast.parse(source_of(module)))


@pytest.mark.parametrize("module", MODULES)
def test_every_rung_has_the_phases_of_its_work(module):
    found = {name for name in Phase.__members__ if f"Phase.{name})" in with_stamps(source_of(module))}
    assert found >= {"LOAD", "WAIT", "SCORES", "SOFTMAX", "OUTPUT", "STORE"}
    assert ("TURN" in found) == (module >= "k6") and ("ISSUE" in found) == (module >= "k6_p")


@pytest.mark.parametrize("module", OF_GRADIENTS)
def test_every_rung_of_gradients_has_the_phases_of_its_work(module):
    found = {name for name in Phase.__members__ if f"Phase.{name})" in with_stamps(source_of(module))}
    assert found >= {"EMPTY", "LOAD", "WAIT", "ISSUE", "SCORES", "SOFTMAX", "OUTPUT", "ADD", "STORE"}
    assert ("TURN" in found) == (module == "b3_ordered")


def test_k1_has_no_phases():
    assert possible("k2_fused") and not possible("k1_naive")
    with pytest.raises(ValueError, match="begins a phase"):
        with_stamps(source_of("k1_naive"))
