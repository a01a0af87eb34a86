"""Stamps in the generated code: none where tracing is off, one for each call where it is on. Needs the DSL, but no GPU."""

import pytest

from tilewise.ladder import RUNGS
from tilewise.sm90.jit import why_no_compiler

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler()))

# k2: one block's code. k5_1 and k6: start, 5 and 7 of the producer, 11 and 13 of the consumers; the machine's time once at the end of each role.
# k7, k8: as k6.
CASES = [("k2", 13, 1), ("k5_1", 17, 2), ("k6", 21, 2), *(pytest.param(name, 21, 2, marks=pytest.mark.slow) for name in ("k7", "k8"))]


@pytest.mark.parametrize(("name", "clocks", "times"), CASES)
def test_stamps(name, clocks, times, tmp_path):
    def counts(stamped: bool, folder: str) -> tuple[int, int]:
        ptx = RUNGS[name].compiled(64, False, f"--keep-ptx --dump-dir {tmp_path / folder}", stamped=stamped).__ptx__
        return ptx.count("%clock"), ptx.count("%globaltimer")

    for folder in ("off", "on"):
        (tmp_path / folder).mkdir()
    assert counts(False, "off") == (0, 0)
    assert counts(True, "on") == (clocks, times)
