"""What a score_mod of flex_attention does to the scores: scale, softcap, ALiBi, hidden pairs and a bias."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.compat.flex_apart import apart
from tilewise.compat.flex_axes import mapped
from tilewise.compat.flex_mods import Program, Ref, Step, Unrecognised, aten, pairs_of, record, refs
from tilewise.errors import UnsupportedError
from tilewise.masks import Bands, Full, Mask

MOST_BIAS = 1 << 31  # elements of a bias that a score_mod may be turned into


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


def changes_of(score_mod: Callable, query: Tensor, seqlen_k: int, mask: Mask | None) -> Changes:
    """What `score_mod` does to the scores of query (batch, heads, seqlen_q, head_dim), on pairs that `mask` shows. Raises UnsupportedError."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    try:
        with apart("score_mod", score_mod, query.device, dtype):
            batch, heads, seqlen_q, _ = query.shape
            program = record(score_mod, query.device, dtype)
            score = _score(program)
            hidden = None
            for condition, visible in score.hidden:
                pairs = pairs_of(program, condition, batch, heads, seqlen_q, seqlen_k)
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
            f"score_mod {why}; recognised are a * score + b(batch, head, query, key), softcap and torch.where(visible, score, -inf): "
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
        if name == "detach" and torch.is_grad_enabled():
            raise Unrecognised("detaches the score, which then has no gradient")
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
    regions = [plane.region for plane in mask.planes(seqlen_q, seqlen_k, *mask.extent)]
    tables = [region.table for region in regions if isinstance(region, Bands)]  # as all are
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
        args, kwargs = (mapped(x, _zero) for x in (step.args, step.kwargs))
        steps.append(step._replace(args=args, kwargs=kwargs))
    return Program(tuple(steps), program.result)


def _zero(x: Any) -> Any:
    return 0.0 if isinstance(x, Ref) and x.at == "score" else x


def bias_of(changes: Changes, query: Tensor, seqlen_k: int) -> Tensor:
    """The term as a bias (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), with autograd through the captured tensors."""
    assert changes.term is not None
    program = _without_score(changes.term)
    result = program.result
    assert isinstance(result, Ref)  # since it depends on the score
    for number in program.needed(result):
        if program.steps[number].extra is None:
            raise UnsupportedError(
                f"score_mod cannot be followed on whole axes, where {program.steps[number].function} would see other numbers than its own; "
                "write it in operations by element and sums over dim=-1, or call torch's flex_attention"
            )
    uses = program.uses()
    sizes = {"b": query.shape[0], "h": query.shape[1], "q_idx": query.shape[2], "kv_idx": seqlen_k}
    shape = [size if name in uses else 1 for name, size in sizes.items()]
    if np.prod(shape, dtype=np.int64) > MOST_BIAS:
        raise UnsupportedError(
            f"the term that score_mod adds would be a bias of {tuple(shape)}, more than 2**31 numbers; of such terms only ALiBi is computed "
            "without a tensor: call torch's flex_attention"
        )
    tensors: dict[int | str, Tensor] = {}
    for dim, (name, size) in enumerate(zip(sizes, shape, strict=True)):
        tensors[name] = torch.arange(size, dtype=torch.int64, device=query.device).view([-1 if at == dim else 1 for at in range(4)])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    try:
        for number, step in enumerate(program.steps):
            args, kwargs = step.arguments(tensors)
            tensors[number] = step.function(*_tensors(step, args, dtype, query.device), **kwargs)
        bias = tensors[result.at].to(dtype)
        return bias.expand(*torch.broadcast_shapes(bias.shape, (1, 1, 1, seqlen_k))).contiguous()
    except (RuntimeError, IndexError, TypeError) as error:
        raise UnsupportedError(
            f"score_mod cannot be followed on whole axes: {error}; write it in operations that broadcast, or call torch's flex_attention"
        ) from error


def _tensors(step: Step, args: tuple, dtype: torch.dtype, device: torch.device) -> tuple:
    """args with a first number, which is the score or stands before it, as a tensor, where the operator wants one."""
    wanted = args and isinstance(args[0], float) and isinstance(step.function._schema.arguments[0].type, torch.TensorType)
    return (torch.tensor(args[0], dtype=dtype, device=device), *args[1:]) if wanted else args
