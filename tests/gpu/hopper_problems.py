"""Problems that the forward and the backward pass of the Hopper backend are both held to on a GPU."""

import pytest
import torch

from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.forward import call as forward
from tilewise.masks import Causal, Dense, Documents, FirstKeys, Full, Padding, PerHead, PrefixLM, Slices, SlidingWindow
from tilewise.sm90.jit import why_not_here
from tilewise.testing import conformance
from tilewise.testing.cases import Case, random_mask

NEEDS_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not_here()), reason="; ".join(why_not_here()))]

ONE_BAND = (
    Full(),
    Causal(),
    Causal(align="top_left"),
    Causal("top_left", 33),
    Causal(offset=-70),
    SlidingWindow(40, 0, offset=-9),
    SlidingWindow(30, 30, "top_left", 65),
    SlidingWindow(50, 0),
    SlidingWindow(20, 30),
    SlidingWindow(None, 3),
    SlidingWindow(2, None),
)
LENGTHS = ((1, 1), (1, 300), (300, 1), (129, 65), (130, 257), (400, 400), (31, 700))
LENGTHS_OF_TABLES = ((45, 70), (300, 1), (1, 300), (129, 260), (400, 385), (700, 900))
INNER = (
    Full(),
    Causal(),
    Causal("top_left"),
    SlidingWindow(30, 0),
    SlidingWindow(30, 0, offset=-9),
    SlidingWindow(10, 20, "top_left"),
    Causal("top_left", 33),
    Causal() & SlidingWindow(5, None, "top_left"),
)
"""Masks inside a document that leave it one band."""


class Fixed(Hopper):
    """The backend with one configuration for every forward pass."""

    def __init__(self, config) -> None:
        self.config = config

    def forward(self, call):
        return forward.forward(call, self.config)


def held(case, seed=0, run=conformance.run_hidden, backend=None):
    """The case through `run`, on the GPU; a failure says which case it was."""
    try:
        run(backend or Hopper(), case, seed=seed, device="cuda")
    except AssertionError as failure:
        raise AssertionError(f"{case.id}: {failure}") from None


def held_each_way(case, seed=0):
    """Hidden memory poisoned, nothing hidden, and NaN in a key that some queries see."""
    for turn, run in enumerate((conformance.run_hidden, conformance.run_case, conformance.run_spoiled)):
        held(case, seed + turn, run)


def same_bits(call, runs, d_o=None, d_lse=None):
    """The gradients of a call, as often as that, have those of the first; d_o is random where none is given."""
    o, lse = Hopper().forward(call)
    d_o = torch.randn_like(o) if d_o is None else d_o
    first = None
    for _ in range(1 + runs):
        again = Hopper().backward(call, o, lse, d_o, d_lse, bias_grad=call.bias is not None)
        first = first or again
        assert all(x is None or torch.equal(x, y) for x, y in zip(first, again, strict=True))


def held_forward(case, seed=0, backend=None):
    held(case, seed, conformance.run_forward, backend)


def beyond_one_band(seqlen_q, seqlen_k):
    """Masks that need tables: several bands, bitmaps, masks that differ by head or batch entry."""
    n = min(seqlen_q, seqlen_k)
    sparse = torch.rand(seqlen_q, seqlen_k, generator=torch.Generator().manual_seed(3)) < 0.01
    return [
        PrefixLM(n // 2),
        Full() - SlidingWindow(30, 30),
        Documents((0, n // 5, n // 5, n // 2, n)) | FirstKeys(3),
        PerHead({(0, 1): Causal(), (1, 4): FirstKeys(n // 3)}),
        random_mask(seqlen_q, seqlen_k, batch=2, heads=4),
        random_mask(seqlen_q, seqlen_k) & Causal(),
        Dense(sparse),
        Dense(sparse) - Full(),
        Padding((seqlen_k, n // 2)) & Causal(),
        Padding((seqlen_k - 1, n // 2), (1, n // 3)) & SlidingWindow(n // 3, 5),
    ]


def cumulated(lengths):
    return (0, *torch.tensor(lengths).cumsum(0).tolist())


def packs(seed=0):
    """(queries' cu_seqlens, keys', total queries, total keys)"""
    generator = torch.Generator().manual_seed(seed)
    tiny = torch.randint(0, 9, (150,), generator=generator).tolist()
    zipf = [max(1, int(700 / (rank + 1))) for rank in torch.randperm(40, generator=generator).tolist()]
    long = [900, *([17] * 20), 0, 3]
    pairs = {"tiny": (tiny, tiny), "zipf": (zipf, zipf), "long": (long, long), "long last": (long[::-1], long[::-1]), "one": ([257], [257])}
    pairs["empty"] = ([0, 0, 0], [0, 0, 0])
    pairs["crossed"] = (tiny[:60], tiny[60:120])  # absent queries here, absent keys there
    pairs["far apart"] = ([0, 200, 0, 300, 5], [300, 5, 400, 0, 200])  # tiles of keys that nobody sees, between such as are seen
    pairs["more keys"] = ([3, 100, 0, 40], [300, 160, 20, 41])
    for q, k in pairs.values():
        cu_q, cu_k = cumulated(q), cumulated(k)
        beyond = int(torch.randint(0, 140, (1,), generator=generator))
        yield cu_q, cu_k, max(1, cu_q[-1] + beyond), max(1, cu_k[-1] + beyond // 2)


def drawing(seed):
    """draw(low, high): a random integer of [low, high), the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return lambda low, high: int(torch.randint(low, high, (1,), generator=generator))


def random_shape(draw, longest=700):
    """Fields of a `Case`: batch, heads in groups, lengths below `longest`."""
    group, heads_k, batch = draw(1, 5), draw(1, 4), draw(1, 4)
    lengths = {"seqlen_q": draw(1, longest), "seqlen_k": draw(1, longest)}
    return {"batch": batch, "heads_q": group * heads_k, "heads_k": heads_k, **lengths}


def random_slices(draw):
    """Fields of a `Case` under rectangles of bands, sometimes without a window."""
    seqlen_q, seqlen_k, slices = draw(1, 900), draw(1, 900), draw(1, 12)

    def span(length):
        a, b = sorted((draw(0, length + 1), draw(0, length + 1)))
        return a, b

    mask = Slices([span(seqlen_q) for _ in range(slices)], [span(seqlen_k) for _ in range(slices)], [draw(0, 4) for _ in range(slices)])
    if draw(0, 2):
        mask = mask - SlidingWindow(draw(0, 40), draw(0, 40))
    return {"mask": mask, "batch": draw(1, 3), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": 8 * draw(1, 9)}


def of_the_ladder(seqlens: tuple[int, ...]) -> list[Case]:
    """What every rung takes, of these lengths, and in each layout."""
    return [
        Case(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=2, heads_k=2, head_dim=head_dim, mask=mask, dtype="bf16")
        for seqlen in seqlens
        for head_dim in (64, 128)
        for mask in (Full(), Causal())
    ] + [
        Case(batch=3, seqlen_q=150, seqlen_k=150, heads_q=3, heads_k=3, head_dim=128, mask=Causal(), dtype="bf16", layout=layout)
        for layout in ("bshd", "bhsd", "sliced", "expanded", "inner")
    ]  # fmt: skip
