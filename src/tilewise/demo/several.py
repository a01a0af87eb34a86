"""Train the demo's GPT in several processes that share each sequence, and in one, and compare the losses bit by bit.

Every layer but attention works on tokens one by one, so a rank computes its own; attention crosses ranks by `tilewise.distributed`, here with
layout="ulysses", which gives gradients the bits of one process, too. Sums over tokens (the loss, the gradients of weights) are taken rank by rank and
then in the order of the ranks. The one process does the same with a copy of the model for each part of the sequence, around one `tilewise.attention`
of it all.
"""

import copy
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, multiprocessing
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from tilewise import distributed
from tilewise.demo import data
from tilewise.demo.model import GPT, GPTConfig, build, tilewise_attention
from tilewise.demo.train import TrainConfig
from tilewise.masks import Causal

MOST_STEPS = 10
SECONDS = 120  # that a rank waits for another

Attend = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""Causal attention over the parts of a sequence that a process has, in order: q, k and v of each part to O of each."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `tilewise demo --ranks` runs."""

    ranks: int
    steps: int = MOST_STEPS
    batch: int = 2
    context: int = 1024
    seed: int = 0

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(context=self.context)

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(steps=self.steps, batch=self.batch, seed=self.seed, warmup=max(self.steps // 4, 1))


def run(options: Options, console: Console) -> bool:
    """Train both, print both; True where every loss has the same bits.

    Raises ValueError where ranks cannot share the heads, or for a context longer than the text.
    """
    model = options.model
    if model.heads_k % options.ranks:
        raise ValueError(
            f"ranks is {options.ranks}; it must divide the model's {model.heads_k} key heads, so that gradients have the bits of one process"
        )
    data.check_context(data.split(data.corpus())[1], options.context)
    one, several = train_in_one(options), train_in_ranks(options)
    console.print(f"{options.steps} steps, {options.batch} x {options.context} bytes, fp32 on the CPU", highlight=False)
    for step, (a, b) in enumerate(zip(one, several, strict=True)):
        console.print(
            f"  step {step + 1:3d}   one process {a:.9f}   {options.ranks} ranks {b:.9f}   {'=' if a == b else 'differs'}", highlight=False
        )
    same = one == several
    found = "have the losses of one process, to the last bit" if same else "have other losses than one process"
    console.print(f"{options.ranks} processes {found}.", style="bold green" if same else "bold red")
    return same


def train_in_one(options: Options) -> list[float]:
    """The losses of one process, which has every part of the sequence."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rank
    try:
        return _train(options, range(options.ranks), _whole, lambda numbers: list(numbers))
    finally:
        torch.set_num_threads(threads)


def train_in_ranks(options: Options) -> list[float]:
    """The losses of as many processes as the options say, each with its part."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    spawn(_rank, args=(options, port, results), nprocs=options.ranks)
    return results.get()


def _rank(rank: int, options: Options, port: int, results) -> None:
    torch.set_num_threads(1)
    where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": options.ranks}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS), **where)
    model = options.model
    plan = distributed.plan(
        Causal(), model.context, dist.group.WORLD, heads=(model.heads_q, model.heads_k), head_dim=model.head_dim, layout="ulysses"
    )

    def attend(q, k, v):
        return [distributed.attention(q[0], k[0], v[0], plan)]

    def gather(numbers: list[Tensor]) -> list[Tensor]:
        every = [torch.empty_like(numbers[0]) for _ in range(options.ranks)]
        dist.all_gather(every, numbers[0])
        return every

    losses = _train(options, [rank], attend, gather)
    if rank == 0:
        results.put(losses)
    dist.barrier()
    dist.destroy_process_group()


def _whole(q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]) -> Sequence[Tensor]:
    o = tilewise_attention(*(torch.cat(list(x), dim=1) for x in (q, k, v)))
    return o.split([x.shape[1] for x in q], dim=1)


def _train(options: Options, parts: Sequence[int], attend: Attend, gather: Callable[[list[Tensor]], list[Tensor]]) -> list[float]:
    """The loss before each step. parts: those of the sequence that this process has. gather: what all parts have, of what its own have."""
    model, config = options.model, options.config
    replicas = [build(model, tilewise_attention, config.seed)]
    replicas += [copy.deepcopy(replicas[0]) for _ in parts[1:]]
    optimizer = torch.optim.AdamW(replicas[0].parameters(), lr=config.peak_rate, betas=(0.9, 0.95), weight_decay=0.1)
    text, _ = data.split(data.corpus())
    losses = []
    for step in range(config.steps):
        batch = data.batch_at(text, step, batch=config.batch, context=model.context, seed=config.seed)
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step)
        found = _losses(replicas, batch, parts, options.ranks, attend)
        _in_order(found).backward()
        losses.append(_in_order(gather([loss.detach() for loss in found])).item())
        total = _in_order(gather([_flat_gradient(replica) for replica in replicas]))
        _give_gradient(replicas[0], total)
        torch.nn.utils.clip_grad_norm_(replicas[0].parameters(), 1.0)
        optimizer.step()
        for replica in replicas[1:]:
            replica.load_state_dict(replicas[0].state_dict())
        for replica in replicas:
            replica.zero_grad()
    return losses


def _losses(replicas: Sequence[GPT], batch: data.Batch, parts: Sequence[int], ranks: int, attend: Attend) -> list[Tensor]:
    """The part of the mean loss that each part of the sequence has."""
    inputs, targets = ([x.chunk(ranks, dim=1)[part] for part in parts] for x in batch)
    angles = [replica.angles.chunk(ranks)[part] for replica, part in zip(replicas, parts, strict=True)]
    x = [replica.embedding(tokens) for replica, tokens in zip(replicas, inputs, strict=True)]
    for layer in range(len(replicas[0].blocks)):
        blocks = [replica.blocks[layer] for replica in replicas]
        o = attend(*zip(*(block.before_attention(each, angle) for block, each, angle in zip(blocks, x, angles, strict=True)), strict=True))
        x = [block.after_attention(each, out) for block, each, out in zip(blocks, x, o, strict=True)]
    logits = [F.linear(replica.norm(each), replica.embedding.weight) for replica, each in zip(replicas, x, strict=True)]
    return [
        F.cross_entropy(y.flatten(0, 1), want.flatten(), reduction="sum") / batch.targets.numel()
        for y, want in zip(logits, targets, strict=True)
    ]


def _in_order(numbers: Sequence[Tensor]) -> Tensor:
    total = numbers[0]
    for each in numbers[1:]:
        total = total + each
    return total


def _flat_gradient(model: GPT) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def _give_gradient(model: GPT, flat: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).clone()
