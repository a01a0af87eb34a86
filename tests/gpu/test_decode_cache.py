"""tilewise.decode on a GPU, called again: the same bits, tensors that lie elsewhere, graphs, streams, and what the host takes."""

import time

import pytest
import torch
from decode_problems import DecodeCase, made
from hopper_problems import NEEDS_HOPPER

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.runtime import decode_cache

pytestmark = NEEDS_HOPPER

BIG = {"dims": (128, 128), "heads": (8, 2)}
CASES = {
    "contiguous": DecodeCase(lengths=(300, 17, 0), **BIG),
    "paged": DecodeCase(lengths=(300, 17, 1000), page=16, queries=3, **BIG),
    "packed": DecodeCase(lengths=(300, 17, 1000), page=16, queries=(3, 1, 0), **BIG),
    "slopes and a sink": DecodeCase(lengths=(300, 17), alibi=True, sink=True, softcap=5.0, **BIG),
    "a prefix": DecodeCase(lengths=(300, 270), prefix=256, page=64, **BIG),
}


@pytest.fixture(autouse=True)
def fresh():
    decode_cache.forget()
    yield
    decode_cache.forget()


def arguments(case: DecodeCase, seed: int = 0) -> dict:
    call = made(case, seed, "cuda")
    names = ("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q", "leftpad", "tree", "alibi_slopes", "sink", "shared_prefix", "softcap")
    return {name: getattr(call, name) for name in names} | {"cache_seqlens": call.seqlens}


def again(monkeypatch, **given):
    """The call, which may not be bound again."""
    with monkeypatch.context() as patched:
        patched.setattr(Hopper, "bind_decode", None)
        return tw.decode(**given, return_lse=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_found_for_a_call_serves_those_like_it(case, monkeypatch):
    wanted = []
    for seed in (1, 0):
        decode_cache.forget()
        wanted.append(tw.decode(**arguments(case, seed), return_lse=True))
    for seed, bits in zip((0, 0, 1), (wanted[1], wanted[1], wanted[0]), strict=True):
        found = again(monkeypatch, **arguments(case, seed))
        assert all(map(torch.equal, found, bits)) and all(x.is_contiguous() for x in found)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", ["contiguous", "paged", "packed"])
def test_new_tokens_are_written(name, rotated, monkeypatch):
    """Into the caches and into out, as by `append` and `decode` one after the other, also by calls like one before."""
    case = CASES[name]
    for seed in range(2):
        given = arguments(case, seed)
        lengths = given["cache_seqlens"]
        new = case.queries if isinstance(case.queries, tuple) else (case.queries,) * len(case.lengths)
        given["cache_seqlens"] = (lengths - torch.tensor(new, dtype=torch.int32, device="cuda")).clamp(min=0)
        heads_k, dim = given["k_cache"].shape[2:]
        shape = (given["q"].shape[0], heads_k, dim) if name == "packed" else (*given["q"].shape[:2], heads_k, dim)
        fresh = {x: torch.randn(shape, dtype=torch.bfloat16, device="cuda") for x in "kv"}
        tables = {}
        if rotated:
            angles = torch.randn(2000, 32, dtype=torch.float32, device="cuda")
            tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        caches = {x: given[x].clone() for x in ("k_cache", "v_cache")}
        places = {"cache_seqlens": given["cache_seqlens"], "page_table": given["page_table"]}
        tw.append(**caches, **fresh, **places, cu_seqlens=given["cu_seqlens_q"], **tables)
        ends = given["cache_seqlens"] + torch.tensor(new, dtype=torch.int32, device="cuda")
        wanted = tw.decode(**given | caches | tables | {"cache_seqlens": ends}, return_lse=True)
        known = dict(decode_cache._KNOWN)
        given |= fresh | tables | {"out": torch.empty_like(given["q"])}
        found = again(monkeypatch, **given) if seed else tw.decode(**given, return_lse=True)
        assert found[0] is given["out"] and all(map(torch.equal, found, wanted))
        assert all(torch.equal(given[x].view(torch.int16), caches[x].view(torch.int16)) for x in caches)
        assert len(decode_cache._KNOWN) == len(known) + (seed == 0)


def test_tensors_between_the_kernels_addresses(monkeypatch):
    """Same sizes and strides, but memory begins between multiples of 16 bytes: pools of pages are refused, and not copied; others are."""
    for case in ("paged", "contiguous"):
        decode_cache.forget()
        given = arguments(CASES[case])
        wanted = tw.decode(**given, return_lse=True)
        for name in ("q", "k_cache", "v_cache"):
            x = given[name]
            late = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
            late.copy_(x)
            if case == "paged" and name != "q":
                with pytest.raises(tw.ShapeError, match=f"{name} has an address 2 bytes behind a multiple of 16"):
                    again(monkeypatch, **given | {name: late})
            else:
                assert all(map(torch.equal, again(monkeypatch, **given | {name: late}), wanted)), name


def test_graphs_and_streams(monkeypatch):
    given = arguments(CASES["paged"])
    wanted = tw.decode(**given, return_lse=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = again(monkeypatch, **given)
    graph.replay()
    assert all(map(torch.equal, found, wanted))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = again(monkeypatch, **given)
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, wanted))


def test_nothing_is_read_on_the_host_but_when_asked(monkeypatch):
    given = arguments(CASES["paged"])
    tw.decode(**given, return_lse=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again(monkeypatch, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wild = given | {"cache_seqlens": torch.full_like(given["cache_seqlens"], 10**6)}
    again(monkeypatch, **wild)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(tw.ShapeError, match=r"cache_seqlens\[0\] is 1000000"):
        tw.decode(**wild, return_lse=True)


@pytest.mark.parametrize(("name", "new"), [("contiguous", False), ("paged", False), ("contiguous", True), ("paged", True)])
def test_a_repeated_call_takes_the_host_little_time(name, new):
    given, least = arguments(CASES[name]), float("inf")
    if new:
        shape = *given["q"].shape[:2], *given["k_cache"].shape[2:]
        given |= {x: torch.randn(shape, dtype=torch.bfloat16, device="cuda") for x in "kv"}
    for _ in range(10):
        tw.decode(**given)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            tw.decode(**given)
        least = min(least, (time.perf_counter() - begin) / 100)
    assert least < 30e-6 * (1 + new)
