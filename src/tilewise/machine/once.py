"""Warnings that are said once a process, however many calls meet the reason."""

import warnings

_said: set[str] = set()


def warn(sentence: str) -> None:
    """Warn of `sentence`, unless that was done."""
    if sentence not in _said:
        _said.add(sentence)
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)
