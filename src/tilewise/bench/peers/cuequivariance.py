"""cuEquivariance's triangle attention: a bias of pairs that all rows share, with its gradient, as models of proteins call it."""

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.bench.peers.contender import not_here
from tilewise.bench.sets import Attend, Workload
from tilewise.masks import Full

MODULE = "cuequivariance_ops_torch"  # of which cuequivariance_torch hands the function on


@dataclass(frozen=True)
class TriangleAttention:
    """`triangle_attention` of cuEquivariance (`pip install cuequivariance_ops_torch_cu13`); batch entries are its rows."""

    name: str = "cueq"
    heads_first = True

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        wrong = not_here(self.name, MODULE, device) + workload.lacking("scale", "bias", "bias gradient")
        if workload.mask != Full() or workload.bias != "hqk" or workload.heads_q != workload.heads_k:
            wrong.append(
                "it is for a bias of heads, queries and keys that all batch entries share, without a mask and with a key head a query head"
            )
        return wrong

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        function = importlib.import_module(MODULE).triangle_attention

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            rows = (x.transpose(1, 2)[None] for x in (q, k, v))
            return function(*rows, bias[:, None], scale=workload.softmax_scale)[0].transpose(1, 2)

        return attend
