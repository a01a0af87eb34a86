"""Stamps in the generated code: none where tracing is off, one for each call where it is on. Needs the DSL, but no GPU."""

from dataclasses import replace

import pytest

from tilewise.ladder import RUNGS
from tilewise.sm90.jit import why_no_compiler

pytestmark = pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler()))


# k2: one block's code. k6: start, 6 of the producer, 13 of the consumers; the machine's time once at the end of each role.
@pytest.mark.parametrize(("name", "clocks", "times"), [("k2", 13, 1), ("k6", 20, 2)])
def test_stamps(name, clocks, times, tmp_path):
    def counts(choice: dict, folder: str) -> tuple[int, int]:
        rung = replace(RUNGS[name], choice=choice)
        ptx = rung.compiled(64, False, f"--keep-ptx --dump-dir {tmp_path / folder}").__ptx__
        return ptx.count("%clock"), ptx.count("%globaltimer")

    for folder in ("off", "on"):
        (tmp_path / folder).mkdir()
    assert counts({}, "off") == (0, 0)
    assert counts({"trace": True}, "on") == (clocks, times)
