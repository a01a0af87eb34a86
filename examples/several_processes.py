"""One sequence over two processes, each with half of the tokens, and the bits of one process.

`python examples/several_processes.py`

The same code runs on GPUs with backend="nccl" and a process a GPU (docs/guide/several-gpus.md).
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import tilewise as tw
from tilewise import distributed

WORLD, SEQLEN, HEADS, HEADS_K, HEAD_DIM = 2, 768, 4, 2, 32
MASK = tw.Documents([0, 300, 301, SEQLEN], inner=tw.Causal())


def sequence() -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the whole sequence, the same in every process."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, SEQLEN, heads, HEAD_DIM) for heads in (HEADS, HEADS_K, HEADS_K))
    return q, k, v


def rank_of(rank: int, address: str) -> None:
    """What each process does: take its tokens, attend, put the outputs together to compare them."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    try:
        plan = distributed.plan(MASK, SEQLEN, dist.group.WORLD, heads=(HEADS, HEADS_K), head_dim=HEAD_DIM)
        q, k, v = (plan.dispatch(x).requires_grad_() for x in sequence())
        o = distributed.attention(q, k, v, plan)
        o.square().sum().backward()
        print(f"rank {rank} has {plan.seqlen} of {SEQLEN} tokens", flush=True)
        whole = plan.undispatch(o.detach())
        if rank == 0:
            expected = tw.attention(*sequence(), mask=tw.Part(MASK, SEQLEN, [(0, SEQLEN)]))
            assert torch.equal(whole, expected)
            print("O has the bits of one process", flush=True)
    finally:
        dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, args=(f"file://{folder}/meeting",), nprocs=WORLD)  # pyright: ignore[reportPrivateImportUsage]


if __name__ == "__main__":
    main()
