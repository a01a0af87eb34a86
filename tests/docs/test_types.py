"""What README, the guides and examples show passes type checkers, and the types of the public functions say what they return.

basedpyright (standard) reads all of it, mypy the first lines. `make types` installs both and runs this; without them what needs them is skipped.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_overloads, get_type_hints

import pytest
import torch

import tilewise as tw
from tilewise import distributed, keywords

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(path for name in ("guide", "start") for path in sorted((ROOT / "docs" / name).glob("*.md")))]
STUBS = {  # what compat.install("flash_attn") puts there
    "flash_attn/__init__.pyi": "from tilewise.compat.flash_attn import *\n",
    "flash_attn/bert_padding.pyi": "from tilewise.compat.bert_padding import *\n",
}
RETURNS = """
import torch
from torch import Tensor
from typing import assert_type
import tilewise as tw
from tilewise import distributed

def core(x: Tensor, flag: bool, plan: distributed.Plan) -> None:
    assert_type(tw.attention(x, x, x, causal=True), Tensor)
    assert_type(tw.attention(x, x, x, return_lse=False), Tensor)
    assert_type(tw.attention(x, x, x, return_lse=True, softcap=1.0), tuple[Tensor, Tensor])
    assert_type(tw.attention(x, x, x, return_max_logits=True), tuple[Tensor, Tensor])
    assert_type(tw.attention(x, x, x, return_lse=True, return_max_logits=True), tuple[Tensor, Tensor, Tensor])
    assert_type(tw.attention(x, x, x, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(tw.attention(x, x, x, return_max_logits=flag), Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor])
    assert_type(tw.attention_varlen(x, x, x, x, x), Tensor)
    assert_type(tw.attention_varlen(x, x, x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(tw.attention_varlen(x, x, x, x, x, return_lse=True, return_max_logits=True), tuple[Tensor, Tensor, Tensor])
    assert_type(tw.decode(x, x, x, cache_seqlens=3), Tensor)
    assert_type(tw.decode(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(tw.quantise(x), tuple[Tensor, Tensor])
    assert_type(tw.quantise(x, "int8", centre=True), tuple[Tensor, Tensor, Tensor])
    assert_type(tw.merge([x], [x]), tuple[Tensor, Tensor])
    assert_type(distributed.attention(x, x, x, plan, stages=2), Tensor)
    assert_type(distributed.attention(x, x, x, plan, return_lse=True), tuple[Tensor, Tensor])
    assert_type(distributed.decode(x, x, x, (0, 1), cache_seqlens=x), Tensor)
    assert_type(distributed.decode(x, x, x, (0, 1), cache_seqlens=x, return_lse=True), tuple[Tensor, Tensor])
"""
WRONG = """
import torch, tilewise as tw
x = torch.zeros(1, 2, 3, 4)
tw.attention(x, x, x, is_causal=True)
tw.attention(x, x, x, softcap="a")
tw.Documents("300")
tw.decode(x, x, x, k_scale=1.0)
"""
FLAGS = {"return_lse", "return_max_logits"}
FUNCTIONS = {
    tw.attention: keywords.AttentionOptions,
    tw.attention_varlen: keywords.VarlenOptions,
    tw.decode: keywords.DecodeOptions,
    distributed.attention: keywords.ShardedOptions,
    distributed.decode: keywords.ShardedDecodeOptions,
}


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def complaints(tmp_path_factory) -> dict[str, list[str]]:
    """What basedpyright says, by file: one of each page's blocks, one of each of README's blocks, and what is above."""
    pytest.importorskip("basedpyright")
    folder = tmp_path_factory.mktemp("blocks")
    texts = {f"page_{page.stem}": "\n".join(blocks(page)) for page in PAGES}
    texts |= {f"readme_{number}": text for number, text in enumerate(blocks(ROOT / "README.md"))}
    texts |= {f"example_{path.stem}": path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    for name, text in (texts | {"returns": RETURNS, "wrong": WRONG}).items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    for name, text in STUBS.items():
        (folder / "stubs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "stubs" / name).write_text(text, encoding="utf-8")
    settings = {"typeCheckingMode": "standard", "pythonVersion": "3.11", "extraPaths": ["stubs", str(ROOT / "src")], "exclude": ["stubs"]}
    settings["reportPrivateImportUsage"] = "none"  # diffusers lists nothing that it exports
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    found = json.loads(ran.stdout)
    assert found["summary"]["filesAnalyzed"] >= len(texts)
    said: dict[str, list[str]] = {name: [] for name in (*texts, "returns", "wrong")}
    for each in found["generalDiagnostics"]:
        if each["severity"] == "error":
            line = each["range"]["start"]["line"]
            said[Path(each["file"]).stem].append(f"{line + 1}: {each['message']}")
    return said


def test_blocks_have_no_error_of_types(complaints):
    wrong = {name: said for name, said in complaints.items() if said and name != "wrong"}
    assert not wrong, json.dumps(wrong, indent=1)


def test_the_first_lines_pass_mypy(tmp_path):
    """mypy reads all of torch, so this is README's first block and what is returned alone."""
    pytest.importorskip("mypy")
    for name, text in (("first", blocks(ROOT / "README.md")[0]), ("returns", RETURNS)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "first.py", "returns.py"]
    where = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    ran = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=300)
    ours = [line for line in ran.stdout.splitlines() if line.startswith(("first.py", "returns.py"))]
    assert not ours and ran.returncode in (0, 1) and not ran.stderr, ran.stdout + ran.stderr


def test_wrong_calls_are_seen(complaints):
    assert {int(each.partition(":")[0]) for each in complaints["wrong"]} == {4, 5, 6, 7}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_overloads_take_what_the_function_takes(function):
    """The keywords of overloads are those of the signature, with the same types and defaults, and no overload is missing."""
    parameters = inspect.signature(function).parameters
    hints, options = get_type_hints(function), get_type_hints(FUNCTIONS[function])
    by_keyword = {name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    spelled = {name for each in get_overloads(function) for name, parameter in inspect.signature(each).parameters.items()}
    assert options.keys() == by_keyword - FLAGS - spelled
    assert {name: hints[name] for name in options} == options
    flags = len(FLAGS & by_keyword)
    assert len(get_overloads(function)) == 2**flags + flags


def test_results_are_of_the_types_that_overloads_say():
    q = torch.randn(1, 5, 2, 8)
    for flags in ({}, {"return_lse": True}, {"return_max_logits": True}, {"return_lse": True, "return_max_logits": True}):
        found = tw.attention(q, q, q, **flags)
        assert isinstance(found, tuple) == bool(flags) and (not flags or len(found) == 1 + len(flags))


def test_the_package_says_that_it_has_types():
    assert (Path(importlib.import_module("tilewise").__file__).parent / "py.typed").exists()
