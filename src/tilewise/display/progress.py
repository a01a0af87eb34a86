"""A bar for work that takes long."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress(console: Console) -> Progress:
    """A bar with a count, the time taken, and a field `note` next to it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    return Progress(*columns, console=console)
