"""lab/instruments/fp8_facts.py on the emulator: what it says of a machine whose sums are exact, and of one that keeps 13 bits."""

import importlib.util
import sys
from pathlib import Path

import pytest
from emulator.backend import NEEDED, Emulated

pytestmark = NEEDED


@pytest.fixture(scope="module")
def facts():
    spec = importlib.util.spec_from_file_location("fp8_facts", Path(__file__).parents[2] / "lab/instruments/fp8_facts.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def kernels(facts, fraction):
    emulated = Emulated(fraction=fraction)
    return {n: emulated.compiled(facts.launch_products, facts.arguments_of_products, facts.Products("e4m3", promote=n)) for n in (0, 1)}


@pytest.mark.parametrize(("fraction", "kept"), [(13, 13), (10, 10), (None, 16)])
def test_bits(facts, fraction, kept):
    found = facts.bits(kernels(facts, fraction)[0], "cpu")
    assert [row["kept"] for row in found] == [kept] * 4
    assert found[0]["got"]["6"] == 1 + 31 / 64 and found[3]["got"]["6"] == 1 - 31 / 64


def test_sums(facts):
    """As the simulation has them; in fp32 from tile to tile there is less to lose."""
    rows = list(facts.sums(kernels(facts, 13), "cpu", most=1024))
    never, promoted, predicted = (rows[i::3] for i in range(3))
    assert [row["promoted every"] for row in rows[:3]] == [0, 1, 0] and len(rows) == 9
    for a, b, c in zip(never, promoted, predicted, strict=True):
        assert a["relative_error"] == pytest.approx(c["predicted_relative_error"]) and a["relative_error"] > 5 * b["relative_error"]
    assert {row["values"]: row["bias"] < -0.01 for row in never} == {"V 1": True, "V normal": False, "V around 10": True}
