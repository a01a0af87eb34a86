"""Stamps in the generated code: none where tracing is off, one for each call where it is on. Needs the DSL, but no GPU."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("cutlass") is None, reason="needs NVIDIA's CuTe DSL")

# The DSL reads these variables when it is first imported, so it gets a process of its own.
COUNT = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
os.environ.update(CUTE_DSL_ARCH="sm_90a", CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=str(folder), CUTE_DSL_NO_CACHE="1")
from tilewise.ladder import RUNGS
found = {}
for name in ("k2", "k5_1", "k6"):
    for stamped in (False, True):
        RUNGS[name].compiled(64, False, stamped=stamped)
        (path,) = folder.glob("*.ptx")
        ptx = path.read_text()
        found.setdefault(name, []).append([ptx.count("%clock"), ptx.count("%globaltimer")])
        path.unlink()
print(json.dumps(found))
"""


def test_stamps(tmp_path):
    done = subprocess.run([sys.executable, "-c", COUNT, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # k2: one block's code. k5_1 and k6: start, 5 and 7 of the producer, 11 and 13 of the consumers; the machine's time once at the end of each role.
    assert json.loads(done.stdout.splitlines()[-1]) == {"k2": [[0, 0], [13, 1]], "k5_1": [[0, 0], [17, 2]], "k6": [[0, 0], [21, 2]]}
