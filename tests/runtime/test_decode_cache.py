"""Calls of decode like one before are computed by what was found for it: the same bits, and whatever differs is checked and bound on its own."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.backends.cpu import Cpu
from tilewise.masks import Causal, Dense, SlidingWindow
from tilewise.problem import DecodeTensors, Share
from tilewise.runtime import append_operator, bound_call, cache_values, decode_cache, decode_operator

WANTED = cache_values.wanted


class Binding(Cpu):
    """A backend as a GPU's, which counts the calls that it binds."""

    binds, refuses, writes = 0, False, True  # refuses: to append, for where caches lie; writes: into `out`

    def __init__(self):
        super().__init__()
        self.outs = []  # as bound calls were given them

    def bind_decode(self, call):
        self.binds += 1
        like, plain = call.like, super().bind_decode(replace(call, rotary=None))

        def run(given, seqlens, out=None, with_lse=True):
            self.outs.append(out)
            each = like.again(given, seqlens)
            each = decode_operator._rotated(each) if each.rotary else each
            o, lse = plain(each.tensors, seqlens)
            return o.contiguous() if out is None or not self.writes else out.copy_(o), lse.contiguous() if with_lse else None

        return plain and run

    def bind_append(self, call):
        packed, interleaved, refuses = call.cu_seqlens is not None, call.interleaved, self.refuses
        of_rank = {f"cp_{name}": n for name, n in (call.share or Share(0, 1, 1))._asdict().items()}

        def write(given, first=None):
            *others, cu_seqlens, cos, sin = given
            written = append_operator.Operands(
                *others, cu_seqlens if packed else None, cos, sin, first, interleaved, check=False, **of_rank
            )
            if refuses:
                return None
            append_operator._append(written)
            more = written.k.shape[1] if written.cu_seqlens is None else written.cu_seqlens.diff()
            return (written.cache_seqlens + more).int()

        return write


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """As on a GPU: values are read where the caller or the environment asks."""
    found = Binding()
    monkeypatch.setattr(decode_operator, "choose", lambda problem, name, **_: found)
    monkeypatch.setattr(append_operator, "_backend", lambda _: found)
    monkeypatch.setattr(cache_values, "wanted", lambda device, check: WANTED(torch.device("cuda"), check))
    monkeypatch.delenv("TILEWISE_CHECK", raising=False)
    decode_cache.forget()
    yield found
    decode_cache.forget()


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def ints(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


def contiguous(seed=0, dtype=torch.float32):
    """q (2, 3, 4, 8), caches (2, 12, 2, 8) and lengths."""
    tensors = [drawn(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(((2, 3, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8)))]
    return tensors, {"cache_seqlens": ints(5, 12 - seed)}


def paged(seed=0):
    tensors = [drawn(*shape, seed=seed + i) for i, shape in enumerate(((2, 3, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8)))]
    return tensors, {"cache_seqlens": ints(5, 12 - seed), "page_table": ints([5, 0, 3], [1 + seed, 4, 2])}


def packed(seed=0):
    (q, *pools), given = paged(seed)
    return [q.flatten(0, 1), *pools], given | {"cu_seqlens_q": ints(0, 2 + seed, 5)}


TREE = torch.tensor([[[1, 0], [1, 1]]], dtype=torch.bool)


def new(seed, *shape, **more):
    return {"k": drawn(*shape, seed=seed + 7), "v": drawn(*shape, seed=seed + 8), "out": torch.full((2, 3, 4, 8), -1.0)} | more


def tables(seed):
    angles = drawn(12, 3, seed=seed + 20)
    return {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}


def changed(seed):
    """Everything that changes scores."""
    per_head = {name: torch.rand(4, generator=torch.Generator().manual_seed(seed)) for name in ("alibi_slopes", "sink")}
    return per_head | {"mask": SlidingWindow(4, 0), "scale": 0.3, "softcap": 2.0}


CASES = {
    "contiguous": (contiguous, lambda seed: {}),
    "paged": (paged, lambda seed: {}),
    "packed": (packed, lambda seed: {}),
    "lse": (packed, lambda seed: {"return_lse": True}),
    "all": (contiguous, changed),
    "entries": (contiguous, lambda seed: {"cache_batch_idx": ints(1, 0), "leftpad": ints(0, 2), "split": 4, "causal": False}),
    "tree": (paged, lambda seed: {"tree": TREE, "shared_prefix": 2, "backend": "cpu"}),
    "slopes in fp64": (paged, lambda seed: {"alibi_slopes": drawn(2, 4, seed=seed, dtype=torch.float64)}),
    "new": (contiguous, lambda seed: new(seed, 2, 3, 2, 8, cache_seqlens=ints(2, 9 - seed))),
    "new, rotated": (paged, lambda seed: new(seed, 2, 3, 2, 8, cache_seqlens=ints(2, 9 - seed), **tables(seed), interleaved=True)),
    "new, packed": (packed, lambda seed: new(seed, 6, 2, 8, cache_seqlens=ints(2, 7 - seed), out=None, return_lse=True)),
    "fewer new ones than queries": (
        contiguous,
        lambda seed: new(seed, 2, 1, 2, 8, cache_seqlens=ints(2, 9), cache_batch_idx=ints(1, 0), out=None),
    ),
    "queries rotated": (contiguous, tables),
    "out": (contiguous, lambda seed: {"out": torch.full((2, 3, 4, 8), -1.0)}),
}


@pytest.mark.parametrize("make, more", CASES.values(), ids=CASES)
def test_what_is_found_for_a_call_serves_those_like_it(make, more, backend):
    """What it gives and what it writes, bit for bit."""

    def called(seed):
        (q, *caches), given = make(seed)
        options = given | more(seed)
        found = tw.decode(q, *caches, **options)
        found = found if isinstance(found, tuple) else (found,)
        assert options.get("out") is None or found[0] is options["out"]
        return *found, *caches

    wanted = []
    for seed in range(3):
        wanted.append(called(seed))
        decode_cache.forget()
    for seed in (0, 1, 2, 0):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(called(seed), wanted[seed], strict=True))
    assert backend.binds == 3 + 1 and len(decode_cache._KNOWN) == 1


def test_caches_that_the_backend_cannot_write_are_torchs(backend):
    (q, *caches), given = contiguous()
    given |= new(0, 2, 3, 2, 8, cache_seqlens=ints(2, 9))
    wanted = tw.decode(q, *(x.clone() for x in caches), **given).clone()
    decode_cache.forget()
    backend.refuses = True
    for _ in range(2):
        assert torch.equal(tw.decode(q, *(x.clone() for x in caches), **given), wanted)
    assert not decode_cache._KNOWN


def strided(x, dim=-1):
    """x's numbers with other steps between them."""
    return torch.stack((x, x), dim).select(dim, 0)


def changes():
    """What differs from the call before, by name: the call's tensors and arguments after the change."""
    (q, k, v), given = paged()
    lengths, table = given["cache_seqlens"], given["page_table"]
    yield "queries", (q[:, :2], k, v), {}
    yield "batch", (q[:1], k, v), {"cache_seqlens": lengths[:1], "page_table": table[:1]}
    yield "heads", (q[:, :, :2], k, v), {}
    yield "pages", (q, k[:-1], v[:-1]), {"page_table": ints([4, 0, 3], [1, 4, 2])}
    yield "width of the table", (q, k, v), {"page_table": torch.cat((table, table), 1)}
    yield "strides of q", (strided(q, 1), k, v), {}
    yield "strides of k", (q, strided(k, 1), v), {}
    yield "strides of v", (q, k, strided(v, 1)), {}
    yield "rows of q that are not dense", (strided(q), k, v), {}
    yield "strides of lengths", (q, k, v), {"cache_seqlens": strided(lengths)}
    yield "strides of the table", (q, k, v), {"page_table": strided(table)}
    yield "dtype", [x.bfloat16() for x in (q, k, v)], {}
    yield "dtype of lengths", (q, k, v), {"cache_seqlens": lengths.long()}
    yield "dtype of the table", (q, k, v), {"page_table": table.long()}
    yield "one length", (q, k, v), {"cache_seqlens": 5}
    yield "no length", (q, k, v), {"cache_seqlens": None}
    yield "no pages", contiguous()[0], {"page_table": None}
    yield "packed", (q.flatten(0, 1), k, v), {"cu_seqlens_q": ints(0, 3, 6)}
    yield "leftpad", (q, k, v), {"leftpad": ints(1, 0)}
    yield "tree", (q, k, v), {"tree": TREE}
    yield "slopes", (q, k, v), {"alibi_slopes": torch.rand(4)}
    yield "sink", (q, k, v), {"sink": torch.rand(4)}
    yield "causal", (q, k, v), {"causal": False}
    yield "mask", (q, k, v), {"mask": SlidingWindow(3, 0)}
    yield "scale", (q, k, v), {"scale": 1.0}
    yield "softcap", (q, k, v), {"softcap": 1.0}
    yield "split", (q, k, v), {"split": 4}
    yield "prefix", (q, k, v), {"shared_prefix": 4}
    yield "backend", (q, k, v), {"backend": "cpu"}
    yield "check", (q, k, v), {"check": True}
    yield "out", (q, k, v), {"out": torch.empty_like(q)}
    yield (
        "new keys",
        (q, k.clone(), v.clone()),
        {"cache_seqlens": ints(5, 9), "k": drawn(2, 3, 2, 8, seed=7), "v": drawn(2, 3, 2, 8, seed=8)},
    )
    yield "tables", (q, k, v), tables(0)
    yield "a negative view", (torch._neg_view(q), k, v), {}


CHANGES = [name for name, *_ in changes()]


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_another_call(name, backend):
    tensors, given = paged()
    changed, options = next(rest for each, *rest in changes() if each == name)
    options = given | options
    wanted = tw.decode(*[x.clone() if name == "new keys" else x for x in changed], **options).clone()
    decode_cache.forget()
    for _ in range(2):
        first = tw.decode(*tensors, **given)
    known = dict(decode_cache._KNOWN)
    assert len(known) == 1
    binds = backend.binds
    assert torch.equal(tw.decode(*[x.clone() if name == "new keys" else x for x in changed], **options), wanted)
    assert backend.binds > binds
    binds = backend.binds
    assert torch.equal(tw.decode(*tensors, **given), first)
    assert backend.binds == binds and known.items() <= decode_cache._KNOWN.items()


def latent(seed=0):
    """A cache whose values are its keys' first columns."""
    k = drawn(2, 12, 1, 12, seed=seed + 1)
    return [drawn(2, 3, 4, 12, seed=seed), k, k[..., :8]], {"cache_seqlens": ints(5, 12 - seed)}


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("shared_first", [True, False])
def test_values_in_the_keys_memory_are_another_call(shared_first, guarded, backend, monkeypatch):
    """Of equal sizes and strides; a backend may read such memory once."""
    if not guarded:
        monkeypatch.setattr(bound_call, "guard", lambda *_: None)
    (q, k, shared), given = latent()
    apart = drawn(2, 12, 1, 12, seed=9)[..., :8]
    first, then = (shared, apart) if shared_first else (apart, shared)
    wanted = tw.decode(q, k, then, **given)
    decode_cache.forget()
    for _ in range(2):
        tw.decode(q, k, first, **given)
    assert backend.binds == 2
    for _ in range(2):
        assert torch.equal(tw.decode(q, k, then, **given), wanted)
    assert backend.binds == 3 and len(decode_cache._KNOWN) == 2


def test_a_call_that_returns_lse_is_another(backend):
    tensors, given = paged()
    for _ in range(2):
        o = tw.decode(*tensors, **given)
        both = tw.decode(*tensors, **given, return_lse=True)
        assert isinstance(o, torch.Tensor) and isinstance(both, tuple) and torch.equal(o, both[0])
    assert backend.binds == 2


def test_calls_in_turn_are_each_remembered(backend, monkeypatch):
    """More of them than are tried first."""
    (q, k, v), given = paged()
    ways = [{"scale": 0.1 * n} for n in range(1, decode_cache.RECENT + 3)]
    wanted = [tw.decode(q, k, v, **given, **way) for way in ways]
    for _ in range(2):
        assert all(torch.equal(tw.decode(q, k, v, **given, **way), o) for way, o in zip(ways, wanted, strict=True))
    assert backend.binds == len(ways) and len(decode_cache._recent) == decode_cache.RECENT
    monkeypatch.setattr(decode_cache, "_signature", None)  # none is made for the call before
    tw.decode(q, k, v, **given, **ways[-1])
    assert backend.binds == len(ways)


def test_without_torchs_check_the_signature_serves(backend, monkeypatch):
    monkeypatch.setattr(bound_call, "guard", lambda *_: None)
    tensors, given = paged()
    for _ in range(3):
        tw.decode(*tensors, **given)
    assert backend.binds == 1 and decode_cache._recent == ()


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("q", drawn(2, 3, 4, 7)),
        ("q", drawn(2, 3, 3, 8)),
        ("q", drawn(2, 3, 4, 8, dtype=torch.float16)),
        ("q", drawn(2, 3, 4, 8).requires_grad_()),
        ("q", drawn(2, 3, 4, 8).to("meta")),
        ("q", drawn(2, 3, 4, 8).to_sparse()),
        ("q", [1.0]),
        ("v_cache", drawn(5, 4, 2, 8)),
        ("v_cache", drawn(6, 4, 2, 8).requires_grad_()),
        ("cache_seqlens", ints(1, 2, 3)),
        ("cache_seqlens", ints(1, 2).to("meta")),
        ("cache_seqlens", torch.tensor([1.0, 2.0])),
        ("cache_seqlens", True),
        ("page_table", ints(1, 2)),
        ("page_table", ints([1], [2], [3])),
        ("leftpad", ints(1)),
        ("alibi_slopes", drawn(3)),
        ("sink", drawn(5)),
        ("tree", torch.ones(3, 2, 2, dtype=torch.bool)),
        ("causal", 1),
        ("return_lse", 0),
        ("interleaved", 0),
        ("check", 0.0),
        ("scale", True),
        ("softcap", False),
        ("split", True),
        ("split", 0),
        ("shared_prefix", False),
        ("shared_prefix", 0.0),
        ("mask", torch.ones(3, 12, dtype=torch.bool)),
        ("backend", 1),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else x,
)
def test_bad_input_after_good_gets_its_error(name, wrong, backend):
    (q, k, v), given = paged()
    good = {"q": q, "k_cache": k, "v_cache": v, **given}
    for _ in range(2):
        tw.decode(**good)
    with pytest.raises(ValueError, match=name) as told:
        tw.decode(**good | {name: wrong})
    decode_cache.forget()
    with pytest.raises(ValueError, match=name) as before:
        tw.decode(**good | {name: wrong})
    assert str(told.value) == str(before.value) and backend.binds == 1


def test_memory_that_was_given_back_is_refused(backend):
    (q, k, v), given = paged()
    for _ in range(2):
        tw.decode(q, k, v, **given)
    freed = k.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="k_cache"):
        tw.decode(q, freed, v, **given)


def test_what_else_takes_part_is_not_bypassed(backend, monkeypatch):
    (q, k, v), given = paged()
    plain = tw.decode(q, k, v, **given)
    monkeypatch.setattr(decode_cache.Known, "__call__", None)
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.decode(q, k, v, **given).dtype == torch.bfloat16
    with FlopCounterMode(display=False):
        assert torch.equal(tw.decode(q, k, v, **given), plain)
    stacked = torch.vmap(lambda x: tw.decode(x, k, v, **given))(torch.stack((q, q)))
    assert torch.equal(stacked[1], plain)
    assert torch.equal(torch.func.functionalize(lambda x: tw.decode(x, k, v, **given))(q), plain)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert type(tw.decode(fake.from_tensor(q), k, v, **given)) is FakeTensor
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="tangent"):
        tw.decode(torch.autograd.forward_ad.make_dual(q, q), k, v, **given)
    with pytest.raises(ValueError, match="nested|must"):
        tw.decode(torch.nested.nested_tensor([q[0], q[1]]), k, v, **given)
    with torch.no_grad():
        loose = tw.decode(q.clone().requires_grad_(), k, v, **given)
    monkeypatch.undo()
    assert torch.equal(loose, plain) and len(decode_cache._KNOWN) == 1
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(tw.decode(q.clone(), k, v, **given), plain)
    assert torch.equal(tw.decode(q, k, v, **given), plain)


def test_what_is_compiled_is_the_operator(monkeypatch):
    torch._dynamo.reset()
    (q, k, v), given = paged()
    for _ in range(2):
        plain = tw.decode(q, k, v, **given)
    monkeypatch.setattr(decode_cache.Known, "__call__", None)
    traced = []

    def counting(graph, inputs):
        traced.append([node.target for node in graph.graph.nodes if "tilewise" in str(node.target)])
        return graph.forward

    run = torch.compile(lambda q: tw.decode(q, k, v, **given), fullgraph=True, backend=counting)
    assert torch.equal(run(q), plain) and len(traced) == len(traced[0]) == 1


def test_what_is_traced_by_torchscript_is_the_operator(backend):
    (q, k, v), given = paged()
    for _ in range(2):
        plain = tw.decode(q, k, v, **given)
    traced = torch.jit.trace(lambda q: tw.decode(q, k, v, **given), q, check_trace=False)
    assert "tilewise::decode" in str(traced.graph) and torch.equal(traced(q), plain)


def test_values_are_checked_whenever_they_are_asked_for(backend, monkeypatch):
    (q, k, v), given = paged()
    for _ in range(2):
        tw.decode(q, k, v, **given)
    assert backend.binds == 1
    bad = given | {"cache_seqlens": ints(5, 13)}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 13"):
            tw.decode(q, k, v, **bad, check=True)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 13"):
        tw.decode(q, k, v, **bad)
    monkeypatch.setenv("TILEWISE_CHECK", "0")
    tw.decode(q, k, v, **given)
    assert backend.binds == 1


def test_on_the_cpu_values_are_always_checked(backend, monkeypatch):
    monkeypatch.setattr(cache_values, "wanted", WANTED)
    (q, k, v), given = paged()
    for _ in range(2):
        tw.decode(q, k, v, **given)
    with pytest.raises(ValueError, match="cache_seqlens"):
        tw.decode(q, k, v, **given | {"cache_seqlens": ints(5, 13)})
    assert not decode_cache._KNOWN


def test_a_mask_that_holds_a_tensor_is_not_remembered(backend):
    (q, k, v), given = contiguous()
    shown = torch.ones(1, 1, 3, 12, dtype=torch.bool)
    for options in ({"mask": Dense(shown)}, {"mask": {(0, 2): Causal(), (2, 4): SlidingWindow(1, 0)}}):
        tw.decode(q, k, v, **given, **options)
    assert not decode_cache._KNOWN


def test_it_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(decode_cache, "MOST", 3)
    (q, k, v), given = paged()
    for n in range(1, 9):
        tw.decode(q, k, v, **given, scale=float(n))
        assert len(decode_cache._KNOWN) <= 3
    scales = [known.options[decode_cache.Options._fields.index("scale")] for known in decode_cache._KNOWN.values()]
    assert scales == [6.0, 7.0, 8.0], "the oldest go"


def test_ranks_are_told_apart(backend):
    """A process has one rank, but tests and servers that try things have several: what is kept for one is not another's."""
    (q, k_cache, v_cache), given = contiguous()
    lengths, (new_k, new_v) = given["cache_seqlens"], (drawn(*q.shape[:2], *x.shape[2:], seed=9) for x in (k_cache, v_cache))
    wanted = {}
    for _ in range(2):
        for share in ((0, 2, 1), (1, 2, 1), (1, 3, 1), (1, 2, 4)):
            caches = k_cache.clone(), v_cache.clone()
            words = dict(zip(("cp_rank", "cp_world", "cp_interleave"), share, strict=True)) | {"k": new_k, "v": new_v, "return_lse": True}
            found = *tw.decode(q, *caches, cache_seqlens=lengths, **words), *caches
            assert all(map(torch.equal, found, wanted.setdefault(share, found)))
        assert backend.binds == 4
    assert len({each[2].sum().item() for each in wanted.values()}) == 4


def test_options_and_tensors_are_arguments_of_decode():
    names = tw.decode.__kwdefaults__.keys() | {"q", "k_cache", "v_cache", "share"}
    names -= {f"cp_{name}" for name in Share._fields}  # which that is
    known = {"cache_seqlens" if name == "seqlens" else name for name in DecodeTensors._fields + decode_cache.Options._fields}
    assert known == names


@pytest.mark.parametrize("writes", [True, False])
def test_out_is_written_at_once_where_it_lies_apart(writes, backend):
    """And counts as written to; a backend that cannot write there gives another tensor."""
    (q, k, v), given = contiguous()
    wanted, backend.writes = tw.decode(q, k, v, **given), writes
    memory = torch.zeros(3 * q.numel(), dtype=q.dtype)
    before, behind = memory[: q.numel()].view(q.shape), memory[q.numel() : 2 * q.numel()].view(q.shape)
    q = behind.copy_(q)
    for out in (before, memory[2 * q.numel() :].view(q.shape)):
        for _ in range(2):
            version = out._version
            assert tw.decode(q, k, v, **given, out=out) is out and torch.equal(out, wanted)
            assert out._version > version
            memory[: q.numel()], memory[2 * q.numel() :] = 0.0, 0.0
    assert [out is not None for out in backend.outs] == [False] + [True] * 4


def test_out_that_meets_an_input_is_written_last(backend):
    (q, k, v), given = contiguous()
    wanted, memory = tw.decode(q, k, v, **given, out=torch.empty_like(q)), torch.zeros(2 * q.numel(), dtype=q.dtype)
    for first in (0, 8, q.numel() - 1):
        memory[: q.numel()] = q.flatten()
        mine, out = memory[: q.numel()].view(q.shape), memory[first : first + q.numel()].view(q.shape)
        assert torch.equal(tw.decode(mine, k, v, **given, out=out), wanted)
    assert [out is None for out in backend.outs] == [False] + [True] * 3
