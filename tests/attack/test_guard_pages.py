"""Calls on memory that ends or begins at a forbidden page, on every instruction set that this machine has (shared/guarded_calls.py)."""

import attack_child
import pytest

from tilewise.backends.cpu import native

FAMILIES = "attention,varlen,decode,append"
FEW, MANY, AT_ONCE = 3, 403, 100


def isas() -> tuple[str, ...]:
    try:
        return native.library().isas
    except native.Missing:
        return ("auto",)  # calls are then the portable backend's


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("isa", isas())
def test_few_calls(isa):
    attack_child.run("guarded_calls", FAMILIES, 0, FEW, TILEWISE_CPU_ISA=isa)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, MANY, AT_ONCE))
@pytest.mark.parametrize("family", FAMILIES.split(","))
@pytest.mark.parametrize("isa", isas())
def test_many_calls(isa, family, first):
    attack_child.run("guarded_calls", family, first, first + AT_ONCE, TILEWISE_CPU_ISA=isa)


@pytest.mark.slow
@pytest.mark.parametrize("side", range(2), ids=["behind", "before"])
def test_what_reads_too_much_dies(side):
    with pytest.raises(AssertionError, match=f"guarded_calls died by signal 11 in case beyond {side}"):
        attack_child.run("guarded_calls", "beyond", side, side + 1)
