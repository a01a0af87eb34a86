"""Scores that are nearly all at their softcap: gradients are of the few that are not, by the softcap's derivative."""

import torch

from tilewise.masks import Causal
from tilewise.problem import Call
from tilewise.testing import tolerance


def held_at_the_cap(backend, seeds, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    for seed in seeds:
        generator = torch.Generator("cpu").manual_seed(seed)
        q, k, v, d_o = (torch.randn(1, 150, 1, 16, generator=generator).to(device, dtype) for _ in range(4))
        q, k = ((x * 8.0).round() / 8.0 for x in (q, k))  # products that are exact in any order leave tanh alone to differ
        call = Call(q=q * 30.0, k=k, v=v, mask=Causal(), scale=0.25, softcap=2.0, grad=True)  # tanh of about 15
        o, lse = backend.forward(call)
        expected = tolerance.expected(call, d_o, None)
        tolerance.check_outputs(call, o, lse, expected)
        tolerance.check_gradients(call, backend.backward(call, o, lse, d_o, None), d_o, None, expected)
