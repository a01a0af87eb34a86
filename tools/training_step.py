"""What attention is worth in training: one optimiser step of a GPT of 1.3 billion parameters, on a GPU, with each attention function.

python tools/training_step.py [--out ROWS.jsonl] [--seqlen 2048,8192,16384] [--layers 24] [--impl tilewise,sdpa,fa4] [--budget 2]

24 layers of width 2048 with 16 heads of 128, weights and activations in bf16, 16,384 tokens a step, causal; forward, backward and a fused
AdamW step between two CUDA events, the models in turns. The functions' losses must agree before anything is timed.
"""

import argparse

import torch

from tilewise import bench
from tilewise.bench.provenance import provenance
from tilewise.bench.store import Row, append
from tilewise.bench.timing import interleave
from tilewise.bench.workloads import Workload
from tilewise.demo.model import GPT, Attention, GPTConfig
from tilewise.masks import Causal

TOKENS, HEADS, HEAD_DIM, VOCABULARY = 16384, 16, 128, 32768
SAME_LOSS = 1e-2  # bf16 weights; the functions differ in the last bits of O


def workload(seqlen: int, layers: int) -> Workload:
    """The attention of all layers, as one batch, for its shape and FLOPs."""
    sizes = {"batch": max(1, TOKENS // seqlen), "seqlen_q": seqlen, "heads_q": HEADS, "head_dim": HEAD_DIM}
    return Workload(name=f"training-step-{layers}", mask=Causal(), dtype=torch.bfloat16, direction="fwd+bwd", **sizes)


def model_of(seqlen: int, layers: int, attention: Attention) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(layers=layers, heads_q=HEADS, heads_k=HEADS, head_dim=HEAD_DIM, context=seqlen, vocabulary=VOCABULARY)
    with torch.device("cuda"):
        return GPT(config, attention).to(torch.bfloat16)


def flops_of(model: GPT, cell: Workload, layers: int) -> int:
    """6 a weight of a matrix and token, and the attention's."""
    weights = sum(x.numel() for x in model.parameters() if x.dim() == 2)
    return 6 * weights * cell.batch * cell.seqlen_q + layers * cell.flops


def step_of(model: GPT, inputs: torch.Tensor, targets: torch.Tensor):
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> torch.Tensor:
        optimiser.zero_grad(set_to_none=True)
        loss = model.loss(inputs, targets)
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


def measure(seqlen: int, layers: int, impls, budget_s: float) -> list[Row]:
    cell, device = workload(seqlen, layers), torch.device("cuda")
    tokens = torch.randint(VOCABULARY, (cell.batch, seqlen + 1), device=device, generator=torch.Generator(device).manual_seed(1))
    rows, steps, losses = [], {}, {}
    blank = Row(impl="", name="training-step", case={**cell.case, "direction": f"step of {layers} layers"}, clock="none")
    for impl in impls:
        if reasons := impl.why_not(cell, device):
            rows.append(Row(**{**vars(blank), "impl": impl.name, "reason": "; ".join(reasons)}))
            continue
        model = model_of(seqlen, layers, impl.prepare(cell, device))
        steps[impl.name] = step_of(model, tokens[:, :-1], tokens[:, 1:])
        losses[impl.name] = float(steps[impl.name]())
    if losses and max(losses.values()) - min(losses.values()) > SAME_LOSS:
        raise SystemExit(f"the losses differ: {losses}")
    flops, environment = flops_of(model, cell, layers), provenance(device)
    for name, stats in interleave(steps, budget_s=budget_s, device=device, clock="events").items():
        times = {"median_s": stats.median, "p10_s": stats.p10, "p90_s": stats.p90, "samples": stats.samples}
        rates = {"flops": flops, "flops_per_s": flops / stats.median, "clock": "events", "passed": True}
        rows.append(Row(**{**vars(blank), "impl": name, "environment": environment, **times, **rates}))
        print(f"{seqlen:>6} tokens, {name}: {stats.median * 1e3:.1f} ms, {flops / stats.median / 1e12:.0f} TFLOP/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="the JSON lines that rows are added to")
    parser.add_argument("--seqlen", default="2048,8192,16384", help="a comma-separated list")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--impl", default="tilewise,sdpa,fa4", help="contenders of `tilewise bench`")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of timing for each function and length")
    given = parser.parse_args()
    for seqlen in map(int, given.seqlen.split(",")):
        rows = measure(seqlen, given.layers, bench.find(given.impl), given.budget)
        if given.out:
            append(given.out, rows)


if __name__ == "__main__":
    main()
