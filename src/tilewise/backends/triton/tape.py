"""What a bound call launched once, for those after it: each launch is a list of arguments, in which only what is a call's own changes.

Names and dicts make arguments easy to read, and take the host 50 us a launch and more; a list takes one.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.triton.direct import current_stream, watched
from tilewise.backends.triton.targets import interpreted

ALIGNED = 16  # bytes, of which a tensor's address is a multiple for wide loads
MOST = 16  # of a bound call's tapes
_here = threading.local()


def recording() -> "Tape | None":
    """The tape that this thread's launches belong on."""
    return getattr(_here, "tape", None)


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for what one launch leaves to the next, of a call's own."""
    x = torch.empty(shape, dtype=dtype, device=device)
    if (tape := recording()) is not None:
        tape.allocated(x)
    return x


class Tapes:
    """Of one bound call."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Tape] = {}
        self._interpreted = interpreted()

    def run(self, key: Hashable, given: Mapping[str, Any], constants: Iterable[object], launch: Callable[[], None]) -> None:
        """`launch()`, or, after the first call with this key, what it launched then with the tensors and numbers of `given`.

        key: what its launches depend on, but for the bound call and where tensors lie; given: a call's own tensors (None: absent), and numbers by the
        names that kernels have for them; constants: tensors among them that are the same for all calls.
        """
        found: dict[Hashable, Any] = {}
        mixed, all_there = 0, recording() is None
        for name, x in given.items():
            if isinstance(x, Tensor):
                found[name] = address = x.data_ptr()
                mixed |= address
                all_there = all_there and address != 0
            elif x is not None:
                found[name] = x
        # An address of 0: a tensor without elements, or memory that was given back, which `launch` refuses. Within a recording it is part of it.
        if not all_there:
            launch()
            return
        key = (
            (key,)
            if mixed % ALIGNED == 0
            else (key, *(name for name, x in given.items() if isinstance(x, Tensor) and found[name] % ALIGNED))
        )
        tape = self._known.get(key)
        if tape is not None and tape.plays:
            tape.play({**given} if self._interpreted else found)
            return
        if tape is not None or len(self._known) >= MOST:
            launch()
            return
        _here.tape = tape = Tape(given, constants)
        try:
            launch()
        finally:
            _here.tape = None
        self._known[key] = tape


class Tape:
    """Launches in their order. `whole` unless one of them takes a tensor of unknown origin, such as a copy that torch made for this call."""

    def __init__(self, given: Mapping[str, Any], constants: Iterable[object]) -> None:
        self.whole = True
        self._interpreted = interpreted()
        self._launches: list[tuple[Callable, Callable | None, list, tuple[tuple[int, Hashable], ...]]] = []
        self._scratch: list[tuple[tuple[int, ...], torch.dtype, torch.device]] = []
        self._constants = {id(x): x for x in constants if isinstance(x, Tensor)}
        self._numbers = {name for name, x in given.items() if x is not None and not isinstance(x, Tensor)}
        self._addresses: dict[Hashable, int] = {name: x.data_ptr() for name, x in given.items() if isinstance(x, Tensor)}

    @property
    def plays(self) -> bool:
        """Whether it stands for the call."""
        return self.whole and len(self._launches) > 0

    def allocated(self, x: Tensor) -> None:
        """x is memory of `scratch`."""
        self._addresses[len(self._scratch)] = x.data_ptr()
        self._scratch.append((tuple(x.shape), x.dtype, x.device))

    def add(self, start: Callable, names: Iterable[str], values: Sequence[object], direct: Callable | None) -> None:
        """A launch: `start(*values)`, of parameters with these names. direct: what `direct.direct` found for it."""
        kept, places = list(values), []
        for place, (name, x) in enumerate(zip(names, values, strict=True)):
            if name in self._numbers:
                places.append((place, name))
            elif isinstance(x, Tensor) and id(x) not in self._constants:
                origin = self._origin(name, x)
                self.whole = self.whole and origin is not None
                places.append((place, origin))
                kept[place] = None
            elif isinstance(x, Tensor) and not self._interpreted:
                kept[place] = x.data_ptr()
        self._launches.append((start, direct, kept, tuple(places)))

    def _origin(self, name: str, x: Tensor) -> Hashable | None:
        """The origin of x's memory: the tensor of its name, or the only one that begins there; None where nobody can say."""
        address = x.data_ptr()
        if self._addresses.get(name) == address:
            return name
        found = [origin for origin, other in self._addresses.items() if other == address]
        return found[0] if len(found) == 1 else None

    def play(self, given: Mapping[Hashable, object]) -> None:
        """Launch all of it with `given`: addresses of tensors by name, in Triton's interpreter tensors; and numbers."""
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self._scratch]
        if made:
            given = {**given, **dict(enumerate(made if self._interpreted else [x.data_ptr() for x in made]))}
        stream = None if self._interpreted or watched() else current_stream()
        for start, direct, kept, places in self._launches:
            values = kept.copy()
            for place, origin in places:
                values[place] = given[origin]
            if stream is None or direct is None:
                start(*values)
            else:
                direct(stream, values)
