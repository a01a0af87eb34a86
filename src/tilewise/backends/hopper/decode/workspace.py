"""What the thread blocks of a decode launch keep for each other: one set a stream, as its launches follow each other; a captured launch gets its own.

Counters are 0 between launches. A capture takes them from a reserve that an earlier call has filled, so that no replay has to clear any; where there
is none left, the graph clears its own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.hopper.decode.operands import Work

RESERVE = 1 << 21  # counters of a device's reserve: of 7,900 launches in captured graphs

_KEPT: dict[tuple, tuple[Tensor, Tensor]] = {}  # by device and stream: memory for pieces, and counters
_RESERVES: dict[torch.device, tuple[Tensor, int]] = {}  # and how many are taken


class Need(NamedTuple):
    """Of a launch: pieces of `rows` rows of `dim` elements, and what else `Work` says."""

    columns: int
    blocks: int
    slots: int
    counters: int
    rows: int
    dim: int
    queries: int
    least: int = 1
    split: int = 0
    most_pieces: int = 0
    step: int = 1
    rise: int = 0
    solo_speedup_x4: int = 0
    polls: int = 0

    @property
    def numbers(self) -> int:
        """O, and two log-sum-exps."""
        return self.slots * self.rows * (self.dim + 2)

    @property
    def bytes(self) -> int:
        return 4 * (self.numbers + self.counters)


def of(need: Need, device: torch.device) -> Work:
    """For a launch on the current stream."""
    if torch.cuda.is_current_stream_capturing():
        memory, counters = _memory(need, device), _reserved(need.counters, device)
    else:
        if device not in _RESERVES:
            _RESERVES[device] = torch.zeros(RESERVE, dtype=torch.int32, device=device), 0
        key = device, torch.cuda.current_stream(device).cuda_stream
        kept = _KEPT.get(key)
        if kept is None or kept[0].numel() < need.numbers or kept[1].numel() < need.counters:
            kept = _KEPT[key] = _memory(need, device), torch.zeros(need.counters, dtype=torch.int32, device=device)
        memory, counters = kept
    sums, lse, _ = memory.tensor_split((need.slots * need.rows * need.dim, need.numbers))
    shape = need.slots, need.rows
    numbers = (
        need.columns,
        need.blocks,
        need.queries,
        need.least,
        need.split,
        need.most_pieces,
        need.step,
        need.rise,
        need.solo_speedup_x4,
        need.polls,
    )
    return Work(sums.view(*shape, need.dim), lse.view(2, *shape), counters, *numbers)


def _memory(need: Need, device: torch.device) -> Tensor:
    return torch.empty(need.numbers, dtype=torch.float32, device=device)


def _reserved(count: int, device: torch.device) -> Tensor:
    reserve, taken = _RESERVES.get(device, (None, 0))
    if reserve is None or taken + count > RESERVE:
        return torch.zeros(count, dtype=torch.int32, device=device)
    _RESERVES[device] = reserve, taken + count
    return reserve[taken : taken + count]
