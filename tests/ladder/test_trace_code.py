"""Stamps in the generated code: none where tracing is off, one a phase where it is on. Needs the DSL, but no GPU."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("cutlass") is None, reason="needs NVIDIA's CuTe DSL")

COMPILE = """
import os, sys
os.environ.update(CUTE_DSL_ARCH="sm_90a", CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=sys.argv[1], CUTE_DSL_NO_CACHE="1")
from dataclasses import replace
from tilewise.ladder import RUNGS
rung = RUNGS[sys.argv[2]]
choice = {"trace": True} if sys.argv[3] == "on" else {}
replace(rung, choice={**rung.choice, **choice}).compiled(64, False)
"""
# In each kernel's source: a stamp for each call of trace.start, mark and stop, twice where the walk has a masked and an unmasked part.
CLOCKS = {"k2": 13, "k6": 21}


@pytest.mark.parametrize("name", CLOCKS)
@pytest.mark.parametrize("trace", ["off", "on"])
def test_stamps(name, trace, tmp_path):
    subprocess.run([sys.executable, "-c", COMPILE, str(tmp_path), name, trace], check=True, capture_output=True, timeout=120)
    (path,) = tmp_path.glob("*.ptx")
    ptx = path.read_text()
    assert ptx.count("%clock") == (CLOCKS[name] if trace == "on" else 0)
    assert ("%globaltimer" in ptx) == (trace == "on")
