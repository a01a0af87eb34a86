"""Processes that share each sequence of a training have the losses of one process, to the last bit."""

import pytest
from rich.console import Console

from tilewise.cli import grammar
from tilewise.demo import several


def test_two_processes_have_the_losses_of_one(capsys):
    options = several.Options(ranks=2, steps=3, batch=1, context=200)
    assert several.run(options, Console(width=120))
    shown = capsys.readouterr().out
    assert "2 processes have the losses of one process, to the last bit." in shown and shown.count("one process ") == 3
    losses = several.train_in_one(options)
    assert len(set(losses)) == 3 and losses[-1] < losses[0]


def test_losses_that_differ_are_found(monkeypatch):
    options = several.Options(ranks=2, steps=1, batch=1, context=64)
    monkeypatch.setattr(several, "train_in_ranks", lambda _: [value + 1e-6 for value in several.train_in_one(options)])
    assert not several.run(options, Console(quiet=True))


def test_ranks_that_cannot_share_heads_are_refused(capsys):
    assert grammar.main(["demo", "--ranks", "3", "--steps", "1", "--context", "64"]) == 2
    assert "ranks is 3; it must divide the model's 2 key heads" in capsys.readouterr().err
    with pytest.raises(ValueError, match="context is"):
        several.run(several.Options(ranks=2, context=10**8), Console(quiet=True))
