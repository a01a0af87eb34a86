"""A server's step in a CUDA graph, replayed as sequences grow, end and begin anew: each replay has the bits of a fresh call.

How many: TILEWISE_REPLAYS, or 2,000 a case, and 100,000 where the test is slow.
"""

import os

import pytest
import torch
from hopper_problems import NEEDS_HOPPER

import tilewise as tw

pytestmark = NEEDS_HOPPER

QUICK, MANY = (int(os.environ.get("TILEWISE_REPLAYS", number)) for number in (2_000, 100_000))
LOOK = 500  # replays between two looks at the device
BATCH, CAPACITY, DIM = 6, 3072, 128
ON = {"dtype": torch.bfloat16, "device": "cuda"}


class Server:
    """Sequences in a cache whose unused tokens are NaN. A step appends `new` tokens to each sequence and attends with them."""

    def __init__(self, page: int, new: int, heads: tuple[int, int], **options) -> None:
        self.page, self.new, self.options = page, new, options
        self.draw = torch.Generator().manual_seed(page + new)
        lead = (BATCH * CAPACITY // page, page) if page else (BATCH, CAPACITY)
        self.k_cache, self.v_cache = (torch.full((*lead, heads[1], DIM), torch.nan, **ON) for _ in range(2))
        self.q = torch.empty(BATCH, new, heads[0], DIM, **ON)
        self.k, self.v = (torch.empty(BATCH, new, heads[1], DIM, **ON) for _ in range(2))
        self.lengths = torch.zeros(BATCH, dtype=torch.int32, device="cuda")
        self.on_host = [0] * BATCH
        self.table = None
        if page:
            order = torch.randperm(lead[0], generator=self.draw).to(torch.int32)
            self.table = order.view(BATCH, CAPACITY // page).cuda()
        for b in range(BATCH):
            self.begin(b)
        self.renew()

    def number(self, most: int) -> int:
        return int(torch.randint(most, (1,), generator=self.draw))

    def begin(self, b: int) -> None:
        """A sequence anew, of any length, in its pages in another order."""
        length = self.number(CAPACITY - 64) if self.number(4) else self.number(3)
        if self.table is not None:
            self.table[b] = self.table[b, torch.randperm(self.table.shape[1], generator=self.draw).cuda()].clone()
        for cache in (self.k_cache, self.v_cache):
            tokens = torch.randn(CAPACITY, *cache.shape[2:], **ON)
            tokens[length:] = torch.nan
            if self.table is None:
                cache[b] = tokens
            else:
                cache[self.table[b].long()] = tokens.view(-1, *cache.shape[1:])
        self.on_host[b] = length
        self.lengths[b] = length

    def grow(self) -> None:
        """By what the last step has appended; sometimes one ends, as all do that are full."""
        self.lengths += self.new
        self.on_host = [length + self.new for length in self.on_host]
        ending = {b for b in range(BATCH) if self.on_host[b] + self.new > CAPACITY}
        if self.number(100) == 0:
            ending.add(self.number(BATCH))
        for b in ending:
            self.begin(b)
        self.renew()

    def renew(self) -> None:
        for x in (self.q, self.k, self.v):
            x.normal_()

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"k": self.k, "v": self.v, "cache_seqlens": self.lengths, "page_table": self.table}
        return tw.decode(self.q, self.k_cache, self.v_cache, **given, **self.options, return_lse=True)


CASES = {
    "contiguous": (0, 1, (32, 8), {}),
    "pages of 16": (16, 1, (8, 2), {}),
    "one key head": (64, 4, (8, 1), {}),
    "fixed pieces": (16, 2, (8, 2), {"split": 256}),
}


def replayed(server: Server, times: int) -> None:
    server.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = server.step()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1, times + 1):
        server.grow()
        o.fill_(torch.nan)
        graph.replay()
        fresh, of_fresh = server.step()  # which appends the same tokens to the same places
        wrong += ~((o == fresh).all() & (lse == of_fresh).all() & lse.isfinite().all())
        if turn % LOOK == 0 or turn == times:
            assert wrong.item() == 0, f"{wrong.item()} of the last {LOOK} replays before number {turn} differ from a fresh call"


@pytest.mark.parametrize("case", CASES)
def test_replays(case):
    page, new, heads, options = CASES[case]
    replayed(Server(page, new, heads, **options), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_many_replays(case):
    page, new, heads, options = CASES[case]
    replayed(Server(page, new, heads, **options), MANY)
