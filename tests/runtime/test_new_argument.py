"""DESIGN.md's recipe for a new argument of attention, followed: three files outside the backends, and a backend reads it from its Call."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A factor for each query head's scores, which no release has.
EDITS = {
    "api.py": [
        ("    bias: Tensor | None = None,\n    alibi", "    bias: Tensor | None = None,\n    warmth: Tensor | None = None,\n    alibi"),
        ("    usual = return_max_logits", "    usual = warmth is None and return_max_logits"),
        ("o, lse, row_max = operator.attend(given, out)", "o, lse, row_max = operator.attend(given._replace(warmth=warmth), out)"),
        ("        diagonal=None,\n", "        diagonal=None,\n        warmth=None,\n"),
    ],
    "runtime/operator.py": [("    diagonal: Tensor | None\n    rng", "    diagonal: Tensor | None\n    warmth: Tensor | None\n    rng")],
    "problem.py": [
        (
            "    diagonal: Tensor | None = None\n    dropout",
            "    diagonal: Tensor | None = None\n    warmth: Tensor | None = None\n    dropout",
        )
    ],
}

USED = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
import torch
import tilewise as tw
from tilewise.backends.tiled import Tiled

assert tw.__file__.startswith(sys.argv[1])
plain_forward, plain_backward = Tiled.forward, Tiled.backward
seen = []

def warmed(call):
    seen.append(call.warmth)
    return call if call.warmth is None else replace(call, q=call.q * call.warmth[:, None], warmth=None)

Tiled.forward = lambda self, call: plain_forward(self, warmed(call))
Tiled.backward = lambda self, call, *rest, **named: plain_backward(self, warmed(call), *rest, **named)
q, k, v = (torch.randn(2, 7, 3, 8, requires_grad=True) for _ in range(3))
warmth = torch.tensor([1.0, 0.5, 2.0])
want = tw.attention(q * warmth[:, None], k, v, backend="tiled")
got = tw.attention(q, k, v, warmth=warmth, backend="tiled")
torch.testing.assert_close(got, want)
torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), v)[0] for o in (got, want)))
compiled = torch.compile(lambda: tw.attention(q, k, v, warmth=warmth, backend="tiled"), backend="eager", fullgraph=True)
torch.testing.assert_close(compiled(), want)
assert any(x is not None for x in seen) and "Tensor? warmth" in str(torch.ops.tilewise.attention_forward.default._schema)
"""


def test_three_files_take_a_new_argument_to_the_backends(tmp_path):
    shutil.copytree(ROOT / "src" / "tilewise", tmp_path / "tilewise", ignore=shutil.ignore_patterns("csrc", "*.so", "__pycache__"))
    for name, edits in EDITS.items():
        path = tmp_path / "tilewise" / name
        text = path.read_text()
        for old, new in edits:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        path.write_text(text)
    done = subprocess.run([sys.executable, "-c", USED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_recipe_names_these_files():
    recipe = (ROOT / "DESIGN.md").read_text().partition("## Adding an argument")[2].partition("\n## ")[0]
    assert set(EDITS) <= set(re.findall(r"`([a-z_/]+\.py)`", recipe))
