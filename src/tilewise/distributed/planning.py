"""A plan: which rank holds which tokens, which keys its queries need, and the mask that its one call of attention has.

A pure function of its arguments, on the CPU and without a collective, so that every rank makes the same.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray
from torch import Tensor

from tilewise.api import combine
from tilewise.distributed import movement, reporting, solver
from tilewise.distributed.axis import Axis, Ranges, Routes, cut, merged
from tilewise.distributed.work import Work, overlap, survey
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import DeviceDocuments, Mask, Part
from tilewise.masks.arguments import check_count

LAYOUTS = ("auto", "contiguous", "zigzag", "ulysses")
TILES = {"cpu": 96, "cuda": 128}  # queries of a tile: backends/cpu's block of rows; Hopper's for masks by tiles
CHUNKS = 16  # of a rank, about: fewer where there are many ranks
KEYS = 128  # of which parts of the keys are multiples


class Place(NamedTuple):
    """A rank among others, and the group through which it reaches them; None: it does not."""

    rank: int
    world: int
    group: dist.ProcessGroup | None
    device: str


def plan(
    mask: Mask | Mapping[tuple[int, int], Mask] | None,
    seqlen: int | tuple[int, int],
    mesh: Any,
    *,
    heads: tuple[int, int],
    head_dim: int = 128,
    layout: str = "auto",
    batch: int = 1,
    tile: int | None = None,
) -> "Plan":
    """How the ranks of `mesh` share out one attention over a sequence; no collective, the same on all ranks.

    Args:
        mask: a mask of `tilewise.masks` over the whole sequence, or a mapping of head ranges to masks; None: every query sees every key.
        seqlen: of the whole sequence; (seqlen_q, seqlen_k) where queries and keys are different tokens (cross-attention): then the keys are held in
            order, as many by each rank.
        mesh: a DeviceMesh of one dimension, a process group, or (rank, world), a plan that can be looked at but not run.
        heads: (heads_q, heads_k) of the whole model.
        head_dim: width of a head, for predictions.
        layout: "auto" shares out chunks of queries, so that ranks compute equally many pairs and fetch few keys. "contiguous": in order. "zigzag":
            the r-th and the r-th last of 2 world pieces to rank r. "ulysses": tokens in order, and for attention heads / world of each rank; where
            heads_k is no multiple of world, their greatest common divisor shares heads, and such groups share queries.
        batch: entries, for a mask that differs between them; else any batch will do.
        tile: queries that are never cut apart; None: 96 on the CPU, 128 elsewhere. Results have the bits of one process where the backend's tile of
            queries divides it.

    Returns:
        A `Plan`, for `attention`. Tokens that no rank needs are exchanged with none.

    Raises:
        ValueError, ShapeError: a wrong argument, or a mask that does not fit.
    """
    where = place_of(mesh)
    seqlen_q, seqlen_k = _lengths(seqlen)
    heads_q, heads_k = _heads(heads)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")
    tile = check_count("tile", TILES.get(where.device, TILES["cuda"]) if tile is None else tile, 1)
    costs = solver.Costs.of(heads_k, check_count("head_dim", head_dim, 1))
    found = _read(mask)
    sharing = int(np.gcd(where.world, heads_k)) if layout == "ulysses" else 1
    groups, cross = where.world // sharing, isinstance(seqlen, tuple | list)
    edges = chunk_edges(seqlen_q, groups, tile)
    work = survey(found, edges, seqlen_k, check_count("batch", batch, 1), heads_q)
    owner = _owners(work, groups, layout, costs, cross)
    of_groups = tuple(merged(np.stack([edges[:-1], edges[1:]], axis=1)[owner == group]) for group in range(groups))
    q = Axis(seqlen_q, tuple(part for rows in of_groups for part in in_order(rows, sharing)))
    k = Axis(seqlen_k, in_order(((0, seqlen_k),), where.world)) if cross else q
    return Plan(found, q, k, of_groups, owner, work, where, (heads_q, heads_k), head_dim, batch, layout)


def _lengths(seqlen: Any) -> tuple[int, int]:
    pair = seqlen if isinstance(seqlen, tuple | list) else (seqlen, seqlen)
    if len(pair) != 2:
        raise ValueError(f"seqlen must be a length, or (seqlen_q, seqlen_k), got {seqlen!r}")
    return check_count("seqlen_q", pair[0]), check_count("seqlen_k", pair[1])


def _heads(heads: Any) -> tuple[int, int]:
    if not isinstance(heads, tuple | list) or len(heads) != 2:
        raise ValueError(f"heads must be (heads_q, heads_k), got {heads!r}")
    heads_q, heads_k = check_count("heads[0]", heads[0], 1), check_count("heads[1]", heads[1], 1)
    if heads_q % heads_k:
        raise ValueError(f"heads must be (heads_q, heads_k) with heads_q a multiple of heads_k, got {heads}")
    return heads_q, heads_k


def _read(mask: Mask | Mapping[tuple[int, int], Mask] | None) -> Mask:
    """One mask, with cu_seqlens that are on a device read."""
    found = combine(False, mask)
    return found.read() if isinstance(found, DeviceDocuments) else found


def _owners(work: Work, groups: int, layout: str, costs: solver.Costs, cross: bool) -> ndarray:
    """The group of each chunk of queries."""
    n = len(work.load)
    if layout == "zigzag":
        return solver.zigzag(n, groups)
    if layout != "auto":
        return solver.contiguous(n, groups)
    apart = np.zeros((n, n), np.int64)  # where keys lie elsewhere, no exchange of queries brings them nearer
    needs = apart if cross else overlap(work.chunk, work.first, work.last, work.edges, n)
    return solver.solve(work.load, needs, groups, costs)


@dataclass(frozen=True, eq=False)
class Plan:
    """What `plan` found. Two plans that read the same have the same `digest`.

    mask: over the whole sequence. q, k: who holds which tokens. rows: of each group of ranks the queries that it computes; the ranks of a group have
    a part of the heads each. owner: of each chunk of queries, its group.
    """

    mask: Mask
    q: Axis
    k: Axis
    rows: tuple[Ranges, ...]
    owner: ndarray
    work: Work
    place: Place
    heads: tuple[int, int]
    head_dim: int
    batch: int
    layout: str
    state: dict = field(default_factory=dict, repr=False)  # routes by device, and whether the ranks have agreed

    def __repr__(self) -> str:
        return (
            f"Plan({self.mask!r:.80}, {self.q.length} x {self.k.length}, rank {self.place.rank} of {self.place.world}, "
            f"layout={self.layout!r}, {self.digest[:12]})"
        )

    @property
    def sharing(self) -> int:
        """Ranks of a group, each with a part of the heads."""
        return self.place.world // len(self.rows)

    @property
    def group(self) -> int:
        """The group of this rank."""
        return self.place.rank // self.sharing

    @property
    def seqlen(self) -> int:
        """How many queries this rank holds."""
        return self.q.count(self.place.rank)

    @property
    def seqlen_k(self) -> int:
        """How many keys this rank holds."""
        return self.k.count(self.place.rank)

    @cached_property
    def digest(self) -> str:
        """Of all that the ranks of one plan must agree on."""
        sizes = self.q.length, self.k.length, self.place.world, self.heads, self.head_dim, self.batch, self.rows, self.k.ranges
        return hashlib.sha256(repr((self.mask._key(), sizes)).encode()).hexdigest()

    @property
    def local_mask(self) -> Mask:
        """The mask of this rank's call: its group's queries and its heads, against all keys."""
        return self.mask_of(self.head_slices(self.heads[0])[self.place.rank], by_heads=True)

    def mask_of(self, heads: slice, by_heads: bool, keys: tuple[int, int] | None = None) -> Mask:
        """The mask of this rank's queries and these of all query heads, and keys; by_heads: the heads matter also where the mask is the same for
        all.
        """
        named = heads.stop - heads.start < self.heads[0] and (by_heads or self.mask.extent[1] != 1)
        return Part(
            self.mask,
            self.q.length,
            self.rows[self.group],
            (heads.start, heads.stop, self.heads[0]) if named else None,
            keys and (*keys, self.k.length),
        )

    @cached_property
    def needs(self) -> list[ndarray]:
        """Of each group the keys that its queries see, intervals (n, 2), ascending and apart."""
        return self.work.needed_by(self.owner, len(self.rows))

    def with_mask(self, mask: Mask | Mapping[tuple[int, int], Mask] | None) -> "Plan":
        """The plan of another mask over the same tokens, held by the same ranks: for models with different masks in their layers."""
        found = _read(mask)
        work = survey(found, self.work.edges, self.k.length, self.batch, self.heads[0])
        return replace(self, mask=found, work=work, state={})

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """(seqlen,) int64: where this rank's tokens are in the whole sequence, for rotary embeddings."""
        return self.q.places(self.place.rank).to(device)

    def dispatch(self, x: Tensor, dim: int = 1, keys: bool = False) -> Tensor:
        """This rank's tokens of x, which has the whole sequence along `dim`; keys: of the keys, where those are other tokens."""
        axis = self.k if keys else self.q
        if x.shape[dim] != axis.length:
            raise ShapeError(f"x has {x.shape[dim]} tokens along dim {dim}, the plan {axis.length}; dispatch takes the whole sequence")
        return x.index_select(dim, axis.places(self.place.rank).to(x.device))

    def undispatch(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence, on every rank, of which x has this rank's tokens along `dim`; a collective. Its gradient is that of the sum of the
        ranks' losses.
        """
        self.check_local("x", x.shape[dim])
        return movement.Whole.apply(x, self, dim)

    def roll(self, x: Tensor, shift: int, dim: int = 1) -> Tensor:
        """This rank's tokens of the whole sequence rolled by `shift`, as torch.roll would, of which x has this rank's tokens; a collective. Shift -1
        gives each position the token that follows it.
        """
        self.check_local("x", x.shape[dim])
        return movement.Rolled.apply(x, self, shift, dim)

    def check_local(self, name: str, tokens: int, keys: bool = False) -> None:
        """ShapeError unless a tensor has as many tokens as this rank holds."""
        expected = self.seqlen_k if keys else self.seqlen
        if tokens != expected:
            raise ShapeError(
                f"{name} has {tokens} tokens, but rank {self.place.rank} of {self.place.world} holds {expected} of the plan's "
                f"{(self.k if keys else self.q).length}; plan.dispatch gives them"
            )

    def head_slices(self, heads: int, stage: int = 0, stages: int = 1) -> list[slice]:
        """Of each rank the heads that it computes, of `heads` query or key heads: all, or the stage-th of `stages` equal parts."""
        width = heads // self.sharing // stages
        starts = [r % self.sharing * (heads // self.sharing) + stage * width for r in range(self.place.world)]
        return [slice(start, start + width) for start in starts]

    def pieces(self, bytes_of_key: int, most_bytes: int | None, stages: int = 1) -> tuple[int, int]:
        """(stages, parts): in how many parts of heads, and of keys, a rank computes, that keys and values of no more than `most_bytes` are there at a
        time, at bytes_of_key of a token and head. Keys are parted only where those of one head at a time are too many. `stages` at least. ValueError:
        most_bytes below 1.
        """
        here = self.heads[1] // self.sharing
        if most_bytes is None:
            return stages, 1
        check_count("most_bytes", most_bytes, 1)
        for n in (n for n in range(stages, here + 1) if here % n == 0):
            if here // n * bytes_of_key * self.k.length <= most_bytes:
                return n, 1
        tokens = max(most_bytes // bytes_of_key // KEYS * KEYS, KEYS)
        return here, -(-self.k.length // tokens)

    def key_parts(self, parts: int) -> list[tuple[int, int] | None]:
        """At most `parts` ranges of keys, of whole tiles but for the last; [None] for all keys at once."""
        if parts == 1:
            return [None]
        step = -(-self.k.length // parts // KEYS) * KEYS
        return [(first, min(first + step, self.k.length)) for first in range(0, self.k.length, step)]

    def routes_of_keys(self, device: torch.device, part: tuple[int, int] | None = None) -> Routes:
        """Keys, or those of a part, to the ranks with queries that see them, each to its own position."""

        def make() -> Routes:
            needs = self.needs if part is None else [cut(each, *part) for each in self.needs]
            wanted = [needs[r // self.sharing] for r in range(self.place.world)]
            into = None if part is None else wanted[self.place.rank][:, 0] - part[0]
            return Routes.of(self.k, wanted, self.place.rank, into)

        return self._routes(f"keys {part}", device, make)

    def routes_of_queries(self, device: torch.device) -> Routes:
        """The queries of a group to all of its ranks, one behind another."""

        def make() -> Routes:
            wanted = [np.array(rows, np.int64).reshape(-1, 2) for rows in self.rows]
            mine = wanted[self.group]
            length = mine[:, 1] - mine[:, 0]
            return Routes.of(
                self.q, [wanted[r // self.sharing] for r in range(self.place.world)], self.place.rank, np.cumsum(length) - length
            )

        return self._routes("queries", device, make)

    def _routes(self, name: str, device: torch.device, make) -> Routes:
        key = name, str(device)
        if key not in self.state:
            self.state[key] = make().to(device)
        return self.state[key]

    def check_runs(self, device: torch.device) -> None:
        """UnsupportedError for a plan without a group. The first time the ranks compare digests, in one small collective: ValueError where they
        differ.
        """
        if self.place.world == 1:
            return
        if self.place.group is None:
            raise UnsupportedError(
                "this plan was made for (rank, world), to be looked at; make it with a DeviceMesh or a process group to run it"
            )
        if not self.state.get("agreed"):
            movement.agree(int(self.digest[:15], 16), self.place.group, device, repr(self))
            self.state["agreed"] = True

    def report(self, itemsize: int = 2, most_bytes: int | None = None, batch: int = 1) -> reporting.Report:
        """Who computes and fetches how much, what that should take, and a picture; print it, or read its fields. itemsize: bytes of an element.
        most_bytes: as of `attention`, for `batch` batch entries.
        """
        return reporting.report(self, itemsize, most_bytes, batch)


def place_of(mesh: Any) -> Place:
    """Where this process stands in a mesh, a group, or as (rank, world) says."""
    if isinstance(mesh, tuple):
        rank, world = (check_count(f"mesh[{n}]", each, n) for n, each in enumerate(mesh))
        if rank >= world:
            raise ValueError(f"mesh=(rank, world) must have rank < world, got {mesh}")
        return Place(rank, world, None, "cpu")
    if hasattr(mesh, "get_group") and hasattr(mesh, "ndim"):
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension, got {mesh.ndim}: take the one for context parallelism, such as mesh['cp']")
        group = mesh.get_group()
        return Place(dist.get_rank(group), dist.get_world_size(group), group, mesh.device_type)
    if isinstance(mesh, dist.ProcessGroup):
        device = "cpu" if dist.get_backend(mesh) in ("gloo", "fake") else "cuda"
        return Place(dist.get_rank(mesh), dist.get_world_size(mesh), mesh, device)
    raise ValueError(f"mesh must be a DeviceMesh, a process group or (rank, world), got {type(mesh).__name__} {mesh!r:.100}")


def chunk_edges(seqlen: int, ranks: int, tile: int) -> ndarray:
    """Where chunks of queries end, (n + 1,) int64 from 0 to seqlen: whole tiles each, but for the last, which also has what is left over.

    About `CHUNKS` for each rank, and equally many where the tiles go round evenly.
    """
    tiles = max(seqlen // tile, 1)
    most = CHUNKS if ranks <= 8 else max(256 // ranks, 2)
    each = tiles // ranks
    size = max(-(-tiles // (ranks * most)), 1)
    if tiles % ranks == 0:
        size = next((n for n in range(size, 0, -1) if each % n == 0 and each // n <= 2 * most), size)
    edges = np.append(np.arange(0, tiles, size) * tile, seqlen).astype(np.int64)
    return edges if seqlen else np.zeros(2, np.int64)


def in_order(rows: Ranges, parts: int) -> tuple[Ranges, ...]:
    """Ranges cut into `parts` parts of ceil(tokens / parts) tokens each, the last ones shorter, as torch.chunk cuts."""
    if parts == 1:
        return (rows,)
    length = sum(last - first for first, last in rows)
    step = -(-length // parts)
    found = []
    for part in range(parts):
        begin, end, start, mine = min(part * step, length), min((part + 1) * step, length), 0, []
        for first, last in rows:
            a, b = max(begin - start, 0), min(end - start, last - first)
            if a < b:
                mine.append((first + a, first + b))
            start += last - first
        found.append(tuple(mine))
    return tuple(found)
