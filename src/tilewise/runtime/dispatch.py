"""Which backend runs a problem, and why the others do not."""

from functools import cache

from tilewise.backends import Backend
from tilewise.errors import UnsupportedError
from tilewise.machine import environment, once
from tilewise.problem import Problem


@cache
def backends() -> tuple[Backend, ...]:
    """Every backend of this installation, in order of preference."""
    from tilewise.backends.cpu import Cpu
    from tilewise.backends.hopper import Hopper
    from tilewise.backends.reference import Reference
    from tilewise.backends.tiled import Tiled
    from tilewise.backends.triton import Triton

    for sentence in environment.misspelt():
        once.warn(sentence)
    return (Hopper(), Triton(), Cpu(), Tiled(), Reference())


def named(name: str) -> Backend:
    """The backend called `name`; ValueError where there is none."""
    for backend in backends():
        if backend.name == name:
            return backend
    raise ValueError(f"backend must be one of {', '.join(repr(backend.name) for backend in backends())} or None, got {name!r}")


@cache
def reasons(problem: Problem, decodes: bool = False) -> dict[str, list[str]]:
    """For every backend the sentences that say why it cannot run `problem`, or what decodes; an empty list where it can."""
    return {backend.name: _why_not(backend, problem, decodes) for backend in backends()}


def _why_not(backend: Backend, problem: Problem, decodes: bool) -> list[str]:
    return [*(backend.why_not_decode if decodes else backend.why_not)(problem), *_lacks(backend, problem)]


def _lacks(backend: Backend, problem: Problem) -> list[str]:
    """What no installation of the backend has."""
    lacks = ["it keeps no largest scores (return_max_logits)"] if problem.row_max and not backend.keeps_row_max else []
    if problem.eight_bits and not backend.eight_bits:
        lacks.append(f"it does not multiply in 8 bits ({f'precision={problem.precision!r}' if problem.precision else problem.dtype})")
    return lacks


@cache
def choose(problem: Problem, name: str | None = None, decodes: bool = False) -> Backend:
    """The backend that runs `problem`: the one asked for, or the first that can. decodes: by `decode`.

    Raises:
        ValueError: no backend is called `name`.
        UnsupportedError: the backend asked for, or every backend, cannot run it; the message holds each one's reasons.
    """
    found = reasons(problem, decodes)
    if name is not None:
        backend = named(name)
        if why_not := found[name]:
            able = [other for other, why in found.items() if not why]
            way_out = f"backend={able[0]!r} or backend=None can run it" if able else "no other backend can run it either"
            raise UnsupportedError(f"backend {name!r} cannot run this problem: {'; '.join(why_not)}. {way_out}.")
        return backend
    for backend in backends():
        if not found[backend.name] and not backend.by_name:
            _say_what_is_missing(backend, problem)
            return backend
    listing = "; ".join(f"{other}: {', '.join(why) or 'runs only when asked for by name'}" for other, why in found.items())
    raise UnsupportedError(f"no backend can run this problem ({problem}). {listing}.")


def _say_what_is_missing(chosen: Backend, problem: Problem) -> None:
    """Warn, once a process, where a better backend would run the problem if what it needs were installed."""
    for backend in backends()[: backends().index(chosen)]:
        if not _lacks(backend, problem) and (missing := backend.missing(problem)):
            slower = "several times slower" if chosen.name == "tiled" else "slower"
            once.warn(f"{chosen.name!r} computes attention in place of {backend.name!r}, {slower}: {missing}")
