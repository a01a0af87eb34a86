"""What `tilewise check` runs: every backend of this machine on every case of the correctness grid, and on the closed forms."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from tilewise.backends import Backend
from tilewise.errors import UnsupportedError
from tilewise.testing import cases, conformance

State = Literal["passed", "failed", "skipped"]
STATES: tuple[State, ...] = ("passed", "failed", "skipped")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that must hold of one backend: `hold` raises where it does not."""

    backend: str
    name: str
    hold: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a check ended; `reason` says why it failed or was skipped."""

    backend: str
    name: str
    state: State
    reason: str
    seconds: float


def plan(
    backends: Iterable[Backend], *, full: bool = False, contains: str = "", seed: int = 0, device: torch.device | str = "cpu"
) -> list[Check]:
    """The checks of these backends that have the text `contains` in their name.

    Every case (QUICK, or with `full` all of them) runs twice, the second time with NaN and infinities in all that its mask hides; then
    come the closed forms.
    """
    checks = []
    for backend in backends:
        for case in cases.FULL if full else cases.QUICK:
            checks.append(Check(backend=backend.name, name=case.id, hold=partial(conformance.run_case, backend, case, seed, device)))
            hidden = partial(conformance.run_hidden, backend, case, seed, device)
            checks.append(Check(backend=backend.name, name=f"{case.id} (hidden poisoned)", hold=hidden))
        for name, form in conformance.CLOSED_FORMS.items():
            words = name.replace("_", " ")
            checks.append(Check(backend=backend.name, name=f"closed form: {words}", hold=partial(form, backend, device)))
    return [check for check in checks if contains in check.name]


def run(checks: Sequence[Check]) -> Iterator[Outcome]:
    """Run the checks one by one. What a backend says it cannot run is skipped; whatever else a check raises is its failure."""
    for check in checks:
        start = time.perf_counter()
        state: State = "passed"
        reason = ""
        try:
            check.hold()
        except UnsupportedError as refusal:
            state, reason = "skipped", str(refusal)
        except Exception as error:  # one crash must not hide what the other checks would say
            state, reason = "failed", str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        yield Outcome(backend=check.backend, name=check.name, state=state, reason=reason, seconds=time.perf_counter() - start)
