"""Attention over a sequence that several ranks hold: the keys that a rank's queries see are fetched, and one call of `attention` computes its rows.

The call has the key axis of the whole sequence, of which only what is needed is filled: so keys have their own positions, the backend cuts them into
the same tiles as one process does, and a row's O, LSE and dQ have the same bits; no partial results are merged. Gradients of keys and values go back
to those who hold them, and are added in the order of the ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise import api, errors
from tilewise.distributed import bound
from tilewise.distributed.exchange import begin, begin_back, collect, finish, finish_back
from tilewise.distributed.planning import Plan
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.keywords import ShardedOptions
from tilewise.masks.arguments import check_count
from tilewise.merge import merge
from tilewise.problem import one_sink
from tilewise.runtime import operator


class Options(NamedTuple):
    """What of a call is no tensor; parts: of the keys."""

    scale: float | None
    softcap: float
    dropout: tuple[float, int | None, int]
    deterministic: bool
    backend: str | None
    stages: int
    parts: int


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, return_lse: Literal[False] = False, **options: Unpack[ShardedOptions]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, return_lse: Literal[True], **options: Unpack[ShardedOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, return_lse: bool = False, **options: Unpack[ShardedOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@torch.compiler.disable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    deterministic: bool = False,
    backend: str | None = None,
    stages: int = 1,
    most_bytes: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tilewise.attention` over a sequence of which each rank holds a part, as `plan` says; a collective, forward and backward.

    O, LSE and dQ have the bits of one process, which computes `attention(..., mask=Part(mask, seqlen_q, [(0, seqlen_q)]))`, where the same backend
    runs and tiles of queries are not cut (`plan`'s tile). dK and dV sum a part of each rank with queries that see a key; parts cross and are
    added in fp32 (fp64 for fp64), in the order of the ranks, and rounded in the end: the same bits in every run. (Hopper's prebuilt kernels
    round each part, too.) Under layout="ulysses", with one group, dK and dV have the bits of one process, too.

    Args:
        q: (batch, plan.seqlen, heads_q, head_dim): this rank's tokens, as `plan.dispatch` gives them. All heads, whatever the layout.
        k, v: (batch, plan.seqlen_k, heads_k, head_dim or head_dim_v).
        plan: of `tilewise.distributed.plan`, made with the same arguments on all ranks.
        bias: (batch or 1, heads_q or 1, plan.seqlen or 1, seqlen_k of the whole sequence or 1), or its last 2 or 3 dimensions: of this rank's
            queries and all keys. Where it has one row for all queries, or is a parameter, its gradient is of this rank's queries, to be added up
            over the ranks as those of other parameters. With layout="ulysses" it has 1 for the queries.
        alibi_slopes: (heads_q,) or (batch, heads_q), by positions in the whole sequence.
        sink: (heads_q,) or (tokens, heads_q); its gradient is of this rank's rows (and heads), to be added up over the ranks.
        dropout_seed: must be given with dropout_p, the same on all ranks: pairs are dropped that one process would drop.
        stages: heads are computed in `stages` parts, which divide the key heads of a rank, while the keys of the next part are fetched. The memory of
            the fetched keys is as many times smaller; the bits are the same.
        most_bytes: that the keys and values of all tokens may take at a time, the same on all ranks; what is on its way comes on top. Then there are
            as many stages as that takes, and only where those of one head are still too many, keys are fetched and computed part by part (in a
            ring's memory, but by what is needed): partial results of q's dtype are merged in fp32, so bits are not those of one process, and there is
            no dropout. `plan.report(most_bytes=)` says what is chosen.

    The other arguments, and what is returned, are those of `tilewise.attention`, of this rank's tokens. DTensors that are sharded along the sequence
    are taken with layout="contiguous", and O is one, too. torch.compile leaves the call out of its graph.

    Raises:
        ShapeError, ValueError, UnsupportedError: as `tilewise.attention`; other tokens than this rank's; plans that differ between ranks.
        RuntimeError: another rank ended, or made another call, as the group's timeout found.
    """
    if any(type(x).__name__ == "DTensor" for x in (q, k, v)):
        from tilewise.distributed.dtensor import local, placed

        tensors, like = local((q, k, v), plan)
        q, k, v = tensors
    else:
        like = placed = None
    errors.check_local({"bias": bias, "alibi_slopes": alibi_slopes, "sink": sink}, "distributed.attention")
    q, k, v, bias = api.autocast(q, k, v, bias)
    sink = one_sink(sink)
    errors.check_flag("return_lse", return_lse)
    _check(q, k, v, plan)
    if dropout_p and dropout_seed is None:
        raise ValueError(
            "dropout_seed must be given, the same number on all ranks: drawn from torch's generator, each rank would have its own"
        )
    bias = None if bias is None else _bias(bias, q, plan)
    if alibi_slopes is not None:
        errors.check_alibi(alibi_slopes, q, q.shape[0], plan.heads[0])
    if sink is not None:
        errors.check_sink(sink, q, plan.heads[0])
    plan.check_runs(q.device)
    bytes_of_key = (k.shape[3] + v.shape[3]) * k.shape[0] * k.itemsize
    pieces = plan.pieces(bytes_of_key, most_bytes, _stages(stages, plan))
    if pieces[1] > 1 and dropout_p:
        raise UnsupportedError(f"with most_bytes={most_bytes} keys come in {pieces[1]} parts, in which dropout is not counted; give more")
    options = Options(scale, softcap, (dropout_p, dropout_seed, dropout_offset), deterministic, backend, *pieces)
    o, lse = _Attention.apply(q, k, v, bias, sink, alibi_slopes, plan, options)
    if placed is not None and like is not None:
        o = placed(o, like)
    return (o, lse) if return_lse else o


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
    """Refuse what does not fit the plan."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be what tilewise.distributed.plan returns, got {type(plan).__name__} {plan!r:.100}")
    axes = "batch", "tokens", "heads", "head_dim"
    for name, x in (("q", q), ("k", k), ("v", v)):
        errors.check_tensor(name, x, axes)
        plan.check_local(name, x.shape[1], keys=name != "q")
        heads = plan.heads[name != "q"]
        if x.shape[2] != heads:
            raise ShapeError(f"{name} has {x.shape[2]} heads, the plan was made for heads={plan.heads}")
    errors.check_qkv(q, k, v)
    if plan.mask.extent[0] not in (1, q.shape[0]):
        raise ShapeError(f"the plan's mask is made for batch {plan.mask.extent[0]}, q has {q.shape[0]}; they must agree")


def _stages(stages: int, plan: Plan) -> int:
    here = plan.heads[1] // plan.sharing
    if check_count("stages", stages, 1) > here or here % stages:
        raise ValueError(f"stages must divide the {here} key heads that a rank computes, got {stages}")
    return stages


def _bias(bias: Tensor, q: Tensor, plan: Plan) -> Tensor:
    """A bias of 4 dimensions with a column for each key; a view."""
    errors.check_bias(bias, q, plan.k.length)
    bias = bias[(None,) * (4 - bias.dim())].expand(-1, -1, -1, plan.k.length)
    if plan.sharing > 1 and bias.shape[2] != 1:
        raise UnsupportedError(
            "a bias with a row for each query is not exchanged between ranks that share heads; make the plan with layout='auto', "
            "or give one row for all"
        )
    return bias


class _Attention(torch.autograd.Function):
    """What crosses between ranks, and the calls between, one for each stage of heads; the operator's own forward and backward passes compute."""

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, sink, slopes, plan: Plan, options: Options) -> tuple[Tensor, Tensor]:
        queries = _to_group(q, plan)
        grad = any(x is not None and x.requires_grad for x in (q, k, v, bias, sink))
        found = []
        for piece, keys, values in _keys(k, v, plan, options):
            given = _operands(queries, keys, values, bias, sink, slopes, plan, options, piece)._replace(grad=grad)
            results = bound.attend(plan, given) if queries.shape[1] else _nothing(given)
            if options.parts > 1:
                results = results[0].to(results[1].dtype), results[1]
            found.append(results if piece.begins else merge(*zip(found.pop(), results, strict=True)))
        found = [(x.to(q.dtype), y) for x, y in found]
        o, lse = (torch.cat(x, dim) if options.stages > 1 else x[0] for x, dim in zip(zip(*found, strict=True), (2, 1), strict=True))
        ctx.save_for_backward(queries, k, v, bias, sink, slopes, o, lse)
        ctx.plan, ctx.options = plan, options
        ctx.set_materialize_grads(False)
        return _from_group(o, q, plan), _rows_from_group(lse, q, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> tuple:
        queries, k, v, bias, sink, slopes, o, lse = ctx.saved_tensors
        plan, options = ctx.plan, ctx.options
        like = k.new_empty((k.shape[0], plan.seqlen, plan.heads[0], 0))  # a place for this rank's queries
        d_o = torch.zeros_like(o) if d_o is None else _to_group(d_o, plan)
        d_lse = None if d_lse is None else _rows_to_group(d_lse, plan)
        bias_grad = bias is not None and ctx.needs_input_grad[3]
        d_bias, d_sink = (None if x is None else torch.zeros_like(x) for x in (bias if bias_grad else None, sink))
        wide = lse.dtype if options.parts > 1 else queries.dtype  # of sums over parts of the keys
        dq, back = torch.empty_like(queries, dtype=wide), _KeyGradients(k, v, plan, options)
        for piece, keys, values in _keys(k, v, plan, options):
            if queries.shape[1]:
                given = _operands(queries, keys, values, bias, sink, slopes, plan, options, piece)._replace(grad=True)
                mine, heads = _of_stage(plan, options, piece.stage)
                stage_lse, stage_d_lse = lse[:, mine].contiguous(), None if d_lse is None else d_lse[:, mine].contiguous()
                results = bound.differentiate(plan, o[:, :, mine], stage_lse, d_o[:, :, mine], given, stage_d_lse, bias_grad)
                stage_dq, dk, dv, stage_d_bias, stage_d_sink = results
                dq[:, :, mine] = stage_dq if piece.begins else dq[:, :, mine] + stage_dq
                if d_bias is not None:
                    assert stage_d_bias is not None
                    of_heads = d_bias if d_bias.shape[1] == 1 else d_bias[:, heads]
                    (of_heads if piece.part is None else of_heads[..., slice(*piece.part)]).add_(stage_d_bias)
                if d_sink is not None and piece.begins:
                    assert stage_d_sink is not None
                    d_sink[heads] = stage_d_sink
                back.send(piece, dk, dv)
            else:
                back.send(piece, torch.zeros_like(keys), torch.zeros_like(values))
        return _from_group(dq.to(queries.dtype), like, plan), *back.received(), d_bias, d_sink, None, None, None


class Piece(NamedTuple):
    """What is computed at a time: a stage's heads against all keys, or those of a part."""

    stage: int
    part: tuple[int, int] | None
    begins: bool  # the stage, and has its sink


def _pieces(plan: Plan, options: Options) -> list[Piece]:
    parts = plan.key_parts(options.parts)
    return [Piece(stage, part, part is parts[0]) for stage in range(options.stages) for part in parts]


def _of_stage(plan: Plan, options: Options, stage: int) -> tuple[slice, slice]:
    """The query heads of a stage, among those that this rank computes and among all."""
    heads = plan.head_slices(plan.heads[0], stage, options.stages)[plan.place.rank]
    first = plan.head_slices(plan.heads[0])[plan.place.rank].start
    return slice(heads.start - first, heads.stop - first), heads


def _operands(queries, keys, values, bias, sink, slopes, plan: Plan, options: Options, piece: Piece) -> operator.Operands:
    """Those of this rank's call of one piece."""
    mine, heads = _of_stage(plan, options, piece.stage)
    sink = sink if piece.begins else None
    if bias is not None and piece.part is not None:
        bias = bias[..., slice(*piece.part)]
    if heads.stop - heads.start < plan.heads[0]:
        bias = bias if bias is None or bias.shape[1] == 1 else bias[:, heads]
        sink = None if sink is None else sink[heads]
        slopes = None if slopes is None else slopes[..., heads]
    mask = plan.mask_of(heads, by_heads=options.dropout[0] > 0.0, keys=piece.part)
    call = {name: x for name, x in options._asdict().items() if name not in ("stages", "parts")}
    given = api.operands(queries[:, :, mine], keys, values, mask, bias=bias, sink=sink, alibi_slopes=slopes, **call)
    if slopes is not None:
        given = given._replace(diagonal=_diagonal(plan, queries.device) - (0 if piece.part is None else piece.part[0]))
    return given


def _diagonal(plan: Plan, device: torch.device) -> Tensor:
    """(queries,) int64: where each query is in the whole sequence, less its place here, from where ALiBi counts the distance."""
    places = torch.cat([torch.arange(*rows, dtype=torch.int64, device="cpu") for rows in ((0, 0), *plan.rows[plan.group])])
    return (places - torch.arange(len(places), dtype=torch.int64, device="cpu") + plan.k.length - plan.q.length).to(device)


def _nothing(given: operator.Operands) -> tuple[Tensor, Tensor]:
    """O and LSE of no queries."""
    q = given.q
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_zeros((*q.shape[:3], given.v.shape[3])), q.new_zeros((q.shape[0], q.shape[2], 0), dtype=wide)


def _keys(k: Tensor, v: Tensor, plan: Plan, options: Options) -> Iterator[tuple[Piece, Tensor, Tensor]]:
    """Piece by piece keys and values (batch, seqlen_k of the whole sequence or its part, heads of a stage, width) with those filled that this rank's
    queries need. Those of the next piece are fetched meanwhile.
    """
    packed, pieces = torch.cat((k, v), dim=3).transpose(0, 1), _pieces(plan, options)
    ways = [(plan.routes_of_keys(k.device, each.part), plan.head_slices(plan.heads[1], each.stage, options.stages)) for each in pieces]
    ahead = begin(packed, *ways[0], plan.place.group)
    for n, piece in enumerate(pieces):
        assert ahead is not None
        now, ahead = ahead, None if n == len(pieces) - 1 else begin(packed, *ways[n + 1], plan.place.group)
        first, last = piece.part or (0, plan.k.length)
        whole = finish(now, packed, *ways[n], last - first).transpose(0, 1)
        yield piece, whole[..., : k.shape[3]], whole[..., k.shape[3] :]


class _KeyGradients:
    """Gradients of keys and values on their way back to those who hold them, piece by piece."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, options: Options) -> None:
        self.k, self.v, self.plan, self.stages, self.underway = k, v, plan, options.stages, []
        self.adds = len(plan.rows) > 1
        self.dtype = torch.float32 if self.adds and k.dtype != torch.float64 else k.dtype  # of what crosses, too

    def send(self, piece: Piece, dk: Tensor, dv: Tensor) -> None:
        packed, routes = torch.cat((dk, dv), dim=3).to(self.dtype).transpose(0, 1), self.plan.routes_of_keys(self.k.device, piece.part)
        mine = packed[routes.take[self.plan.place.rank]]
        heads = self.plan.head_slices(self.plan.heads[1], piece.stage, self.stages)
        self.underway.append((begin_back(packed, routes, self.plan.place.group), mine, routes, heads))

    def received(self) -> Sequence[Tensor]:
        """dK and dV of this rank's keys."""
        k, v = self.k, self.v
        out = torch.zeros((k.shape[1], k.shape[0], k.shape[2], k.shape[3] + v.shape[3]), dtype=self.dtype, device=k.device)
        for underway, mine, routes, heads in self.underway:
            finish_back(underway, mine, routes, heads, out, self.adds)
        return out.to(k.dtype).transpose(0, 1).split([k.shape[3], v.shape[3]], dim=3)


def _to_group(x: Tensor, plan: Plan) -> Tensor:
    """This rank's tokens (batch, tokens, heads_q, width) as its group's, of this rank's heads."""
    if plan.sharing == 1:
        return x
    length = sum(last - first for first, last in plan.rows[plan.group])
    routes, slices = plan.routes_of_queries(x.device), plan.head_slices(plan.heads[0])
    return collect(x.transpose(0, 1), routes, slices, length, plan.place.group).transpose(0, 1)


def _from_group(x: Tensor, like: Tensor, plan: Plan) -> Tensor:
    """The inverse of `_to_group`, for a tensor of another width; like: (batch, tokens, heads_q, any)."""
    if plan.sharing == 1:
        return x
    routes, rows = plan.routes_of_queries(x.device), x.transpose(0, 1)
    out = x.new_empty((like.shape[1], like.shape[0], like.shape[2], x.shape[3]))
    mine = rows[routes.take[plan.place.rank]]
    finish_back(begin_back(rows, routes, plan.place.group), mine, routes, plan.head_slices(plan.heads[0]), out, adds=False)
    return out.transpose(0, 1)


def _rows_to_group(x: Tensor, plan: Plan) -> Tensor:
    """(batch, heads_q, tokens) as `_to_group`."""
    return x if plan.sharing == 1 else _to_group(x.transpose(1, 2)[..., None], plan)[..., 0].transpose(1, 2).contiguous()


def _rows_from_group(x: Tensor, like: Tensor, plan: Plan) -> Tensor:
    return x if plan.sharing == 1 else _from_group(x.transpose(1, 2)[..., None], like, plan)[..., 0].transpose(1, 2).contiguous()
