"""torch's scaled_dot_product_attention: its own choice of kernel or one that is named, on masks, packed documents and caches."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench.peers.contender import too_large
from tilewise.bench.sets import Attend, Caches, Cell, Workload
from tilewise.masks import Causal, Documents, Full

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
ON_CPU = (None, "flash", "math")


class Arguments(TypedDict, total=False):
    """Of scaled_dot_product_attention."""

    attn_mask: Tensor
    is_causal: bool
    enable_gqa: bool
    scale: float | None


@dataclass(frozen=True)
class Sdpa:
    """`torch.nn.functional.scaled_dot_product_attention`, with its own choice of kernel or the one named.

    Masks it has no argument for are given as its users give them: as a dense boolean tensor, built once. A bias is its attn_mask, and -inf in it
    where a mask hides a pair; ALiBi is such a bias of all heads, built once.
    """

    kernel: str | None = None  # of KERNELS

    @property
    def name(self) -> str:
        return "sdpa" if self.kernel is None else f"sdpa:{self.kernel}"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        if device.type == "cpu" and self.kernel not in ON_CPU:
            return [f"torch has no {self.kernel} kernel on a CPU"]
        if self.kernel == "flash" and device.type == "cuda" and "attn_mask" in self._arguments(workload):
            return ["its flash kernel takes no mask but its own causal one"]
        wrong = workload.lacking("scale", *(() if self.kernel == "flash" else ("bias", "bias gradient", "alibi")))
        return wrong or (too_large(workload, device, matrices=3) if self.kernel == "math" else [])

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        options: Arguments = {"enable_gqa": workload.heads_q != workload.heads_k, "scale": workload.scale}
        hidden = workload.hidden(device) if workload.bias or workload.alibi else None
        if workload.alibi:
            every = torch.arange(workload.seqlen_q, dtype=torch.int64, device=device)
            added = workload.alibi_bias(every).to(workload.dtype)
            options["attn_mask"] = added if hidden is None else added.masked_fill_(hidden, -math.inf)
        elif workload.bias is None:
            options |= self._mask(workload, device)

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, alibi_slopes: Tensor | None = None) -> Tensor:
            given: Arguments = options
            if bias is not None:
                given = {**options, "attn_mask": bias if hidden is None else bias.masked_fill(hidden, -math.inf)}
            o = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **given)
            return o.transpose(1, 2)

        if self.kernel is None:
            return attend
        kernels = [KERNELS[self.kernel]]

        def attend_with_kernel(q: Tensor, k: Tensor, v: Tensor, **extras: Tensor) -> Tensor:
            with sdpa_kernel(kernels):
                return attend(q, k, v, **extras)

        return attend_with_kernel

    def _arguments(self, workload: Workload) -> tuple[str, ...]:
        """How the mask is given."""
        if workload.mask == Full():
            return ()
        return ("is_causal",) if workload.mask == Causal() and workload.seqlen_q == workload.seqlen_k else ("attn_mask",)

    def _mask(self, workload: Workload, device: torch.device) -> Arguments:
        names = self._arguments(workload)
        if "attn_mask" in names:
            return {"attn_mask": workload.mask.dense(workload.seqlen_q, workload.seqlen_k).to(device)}
        return {"is_causal": True} if names else {}


@dataclass(frozen=True)
class SdpaDocuments:
    """SDPA on packed documents without a mask of all their pairs: one call a document, or one call on documents padded to the longest.

    Padding and taking it away again are timed.
    """

    way: str  # "padded", "loop"

    @property
    def name(self) -> str:
        return f"sdpa:{self.way}"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        if not isinstance(workload.mask, Documents):
            return ["it takes packed documents only"]
        starts_q, starts_k, causal = workload.documents or ([], None, False)
        # Under a causal mask what comes after a document's end is hidden from it, so no key of the padding is seen.
        plain = starts_q == starts_k and (causal or self.way == "loop")
        return ([] if plain else ["it takes one sequence that is all documents; padded, causal ones only"]) + workload.lacking()

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        assert workload.documents is not None  # or why_not had said so
        cu_seqlens, _, causal = workload.documents
        lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
        grouped = workload.heads_q != workload.heads_k

        def one(*qkv: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in qkv)
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

        def loop(*qkv: Tensor) -> Tensor:
            documents = zip(*(x.split(lengths, dim=1) for x in qkv), strict=True)
            return torch.cat([one(*document) for document in documents], dim=1)

        def padded(*qkv: Tensor) -> Tensor:
            together = (torch.nn.utils.rnn.pad_sequence(list(x[0].split(lengths)), batch_first=True) for x in qkv)
            return torch.cat([o[:length] for o, length in zip(one(*together), lengths, strict=True)])[None]

        return loop if self.way == "loop" else padded


@dataclass(frozen=True)
class SdpaDecode:
    """torch's SDPA, one of its kernels: contiguous caches that are full, and one new token, so that it needs no mask."""

    kernel: str  # of KERNELS

    @property
    def name(self) -> str:
        return f"sdpa:{self.kernel}"

    def why_not(self, cell: Cell, device: torch.device) -> list[str]:
        wrong = ["it takes contiguous caches only"] if cell.page else []
        wrong += ["it takes one new token only, as it has no causal mask at the bottom right"] if cell.new > 1 else []
        return wrong + ([f"torch has no {self.kernel} kernel on a CPU"] if device.type == "cpu" and self.kernel not in ON_CPU else [])

    def prepare(self, caches: Caches) -> Callable[[int], Tensor]:
        grouped = caches.cell.heads_q != caches.cell.heads_k

        def attend(copy: int) -> Tensor:
            with sdpa_kernel([KERNELS[self.kernel]]):
                q, k, v = (x.transpose(1, 2) for x in (caches.q, *caches.copies[copy]))
                return scaled_dot_product_attention(q, k, v, enable_gqa=grouped).transpose(1, 2)

        return attend
