"""Digests of Python code that stay where comments, docstrings and layout change."""

import ast
import hashlib


def short(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def plain(node) -> str:
    """A syntax tree without docstrings, and without the empty fields in which versions of Python differ."""
    if isinstance(node, list):
        return f"[{','.join(map(plain, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    given = {name: value for name, value in ast.iter_fields(node) if value is not None and value != []}
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
        given["body"] = node.body[1:]
    return f"{type(node).__name__}({','.join(f'{name}={plain(value)}' for name, value in given.items())})"
