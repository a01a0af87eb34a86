"""Which calls torch.compile leaves out of CUDA graphs (runtime/graphs.py), told of fake tensors on a GPU that need not be there."""

import itertools
import sys
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses import FakeTensorMode

import tilewise as tw
from tilewise.backends.hopper import coverage
from tilewise.backends.hopper.decode import call as decode
from tilewise.backends.triton import targets
from tilewise.machine import once
from tilewise.masks import Causal, ChunkedCausal, SlidingWindow
from tilewise.problem import DecodeCall, Problem
from tilewise.runtime import append_operator, decode_operator, dispatch, graphs, operator
from tilewise.sm90 import jit, prebuilt

SEEN = torch.ones(4, 4, dtype=torch.bool, device="cpu")
ENDS = torch.tensor([0, 4], dtype=torch.int32, device="cpu")
CALLS = {  # dtype, head_dim, mask, its tensors, backend, drawn: whether it reads
    "plain": (torch.bfloat16, 64, "Causal()", [], None, False, False),
    "8 bits": (torch.float8_e4m3fn, 128, "Causal()", [], None, False, False),
    "packed": (torch.float16, 64, "DeviceDocuments(#0,#1,inner=Full())", [ENDS, ENDS], None, False, False),
    "by name": (torch.float16, 256, "Full()", [], "hopper", False, False),
    "fp32": (torch.float32, 64, "Causal()", [], None, False, True),
    "large heads": (torch.bfloat16, 264, "Causal()", [], None, False, True),
    "dense": (torch.bfloat16, 64, "Dense(#0)", [SEEN], None, False, True),
    "lengths": (torch.bfloat16, 64, "Documents(#0,#1,inner=Full())", [ENDS, ENDS], None, False, True),
    "portable": (torch.bfloat16, 64, "Causal()", [], "tiled", False, True),
    "dropout": (torch.bfloat16, 64, "Causal()", [], None, True, True),
}


@pytest.fixture
def hopper(monkeypatch):
    """Sets whether this is a machine for Hopper's kernels, and for Triton's."""

    def install(there: bool = True, triton: bool = False) -> None:
        dispatch.reasons.cache_clear()
        dispatch.choose.cache_clear()
        monkeypatch.setattr(jit, "why_no_compiler", lambda: [])
        monkeypatch.setattr(jit, "why_not_here", lambda capability: [] if there else ["it is elsewhere"])
        monkeypatch.setattr(targets, "why_not", lambda capability: "" if triton else "it is elsewhere")

    yield install
    dispatch.reasons.cache_clear()
    dispatch.choose.cache_clear()


def operands(q, v, mask="Causal()", tensors=(), backend=None, drawn=False, **fields):
    rng = torch.zeros(2, dtype=torch.int64, device="cpu") if drawn else None
    given = dict.fromkeys(operator.Operands._fields, False) | dict.fromkeys(operator.Operands._fields[: operator.TENSORS])
    given |= {"scale": None, "softcap": 0.0, "precision": None, "out_dtype": None}
    return operator.Operands(
        **given | {"q": q, "k": q, "v": v, "mask": mask, "mask_tensors": [*tensors], "backend": backend, "rng": rng} | fields
    )


@pytest.mark.parametrize(("dtype", "dim", "mask", "tensors", "backend", "drawn", "reads"), CALLS.values(), ids=CALLS)
def test_what_reads(dtype, dim, mask, tensors, backend, drawn, reads, hopper):
    for there in (True, False):
        hopper(there)
        with FakeTensorMode(allow_non_fake_inputs=True):
            q = torch.empty(1, 4, 2, dim, dtype=dtype, device="cuda")
            assert graphs.reads(operands(q, q, mask, tensors, backend, drawn)) == (reads or not there)
    q = torch.empty(1, 4, 2, dim, dtype=dtype, device="cpu")
    assert not graphs.reads(operands(q, q, mask, tensors, backend, drawn))


@pytest.mark.parametrize(
    ("name", "reads"), [(name, each[-1] and name not in ("fp32", "large heads")) for name, each in CALLS.items() if name != "by name"]
)
def test_what_triton_reads(name, reads, hopper):
    """What needs reading on Hopper, and nothing of what Hopper has no kernels for."""
    dtype, dim, mask, tensors, backend, drawn, _ = CALLS[name]
    hopper(False, triton=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 4, 2, dim, dtype=dtype, device="cuda")
        assert graphs.reads(operands(q, q, mask, tensors, backend, drawn)) == reads


@pytest.mark.parametrize(
    ("dim", "dtype_v", "reads"), [(64, torch.float8_e4m3fn, False), (64, torch.bfloat16, True), (72, torch.float8_e4m3fn, True)]
)
def test_what_reads_in_8_bits(dim, dtype_v, reads, hopper):
    """The kernel loads rows of whole multiples of 16 bytes, and values of 8 bits."""
    hopper()
    with FakeTensorMode():
        q, v = (torch.empty(1, 4, 2, dim, dtype=dtype, device="cuda") for dtype in (torch.int8, dtype_v))
    assert graphs.reads(operands(q, v)) == reads


def test_every_field_may_decide_who_computes(hopper, monkeypatch):
    """Also one that no coverage depends on today; a size is a number where torch.compile has a symbol."""
    hopper()
    asked = []
    monkeypatch.setattr(graphs, "choose", lambda problem, name, **_: asked.append(problem) or dispatch.named("hopper"))
    given = {"softcap": 2.0, "grad": True, "deterministic": True, "row_max": True, "precision": "e4m3", "out_dtype": torch.float32}
    with FakeTensorMode():
        q, v = (torch.empty(1, 4, 2, dim, dtype=torch.float16, device="cuda") for dim in (64, 48))
        assert not graphs.reads(operands(q, v, "Full()", bias=q, alibi_slopes=q, sink=q, **given))
    of_heads = {"device": "cuda", "dtype": torch.float16, "head_dim": 64, "head_dim_v": 48, "group": 1, "mask": "full"}
    same = {"k_dtype": torch.float16, "v_dtype": torch.float16, "capability": asked[0].capability}
    assert asked == [Problem(**of_heads, **same, **given | dict.fromkeys(("softcap", "bias", "alibi", "sink"), True))]
    torch._dynamo.reset()
    ask = torch.compile(
        lambda q: graphs._backend_reads(None, None, "Full()", **graphs._heads(q, q, q)), dynamic=True, fullgraph=True, backend="eager"
    )
    assert [ask(torch.empty(1, 4, 2, dim, dtype=torch.float16, device="cpu")) for dim in (64, 256, 264)] == [False, False, True]


def test_constants_are_marked_as_torch_marks_them():
    """By an attribute that a later torch may call something else."""
    theirs, own = (lambda: 0), (lambda: 0)
    torch.compiler.assume_constant_result(theirs)
    assert vars(graphs._constant(own)) == vars(theirs)


@pytest.mark.parametrize("lacking", ("", "another maker's GPU", "another GPU", "compiler and kernels"))
def test_where_there_are_kernels(lacking, hopper, monkeypatch):
    here = jit.why_not_here
    hopper()
    monkeypatch.setattr(jit, "why_not_here", here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0) if lacking == "another GPU" else (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4" if lacking == "another maker's GPU" else None)  # whose MI200 has capability 9.0
    monkeypatch.setattr(jit, "why_no_compiler", lambda: ["none"] if lacking == "compiler and kernels" else [])
    monkeypatch.setattr(prebuilt, "why_not", lambda: "none")
    monkeypatch.setattr(once, "_said", set())
    ask = lambda: graphs._backend_reads(0, None, "Full()", dtype=torch.float16, head_dim=64, head_dim_v=64)  # noqa: E731
    with pytest.warns(RuntimeWarning, match="in place of 'hopper'") if lacking == "compiler and kernels" else nullcontext():
        assert ask() == bool(lacking)
    dispatch.reasons.cache_clear()
    dispatch.choose.cache_clear()
    monkeypatch.setattr(prebuilt, "why_not", lambda: "")
    monkeypatch.setattr(prebuilt, "entry", lambda *kernel: True)
    assert ask() == (lacking not in ("", "compiler and kernels"))


STEPS = {  # head_dim, dtype of the caches, mask, checked: whether decode reads
    "plain": (64, torch.bfloat16, None, False, False),
    "window": (64, torch.bfloat16, tw.SlidingWindow(3, 0), False, False),
    "8 bits": (48, torch.int8, None, False, False),
    "checked": (64, torch.bfloat16, None, True, True),
    "rows that nobody loads": (20, torch.bfloat16, None, False, True),
    "nor of 8 bits": (24, torch.int8, None, False, True),
    "chunks": (64, torch.bfloat16, tw.ChunkedCausal(16), False, True),
    "top left": (64, torch.bfloat16, tw.Causal("top_left"), False, True),
}


@pytest.mark.parametrize(("dim", "dtype", "mask", "check", "reads"), STEPS.values(), ids=STEPS)
def test_what_decode_reads(dim, dtype, mask, check, reads, hopper, monkeypatch):
    """Sequences that go one by one are cut by their lengths on the host."""
    hopper()
    monkeypatch.setattr(operator, "traced", lambda: True)
    ran = []
    monkeypatch.setattr(decode_operator, "operator", lambda *_: ran.append(False) or (q, q))
    monkeypatch.setattr(decode_operator, "operator_reading", lambda *_: ran.append(True) or (q, q))
    with FakeTensorMode():
        q = torch.empty(2, 1, 2, dim, dtype=torch.bfloat16, device="cuda")
        caches = [torch.empty(2, 40, 2, dim, dtype=dtype, device="cuda") for _ in range(2)]
        lengths = torch.empty(2, dtype=torch.int32, device="cuda")
        tw.decode(q, *caches, cache_seqlens=lengths, mask=mask, check=check)
    assert ran == [reads]


LATENT = {  # head_dim, head_dim_v, tokens of a page, whether values are the first columns of keys: whether decode reads
    "DeepSeek's": (576, 512, None, True, False),
    "MiniCPM's": (320, 256, 64, True, False),
    "caches apart": (576, 512, None, False, True),
    "pages that nobody loads": (576, 512, 12, True, True),
    "rows that nobody loads": (572, 512, None, True, True),
    "too large": (640, 512, None, True, True),
}


@pytest.mark.parametrize(("dim", "dim_v", "page", "in_keys", "reads"), LATENT.values(), ids=LATENT)
def test_what_decode_reads_of_latent_caches(dim, dim_v, page, in_keys, reads, hopper, monkeypatch):
    hopper()
    monkeypatch.setattr(operator, "traced", lambda: True)
    ran = []
    monkeypatch.setattr(decode_operator, "operator", lambda *_: ran.append(False) or (q, q))
    monkeypatch.setattr(decode_operator, "operator_reading", lambda *_: ran.append(True) or (q, q))
    with FakeTensorMode():
        q, keys = (torch.empty(2, n, 1, dim, dtype=torch.bfloat16, device="cuda") for n in (1, page or 40))
        rows = dim if in_keys else dim_v  # as of k_cache[..., :dim_v], of which a torch without CUDA makes no fake
        values = torch.empty_strided((*keys.shape[:3], dim_v), (keys.shape[1] * rows, rows, rows, 1), dtype=keys.dtype, device="cuda")
        lengths, table = (torch.empty(*shape, dtype=torch.int32, device="cuda") for shape in ((2,), (2, 3)))
        tw.decode(q, keys, values, cache_seqlens=lengths, page_table=table if page else None)
    assert ran == [reads]


def test_decode_cuts_what_its_kernels_do_not_cover(monkeypatch):
    """Coverage without tensors agrees with what the call itself is told."""
    monkeypatch.setattr(jit, "why_no_compiler", lambda: [])
    new = partial(torch.empty, device="meta")
    masks = Causal(), Causal("top_left"), SlidingWindow(3, 0), ChunkedCausal(16)
    dims = itertools.product((20, 24, 64, 256, 320, 572, 576, 640), (24, 64, 256, 512))
    answers = set()
    for dim, dim_v, cached, page, in_keys, mask in [
        (*each, *rest)
        for each in dims
        for rest in itertools.product((torch.bfloat16, torch.int8), (None, 12, 64), (False, True), masks)
        if not rest[2] or each[1] < each[0]
    ]:
        keys = new(2, page or 40, 1, dim, dtype=cached)
        values = keys[..., :dim_v] if in_keys else new(2, page or 40, 1, dim_v, dtype=cached)
        of_call = {"q": new(2, 1, 1, dim, dtype=torch.bfloat16), "k_cache": keys, "v_cache": values, "mask": mask, "scale": 1.0}
        lengths = {"seqlens": new(2, dtype=torch.int32), "page_table": new(2, 3, dtype=torch.int32) if page else None}
        none = dict.fromkeys(("cu_seqlens_q", "cache_batch_idx", "leftpad", "tree", "split"))
        call = DecodeCall(**of_call, **lengths, **none, max_seqlen_q=1, shared_prefix=0)
        problem = Problem(
            device="cuda", dtype=torch.bfloat16, k_dtype=cached, v_dtype=cached, head_dim=dim, head_dim_v=dim_v, group=1, mask=mask.kind
        )
        answers.add(found := coverage.cuts_sequences(problem, mask, page, in_keys))
        assert found == bool(decode.why_not(call)), (dim, dim_v, cached, page, in_keys, mask)
    assert answers == {False, True}


@pytest.mark.parametrize("asked", ("nobody", "the call", "the environment"))
def test_values_that_are_checked_are_read(asked, hopper, monkeypatch):
    """By append, too."""
    hopper()
    monkeypatch.setattr(operator, "traced", lambda: True)
    monkeypatch.setenv("TILEWISE_CHECK", "1" if asked == "the environment" else "0")
    ran, check = [], asked == "the call"
    for module in (decode_operator, append_operator):
        monkeypatch.setattr(module, "operator", lambda *_: ran.append(False) or (q, q))
        monkeypatch.setattr(module, "operator_reading", lambda *_: ran.append(True) or (q, q))
    with FakeTensorMode():
        q, cache, other = (torch.empty(2, n, 2, 64, dtype=torch.bfloat16, device="cuda") for n in (1, 40, 40))
        lengths = torch.empty(2, dtype=torch.int32, device="cuda")
        tw.append(cache, other, q, q, cache_seqlens=lengths, check=check)
        tw.decode(q, cache, other, cache_seqlens=lengths, check=check)
    assert ran == [asked != "nobody"] * 2


def test_what_is_left_out():
    for op, twin in (
        (operator.forward, operator.forward_reading),
        (operator.backward, operator.backward_reading),
        (decode_operator.operator, decode_operator.operator_reading),
        (append_operator.operator, append_operator.operator_reading),
    ):
        assert torch.Tag.cudagraph_unsafe in twin._opoverload.tags
        assert torch.Tag.cudagraph_unsafe not in op._opoverload.tags


def programs(monkeypatch, call, *leaves):
    """The names of our operators in what torch.compile makes of a call, forward and backward, as if it could not be in a CUDA graph."""
    for name in ("reads", "decode_reads"):
        monkeypatch.setattr(graphs, name, lambda *_: True)
    names = set()

    def note(graph, _):
        names.update(str(node.target) for node in graph.graph.nodes if "tilewise" in str(node.target))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    out = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=note))(*leaves)
    return names, out


def test_it_is_the_same_but_for_the_name(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 2, 16, generator=draw, dtype=torch.float32, device="cpu").requires_grad_() for _ in range(3))
    seen = torch.rand(9, 9, generator=draw, device="cpu") < 0.5
    want = tw.attention(q, k, v, mask=tw.Dense(seen))
    grads = torch.autograd.grad(want.square().sum(), (q, k, v))
    names, found = programs(monkeypatch, lambda *x: tw.attention(*x, mask=tw.Dense(seen)), q, k, v)
    assert torch.equal(found, want)
    assert all(map(torch.equal, torch.autograd.grad(found.square().sum(), (q, k, v)), grads))
    assert names == {"tilewise.attention_forward_reading.default", "tilewise.attention_backward_reading.default"}
    lengths = torch.tensor([5, 9], dtype=torch.int32, device="cpu")
    names, found = programs(monkeypatch, lambda *x: tw.decode(*x, cache_seqlens=lengths), *(x.detach() for x in (q[:, :1], k, v)))
    assert torch.equal(found, tw.decode(q[:, :1].detach(), k.detach(), v.detach(), cache_seqlens=lengths))
    assert names == {"tilewise.decode_reading.default"}


def test_what_was_read_before_is_read_again():
    """A graph that is replayed writes to a tensor without torch's operators."""
    q = torch.randn(1, 4, 1, 8, dtype=torch.float32, device="cpu")
    seen = torch.eye(4, dtype=torch.bool, device="cpu")
    given = operator.Operands(
        q, q, q, *[None] * 8, [seen], "Dense(#0)", None, 0.0, 0.0, False, False, False, False, None, None, None
    )  # fmt: skip
    assert torch.equal(operator.forward_reading(*given)[0], q)
    seen.numpy()[:] = True  # which torch does not count
    torch.testing.assert_close(operator.forward_reading(*given)[0], tw.attention(q, q, q))


def test_the_run_before_a_capture_is_another_threads(monkeypatch):
    """It has no gradients of its own, and its errors are the caller's."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 2, 16, generator=draw, dtype=torch.float32, device="cpu").requires_grad_() for _ in range(3))

    def results() -> list[torch.Tensor]:
        o = torch.compile(lambda *x: tw.attention(*x, causal=True), fullgraph=True, backend="aot_eager")(q, k, v)
        caches = [torch.zeros(2, 12, 2, 16, dtype=torch.float32, device="cpu") for _ in range(2)]
        lengths = torch.tensor([1, 2], dtype=torch.int32, device="cpu")
        with torch.no_grad():
            step = torch.compile(lambda *x: tw.decode(*x, cache_seqlens=lengths, k=k, v=v), fullgraph=True, backend="aot_eager")(q, *caches)
        return [o, step, *caches, *torch.autograd.grad(o.square().sum(), (q, k, v))]

    want, threads = results(), set()
    kernel = operator.choose

    def noted(*given, **more):
        threads.add(threading.current_thread().name)
        return kernel(*given, **more)

    monkeypatch.setattr(graphs, "preparing", lambda device: True)
    for module in (operator, decode_operator):
        monkeypatch.setattr(module, "choose", noted)
    assert all(map(torch.equal, results(), want))
    assert len(threads) == 1 and threads.pop().startswith("tilewise")

    def fails(given: tuple) -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        graphs.run_outside_pool(fails, (q,))


def test_the_other_thread_infers_where_the_caller_does(monkeypatch):
    """Else it could not write caches that were made so."""
    monkeypatch.setattr(graphs, "preparing", lambda device: True)
    with torch.inference_mode():
        caches = [torch.zeros(1, 5, 1, 8, dtype=torch.float32, device="cpu") for _ in range(2)]
        new = torch.ones(1, 2, 1, 8, dtype=torch.float32, device="cpu")
        append = torch.compile(lambda *x: tw.append(*x, new, new, cache_seqlens=1), fullgraph=True, backend="aot_eager")
        append(*caches)
    assert all(x[:, 1:3].eq(1.0).all() and x.sum() == 16 for x in caches)


def test_a_thread_of_the_callers_own(monkeypatch):
    """Some versions of torch have managers of graphs in their own threads alone, and raise an error in others."""

    def no_manager(*given, **options):
        raise AssertionError

    trees = SimpleNamespace(local=threading.local(), get_manager=no_manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found = []
    thread = threading.Thread(target=lambda: found.append(graphs.preparing(torch.device("cuda", 0))))
    thread.start()
    thread.join()
    assert found == [False]
    trees.local.tree_manager_containers, trees.get_manager = {}, lambda *_, **__: SimpleNamespace(in_warmup=True)
    assert graphs.preparing(torch.device("cuda", 0))
