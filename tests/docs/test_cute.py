"""The page on CuTe DSL: its pictures are the compiler's layouts, and it or the glossary has every name of the DSL that the rungs' pages show."""

import ast
import re

import pytest

pytest.importorskip("cutlass")

from worklog_pages import ROOT, TEXTS, blocks, excerpt_of, tool

from tilewise.sm90 import dsl
from tilewise.sm90.dsl import BFloat16, Float32, OperandMajorMode, cute, pipeline, sm90, warpgroup

MODULES = {"arch", "cpasync", "cute", "cutlass", "pipeline", "warp", "warpgroup"}
CLASSES = (cute.Tensor, cute.ThrMma, cute.TiledMma, pipeline.PipelineTmaAsync, pipeline.PipelineState, cute.TensorSSA, Float32)
METHODS = {name for each in CLASSES for name in dir(each) if not name.startswith("_")} | {"index", "phase", "count"}
PARTITION, PLACE = re.compile(r"t[A-Z][a-z][A-Z]"), re.compile(r"[mgsr][A-Z]")  # of whatever operand: the page says it of Q


def excerpts():
    for text in TEXTS.values():
        for block in blocks(text):
            if (path := excerpt_of(text, block)) and path.startswith("src/tilewise/"):
                yield block[1]


def dotted(node) -> str | None:
    """`a.b.c` of an expression that is nothing else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def names(excerpt: str) -> set[str]:
    """The DSL's names in some lines of a kernel: functions by their whole name, methods, arguments by name, partitions."""
    found = set()
    for node in ast.walk(ast.parse(excerpt)):
        if isinstance(node, ast.Attribute):
            whole = dotted(node)
            if whole and whole.partition(".")[0] in MODULES:
                found.add(whole)
            elif node.attr in METHODS:
                found.add(node.attr)
        elif isinstance(node, ast.Name) and PLACE.fullmatch(node.id):
            found.add(f"{node.id[0]}Q")
        elif isinstance(node, ast.Name) and (node.id in dsl.__all__ or PARTITION.fullmatch(node.id)):
            found.add(node.id)
        elif isinstance(node, ast.Call) and (called := dotted(node.func)) and called.partition(".")[0] in MODULES:
            found |= {keyword.arg for keyword in node.keywords}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)} - MODULES


def explained() -> str:
    pages = TEXTS["cute.md"] + (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", pages, flags=re.DOTALL | re.MULTILINE)
    return "\n".join(re.findall(r"`([^`]+)`", prose))


def test_every_name_of_the_dsl_in_an_excerpt_is_explained():
    found, text = set().union(*map(names, excerpts())), explained()
    assert len(found) > 50
    assert not sorted(name for name in found if not re.search(rf"(?<![\w.]){re.escape(name)}\b|\.{re.escape(name)}\b", text))


def test_names_are_found():
    assert names("cute.copy(source.atom, tXgX, tXsX[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state))") == {
        "cute.copy", "tXgX", "tXsX", "index", "tma_bar_ptr", "producer_get_barrier",
    }  # fmt: skip
    assert names("if const_expr(config.causal):\n    s = -Float32.inf") == {"const_expr", "Float32"}
    assert names("gK = mK[head, j, None]\nx.elsewhere(y=1)") == {"gQ", "mQ"}


def held(tiled, threads: int, shape: tuple[int, int], part) -> dict:
    """Thread and value of each element of a tile, asked of the DSL while tracing."""
    grids = {name: [[None] * shape[1] for _ in range(shape[0])] for name in ("thread", "value")}
    for thread in range(threads):
        mine = part(tiled.get_slice(thread))(cute.make_identity_tensor(shape))
        for value in range(cute.size(mine)):
            row, column = mine[value]
            grids["thread"][row][column], grids["value"][row][column] = thread, value
    return grids


def traced(function) -> dict:
    found = {}

    @cute.jit(preprocess=False)
    def trace():
        found.update(function())

    trace()
    return found


def test_the_picture_of_tv_layouts_is_the_compilers():
    def ask():
        tiled_mma = cute.make_tiled_mma(cute.nvgpu.MmaUniversalOp(Float32), cute.make_layout((4, 2, 1), stride=(2, 1, 0)))
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=32)
        of_threads, of_values = (cute.make_ordered_layout(shape, order=(1, 0)) for shape in ((4, 2), (1, 3)))
        tiled_copy = cute.make_tiled_copy_tv(atom, of_threads, of_values)
        return {
            "TiledMMA: C": held(tiled_mma, 8, (8, 6), lambda mine: mine.partition_C),
            "TiledCopy": held(tiled_copy, 8, (8, 6), lambda mine: mine.partition_S),
        }

    assert traced(ask) == tool("worklog_figures").tv()


def test_the_picture_of_a_warpgroups_accumulator_is_the_compilers():
    def ask():
        k = OperandMajorMode.K
        tiled_mma = sm90.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, (1, 1, 1), (64, 64), warpgroup.OperandSource.SMEM)
        return held(tiled_mma, 128, (64, 64), lambda mine: mine.partition_C)

    grids, shown = traced(ask), tool("worklog_figures").fragment()
    assert [line[:16] for line in grids["thread"][:16]] == shown["thread"]
    assert [line[:16] for line in grids["value"][:16]] == shown["register"]
