"""The pages of docs/worklog/listings: `python tools/worklog_listings.py` writes one for each file of the ladder, with a table of its names.

The table is read from the source: fields with their comments, parameters with their types, locals with what they come from. The file itself is put in
as the site is built.
"""

import ast
import sys
from pathlib import Path

from ladder import LADDER, code_lines, name_of, new_lines, rungs, steps

PAGES = Path(__file__).parents[1] / "docs" / "worklog"
LONGEST = 90  # characters of an expression
OWN_PAGE = {"k5_1": "k5", "k6_1": "k6", "d1": "decode", "d2": "decode", "b1": "backward", "b2": "backward", "b3": "backward"}


def page_of(rung: str) -> str:
    """The name of the page that explains a rung."""
    return OWN_PAGE.get(rung, rung)


def comments(source: str) -> dict[int, str]:
    """The comment at the end of each line that has one behind code."""
    return {
        number: text.partition("  # ")[2].strip()
        for number, text in enumerate(source.splitlines(), start=1)
        if "  # " in text and not text.strip().startswith("#")
    }


def names(source: str) -> list[tuple[str, str, str]]:
    """(name, where, what it is) of fields, parameters and locals, in the order of the file."""
    said, found = comments(source), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.AnnAssign):
                    default = f" = {ast.unparse(each.value)}" if each.value else ""
                    what = f"`{ast.unparse(each.annotation)}{default}`" + (f": {said[each.lineno]}" if each.lineno in said else "")
                    found.setdefault((ast.unparse(each.target), f"`{node.name}`"), what)
                elif isinstance(each, ast.Assign):
                    what = short(each.value) + (f": {said[each.lineno]}" if each.lineno in said else "")
                    found.setdefault((ast.unparse(each.targets[0]), f"`{node.name}`"), what)
        elif isinstance(node, ast.FunctionDef) and node.name != "configure":
            for each in node.args.args:
                if each.annotation:
                    found.setdefault((each.arg, f"`{node.name}()`"), f"`{ast.unparse(each.annotation)}`")
            for each in ast.walk(node):
                if isinstance(each, ast.Assign) and len(each.targets) == 1:
                    for name, value in assigned(each.targets[0], each.value):
                        found.setdefault((name, f"`{node.name}`"), short(value) + (f": {said[each.lineno]}" if each.lineno in said else ""))
    places: dict[tuple[str, str], list[str]] = {}
    for (name, where), what in found.items():  # what several functions are given, or make alike, is one row
        places.setdefault((name, what), []).append(where)
    return [(name, ", ".join(where), what) for (name, what), where in places.items()]


def assigned(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    """Plain names with what each is given; those of a call that gives several share it."""
    if isinstance(target, ast.Name):
        return [(target.id, value)]
    if not isinstance(target, ast.Tuple):
        return []
    parts = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else [value] * len(target.elts)
    return [(each.id, part) for each, part in zip(target.elts, parts, strict=True) if isinstance(each, ast.Name) and each.id != "_"]


def short(value: ast.expr) -> str:
    text = " ".join(ast.unparse(value).split())
    return f"`{text}`" if len(text) <= LONGEST else f"`{text[: LONGEST - 4]} ...`"


def page(path: Path) -> str:
    rung, source = name_of(path), path.read_text(encoding="utf-8")
    file = path.relative_to(LADDER.parents[2]).as_posix()
    before = next((low for low, high, *_ in steps() if high == rung), None)
    new = ""
    if before:
        code, previous = code_lines(path), code_lines(next(each for each in rungs() if name_of(each) == before))
        new = f" {new_lines(previous, code)} of its {len(code)} lines of code are not in [{before.upper().replace('_', '.')}]({before}.md)."
    escaped = [(name, where, what.replace("|", r"\|")) for name, where, what in names(source)]
    rows = "".join(f"| `{name}` | {where} | {what} |\n" for name, where, what in escaped)
    return f"""---
hide: [toc] # the file takes its place
---

# {rung.upper().replace("_", ".")}: the listing

`{file}`, as it is run and measured.{new} [Its page](../{page_of(rung)}.md) says why it is so.

## Names

Fields, what functions are given (`f()`), and what they make of it (`f`), in the order of the file.
How names are made: [CuTe DSL in one page](../cute.md#names).

| name | in | what it is |
|---|---|---|
{rows}
## The file

```python
--8<-- "{file}"
```
"""


def pages() -> dict[Path, str]:
    return {PAGES / "listings" / f"{name_of(path)}.md": page(path) for path in rungs()}


def main() -> int:
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
