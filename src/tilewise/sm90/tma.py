"""Tiles by TMA: one thread asks, the copy engine moves the tile and counts its bytes into an mbarrier. From K3 on.

A pipe is a ring of stages with two mbarriers each: `full`, on which the bytes of a tile arrive, and `empty`, on which its readers do when
they are done with it. A state (stage, phase) walks the ring on either side.
"""

from typing import NamedTuple

from tilewise.sm90.dsl import Constexpr, Int16, Int64, SmemAllocator, arch, const_expr, cpasync, cute, pipeline

# What the L2 cache does with lines that are read or written, as `createpolicy.fractional` would say it.
NORMAL = 0x1000000000000000
FIRST = 0x12F0000000000000  # evicted first: they are not read again


class Tma(NamedTuple):
    """A tensor as the copy engine sees it: the descriptor, and coordinates in place of addresses."""

    atom: cute.CopyAtom
    gmem: cute.Tensor


def describe(mX: cute.Tensor, staged: cute.Layout, tile: tuple[int, int], cluster: int = 1) -> Tma:
    """The descriptor for loading `tile` of mX (., ., heads) into one stage of the shared layout `staged`; on the host.

    `cluster` thread blocks that load the same tiles fetch a share each, and every share goes to all of them.
    """
    op = cpasync.CopyBulkTensorTileG2SOp() if cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    return Tma(*cpasync.make_tiled_tma_atom(op, mX, cute.select(staged, mode=[0, 1]), tile, num_multicast=cluster))


def make_pipe(storage: SmemAllocator, stages: int, tx_bytes: int, readers: int, cluster: int = 1) -> pipeline.PipelineTmaAsync:
    """A pipe. A stage is full after `tx_bytes` and empty after an arrival from each of `readers` warps of all `cluster` thread blocks.

    Its mbarriers are initialised, and visible after `barriers_ready`.
    """
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=storage.allocate_array(cute.Int64, 2 * stages),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers * cluster),
        tx_count=tx_bytes,
        cta_layout_vmnk=cute.make_layout((1, cluster, 1, 1)),
        defer_sync=True,
    )


@cute.jit
def barriers_ready(cluster: Constexpr[int] = 1):
    """After every pipe was made: their mbarriers exist for all threads, of all blocks of the cluster, and for the copy engine."""
    arch.mbarrier_init_fence()
    if const_expr(cluster == 1):
        arch.sync_threads()
    else:
        meet_cluster()


@cute.jit
def meet_cluster():
    """All threads of all blocks of the cluster meet."""
    arch.cluster_arrive()
    arch.cluster_wait()


@cute.jit
def release(pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState):
    """This warp is done with the stage; without a cluster. The pipe's own `consumer_release` chooses a thread by its number, for which the compiler
    asks anew in every round of a loop, and waits before the next product.
    """
    with arch.elect_one():
        arch.mbarrier_arrive(pipe.consumer_get_barrier(state))


def at_first(stages: int) -> pipeline.PipelineState:
    """The reader's walk around a ring of `stages`."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


def at_first_empty(stages: int) -> pipeline.PipelineState:
    """The writer's: every stage counts as empty at the start."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def after(turns, stages: int) -> pipeline.PipelineState:
    """The reader's state after it has gone through `turns` stages of a ring: one number to keep instead of three."""
    return pipeline.PipelineState(stages, turns, turns % stages, turns // stages % 2)


def after_empty(turns, stages: int) -> pipeline.PipelineState:
    """The writer's."""
    return pipeline.PipelineState(stages, turns, turns % stages, (turns // stages + 1) % 2)


@cute.jit
def load(
    source: Tma, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, tile: Constexpr[tuple], at: tuple,
    policy: Int64 | None = None,
):  # fmt: skip
    """Ask for the tile at `at` (row and column in tiles; then head, batch) into the stage of `state`, which is empty. One warp calls it.

    policy: NORMAL or FIRST.
    """
    gX = cute.local_tile(source.gmem[(None, None, *at[2:])], tile, at[:2])
    tXsX, tXgX = cpasync.tma_partition(source.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
    cute.copy(source.atom, tXgX, tXsX[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state), cache_policy=policy)


@cute.jit
def load_share(
    source: Tma, sX: cute.Tensor, pipe: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, tile: Constexpr[tuple], at: tuple,
    cluster: Constexpr[int],
):  # fmt: skip
    """As `load`, for `cluster` blocks that all call it: each asks for its share of the tile, for all of them."""
    gX = cute.local_tile(source.gmem[(None, None, *at[2:])], tile, at[:2])
    rank = arch.make_warp_uniform(arch.block_idx_in_cluster())
    parts = cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    tXsX, tXgX = cpasync.tma_partition(source.atom, rank, cute.make_layout(cluster), *parts)
    everyone = Int16((1 << cluster) - 1)
    cute.copy(source.atom, tXgX, tXsX[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state), mcast_mask=everyone)
