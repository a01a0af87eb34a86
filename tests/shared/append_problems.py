"""Problems of appending: new tokens of which some have no place, into caches that are NaN, by every kind of index; and what torch writes."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.problem import AppendCall, Share
from tilewise.runtime import append_operator, cache_values

BEHIND = 2  # packed tokens behind the last sequence


@dataclass(frozen=True, kw_only=True)
class AppendCase:
    """lengths: tokens of each sequence, which may be negative or beyond the capacity. new: of every sequence, or packed, of each."""

    lengths: tuple[int, ...]
    new: int | tuple[int, ...] = 1
    heads: int = 2
    dims: tuple[int, int] = (64, 64)
    page: int = 0  # 0: contiguous caches
    capacity: int = 80
    entries: bool = False
    wild: bool = False  # pages and entries that do not exist
    rotary: int = 0  # dimensions that are rotated
    interleaved: bool = False
    table: torch.dtype = torch.float32
    first: bool = False  # rotary positions of their own
    index: torch.dtype = torch.int32
    dtype: torch.dtype = torch.bfloat16
    share: Share | None = None


def made(case: AppendCase, seed: int = 0, device: str = "cpu") -> AppendCall:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=case.dtype) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(dtype)

    def ints(values) -> Tensor:
        return torch.tensor(values, dtype=case.index, device="cpu")

    batch, table, entries = len(case.lengths), None, None
    if case.page:
        width = -(-case.capacity // case.page)
        shape = (batch * width + 2, case.page)
        table = torch.randperm(shape[0], generator=draw, device="cpu")[: batch * width].view(batch, width).to(case.index)
        if case.wild:
            table[:, ::2] = ints([-1, 2**31 - 1, shape[0], -(2**31)] * width)[: table[:, ::2].shape[1]]
    else:
        shape = (batch + 2 * case.entries, case.capacity)
        if case.entries:
            entries = torch.randperm(batch + 2, generator=draw, device="cpu")[:batch].to(case.index)
            if case.wild:
                entries[0], entries[-1] = -1, 2**31 - 1
    caches = [torch.full((*shape, case.heads, dim), math.nan, dtype=case.dtype, device="cpu") for dim in case.dims]
    packed = isinstance(case.new, tuple)
    lead = (sum(case.new) + BEHIND,) if isinstance(case.new, tuple) else (batch, case.new)
    k, v = (normal(*lead, case.heads, dim) for dim in case.dims)
    angles = normal(case.capacity + 50, case.rotary // 2, dtype=torch.float32)
    call = AppendCall(
        k_cache=caches[0],
        v_cache=caches[1],
        k=k,
        v=v,
        cache_seqlens=ints(case.lengths),
        page_table=table,
        cache_batch_idx=entries,
        cu_seqlens=ints([0, *torch.tensor(case.new).cumsum(0).tolist()]) if packed else None,
        rotary_cos=angles.cos().to(case.table) if case.rotary else None,
        rotary_sin=angles.sin().to(case.table) if case.rotary else None,
        rotary_first=ints([(7 * b) % 40 for b in range(batch)]) if case.first else None,
        interleaved=case.interleaved,
        share=case.share,
    )
    return replace(call, **{name: x.to(device) for name, x in vars(call).items() if isinstance(x, Tensor)})


def by_torch(call: AppendCall, monkeypatch) -> tuple[Tensor, Tensor]:
    """What the caches hold behind torch's operations, on the CPU and with no value looked at. The call's own are as before."""
    monkeypatch.setattr(cache_values, "wanted", lambda device, check: False)
    there = {name: x.to("cpu", copy=True) if isinstance(x, Tensor) else x for name, x in vars(call).items()}
    if there["rotary_cos"] is not None:  # on the CPU positions beyond the tables are refused: longer ones, whose ends repeat, are the clamp
        before, after = 10_000, 200_000
        for name in ("rotary_cos", "rotary_sin"):
            x = there[name]
            there[name] = torch.cat((x[:1].expand(before, -1), x, x[-1:].expand(after, -1)))
        first = there["rotary_first"] if there["rotary_first"] is not None else there["cache_seqlens"]
        there["rotary_first"] = first.long() + before
    share = there.pop("share") or Share(0, 1, 1)
    append_operator._append(append_operator.Operands(**there, check=False, **{f"cp_{name}": n for name, n in share._asdict().items()}))
    return there["k_cache"], there["v_cache"]


def same(got: Tensor, want: Tensor) -> bool:
    """Bit for bit, NaN like NaN."""
    return torch.equal(got.cpu().view(torch.int8), want.cpu().view(torch.int8))


CASES = [
    AppendCase(lengths=(5, 0, 79, 80, 78, -1, -3, 999), new=2, rotary=32),
    AppendCase(lengths=(5, 0, 47, 78, -1), new=3, page=16, rotary=64, interleaved=True, dtype=torch.float16, index=torch.int64),
    AppendCase(
        lengths=(5, 0, 75, 78, 33), new=(1, 0, 7, 4, 2), page=5, wild=True, rotary=20, first=True, dims=(72, 40), table=torch.bfloat16
    ),
    AppendCase(lengths=(5, 0, 47, 78, -1), new=2, page=16, dims=(64, 48), dtype=torch.float8_e4m3fn),
    AppendCase(lengths=(5, 0, 75), new=(1, 2, 7), entries=True, wild=True, heads=9, dims=(128, 128), index=torch.int64),
    AppendCase(lengths=(5, 0, 155, 158, -2, 999), new=5, rotary=32, page=16, share=Share(1, 2, 3)),
    AppendCase(lengths=(5, 0, 155), new=(1, 2, 7), entries=True, rotary=20, first=True, share=Share(2, 3, 1), index=torch.int64),
]
