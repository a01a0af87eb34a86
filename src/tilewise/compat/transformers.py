"""transformers' attention interface: `register()`, then `attn_implementation="tilewise"` in any model that asks the interface.

Two functions are registered. `make_mask` makes masks: transformers describes them by closures, hf_masks.py reads these, and what is visible stays
structure (in an eager call, where values may be read) or becomes a bool tensor (in a traced one, or for closures that are not known). `attention`
calls `tilewise.attention`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers import __version__ as peer_version
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

import tilewise as tw
from tilewise.compat import _asking, hf_documents, hf_keywords, hf_masks, hf_paged, hf_steps
from tilewise.compat._refusals import translate_errors
from tilewise.compat.hf_documents import Said
from tilewise.compat.hf_masks import Frame
from tilewise.compat.hf_pairs import Origin, Pairs, as_attention_mask
from tilewise.compat.hf_understood import understood
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import Causal, Dense, Mask
from tilewise.problem import Extras
from tilewise.runtime import bound_call, call_cache
from tilewise.runtime.call_cache import Options

__all__ = ["Pairs", "as_attention_mask", "attention", "check", "make_mask", "register", "register_kernel", "unregister"]

TAKEN = ("eager", "sdpa", "flex_attention")
TENSORS = ("doge",)  # model types that put a mask of their own together from a tensor, and would take what is a BlockMask for nothing
FRONTEND = "transformers"  # of call_cache.Options
CAUSAL = Causal()
FOLDED_FROM = 16  # queries; for fewer, a bool tensor is smaller than the keys that folding would copy

_registered: set[str] = set()


def register(name: str = "tilewise", ignore: Iterable[str] = ()) -> None:
    """Make `attn_implementation=name` run on tilewise, in every model of transformers (5.0 or later) that asks its attention interface.

    ignore: keywords of your own which models hand on to attention, and which say nothing of what is visible; others with tensors are refused.

    Raises ValueError for a name that transformers gives another meaning, UnsupportedError for transformers 4 and earlier.
    """
    _check_version()
    _check_name(name)
    understood.cache_clear()
    understood()
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)
    hf_keywords.ignored.update(ignore)
    _registered.add(name)
    hf_paged.admit(_registered)


def register_kernel(name: str) -> None:
    """`register` for a name such as "tilewise/attention", under which transformers loads a kernel: the folder of tools/kernels_layout.py calls this.

    transformers then gives that name masks of bools, as for SDPA: ours, which keep their structure, go before those.
    """
    _check_version()
    understood.cache_clear()
    understood()
    ALL_ATTENTION_FUNCTIONS[name] = attention
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name] = make_mask
    _registered.add(name)
    hf_paged.admit(_registered)


def unregister(name: str = "tilewise") -> None:
    """Undo `register(name)`. Models that were loaded with the name need another: call their set_attn_implementation."""
    if name not in _registered:
        raise ValueError(f"name {name!r} is not registered; registered are {sorted(_registered) or 'none'}")
    _registered.remove(name)
    for interface, ours in ((AttentionInterface, attention), (AttentionMaskInterface, make_mask)):
        if interface._global_mapping.get(name) is ours:
            del interface._global_mapping[name]
    for used, ours in ((ALL_ATTENTION_FUNCTIONS, attention), (masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, make_mask)):
        if used._local_mapping.get(name) is ours:
            del used[name]
    if not _registered:
        hf_paged.dismiss()


def check(model: torch.nn.Module) -> None:
    """UnsupportedError where layers of a model compute attention by themselves: naming an implementation changes nothing for those."""
    _asking.check(model, "transformers", "leave its attn_implementation as it is, or call it within tilewise.compat.sdpa.patch()")


def _check_version() -> None:
    if int(peer_version.partition(".")[0]) < 5:
        raise UnsupportedError(
            f"tilewise.compat.transformers needs transformers 5 or later, found {peer_version}; pip install -U transformers"
        )


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must be an identifier such as 'tilewise' (transformers takes paths and 'paged|' for kernels), got {name!r}")
    if "flash" in name:
        raise ValueError(f"name must not contain 'flash', for which transformers loads a kernel of that name; got {name!r}")
    others = AttentionInterface._global_mapping.get(name, attention) is not attention
    if name in TAKEN or others:
        raise ValueError(f"name {name!r} is transformers' own or registered by another package; choose another, such as 'tilewise'")


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
    shape, device = (batch_size, 1, q_length, kv_length), kwargs.get("device")

    def bits() -> Tensor:
        where = batch_size, q_length, kv_length, q_offset, kv_offset
        make = masking_utils.sdpa_mask  # of a q_offset that may be a tensor, unlike its annotation
        seen = make(*where, mask_function, attention_mask, allow_is_causal_skip=False, **kwargs)  # pyright: ignore[reportArgumentType]
        assert seen is not None  # since nothing may be skipped
        return seen

    if getattr(config, "model_type", None) in TENSORS:
        return bits()
    if is_tracing(padding) or is_tracing(q_offset if isinstance(q_offset, Tensor) else None):
        if padding is None and allow_is_bidirectional_skip and mask_function is masking_utils.bidirectional_mask_function:
            return None
        own = kwargs.get("use_vmap", False)  # what transformers says of the caller's closures, which cannot be looked into
        bounds = None if own or padding is not None else _bounds(mask_function, local_size, config)
        origin = Origin(moves=own or (local_size is not None and local_size == getattr(config, "attention_chunk_size", None)))
        if bounds is None or not (allow_is_causal_skip and isinstance(q_offset, int)):
            step = None
            if bounds is not None and q_length == 1 and isinstance(q_offset, Tensor):
                step = hf_steps.step(bounds, batch_size, q_offset - kv_offset, None)
            return Pairs(None, shape, kv_length, bits(), step, origin)
        frame = Frame(q_length, kv_length, q_offset, kv_offset)
        lo = None if bounds[0] is None else bounds[0] + frame.diagonal
        origin = Origin(frame=frame, bounds=bounds)
        return Pairs((hf_masks.between(lo, frame.diagonal, frame),), shape, kv_length, None, None, origin, device)
    static = q_length == 1 and (isinstance(q_offset, Tensor) or kv_length + kv_offset != q_offset + 1)
    if padding is not None and not static and bool(padding.all()):
        padding = None  # it hides nothing
    step = None
    if q_length == 1 and (static or padding is not None):
        pairs = bits() if static or padding is None else padding
        bounds = hf_masks.bounds(mask_function, understood())
        if bounds is not None and bounds[1] == 0:
            present = None if padding is None else padding[:, kv_offset:][:, :kv_length].to(pairs.device)
            at = torch.as_tensor(q_offset - kv_offset, dtype=torch.int64, device=pairs.device)
            step = hf_steps.step(bounds, batch_size, at, present)
        if static:  # a compiled model may come next: for a mask that is another at each step, it would be compiled anew
            return Pairs(None, shape, kv_length, pairs, step, Origin(moves=True))
    seen = None if padding is None else padding.cpu().numpy()
    tree = hf_masks.read(mask_function, understood())
    if tree is None:
        return Pairs(None, shape, kv_length, bits(), None, Origin(moves=True))
    if tree.kind == "bidirectional_mask_function" and seen is None and allow_is_bidirectional_skip:
        return None
    frame = Frame(q_length, kv_length, int(q_offset), kv_offset)
    frame = frame._replace(seqlen_k=hf_masks.keys_seen(tree, seen, frame))
    origin = Origin(tree, seen, frame, hf_masks.bounds_of(tree) if seen is None else None)
    masks = hf_masks.entries(tree, seen, batch_size, frame)
    if masks is None or (len(masks) > 1 and q_length < FOLDED_FROM):
        return Pairs(None, shape, kv_length, bits(), step, origin)
    return Pairs(masks, shape, frame.seqlen_k, None, step, origin, device)


def _bounds(mask_function: Callable, local_size: int | None, config: Any) -> tuple[int | None, int] | None:
    """The band of a causal or sliding mask, told by its arguments alone: where a graph is traced, closures cannot be looked into."""
    if mask_function is masking_utils.causal_mask_function and local_size is None:
        return None, 0
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if local_size is not None and local_size == window and local_size != chunk and mask_function.__code__ is _AND:
        return 1 - local_size, 0
    return None


_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__


@translate_errors(q="query", k="key", v="value", bias="attention_mask or position_bias", sink="s_aux", dropout_p="dropout", scale="scaling")
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
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        raise ShapeError(f"query, key and value must be (batch, heads, seqlen, dim), got shapes {shapes}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if hf_paged.serves(kwargs):
        sink = None if s_aux is None else s_aux.reshape(-1)
        return hf_paged.attend(query, key, value, kwargs, attention_mask, scaling, softcap or 0.0, sink), None
    if kwargs:
        attention_mask = hf_keywords.read(kwargs, module, query, key, attention_mask, causal)
        shape = _shape(query, key, attention_mask)
        if (what := hf_documents.said(kwargs, attention_mask, shape)) is not None:
            options = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "s_aux": s_aux, "deterministic": deterministic}
            return _of_documents(what, module, (query, key, value), attention_mask, position_bias, causal, options)
    pairs = attention_mask if isinstance(attention_mask, Pairs) else None
    step = None if pairs is None else pairs.step
    structure = _structure(query, key, attention_mask, causal) if step is None else None
    if structure is not None:
        known_as = Options(structure[0], scaling, softcap or 0.0, dropout, bool(deterministic), None, None, structure[1], False, FRONTEND)
        extras = Extras(position_bias, None, s_aux)
        if (known := call_cache.find(query, key, value, known_as, extras)) is not None:
            o = known(query, key, value, extras)
            assert isinstance(o, Tensor)  # since no LSE is asked for
            return o, None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    plain = position_bias is None and not dropout
    if pairs is not None and step is not None and plain and hf_steps.decodes(step, q, k, v, s_aux):
        _check_lengths(pairs, q, k)
        return hf_steps.decoded(step, q, k, v, scaling, softcap, s_aux), None
    if q.shape[0] != k.shape[0]:  # one of them is the same for all
        batch = max(q.shape[0], k.shape[0])
        q, k, v = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in (q, k, v))
    options = {"scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout, "deterministic": bool(deterministic)}
    if s_aux is not None:
        options["sink"] = s_aux.reshape(-1)
    seqlen_k = keys = k.shape[1]
    bias = position_bias
    if pairs is not None:
        _check_lengths(pairs, q, k)
        for_all = pairs.shape[2] == 1 < q.shape[1]  # every query sees what the mask's only one does, as by a tensor's broadcast
        if pairs.folded and bias is None and not for_all:
            return _folded(pairs, q, k, v, options), None
        if pairs.mask is None or pairs.folded or for_all:
            options["mask"] = Dense(pairs.bits())
        else:
            options["mask"], keys = pairs.mask, pairs.keys
    elif attention_mask is None:
        if causal and q.shape[1] > 1:
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
        inner = known_as._replace(causal=False, mask=options.get("mask"), frontend="")
        call = q, k, v, inner, Extras(options.get("bias"), None, options.get("sink"))
        call_cache.bind_as(bound_call.BHSD_INPUTS, query, key, value, known_as, extras, call)
    return o, None


def _of_documents(
    what: Said,
    module: torch.nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    attention_mask: Any,
    position_bias: Tensor | None,
    causal: bool,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """`attention` of pairs that share a document as well; `options` are its own."""
    if attention_mask is not None and not isinstance(attention_mask, Pairs):
        attention_mask, position_bias = _given(attention_mask, position_bias, qkv[1].shape[2])
    shape = _shape(*qkv[:2], attention_mask)
    inner = None if position_bias is not None else hf_documents.inner_band(what, attention_mask, causal, shape)
    if inner is None:
        pairs = hf_documents.apart(what, attention_mask, causal, shape)
        return attention(module, *qkv, pairs, position_bias=position_bias, **options)
    q, k, v = (x.expand(shape[0], -1, -1, -1).transpose(1, 2) for x in qkv)
    if isinstance(attention_mask, Pairs):
        _check_lengths(attention_mask, q, k)
        k, v = k[:, : attention_mask.keys], v[:, : attention_mask.keys]
    if not is_tracing(what.cu_q):
        hf_documents.check_rows(what, *q.shape[:2])
    return _packed(what, q, k, v, inner, options), None


def _shape(query: Tensor, key: Tensor, attention_mask: Any) -> tuple[int, int, int, int]:
    """(batch, 1, seqlen_q, seqlen_k) of a call, by its mask where that has a shape."""
    batch = max(query.shape[0], key.shape[0])
    return (batch, *attention_mask.shape[1:]) if isinstance(attention_mask, Pairs) else (batch, 1, query.shape[2], key.shape[2])


@translate_errors(f"{__name__}.attention", cu_seqlens_q="cu_seq_lens_q", cu_seqlens_k="cu_seq_lens_k")
def _packed(what: Said, q: Tensor, k: Tensor, v: Tensor, inner: Mask, options: dict[str, Any]) -> Tensor:
    """(batch, seqlen_q, heads, head_dim_v), of the entries laid end to end."""
    sink = None if options["s_aux"] is None else options["s_aux"].reshape(-1)
    own = {"scale": options["scaling"], "softcap": options["softcap"] or 0.0, "sink": sink, "dropout_p": options["dropout"]}
    own["deterministic"] = bool(options["deterministic"])
    assert what.cu_q is not None  # by which the band is
    q, k, v, shape = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), q.shape[:2]
    return tw.attention_varlen(q, k, v, what.cu_q, what.cu_k, mask=inner, **own).unflatten(0, shape)


def _structure(query: Tensor, key: Tensor, attention_mask: Any, causal: bool) -> tuple[bool, Mask | None] | None:
    """(causal, mask), which with the tensors' shapes say what is visible, where neither is in a tensor and all keys count; else None."""
    if attention_mask is None:
        return bool(causal), None
    if type(attention_mask) is not Pairs or attention_mask.mask is None or attention_mask.folded:
        return None
    fits = attention_mask.pairs_shape[2:] == (query.shape[2], key.shape[2]) and attention_mask.keys == key.shape[2]
    return (False, attention_mask.mask) if fits else None


def _check_lengths(pairs: Pairs, q: Tensor, k: Tensor) -> None:
    batch, _, seqlen_q, seqlen_k = pairs.shape
    queries = seqlen_q == 1 or seqlen_q == q.shape[1]  # torch's compiler takes `in` of a symbol for false
    entries = batch == 1 or batch == q.shape[0] or not (pairs.folded or pairs.mask is None)
    if not queries or seqlen_k != k.shape[1] or not entries:
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
