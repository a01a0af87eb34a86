"""The plain formula: what every exact attention computes, with the whole score matrix in memory."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.bench.peers.contender import too_large
from tilewise.bench.sets import Attend, Workload


@dataclass(frozen=True)
class Naive:
    """The formula as it is written, in the inputs' dtype, with the whole score matrix in memory."""

    name: str = "naive"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        return too_large(workload, device, matrices=5 if workload.grad else 3)

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        scale, softcap, group = workload.softmax_scale, workload.softcap, workload.heads_q // workload.heads_k
        hidden = workload.hidden(device)
        blind = None if hidden is None else hidden.all(-1, keepdim=True)  # rows that see nothing, where the softmax is 0 / 0
        if blind is not None and not blind.any():
            blind = None

        every = torch.arange(workload.seqlen_q, dtype=torch.int64, device=device)
        distant = workload.alibi_bias(every).to(workload.dtype) if workload.alibi else None

        def attend(
            q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sink: Tensor | None = None, alibi_slopes: Tensor | None = None
        ) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if group > 1:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            s = (q @ k.mT) * scale
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            if bias is not None:
                s = s + bias
            if distant is not None:
                s = s + distant
            if hidden is not None:
                s = s.masked_fill(hidden, -math.inf)
            if sink is not None:
                s = torch.cat((s, sink[:, None, None].expand(*s.shape[:-1], 1)), -1)
            p = torch.softmax(s, -1)
            if sink is not None:
                p = p[..., :-1]
            if blind is not None:
                p = p.masked_fill(blind, 0.0)
            return (p @ v).transpose(1, 2)

        return attend
