"""A call of decode as the ranks of a group have it, each with a share of every sequence's tokens in caches that are NaN elsewhere."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from decode_problems import held, sequence
from torch import Tensor

from tilewise.merge import merge
from tilewise.problem import DecodeCall, Share

CACHED = "k_cache", "v_cache", "k_scale", "v_scale"


def of_rank(call: DecodeCall, share: Share, page: int = 0) -> DecodeCall:
    """What a rank has of the call: on pages of so many tokens, or in contiguous caches; nothing is where nobody may look."""
    draw, latent = torch.Generator().manual_seed(share.rank), call.v_cache.data_ptr() == call.k_cache.data_ptr()
    lengths = call.seqlens.tolist()
    counts = [share.held(n) for n in lengths]
    capacity, table, entries = max(*counts, 1), None, None
    if page:
        width, needed = -(-capacity // page), [-(-n // page) for n in counts]
        order = torch.randperm(sum(needed) + 2, generator=draw, device="cpu").tolist()
        table = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32, device="cpu")
        for b, n in enumerate(needed):
            table[b, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32, device="cpu")
        lead = (sum(needed) + 2, page)
    else:
        lead = (len(lengths), capacity)
        if call.cache_batch_idx is not None:
            entries = torch.randperm(len(lengths) + 1, generator=draw, device="cpu")[: len(lengths)].int()
            lead = (len(lengths) + 1, capacity)
    changed = {}
    for name in CACHED:
        x = getattr(call, name)
        if x is None or (name.endswith("scale") and x.dim() != 3):
            continue
        mine = torch.full((*lead, *x.shape[2:]), math.nan if x.is_floating_point() else 77, dtype=torch.float32, device="cpu").to(x.dtype)
        for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
            rows = sequence(call, x, b, n)[share.positions(torch.arange(count, device="cpu"))]
            if table is None:
                mine[b if entries is None else int(entries[b]), :count] = rows
            else:
                for p in range(-(-count // page)):
                    part = rows[p * page : (p + 1) * page]
                    mine[int(table[b, p]), : len(part)] = part
        changed[name] = mine
    if latent:
        changed["v_cache"] = changed["k_cache"][..., : call.v_cache.shape[3]]
    sink = call.sink if share.rank == 0 else None
    return replace(call, **changed, page_table=table, cache_batch_idx=entries, sink=sink, shared_prefix=0, share=share)


def ranks_of(call: DecodeCall, world: int, interleave: int, page: int = 0) -> Iterator[DecodeCall]:
    for rank in range(world):
        yield of_rank(call, Share(rank, world, interleave), page)


def check(call: DecodeCall, compute: Callable[[DecodeCall], tuple[Tensor, Tensor]], world: int, interleave: int, page: int = 0,
          exact: DecodeCall | None = None) -> None:  # fmt: skip
    """What all ranks compute, put together, is the call's result. exact: the call in whose terms it is judged, where that is another."""
    results = [compute(each) for each in ranks_of(call, world, interleave, page)]
    for o, lse in results:
        assert not o.isnan().any() and not lse.isnan().any()
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    o, lse = merge([each.to(wide) for each, _ in results], [each for _, each in results])
    held(call if exact is None else exact, o.to(call.q.dtype), lse)
