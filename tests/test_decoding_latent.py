"""Decoding a latent cache, as MLA's absorbed form has it: v_cache is the first columns of k_cache, in the same memory. Unused memory is NaN."""

import pytest
import torch
from decode_problems import DecodeCase, held, made

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.problem import Call, DecodeCall
from tilewise.runtime.dispatch import reasons

LATENT = {"dims": (576, 512), "latent": True}
CASES = [
    DecodeCase(lengths=(70, 0, 33), heads=(16, 1), page=16, **LATENT),
    DecodeCase(lengths=(70, 1, 33), heads=(5, 1), queries=3, dtype=torch.float16, **LATENT),
    DecodeCase(lengths=(70, 9, 33), heads=(4, 1), queries=(2, 0, 4), page=64, dtype=torch.float32, **LATENT),
    DecodeCase(lengths=(40, 3), heads=(6, 2), dims=(40, 24), latent=True, page=16),
]


def decoded(call: DecodeCall, **words):
    names = {"cache_seqlens": call.seqlens, "page_table": call.page_table, "cu_seqlens_q": call.cu_seqlens_q, "scale": call.scale} | words
    return tw.decode(call.q, call.k_cache, call.v_cache, **names, return_lse=True)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", [None, "tiled", "reference"])
def test_on_the_cpu(case, backend):
    call = made(case)
    assert call.v_cache.data_ptr() == call.k_cache.data_ptr()
    held(call, *decoded(call, backend=backend))


def test_as_from_a_cache_of_values():
    """Bit for bit what a copy of the columns gives."""
    call = made(CASES[0])
    apart = tw.decode(call.q, call.k_cache, call.v_cache.clone(), cache_seqlens=call.seqlens, page_table=call.page_table)
    assert torch.equal(tw.decode(call.q, call.k_cache, call.v_cache, cache_seqlens=call.seqlens, page_table=call.page_table), apart)


def test_appending():
    """New latents are given as k, and as v their first columns."""
    call = made(DecodeCase(lengths=(70, 64, 33), heads=(4, 1), page=16, queries=2, **LATENT))
    expected = decoded(call)
    new = torch.cat([kept(call, b)[None, -2:] for b in range(3)])
    for b in range(3):  # the cache loses them
        for at in (-2, -1):
            where(call, b, at).fill_(torch.nan)
    words = {"cache_seqlens": call.seqlens - 2}
    assert all(map(torch.equal, decoded(call, k=new, v=new[..., :512], **words), expected))
    with pytest.raises(ShapeError, match="rotary_cos turns k, whose first columns are v where the caches are one memory; rotate before"):
        angles = torch.zeros(99, 32)
        decoded(call, k=new, v=new[..., :512], rotary_cos=angles, rotary_sin=angles, **words)


def kept(call: DecodeCall, b: int) -> torch.Tensor:
    """(length, 1, 576): a copy of a sequence's latents."""
    return torch.stack([where(call, b, at - int(call.seqlens[b])) for at in range(int(call.seqlens[b]))])


def where(call: DecodeCall, b: int, at: int) -> torch.Tensor:
    """A view of a sequence's token, counted from its end."""
    page, row = divmod(int(call.seqlens[b]) + at, call.k_cache.shape[1])
    return call.k_cache[call.page_table[b, page], row]


def test_what_hopper_says_of_it(monkeypatch):
    """Decode is offered to its kernel where attention is not."""
    q, k = (torch.empty(1, 1, heads, 576, dtype=torch.bfloat16, device="meta") for heads in (16, 1))
    problem = Call(q=q, k=k, v=k[..., :512], mask=tw.masks.Causal(), scale=1.0).problem
    on_gpu = type(problem)(**vars(problem) | {"device": "cuda", "capability": (9, 0)})
    (told,) = Hopper().why_not(on_gpu)
    assert told == "it takes head_dim and head_dim_v up to 256, not 576 and 512, except to decode with v_cache = k_cache[..., :512]"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not Hopper().why_not_decode(on_gpu)
    wider = type(problem)(**vars(on_gpu) | {"head_dim": 640})
    assert Hopper().why_not_decode(wider) == Hopper().why_not(wider) == ["it takes head_dim and head_dim_v up to 256, not 640 and 512"]
    assert reasons(problem)["hopper"] == reasons(problem, True)["hopper"]
    with pytest.raises(UnsupportedError, match="backend 'hopper' cannot run this problem"):
        tw.decode(torch.zeros(1, 1, 16, 576), *(torch.zeros(1, 4, 1, dim) for dim in (576, 512)), backend="hopper")
