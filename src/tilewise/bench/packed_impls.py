"""Contenders for packed documents: what people do with SDPA where nothing takes several documents in one sequence."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench.workloads import Workload
from tilewise.masks import Causal, Documents, Full


def documents_of(workload: Workload) -> tuple[list[int], list[int], bool] | None:
    """(cu_seqlens_q, cu_seqlens_k, causal) where every token is in a document and each is full or causal, which is what packed kernels take."""
    mask = workload.mask
    if not isinstance(mask, Documents) or mask.inner not in (Full(), Causal()) or workload.batch != 1:
        return None
    cu_seqlens = list(mask.cu_seqlens_q), list(mask.cu_seqlens_k)
    whole = [each[-1] for each in cu_seqlens] == [workload.seqlen_q, workload.seqlen_k]
    return (*cu_seqlens, mask.inner == Causal()) if whole else None


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
        mask = workload.mask
        if isinstance(mask, Documents) and mask.cu_seqlens_k == mask.cu_seqlens_q and mask.inner in (Full(), Causal()):
            whole = mask.cu_seqlens_q[-1] == workload.seqlen_q and workload.batch == 1
            wrong = [] if whole and self._plain(workload) else ["it takes one sequence that is all documents; padded, causal ones only"]
            return wrong + workload.lacking()
        return ["it takes packed documents only"]

    def _plain(self, workload: Workload) -> bool:
        """Whether no key of the padding is seen: under a causal mask what comes after a document's end is hidden from it."""
        return self.way == "loop" or workload.mask.inner == Causal()

    def prepare(self, workload: Workload, device: torch.device) -> Callable[..., Tensor]:
        cu_seqlens, causal = list(workload.mask.cu_seqlens_q), workload.mask.inner == Causal()
        lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
        options = {"is_causal": causal, "enable_gqa": workload.heads_q != workload.heads_k}

        def one(*qkv: Tensor) -> Tensor:
            return scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), **options).transpose(1, 2)

        def loop(*qkv: Tensor) -> Tensor:
            documents = zip(*(x.split(lengths, dim=1) for x in qkv), strict=True)
            return torch.cat([one(*document) for document in documents], dim=1)

        def padded(*qkv: Tensor) -> Tensor:
            together = (torch.nn.utils.rnn.pad_sequence(x[0].split(lengths), batch_first=True) for x in qkv)
            return torch.cat([o[:length] for o, length in zip(one(*together), lengths, strict=True)])[None]

        return loop if self.way == "loop" else padded
