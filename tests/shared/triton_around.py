"""Calls by backend="triton" in torch's surroundings (tests/around), where its kernels are interpreted."""

from functools import partial

import torch
from surroundings import FUNCTIONS, Function, integers, normal, qkv

import tilewise as tw


def _halves() -> dict[str, torch.Tensor]:
    return {name: x.bfloat16() for name, x in qkv(1).items()}


def _quantised(q, k, v) -> tuple[torch.Tensor, ...]:
    return tw.attention(q, k, v, causal=True, precision="int8", return_lse=True, backend="triton")


def _largest(q, k, v) -> tuple[torch.Tensor, ...]:
    o, largest = tw.attention(q, k, v, mask=tw.SlidingWindow(3, 0), return_max_logits=True, backend="triton")
    return (o + largest[:, None, :, None],)


def _decode(q, k_cache, v_cache, lengths) -> tuple[torch.Tensor, ...]:
    return tw.decode(q, k_cache, v_cache, cache_seqlens=lengths, return_lse=True, backend="triton")


def _cache() -> dict[str, torch.Tensor]:
    k, v = normal(2, 2, 9, 2, 8, seed=1).unbind(0)
    return {"q": normal(2, 1, 4, 8), "k_cache": k, "v_cache": v, "lengths": integers(4, 9)}


every = FUNCTIONS["attention, every operand"]
BY_NAME = {
    "attention, triton, every operand": every._replace(call=partial(every.call, backend="triton")),
    "attention, triton, largest scores": Function(qkv, _largest, ("q", "k", "v")),
    "attention, triton, quantised inside": Function(_halves, _quantised, ("q", "k", "v")),
    "decode, triton": Function(_cache, _decode),
}


def default(name: str, dtype: torch.dtype, device: str, mode: str, hooks: str) -> None:
    import test_defaults

    FUNCTIONS.update(BY_NAME)
    test_defaults.cell(name, dtype, device, mode, hooks)


def compiled(name: str) -> None:
    import test_compile

    FUNCTIONS.update(BY_NAME)
    test_compile.test_results_are_those_of_the_eager_call(name)
