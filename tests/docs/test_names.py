"""What is named exists: modules in pages, in the command line's help, in doctor's list, in comments and docstrings; packages in extras."""

import ast
import importlib
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tilewise.cli import doctor, grammar

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "tilewise"
PAGES = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
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
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError as error:
                if error.name.startswith("tilewise"):
                    raise
                return ""  # of compat, for a peer that is not installed
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return f"{dotted}: {getattr(found, '__name__', found)} has no {part}"
    return ""


FILES = (".py", ".so", ".git", ".html", ".md", ".h", ".cpp", ".jsonl")


def names_in(text: str) -> list[str]:
    return sorted({name for name in re.findall(r"\btilewise(?:\.[A-Za-z_][A-Za-z_0-9]*)+", text) if not name.endswith(FILES)})


def test_a_missing_name_is_found():
    assert missing("tilewise.masks.gone") == "tilewise.masks.gone: tilewise.masks has no gone"
    assert missing("tilewise.masks.tiles.lowered").endswith("tilewise.masks.tiles has no lowered")
    assert names_in("see `tilewise.compat.x`, tilewise.merge(a)") == ["tilewise.compat.x", "tilewise.merge"]
    assert not missing("tilewise.merge") and not missing("tilewise.backends.cpu.build") and not missing("tilewise.masks.Causal")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_pages(page):
    assert not list(filter(None, map(missing, names_in(page.read_text()))))


def no_files(text: str) -> list[str]:
    """Those .py files in backquotes or parentheses that neither the repository nor the package has."""
    named = re.findall(r"[`(]((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b", text)
    there = [f"/{path.relative_to(SOURCES.parent)}" for path in SOURCES.rglob("*.py")]
    return [name for name in named if not (ROOT / name).exists() and not any(path.endswith(f"/{name}") for path in there)]


@pytest.mark.parametrize("page", [page for page in PAGES if "worklog" not in page.parts], ids=lambda page: page.name)
def test_files_in_pages(page):
    assert not no_files(page.read_text())


def test_a_missing_file_is_found():
    assert no_files("`forward/scheduler.py`, (masks/bands.py), `forward/gone.py`") == ["forward/gone.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_in_pages(page):
    named = set(re.findall(r"\b([a-z0-9-]+-[a-z0-9-]+\.jsonl)\b", page.read_text()))
    there = {path.name for folder in ("benchmarks/results", "lab/rows") for path in (ROOT / folder).rglob("*.jsonl")}
    assert named <= there


class Module:
    """What a source file of the package defines, binds and says, read without importing it."""

    def __init__(self, text: str):
        self.text, tree = text, ast.parse(text)
        self.members: dict[str, set[str]] = {}  # of each class: its methods and fields
        self.aliases: dict[str, str] = {}  # what is imported under another name
        self.names, self.variables, self.docstrings = self._bound(tree.body), set(), []
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef():
                    self.members[node.name] = self._bound(node.body)
                case ast.ImportFrom(module=str(package), names=names):
                    self.aliases |= {each.asname: f"{package}.{each.name}".removeprefix("tilewise.") for each in names if each.asname}
                case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                    self.variables.add(name)
                case ast.Expr(value=ast.Constant(value=str(words))):
                    self.docstrings.append(words)

    @staticmethod
    def _bound(body: list[ast.stmt]) -> set[str]:
        found = set()
        for statement in body:
            for node in (statement, *ast.iter_child_nodes(statement)):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.add(node.name)
                elif isinstance(node, ast.alias):
                    found.add(node.asname or node.name)
                elif isinstance(node, ast.Name | ast.Tuple):
                    found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return found

    def has(self, rest: list[str]) -> bool:
        """Whether an attribute of the module, or of an object that a class of it makes, is called so."""
        if not rest:
            return True
        if rest[0] in self.members and len(rest) > 1:
            return rest[1] in self.members[rest[0]]
        return rest[0] in self.names or any(rest[0] in names for names in self.members.values())

    def dotted(self) -> Iterator[str]:
        """Every `name.name` in its comments and docstrings that is no file, path or address."""
        comments = [token.string for token in tokenize.generate_tokens(io.StringIO(self.text).readline) if token.type == tokenize.COMMENT]
        for words in (*comments, *self.docstrings):
            for name in re.findall(r"(?<![\w./-])((?:[a-z_][a-z_0-9]*\.)+[A-Za-z_]\w*)(?![\w/-])", words):
                if not name.endswith(FILES):
                    yield name


@cache
def code() -> dict[str, Module]:
    names = {path: f"/{path.relative_to(SOURCES).with_suffix('')}".removesuffix("/__init__") for path in SOURCES.rglob("*.py")}
    return {name: Module(path.read_text()) for path, name in names.items()}


@cache
def places() -> set[str]:
    return {part for path in code() for part in path.split("/")}


PEERS = {path.stem for path in (SOURCES / "compat").glob("[a-z]*.py")} | {"flash_attn_interface"}  # a file there is named after its peer
NO_NAMES = {"mma.m16n8k16", "createpolicy.fractional", "q.k"}  # two instructions of PTX, and a product


def no_name(name: str, module: Module) -> bool:
    """Whether `name`, written in `module`, is neither a module of the package, nor what one defines, nor an object's field, nor anyone else's."""
    first, _, rest = name.removeprefix("tilewise.").partition(".")
    parts = [*module.aliases.get(first, first).split("."), *filter(None, rest.split("."))]
    if name in NO_NAMES or (parts[0] in module.variables and parts[1:] and parts[1].islower()):
        return False
    if name.startswith("tilewise.") and code()[""].has(parts):
        return False
    for end in range(1, len(parts) + 1):
        path = "/" + "/".join(parts[:end])
        if any(place.endswith(path) and each.has(parts[end:]) for place, each in code().items()):
            return False
    return parts[0] not in PEERS and (parts[0] in places() or find_spec(parts[0]) is None)


def test_names_in_comments_and_docstrings():
    wrong = [f"{path[1:]}: {name}" for path, module in code().items() for name in module.dotted() if no_name(name, module)]
    assert not wrong


def test_a_wrong_name_in_a_comment_is_found():
    module = Module(
        'def f(shape):\n    """As tiles.lowered of masks, jit.compiled, torch.compile, shape.rank."""\n    # moved_away.launch, /a/path.x, text.py\n'
    )
    assert list(module.dotted()) == ["moved_away.launch", "tiles.lowered", "jit.compiled", "torch.compile", "shape.rank"]
    assert [name for name in module.dotted() if no_name(name, module)] == ["moved_away.launch", "tiles.lowered"]
    imported = Module("from tilewise.masks import tiles as moved_away  # moved_away.lower, moved_away.lowered")
    assert [name for name in imported.dotted() if no_name(name, imported)] == ["moved_away.lowered"]


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
    for extra in extras.keys() - {"test", "lint", "docs"}:
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
