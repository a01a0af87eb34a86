"""Every tensor that the library makes says its dtype and device: what torch's defaults are is the caller's business."""

import ast
from pathlib import Path

import torch.utils._device

import tilewise

ROOT = Path(tilewise.__file__).parent
MAKERS = {function.__name__ for function in torch.utils._device._device_constructors()} - {"load", "frombuffer"} | {"as_tensor", "tensor"}
SAID = {"dtype", "device"}


def dictionaries(tree: ast.Module) -> dict[str, set[str]]:
    """The keys of dictionaries that are written down, by the names that they are given."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = (
                zip(target.elts, node.value.elts, strict=False)
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                else [(target, node.value)]
            )
            for name, value in pairs:
                if isinstance(value, ast.Dict):
                    keys = {key.value for key in value.keys if isinstance(key, ast.Constant)}
                    text = ast.unparse(name)
                    found[text] = keys & found[text] if text in found else keys
    return found


def silent(source: str) -> list[str]:
    """Calls of torch's makers of tensors that leave the dtype or the device to a default."""
    tree = ast.parse(source)
    known = dictionaries(tree)

    def said(value: ast.expr) -> set[str]:
        if isinstance(value, ast.BinOp):
            return said(value.left) | said(value.right)
        if isinstance(value, ast.Dict):
            return {key.value for key in value.keys if isinstance(key, ast.Constant)}
        return known.get(ast.unparse(value), set())

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "torch":
            if node.func.attr not in MAKERS:
                continue
            words = set().union(*(said(word.value) if word.arg is None else {word.arg} for word in node.keywords))
            if missing := SAID - words:
                found.append(f"line {node.lineno}: {ast.unparse(node)} does not say {' and '.join(sorted(missing))}")
    return found


def test_every_maker_says_dtype_and_device():
    wrong = {}
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text()
        name = str(path.relative_to(ROOT))
        if imported := MAKERS & set(_imported(source)):
            wrong[name] = f"imports {', '.join(imported)}; makers of tensors are called as torch.empty(...)"
        elif found := silent(source):
            wrong[name] = found
    assert not wrong


def _imported(source: str) -> list[str]:
    return [
        name.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for name in node.names
    ]


def test_the_test_sees_what_it_is_for():
    assert {
        "empty",
        "zeros",
        "full",
        "tensor",
        "arange",
        "randn",
        "randint",
        "eye",
        "linspace",
        "empty_strided",
        "ones",
        "as_tensor",
    } <= MAKERS
    good = (
        "torch.empty(2, dtype=x.dtype, device=x.device)",
        "x.new_empty(2)",
        'new = {"dtype": a, "device": b}\ntorch.ones(1, **new)',
        'y, new = 1, {"dtype": a, "device": b}\ntorch.ones(1, **new | {"dtype": c})',
    )
    bad = (
        "torch.empty(2)",
        "torch.tensor([1.0], dtype=a)",
        "torch.arange(3, device=b)",
        'new = {"dtype": a}\ntorch.ones(1, **new)',
        "torch.rand(2, **x)",
    )
    assert [silent(source) for source in good] == [[]] * len(good)
    assert all(len(silent(source)) == 1 for source in bad)
