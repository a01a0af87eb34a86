"""Which calls torch.compile leaves out of CUDA graphs (runtime/graphs.py), told of fake tensors on a GPU that need not be there."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses import FakeTensorMode

import tilewise as tw
from tilewise.runtime import append_operator, decode_operator, graphs, operator
from tilewise.sm90 import jit, prebuilt

SEEN = torch.ones(4, 4, dtype=torch.bool, device="cpu")
ENDS = torch.tensor([0, 4], dtype=torch.int32, device="cpu")
CALLS = {  # dtype, head_dim, mask, its tensors, backend, drawn: whether it reads
    "plain": (torch.bfloat16, 64, "Causal()", [], None, False, False),
    "8 bits": (torch.float8_e4m3fn, 128, "Causal()", [], None, False, False),
    "packed": (torch.float16, 64, "Unread(#0,#1,inner=Full())", [ENDS, ENDS], None, False, False),
    "by name": (torch.float16, 256, "Full()", [], "hopper", False, False),
    "fp32": (torch.float32, 64, "Causal()", [], None, False, True),
    "large heads": (torch.bfloat16, 264, "Causal()", [], None, False, True),
    "dense": (torch.bfloat16, 64, "Dense(#0)", [SEEN], None, False, True),
    "lengths": (torch.bfloat16, 64, "Documents(#0,#1,inner=Full())", [ENDS, ENDS], None, False, True),
    "portable": (torch.bfloat16, 64, "Causal()", [], "tiled", False, True),
    "dropout": (torch.bfloat16, 64, "Causal()", [], None, True, True),
}


@pytest.mark.parametrize(("dtype", "dim", "mask", "tensors", "backend", "drawn", "reads"), CALLS.values(), ids=CALLS)
def test_what_reads(dtype, dim, mask, tensors, backend, drawn, reads, monkeypatch):
    for hopper in (True, False):
        monkeypatch.setattr(graphs, "is_hopper", lambda index, hopper=hopper: hopper)
        with FakeTensorMode(allow_non_fake_inputs=True):
            q = torch.empty(1, 4, 2, dim, dtype=dtype, device="cuda")
        assert graphs.reads(q, q, mask, tensors, backend, drawn) == (reads or not hopper)
    q = torch.empty(1, 4, 2, dim, dtype=dtype, device="cpu")
    assert not graphs.reads(q, q, mask, tensors, backend, drawn)


@pytest.mark.parametrize(
    ("dim", "dtype_v", "reads"), [(64, torch.float8_e4m3fn, False), (64, torch.bfloat16, True), (72, torch.float8_e4m3fn, True)]
)
def test_what_reads_in_8_bits(dim, dtype_v, reads, monkeypatch):
    """The kernel loads rows of whole multiples of 16 bytes, and values of 8 bits."""
    monkeypatch.setattr(graphs, "is_hopper", lambda index: True)
    with FakeTensorMode():
        q, v = (torch.empty(1, 4, 2, dim, dtype=dtype, device="cuda") for dtype in (torch.int8, dtype_v))
    assert graphs.reads(q, v, "Causal()", [], None) == reads


def test_constants_are_marked_as_torch_marks_them():
    """By an attribute that a later torch may call something else."""
    theirs, own = (lambda: 0), (lambda: 0)
    torch.compiler.assume_constant_result(theirs)
    assert vars(graphs._constant(own)) == vars(theirs)


@pytest.mark.parametrize("lacking", ("", "another maker's GPU", "another GPU", "compiler and kernels"))
def test_where_there_are_kernels(lacking, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0) if lacking == "another GPU" else (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4" if lacking == "another maker's GPU" else None)  # whose MI200 has capability 9.0
    monkeypatch.setattr(jit, "why_no_compiler", lambda: ["none"] if lacking == "compiler and kernels" else [])
    monkeypatch.setattr(prebuilt, "why_not", lambda: "none")
    assert graphs.is_hopper(0) == (not lacking)
    monkeypatch.setattr(prebuilt, "why_not", lambda: "")
    assert graphs.is_hopper(0) == (lacking in ("", "compiler and kernels"))


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
def test_what_decode_reads(dim, dtype, mask, check, reads, monkeypatch):
    """Sequences that go one by one are cut by their lengths on the host."""
    monkeypatch.setattr(graphs, "is_hopper", lambda index: True)
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


@pytest.mark.parametrize("asked", ("nobody", "the call", "the environment"))
def test_values_that_are_checked_are_read(asked, monkeypatch):
    """By append, too."""
    monkeypatch.setattr(graphs, "is_hopper", lambda index: True)
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
    monkeypatch.setattr(graphs, "reads", lambda *_, **__: True)
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
