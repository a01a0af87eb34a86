"""Problems of the ladder's rungs for decoding, and what each sequence's result is held to."""

import torch
from torch import Tensor

from tilewise.masks import Full
from tilewise.problem import Call
from tilewise.testing import tolerance

DIM = 128


def drawn(lengths: tuple[int, ...], heads: tuple[int, int], capacity: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """q, both caches and lengths. Behind a sequence's length the cache has large numbers, which nobody may see."""
    draw = torch.Generator().manual_seed(sum(lengths))

    def normal(*shape) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").bfloat16()

    q, k, v = (
        normal(len(lengths), heads[0], DIM),
        normal(len(lengths), capacity, heads[1], DIM),
        normal(len(lengths), capacity, heads[1], DIM),
    )
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = 100.0, 1e4
    return *(x.to(device) for x in (q, k, v)), torch.tensor(lengths, dtype=torch.int32, device=device)


def held(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, o: Tensor, lse: Tensor) -> None:
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            assert not o[b].any() and (lse[b] == -torch.inf).all()
            continue
        call = Call(q=q[b : b + 1, None], k=k[b : b + 1, :length], v=v[b : b + 1, :length], mask=Full(), scale=DIM**-0.5)
        want = tolerance.expected(call)
        tolerance.hold("o", o[b : b + 1, None], want.o)
        tolerance.hold("lse", lse[b : b + 1, :, None], want.lse)
