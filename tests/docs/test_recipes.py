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
            ("Hopper(), Triton(), Cpu()", "Formula(), "),
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

OF_CALLS = {  # what the recipe for an argument of attention adds to problem.py; the two below go on from there
    "problem.py": [
        ("    dropout: Dropout | None = None\n", "    warmth: Tensor | None = None\n"),
        ("    scales: tuple[str, str, str] | None = None", "    warmth: bool = False\n"),
        ("            self.scales,\n", "            self.warmth is not None,\n"),
    ],
}

# A factor for each query head's scores, which no release has.
HOPPER = Recipe(
    "Adding an argument that a Hopper kernel computes",
    {},
    OF_CALLS
    | {
        "backends/hopper/score_changes.py": [
            ("    dropout: bool = False", "    warmth: bool = False\n"),
            ("self.alibi or self.bias is not None", "self.warmth or "),
        ],
        "backends/hopper/operands.py": [
            ("\n\n\nclass Changes(NamedTuple)", '\n    warmth: Annotated[Tensor | None, When("warmth"), Floats("heads_q")] = None')
        ],
        "backends/hopper/changes.py": [
            ('        "dropout": call.dropout is not None,\n', '        "warmth": call.warmth is not None,\n'),
            (")\n\n\ndef numbers", ", call.warmth"),
        ],
        "backends/hopper/forward/call.py": [
            ("call.row_max or call.diagonal is not None", "call.warmth is not None or "),
            ("),)\n\n    return made", ", call.warmth"),
        ],
        "backends/hopper/packing.py": [("call.dropout)):  # which differ by head", "call.warmth, ")],
        "backends/hopper/coverage.py": [
            (
                "    if problem.grad:\n        wrong += ",
                '    wrong += ["it has no gradient with warmth"] if problem.grad and problem.warmth else []\n',
            )
        ],
        "backends/hopper/scores/logits.py": [
            (
                "            for c in range_constexpr(0, cute.size(S, mode=[1]), 2):  # two",
                "            if const_expr(config.warmth):\n"
                "                for c in range_constexpr(cute.size(S, mode=[1])):\n"
                "                    S[r, c] = S[r, c] * terms.warmth\n",
            ),
            ("\n\n\nclass Statistics", "\n    warmth: Float32 | None = None"),
            ("    return Terms(", "    warmth = scores.warmth[block.head] if const_expr(config.warmth) else None\n"),
            (")\n\n\n@cute.jit\ndef bias_of", ", warmth"),
            (
                "    return logit(s, bias, distance, scores, slope, config)\n",
                "    if const_expr(config.warmth):\n        s = s * scores.warmth[block.head]\n",
            ),
        ],
    },
    """
from tilewise.backends.hopper import coverage
from tilewise.masks import Full
from tilewise.problem import Call
from tilewise.sm90 import jit

q, k, v = torch.zeros(3, 1, 300, 4, 64, dtype=torch.bfloat16)
call = Call(q=q, k=k, v=v, mask=Full(), scale=0.125, warmth=torch.ones(4))
assert call.problem.warmth
launch, arguments, config = coverage.kernels(call)[-1]
assert config.warmth and config.natural
if not jit.why_no_compiler():
    scores = arguments(config)[-1]
    assert scores.warmth is not None and scores.bias is None
    assert jit.compiled(launch, arguments, config) is not None
""",
)

DECODE = Recipe(
    "Adding an argument of decode",
    {},
    {
        "problem.py": [
            ('    rotary: "Rotary | None" = None', "    warmth: Tensor | None = None\n"),
            ("    k_scale: Tensor | None\n", "    warmth: Tensor | None\n"),
        ],
        "decoding.py": [
            ("    k_scale: Tensor | None = None,\n    v_scale: Tensor | None = None,\n    out", "    warmth: Tensor | None = None,\n"),
            ("k_scale, v_scale,\n        k, v, rotary_cos", "warmth, "),
            ("        k_scale=k_scale,\n        v_scale=v_scale,\n        mask_tensors", "        warmth=warmth,\n"),
        ],
        "runtime/decode_operator.py": [
            ("    k_scale: Tensor | None\n", "    warmth: Tensor | None\n"),
            ('"sink": call.sink}', '"warmth": call.warmth, '),
        ],
        "backends/sequences.py": [("        sink=call.sink,\n", "        warmth=call.warmth,\n")],
    },
    """
from dataclasses import replace
import tilewise as tw
from tilewise.backends.tiled import Tiled

plain, seen = Tiled.forward, []

def forward(self, call):
    seen.append(call.problem.warmth)
    return plain(self, call if call.warmth is None else replace(call, q=call.q * call.warmth[:, None], warmth=None))

Tiled.forward = forward
q, (k, v), lengths = torch.randn(2, 1, 4, 8), torch.randn(2, 2, 20, 2, 8), torch.tensor([3, 17], dtype=torch.int32)
for warmth in (torch.tensor([1.0, 0.5, 2.0, 3.0]), torch.tensor([2.0, 1.0, 0.5, 4.0])):  # the second is a cached call, where the backend binds it
    got = tw.decode(q, k, v, cache_seqlens=lengths, warmth=warmth, backend="tiled")
    torch.testing.assert_close(got, tw.decode(q * warmth[:, None], k, v, cache_seqlens=lengths, backend="tiled"))
assert set(seen) == {False, True} and "Tensor? warmth" in str(torch.ops.tilewise.decode.default._schema)
""",
)

RECIPES = {"mask": MASK, "backend": BACKEND, "rung": RUNG, "hopper": HOPPER, "decode": DECODE}

PROGRAM = """
import json, os, sys, traceback, warnings
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, sys.argv[1])
os.environ.update(TILEWISE_CACHE="0", TILEWISE_HELPERS="0", CUTE_DSL_ARCH="sm_90a")
warnings.simplefilter("ignore")
import torch, tilewise
torch.set_num_threads(1)
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
