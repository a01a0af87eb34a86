"""Distributed tensors that are sharded along the sequence, as a plan of layout="contiguous" holds its tokens."""

from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tilewise.distributed.planning import Plan, in_order
from tilewise.errors import UnsupportedError


class Like(NamedTuple):
    """How the distributed tensors lie."""

    mesh: object
    placements: tuple


def local(tensors: tuple[Tensor, ...], plan: Plan) -> tuple[list[Tensor], Like]:
    """The local parts, and how they lie; UnsupportedError where they are not this plan's tokens. Nothing is gathered."""
    found = []
    for name, x in zip("qkv", tensors, strict=True):
        if not isinstance(x, DTensor):
            raise UnsupportedError(f"{name} is a plain tensor beside DTensors; give all of q, k and v as DTensors, or their local parts")
        if x.device_mesh.ndim != 1 or tuple(x.placements) != (Shard(1),):
            raise UnsupportedError(
                f"{name} is a DTensor with placements {tuple(x.placements)} on a mesh of {x.device_mesh.ndim} dimensions; distributed.attention "
                "takes Shard(1), the sequence, on the plan's mesh; give x.to_local() where it is the plan's tokens"
            )
        axis = plan.q if name == "q" else plan.k
        if tuple(axis.ranges) != in_order(((0, axis.length),), plan.place.world):
            raise UnsupportedError(
                f"{name} is a DTensor, which holds tokens in order, {-(-axis.length // plan.place.world)} on each rank, but the plan has others "
                f"(layout={plan.layout!r}); make it with layout='contiguous' and a length that tile * world divides, or give plan.dispatch's tensors"
            )
        found.append(x.to_local())
    like: DTensor = tensors[0]  # pyright: ignore[reportAssignmentType]  (they are)
    return found, Like(like.device_mesh, tuple(like.placements))


def placed(o: Tensor, like: Like) -> DTensor:
    """A local result as a distributed tensor."""
    return DTensor.from_local(o, like.mesh, like.placements)  # pyright: ignore[reportArgumentType]
