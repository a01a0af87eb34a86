"""Good calls with something wrong, by the thousand: a sentence, or the right value, and nothing written where a call raises (shared/bad_calls.py)."""

import attack_child
import pytest

FAMILIES = "decode,append,attention,varlen"
FEW, MANY, AT_ONCE = 60, 6060, 1000


def test_few_calls():
    attack_child.run("bad_calls", FAMILIES, 0, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, MANY, AT_ONCE))
@pytest.mark.parametrize("family", FAMILIES.split(","))
def test_many_calls(family, first):
    attack_child.run("bad_calls", family, first, first + AT_ONCE)
