"""Sets of workloads by name (SETS), and workloads from text: each option is a comma-separated list, and the workloads are all combinations."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from itertools import product
from typing import TypeVar, get_args

from tilewise.bench.sets.decode import DECODE, Caches, Cell, Pool, decode_cells, title_of
from tilewise.bench.sets.distributions import DISTRIBUTIONS, FINITE_LIMIT, HIDDEN, NON_FINITE_LIMIT, NORMAL, Inputs
from tilewise.bench.sets.named import (
    ROWS,
    SETS,
    WHY_BEHIND,
    cpu_sweep,
    hard_inputs,
    ladder_cells,
    ladder_sweep,
    mask_shapes,
    model_shapes,
    padded,
    paper_sweep,
)
from tilewise.bench.sets.workload import DTYPES, Attend, Workload, change_words, tokens
from tilewise.machine.roofline import Direction
from tilewise.masks import Causal, ChunkedCausal, Documents, Full, Mask, PrefixLM, SlidingWindow

__all__ = [
    "DECODE",
    "DISTRIBUTIONS",
    "DTYPES",
    "FINITE_LIMIT",
    "HIDDEN",
    "NON_FINITE_LIMIT",
    "NORMAL",
    "ROWS",
    "SETS",
    "WHY_BEHIND",
    "Attend",
    "Caches",
    "Cell",
    "Inputs",
    "Pool",
    "Workload",
    "change_words",
    "chosen",
    "cpu_sweep",
    "decode_cells",
    "hard_from",
    "hard_inputs",
    "ladder_cells",
    "ladder_from",
    "ladder_sweep",
    "mask_from",
    "mask_shapes",
    "model_shapes",
    "padded",
    "paper_sweep",
    "title_of",
    "tokens",
    "workloads_from",
]

T = TypeVar("T")

DEFAULTS = {
    "batch": "1",
    "seqlen": "512,1024,2048",
    "heads": "8",
    "head_dim": "64",
    "mask": "full,causal",
    "dtype": "fp32",
    "direction": "fwd",
    "data": "normal",
}
WAYS: dict[str, Direction] = {name: name for name in get_args(Direction)}


def workloads_from(options: Mapping[str, str]) -> list[Workload]:
    """All combinations of the options given; what is not given takes DEFAULTS.

    batch "1,4"; seqlen "512,1024x4096" (queries x keys); heads "8,8/2" (query/key heads); head_dim "64,192/128" (head_dim/head_dim_v);
    mask "full,causal,window:1023" (see `mask_from`); causal "0,1" (short for mask "full,causal"); dtype "fp32,bf16"; direction
    "fwd,bwd,fwd+bwd"; data "normal,q x64" (DISTRIBUTIONS);
    set "papers,cpu,masks,models" takes these sets of workloads (SETS) instead, and only dtype and direction combine with it; their
    dtype is what most is measured in (for the set hard-inputs alone, see `hard_from`).
    Raises ValueError naming the option.
    """
    options = {name: str(text) for name, text in options.items() if text is not None}
    if unknown := options.keys() - DEFAULTS.keys() - {"set", "causal"}:
        raise ValueError(f"{', '.join(sorted(unknown))}: no such option; there are {', '.join((*DEFAULTS, 'causal', 'set'))}")
    if "causal" in options:
        if "mask" in options:
            raise ValueError("causal and mask both choose the mask; give one of them")
        flags = _each("causal", options.pop("causal"), {"0": "full", "1": "causal"}.__getitem__, "0 or 1")
        options["mask"] = ",".join(flags)
    if options.get("set") == "hard-inputs":
        return hard_from({name: text for name, text in options.items() if name != "set"})
    text = DEFAULTS | options
    dtypes, directions = _named("dtype", text["dtype"], DTYPES), _named("direction", text["direction"], WAYS)
    if "set" in options:
        if others := options.keys() - {"set", "dtype", "direction"}:
            raise ValueError(f"set fixes the sizes, so {', '.join(sorted(others))} cannot be given with it; dtype and direction can")
        sets = _named("set", options["set"], SETS)
        given = [{"dtype": dtype} for dtype in dtypes] if "dtype" in options else [{}]  # a set has one of its own
        return [workload for make in sets for dtype in given for direction in directions for workload in make(direction=direction, **dtype)]
    data = _named("data", text["data"], DISTRIBUTIONS)
    pair = "a positive number, or two as in 8{}2"
    batches = _each("batch", text["batch"], _positive, "a positive number")
    seqlens = _each("seqlen", text["seqlen"], lambda item: _pair(item, "x"), pair.format("x"))
    heads = _each("heads", text["heads"], lambda item: _pair(item, "/"), pair.format("/"))
    head_dims = _each("head_dim", text["head_dim"], lambda item: _pair(item, "/"), pair.format("/"))
    return [
        Workload(
            name="custom",
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads_q,
            heads_k=heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            mask=mask_from(mask),
            dtype=dtype,
            direction=direction,
            data=distribution.name,
            rms="data" in options,
        )
        for batch, (seqlen_q, seqlen_k), (heads_q, heads_k), (head_dim, head_dim_v), mask, dtype, direction, distribution in product(
            batches, seqlens, heads, head_dims, text["mask"].split(","), dtypes, directions, data
        )
    ]


def chosen(workloads: list[Workload], patterns: str | None) -> list[Workload]:
    """Those with a name or id that matches one of the comma-separated shell patterns; all for None; ValueError where none does."""
    if patterns is None:
        return workloads
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    found = [each for each in workloads if any(fnmatchcase(text, pattern) for text in (each.name, each.id) for pattern in wanted)]
    if not found:
        names = ", ".join(dict.fromkeys(each.name for each in workloads))
        raise ValueError(
            f"only is {patterns!r}, which matches none of the workloads {names}; give names or patterns such as 'T5*', or of ids such as "
            f"'{workloads[0].id}'"
        )
    return found


LADDER_DEFAULTS = {
    "seqlen": "512,1024,2048,4096,8192,16384",
    "head_dim": "128,64",
    "causal": "0,1",
    "dtype": "bf16",
    "direction": "fwd",
}


def ladder_from(options: Mapping[str, str]) -> list[Workload]:
    """Cells of the ladder's sweep (`ladder_cells`), all of it unless seqlen, head_dim, causal, dtype or direction say which."""
    options = {name: str(text) for name, text in options.items() if text is not None}
    if unknown := options.keys() - LADDER_DEFAULTS.keys():
        raise ValueError(f"{', '.join(sorted(unknown))}: not an option of the ladder's sweep; there are {', '.join(LADDER_DEFAULTS)}")
    text = LADDER_DEFAULTS | options
    seqlens, head_dims = (_each(name, text[name], _positive, "a positive number") for name in ("seqlen", "head_dim"))
    causal = _each("causal", text["causal"], {"0": False, "1": True}.__getitem__, "0 or 1")
    dtypes, directions = _named("dtype", text["dtype"], DTYPES), _named("direction", text["direction"], WAYS)
    return [cell for dtype in dtypes for direction in directions for cell in ladder_cells(seqlens, head_dims, causal, dtype, direction)]


def hard_from(options: Mapping[str, str]) -> list[Workload]:
    """Cells of the set `hard_inputs`: all of it unless seqlen, heads, head_dim, mask (of `mask_from`), data, dtype or direction say which."""
    names = ("seqlen", "heads", "head_dim", "mask", "data", "dtype", "direction")
    if unknown := options.keys() - set(names):
        raise ValueError(f"{', '.join(sorted(unknown))}: not an option of the set hard-inputs; there are {', '.join(names)}")
    chosen = {}
    if "heads" in options:
        (chosen["heads"],) = _each("heads", options["heads"].replace(",", "/"), _positive, "a positive number")
    if "head_dim" in options:
        chosen["head_dims"] = tuple(_each("head_dim", options["head_dim"], _positive, "a positive number"))
    if "mask" in options:
        chosen["masks"] = tuple(map(mask_from, options["mask"].split(",")))
    if "data" in options:
        chosen["data"] = tuple(each.name for each in _named("data", options["data"], DISTRIBUTIONS))
    dtypes = _named("dtype", options.get("dtype", "bf16"), DTYPES)
    directions = _named("direction", options.get("direction", "fwd,bwd"), WAYS)
    seqlens = _each("seqlen", options.get("seqlen", "8192"), _positive, "a positive number")
    return [
        cell
        for dtype, direction, seqlen in product(dtypes, directions, seqlens)
        for cell in hard_inputs(dtype, direction, seqlen=seqlen, **chosen)
    ]


def mask_from(text: str) -> Mask:
    """A mask from its short form: full, causal, window:LEFT, window:LEFT:RIGHT, prefix:N, chunked:N, documents:LEN:LEN:...

    Documents are causal; a window's RIGHT is 0 when left out. Raises ValueError for anything else.
    """
    kind, *numbers = text.strip().split(":")
    makers: dict[str, tuple[int, int, Callable[..., Mask]]] = {  # fewest and most numbers, and what they make
        "full": (0, 0, Full),
        "causal": (0, 0, Causal),
        "window": (1, 2, lambda left, right=0: SlidingWindow(left, right)),
        "prefix": (1, 1, PrefixLM),
        "chunked": (1, 1, ChunkedCausal),
        "documents": (1, len(numbers), _documents),
    }
    fewest, most, make = makers.get(kind, (1, 0, Full))
    if not fewest <= len(numbers) <= most or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"mask is {text!r}; it must be full, causal, window:LEFT, window:LEFT:RIGHT, prefix:N, chunked:N or documents:LEN:LEN:..., "
            "with numbers of keys"
        )
    return make(*map(int, numbers))


def _documents(*lengths: int) -> Mask:
    cu_seqlens = [0]
    for length in lengths:
        cu_seqlens.append(cu_seqlens[-1] + length)
    return Documents(cu_seqlens, inner=Causal())


def _each(name: str, text: str, read: Callable, expected: str) -> list:
    values = []
    for item in text.split(","):
        try:
            values.append(read(item.strip()))
        except (KeyError, ValueError):
            raise ValueError(f"{name} is {item.strip()!r}; each item of its comma-separated list must be {expected}") from None
    return values


def _named(name: str, text: str, table: Mapping[str, T]) -> list[T]:
    return _each(name, text, table.__getitem__, f"one of {', '.join(table)}")


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _pair(text: str, separator: str) -> tuple[int, int]:
    first, *rest = map(_positive, text.split(separator))
    if len(rest) > 1:
        raise ValueError(text)
    return first, (rest or [first])[0]
