"""Attention over a sequence that several GPUs hold: are the bits those of one, and what does each scheme take?

torchrun --nproc-per-node 2 tools/gpu/context_parallel.py [--out FILE]      on GPUs, by NCCL; tools/gpu/context_parallel.sh starts it
torchrun --nproc-per-node 2 tools/gpu/context_parallel.py --device cpu      a rehearsal by gloo, with small sizes

First, bit by bit: O, LSE and dQ of each rank beside those of one device, which computes the whole sequence; dK and dV within rounding of the same.
Then times, a line of JSON each: a forward pass and a backward pass, and alone what they consist of (gather, kernel, return), of the slowest rank
the median; TFLOP/s of a GPU count visible pairs. kernel_of_mask is the same by the kernels that causal masks and windows have of their own. Schemes:
tilewise's plans, and on the same kernel an all-gather of all keys and a ring that merges partial results; and torch's context_parallel over
flash attention or cuDNN's, for keys repeated for every query head. Before all that, decoding from shares of a cache beside a whole one, each
launched by the host and as a CUDA graph.
Exits with 1 where bits differ.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention, context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise import api, distributed
from tilewise.bench.provenance import provenance
from tilewise.distributed import context
from tilewise.masks import Part
from tilewise.runtime import operator
from tilewise.testing.packs import pack

MASKS = ("full", "causal", "documents", "window")
OURS = ("tilewise", "stages", "contiguous", "zigzag", "ulysses", "all-gather", "ring")
TORCH = {"torch:flash": SDPBackend.FLASH_ATTENTION, "torch:cudnn": SDPBackend.CUDNN_ATTENTION}
SCHEMES = (*OURS, "one", *TORCH)
PARTS = ("decode", "check", "times")
STAGES = 2  # parts of the key heads, of which the next is fetched while one is computed
BUDGET_S = 1.5  # of a measurement, about
AT_ONCE = context.Options(None, 0.0, (0.0, None, 0), False, None, stages=1, parts=1)


def mask_of(name: str, n: int) -> tw.Mask:
    documents = pack(n, np.random.default_rng(n))
    return {
        "full": tw.Full(),
        "causal": tw.Causal(),
        "documents": tw.Documents(documents, inner=tw.Causal()),
        "window": tw.SlidingWindow(1023, 0),
    }[name]


def tensors(n: int, heads: tuple[int, int], dim: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dO of the whole sequence, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(n)
    shapes = [(1, n, h, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype) for shape in shapes]


class Ring(torch.autograd.Function):
    """Keys and values go round; each step's O and LSE are merged. Gradients of keys and values go round in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: distributed.Plan) -> Tensor:
        outputs, lses, pair = [], [], torch.stack((k, v))
        for step in range(plan.place.world):
            source = (plan.place.rank - step) % plan.place.world
            coming = passed_on(pair, plan, source) if step < plan.place.world - 1 else None
            if mask := piece(plan, source):
                o, lse, _ = operator.attend(given(q, pair[0], pair[1], mask))
                outputs.append(o.float())
                lses.append(lse)
                if len(outputs) == 2:
                    (o, lse), outputs, lses = tw.merge(outputs, lses), [], []
                    outputs, lses = [o], [lse]
            pair = pair if coming is None else arrived(coming)
        o = outputs[0].to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lses[0])
        ctx.plan = plan
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple:
        q, k, v, o, lse = ctx.saved_tensors
        plan, d_q, pair = ctx.plan, torch.zeros_like(q, dtype=torch.float32), torch.stack((k, v))
        sums = torch.zeros_like(pair, dtype=torch.float32)
        for step in range(plan.place.world):
            source = (plan.place.rank - step) % plan.place.world
            coming = passed_on(pair, plan, source) if step < plan.place.world - 1 else None
            if mask := piece(plan, source):
                dq, dk, dv, *_ = operator.differentiate(o, lse.contiguous(), d_o, given(q, pair[0], pair[1], mask))
                d_q += dq
                sums += torch.stack((dk, dv))
            sums = arrived(passed_on(sums, plan, source))
            pair = pair if coming is None else arrived(coming)
        return d_q.to(q.dtype), *sums.to(k.dtype), None


def given(q: Tensor, k: Tensor, v: Tensor, mask: tw.Mask) -> operator.Operands:
    options = {"scale": None, "softcap": 0.0, "alibi_slopes": None, "sink": None, "deterministic": False, "backend": None}
    return api.operands(q, k, v, mask, dropout=(0.0, None, 0), **options)._replace(grad=True)


def piece(plan: distributed.Plan, source: int) -> tw.Mask | None:
    """The mask between this rank's queries and another's keys; None where nothing is visible."""
    return _piece(plan.digest, plan.place.rank, source, lambda: plan)


@cache
def _pieces() -> dict:
    return {}


def _piece(digest: str, rank: int, source: int, plan_of: Callable[[], distributed.Plan]) -> tw.Mask | None:
    key = digest, rank, source
    if key not in _pieces():
        plan = plan_of()
        keys = Part(plan.mask.transpose(), plan.k.length, plan.k.ranges[source]).transpose()
        mask = Part(keys, plan.q.length, plan.q.ranges[rank])
        _pieces()[key] = mask if mask.pairs(plan.q.count(rank), plan.k.count(source)) else None
    return _pieces()[key]


def passed_on(x: Tensor, plan: distributed.Plan, source: int) -> tuple[Tensor, list]:
    """x on its way to the next rank, and what comes from the one before; ranks may hold different numbers of tokens."""
    rank, world, group = plan.place.rank, plan.place.world, plan.place.group
    if world == 1:
        return x, []
    came = x.new_empty((*x.shape[:2], plan.k.count((source - 1) % world), *x.shape[3:]))
    to, back = ((rank + 1) % world, (rank - 1) % world)
    moves = [dist.P2POp(dist.isend, x.contiguous(), to, group), dist.P2POp(dist.irecv, came, back, group)]
    return came, dist.batch_isend_irecv(moves)


def arrived(coming: tuple[Tensor, list]) -> Tensor:
    for work in coming[1]:
        work.wait()
    return coming[0]


def scheme(name: str, mask: tw.Mask, n: int, heads: tuple[int, int], dim: int, group: Any) -> tuple[distributed.Plan, Callable]:
    """The plan, and a function of this rank's q, k and v."""
    balanced = "zigzag" if mask == tw.Causal() else "contiguous"
    layout = {"tilewise": "auto", "stages": "auto", "all-gather": balanced, "ring": balanced}.get(name, name)
    plan = distributed.plan(mask, n, group, heads=heads, head_dim=dim, layout=layout)
    if name == "all-gather":
        plan.__dict__["needs"] = [np.array([[0, n]])] * len(plan.rows)
    if name == "ring":
        return plan, lambda q, k, v: Ring.apply(q, k, v, plan)
    return plan, lambda q, k, v: distributed.attention(q, k, v, plan, stages=STAGES if name == "stages" else 1)


def check(name: str, n: int, heads: tuple[int, int], dim: int, device: torch.device, dtype: torch.dtype) -> Iterator[dict]:
    """Bits beside those of one device, for each mask; a row each."""
    for mask_name in MASKS:
        mask = mask_of(mask_name, n)
        q, k, v, d_o = tensors(n, heads, dim, device, dtype)
        plan, attend = scheme(name, mask, n, heads, dim, dist.group.WORLD)
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        o, lse = tw.attention(*whole, mask=Part(mask, n, [(0, n)]), return_lse=True)
        want = {"o": o, "lse": lse.transpose(1, 2), **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, whole, d_o), strict=True))}
        plain = tw.attention(q, k, v, mask=mask)
        ours = [plan.dispatch(x).requires_grad_() for x in (q, k, v)]
        got_o = attend(*ours)
        got = {"o": got_o, **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(got_o, ours, plan.dispatch(d_o)), strict=True))}
        row = {"check": mask_name, "scheme": name, "seqlen": n, "heads": heads, "head_dim": dim, "dtype": str(dtype)[6:], "right": True}
        if name != "ring":
            got_o, got_lse = distributed.attention(*ours, plan, return_lse=True)
            again = torch.autograd.grad(got_o, ours, plan.dispatch(d_o))
            got["lse"] = got_lse.transpose(1, 2)
            row["same_bits_again"] = agreed(
                all(torch.equal(x, got[what]) for x, what in zip(again, ("dq", "dk", "dv"), strict=True)), device
            )
            row["same_bits_as_plain_attention"] = agreed(torch.equal(got_o.detach(), plan.dispatch(plain)), device)
            row["right"] = row["same_bits_again"]
        for what, x in got.items():
            mine = plan.dispatch(want[what].detach())
            same = row[f"{what}_same_bits"] = agreed(torch.equal(x.detach(), mine), device)
            scale = mine.double().abs().nan_to_num(0, 0, 0).max().item() or 1.0
            error = row[f"{what}_error"] = slowest(
                (x.detach().double() - mine.double()).nan_to_num(0, 0, 0).abs().max().item() / scale, device
            )
            row["right"] &= same or ((name == "ring" or what in ("dk", "dv")) and error <= 8 * torch.finfo(dtype).eps)
        yield row


def measure(
    name: str, mask_name: str, n: int, heads: tuple[int, int], dim: int, device: torch.device, dtype: torch.dtype
) -> Iterator[dict]:
    """Rows of the forward and of the backward pass of one scheme."""
    mask = mask_of(mask_name, n)
    world = 1 if name == "one" else dist.get_world_size()
    group = (0, 1) if name == "one" else dist.group.WORLD
    plan, attend = scheme("contiguous" if name == "one" else name, mask, n, heads, dim, group)
    q, k, v, d_o = (plan.dispatch(x) for x in tensors(n, heads, dim, device, dtype))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = attend(*inputs)
    same = None
    phases: dict[str, Callable[[], Any]] = {
        "forward": lambda: attend(*inputs),
        "backward": lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True),
    }
    if name not in ("ring", "one"):
        with torch.no_grad():
            rows, ((_, keys, values),) = context._to_group(q, plan), context._keys(k, v, plan, AT_ONCE)
        local = [x.detach().requires_grad_() for x in (rows, keys, values)]
        kernel = partial(tw.attention, mask=plan.local_mask)
        local_o = kernel(*local)
        d_local = context._to_group(d_o, plan)
        phases |= {
            "gather": lambda: (context._to_group(q, plan), list(context._keys(k, v, plan, AT_ONCE))),
            "kernel": lambda: kernel(*local),
            "kernel_backward": lambda: torch.autograd.grad(local_o, local, d_local, retain_graph=True),
            "return": lambda: returned(keys, values, k, v, plan),
        }
        if ranges := by_ranges(mask_name, plan):

            def apart() -> Tensor:
                return torch.cat([tw.attention(local[0][:, rows], *local[1:], mask=each) for rows, each in ranges], dim=1)

            apart_o = apart()
            same = agreed(torch.equal(apart_o.detach(), local_o.detach()), device)
            phases |= {
                "kernel_of_mask": apart,
                "kernel_of_mask_backward": lambda: torch.autograd.grad(apart_o, local, d_local, retain_graph=True),
            }
    taken = {phase: timed(run, device) for phase, run in phases.items()}
    pairs, report = mask.pairs(n, n, 1, heads[0]), plan.report(dtype.itemsize)
    row = {"scheme": name, "mask": mask_name, "seqlen": n, "heads": heads, "head_dim": dim, "dtype": str(dtype)[6:], "world": world}
    row |= {"imbalance": report.imbalance, "traffic": report.traffic, "predicted_s": report.seconds}
    row |= {} if same is None else {"kernel_of_mask_same_bits": same}
    for direction, flops, parts in (
        ("forward", 4, ("gather", "kernel", "kernel_of_mask")),
        ("backward", 10, ("gather", "kernel_backward", "kernel_of_mask_backward", "return")),
    ):
        seconds = taken[direction]
        alone = {f"{part}_s": taken[part] for part in parts if part in taken}
        yield row | {"direction": direction, "seconds": seconds, "tflops_per_gpu": flops * pairs * dim / seconds / world / 1e12} | alone


def by_torch(
    name: str, mask_name: str, n: int, heads: tuple[int, int], dim: int, device: torch.device, dtype: torch.dtype
) -> Iterator[dict]:
    """As `measure`, of torch's context_parallel around its SDPA; only the two masks that it has."""
    if mask_name not in ("full", "causal"):
        return
    whole = tensors(n, heads, dim, device, dtype)
    q, k, v, d_o = ours = [x.transpose(1, 2).repeat_interleave(heads[0] // x.shape[2], 1).contiguous() for x in whole]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    _attention._cp_options.enable_load_balance = mask_name == "causal"  # it refuses to balance anything else
    with sdpa_kernel(TORCH[name]), context_parallel(mesh, buffers=ours, buffer_seq_dims=[2] * 4):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        o = F.scaled_dot_product_attention(*inputs, is_causal=mask_name == "causal")
        taken = {
            "forward": timed(lambda: F.scaled_dot_product_attention(*inputs, is_causal=mask_name == "causal"), device),
            "backward": timed(lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True), device),
        }
    pairs, world = mask_of(mask_name, n).pairs(n, n, 1, heads[0]), dist.get_world_size()
    row = {"scheme": name, "mask": mask_name, "seqlen": n, "heads": heads, "head_dim": dim, "dtype": str(dtype)[6:], "world": world}
    for direction, flops in (("forward", 4), ("backward", 10)):
        rate = flops * pairs * dim / taken[direction] / world / 1e12
        yield row | {"direction": direction, "seconds": taken[direction], "tflops_per_gpu": rate}


def replayed(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same launches as a CUDA graph, which gives what `run` did, overwritten by each replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def decode(n: int, heads: tuple[int, int], dim: int, device: torch.device, dtype: torch.dtype) -> Iterator[dict]:
    """One new token of one sequence of n, whose cache is on one device, or shared out in turns of a token or of 64."""
    rank, world = dist.get_rank(), dist.get_world_size()
    q, k, v, _ = tensors(n, heads, dim, device, dtype)
    q, lengths = q[:, :1].contiguous(), torch.full((1,), n, dtype=torch.int32, device=device)
    want = tw.decode(q, k, v, cache_seqlens=lengths)
    row = {"decode": n, "heads": heads, "head_dim": dim, "dtype": str(dtype)[6:], "world": world}
    one, on_gpu = partial(tw.decode, q, k, v, cache_seqlens=lengths), device.type == "cuda"
    row["one_s"] = timed(one, device)
    if on_gpu:
        row["one_graph_s"] = timed(replayed(one), device)
    positions = torch.arange(n, device=device)
    for turn in (1, 64):
        mine = positions[positions // turn % world == rank]
        share = k[:, mine], v[:, mine]
        call = partial(distributed.decode, q, *share, dist.group.WORLD, cache_seqlens=lengths, interleave=turn)
        error = slowest((call().double() - want.double()).abs().max().item() / want.double().abs().max().item(), device)
        alone = partial(tw.decode, q, *share, cache_seqlens=lengths, cp_rank=rank, cp_world=world, cp_interleave=turn, return_lse=True)
        part = torch.zeros(heads[0] * (dim + 1), device=device)
        gather = partial(dist.all_gather_into_tensor, part.new_empty(world * len(part)), part)
        times = {"seconds": timed(call, device), "kernel_s": timed(alone, device), "all_gather_s": timed(gather, device)}
        if on_gpu:
            graph = replayed(call)
            row["graph_same_bits"] = agreed(torch.equal(graph(), call()), device)
            graphs = ("", graph), ("kernel_", replayed(alone)), ("all_gather_", replayed(gather))
            times |= {f"{what}graph_s": timed(run, device) for what, run in graphs}
        right = error <= 4 * torch.finfo(dtype).eps and row.get("graph_same_bits", True)
        yield row | {"interleave": turn, "error": error, "right": right} | times


def by_ranges(mask_name: str, plan: distributed.Plan) -> list[tuple[slice, tw.Mask]]:
    """This rank's computation as a call for each range of rows, by the kernel that the mask has on one GPU; empty where there is none. Whether that
    is faster than one call by tiles, and has its bits, is to be seen.
    """
    masks = {
        "full": lambda first: tw.Full(),
        "causal": lambda first: tw.Causal("top_left", first),
        "window": lambda first: tw.SlidingWindow(1023, 0, "top_left", first),
    }
    if mask_name not in masks:
        return []
    found, start = [], 0
    for first, last in plan.rows[plan.group]:
        found.append((slice(start, start + last - first), masks[mask_name](first)))
        start += last - first
    return found


def returned(d_k: Tensor, d_v: Tensor, k: Tensor, v: Tensor, plan: distributed.Plan) -> Any:
    back = context._KeyGradients(k, v, plan, AT_ONCE)
    back.send(context.Piece(0, None, True), d_k, d_v)
    return back.received()


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the slowest rank, the median of several runs that start together."""

    def once() -> float:
        dist.barrier()
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        return time.perf_counter() - start

    once()
    first = slowest(once(), device)
    return statistics.median(slowest(once(), device) for _ in range(int(min(max(BUDGET_S / max(first, 1e-6), 2), 15))))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: float, device: torch.device) -> float:
    number = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def agreed(good: bool, device: torch.device) -> bool:
    return slowest(float(not good), device) == 0.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", help="a file to which rows are appended")
    parser.add_argument("--seqlens", default=None, help="tokens, by commas (16384,65536,131072; 768 on the CPU)")
    parser.add_argument("--heads", default="64:8,32:8", help="query and key heads, by commas")
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--parts", default=",".join(PARTS), help="what is run, by commas")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=300), **({"device_id": device} if on_gpu else {}))
    stamp, dim, dtype = provenance(device), 128 if on_gpu else 32, torch.bfloat16
    seqlens = [int(x) for x in (options.seqlens or ("16384,65536,131072" if on_gpu else "768")).split(",")]
    heads = [tuple(map(int, pair.split(":"))) for pair in options.heads.split(",")]
    right = True

    def keep(row: dict) -> None:
        nonlocal right
        right &= row.get("right", True)
        if dist.get_rank() == 0:
            line = json.dumps({"set": "context-parallel"} | row | {"environment": stamp})
            print(json.dumps(row), flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.write(line + "\n")

    wanted = options.parts.split(",")
    for n in ((8192, 524288) if on_gpu else (768,)) * ("decode" in wanted):
        for pair in heads:
            for row in decode(n, pair, dim, device, dtype):
                keep(row)
    for name in OURS * ("check" in wanted):
        for row in check(name, 8192 if on_gpu else 768, (16, 8), dim, device, dtype):
            keep(row)
    if "times" in wanted:
        for pair in heads:
            for n in seqlens:
                for mask_name in options.masks.split(","):
                    for name in options.schemes.split(","):
                        try:
                            for row in (by_torch if name in TORCH else measure)(name, mask_name, n, pair, dim, device, dtype):
                                keep(row)
                        except (torch.OutOfMemoryError, tw.UnsupportedError, NotImplementedError, RuntimeError) as error:
                            keep({"scheme": name, "mask": mask_name, "seqlen": n, "heads": pair, "reason": str(error).splitlines()[0]})
                        if on_gpu:
                            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
