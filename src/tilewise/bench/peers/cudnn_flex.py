"""cuDNN frontend's flex attention: masks as intervals of keys for each query, of which a plan is made once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.bench.peers.contender import not_here
from tilewise.bench.sets import Attend, Workload
from tilewise.masks import Causal, Documents, Full, PrefixTree, SlidingWindow

CPU = torch.device("cpu")


@dataclass(frozen=True)
class CudnnFlex:
    """Flex attention of cuDNN's frontend (`pip install nvidia-cudnn-frontend`), its plan made at the first call, as it wants to see the tensors."""

    name: str = "cudnn:flex"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        reasons = not_here(self.name, "cudnn.flex_attention", device) + workload.lacking("scale")
        if workload.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"{self.name} takes fp16 and bf16 only")
        if intervals(workload) is None:
            reasons.append("only full, causal, window and document masks and prefix trees are written as intervals here")
        return reasons

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        from cudnn.flex_attention import create_mask_plan, flex_attn_func  # pyright: ignore[reportMissingImports]

        ends = intervals(workload)
        assert ends is not None  # or why_not had said so
        ends = ends.repeat(1, workload.batch)[None].to(device)
        plans = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not plans:
                plans.append(create_mask_plan(ends, q, k, v, build_backward=workload.grad))
            return flex_attn_func(q, k, v, mask_plan=plans[0], softmax_scale=workload.scale)

        return attend


def intervals(workload: Workload) -> Tensor | None:
    """(odd, seqlen_q) int32: a query sees keys [0, x[0]), [x[1], x[2]), [x[3], x[4]) and so on; None where the mask is not written so here."""
    mask, keys, new = workload.mask, workload.seqlen_k, {"dtype": torch.int64, "device": CPU}
    at = torch.arange(workload.seqlen_q, **new)
    diagonal = at + keys - workload.seqlen_q
    nothing, found = torch.zeros_like(at), None
    if mask == Full():
        found = [nothing + keys]
    elif mask == Causal():
        found = [(diagonal + 1).clamp(0, keys)]
    elif isinstance(mask, SlidingWindow) and mask.align == "bottom_right" and mask.offset == 0:
        left, right = (keys + workload.seqlen_q if side is None else side for side in (mask.left, mask.right))
        last = (diagonal + right + 1).clamp(0, keys)
        found = [nothing, torch.minimum((diagonal - left).clamp(min=0), last), last]
    elif isinstance(mask, Documents) and mask.cu_seqlens_k == mask.cu_seqlens_q and mask.inner in (Full(), Causal()):
        starts = torch.tensor(mask.cu_seqlens_q, **new)
        of = torch.bucketize(at, starts[1:], right=True)
        first, last = starts[of.clamp(max=len(starts) - 1)], starts[(of + 1).clamp(max=len(starts) - 1)]
        found = [nothing, first, torch.maximum(torch.minimum(at + 1, last), first) if mask.inner == Causal() else last]
    elif isinstance(mask, PrefixTree) and mask.window is None and mask.starts[-1] == workload.seqlen_q == keys:
        found = _of_tree(mask)
    return None if found is None else torch.stack(list(found)).int().contiguous()


def _of_tree(tree: PrefixTree) -> Tensor:
    """Ancestors that lie end to end are one interval."""
    seen: list[list[tuple[int, int]]] = []  # of each node's ancestors and itself
    for node, parent in enumerate(tree.parents):
        above = list(seen[parent]) if parent >= 0 else []
        start, end = tree.starts[node], tree.starts[node + 1]
        seen.append([*above[:-1], (above[-1][0], end)] if above and above[-1][1] == start else [*above, (start, end)])
    rows = [[end for start, end in each[:1] if start == 0] or [0, *each[0]] for each in seen]
    rows = [[*row, *(x for pair in each[1:] for x in pair)] for row, each in zip(rows, seen, strict=True)]
    most = max(map(len, rows), default=1)
    ends = torch.tensor([row + row[-1:] * (most - len(row)) for row in rows], dtype=torch.int64, device=CPU)
    last = torch.tensor([len(row) - 1 for row in rows], dtype=torch.int64, device=CPU)
    of = torch.arange(len(rows), dtype=torch.int64, device=CPU).repeat_interleave(torch.tensor(tree.lengths, dtype=torch.int64, device=CPU))
    behind = torch.arange(most, dtype=torch.int64, device=CPU)[:, None] >= last[of]  # the end of its own node, and empty intervals after it
    at = torch.arange(len(of), dtype=torch.int64, device=CPU)
    return torch.where(behind, at + 1, ends.T[:, of])
