"""Bound calls of decode: what they keep, where they write and what they leave to each call, with kernels and streams that need no GPU."""

import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import append_problems
import pytest
import torch
from decode_problems import DecodeCase, made, with_eight_bits

from tilewise.backends.hopper import short
from tilewise.backends.hopper.decode import append_call, prefix
from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.forward import plan
from tilewise.sm90 import jit

CASES = {
    "plain": DecodeCase(lengths=(5, 9)),
    "ragged": DecodeCase(lengths=(5, 9), queries=(2, 1), page=16),
    "slopes and a sink": DecodeCase(lengths=(5, 9), alibi=True, sink=True),
}


class Gpu:
    """One device, whose stream and whether it captures the test sets; kernels note what they get, and write 1 to O and 2 to LSE."""

    def __init__(self) -> None:
        self.stream, self.captures, self.launches = 0, False, []

    def compiled(self, launch, arguments, config):
        return self.append if launch == append_call.LAUNCH else self.decode

    def decode(self, tensors, lengths, work, window, prior, scores) -> None:
        q, k, v, o, lse, *_ = tensors
        if any(not jit.strided(x) or x.data_ptr() % 16 for x in (q, k, v, o)):
            raise ValueError("Misaligned Tensor data on argument #0")
        self.launches.append(SimpleNamespace(tensors=tensors, lengths=lengths, work=work, prior=prior, scores=scores))
        o.fill_(1.0)
        lse.fill_(2.0)

    def append(self, new, places, turn) -> None:
        self.launches.append(SimpleNamespace(places=places))
        torch.add(places[0], 1, out=places[4])


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    found = Gpu()
    monkeypatch.setattr(short, "current_device", lambda: None)
    monkeypatch.setattr(short, "current_stream", lambda device: found.stream)
    monkeypatch.setattr(short, "capturing", lambda: found.captures)
    monkeypatch.setattr(short, "as_operand", lambda bundle, on_gpu: bundle)
    monkeypatch.setattr(short, "_SHARED", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=found.stream))
    monkeypatch.setattr(plan, "num_sms", lambda device: 132)
    monkeypatch.setattr(jit, "compiled", found.compiled)
    return found


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_each_calls_own(case, with_lse, gpu):
    call = made(case)
    run = decoding.bind(call)
    (one, first), (two, second) = (run(call.tensors, call.seqlens, None, with_lse) for _ in range(2))
    assert one.shape == (*call.q.shape[:-1], 64) and one.is_contiguous() and (one == 1.0).all() and one.data_ptr() != two.data_ptr()
    if with_lse:
        heads, rows = call.q.shape[-2], call.q.shape[:-2]
        assert first.shape == ((heads, *rows) if len(rows) == 1 else (rows[0], heads, rows[1])) and (first == second).all()
        assert first.data_ptr() != second.data_ptr() and first.dtype == torch.float32 and (first == 2.0).all()
    else:
        assert first.data_ptr() == second.data_ptr()


def test_slopes_and_the_sink_are_each_calls_own(gpu):
    call = made(CASES["slopes and a sink"])
    run, other = decoding.bind(call), replace(call, alibi_slopes=call.alibi_slopes + 1.0, sink=call.sink.double() + 1.0)
    for each in (call, other):
        run(each.tensors, each.seqlens)
        scores = gpu.launches[-1].scores
        assert torch.equal(scores.slopes, each.alibi_slopes) and torch.equal(scores.sink, each.sink.float())


def test_behind_a_prefix_a_launch_waits_at_once_only_for_copies(gpu, monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    call = made(replace(CASES["plain"], prefix=4))
    late = torch.empty(call.q.numel() + 1, dtype=call.q.dtype)[1:].view(call.q.shape).copy_(call.q)
    for each, alone in ((call, 1), (replace(call, q=late), 0), (replace(call, sink=torch.zeros(4)), 0)):
        gpu.launches.clear()
        decoding.bind(each)(each.tensors, each.seqlens)
        first, second = gpu.launches
        assert first.prior is None and first.tensors[0].shape[:2] == (1, 2) and second.tensors[0].shape[:2] == (2, 1)
        assert (second.prior.early, second.prior.tokens) == (alone, 4) and second.prior.O.data_ptr() == first.tensors[3].data_ptr()


def test_a_prefix_has_its_length_from_the_calls_own_stream(gpu, monkeypatch):
    """What another stream was told to fill may not be filled yet. A graph takes what there is, or fills its own."""
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    monkeypatch.setattr(prefix, "_LENGTHS", {})
    call = made(replace(CASES["plain"], prefix=4))
    found = []
    for gpu.stream, gpu.captures in ((5, True), (0, False), (7, False), (0, False), (7, True)):
        gpu.launches.clear()
        decoding.bind(call)(call.tensors, call.seqlens)
        first, _ = gpu.launches
        found.append(first.lengths[0])
        assert found[-1].tolist() == [4]
    graph, one, other, *rest = (x.data_ptr() for x in found)
    assert len({graph, one, other}) == 3 and rest[0] == one and rest[1] in (one, other)


@pytest.mark.parametrize("per", [(None, "head"), ("all", "sequence"), ("token", "token")])
def test_scales_of_a_cache_are_each_calls_own(per, gpu):
    plain = made(CASES["plain"])
    call, other = (with_eight_bits(plain, (torch.float8_e4m3fn, torch.int8), per, seed)[0] for seed in (0, 1))
    run = decoding.bind(call)
    for each in (call, other):
        run(each.tensors, each.seqlens)
        *_, k_scale, v_scale = gpu.launches[-1].tensors
        for mine, theirs in ((k_scale, each.k_scale), (v_scale, each.v_scale)):
            assert mine is theirs is None or torch.equal(mine.nan_to_num(), theirs.expand(mine.shape).nan_to_num())
        assert all(x.dtype == torch.int8 for x in gpu.launches[-1].tensors[1:3])


@pytest.mark.parametrize("name", ["plain", "ragged"])
def test_out_is_written_where_the_kernel_can(name, gpu):
    call = made(CASES[name])
    run, whole = decoding.bind(call), torch.zeros(2 * call.q.numel() + 8, dtype=call.q.dtype)
    plain, apart = whole[: call.q.numel()].view(call.q.shape), whole[: 2 * call.q.numel()].view(*call.q.shape[:-1], 128)[..., :64]
    for out in (plain, apart):
        whole.zero_()
        assert run(call.tensors, call.seqlens, out)[0] is out and (out == 1.0).all()
    whole.zero_()
    late, count = whole[1 : 1 + call.q.numel()].view(call.q.shape), len(gpu.launches)
    o, _ = run(call.tensors, call.seqlens, late)
    assert o is not late and o.shape == late.shape and (o == 1.0).all() and not whole.any() and len(gpu.launches) == count + 1


def test_what_a_stream_keeps_and_a_graph_gets(gpu):
    call = made(CASES["plain"])
    run = decoding.bind(call)
    for gpu.stream, gpu.captures in ((0, False), (0, False), (7, False), (7, True), (7, True), (7, False)):
        run(call.tensors, call.seqlens, with_lse=False)
    first, second, other, captured, another, last = ((x.tensors[4].data_ptr(), x.work.arrivals.data_ptr()) for x in gpu.launches)
    assert first == second and other == last
    assert len({x for pair in (first, other, captured, another) for x in pair}) == 8


def test_an_lse_that_nobody_wants_lies_where_others_do(gpu):
    """Of all layouts of a stream: no more memory than for the largest, twice over."""
    for batch in (9, 1, 5):
        call = made(DecodeCase(lengths=(5,) * batch))
        decoding.bind(call)(call.tensors, call.seqlens, with_lse=False)
    large, *small = (x.tensors[4] for x in gpu.launches)
    assert all(x.data_ptr() == large.data_ptr() and x.is_contiguous() for x in small) and len(short._SHARED) == 1


def test_nothing_of_a_call_is_held(gpu):
    call = made(CASES["slopes and a sink"])
    run = decoding.bind(call)
    run(call.tensors, call.seqlens)
    held = [weakref.ref(x) for x in (call.q, call.k_cache, call.v_cache, call.seqlens, call.alibi_slopes, call.sink)]
    gpu.launches.clear()
    del call
    assert callable(run) and not any(ref() is not None for ref in held)


def test_lengths_behind_new_tokens_lie_where_the_streams_last_ones_did(gpu):
    call = append_problems.made(append_problems.AppendCase(lengths=(5, 9), page=16))
    write, version = append_call.Appender(call, gpu.append), call.k_cache._version
    found = []
    for gpu.stream, gpu.captures in ((0, False), (0, False), (7, False), (7, True), (7, False)):
        found.append(write(call.tensors))
        assert torch.equal(found[-1], call.cache_seqlens + 1)
    first, second, other, captured, last = (x.data_ptr() for x in found)
    assert first == second and other == last and len({first, other, captured}) == 3 and call.k_cache._version == version + 5


def test_threads_on_one_stream_have_their_own_lengths(gpu):
    """One thread's launch may come between two of another's."""
    call = append_problems.made(append_problems.AppendCase(lengths=(5, 9)))
    write, found = append_call.Appender(call, gpu.append), []
    here, together = write(call.tensors), threading.Barrier(2)

    def run():
        found.append(write(call.tensors))
        together.wait()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({x.data_ptr() for x in (here, *found)}) == 3
