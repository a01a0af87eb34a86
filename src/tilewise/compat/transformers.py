"""transformers' attention interface: `register()`, then `attn_implementation="tilewise"` in any model that asks the interface.

Two functions are registered. `make_mask` makes masks: transformers describes them by closures, hf_masks.py reads these, and what is visible stays
structure (in an eager call, whose values may be read) or becomes a bool tensor (in a traced one, or for closures that are not known). `attention`
calls `tilewise.attention`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers import __version__ as peer_version
from transformers.utils.import_utils import is_tracing

import tilewise as tw
from tilewise.compat import hf_masks, hf_steps
from tilewise.compat._refusals import answers
from tilewise.compat.hf_masks import Frame
from tilewise.compat.hf_steps import Step
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import Causal, Dense, Mask
from tilewise.runtime import repeats

TAKEN = ("eager", "sdpa", "flex_attention")
TENSORS = ("doge",)  # model types that put a mask of their own together from a tensor, and would take what is a BlockMask for nothing
UNKNOWN = {  # options of some models' own attention functions, which must not be passed over
    "output_attentions": "the weights of attention, which are never formed",
    "sinks": "sinks of each query's own",
    "indices": "keys that an indexer chose for each query",
    "block_indices": "blocks of keys that an indexer chose for each query",
    "head_mask": "weights for heads",
}
FRONT = object()  # by which repeats.py knows our options
CAUSAL = Causal()
FOLDED_FROM = 16  # queries; for fewer, a bool tensor is smaller than the keys that folding would copy

_registered: set[str] = set()


def register(name: str = "tilewise") -> None:
    """Make `attn_implementation=name` run on tilewise, in every model of transformers (5.0 or later) that asks its attention interface.

    Raises ValueError for a name that transformers gives another meaning, UnsupportedError for transformers 4 and earlier.
    """
    if int(peer_version.partition(".")[0]) < 5:
        raise UnsupportedError(
            f"tilewise.compat.transformers needs transformers 5 or later, found {peer_version}; pip install -U transformers"
        )
    _check_name(name)
    _understood.cache_clear()
    _understood()
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)
    _registered.add(name)


def unregister(name: str = "tilewise") -> None:
    """Undo `register(name)`. Models that were loaded with the name need another: call their set_attn_implementation."""
    if name not in _registered:
        raise ValueError(f"name {name!r} is not registered; registered are {sorted(_registered) or 'none'}")
    _registered.remove(name)
    for interface, ours in ((AttentionInterface, attention), (AttentionMaskInterface, make_mask)):
        if interface._global_mapping.get(name) is ours:
            del interface._global_mapping[name]


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must be an identifier such as 'tilewise' (transformers takes paths and 'paged|' for kernels), got {name!r}")
    if "flash" in name:
        raise ValueError(f"name must not contain 'flash', for which transformers loads a kernel of that name; got {name!r}")
    others = AttentionInterface._global_mapping.get(name, attention) is not attention
    if name in TAKEN or others:
        raise ValueError(f"name {name!r} is transformers' own or registered by another package; choose another, such as 'tilewise'")


class Pairs(BlockMask):
    """The visible pairs of a call, as transformers hands masks on: shape (batch, 1, seqlen_q, seqlen_k), but no tensor.

    A BlockMask by type alone, for which transformers leaves it as it is. Whatever computes with it, slices it or asks for its dtype does not ask
    the attention interface, and gets an error in place of a wrong result.

    mask: the structure, or None where `bits` say all. Its frame has the first `keys` keys only, which are all that anybody sees; where `folded`,
    those of all entries end to end. step: where that says the same.
    """

    def __init__(
        self,
        mask: Mask | None,
        shape: tuple[int, int, int, int],
        keys: int,
        folded: bool,
        bits: Tensor | Callable[[], Tensor],
        step: Step | None = None,
    ):
        self.mask, self.pairs_shape, self.keys, self.folded, self._bits, self.step = mask, shape, keys, folded, bits, step

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.pairs_shape

    @property
    def ndim(self) -> int:
        return 4

    def bits(self) -> Tensor:
        """What is visible, bool (batch, 1, seqlen_q, seqlen_k)."""
        if not isinstance(self._bits, Tensor):
            self._bits = self._bits()
        return self._bits

    def to(self, *args, **kwargs) -> "Pairs":
        """Itself: the structure is nowhere, and the bits are read wherever they are."""
        return self

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

    Raises ShapeError where the mask does not fit, ValueError where it is none.
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a mask of tilewise, got {type(mask).__name__} {mask!r:.100}")
    mask.planes(seqlen_q, seqlen_k, batch, mask.extent[1])
    if mask.extent[1] != 1:
        raise ShapeError(f"mask {mask} differs by head, which transformers' masks do not; use tilewise.attention itself")

    def bits() -> Tensor:
        seen = mask.dense(seqlen_q, seqlen_k)
        return seen.expand(batch, 1, seqlen_q, seqlen_k)

    return Pairs(mask, (batch, 1, seqlen_q, seqlen_k), seqlen_k, False, bits)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **kwargs,
) -> Pairs | Tensor | None:
    """transformers' mask interface: what `mask_function` and a padding mask, bool (batch, kv_offset + kv_length or fewer), let through.

    `kwargs` are what sdpa's function of this interface takes besides, such as the device of a tensor.

    Returns None, as eager's does, only where no pair is hidden and the caller allows it.
    """
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    shape = (batch_size, 1, q_length, kv_length)

    def bits() -> Tensor:
        where = batch_size, q_length, kv_length, q_offset, kv_offset
        return masking_utils.sdpa_mask(*where, mask_function, attention_mask, allow_is_causal_skip=False, **kwargs)

    if getattr(config, "model_type", None) in TENSORS:
        return bits()
    if is_tracing(padding) or is_tracing(q_offset if isinstance(q_offset, Tensor) else None):
        if padding is None and allow_is_bidirectional_skip and mask_function is masking_utils.bidirectional_mask_function:
            return None
        own = kwargs.get("use_vmap", False)  # what transformers says of the caller's closures, which cannot be looked into
        bounds = None if own or padding is not None else _bounds(mask_function, local_size, config)
        if bounds is None or not (allow_is_causal_skip and isinstance(q_offset, int)):
            steps = bounds is not None and q_length == 1 and isinstance(q_offset, Tensor)
            step = hf_steps.step(bounds, batch_size, q_offset - kv_offset, None) if steps else None
            return Pairs(None, shape, kv_length, False, bits(), step)
        frame = Frame(q_length, kv_length, q_offset, kv_offset)
        lo = None if bounds[0] is None else bounds[0] + frame.diagonal
        return Pairs(hf_masks.between(lo, frame.diagonal, frame), shape, kv_length, False, bits)
    static = q_length == 1 and (isinstance(q_offset, Tensor) or kv_length + kv_offset != q_offset + 1)
    whole, step = padding is None or (not static and bool(padding.all())), None
    if q_length == 1 and (static or not whole):
        pairs = bits() if static else padding
        bounds = hf_masks.bounds(mask_function, _understood())
        if bounds is not None and bounds[1] == 0:
            present = None if padding is None else padding[:, kv_offset:][:, :kv_length].to(pairs.device)
            at = torch.as_tensor(q_offset - kv_offset, dtype=torch.int64, device=pairs.device)
            step = hf_steps.step(bounds, batch_size, at, present)
        if static:  # a compiled model may come next: for a mask that is another at each step, it would be compiled anew
            return Pairs(None, shape, kv_length, False, pairs, step)
    seen = None if whole else padding.cpu().numpy()
    tree = hf_masks.read(mask_function, _understood())
    if tree is None:
        return Pairs(None, shape, kv_length, False, bits())
    if tree.kind == "bidirectional_mask_function" and seen is None and allow_is_bidirectional_skip:
        return None
    q_offset = int(q_offset)  # for `bits` as well: caches count in this tensor, and may have gone on when those are asked for
    frame = Frame(q_length, kv_length, q_offset, kv_offset)
    frame = frame._replace(seqlen_k=hf_masks.keys_seen(tree, seen, frame))
    if (mask := hf_masks.padded(tree, seen, frame)) is not None:
        return Pairs(mask, shape, frame.seqlen_k, False, bits, step)
    masks = hf_masks.by_row(tree, seen, batch_size, frame)
    if masks is None or (len(masks) > 1 and q_length < FOLDED_FROM):
        return Pairs(None, shape, kv_length, False, bits(), step)
    folded = len(masks) > 1
    return Pairs(hf_masks.folded(masks, *frame[:2]) if folded else masks[0], shape, frame.seqlen_k, folded, bits, step)


def _bounds(mask_function: Callable, local_size: int | None, config: Any) -> tuple[int | None, int] | None:
    """The band of a causal or sliding mask, told by its arguments alone: where a graph is traced, closures cannot be looked into."""
    if mask_function is masking_utils.causal_mask_function and local_size is None:
        return None, 0
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if local_size is not None and local_size == window and local_size != chunk and mask_function.__code__ is _AND:
        return 1 - local_size, 0
    return None


_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__


@answers(q="query", k="key", v="value", bias="attention_mask or position_bias", sink="s_aux", dropout_p="dropout", scale="scaling")
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pairs | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface, on `tilewise.attention`.

    Args:
        query: (batch, heads, seqlen_q, head_dim); key, value: (batch, heads_k, seqlen_k, head_dim or head_dim_v), their heads not repeated.
        attention_mask: what `make_mask` or `as_attention_mask` gave; a 4-D tensor, bool (true where visible) or added to the scores; or None:
            causal from the top left where `is_causal` (by default the module's) says so and there is more than one query, else everything.
        s_aux: (heads,), the logits of attention sinks. position_bias: (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), added to the scores.

    Returns:
        (batch, seqlen_q, heads, head_dim_v), and None for the weights, which are never there.

    Raises:
        ShapeError, ValueError, UnsupportedError: as `tilewise.attention`; for options of `UNKNOWN`; for masks of other kinds or lengths.
    """
    for name in kwargs.keys() & UNKNOWN.keys():
        if kwargs[name] is not None and kwargs[name] is not False:
            raise UnsupportedError(
                f'{name} asks for {UNKNOWN[name]}, which tilewise does not have; use attn_implementation="eager" for this model'
            )
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        raise ShapeError(f"query, key and value must be (batch, heads, seqlen, dim), got shapes {shapes}")
    step = attention_mask.step if isinstance(attention_mask, Pairs) else None
    structure = _structure(module, query, key, attention_mask, is_causal) if step is None else None
    if structure is not None:
        causal, mask = structure
        known_as = (causal, scaling, softcap or 0.0, dropout, bool(deterministic), FRONT, None, mask, False)
        beside = position_bias, None, s_aux, None, None, None
        if (known := repeats.find(query, key, value, known_as, beside)) is not None:
            return known(query, key, value, beside), None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if step is not None and position_bias is None and not dropout and hf_steps.decodes(step, q, k, v, s_aux):
        _check_lengths(attention_mask, q, k)
        return hf_steps.decoded(step, q, k, v, scaling, softcap, s_aux), None
    if q.shape[0] != k.shape[0]:  # one of them is the same for all
        batch = max(q.shape[0], k.shape[0])
        q, k, v = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in (q, k, v))
    options = {"scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout, "deterministic": bool(deterministic)}
    if s_aux is not None:
        options["sink"] = s_aux.reshape(-1)
    seqlen_k = keys = k.shape[1]
    bias = position_bias
    if isinstance(attention_mask, Pairs):
        _check_lengths(attention_mask, q, k)
        for_all = attention_mask.shape[2] == 1 < q.shape[1]  # every query sees what the mask's only one does, as by a tensor's broadcast
        if attention_mask.folded and bias is None and not for_all:
            return _folded(attention_mask, q, k, v, options), None
        if attention_mask.mask is None or attention_mask.folded or for_all:
            options["mask"] = Dense(attention_mask.bits())
        else:
            options["mask"], keys = attention_mask.mask, attention_mask.keys
    elif attention_mask is None:
        if (getattr(module, "is_causal", True) if is_causal is None else is_causal) and q.shape[1] > 1:
            keys = min(keys, q.shape[1])  # causal from the top left: the keys behind are places of a static cache that are still empty
            options["mask"] = CAUSAL if keys == q.shape[1] else Causal("top_left")
    else:
        options["mask"], bias = _given(attention_mask, position_bias, keys)
    if bias is not None:
        options["bias"] = (bias if bias.dtype in (q.dtype, torch.float32) else bias.to(q.dtype))[..., :keys]
    if keys < seqlen_k:
        k, v = k[:, :keys], v[:, :keys]
    o = tw.attention(q, k, v, **options)
    as_given = keys == seqlen_k and query.shape[0] == key.shape[0] and (s_aux is None or s_aux.dim() == 1)
    if structure is not None and as_given and (position_bias is None or position_bias.dtype == options["bias"].dtype):
        inner = False, scaling, options["softcap"], dropout, options["deterministic"], None, None, options.get("mask"), False
        call = q, k, v, inner, (options.get("bias"), None, options.get("sink"), None, None, None)
        repeats.remember_as(repeats.TURNED_INPUTS, query, key, value, known_as, beside, call)
    return o, None


def _structure(module, query: Tensor, key: Tensor, attention_mask: Any, is_causal: bool | None) -> tuple[bool, Mask | None] | None:
    """(causal, mask), which with the tensors' shapes say what is visible, where neither is in a tensor and all keys count; else None."""
    if attention_mask is None:
        return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal), None
    if type(attention_mask) is not Pairs or attention_mask.mask is None or attention_mask.folded:
        return None
    fits = attention_mask.pairs_shape[2:] == (query.shape[2], key.shape[2]) and attention_mask.keys == key.shape[2]
    return (False, attention_mask.mask) if fits else None


def _check_lengths(pairs: Pairs, q: Tensor, k: Tensor) -> None:
    batch, _, seqlen_q, seqlen_k = pairs.shape
    if seqlen_q not in (1, q.shape[1]) or seqlen_k != k.shape[1] or (batch not in (1, q.shape[0]) and (pairs.folded or pairs.mask is None)):
        raise ShapeError(
            f"attention_mask is for batch {batch}, {seqlen_q} queries and {seqlen_k} keys, but the layer has batch {q.shape[0]}, "
            f"{q.shape[1]} queries and {k.shape[1]} keys; a model that changes them between its mask and its attention needs "
            'attn_implementation="sdpa"'
        )


def _folded(pairs: Pairs, q: Tensor, k: Tensor, v: Tensor, options: dict) -> Tensor:
    """The entries of a batch laid end to end, so that each has a mask of its own."""
    q, k, v = (x.flatten(0, 1)[None] for x in (q, k[:, : pairs.keys], v[:, : pairs.keys]))
    return tw.attention(q, k, v, mask=pairs.mask, **options).squeeze(0).unflatten(0, (pairs.shape[0], pairs.shape[2]))


def _given(attention_mask: Any, position_bias: Tensor | None, seqlen_k: int) -> tuple[Mask | None, Tensor | None]:
    """The caller's own mask as a mask, or as a bias to which `position_bias` is added."""
    if isinstance(attention_mask, BlockMask):
        raise UnsupportedError(
            "attention_mask is a BlockMask of flex_attention; pass "
            "tilewise.compat.transformers.as_attention_mask(tilewise.blockmask.from_flex(block_mask), batch, seqlen_q, seqlen_k)"
        )
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        found = f"shape {tuple(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ShapeError(f"attention_mask must reach attention as (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), got {found}")
    if attention_mask.shape[-1] > seqlen_k:
        attention_mask = attention_mask[..., :seqlen_k]
    if attention_mask.dtype == torch.bool:
        return Dense(attention_mask), position_bias
    if not attention_mask.is_floating_point():
        raise ShapeError(
            f"attention_mask must be bool (true where visible) or floats that are added to the scores, got {attention_mask.dtype}"
        )
    return None, attention_mask if position_bias is None else attention_mask + position_bias


@cache
def _understood() -> frozenset[str]:
    """The closures of hf_masks.CAPTURED that in this transformers hide the pairs that they are taken to hide."""
    return frozenset(kind for kind in hf_masks.CAPTURED if _agrees(kind))


def _agrees(kind: str) -> bool:
    try:
        function, frame = _example(kind)
        tree = hf_masks.read(function)
        masks = None if tree is None else hf_masks.by_row(tree, None, 2, frame)
        if masks is None:
            return False
        seen = torch.stack([mask.dense(*frame[:2]) for mask in masks]).expand(2, -1, -1)
        want = masking_utils.sdpa_mask(2, *frame, function, allow_is_causal_skip=False, device="cpu")
    except (AttributeError, TypeError, ValueError, IndexError):  # it is gone, or other than it was
        return False
    return torch.equal(seen, want[:, 0])


def _example(kind: str) -> tuple[Callable, Frame]:
    """A closure of this kind, alone or with those that it needs, for a batch of 2."""

    def integers(*rows) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    causal, make = masking_utils.causal_mask_function, getattr(masking_utils, kind)
    packed = masking_utils.packed_sequence_mask_function(integers([0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]))
    blocks = masking_utils.blockwise_overlay(integers([-1, 0, 0, -1, 1, 1, 1, 0], [0, 0, -1, -1, -1, -1, 2, 2]))
    apart, square = Frame(5, 7, q_offset=3, k_offset=1), Frame(6, 6)
    examples = {
        "causal_mask_function": (causal, apart),
        "bidirectional_mask_function": (masking_utils.bidirectional_mask_function, apart),
        "chunked_overlay": (lambda: make(3, integers(0, 2)), apart),
        "blockwise_overlay": (blocks, apart),
        hf_masks.PACKED: (packed, square),
        hf_masks.REMAPPED: (
            lambda: masking_utils.and_masks(make(causal, integers([0, 1, 0, 1, 2, 0], [3, 4, 5, 6, 0, 1])), packed),
            square,
        ),
        "and_masks": (lambda: make(causal, blocks), apart),
        "or_masks": (lambda: make(causal, blocks), apart),
    }
    function, frame = examples.get(kind, (lambda: make(2), apart))
    return (function() if function.__name__ == "<lambda>" else function), frame
