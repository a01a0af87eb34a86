"""Keys that differ by batch entry: what `Padding` shows, when it reads its tensors, and how little it costs."""

import pytest
import torch

import tilewise as tw
from tilewise.masks import Bands, Causal, Dense, Padding, SlidingWindow, parse
from tilewise.testing import tolerance
from tilewise.testing.cases import Case, make

LENGTHS, START = [37, 0, 12, 30], [0, 5, 3, 7]
BATCH, ROWS, KEYS = 4, 25, 37


def shown(lengths, start) -> torch.Tensor:
    """bool (batch, 1, 1, KEYS)"""
    start = torch.tensor([0] * BATCH if start is None else start)
    end = torch.full((BATCH,), KEYS) if lengths is None else start + torch.tensor(lengths)
    keys = torch.arange(KEYS)
    return ((keys >= start[:, None]) & (keys < end[:, None]))[:, None, None]


@pytest.mark.parametrize("lengths, start", [(LENGTHS, START), (LENGTHS, None), (None, START)], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.int32, torch.int64], ids=str)
def test_it_is_an_interval_of_keys_an_entry(lengths, start, dtype):
    given = [x if x is None or dtype is None else torch.tensor(x, dtype=dtype) for x in (lengths, start)]
    mask, want = Padding(*given), shown(lengths, start).expand(BATCH, 1, ROWS, KEYS)
    assert mask.kind == "runs" and mask.extent == (BATCH, 1) and mask == Padding(*given) and hash(mask) == hash(Padding(*given))
    assert torch.equal(mask.dense(ROWS, KEYS), want)
    assert torch.equal((SlidingWindow(9, 2) & mask).dense(ROWS, KEYS), want & SlidingWindow(9, 2).dense(ROWS, KEYS))
    assert torch.equal((~mask).dense(ROWS, KEYS), ~want)
    assert mask.pairs(ROWS, KEYS, BATCH, 3) == 3 * int(want.sum())
    tensors = []
    text = mask.text(tensors)
    assert parse(text, tensors) == mask and len(tensors) == (0 if dtype is None else 2 - given.count(None))
    assert all(isinstance(plane.region, Bands) for plane in mask.planes(ROWS, KEYS, BATCH, 2))


@pytest.mark.parametrize("inner", [Causal(), Causal("top_left"), SlidingWindow(3, 1)], ids=repr)
def test_an_inner_mask_lies_among_the_keys_of_its_entry(inner):
    found = Padding(torch.tensor(LENGTHS), torch.tensor(START), inner).dense(ROWS, KEYS)
    for b, (length, start) in enumerate(zip(LENGTHS, START, strict=True)):
        want = torch.zeros(ROWS, KEYS, dtype=torch.bool)
        want[:, start : start + length] = inner.dense(ROWS, length)
        assert torch.equal(found[b, 0], want)


def test_entries_with_the_same_keys_share_a_plane():
    planes = (Padding([5, 5, 3, 5]) & Causal()).planes(9, 9, 4, 2)
    assert [plane.batch for plane in planes] == [range(0, 2), range(2, 3), range(3, 4)] and planes[0].region is planes[2].region


def test_one_entry_stands_for_all():
    assert torch.equal((Padding([5]) & Causal()).dense(9, 9), tw.FirstKeys(5).dense(9, 9) & Causal().dense(9, 9))
    assert Padding([5]).planes(9, 9, 3, 2)[0].batch == range(3)


def test_tensors_are_read_when_needed_and_after_a_write(monkeypatch):
    lengths = torch.tensor([3, 9])
    reads = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x) or read(x))
    mask = Padding(lengths)
    assert not reads
    assert mask.planes(4, 9, 2)[0].region.pairs() == 12 and Padding(lengths).planes(4, 9, 2) and len(reads) == 1
    lengths[0] = 5
    assert mask.planes(4, 9, 2)[0].region.pairs() == 20 and len(reads) == 2
    lengths[1] = 10
    with pytest.raises(tw.ShapeError, match=r"batch entry 1 has the keys 0 to 10"):
        mask.planes(4, 9, 2)


def test_inference_tensors_are_read_each_time():
    with torch.inference_mode():
        lengths = torch.tensor([3, 9])
        first = Padding(lengths).planes(4, 9, 2)[0].region.pairs()
        lengths[0] = 5
        assert (first, Padding(lengths).planes(4, 9, 2)[0].region.pairs()) == (12, 20)


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_attention_on_padded_batches(backend):
    """What is hidden may hold NaN; gradients too, by the oracle with a dense mask."""
    call = make(Case(batch=BATCH, seqlen_q=ROWS, seqlen_k=KEYS, mask=Causal() & Dense(shown(LENGTHS, START)), head_dim=24))
    k, v = (x.masked_fill(~shown(LENGTHS, START)[:, 0, 0, :, None, None], torch.nan) for x in (call.k, call.v))
    leaves = [x.clone().requires_grad_() for x in (call.q, k, v)]
    mask = Padding(torch.tensor(LENGTHS), torch.tensor(START))
    o, lse = tw.attention(*leaves, causal=True, mask=mask, backend=backend, return_lse=True)
    tolerance.check_outputs(call, o.detach(), lse.detach())
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(o, leaves, d_o)
    tolerance.check_gradients(call, tw.problem.Gradients(*grads, None, None), d_o)


def test_lengths_may_change_in_a_compiled_call():
    q, k, v = (torch.randn(2, n, 2, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 7, 8))
    v = v[:, :7]
    compiled = torch.compile(lambda lengths: tw.attention(q, k, v, causal=True, mask=Padding(lengths)), fullgraph=True, backend="aot_eager")
    for lengths in ([7, 3], [1, 5]):
        want = tw.attention(q, k, v, causal=True, mask=Padding(lengths))
        assert torch.equal(compiled(torch.tensor(lengths)), want)


@pytest.mark.parametrize("given", [[3, 7], torch.tensor([3, 7])], ids=["list", "tensor"])
def test_each_mapped_batch_has_the_same_padding(given):
    q, k, v = torch.randn(3, 3, 2, 7, 2, 8, generator=torch.Generator().manual_seed(0))
    found = torch.vmap(lambda q, k, v: tw.attention(q, k, v, causal=True, mask=Padding(given)))(q, k, v)
    for n in range(3):
        torch.testing.assert_close(found[n], tw.attention(q[n], k[n], v[n], causal=True, mask=Padding(given)))
