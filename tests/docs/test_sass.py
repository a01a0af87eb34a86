"""The compiled code on the page about profiling is what the compiler makes of the rungs today; what the page says of it is so."""

import re
from importlib.metadata import version

import kernel_facts
import pytest
from worklog_pages import ROOT, TEXTS, tool

from tilewise.sm90 import jit

PINNED = re.search(r"^nvidia-cutlass-dsl==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)[1]
pytestmark = [
    pytest.mark.skipif(bool(jit.why_no_compiler()), reason="; ".join(jit.why_no_compiler())),
    pytest.mark.skipif(
        kernel_facts.inspector() is None, reason="cuobjdump is not installed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    ),
]
PAGE = TEXTS["profiling.md"]


@pytest.fixture(scope="module")
def sass():
    if version("nvidia-cutlass-dsl") != PINNED:
        pytest.skip(f"the page shows what DSL {PINNED} makes, and {version('nvidia-cutlass-dsl')} is installed")
    return tool("worklog_sass")


def test_excerpts_and_counts_are_todays(sass):
    assert re.findall(r"<!-- sass:begin (\S+) -->", PAGE) == ["k5", "k6", "counts"]
    assert sass.written(PAGE) == PAGE, "run python tools/worklog_sass.py"


def test_what_the_page_says_of_it(sass):
    """K5 waits for everything, K6 leaves a product in flight; K's stage goes back behind most of the softmax; every instruction has its row."""
    waits = {name: [code for _, code in sass.loop(sass.code(name)) if "DEPBAR" in code] for name in ("k5", "k6")}
    assert [each[-1] for each in waits["k5"]] == ["0", "0"] and [each[-1] for each in waits["k6"]] == ["1", "0"]
    k5 = [code for _, code in sass.loop(sass.code("k5"))]
    first = next(place for place, code in enumerate(k5) if "DEPBAR" in code)
    released = next(place for place, code in enumerate(k5) if "SYNCS.ARRIVE" in code)
    assert f"{released - first - 1} instructions" in PAGE
    under, every = (
        sass.exponentials_under_output(sass.loop(sass.code("k6"))),
        sum("MUFU.EX2" in code for _, code in sass.loop(sass.code("k6"))),
    )
    assert 0 < under < every / 2
    listed = " ".join(re.findall(r"^\| (`.+?`) \|", PAGE, re.MULTILINE))
    shown = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL))
    for name in set(re.findall(r"^\w{4}  (?:@!?P\d )?([A-Z]+)", shown, re.MULTILINE)) - {"BRA", "NANOSLEEP"}:
        assert name in listed, name


def test_a_loop_is_found():
    sass = tool("worklog_sass")
    code = [(0, "MOV"), (16, "HGMMA x, gsb0"), (32, "HGMMA y, gsb0"), (48, "@P0 BRA 0x10"), (64, "BRA 0x0"), (80, "@P1 BRA 0x0")]
    assert sass.loop(code) == code[1:4]
    with pytest.raises(ValueError, match="no loop"):
        sass.loop(code[:3])
    assert [sass.kind(each) for each in ("@!P0 MUFU.EX2 R1, R2", "FFMA R1", "@!UP0 HGMMA.64x64 R")] == ["MUFU.EX2", "FFMA", "HGMMA"]
