"""Launches past Triton's own launcher: of the installed version, of two forms, of none that is known, and while somebody watches."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from tilewise.backends.triton import launch, tape
from tilewise.backends.triton.direct import direct, watched
from tilewise.backends.triton.targets import Target, interpreted

FUNCTION, PACKED = 77, (4, 1, 512)


class Launcher:
    """As Triton 3.6 has it: a C function of each signature. `sizes`: of scratch memory."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.seen = []
        self.launch = lambda *given: self.seen.append(given)

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, False, True, None, *rest)


class Together(Launcher):
    """As Triton 3.9 has it: one C function for all."""

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *values):
        self.launch(x, y, z, stream, function, packed, metadata, enter, leave, "annotations", b"types", values)


class More(Launcher):
    """It adds an argument behind the kernel's."""

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, *rest, 5)


class Changed(Together):
    """It changes one of the kernel's arguments."""

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *values):
        self.launch(x, y, z, stream, function, (0, *values[1:]))


class Mixed(Launcher):
    """It needs an argument twice."""

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, rest[-1], *rest)


class Scratch(Launcher):
    global_scratch_size = 128


class Without(Launcher):
    def __init__(self) -> None:
        pass


class Converting(Launcher):
    def __call__(self, x, y, z, stream, *rest):
        self.launch(x, y, z, int(stream), *rest)


def found_of(run):
    return SimpleNamespace(run=run, function=FUNCTION, packed_metadata=PACKED)


@pytest.mark.parametrize("kind", [Launcher, Together])
def test_it_hands_on_what_the_launcher_would(kind):
    run, values = kind(), [1, None, "a constant"]
    start = direct(found_of(run), 9, 3)
    assert not run.seen  # nothing was launched to find out
    start(5, values)
    run(9, 1, 1, 5, FUNCTION, PACKED, None, None, None, *values)
    short, whole = ([tuple(x) if isinstance(x, list) else x for x in given] for given in run.seen)
    assert short == whole


@pytest.mark.parametrize("kind", [More, Changed, Mixed, Scratch, Without, Converting])
def test_unknown_forms_are_left_to_triton(kind):
    assert direct(found_of(kind()), 9, 3) is None


def test_the_installed_launcher_has_a_known_form(monkeypatch):
    """Of NVIDIA's part, which needs neither a GPU nor a driver here."""
    if interpreted():
        pytest.skip("in the interpreter nothing is launched")
    from triton.backends.nvidia.driver import CudaLauncher

    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(), raising=False)
    run = CudaLauncher.__new__(CudaLauncher)
    seen, plain = [], {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
    vars(run).update(plain, num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, gsan_enabled=False)
    vars(run).update(arg_annotations=["annotations"], kernel_signature=b"types", launch=lambda *given: seen.append(given))
    start = direct(found_of(run), 9, 3)
    assert start is not None
    start(5, [1, 2, 3])
    run(9, 1, 1, 5, FUNCTION, PACKED, None, None, None, 1, 2, 3)
    assert [tuple(x) if isinstance(x, list) and len(x) == 3 else x for x in seen[0]] == [*seen[1]]


@pytest.mark.parametrize("watch", [False, True])
def test_a_played_launch_goes_past_triton_unless_somebody_watches(watch, monkeypatch):
    if interpreted():
        pytest.skip("in the interpreter nothing is launched")
    x, calls, stream = torch.zeros(4), [], 11
    monkeypatch.setattr(tape, "current_stream", lambda: stream)
    hooks = triton.knobs.runtime
    if watch:
        monkeypatch.setattr(hooks.launch_enter_hook, "calls", [print])
    recorded = tape.Tape({"x": x, "scale": 2.0}, ())
    ways = (lambda *values: calls.append(("triton", *values))), (lambda stream, values: calls.append((stream, *values)))
    recorded.add(ways[0], ("x", "scale", "rows"), (x, 2.0, 3), ways[1])
    recorded.add(ways[0], ("x",), (x,), None)
    recorded.play({"x": 160, "scale": 4.0})
    assert calls == [("triton" if watch else stream, 160, 4.0, 3), ("triton", 160)]


@pytest.mark.parametrize(("hook", "wanted"), [(None, False), (print, True)])
def test_hooks_of_any_kind(hook, wanted, monkeypatch):
    assert not watched()
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hook)
    assert watched() == wanted


def test_each_device_has_its_own(monkeypatch):
    """A kernel is loaded into one device's context."""
    monkeypatch.setattr(launch, "build", lambda *_: object())
    monkeypatch.setattr(launch, "compiled", lambda *_: "first")
    found = [launch._loaded.__wrapped__("kernel", Target("sm_80"), device) for device in (0, 1, 2)]
    assert found[0] == "first" and found[1] is not found[2]
