"""`out=`: O is written where the caller wants it, on every way of a call, and refused where it cannot be."""

import pytest
import torch

import tilewise as tw
from tilewise.errors import ShapeError
from tilewise.testing import poison

HEADS, DIM = 4, 8
CU = torch.tensor([0, 4, 4, 10], dtype=torch.int32)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "bias": {"bias": torch.ones(HEADS, 1, 1)},
    "padding": {"mask": tw.Padding(torch.tensor([3, 5]))},
    "one head dim more": {"scale": 0.3},
}


def rows(*lead: int, seed: int = 0, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    return torch.randn(*lead, heads, dim, generator=torch.Generator().manual_seed(seed))


def places(shape):
    """Memory for a result: contiguous, with other heads between, with rows in another order."""
    yield torch.full(shape, torch.nan)
    yield torch.full((*shape[:-2], shape[-2] + 1, shape[-1] + 3), torch.nan)[..., 1:, :-3]
    if len(shape) == 4:
        yield torch.full((shape[0], shape[2], shape[1], shape[3]), torch.nan).transpose(1, 2)


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("options", OPTIONS)
def test_attention_writes_there(options, backend):
    q, k, v = rows(2, 5), rows(2, 5, seed=1), rows(2, 5, seed=2, dim=9 if options == "one head dim more" else DIM)
    given = OPTIONS[options] | {"backend": backend}
    want, want_lse = tw.attention(q, k, v, **given, return_lse=True)
    for out in places(want.shape):
        base = out._base if out._base is not None else out
        kept = base.isnan().sum()
        with poison.memory():
            found, lse = tw.attention(q, k, v, **given, return_lse=True, out=out)
        assert found is out and torch.equal(out, want) and torch.equal(lse, want_lse)
        assert base.isnan().sum() == kept - out.numel()  # nothing else is written


def test_the_cpu_kernel_needs_no_other_memory(monkeypatch):
    q, out = rows(1, 5), torch.full((1, 5, HEADS, DIM), torch.nan)
    copied = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *arguments: copied.append(arguments))
    tw.attention(q, q, q, out=out, backend="cpu")
    assert not copied and out.isfinite().all()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"alibi_slopes": torch.rand(3, HEADS)}, {"seqused_k": torch.tensor([2, 0, 6])}], ids=list
)
def test_packed_documents_write_there(options):
    q = rows(12)
    want = tw.attention_varlen(q, q, q, CU, CU, **options)
    for out in places(want.shape):
        with poison.memory():
            assert tw.attention_varlen(q, q, q, CU, CU, **options, out=out) is out
        assert torch.equal(out, want)


def test_a_slot_of_the_projection_it_comes_from():
    given = torch.randn(2, 5, 4, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    q, k, v, out = given.unbind(2)
    want = tw.attention(q, k, v)
    assert torch.equal(tw.attention(q, k, v, out=out), want) and torch.equal(given[:, :, 3], want)


def test_repeated_and_compiled_calls():
    q, out = rows(2, 5), torch.empty(2, 5, HEADS, DIM)
    for _ in range(3):  # cached calls as well
        want = tw.attention(q, q, q)
        assert torch.equal(tw.attention(q, q, q, out=out.fill_(torch.nan)), want)
    compiled = torch.compile(lambda out: tw.attention(q, q, q, out=out, return_lse=True)[0] * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(out.fill_(torch.nan)), 2 * want) and torch.equal(out, want)


def test_fake_tensors():
    with torch._subclasses.FakeTensorMode() as mode:
        q, out = (mode.from_tensor(x) for x in (rows(2, 5), torch.empty(2, 5, HEADS, DIM)))
        assert tw.attention(q, q, q, out=out) is out


Q = rows(2, 5)
BAD = {
    "no tensor": (lambda: 3, ShapeError, "out must be a torch.Tensor of shape"),
    "dims": (lambda: torch.empty(5, HEADS, DIM), ShapeError, r"out must have 4 dimensions"),
    "shape": (lambda: torch.empty(2, 5, HEADS, 9), ShapeError, r"out must be \(2, 5, 4, 8\) torch.float32 on cpu, as .* got \(2, 5, 4, 9\)"),
    "dtype": (lambda: torch.empty(2, 5, HEADS, DIM, dtype=torch.half), ShapeError, r"got \(2, 5, 4, 8\) torch.float16 on cpu; allocate it"),
    "meta": (lambda: torch.empty(2, 5, HEADS, DIM, device="meta"), ShapeError, "out is on the meta device"),
    "strides": (lambda: torch.empty(2, 5, DIM, HEADS).mT, ShapeError, r"out has strides \(160, 32, 1, 4\) .* last dimension must be contiguous"),
    "expanded": (lambda: torch.empty(1, 5, HEADS, DIM).expand(2, -1, -1, -1), ShapeError, "no two numbers may share memory"),
    "an input": (lambda: Q, ShapeError, "out shares memory with q, which is read while it is written"),
    "half an input": (lambda: torch.as_strided(Q, (2, 5, HEADS, DIM), (0, 32, 8, 1)), ShapeError, "share memory"),
    "wants a gradient": (lambda: torch.empty(2, 5, HEADS, DIM, requires_grad=True), ValueError, "it requires grad itself; call under torch.no_grad"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_places(case):
    make, kind, words = BAD[case]
    with pytest.raises(kind, match=words):
        tw.attention(Q, rows(2, 5, seed=1), rows(2, 5, seed=2), out=make())


def test_shifted_into_an_input():
    memory = torch.randn(2 * Q.numel(), generator=torch.Generator().manual_seed(0))
    q, out = (memory[at : at + Q.numel()].view(Q.shape) for at in (0, Q.numel() - 1))
    with pytest.raises(ShapeError, match="out shares memory with q"):
        tw.attention(q, Q, Q, out=out)
    end = memory[Q.numel() :].view(Q.shape)
    assert tw.attention(q, Q, Q, out=end) is end


def test_no_gradient_through_it():
    q = rows(2, 5).requires_grad_()
    with pytest.raises(
        ValueError, match=r"out takes no part in a gradient, but an input requires grad; call under torch.no_grad\(\), or leave out="
    ):
        tw.attention(q, q, q, out=torch.empty(q.shape))
    with torch.no_grad():
        tw.attention(q, q, q, out=torch.empty(q.shape))
