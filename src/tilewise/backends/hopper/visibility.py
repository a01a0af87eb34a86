"""What is known of a mask when a kernel for it is compiled: the word that both passes' `Config.sees` hold, explained in visible/."""

from tilewise.backends.tables import documents
from tilewise.masks import Causal, Mask


def sees(mask: Mask) -> str:
    """all, causal, interval, rows or runs."""
    if isinstance(mask, Causal):
        return "causal"
    if documents.by_rows(mask):
        return "rows"
    return {"full": "all", "band": "interval"}.get(mask.kind, "runs")
