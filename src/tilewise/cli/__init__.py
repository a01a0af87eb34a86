"""The command line: `tilewise COMMAND`. grammar.py parses it and imports nothing heavy; the other modules hold what commands do."""

from tilewise.cli.grammar import entry, main

__all__ = ["entry", "main"]
