"""`flash_attn.bert_padding`: from padded batches to packed sequences and back, differentiable, in plain torch."""

import torch
from torch import Tensor

from tilewise.compat._refusals import translate_errors
from tilewise.errors import ShapeError

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def __getattr__(name):
    if name in ("rearrange", "repeat"):  # the peer's module has them of einops, and some (verl) import them from there
        import einops  # pyright: ignore[reportMissingImports]

        return getattr(einops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def index_first_axis(input, indices):
    """Rows of input (rows, ...) at `indices` (n,): (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """Zeros (first_axis_dim, ...) with values (n, ...) in the rows at `indices` (n,)."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def index_first_axis_residual(input, indices):
    """`index_first_axis`, and input once more, for a residual connection."""
    return index_first_axis(input, indices), input.view_as(input)


class IndexFirstAxis:
    """`apply` is `index_first_axis`; nothing else of an autograd function is here."""

    apply = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    """`apply` is `index_put_first_axis`, likewise."""

    apply = staticmethod(index_put_first_axis)


class IndexFirstAxisResidual:
    """`apply` is `index_first_axis_residual`, likewise."""

    apply = staticmethod(index_first_axis_residual)


@translate_errors()
def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """The tokens of a padded batch that a mask names, packed.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen) bool or integer, true (1) for tokens.
        unused_mask: likewise, tokens to be kept that are not in use.

    Returns:
        The packed tokens (total, ...), their indices (total,) in the flattened batch, cu_seqlens (batch + 1,) int32, the longest sequence as an int,
        and how many of attention_mask's tokens each sequence has, (batch,) int32.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(-1, dtype=torch.int32)
    lengths = kept.sum(-1, dtype=torch.int32)
    return *_packed(hidden_states, kept, lengths), used


@translate_errors()
def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """`unpad_input` of a batch with several sequences in each row: row b of attention_mask_in_length (batch, seqlen) begins with their lengths.

    Returns:
        The packed tokens (total, ...), their indices (total,), cu_seqlens (sequences + 1,) int32, and the longest sequence as an int.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    places = torch.arange(attention_mask_in_length.shape[1], dtype=torch.int64, device=lengths.device)
    return _packed(hidden_states, places < attention_mask_in_length.sum(-1, keepdim=True), lengths)


@translate_errors()
def pad_input(hidden_states, indices, batch, seqlen):
    """What `unpad_input` packed, (total, ...) at `indices` (total,), as a batch (batch, seqlen, ...) with zeros for padding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        expected = tuple(hidden_states.shape[:2])
        raise ShapeError(f"{name} must be (batch, seqlen) = {expected} as hidden_states, got {tuple(mask.shape)}")


def _packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest
