"""A launch by one call of Triton's C function, which takes two microseconds; what Triton's launcher does around it, in Python, takes five more.

Which arguments that function takes is another thing in each version of Triton. So its launcher is asked once, with stand-ins for the stream and the
kernel's arguments, and what it hands on is kept. Where that has no known form, kernels are started as Triton starts them; and so they are while
somebody watches launches, as profilers do by hooks.
"""

import copy
from collections.abc import Callable, Sequence

import triton
from triton import knobs

SCRATCH = "global", "profile"  # memory that a kernel may want besides


def direct(found, programs: int, count: int) -> Callable[[int, Sequence[object]], None] | None:
    """What starts a compiled kernel, which is loaded, with `programs` programs on a stream, of `count` arguments; None where nobody knows how."""
    stream, values, seen = object(), tuple(object() for _ in range(count)), []
    try:
        launch, asked = found.run.launch, copy.copy(found.run)
        asked.launch = lambda *given: seen.append(given)
        asked(programs, 1, 1, stream, found.function, found.packed_metadata, None, None, None, *values)
        (given,) = seen
        place = given.index(stream)
    except Exception:  # of whatever another version has in its place
        return None
    head, rest = given[:place], given[place + 1 :]
    together = rest[-1:] == (values,)
    fixed = rest[:-1] if together else rest[:-count]
    if not together and rest[len(fixed) :] != values:
        return None
    if {*map(id, values), id(stream)} & {*map(id, (*head, *fixed))} or any(getattr(asked, f"{kind}_scratch_size", 0) for kind in SCRATCH):
        return None
    if together:
        return lambda stream, values: launch(*head, stream, *fixed, values)
    return lambda stream, values: launch(*head, stream, *fixed, *values)


def current_stream() -> int:
    """Of the current device, as Triton's launches take it."""
    driver = triton.runtime.driver.active  # a GPU's, which has what the class that Triton declares has not
    return driver.get_current_stream(driver.get_current_device())  # pyright: ignore[reportAttributeAccessIssue]


def watched() -> bool:
    """Whether anything is to be called at each launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
