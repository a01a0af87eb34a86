"""Results as JSON lines: one row a measurement, complete in itself, so that files can be appended, merged and versioned."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation on one workload by one clock. Times in seconds, rates in FLOP/s, sizes in bytes; None: not measured or undefined.

    A row without a time says why in `reason`: the implementation cannot run the case, or it missed the tolerance (`passed` is False). A peer
    that missed it on inputs made to be hard has a time all the same, and a training that memory made take a batch in parts.
    """

    impl: str
    name: str  # of the workload
    case: dict[str, int | float | str]
    clock: str
    passed: bool | None = None
    reason: str | None = None
    error: float | None = None  # largest absolute error of the checked outputs against fp64
    rms_error: dict[str, float] | None = None  # by output ("o", "dq", "dk", "dv"), relative to fp64's RMS; see gate.py
    places_agree: bool | None = None  # whether NaN and infinities are where fp64 has them
    over_normal: float | None = None  # ours: the time over that on normal inputs, the two in turns
    median_s: float | None = None
    p10_s: float | None = None
    p90_s: float | None = None
    samples: int = 0
    flops: int = 0  # on visible pairs
    paper_flops: int | None = None
    bytes: int = 0  # every operand once
    flops_per_s: float | None = None
    paper_flops_per_s: float | None = None
    ceiling_share: float | None = None  # of the roofline of the rates measured in the same run
    ceiling_flops_per_s: float | None = None
    ceiling_dtype: str | None = None  # of that product, where it is not the case's
    ceiling_bytes_per_s: float | None = None
    peak_extra_bytes: int | None = None
    tokens_per_s: float | None = None  # of a training's steps, as what follows; see training.py
    mfu: float | None = None  # flops_per_s over the data sheet's
    peak_bytes: int | None = None  # of all memory
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The median of a row that has a time."""
        assert self.median_s is not None
        return self.median_s

    @property
    def rate(self) -> float:
        """FLOP/s of a row that has a time."""
        assert self.flops_per_s is not None
        return self.flops_per_s

    @property
    def device(self) -> str:
        return str(self.environment.get("device", "no machine"))


def append(path: str | Path, rows: Iterable[Row]) -> None:
    """Add `rows` to the file, making it and its folder where they do not exist."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows)


def load(*paths: str | Path) -> list[Row]:
    """The rows of these files, in order. Fields that this version does not know are dropped; a line that is no row raises ValueError, as does a
    field of another type than `Row` says, a number that is not finite, and a time that is not above 0.
    """
    known = get_type_hints(Row)
    rows = []
    for path in map(Path, paths):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = Row(**{name: value for name, value in json.loads(line).items() if name in known})
            except (json.JSONDecodeError, AttributeError, TypeError, RecursionError) as error:
                raise ValueError(f"{path.name}, line {number}: not a benchmark row ({error})") from None
            for name, kind in known.items():
                found = getattr(row, name)
                if not _fits(found, kind) or (name in TIMES and found is not None and found <= 0):
                    wanted = f"{'above 0, ' if name in TIMES else ''}{getattr(kind, '__name__', None) if isinstance(kind, type) else kind}"
                    raise ValueError(f"{path.name}, line {number}: not a benchmark row ({name} is {found!r:.80}, expected {wanted})")
            for name in SIZES & row.case.keys():
                if not _fits(row.case[name], int):
                    raise ValueError(f"{path.name}, line {number}: not a benchmark row ({name} is {row.case[name]!r:.80}, expected int)")
            rows.append(row)
    return rows


TIMES = ("median_s", "p10_s", "p90_s")
SIZES = {"batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "head_dim_v"}


def _fits(found: object, kind: Any) -> bool:
    """Whether a value of JSON is of the type that a field of `Row` has."""
    if kind is Any:
        return True
    if isinstance(kind, UnionType):
        return any(_fits(found, each) for each in get_args(kind))
    if get_origin(kind) is dict:
        of_keys, of_values = get_args(kind)
        return isinstance(found, dict) and all(_fits(key, of_keys) and _fits(value, of_values) for key, value in found.items())
    if kind in (int, float):
        return isinstance(found, int if kind is int else int | float) and not isinstance(found, bool) and math.isfinite(found)
    return isinstance(found, kind)


def select(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """The rows with the wanted values in their fields, or in the entries of their case or environment; a wanted value may be a predicate.

    >>> select(rows, impl="tilewise", head_dim=64, seqlen_q=lambda n: n >= 1024)
    """
    return [row for row in rows if all(_matches(value(row, name), want) for name, want in wanted.items())]


def value(row: Row, name: str) -> object:
    """The field `name` of the row, of its case, or of its environment; None where there is none."""
    if name in {each.name for each in fields(Row)}:
        return getattr(row, name)
    return row.case.get(name, row.environment.get(name))


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each (device, implementation, case, clock), in the order of first appearance."""
    last: dict[tuple, Row] = {}
    for row in rows:
        last[row.environment.get("device"), row.impl, tuple(sorted(row.case.items())), row.clock] = row
    return list(last.values())


def _matches(found: object, want: object) -> bool:
    return bool(want(found)) if isinstance(want, Callable) else found == want
