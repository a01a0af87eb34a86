"""What calls on a stream have in common."""

import threading

import pytest
import torch

from tilewise.backends.hopper import short

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def none_yet(monkeypatch):
    monkeypatch.setattr(short, "_SHARED", {})


def place(*shapes, name="one", stream=0):
    return [x.data_ptr() for x in short.shared(name, shapes, torch.int32, CPU, stream)]


def test_shared_tensors_lie_apart_and_where_the_last_ones_did():
    shapes = (5, 7), (1,), (0,), (3, 2)
    found = short.shared("one", shapes, torch.int32, CPU, 0)
    assert [tuple(x.shape) for x in found] == [*shapes] and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in found)
    for n, x in enumerate(found):
        x.fill_(n)
    assert all((x == n).all() for n, x in enumerate(found))
    assert [x.data_ptr() for x in found] == place(*shapes) and place((4,)) == place((4,), (5,))[:1] == [found[0].data_ptr()]


def test_more_takes_other_memory_which_all_then_have():
    kept = short.shared("one", [(10,)], torch.int32, CPU, 0)[0]
    larger = place((1000,))
    assert larger != [kept.data_ptr()] and place((10,)) == larger


def test_names_streams_and_threads_have_their_own():
    found = [place((4,)), place((4,), name="two"), place((4,), stream=1)]
    thread = threading.Thread(target=lambda: found.append(place((4,))))
    thread.start()
    thread.join()
    assert len({x for (x,) in found}) == 4


@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_stream_keeps(keeps, monkeypatch):
    state, made = {"stream": 0, "captures": False}, []
    monkeypatch.setattr(short, "current_stream", lambda device: state["stream"])
    monkeypatch.setattr(short, "capturing", lambda: state["captures"])
    found = short.by_stream(3, lambda stream: made.append(stream) or len(made), keeps)
    turns = (0, False), (0, False), (7, False), (7, True), (7, True), (7, False), (0, False)
    results = [(state.update(stream=stream, captures=captures), found())[1] for stream, captures in turns]
    assert made == ([0, 7, None, None] if keeps else [None] * 7)
    assert results == ([1, 1, 2, 3, 4, 2, 1] if keeps else [*range(1, 8)])
