"""torch's FlexAttention, compiled, with the mask_mod and the score_mod that its users would write, by Triton and by FlashAttention-4."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tilewise.bench.peers.contender import not_here
from tilewise.bench.sets import Attend, Workload
from tilewise.masks import Causal, Documents, Full, PrefixTree, SlidingWindow

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions


@dataclass(frozen=True)
class Flex:
    """torch's FlexAttention, compiled, with the mask_mod and the score_mod that its users would write; a sink is worked in by the LSE.

    kernels: which of torch's "BACKEND" are asked for, as "FLASH", FlashAttention-4's; None leaves it to torch, which takes Triton.
    """

    kernels: Literal["FLASH"] | None = None

    @property
    def name(self) -> str:
        return "flex" if self.kernels is None else f"flex:{self.kernels.lower()}"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        reasons = self._why_no_flash(workload, device) if self.kernels == "FLASH" else []
        if device.type == "cpu" and workload.grad:
            reasons.append("FlexAttention has no backward on a CPU")
        if device.type == "cpu" and not compiler():
            reasons.append("torch.compile needs a C++ compiler, and neither $CXX nor g++ nor clang++ is here")
        if device.type == "cpu" and workload.sink:
            reasons.append("FlexAttention returns no LSE on a CPU, which a sink is worked in by")
        if workload.mask != Full() and mask_mod_of(workload, device) is None:
            reasons.append("only full, causal, window and document masks and prefix trees are written as a mask_mod here")
        return reasons

    def _why_no_flash(self, workload: Workload, device: torch.device) -> list[str]:
        from torch.nn.attention import flex_attention

        reasons = not_here(self.name, "flash_attn.cute", device)
        if "BACKEND" not in getattr(getattr(flex_attention, "FlexKernelOptions", None), "__annotations__", {}):
            reasons.append("this torch's FlexAttention has no BACKEND to choose")
        if workload.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"{self.name} takes fp16 and bf16 only")
        if workload.bias_grad:
            reasons.append(f"{self.name} has no gradient of what a score_mod reads")
        return reasons

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        from torch._functorch import config
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        # A backward is timed by running it again and again on one graph, which a compiled backward that frees its inputs cannot do.
        config.donated_buffer = False
        # After eight shapes torch.compile gives up on a function and runs it eagerly; forgetting the earlier ones prevents that.
        torch.compiler.reset()
        mask_mod = mask_mod_of(workload, device)
        block_mask = None
        if mask_mod is not None:
            block_mask = create_block_mask(mask_mod, None, None, workload.seqlen_q, workload.seqlen_k, device=device)
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        grouped, scale = workload.heads_q != workload.heads_k, workload.scale
        kernels: FlexKernelOptions | None = None if self.kernels is None else {"BACKEND": self.kernels}

        def attend(
            q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sink: Tensor | None = None, alibi_slopes: Tensor | None = None
        ) -> Tensor:
            dtype, score_mod = q.dtype, score_mod_of(workload, bias, alibi_slopes)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if sink is None:
                return compiled(q, k, v, score_mod, block_mask, scale, grouped, kernel_options=kernels).transpose(1, 2)
            lse = AuxRequest(lse=True)
            o, aux = compiled(q, k, v, score_mod, block_mask, scale, grouped, kernel_options=kernels, return_aux=lse)
            assert aux.lse is not None
            return (o * torch.sigmoid(aux.lse - sink.float()[:, None])[..., None]).to(dtype).transpose(1, 2)

        return attend


def score_mod_of(workload: Workload, bias: Tensor | None, slopes: Tensor | None = None) -> Callable | None:
    """The function of a score that adds the bias, or ALiBi, or caps; None where scores stay as they are."""
    if bias is None and slopes is None and not workload.softcap:
        return None
    diagonal = workload.seqlen_k - workload.seqlen_q
    by_batch, by_head, by_query = (axis in (workload.bias or "") for axis in "bhq")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if workload.softcap:
            score = workload.softcap * torch.tanh(score / workload.softcap)
        if bias is not None:
            score = score + bias[b if by_batch else 0, h if by_head else 0, i if by_query else 0, j]
        if slopes is not None:
            score = score - slopes[h] * (i + diagonal - j).abs()
        return score

    return score_mod


def mask_mod_of(workload: Workload, device: torch.device) -> Callable | None:
    """The mask as a function of indices; None where none is written here."""
    mask, diagonal = workload.mask, workload.seqlen_k - workload.seqlen_q
    if mask == Causal():
        return lambda b, h, i, j: j <= i + diagonal
    if isinstance(mask, SlidingWindow) and mask.align == "bottom_right":
        left, right = (workload.seqlen_q + workload.seqlen_k if side is None else side for side in (mask.left, mask.right))
        return lambda b, h, i, j: (j >= i + diagonal - left) & (j <= i + diagonal + right)
    if isinstance(mask, Documents) and mask.cu_seqlens_k == mask.cu_seqlens_q and mask.inner in (Full(), Causal()):
        new = {"dtype": torch.int64, "device": device}
        ends = torch.tensor(mask.cu_seqlens_q[1:], **new)
        document = torch.bucketize(torch.arange(workload.seqlen_k, **new), ends, right=True)
        none = len(ends)  # what lies beyond the last document is in none, and sees nothing
        if mask.inner == Full():
            return lambda b, h, i, j: (document[i] == document[j]) & (document[i] < none)
        return lambda b, h, i, j: (document[i] == document[j]) & (document[i] < none) & (j <= i)
    if isinstance(mask, PrefixTree) and mask.window is None and mask.starts[-1] == workload.seqlen_q == workload.seqlen_k:
        return _tree_mod(mask, device)
    return None


def _tree_mod(tree: PrefixTree, device: torch.device) -> Callable:
    """Of a tree that is depth first a number a token, where its node's last descendant ends: the cheapest to read, and 32 bits, as indices have."""
    nodes, lengths = len(tree.parents), torch.tensor(tree.lengths, dtype=torch.int64, device="cpu")
    below = torch.eye(nodes, dtype=torch.bool, device="cpu")  # below[node, other]: whether other is the node or an ancestor
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            below[node] |= below[parent]
    last = [int(below[:, node].nonzero().max()) for node in range(nodes)]
    if all(int(below[:, node].sum()) == end - node + 1 for node, end in enumerate(last)):
        ends = torch.tensor([tree.starts[end + 1] for end in last], dtype=torch.int32, device="cpu")
        ends = ends.repeat_interleave(lengths).to(device)
        return lambda b, h, i, j: (j <= i) & (i < ends[j])
    node_of = torch.arange(nodes, dtype=torch.int64, device="cpu").repeat_interleave(lengths).to(device)
    below = below.to(device)
    return lambda b, h, i, j: below[node_of[i], node_of[j]] & (j <= i)


def compiler() -> str | None:
    """The C++ compiler that torch.compile would find."""
    return next((path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None)
