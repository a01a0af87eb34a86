"""What the Hopper backend's backward pass allocates beside its results: at most dQ in fp32 and statistics. Kernels are stand-ins that do nothing."""

import pytest
import torch
from emulator.backend import Emulated
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise.backends.hopper.backward import call as gradients
from tilewise.backends.hopper.backward import config, plan
from tilewise.masks import Causal, Documents, Full, SlidingWindow
from tilewise.problem import Call
from tilewise.testing.cases import random_mask

COUNTERS = 1 << 16  # bytes, of counters and of a mask's tables
LONGEST = 1000


class Idle(Emulated):
    def compiled(self, *_):
        return lambda *operands: None


class Watched(TorchDispatchMode):
    """What is allocated inside, after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.moments: list[dict[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {StorageWeakRef(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and not x.is_meta and (storage := StorageWeakRef(x.untyped_storage())) not in given:
                self.alive[storage] = x.untyped_storage().nbytes()
        self.alive = {storage: size for storage, size in self.alive.items() if not storage.expired()}
        self.moments.append(dict(self.alive))
        return found

    def most_beside(self, results: list[Tensor]) -> int:
        """Bytes."""
        own = {StorageWeakRef(x.untyped_storage()) for x in results}
        return max(sum(size for storage, size in moment.items() if storage not in own) for moment in self.moments)


def taken(call: Call) -> int:
    o, lse = call.q.new_zeros(*call.q.shape[:3], call.head_dim_v), torch.zeros(call.batch, call.heads_q, call.seqlen_q)
    backend = Idle(slots=132)
    backend.backward(call, o, lse, o, None, bias_grad=call.bias is not None)  # the mask's tables are kept
    with Watched() as watched:
        found = backend.backward(call, o, lse, o, None, bias_grad=call.bias is not None)
    return watched.most_beside([x for x in found if x is not None])


def of(call: Call) -> int:
    """dQ in fp32, of whole tiles of queries, and its statistics."""
    rows = call.batch * call.heads_q * -(-call.seqlen_q // 128) * 128
    return rows * (4 * call.head_dim + 2 * 4)


def make(dims, seqlen_k, mask, seqlen_q=LONGEST, **fields) -> Call:
    sizes = (seqlen_q, 6, dims[0]), (seqlen_k, 2, dims[0]), (seqlen_k, 2, dims[1])
    q, k, v = (torch.zeros(1 if isinstance(mask, Documents) else 2, *size, dtype=torch.bfloat16) for size in sizes)
    return Call(q=q, k=k, v=v, mask=mask, scale=1.0, grad=True, sink=torch.zeros(6), **fields)


MASKS = [Full(), Causal(), SlidingWindow(50, 0), random_mask(LONGEST, LONGEST), Documents([0, 300, LONGEST], inner=Causal())]
SMALLER = [(8, 8), (40, 72), (72, 40), (64, 128), (104, 104), (136, 128), (200, 200)]
SHAPES = [None, (1, 1, LONGEST), (1, 6, LONGEST), (2, 6, LONGEST), (1, 1, 1), (2, 6, 1)]


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
@pytest.mark.parametrize("dims", [*config.TILES, *SMALLER], ids=str)
def test_one_dQ_in_fp32(dims, mask, shape):
    for seqlen_k in (LONGEST, 96) if mask.kind in ("full", "band") else (LONGEST,):
        for dtype in (torch.bfloat16, torch.float32):
            call = make(dims, seqlen_k, mask)
            if shape is not None:
                call = make(dims, seqlen_k, mask, bias=torch.zeros(min(shape[0], call.batch), *shape[1:], seqlen_k, dtype=dtype))
            assert taken(call) <= of(call) + COUNTERS


@pytest.mark.parametrize("heads", [(1, 1), (1, 6), (2, 1), (2, 6)], ids=str)
def test_a_bias_for_many_keys_and_few_queries(heads):
    """Nothing in fp32 for each key and head, which would be more than dQ."""
    call = make((64, 64), 50_000, Full(), seqlen_q=3, bias=torch.zeros(*heads, 1, 50_000, dtype=torch.bfloat16))
    assert taken(call) <= of(call) + COUNTERS


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_what_is_said_of_the_sums_is_what_they_take(head_dim):
    call = make((head_dim, head_dim), LONGEST, Causal())
    (line,) = gradients.lines(call)
    rows = -(-LONGEST // plan.config_of(call).tile_m) * plan.config_of(call).tile_m
    size = f"{4 * 2 * 6 * rows * head_dim / 1e6:,.1f} MB"
    assert f"dQ summed up in fp32 ({size})" in line if head_dim <= 128 else "dQ by a kernel of its own" in line
