"""The visible pairs of a call, as transformers hands masks from a model to its layers."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from numpy import ndarray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tilewise.compat import hf_masks
from tilewise.compat.hf_masks import Frame, Node
from tilewise.compat.hf_steps import Step
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import Mask


class Origin(NamedTuple):
    """What a model said of its mask, by which the mask can be made again for packed documents.

    tree, padding, frame: as `hf_masks.by_row` takes them; the tree is None where the closures were not read. bounds: what is allowed of key - query
    where that is all there is to say. moves: pairs depend on positions that do not start anew in each document.
    """

    tree: Node | None = None
    padding: ndarray | None = None
    frame: Frame | None = None
    bounds: tuple[int | None, int | None] | None = None
    moves: bool = False


class Pairs(BlockMask):
    """The visible pairs of a call: shape (batch, 1, seqlen_q, seqlen_k), but no tensor.

    A BlockMask by type alone, for which transformers leaves it as it is. Whatever computes with it, slices it or asks for its dtype does not ask
    the attention interface, and gets an error in place of a wrong result. It holds no closures, so it can be pickled and copied.

    masks: the structure, one for all entries or one for each, over the first `keys` keys only, which are all that anybody sees; or None where `bits`,
    bool (batch, 1, seqlen_q, seqlen_k), say all. mask: the same as one, where `folded` of the queries and keys of all entries end to end.
    step: where that says the same. origin: what the model said, None for a mask that the user made.
    """

    def __init__(
        self,
        masks: Sequence[Mask] | None,
        shape: tuple[int, int, int, int],
        keys: int,
        bits: Tensor | None = None,
        step: Step | None = None,
        origin: Origin | None = None,
        device: torch.device | str | None = None,
    ):
        self.masks, self.pairs_shape, self.keys, self.step, self.origin = masks, shape, keys, step, origin
        self._bits, self._device = bits, device
        self.folded = masks is not None and len(masks) > 1
        self.mask = None if masks is None else hf_masks.folded(masks, shape[2], keys) if self.folded else masks[0]
        self.apart: tuple[list[Tensor], list[int], Pairs] | None = None  # what hf_documents.py made of it last, and of what

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.pairs_shape

    @property
    def ndim(self) -> int:
        return 4

    def bits(self) -> Tensor:
        """What is visible, bool (batch, 1, seqlen_q, seqlen_k)."""
        if self._bits is None:
            batch, _, seqlen_q, seqlen_k = self.pairs_shape
            assert self.masks is not None  # since there are no bits
            seen = [mask.dense(seqlen_q, self.keys) for mask in self.masks]
            pairs = torch.stack(seen)[:, None] if self.folded else seen[0]
            pairs = torch.nn.functional.pad(pairs.expand(batch, 1, -1, -1), (0, seqlen_k - self.keys))
            self._bits = pairs if self._device is None else pairs.to(self._device)
        return self._bits

    def to(self, *args, **kwargs) -> "Pairs":
        """Itself: the structure is nowhere, and the bits are read wherever they are."""
        return self

    def __getstate__(self) -> dict:
        return self.__dict__ | {"apart": None}

    def __repr__(self) -> str:
        return f"Pairs({self.mask if self.mask is not None else 'bits'}, shape={self.pairs_shape})"

    __str__ = __repr__

    def __getitem__(self, index):
        raise _misused("is sliced")

    def __radd__(self, other):
        raise _misused("is added to scores")

    __add__ = __radd__

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{_misused(f'is asked for .{name}')}")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise _misused(f"is passed to {getattr(function, '__name__', function)}")


def _misused(how: str) -> UnsupportedError:
    return UnsupportedError(
        f"the attention mask that tilewise made {how}, so this model (or a part of it) computes attention by itself and does not ask transformers' "
        'attention interface; load it with attn_implementation="sdpa" or "eager", or give that to the sub-config: {"text_config": "tilewise", ...}'
    )


def as_attention_mask(mask: Mask, batch: int, seqlen_q: int, seqlen_k: int) -> Pairs:
    """A mask of tilewise as an `attention_mask` for models with this implementation, in place of the 4-D tensor that transformers takes.

    It can be pickled, copied and sent to workers, as the mask can. Raises ShapeError where the mask does not fit, ValueError where it is none.
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a mask of tilewise, got {type(mask).__name__} {mask!r:.100}")
    mask.planes(seqlen_q, seqlen_k, batch, mask.extent[1])
    if mask.extent[1] != 1:
        raise ShapeError(f"mask {mask} differs by head, which transformers' masks do not; use tilewise.attention itself")
    return Pairs((mask,), (batch, 1, seqlen_q, seqlen_k), seqlen_k)
