"""Choices of a kernel other than those that ship, named on the command line: "two rows: stages=4, pairwise=False"."""

import argparse
import ast
from collections.abc import Collection


def named(text: str, known: Collection[str], where: str) -> tuple[str, dict]:
    """The name and the fields; ArgumentTypeError for what is not of that form, and for a field that `where` does not have."""
    name, colon, given = text.partition(":")
    found = {}
    for each in filter(None, map(str.strip, given.split(","))):
        field, _, value = (part.strip() for part in each.partition("="))
        if field not in known:
            raise argparse.ArgumentTypeError(f"{field!r} is no choice of {where}; it has {', '.join(known)}")
        try:
            found[field] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise argparse.ArgumentTypeError(f"{field} is {value!r}, which is no value: numbers, True and False, 'text'") from None
    if not colon or not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 'NAME: FIELD=VALUE, ...'")
    return name.strip(), found
