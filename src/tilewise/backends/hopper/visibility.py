"""What is known of a mask when a kernel for it is compiled: the word that both passes' `Config.mask_kind` hold, explained in visible/."""

from tilewise.backends.tables import documents
from tilewise.masks import Causal, Mask


def mask_kind(mask: Mask) -> str:
    """full, causal, band, varlen or tiles."""
    if isinstance(mask, Causal):
        return "causal"
    if documents.by_rows(mask):
        return "varlen"
    return mask.kind if mask.kind in ("full", "band") else "tiles"
