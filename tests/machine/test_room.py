"""A first launch on a GPU whose memory is all but taken: torch's unused blocks are given back, and where that is not enough it is said."""

import pytest
import torch

from tilewise.machine import room
from tilewise.sm90 import jit

MB = 1 << 20


class Gpu:
    """One with `free` MB, to which torch gives back `cached` MB."""

    def __init__(self, monkeypatch, free: int, cached: int, capturing: bool = False) -> None:
        self.free, self.cached, self.device = free, cached, 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free * MB, 80_000 * MB))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)

    def empty_cache(self) -> None:
        self.free, self.cached = self.free + self.cached, 0


def test_blocks_that_torch_keeps_are_given_back_where_they_are_needed(monkeypatch):
    gpu = Gpu(monkeypatch, free=2, cached=40)
    room.make_room()
    assert gpu.free == 42


@pytest.mark.parametrize("free, capturing", [(1000, False), (2, True)])
def test_they_stay_where_there_is_room_or_a_graph_is_captured(monkeypatch, free, capturing):
    gpu = Gpu(monkeypatch, free, cached=40, capturing=capturing)
    room.make_room()
    assert gpu.cached == 40


def test_too_little_is_said_in_a_sentence(monkeypatch):
    Gpu(monkeypatch, free=2, cached=1)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"needs 16 MB of the GPU's memory beside torch's, and 3 of 80000 MB are free: .*smaller batch"
    ):
        room.make_room()


def test_there_is_one_mechanism():
    assert jit.make_room is room.make_room


def test_a_triton_kernel_asks_once_a_gpu_and_again_after_there_was_none(monkeypatch):
    pytest.importorskip("triton")
    import triton

    from tilewise.backends.triton import launch
    from tilewise.backends.triton.targets import Target

    gpu, asked, started = Gpu(monkeypatch, free=2, cached=0), [], []

    class Loaded:
        """As Triton's compiled kernel: its code is loaded where a grid is asked for."""

        def __getitem__(self, grid):
            assert gpu.free >= 16, "it is loaded without room"
            return lambda *values: started.append((gpu.device, grid, values))

    class Kernel:
        constants = ()

        def signature(self):
            return {"q": "*fp16", "n": "i32"}, {}

    kernel, driver = Kernel(), type("Driver", (), {"get_current_device": lambda self: gpu.device})()
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "compiled", lambda *key: Loaded())
    monkeypatch.setattr(launch, "build", lambda *key: Loaded())
    monkeypatch.setattr(launch, "make_room", lambda: asked.append(gpu.device) or room.make_room())
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    run = launch.launcher(kernel, Target("sm_90"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="a kernel's first launch needs 16 MB"):
            run(3, {"n": 5})
    gpu.cached = 40  # as after a tensor was given back
    for gpu.device in (0, 0, 1, 1):
        run(3, {"n": 5})
    assert asked == [0, 0, 0, 1] and gpu.free == 42
    assert started == [(device, (3, 1, 1), (None, 5)) for device in (0, 0, 1, 1)]


def test_every_kernel_is_asked_for_once_a_gpu_and_again_after_there_was_none(monkeypatch):
    gpu, kernels, asked = Gpu(monkeypatch, free=2, cached=0), [], []
    monkeypatch.setattr(jit, "_compiled", lambda *key: kernels.append(key) or len)
    monkeypatch.setattr(jit, "_LAUNCHED", set())
    monkeypatch.setattr(jit, "make_room", lambda: asked.append(gpu.device) or room.make_room())
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            jit.compiled("module:launch", list, None)
    gpu.free = 100
    for gpu.device in (0, 0, 1, 1):
        assert jit.compiled("module:launch", list, None) is len
    assert asked == [0, 0, 0, 1]
