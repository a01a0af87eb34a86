"""Attention over a sequence that several ranks hold: the keys that a rank's queries see are fetched, and one call of `attention` computes its rows.

The call has the key axis of the whole sequence, of which only what is needed is filled: so keys have their own positions, the backend cuts them into
the same tiles as one process does, and a row's O, LSE and dQ have the same bits; no partial results are merged. Gradients of keys and values go back
to those who hold them, and are added in the order of the ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise import api, errors
from tilewise.distributed.exchange import collect, give_back
from tilewise.distributed.planning import Plan
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.runtime import operator


class Options(NamedTuple):
    """What of a call is no tensor."""

    scale: float | None
    softcap: float
    dropout: tuple[float, int | None, int]
    deterministic: bool
    backend: str | None


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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tilewise.attention` over a sequence of which each rank holds a part, as `plan` says; a collective, in the forward pass and in the backward
    pass.

    O, LSE and dQ have the bits of one process, which computes `attention(..., mask=Part(mask, seqlen_q, [(0, seqlen_q)]))`, where the same backend
    runs and tiles of queries are not cut (`plan`'s tile). dK and dV are sums of a part for each rank whose queries see a key, in fp32 (fp64 for
    fp64), in the order of the ranks, rounded once from each part's dtype: the same bits in every run. Under layout="ulysses", with one group, dK and
    dV have the bits of one process, too.

    Args:
        q: (batch, plan.seqlen, heads_q, head_dim): this rank's tokens, as `plan.dispatch` gives them. All heads, whatever the layout.
        k, v: (batch, plan.seqlen_k, heads_k, head_dim or head_dim_v).
        plan: of `tilewise.distributed.plan`, made with the same arguments on all ranks.
        bias: (batch or 1, heads_q or 1, plan.seqlen or 1, seqlen_k of the whole sequence or 1), or its last 2 or 3 dimensions: of this rank's
            queries and all keys. Where it has one row for all queries, or is a parameter, its gradient is of this rank's queries, to be added up
            over the ranks as those of other parameters. With layout="ulysses" it has 1 for the queries.
        alibi_slopes: (heads_q,) or (batch, heads_q), by positions in the whole sequence.
        sink: (heads_q,); its gradient is of this rank's rows (and heads), to be added up over the ranks.
        dropout_seed: must be given with dropout_p, the same on all ranks: pairs are dropped that one process would drop.

    The other arguments, and what is returned, are those of `tilewise.attention`, of this rank's tokens. DTensors that are sharded along the sequence
    are taken with layout="contiguous", and O is one, too. torch.compile leaves the call out of its graph.

    Raises:
        ShapeError, ValueError, UnsupportedError: as `tilewise.attention`; tensors that are not of this rank's tokens; plans that differ between
        ranks. RuntimeError: another rank ended, or made another call, as the group's timeout found.
    """
    if any(type(x).__name__ == "DTensor" for x in (q, k, v)):
        from tilewise.distributed.dtensor import local, placed

        tensors, like = local((q, k, v), plan)
        q, k, v = tensors
    else:
        like = placed = None
    errors.check_local({"bias": bias, "alibi_slopes": alibi_slopes, "sink": sink}, "distributed.attention")
    q, k, v, bias = api.autocast(q, k, v, bias)
    errors.check_flag("return_lse", return_lse)
    _check(q, k, v, plan)
    if dropout_p and dropout_seed is None:
        raise ValueError(
            "dropout_seed must be given, the same number on all ranks: drawn from torch's generator, each rank would have its own"
        )
    bias = None if bias is None else _bias(bias, q, plan)
    plan.check_runs(q.device)
    options = Options(scale, softcap, (dropout_p, dropout_seed, dropout_offset), deterministic, backend)
    o, lse = _Attention.apply(q, k, v, bias, sink, alibi_slopes, plan, options)
    if placed is not None:
        o = placed(o, like)
    return (o, lse) if return_lse else o


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
    """Refuse what does not fit the plan."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be what tilewise.distributed.plan returns, got {type(plan).__name__} {plan!r:.100}")
    axes = "batch", "tokens", "heads", "head_dim"
    for name, x in (("q", q), ("k", k), ("v", v)):
        errors.check_tensor(name, x, axes)
        errors.check_like(name, x, q)
        errors.check_size(name, "batch", x.shape[0], q.shape[0], "q")
        plan.check_local(name, x.shape[1], keys=name != "q")
        heads = plan.heads[name != "q"]
        if x.shape[2] != heads:
            raise ShapeError(f"{name} has {x.shape[2]} heads, the plan was made for heads={plan.heads}")
    if plan.mask.extent[0] not in (1, q.shape[0]):
        raise ShapeError(f"the plan's mask is made for batch {plan.mask.extent[0]}, q has {q.shape[0]}; they must agree")


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
    """What crosses between ranks, and the one call between; the operator's own forward and backward passes compute."""

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, sink, slopes, plan: Plan, options: Options) -> tuple[Tensor, Tensor]:
        queries = _to_group(q, plan)
        keys, values = _keys(k, v, plan)
        ctx.grad = any(x is not None and x.requires_grad for x in (q, k, v, bias, sink))
        given = _operands(queries, keys, values, bias, sink, slopes, plan, options)._replace(grad=ctx.grad)
        o, lse = operator.attend(given)[:2] if queries.shape[1] else _nothing(given)
        ctx.save_for_backward(queries, k, v, bias, sink, slopes, o, lse)
        ctx.plan, ctx.options, ctx.rng = plan, options, given.rng
        ctx.set_materialize_grads(False)
        return _from_group(o, q, plan), _rows_from_group(lse, q, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> tuple:
        queries, k, v, bias, sink, slopes, o, lse = ctx.saved_tensors
        plan: Plan = ctx.plan
        keys, values = _keys(k, v, plan)
        given = _operands(queries, keys, values, bias, sink, slopes, plan, ctx.options)._replace(grad=True)
        like = k.new_empty((k.shape[0], plan.seqlen, plan.heads[0], 0))  # a place for this rank's queries
        d_o = torch.zeros_like(o) if d_o is None else _to_group(d_o, plan)
        d_lse = None if d_lse is None else _rows_to_group(d_lse, plan)
        bias_grad = bias is not None and ctx.needs_input_grad[3]
        if queries.shape[1]:
            dq, dk, dv, d_bias, d_sink = operator.differentiate(o, lse, d_o, given, d_lse, bias_grad)
        else:
            dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
            d_bias = None if given.bias is None else torch.zeros_like(given.bias)
            d_sink = None if given.sink is None else torch.zeros_like(given.sink)
        dk, dv = _keys_back(dk, dv, k, v, plan)
        return (
            _from_group(dq, like, plan),
            dk,
            dv,
            _all_heads(d_bias, bias, 1, plan) if bias_grad else None,
            None if sink is None else _all_heads(d_sink, sink, 0, plan),
            None,
            None,
            None,
        )


def _operands(queries, keys, values, bias, sink, slopes, plan: Plan, options: Options) -> operator.Operands:
    """Those of this rank's one call."""
    heads = plan.head_slices(plan.heads[0])[plan.place.rank]
    if plan.sharing > 1:
        bias = bias if bias is None or bias.shape[1] == 1 else bias[:, heads]
        sink = None if sink is None else sink[heads]
        slopes = None if slopes is None else slopes[..., heads]
    given = api.operands(queries, keys, values, plan.local_mask, bias=bias, sink=sink, alibi_slopes=slopes, **options._asdict())
    if slopes is not None:
        given = given._replace(diagonal=_diagonal(plan, queries.device))
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


def _keys(k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Keys and values (batch, seqlen_k of the whole sequence, heads here, width) with those filled that this rank's queries need."""
    packed = torch.cat((k, v), dim=3).transpose(0, 1)
    slices = plan.head_slices(plan.heads[1])
    whole = collect(packed, plan.routes_of_keys(k.device), slices, plan.k.length, plan.place.group).transpose(0, 1)
    return whole[..., : k.shape[3]], whole[..., k.shape[3] :]


def _keys_back(dk: Tensor, dv: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Sequence[Tensor]:
    """Gradients of this rank's keys and values."""
    packed = torch.cat((dk, dv), dim=3).transpose(0, 1)
    like = torch.empty((k.shape[1], k.shape[0], k.shape[2], packed.shape[3]), device="meta")
    slices = plan.head_slices(plan.heads[1])
    whole = give_back(packed, plan.routes_of_keys(k.device), slices, like, plan.place.group, adds=len(plan.rows) > 1)
    return whole.transpose(0, 1).split([k.shape[3], v.shape[3]], dim=3)


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
    routes, slices = plan.routes_of_queries(x.device), plan.head_slices(plan.heads[0])
    shape = torch.empty((like.shape[1], like.shape[0], like.shape[2], x.shape[3]), device="meta")
    return give_back(x.transpose(0, 1), routes, slices, shape, plan.place.group, adds=False).transpose(0, 1)


def _rows_to_group(x: Tensor, plan: Plan) -> Tensor:
    """(batch, heads_q, tokens) as `_to_group`."""
    return x if plan.sharing == 1 else _to_group(x.transpose(1, 2)[..., None], plan)[..., 0].transpose(1, 2).contiguous()


def _rows_from_group(x: Tensor, like: Tensor, plan: Plan) -> Tensor:
    return x if plan.sharing == 1 else _from_group(x.transpose(1, 2)[..., None], like, plan)[..., 0].transpose(1, 2).contiguous()


def _all_heads(grad: Tensor, like: Tensor, dim: int, plan: Plan) -> Tensor:
    """A gradient of this rank's heads as one of all: zeros for the others'."""
    if plan.sharing == 1 or like.shape[dim] == 1:
        return grad
    whole = torch.zeros_like(like)
    heads = plan.head_slices(plan.heads[0])[plan.place.rank]
    whole.narrow(dim, heads.start, heads.stop - heads.start).copy_(grad)
    return whole
