"""torch's `flex_attention`, computed by tilewise: mask_mods become bands, score_mods become scale, softcap, ALiBi and bias.

A mask_mod of comparisons between query, key, their distance and captured tensors of positions (documents, prefixes, windows, chunks, padding) is
recognised in about a millisecond (`flex_mods.py`); any other is evaluated block by block into bits, once for each BlockMask. A score_mod that is
no `a * score + b(batch, head, query, key)`, softcapped or not, is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewise.api import attention
from tilewise.compat._refusals import answers
from tilewise.compat.flex_held import Seen, held_by
from tilewise.compat.flex_mods import Program, Ref, Step, Unrecognised, aten, merged, record, refs
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import Bands, Full, Mask, PerHead
from tilewise.masks.band_tables import expand
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.dense import Packed
from tilewise.masks.flex import from_flex
from tilewise.masks.tiles import FULL, lower

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

LAYER = "tilewise.compat.flex.flex_attention"
MOST_BIAS = 1 << 31  # numbers of a bias that a score_mod may be turned into


@answers(q="query", k="key", v="value")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict | None = None,
    *,
    return_aux: "AuxRequest | None" = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`, computed by tilewise; eager, it is as fast as compiled.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim).  key: (batch, heads_k, seqlen_k, head_dim).  value: likewise, with head_dim_v.
        score_mod: `a * score + b`, or `c * tanh(score / c) + b` (softcap), where b may depend on batch, head, query and key: ALiBi becomes slopes,
            other terms a bias, whose captured tensors get gradients; and `torch.where(visible, score, -inf)` around these.
        block_mask: its lengths must be those of query and key.
        scale: None is head_dim ** -0.5.
        enable_gqa: heads_q may be a multiple of heads_k.
        return_lse: also return LSE (batch, heads_q, seqlen_q).
        kernel_options: options of torch's kernels, which have no meaning here.
        return_aux: AuxRequest(lse=True) asks for LSE in torch's AuxOutput.

    Returns:
        O (batch, heads_q, seqlen_q, head_dim_v), with `return_lse` (O, LSE), with `return_aux` (O, AuxOutput).

    Raises:
        ShapeError: tensors that do not fit together, or to block_mask.
        UnsupportedError: a score_mod that is not recognised, or return_aux.max_scores.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            f"{LAYER} cannot be traced, because it reads block_mask; call it outside of torch.compile (it is one operator either way), or trace "
            "tilewise.attention(mask=tilewise.compat.flex.mask_of(block_mask)) with a mask made before"
        )
    _check(query, key, value, block_mask, enable_gqa, return_lse, return_aux)
    batch, heads = query.shape[:2]
    seqlen_k = key.shape[2]
    mask = None if block_mask is None else mask_of(block_mask, batch, heads)
    changes = Changes() if score_mod is None else _changes(score_mod, query, seqlen_k, mask)
    if changes.mask is not None:
        mask = changes.mask if mask is None else mask & changes.mask
    bias = None if changes.term is None else _bias(changes, query, seqlen_k)
    if key.shape[0] != batch:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    o, lse = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask=mask,
        scale=changes.factor * (query.shape[3] ** -0.5 if scale is None else scale),
        softcap=changes.softcap,
        bias=bias,
        alibi_slopes=changes.slopes,
        return_lse=True,
    )
    o = o.transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return o, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (o, lse) if return_lse else o


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool, return_lse: bool, return_aux: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 4:
            found = type(x).__name__ if not isinstance(x, Tensor) else "a nested tensor" if x.is_nested else f"shape {tuple(x.shape)}"
            raise ShapeError(f"{LAYER}: {name} must be a dense tensor (batch, heads, seqlen, head_dim), got {found}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ShapeError(f"{LAYER}: query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True for grouped heads")
    if key.shape[0] not in (1, query.shape[0]):
        raise ShapeError(f"{LAYER}: key has batch {key.shape[0]}, expected that of query, {query.shape[0]}, or 1")
    if return_aux is not None:
        if return_lse:
            raise ValueError(f"{LAYER}: return_lse and return_aux ask for the same; leave return_lse out")
        if return_aux.max_scores:
            raise UnsupportedError(
                f"{LAYER}: return_aux.max_scores is not computed here; ask for lse alone, or call torch's flex_attention"
            )
    if block_mask is None:
        return
    wanted, given = tuple(block_mask.seq_lengths), (query.shape[2], key.shape[2])
    if wanted != given:
        raise ShapeError(
            f"{LAYER}: block_mask is made for seqlen_q {wanted[0]} and seqlen_k {wanted[1]}, the call has {given[0]} and {given[1]}; make a "
            "BlockMask of these lengths"
        )
    for name, had, has in zip(("batch", "heads"), block_mask.kv_num_blocks.shape, query.shape, strict=False):
        if had not in (1, has):
            raise ShapeError(
                f"{LAYER}: block_mask is made for {name} {had}, the call has {name} {has}; they must agree, or the mask's be 1"
            )


_SEEN: WeakKeyDictionary = WeakKeyDictionary()  # BlockMask -> Seen


def mask_of(block_mask: "BlockMask", batch: int = 1, heads: int = 1) -> Mask:
    """A BlockMask as a mask for `tilewise.attention`: bands where its mask_mod is recognised, else bits. Remembered with the BlockMask.

    batch, heads: of the query, where the mask_mod tells them apart.
    """
    made_for = block_mask.kv_num_blocks.shape[:2]
    mod, sizes = block_mask.mask_mod, (max(batch, made_for[0]), max(heads, made_for[1]))
    seen, state = _SEEN.get(block_mask), held_by(mod)
    if seen is not None and seen.holds(mod, sizes, state):
        return seen.mask
    try:
        program = record(mod, block_mask.kv_num_blocks.device)
        captured, uses = program.captured(), program.uses()
    except Unrecognised:
        program, captured, uses = None, [x for x in state if isinstance(x, Tensor)], {"b", "h"}  # for all that is known
    try:
        if program is None:
            raise Unrecognised
        mask = _recognised(program, block_mask, *sizes)
    except Unrecognised:
        for name, letter, had, has in zip(("batch", "heads"), "bh", made_for, sizes, strict=True):
            if letter in uses and had != has:
                how = "depends" if program is not None else "cannot be followed, and may depend"
                raise UnsupportedError(
                    f"{LAYER}: mask_mod {how} on {letter}, but block_mask is made for {name} {had} and the call has {has}; make it for {name} {has}"
                ) from None
        mask = from_flex(block_mask)
    _SEEN[block_mask] = Seen.of(mod, sizes, state, captured, mask)
    return mask


def _recognised(program: Program, block_mask: "BlockMask", batch: int, heads: int) -> Mask:
    seqlen_q, seqlen_k = block_mask.seq_lengths
    mask = _pairs(program, program.result, batch, heads, seqlen_q, seqlen_k)
    listed = _listed(block_mask)
    for plane in mask.planes(seqlen_q, seqlen_k, *mask.extent):
        for blocks in _cut(listed, plane.batch, plane.heads, mask.extent):
            if not _agree(blocks, plane.region, block_mask.BLOCK_SIZE):
                raise Unrecognised("describes other pairs than the blocks that are listed")
    return mask


def _pairs(program: Program, result: Any, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Mask:
    """The pairs for which a result of the program is true, as one mask for all batch entries and heads. Raises Unrecognised."""
    uses = program.uses(result)
    entries, each_head = range(batch if "b" in uses else 1), range(heads if "h" in uses else 1)
    masks = [[program.mask(b, h, seqlen_q, seqlen_k, result) for h in each_head] for b in entries]
    by_head = [merged(each) for each in masks]
    if all(each == by_head[0] for each in by_head):
        heads = by_head[0]
        return heads[0][1] if len(heads) == 1 else PerHead({(each.start, each.stop): mask for each, mask in heads})
    bits = np.stack([np.stack([Bitmap.of_bands(mask.resolve(seqlen_q, seqlen_k)).bits for mask in each]) for each in masks])
    return Packed(torch.from_numpy(bits), seqlen_k)  # masks by batch entry have no other form


def _listed(block_mask: "BlockMask") -> np.ndarray:
    """What is said of each block: 0 nothing, 1 as mask_mod says, 2 all of it; int8 (batch or 1, heads or 1, m_blocks, n_blocks)."""
    shape = block_mask.kv_indices.shape
    listed = np.zeros(shape, np.int8)
    lists = [(1, block_mask.kv_num_blocks, block_mask.kv_indices)]
    if block_mask.full_kv_num_blocks is not None:
        lists.append((2, block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    for state, number, index in lists:
        number, index = number.cpu().numpy(), index.cpu().numpy()
        chosen = np.nonzero(np.arange(index.shape[-1]) < number[..., None])
        listed[(*chosen[:-1], index[chosen])] = state
    return listed


def _cut(listed: np.ndarray, batch: range, heads: range, extent: tuple[int, int]) -> list[np.ndarray]:
    """The blocks (m_blocks, n_blocks) of these batch entries and heads of a mask that tells `extent` of them apart."""
    chosen = listed
    for axis, (part, told_apart) in enumerate(zip((batch, heads), extent, strict=True)):
        if told_apart > 1 and listed.shape[axis] > 1:
            chosen = chosen.take(part, axis)
    return list(chosen.reshape(-1, *listed.shape[2:]))


def _agree(listed: np.ndarray, region: Bands | Bitmap, block_size: tuple[int, int]) -> bool:
    """Whether all blocks that are not listed are empty in `region`, and all that are listed as full are full."""
    runs = lower(region, *block_size)
    if (runs.m_blocks, runs.n_blocks) != listed.shape:
        return False
    run, place = expand(runs.n1.astype(np.int64) - runs.n0)
    m_block = np.repeat(np.arange(runs.m_blocks), np.diff(runs.row_ptr))[run]
    seen = np.zeros(listed.shape, np.int8)
    np.maximum.at(seen, (m_block, runs.n0[run] + place), np.where(runs.kind[run] == FULL, 2, 1).astype(np.int8))
    return not ((listed == 0) & (seen > 0)).any() and not ((listed == 2) & (seen < 2)).any()


@dataclass(frozen=True)
class Changes:
    """What a score_mod does: `softcap * tanh(factor * score / softcap) + term`, without the tanh where softcap is 0, on the pairs of `mask`.

    term: the program and its step that is added, with score 0; slopes (heads,) in its place where it is ALiBi.
    """

    factor: float = 1.0
    softcap: float = 0.0
    mask: Mask | None = None
    term: Program | None = None
    slopes: Tensor | None = None


class Score(NamedTuple):
    """The score on its way through a score_mod: `factor * score` or `cap * tanh(factor * score)`, whether something was added, what hides pairs."""

    factor: float = 1.0
    cap: float | None = None
    added: bool = False
    hidden: tuple[tuple[Ref, bool], ...] = ()  # conditions, and whether a pair is visible where they are true


def _changes(score_mod: Callable, query: Tensor, seqlen_k: int, mask: Mask | None) -> Changes:
    """What `score_mod` does to the scores of query (batch, heads, seqlen_q, head_dim), on pairs that `mask` shows. Raises UnsupportedError."""
    try:
        batch, heads, seqlen_q, _ = query.shape
        program = record(score_mod, query.device, torch.float64 if query.dtype == torch.float64 else torch.float32)
        score = _score(program)
        hidden = None
        for condition, visible in score.hidden:
            pairs = _pairs(program, condition, batch, heads, seqlen_q, seqlen_k)
            pairs = pairs if visible else Full() - pairs
            hidden = pairs if hidden is None else hidden & pairs
        factor, softcap = (score.factor, 0.0) if score.cap is None else (score.factor * score.cap, abs(score.cap))
        changes = Changes(factor=factor, softcap=softcap, mask=hidden)
        if not score.added:
            return changes
        both = hidden if mask is None else mask if hidden is None else mask & hidden
        slopes = _slopes(program, query, seqlen_k, both)
        return Changes(factor, softcap, hidden, None if slopes is not None else program, slopes)
    except Unrecognised as why:
        raise UnsupportedError(
            f"{LAYER}: score_mod {why}; recognised are a * score + b(batch, head, query, key), softcap and torch.where(visible, score, -inf): "
            "write it so, or call torch's flex_attention"
        ) from None


def _score(program: Program) -> Score:
    """The form of a score_mod's result. Raises Unrecognised."""
    at: dict[int | str, Score] = {"score": Score()}
    for number, step in enumerate(program.steps):
        if any(ref.at in at for ref in refs(step)):
            at[number] = _through(step, at)
    if not isinstance(program.result, Ref) or program.result.at not in at:
        raise Unrecognised("gives what does not depend on the score")
    return at[program.result.at]


KEEP_THE_NUMBER = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"}  # arguments of what copies


def _through(step: Step, at: dict[int | str, Score]) -> Score:
    """One operation on the score."""
    name, args = step.function.overloadpacket.__name__, step.args
    scores = [at.get(x.at) if isinstance(x, Ref) else None for x in args]
    score = next((x for x in scores if x is not None), None)
    if step.extra == 0 and step.kwargs.keys() <= KEEP_THE_NUMBER and score is not None and sum(x is not None for x in scores) == 1:
        first = scores[0] is not None
        if name in ("mul", "div") and (first or name == "mul") and (number := _number(args[1 if first else 0])) is not None:
            if name == "div" and number == 0.0:
                raise Unrecognised("divides the score by 0")
            return _times(score, number if name == "mul" else 1.0 / number)
        if name == "neg":
            return _times(score, -1.0)
        if name == "tanh" and score.cap is None and not score.added and not score.hidden:
            return score._replace(cap=1.0)
        if name in ("add", "sub", "rsub") and len(args) == 2:
            turned = name == "rsub" if first else name == "sub"
            return (_times(score, -1.0) if turned else score)._replace(added=True)
        if name in ("_to_copy", "clone", "alias", "detach") and step.kwargs.get("dtype") in (None, torch.float32, torch.float64):
            return score
        if name == "where" and len(args) == 3 and scores[0] is None and isinstance(args[0], Ref):
            shown = scores[1] is not None
            if _number(args[2 if shown else 1]) == float("-inf"):
                return score._replace(hidden=(*score.hidden, (args[0], shown)))
        if name == "masked_fill" and first and isinstance(args[1], Ref) and _number(args[2]) == float("-inf"):
            return score._replace(hidden=(*score.hidden, (args[1], False)))
    raise Unrecognised(f"does something to the score that is not known ({step.function})")


def _times(score: Score, number: float) -> Score:
    if score.hidden and number <= 0.0:
        raise Unrecognised("turns -inf into something else")
    return score._replace(factor=score.factor * number) if score.cap is None else score._replace(cap=score.cap * number)


def _number(x: Any) -> float | None:
    """A number that is the same for all pairs; None where x is none."""
    if isinstance(x, Tensor) and x.numel() == 1 and not x.requires_grad:
        return float(x)
    return float(x) if isinstance(x, int | float) and not isinstance(x, bool) else None


def _slopes(program: Program, query: Tensor, seqlen_k: int, mask: Mask | None) -> Tensor | None:
    """fp32 (heads,) where the term is ALiBi, `-slope * |i + seqlen_k - seqlen_q - j|`, on the pairs that `mask` shows; else None."""
    heads, seqlen_q = query.shape[1:3]
    if "b" in program.uses() or any(x.requires_grad for x in program.captured()):
        return None
    try:
        term = _without_score(program).along(heads, seqlen_q, seqlen_k, program.result)
    except Unrecognised:
        return None
    if term.axis != "d" or not term.numbers.is_floating_point():
        return None
    low, high = _distances(mask, seqlen_q, seqlen_k)
    if low > high:
        return None
    first = 1 - seqlen_q
    numbers = term.numbers.reshape(-1, term.numbers.shape[-1])[:, low - first : high + 1 - first]
    away = (torch.arange(low, high + 1, dtype=torch.int64, device="cpu") - (seqlen_k - seqlen_q)).abs()
    if int(away.max()) == 0:
        return None
    near = int(away.masked_fill(away == 0, seqlen_q + seqlen_k).argmin())
    slopes = -numbers[:, near : near + 1] / away[near]
    if not torch.equal(-slopes * away, numbers) or (
        query.dtype == torch.float64 and not torch.equal(slopes.float().to(slopes.dtype), slopes)
    ):
        return None
    return slopes.flatten().float().expand(heads).contiguous().to(query.device)


def _distances(mask: Mask | None, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """The least and the largest key - query of visible pairs, or bounds on them."""
    low, high = 1 - seqlen_q, seqlen_k - 1
    if mask is None or mask.kind == "bitmap":
        return low, high
    tables = [plane.region.table for plane in mask.planes(seqlen_q, seqlen_k, *mask.extent)]
    q0, q1, k0, k1, lo, hi = np.concatenate(tables).T
    if len(q0) == 0:
        return 0, -1
    return max(low, int(np.maximum(lo, k0 - q1 + 1).min())), min(high, int(np.minimum(hi, k1 - 1 - q0).max()))


def _without_score(program: Program) -> Program:
    """The program that gives the term: its score is 0, and hides nothing."""
    on_score: set[int | str] = {"score"}
    steps = []
    for number, step in enumerate(program.steps):
        if any(ref.at in on_score for ref in refs(step)):
            on_score.add(number)
            if step.function.overloadpacket.__name__ in ("where", "masked_fill"):
                shown = next(x for x in step.args if isinstance(x, Ref) and x.at in on_score)
                step = Step(aten.clone.default, (shown,), {}, step.extra)
        args, kwargs = (tree_map(_zero, x, is_leaf=lambda x: isinstance(x, Ref)) for x in (step.args, step.kwargs))
        steps.append(step._replace(args=args, kwargs=kwargs))
    return Program(tuple(steps), program.result)


def _zero(x: Any) -> Any:
    return 0.0 if isinstance(x, Ref) and x.at == "score" else x


def _bias(changes: Changes, query: Tensor, seqlen_k: int) -> Tensor:
    """The term as a bias (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), with autograd through the captured tensors."""
    program = _without_score(changes.term)
    for number in program.needed(program.result):
        if program.steps[number].extra is None:
            raise UnsupportedError(
                f"{LAYER}: score_mod cannot be followed on whole axes, where {program.steps[number].function} would see other numbers than its own; "
                "write it in operations by element and sums over dim=-1, or call torch's flex_attention"
            )
    uses = program.uses()
    sizes = {"b": query.shape[0], "h": query.shape[1], "q_idx": query.shape[2], "kv_idx": seqlen_k}
    shape = [size if name in uses else 1 for name, size in sizes.items()]
    if np.prod(shape, dtype=np.int64) > MOST_BIAS:
        raise UnsupportedError(
            f"{LAYER}: the term that score_mod adds would be a bias of {tuple(shape)}, more than 2**31 numbers; of such terms only ALiBi is computed "
            "without a tensor: call torch's flex_attention"
        )
    tensors: dict[int | str, Tensor] = {}
    for dim, (name, size) in enumerate(zip(sizes, shape, strict=True)):
        tensors[name] = torch.arange(size, dtype=torch.int64, device=query.device).view([-1 if at == dim else 1 for at in range(4)])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    try:
        for number, step in enumerate(program.steps):
            args, kwargs = (
                tree_map(lambda x: tensors[x.at] if isinstance(x, Ref) else x, each, is_leaf=lambda x: isinstance(x, Ref))
                for each in (step.args, step.kwargs)
            )
            tensors[number] = step.function(*_tensors(args, dtype, query.device), **kwargs)
        bias = tensors[program.result.at].to(dtype)
        return bias.expand(*torch.broadcast_shapes(bias.shape, (1, 1, 1, seqlen_k))).contiguous()
    except (RuntimeError, IndexError, TypeError) as error:
        raise UnsupportedError(
            f"{LAYER}: score_mod cannot be followed on whole axes: {error}; write it in operations that broadcast, or call torch's flex_attention"
        ) from error


def _tensors(args: tuple, dtype: torch.dtype, device: torch.device) -> tuple:
    """args with a first number, which is the score or stands before it, as a tensor, as operators want."""
    return (torch.tensor(args[0], dtype=dtype, device=device), *args[1:]) if args and isinstance(args[0], float) else args
