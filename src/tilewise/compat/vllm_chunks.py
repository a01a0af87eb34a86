"""Keys of long chunks copied out of vLLM's pages: the forward pass of contiguous keys gains more on `decode` over pages than copying takes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LONG = 2048  # new tokens that each key has to meet for keys to be copied out of their pages
PAIRS = 2**29  # of new tokens and keys in all: a copy gained 10 % of a prefill there and lost 10 at a sixth of it (H200)
MOST_COPIED = 2**30  # bytes that they may take, beside vLLM's pool


@dataclass
class Chunks:
    """Where the keys of a batch's sequences lie, in order."""

    ends: Tensor  # (sequences + 1,) int32, of keys
    sequence: Tensor  # (keys,) int64, of each key
    position: Tensor  # (keys,) int64, in its sequence
    block_table: Tensor
    _places: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, common: Any) -> "Chunks | None":
        """Of vLLM's CommonAttentionMetadata; None where there are too few pairs, in all or for each key."""
        if common.max_query_len < LONG:
            return None
        lengths = common.seq_lens.cpu().long()
        if int((common.query_start_loc_cpu.diff() * lengths).sum()) < max(PAIRS, LONG * int(lengths.sum())):
            return None
        sequence = torch.arange(lengths.shape[0], dtype=torch.int64, device="cpu").repeat_interleave(lengths)
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        position = torch.arange(sequence.shape[0], dtype=torch.int64, device="cpu") - ends[sequence]
        ends, sequence, position = (x.to(common.seq_lens.device) for x in (ends.int(), sequence, position))
        return cls(ends, sequence, position, common.block_table_tensor)

    def copied(self, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
        """Keys and values (keys, heads_k, head_dim) of a layer's cache (blocks, heads_k, block, 2 head_dim); the places are those of all layers.

        None where they are more than MOST_COPIED, or than there is memory for.
        """
        _, heads, block, _ = kv_cache.shape
        if self.sequence.shape[0] * kv_cache[0, :, 0].nbytes > MOST_COPIED:
            return None
        try:
            if self._places is None:
                pages = self.block_table[self.sequence, self.position // block].long()
                self._places = pages, self.position % block
            rows = kv_cache.transpose(1, 2) if heads > 1 else kv_cache[:, 0].unsqueeze(2)  # one head's stride may be anything
            keys, values = rows.view(torch.int64)[self._places].view(kv_cache.dtype).chunk(2, dim=-1)
        except torch.OutOfMemoryError:
            return None
        return keys, values
