"""Every configuration of the Triton backend compiles for its GPUs without one, spills nothing that is not listed, and fits in shared memory.

What is asserted is measured on compiled kernels; where their sources have not changed it is read from the table kernels.json (triton_facts.py), and
one kernel a family is compiled anew and has to agree with it.
"""

import ast
import pkgutil
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton_facts
from triton_facts import Facts, known, measured, rows, turned
from triton_inventory import AGAIN, PASSES, QUICK, Case, cases

from tilewise.backends.triton import Triton, kernels, launch
from tilewise.backends.triton import config as configs
from tilewise.backends.triton.targets import COMPILED, FAMILIES, Target, of_device
from tilewise.problem import Problem

MULTIPLIES = {
    "sm80": "mma",
    "sm86": "mma",
    "sm90": "wgmma",
    "sm100": "tcgen05",
    "sm120": "mma",
    "cdna": "mfma",
    "gfx950": "mfma",
    "rdna": "wmma",
}
MOST_STACK = 96  # bytes a thread, of what SPILLS lists for NVIDIA and CDNA; up to 40 are of what stands behind the loops (`spoils`)
SPILLS = {
    "sm_100 dkdv bfloat16 128 tiles scores": 32,
    "sm_100 dkdv float32 128 band plain": 8,
    "sm_120 decode bfloat16 576 one plain": 32,
    "sm_120 dkdv bfloat16 192 band plain": 8,
    "sm_120 dkdv bfloat16 256 band plain": 32,
    "sm_120 dkdv float32 128 band plain": 24,
    "sm_120 dq bfloat16 192 band plain": 48,
    "sm_120 forward bfloat16 128 band fp8": 80,
    "sm_120 forward bfloat16 128 tiles int8+scores": 72,
    "sm_120 forward bfloat16 128 tiles scores": 64,
    "sm_120 forward bfloat16 192 band int8": 16,
    "sm_120 forward bfloat16 192 band plain": 16,
    "sm_80 decode bfloat16 128 one e4m3+paged": 16,
    "sm_80 decode bfloat16 576 one plain": 8,
    "sm_80 dkdv bfloat16 128 tiles scores": 24,
    "sm_80 dkdv bfloat16 256 band plain": 24,
    "sm_80 dkdv bfloat16 40 band plain unaligned": 8,
    "sm_80 dkdv bfloat16 64 band plain": 40,
    "sm_80 dkdv float16 96 varlen plain": 40,
    "sm_80 dkdv float32 128 band plain": 80,
    "sm_80 dq bfloat16 128 band plain": 48,
    "sm_80 dq bfloat16 192 band plain": 32,
    "sm_80 forward bfloat16 128 band fp8": 88,
    "sm_80 forward bfloat16 128 band given": 8,
    "sm_80 forward bfloat16 128 band largest": 88,
    "sm_80 forward bfloat16 128 band plain": 88,
    "sm_80 forward bfloat16 128 tiles int8+scores": 8,
    "sm_80 forward bfloat16 128 tiles scores": 24,
    "sm_80 forward bfloat16 256 band plain": 8,
    "sm_80 forward bfloat16 40 band plain unaligned": 72,
    "sm_80 forward bfloat16 512 band plain": 24,
    "sm_80 forward bfloat16 64 band plain": 24,
    "sm_80 forward float16 96 varlen plain": 32,
    "sm_86 dq bfloat16 128 band plain": 48,
    "sm_89 decode bfloat16 576 one e4m3+rows": 16,
    "sm_89 decode bfloat16 576 one plain": 16,
    "sm_89 decode float32 192 chunk plain": 16,
    "sm_89 dkdv bfloat16 128 band dropout": 16,
    "sm_89 dkdv bfloat16 128 tiles scores": 24,
    "sm_89 dkdv bfloat16 256 band plain": 16,
    "sm_89 dkdv bfloat16 64 band plain": 8,
    "sm_89 dkdv float32 128 band plain": 8,
    "sm_89 dq bfloat16 128 band plain": 48,
    "sm_89 dq bfloat16 192 band plain": 24,
    "sm_89 dq bfloat16 256 band plain": 8,
    "sm_89 dq bfloat16 512 band plain": 16,
    "sm_89 forward bfloat16 128 band fp8": 24,
    "sm_89 forward bfloat16 192 band int8": 8,
    "sm_89 forward bfloat16 192 band plain": 56,
    "sm_89 forward bfloat16 512 band plain": 8,
    "sm_89 forward bfloat16 64 band plain": 24,
    "sm_90 decode bfloat16 128 chunk prefix": 56,
    "sm_90 decode bfloat16 576 one plain": 32,
    "sm_90 decode float32 96 chunk int8+paged": 8,
    "sm_90 dkdv bfloat16 128 band bias": 24,
    "sm_90 dkdv bfloat16 128 band dropout": 40,
    "sm_90 dkdv bfloat16 128 band part": 48,
    "sm_90 dkdv bfloat16 128 band plain": 56,
    "sm_90 dkdv bfloat16 128 varlen plain": 40,
    "sm_90 dkdv bfloat16 128 window plain": 40,
    "sm_90 dkdv float32 128 band plain": 48,
    "sm_90 dq bfloat16 128 band dropout": 32,
    "sm_90 dq bfloat16 128 band part": 48,
    "sm_90 dq bfloat16 128 varlen plain": 24,
    "sm_90 dq bfloat16 128 window plain": 24,
    "sm_90 dq bfloat16 64 band softcap": 80,
    "sm_90 forward bfloat16 128 band alibi": 72,
    "sm_90 forward bfloat16 128 band bias": 24,
    "sm_90 forward bfloat16 128 band dropout": 40,
    "sm_90 forward bfloat16 128 band fp8": 72,
    "sm_90 forward bfloat16 128 band part": 32,
    "sm_90 forward bfloat16 128 varlen plain": 32,
    "sm_90 forward bfloat16 128 window plain": 32,
    "sm_90 forward bfloat16 48 band bias": 56,
    "sm_90 forward bfloat16 64 band plain": 56,
    "sm_90 forward bfloat16 64 window plain": 8,
    "sm_90 forward bfloat16 80 band plain": 48,
}
SPILLS_MORE = {
    "sm_100 decode bfloat16 576 chunk plain": 752,
    "sm_120 decode bfloat16 576 chunk plain": 696,
    "sm_80 decode bfloat16 576 chunk plain": 632,
    "sm_80 forward bfloat16 192 band plain": 120,
    "sm_80 prepare bfloat16 512 band plain": 128,
    "sm_89 decode bfloat16 576 chunk plain": 568,
    "sm_89 decode float32 256 chunk plain": 176,
    "sm_89 decode float32 256 one plain": 192,
    "sm_90 decode bfloat16 128 chunk joined+tree+paged": 744,
    "sm_90 decode bfloat16 128 chunk paged": 128,
    "sm_90 decode bfloat16 128 chunk ragged+rotary+rows": 160,
    "sm_90 decode bfloat16 128 chunk scores": 224,
    "sm_90 decode bfloat16 576 chunk plain": 1232,
    "sm_90 decode bfloat16 576 one group": 248,
    "sm_90 decode bfloat16 576 one latent+paged+group": 336,
    "sm_90 dkdv bfloat16 192 band plain": 640,
    "sm_90 dkdv bfloat16 256 band plain": 728,
    "sm_90 dkdv bfloat16 256 tiles plain": 248,
    "sm_90 dq bfloat16 40 band plain unaligned": 120,
    "sm_90 forward bfloat16 128 band largest": 112,
    "sm_90 forward bfloat16 128 band plain": 112,
    "sm_90 forward bfloat16 128 band softcap": 112,
    "sm_90 forward bfloat16 256 band plain": 104,
    "sm_90 forward bfloat16 40 band plain unaligned": 144,
    "sm_90 prepare bfloat16 512 band plain": 168,
}
RDNA_SPILLS = {
    "gfx1100 decode bfloat16 128 chunk e4m3+paged": 292,
    "gfx1100 decode bfloat16 576 chunk e4m3+rows": 3852,
    "gfx1100 decode bfloat16 576 chunk plain": 2220,
    "gfx1100 decode bfloat16 576 one e4m3+rows": 2628,
    "gfx1100 decode bfloat16 576 one plain": 840,
    "gfx1100 decode float32 128 chunk plain": 40,
    "gfx1100 dkdv bfloat16 128 band bias": 716,
    "gfx1100 dkdv bfloat16 128 band dropout": 796,
    "gfx1100 dkdv bfloat16 128 band plain": 692,
    "gfx1100 dkdv bfloat16 128 tiles scores": 108,
    "gfx1100 dkdv bfloat16 192 band plain": 1600,
    "gfx1100 dkdv bfloat16 256 band plain": 2172,
    "gfx1100 dkdv bfloat16 512 band plain": 4676,
    "gfx1100 dkdv float32 128 band plain": 848,
    "gfx1100 dq bfloat16 128 band bias": 784,
    "gfx1100 dq bfloat16 128 band dropout": 736,
    "gfx1100 dq bfloat16 128 band plain": 608,
    "gfx1100 dq bfloat16 128 tiles scores": 808,
    "gfx1100 dq bfloat16 192 band plain": 1540,
    "gfx1100 dq bfloat16 256 band plain": 1816,
    "gfx1100 dq bfloat16 512 band plain": 4132,
    "gfx1100 dq float32 128 band plain": 804,
    "gfx1100 forward bfloat16 128 band bias": 8,
    "gfx1100 forward bfloat16 192 band plain": 288,
    "gfx1100 forward bfloat16 256 band plain": 636,
    "gfx1100 forward bfloat16 512 band plain": 1852,
    "gfx1100 forward float32 128 band plain": 688,
}
SPILLED = {"gfx90a dkdv bfloat16 128 band plain": 1}  # registers, without a stack: to accumulation registers
LISTED = SPILLS | SPILLS_MORE | RDNA_SPILLS
"""Bytes of stack a thread, by kernel. SPILLS_MORE: more than that. Hopper's in 16 bits are the fastest of a search that measured them so, but for
decode's trees; others wait for one, or are rare (unaligned tensors, `prepare` of a head_dim of 512). RDNA_SPILLS: RDNA3 has 256 registers, which
operands of 128 columns fill.
"""
TABLE = rows()
INVENTORY = list(cases())


def facts_of(case: Case) -> Facts:
    """The table's if nothing that the kernel is made from has changed, or those of one compiled here."""
    if found := known(case, TABLE):
        return found
    made_with = TABLE.get(case.name, {}).get("triton", triton.__version__)
    if made_with != triton.__version__:
        pytest.skip(f"kernels.json is of Triton {made_with}, and {triton.__version__} is installed")
    warnings.warn("kernels.json lacks kernels as they are now, which takes seconds each; tools/triton_table.py renews it", stacklevel=1)
    return measured(case.built(), case.target)


def wrong_with(case: Case, facts: Facts) -> list[str]:
    """Sentences that say which rules the kernel breaks."""
    family, found = case.target.family, []
    if not case.kernel.startswith(AGAIN):  # which returns before it needs registers, but where NaN is
        if facts.stack > LISTED.get(case.name, 0):
            found.append(f"{facts.stack} bytes of stack a thread")
        if facts.spilled > SPILLED.get(case.name, 0) and case.name not in RDNA_SPILLS:
            found.append(f"{facts.spilled} registers spilled")
    if facts.shared > case.target.shared_bytes:
        found.append(f"{facts.shared} bytes of shared memory, of {case.target.shared_bytes}")
    lacks = family == "rdna" and case.dtype == torch.float32  # the instruction
    multiplies = (
        case.kernel in (*PASSES, "dbias", "decode") and not lacks
    )  # else it is a trap: Triton says nothing where tensor memory does not suffice
    if multiplies and not any(name in facts.products for name in (MULTIPLIES[family], "mma")):
        found.append(f"no {MULTIPLIES[family]}: {facts.products}")
    if facts.turned:
        found.append("a product of tiles is transposed, which Triton has miscompiled on Hopper")
    return found


@pytest.mark.parametrize("case", INVENTORY, ids=lambda case: case.name)
def test_rules(case):
    assert wrong_with(case, facts_of(case)) == []


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_compiled_anew(case):
    found = measured(case.built(), case.target)
    assert wrong_with(case, found) == []
    if known(case, TABLE):
        assert found == known(case, TABLE)


def test_the_table_is_of_the_inventory():
    names = [case.name for case in INVENTORY]
    assert len(set(names)) == len(names) <= 600 and set(TABLE) == set(names)
    assert {case.arch for case in INVENTORY} == set(COMPILED)


def test_every_exception_is_needed():
    stacks = {name: TABLE[name]["facts"]["stack"] for name in LISTED}
    assert stacks == LISTED and all(stacks.values())
    assert {name: TABLE[name]["facts"]["spilled"] for name in SPILLED} == SPILLED
    assert max(SPILLS.values()) <= MOST_STACK and all(Target(name.split()[0]).family == "rdna" for name in RDNA_SPILLS)


def test_a_broken_rule_is_found():
    case, fine = QUICK[0], Facts(registers=200, stack=0, spilled=0, shared=1 << 16, products={"mma": 64}, turned=0)
    assert wrong_with(case, fine) == []
    broken = {"stack": 72, "spilled": 2, "shared": 1 << 18, "products": {}, "turned": 1}
    assert all(len(wrong_with(case, replace(fine, **{name: value}))) == 1 for name, value in broken.items())


def test_transposed_products_are_found():
    head = "%x_1 = tt.dot %a, %b, %zero : t\n%y = arith.truncf %x_1 : t\n"
    assert turned(head + "%z = tt.trans %y {order} : t\n") == 1
    assert turned(head + "%z = tt.trans %a {order} : t\n") == 0
    assert turned(head + "%r:2 = scf.for %i = %c to %n step %s iter_args(%y = %zero) {\n%z = tt.trans %y {order} : t\n") == 0


def test_sources_count():
    """A row of another architecture, constant or configuration is another row."""
    case = QUICK[0]
    kernel, target = case.built(), case.target
    digest = triton_facts.source(kernel, target)
    other = dict(kernel.constants) | {"GROUP": 7}
    assert triton_facts.source(kernel, Target("sm_86")) != digest
    assert triton_facts.source(replace(kernel, constants=tuple(other.items())), target) != digest
    assert triton_facts.source(replace(kernel, config=kernel.config._replace(stages=1)), target) != digest
    read = {f"{kernels.__name__}.{name}" for name in ("visible", "eight_bits")}  # which it imports names of, and as a module
    assert triton_facts.reached(kernel.function.__module__) >= read


def refused_by_the_oldest(code: ast.AST) -> list[str]:
    """Assignments that Triton 3.6 does not take: to several targets, or to a tuple that has anything but names; it compiles no kernel of theirs."""
    found = []
    for node in ast.walk(code):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign | ast.For) else []
        parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])]
        if len(targets) > 1 or not all(isinstance(part, ast.Name) for part in parts):
            found.append(f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found


@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(kernels.__path__)])
def test_the_oldest_triton_takes_every_assignment(name):
    assert refused_by_the_oldest(triton_facts.parsed(f"{kernels.__name__}.{name}")) == []


def test_what_the_oldest_triton_refuses_is_found():
    for line in ("a, (b, c) = d", "a, *b = c", "a = b = c", "for a, (b, c) in d: pass"):
        assert len(refused_by_the_oldest(ast.parse(line))) == 1
    for line in ("a, b = c", "a = b, (c, d)", "for a in b: pass", "a: int = b", "a += b"):
        assert refused_by_the_oldest(ast.parse(line)) == []


def test_every_family_has_every_row():
    for family in set(FAMILIES.values()):
        for key in configs.FITTING:
            assert (family, *key) in configs.TABLE
    assert {Target(arch).family for arch in ("sm_88", "sm_110", "gfx906", "gfx1151")} <= set(FAMILIES.values())


@pytest.mark.parametrize(
    ("arch", "kib", "family", "fits"),
    [
        ("sm_88", 163, "sm80", 163),
        ("sm_88", 99, "sm86", 99),
        ("sm_110", 227, "sm100", 227),
        ("sm_110", 99, "sm120", 99),
        ("sm_130", 227, "sm120", 227),
        ("sm_90", 0, "sm90", 227),
        ("gfx906", 64, "cdna", 64),
        ("sm_88", 48, "sm86", 48),  # nothing smaller is there: Triton says what does not fit
    ],
)
def test_an_unknown_gpu_takes_the_first_family_that_fits(monkeypatch, arch, kib, family, fits):
    """By the shared memory that its driver names."""
    amd = arch.startswith("gfx")
    named = {"gcnArchName": f"{arch}:sramecc+"} if amd else {"shared_memory_per_block_optin": kib << 10}
    monkeypatch.setattr(torch.version, "hip", "7.0" if amd else None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**named))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (int(arch[3:-1]), int(arch[-1])))
    target = of_device.__wrapped__(torch.device("cuda", 0))
    assert (target.arch, target.family, target.shared_bytes) == (arch, family, fits << 10)
    assert (target == Target(arch)) == (arch in FAMILIES or amd)


def test_what_no_tile_fits_is_refused():
    """Gradients of 512 fp32 columns take more shared memory than Ada has."""

    def reasons(**changes) -> list[str]:
        given = {"device": "cuda", "dtype": torch.float32, "head_dim": 512, "head_dim_v": 64, "group": 1, "mask": "full", "grad": True}
        return Triton().why_not(Problem(**given | {"capability": (8, 9)} | changes))

    assert reasons() == ["its fp32 gradients of a head_dim above 256 need 144 KiB of shared memory"]
    for fine in ({"capability": (8, 0)}, {"grad": False}, {"dtype": torch.bfloat16}, {"head_dim": 256}):
        assert reasons(**fine) == []


@pytest.mark.parametrize("feature", ["bias", "dropout"])
def test_scores_stay_in_the_layout_of_their_product(feature):
    """No tile of fp32 goes through shared memory to another one, and each of the two loops takes its maxima and sums once."""
    case = Case("sm_90", "forward", feature=feature)
    code = launch.build(case.built(), case.target).asm["ttgir"].splitlines()
    assert not [line for line in code if "convert_layout" in line and re.search(r"tensor<\d+x\d+xf32", line)]
    in_loops = [line for line in code if line.startswith("      ")]
    assert len([line for line in in_loops if '"tt.reduce"' in line and "axis = 1" in line]) == 4
