"""Masks as text, for places that hold no objects: operators of a traced graph, command lines, files.

The text is a Python expression of constructors, integers, lists, `& | - ~`, and `#i` for the i-th tensor that travels with it:
`Documents(#0,#1,inner=Causal())&SlidingWindow(1023,0)`.
"""

import ast
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

SHORT = 2000  # characters; what is made of longer texts is large, a tree of them 100 bytes a character

OPERATIONS: dict[type, Callable] = {
    ast.BitAnd: lambda a, b: a & b,
    ast.BitOr: lambda a, b: a | b,
    ast.Sub: lambda a, b: a - b,
    ast.Invert: lambda a: ~a,
    ast.USub: lambda a: -a,
}


def evaluate(text: str, constructors: Mapping[str, Callable], tensors: tuple) -> Any:
    """The value of `text`; names can only be constructors. ValueError names the part that is not understood."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=constant) if constant is None or isinstance(constant, int | str):
                return constant
            case ast.Name(id=name) if re.fullmatch(r"_\d+", name):
                if int(name[1:]) >= len(tensors):
                    raise ValueError(f"mask text {text!r:.200} refers to tensor #{name[1:]}, but only {len(tensors)} were given")
                return tensors[int(name[1:])]
            case ast.List(elts=items):
                return [value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(value(item) for item in items)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {value(key): value(item) for key, item in zip(filter(None, keys), values, strict=True)}
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(operand))
            case ast.BinOp():
                chain = []  # a loop, not recursion: chains may be longer than the stack is deep
                while isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
                    chain.append((OPERATIONS[type(node.op)], node.right))
                    node = node.left
                if chain:
                    result = value(node)
                    for operation, right in reversed(chain):
                        result = operation(result, value(right))
                    return result
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in constructors and all(k.arg for k in keywords):
                named = {str(keyword.arg): value(keyword.value) for keyword in keywords}
                return constructors[name](*(value(arg) for arg in args), **named)
        raise ValueError(
            f"mask text {text!r:.200}: {ast.unparse(node)!r:.200} is not understood; expected {', '.join(constructors)}, "
            "integers, lists, #i for a tensor, and & | - ~"
        )

    try:
        return value(_tree(text) if len(text) <= SHORT else _tree.__wrapped__(text))
    except (RecursionError, MemoryError):  # the latter is how Python's parser says that its stack is full
        raise ValueError(
            f"mask text of {len(text)} characters nests too deep, or joins too many masks, for Python's parser; "
            "say it with fewer: Documents, Slices or Dense"
        ) from None
    except TypeError as error:  # wrong number of arguments, an operator between things that are not masks
        raise ValueError(f"mask text {text!r:.200}: {error}") from None


@lru_cache(maxsize=1024)
def _tree(text: str) -> ast.expr:
    try:
        return ast.parse(re.sub(r"#(\d+)", r"_\1", text), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"mask text {text!r:.200} is not an expression: {error.msg} at column {error.offset}") from None
