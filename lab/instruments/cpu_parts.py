"""Where the time of forward and backward goes on the CPU, and what bounds it: `python lab/instruments/cpu_parts.py [--out ROWS.jsonl] [CASE ...]`.

For cases of `tilewise bench --set cpu-table`, interleaved in one process, in ms:
  whole     the user's call and its gradients, as the bench times it
  kernels   the same kernels on outputs that exist already: no Python to speak of, no allocation, no autograd
  made      the kernels, and outputs allocated for them
  products  the seven matrix products that any such kernel computes, alone: torch.bmm on contiguous heads, blocks of scores of at most 2 MB;
            each overwrites its result, where a kernel adds to it
Page faults are those of one call.
"""

import argparse
import ctypes
import json
import resource
from pathlib import Path

import torch
from torch import Tensor

from tilewise.backends.cpu import Cpu
from tilewise.backends.cpu.arguments import workspace
from tilewise.bench.peers import find
from tilewise.bench.provenance import provenance
from tilewise.bench.runner import call_of
from tilewise.bench.sets import Workload
from tilewise.bench.sets.named import cpu_table
from tilewise.bench.timing import interleave
from tilewise.masks import Causal, Full
from tilewise.problem import NO_EXTRAS, Call

SCORE_BYTES = 2 << 20
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cases() -> dict[str, Workload]:
    """Cases of the table whose mask is full or causal, by a short name."""
    rows = [w for dtype in (torch.float32, torch.bfloat16) for w in cpu_table(dtype, "fwd+bwd") if w.mask in (Full(), Causal())]

    def name(w: Workload) -> str:
        heads = f"{w.heads_q}" if w.heads_q == w.heads_k else f"{w.heads_q}-{w.heads_k}"
        return f"{w.name[4:]}-{w.case['dtype']}-{'causal' if w.mask == Causal() else 'full'}-s{w.seqlen_q}-h{heads}-d{w.head_dim}"

    return {name(w): w for w in rows if w.head_dim == w.head_dim_v}


def ours(workload: Workload, q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> dict:
    call = Call(q=q, k=k, v=v, mask=workload.mask, scale=workload.head_dim**-0.5)
    bound = Cpu().bind(call)
    o, lse = bound.forward(q, k, v, NO_EXTRAS, True)
    gradients = bound.backward(q, k, v, o, lse, d_o, None, NO_EXTRAS, False)[:3]
    threads = torch.get_num_threads()
    memory, start = workspace(bound.workspace_bytes[threads, True, False])
    given = [x.data_ptr() for x in (q, k, v, o, lse)]
    all_given = [*given, d_o.data_ptr(), *(x.data_ptr() for x in gradients)]
    keep = o, lse, gradients, memory

    def kernels():
        bound.functions.tw_repeat(bound.address, threads, *given)
        bound.functions.tw_repeat_backward(bound.address, threads, *all_given, ctypes.c_void_p(start))
        return keep

    def made():
        o, lse = bound.forward(q, k, v, NO_EXTRAS, True)
        return bound.backward(q, k, v, o, lse, d_o, None, NO_EXTRAS, False)

    return {"tilewise kernels": kernels, "tilewise made": made}


def sdpa(workload: Workload, *inputs: Tensor) -> dict:
    if workload.heads_q != workload.heads_k:
        return {}
    q, k, v, d_o = (x.transpose(1, 2) for x in inputs)
    causal = workload.mask == Causal()

    def made():
        o, lse = flash(q, k, v, 0.0, causal)
        return flash_backward(d_o, q, k, v, o, lse, 0.0, causal)

    return {"sdpa made": made}


def products(workload: Workload, *inputs: Tensor) -> dict:
    if workload.mask != Full() or workload.heads_q != workload.heads_k:
        return {}
    q, k, v, d_o = (x.transpose(1, 2).contiguous() for x in inputs)
    batch, heads, seqlen, dim = q.shape
    rows = min(seqlen, max(1, SCORE_BYTES // (heads * seqlen * q.element_size())))
    scores = torch.empty(heads, rows, seqlen, dtype=q.dtype)
    by_row, by_key = torch.empty(heads, rows, dim, dtype=q.dtype), torch.empty(heads, seqlen, dim, dtype=q.dtype)

    def alone():
        for b in range(batch):
            for row in range(0, seqlen, rows):
                n = min(rows, seqlen - row)
                s, r, qs, ds = scores[:, :n], by_row[:, :n], q[b, :, row : row + n], d_o[b, :, row : row + n]
                torch.bmm(qs, k[b].mT, out=s)  # S, twice
                torch.bmm(s, v[b], out=r)  # O
                torch.bmm(qs, k[b].mT, out=s)
                torch.bmm(ds, v[b].mT, out=s)  # dP
                torch.bmm(s.mT, ds, out=by_key)  # dV
                torch.bmm(s.mT, qs, out=by_key)  # dK
                torch.bmm(s, k[b], out=r)  # dQ

    return {"products": alone}


def measure(name: str, workload: Workload, budget_s: float) -> dict:
    inputs = workload.inputs(2)
    plain = [x.detach() for x in inputs]
    device = torch.device("cpu")
    calls = {f"{impl.name} whole": call_of(impl.prepare(workload, device), workload, inputs) for impl in find("tilewise,sdpa")}
    calls |= ours(workload, *plain) | sdpa(workload, *plain) | products(workload, *plain)
    taken = interleave(calls, budget_s=budget_s)
    return {
        "what": "parts",
        "case": name,
        "flops": workload.flops,
        "median_ms": {call: round(stats.median * 1e3, 4) for call, stats in taken.items()},
        "samples": next(iter(taken.values())).samples,
        "page_faults": {call: faults(run) for call, run in calls.items()},
        "environment": provenance(device),
    }


def faults(run, calls: int = 10) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls


def main() -> None:
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each of a case's calls")
    parser.add_argument("--out", type=Path, help="append the rows to this file, as JSON lines")
    options = parser.parse_args()
    if unknown := set(options.cases) - known.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    for name in options.cases or known:
        row = measure(name, known[name], options.budget)
        print(f"{name}, {row['flops'] / 1e9:.2f} GFLOP")
        for call, ms in row["median_ms"].items():
            print(f"    {call:18}{ms:10.3f} ms{row['flops'] / ms / 1e6:8.0f} GF{row['page_faults'][call]:8.0f} page faults")
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
