"""What is named exists: modules in pages, in the command line's help and in doctor's list; packages in extras."""

import importlib
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tilewise.cli import doctor, grammar

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "tilewise"
PAGES = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
NOTES = ROOT / "docs" / "lab-notes.md"  # a diary: what it names was there on the day
MODULES = {  # of the distributions that an extra or doctor names; "" is used by no import of the package's
    "torch": "torch",
    "numpy": "numpy",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "nvidia-cutlass-dsl": "cutlass",
    "apache-tvm-ffi": "tvm_ffi",
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute",
    "hypothesis": "hypothesis",
    "pytest": "",
}


def missing(dotted: str) -> str:
    """Why there is no such module, or attribute of one, in the package; empty where there is."""
    found = importlib.import_module("tilewise")
    for part in dotted.split(".")[1:]:
        here = getattr(found, "__path__", None) and find_spec(f"{found.__name__}.{part}")
        if here and not callable(getattr(found, part, None)):
            found = importlib.import_module(f"{found.__name__}.{part}")
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return f"{dotted}: {getattr(found, '__name__', found)} has no {part}"
    return ""


FILES = (".py", ".so", ".git", ".html")


def names_in(text: str) -> list[str]:
    return sorted({name for name in re.findall(r"\btilewise(?:\.[A-Za-z_][A-Za-z_0-9]*)+", text) if not name.endswith(FILES)})


def test_a_missing_name_is_found():
    assert missing("tilewise.compat.transformers") == "tilewise.compat.transformers: tilewise has no compat"
    assert missing("tilewise.masks.tiles.lowered").endswith("tilewise.masks.tiles has no lowered")
    assert names_in("see `tilewise.compat.x`, tilewise.merge(a)") == ["tilewise.compat.x", "tilewise.merge"]
    assert not missing("tilewise.merge") and not missing("tilewise.backends.cpu.build") and not missing("tilewise.masks.Causal")


@pytest.mark.parametrize("page", [page for page in PAGES if page != NOTES], ids=lambda page: page.name)
def test_names_in_pages(page):
    assert not list(filter(None, map(missing, names_in(page.read_text()))))


def test_files_in_the_design():
    named = set(re.findall(r"[`(]((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b", (ROOT / "DESIGN.md").read_text()))
    there = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py")}
    assert named and not [
        name for name in named if not (ROOT / name).exists() and not any(path == name or path.endswith(f"/{name}") for path in there)
    ]


def test_names_in_the_command_line(capsys):
    texts = [source.read_text() for source in (SOURCES / "cli/grammar.py", SOURCES / "cli/commands.py", SOURCES / "cli/kernels.py")]
    for command in grammar.COMMANDS:
        assert grammar.main([command, "--help"]) == 0
    assert not list(filter(None, map(missing, names_in(" ".join(texts) + capsys.readouterr().out))))


def test_names_in_messages_and_docstrings():
    named = {name for source in SOURCES.rglob("*.py") for name in names_in(source.read_text())}
    assert len(named) > 50 and not list(filter(None, map(missing, named)))


def imports(module: str) -> bool:
    pattern = re.compile(rf"(?:import|from|find_spec\(\"|import_module\(\"|\") ?{re.escape(module)}\b")
    return any(pattern.search(source.read_text()) for source in SOURCES.rglob("*.py"))


def test_doctor_names_packages_that_are_used():
    for distribution, purpose in doctor.PACKAGES.items():
        assert not MODULES[distribution] or imports(MODULES[distribution]), distribution
        named = [f"tilewise.{name}" for name in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", purpose)]
        assert not list(filter(None, map(missing, named))), purpose


def test_extras_name_packages_that_are_used():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in extras.keys() - {"test", "docs"}:
        for requirement in extras[extra]:
            assert imports(MODULES[re.match(r"[\w-]+", requirement)[0]]), requirement
    offered = set(re.findall(r"tilewise\[(\w+)\]", "".join(path.read_text() for path in (*PAGES, *SOURCES.rglob("*.py")))))
    assert offered <= extras.keys()


def test_doctor_says_what_an_amd_gpu_is(monkeypatch):
    class Properties:
        name, total_memory, major, minor, gcnArchName = "AMD Instinct MI250X", 64 << 30, 9, 0, "gfx90a"

    monkeypatch.setattr(torch.version, "hip", "6.2")
    for name, value in (("is_available", lambda: True), ("device_count", lambda: 1), ("get_device_properties", lambda index: Properties)):
        monkeypatch.setattr(torch.cuda, name, value)
    assert doctor.devices()["cuda:0"] == "AMD Instinct MI250X, 64 GiB, gfx90a"
