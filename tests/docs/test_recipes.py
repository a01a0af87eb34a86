"""DESIGN.md's recipes, followed in a copy of the tree: what is added by them works on this machine."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tilewise"


class Recipe(NamedTuple):
    """What is added to the copy, and a program that shows that it works there."""

    heading: str  # of DESIGN.md
    files: dict[str, str]  # new ones
    edits: dict[str, list[tuple[str, str]]]  # by file: a text that it has once, and what is put before it
    shown: str


MASK = Recipe(
    "Adding a mask",
    {},
    {
        "masks/constructors.py": [
            (
                "CONSTRUCTORS = {\n",
                '''@dataclass(frozen=True, eq=False, repr=False)
class LastKeys(Mask):
    """Every query sees the last n keys."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_count("LastKeys: n", self.n))
        self._set("runs", f"LastKeys({self.n})")

    def _bands(self, blocks: Blocks) -> ndarray:
        return blocks.bands(k0=np.maximum(blocks.k0, blocks.k1 - min(self.n, INF)))


''',
            ),
            ("        FirstKeys,\n", "        LastKeys,\n"),
        ],
        "masks/__init__.py": [("    FirstKeys,\n", "    LastKeys,\n"), ('    "FirstKeys",\n', '    "LastKeys",\n')],
        "__init__.py": [("    FirstKeys,\n", "    LastKeys,\n"), ('    "FirstKeys",\n', '    "LastKeys",\n')],
        "testing/strategies.py": [("FirstKeys, Full", "LastKeys, "), ("        FirstKeys(n),\n", "        LastKeys(n),\n")],
    },
    """
import tilewise as tw
from tilewise.masks import parse

seen = torch.zeros(5, 9, dtype=torch.bool)
seen[:, 6:] = True
assert torch.equal(tw.LastKeys(3).dense(5, 9), seen) and parse("LastKeys(3)", ()) == tw.LastKeys(3)
assert tw.Documents([0, 4, 9], inner=tw.LastKeys(2)).pairs(9, 9) == 4 * 2 + 5 * 2
q, k, v = torch.randn(3, 1, 70, 2, 8).requires_grad_()
mask = tw.LastKeys(20) & tw.Causal()
got, want = (tw.attention(q, k, v, mask=each, backend="tiled") for each in (mask, tw.Dense(mask.dense(70, 70))))
torch.testing.assert_close(got, want)
torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), q)[0] for o in (got, want)))
try:
    tw.LastKeys(-1)
except ValueError as error:
    assert "LastKeys: n" in str(error)
else:
    raise AssertionError("no error")
""",
)

BACKEND = Recipe(
    "Adding a backend",
    {
        "backends/formula.py": '''"""The formula as it is written, on the whole score matrix."""

import torch
from torch import Tensor

from tilewise.backends import Backend
from tilewise.problem import Call, Gradients, Problem


class Formula(Backend):
    name = "formula"

    def why_not(self, problem: Problem) -> list[str]:
        changed = [name for name in ("softcap", "bias", "alibi", "sink", "dropout") if getattr(problem, name)]
        whole = problem.mask == "full" and problem.group == 1 and problem.dtype == torch.float64
        return problem.mixed + ([] if whole and not changed else ["it computes full masks of fp64 alone"])

    def tile(self, call: Call) -> None:
        return None

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        S = call.scale * torch.einsum("bqhd,bkhd->bhqk", call.q, call.k)
        lse = S.logsumexp(-1)
        return torch.einsum("bhqk,bkhd->bqhd", (S - lse[..., None]).exp(), call.v), lse

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        P = (call.scale * torch.einsum("bqhd,bkhd->bhqk", call.q, call.k) - lse[..., None]).exp()
        delta = torch.einsum("bqhd,bqhd->bhq", o, d_o) - (0 if d_lse is None else d_lse)
        dS = call.scale * P * (torch.einsum("bqhd,bkhd->bhqk", d_o, call.v) - delta[..., None])
        of_q, of_k = torch.einsum("bhqk,bkhd->bqhd", dS, call.k), torch.einsum("bhqk,bqhd->bkhd", dS, call.q)
        return Gradients(of_q, of_k, torch.einsum("bhqk,bqhd->bkhd", P, d_o), None, None)
'''
    },
    {
        "runtime/dispatch.py": [
            ("    from tilewise.backends.hopper import Hopper\n", "    from tilewise.backends.formula import Formula\n"),
            ("Hopper(), Cpu()", "Formula(), "),
        ]
    },
    """
import tilewise as tw
from tilewise.backends.formula import Formula
from tilewise.testing import tolerance
from tilewise.testing.cases import Case, make, upstream

backend = Formula()
for case in (Case(dtype="fp64", heads_k=4), Case(dtype="fp64", heads_k=4, seqlen_q=1, head_dim_v=40, lse_grad=True)):
    call, (d_o, d_lse) = make(case, grad=True), upstream(case)
    o, lse = backend.forward(call)  # conformance.run_case poisons memory as well, for which torch loads its compiler, 2 seconds
    tolerance.check_outputs(call, o, lse)
    tolerance.check_gradients(call, backend.backward(call, o, lse, d_o, d_lse), d_o, d_lse)
q, k, v = torch.randn(3, 2, 9, 4, 8, dtype=torch.float64).requires_grad_()
want = tw.attention(q, k, v, backend="reference")
torch.testing.assert_close(tw.attention(q, k, v), want)
assert "formula" in str(tw.explain(q, k, v)).splitlines()[0], str(tw.explain(q, k, v))
try:
    tw.attention(q, k, v, causal=True, backend="formula")
except tw.UnsupportedError as error:
    assert "it computes full masks of fp64 alone" in str(error)
else:
    raise AssertionError("no error")
tw.attention(q, k, v, causal=True)
""",
)

RUNG = Recipe(
    "Adding a rung",
    {
        "ladder/k9_three_stages.py": (SOURCE / "ladder/k8_fp8_incoherent.py")
        .read_text()
        .replace('"""K8: ', '"""K9: K8 with a stage less. ')
        .replace("    kv_stages: int = 4\n", "    kv_stages: int = 3\n")
    },
    {
        "ladder/__init__.py": [
            ("    )\n}\n\n# Other choices", '        Rung("k9", "k9_three_stages", "K8 with a stage less", recipe="incoherent"),\n')
        ]
    },
    """
from tilewise import bench
from tilewise.ladder import RUNGS
from tilewise.sm90 import jit

rung = RUNGS["k9"]
assert [name for name in RUNGS][-2:] == ["k8", "k9"] and "k9" in bench.known()
assert rung.reasons(torch.float32, 64, "cpu")[0].startswith("it takes bfloat16 only")
assert rung.code.configure(128, True).kv_stages == 3
if not jit.why_no_compiler():
    assert rung.compiled(64, False) is not None
""",
)

RECIPES = {"mask": MASK, "backend": BACKEND, "rung": RUNG}

PROGRAM = """
import json, os, sys, traceback, warnings
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, sys.argv[1])
os.environ.update(TILEWISE_CACHE="0", CUTE_DSL_ARCH="sm_90a")
warnings.simplefilter("ignore")
import torch, tilewise
assert tilewise.__file__.startswith(sys.argv[1])
found = {}
for name, program in json.load(sys.stdin).items():
    try:
        exec(compile(program, name, "exec"), {"torch": torch})
        found[name] = ""
    except BaseException:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the package in which every recipe is followed."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(SOURCE, folder / "tilewise", ignore=shutil.ignore_patterns("csrc", "*.so", "__pycache__"))
    for recipe in RECIPES.values():
        for name, text in recipe.files.items():
            (folder / "tilewise" / name).write_text(text)
        for name, edits in recipe.edits.items():
            path = folder / "tilewise" / name
            for anchor, new in edits:
                text = path.read_text()
                assert text.count(anchor) == 1, (name, anchor)
                path.write_text(text.replace(anchor, new + anchor))
    return folder


@pytest.fixture(scope="module")
def found(tree):
    """By recipe: what went wrong, or nothing."""
    programs = json.dumps({name: recipe.shown for name, recipe in RECIPES.items()})
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tree)], input=programs, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_adds_works(found, name):
    assert not found[name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_its_files(name):
    heading, files, edits, _ = RECIPES[name]
    recipe = (ROOT / "DESIGN.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([A-Za-z_/]+\.py)`", recipe))
    assert edits.keys() <= named and {Path(file).parent / "NAME.py" for file in files} <= set(map(Path, named))


def test_the_new_rung_is_a_step_of_the_ladder(tree, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import ladder

    monkeypatch.setattr(ladder, "LADDER", tree / "tilewise" / "ladder")
    assert ("k8", "k9") in [step[:2] for step in ladder.steps()] and not ladder.faults()
