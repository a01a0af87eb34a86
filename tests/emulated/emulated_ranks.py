"""What a rank does whose GPU is emulated (tests/shared/ranks.py)."""

import os
import tempfile
from unittest import mock

import torch
import torch.distributed as dist

from tilewise import distributed
from tilewise.distributed import bound
from tilewise.masks import Causal, Part
from tilewise.problem import Call
from tilewise.runtime import operator


def wide_keys(rank: int, world: int) -> str:
    """`distributed.attention` gives dQ of one process, and for each key the sum of the ranks' fp32 parts, rounded once."""
    os.environ.update(CUTE_DSL_ARCH="sm_90a", CUTE_DSL_KEEP="cubin", CUTE_DSL_DUMP_DIR=tempfile.mkdtemp(), TILEWISE_CACHE="0")
    from emulator.backend import Emulated

    n, backend, draw = 300, Emulated(), torch.Generator().manual_seed(1)
    q, k, v, d_o = (torch.randn(1, n, heads, 64, generator=draw).bfloat16() for heads in (2, 1, 1, 2))
    plan = distributed.plan(Causal(), n, dist.group.WORLD, heads=(2, 1), head_dim=64, layout="zigzag")
    with (
        mock.patch.object(bound, "_bound", lambda *_: None),
        mock.patch.object(operator, "choose", lambda *_: backend),
    ):  # which binds nothing
        mine = [plan.dispatch(x).requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(distributed.attention(*mine, plan), mine, plan.dispatch(d_o))
    whole = Call(q=q, k=k, v=v, mask=Part(Causal(), n, ((0, n),)), scale=0.125, grad=True)
    assert torch.equal(found[0], plan.dispatch(backend.backward(whole, *backend.forward(whole), d_o, None).q))
    parts = []
    for rows in plan.rows:
        places = torch.cat([torch.arange(*each) for each in rows])
        call = Call(q=q[:, places], k=k, v=v, mask=Part(Causal(), n, rows), scale=0.125, grad=True, wide_keys=True)
        parts.append(backend.backward(call, *backend.forward(call), d_o[:, places], None))
    for name, got in (("k", found[1]), ("v", found[2])):
        of_ranks = [getattr(each, name) for each in parts]
        exact, rounded = sum(of_ranks).bfloat16(), sum(x.bfloat16().float() for x in of_ranks).bfloat16()
        assert torch.equal(got, plan.dispatch(exact)), name
        assert not torch.equal(exact, rounded)  # what it would be if parts were rounded
    return "the same bits"
