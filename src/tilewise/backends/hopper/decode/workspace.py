"""What the thread blocks of a decode launch keep for each other: one set a stream, whose launches follow each other; a captured launch gets its own.

Counters are 0 between launches. A capture takes them from a reserve that an earlier call has filled, so that no replay has to clear any; where there
is none left, the graph clears its own.
"""

import torch
from torch import Tensor

from tilewise.backends.hopper.decode.operands import Work

SLOTS = 2  # of a thread block
COUNTERS = 3  # likewise
RESERVE = 1 << 21  # counters of a device's reserve: 5,000 launches of captured graphs

_KEPT: dict[tuple, tuple[Tensor, Tensor]] = {}  # by device and stream: memory for pieces, and counters
_RESERVES: dict[torch.device, tuple[Tensor, int]] = {}  # and how many are taken


def of(blocks: int, rows: int, dim: int, device: torch.device) -> Work:
    """For a launch on the current stream: rows of dim numbers for each piece."""
    elements = SLOTS * blocks * rows * (dim + 2)
    if torch.cuda.is_current_stream_capturing():
        memory, counters = _memory(elements, device), _reserved(COUNTERS * blocks, device)
    else:
        if device not in _RESERVES:
            _RESERVES[device] = torch.zeros(RESERVE, dtype=torch.int32, device=device), 0
        key = device, torch.cuda.current_stream(device).cuda_stream
        memory, counters = _KEPT.get(key, (None, None))
        if memory is None or memory.numel() < elements or counters.numel() < COUNTERS * blocks:
            memory, counters = _memory(elements, device), torch.zeros(COUNTERS * blocks, dtype=torch.int32, device=device)
            _KEPT[key] = memory, counters
    sums, lse = memory[:elements].split((SLOTS * blocks * rows * dim, 2 * SLOTS * blocks * rows))
    return Work(sums.view(SLOTS * blocks, rows, dim), lse.view(2, SLOTS * blocks, rows), counters, blocks)


def _memory(elements: int, device: torch.device) -> Tensor:
    return torch.empty(elements, dtype=torch.float32, device=device)


def _reserved(count: int, device: torch.device) -> Tensor:
    reserve, taken = _RESERVES.get(device, (None, 0))
    if reserve is None or taken + count > RESERVE:
        return torch.zeros(count, dtype=torch.int32, device=device)
    _RESERVES[device] = reserve, taken + count
    return reserve[taken : taken + count]
