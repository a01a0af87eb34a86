"""A rung of the ladder's other branch, decoding: one new token of each sequence against its cache."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError, check_heads, check_like, check_size, check_tensor
from tilewise.sm90 import jit

HEAD_DIM = 128
MOST_ROWS = 64  # query heads of a key head: rows of a tile
MOST_OF_GRID = 65535  # key heads, and sequences


@dataclass(frozen=True)
class DecodeRung:
    """One kernel: `rung(q, k_cache, v_cache, lengths)`. `module` is the file under tilewise.ladder; `choice` what this rung fixes of its Config."""

    name: str
    module: str
    title: str
    choice: dict = field(default_factory=dict, hash=False)

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float | None = None) -> Tensor:
        """softmax(scale q K^T) V of each sequence's first `lengths` tokens, with `scale` 1 / sqrt(head_dim) by default.

        Args:
            q: (batch, heads_q, 128) bf16 on a Hopper GPU; up to 64 query heads share a key head.
            k_cache, v_cache: (batch, capacity, heads_k, 128) bf16, finite behind a sequence's length too.
            lengths: (batch,) int32, which nobody reads on the host; clamped to [0, capacity].

        A rung with counters runs on one stream at a time.

        Returns:
            O, (batch, heads_q, 128) bf16; 0 for a sequence of no tokens.

        Raises:
            ShapeError: the tensors do not fit each other.
            ValueError: scale is not positive and finite.
            UnsupportedError: this rung, or this machine, cannot run it; says what to install or do.
        """
        _check(q, k_cache, v_cache, lengths)
        if reasons := self.reasons(q, k_cache):
            raise UnsupportedError(f"{self.name} cannot run this: {'; '.join(reasons)}")
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {scale}")
        num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        return self.run(q, k_cache, v_cache, lengths, scale, self.splits(q, k_cache, num_sms))[0]

    @cached_property
    def code(self) -> ModuleType:
        """The rung's module; imports the DSL, which reads there and then for which GPU it compiles."""
        os.environ.setdefault("CUTE_DSL_ARCH", jit.ARCH)
        return import_module(f"tilewise.ladder.{self.module}")

    def compiled(self, options: str = ""):
        """The kernels for a Hopper GPU; needs the DSL, but no GPU."""
        if missing := jit.why_no_compiler():
            raise UnsupportedError(f"{self.name} cannot be compiled: {'; '.join(missing)}")
        return jit.compiled(self.code.launch, self.arguments, self.code.configure(**self.choice), options)

    def reasons(self, q: Tensor, k_cache: Tensor) -> list[str]:
        """Sentences that say why this rung cannot run on such tensors here; empty where it can."""
        wrong = []
        if q.dtype != torch.bfloat16:
            wrong.append(f"it takes bfloat16 only, and the tensors are {q.dtype}")
        if q.shape[-1] != HEAD_DIM:
            wrong.append(f"it takes head_dim {HEAD_DIM}, and this is {q.shape[-1]}")
        group = q.shape[1] // max(k_cache.shape[2], 1)
        if group > MOST_ROWS:
            wrong.append(f"it takes up to {MOST_ROWS} query heads of a key head, and these are {group}")
        if max(q.shape[0], k_cache.shape[2]) > MOST_OF_GRID:
            wrong.append(f"it takes at most {MOST_OF_GRID} sequences and key heads")
        if not q.is_cuda:
            wrong.append(f"it runs on a Hopper GPU, and the tensors are on {q.device.type}: move them to 'cuda'")
        return wrong or jit.why_not_here()

    def splits(self, q: Tensor, k_cache: Tensor, num_sms: int) -> int:
        """Pieces of each sequence: as many as give every multiprocessor one, but no more than it may have tiles of keys."""
        _, capacity, heads_k, _ = k_cache.shape
        tiles = -(-capacity // self.code.configure(**self.choice).tile_n)
        return max(1, min(num_sms // max(q.shape[0] * heads_k, 1), tiles))

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, splits: int) -> tuple[Tensor, Tensor]:
        """O (batch, heads_q, head_dim) and LSE (batch, heads_q) of checked tensors."""
        batch, heads_q, head_dim = q.shape
        o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty((batch, heads_q), dtype=torch.float32)
        if k_cache.numel() == 0 or q.numel() == 0:
            return o.zero_(), lse.fill_(-torch.inf)
        pieces = [q.new_empty(shape, dtype=torch.float32) for shape in ((batch, heads_q, splits, head_dim), (batch, heads_q, splits))]
        counters = [_counters(batch, k_cache.shape[2], q.device)] if self.counts else []
        with torch.cuda.device(q.device):
            tensors = *map(jit.aligned, (q, k_cache, v_cache)), o, lse, lengths.contiguous()
            self.compiled()(*tensors, (*pieces, *counters), scale / math.log(2))
        return o, lse

    @property
    def counts(self) -> bool:
        """Whether blocks count themselves, so that the last one knows that it is."""
        return getattr(self.code, "COUNTS", False)

    def arguments(self, config) -> list:
        """Stand-ins for those of `launch`."""
        from tilewise.sm90.dsl import BFloat16, Float32, Int32

        batch, heads_q, heads_k, capacity, splits = (jit.size() for _ in range(5))
        q, o = (jit.tensor(BFloat16, batch, heads_q, config.head_dim) for _ in range(2))
        k, v = (jit.tensor(BFloat16, batch, capacity, heads_k, config.head_dim) for _ in range(2))
        lse, lengths = jit.tensor(Float32, batch, heads_q, aligned=False), jit.tensor(Int32, batch, aligned=False)
        pieces = jit.tensor(Float32, batch, heads_q, splits, config.head_dim), jit.tensor(Float32, batch, heads_q, splits, aligned=False)
        counters = [jit.tensor(Int32, batch, heads_k, aligned=False)] if self.counts else []
        return [q, k, v, o, lse, lengths, self.code.Pieces(*pieces, *counters), Float32(1.0)]


_KEPT: dict[torch.device, Tensor] = {}


def _counters(batch: int, heads_k: int, device: torch.device) -> Tensor:
    """(batch, heads_k) int32, which are 0 between launches and so are made once for a device: rungs that count run on one stream at a time."""
    kept = _KEPT.get(device)
    if kept is None or kept.numel() < batch * heads_k:
        kept = _KEPT[device] = torch.zeros(batch * heads_k, dtype=torch.int32, device=device)
    return kept[: batch * heads_k].view(batch, heads_k)


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> None:
    check_tensor("q", q, ("batch", "heads_q", "head_dim"))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, ("batch", "capacity", "heads_k", "head_dim"))
        check_like(name, cache, q)
    check_tensor("lengths", lengths, ("batch",), (torch.int32,))
    check_like("lengths", lengths, q, same_dtype=False)
    check_size("v_cache", "shape", tuple(v_cache.shape), tuple(k_cache.shape), "k_cache")
    check_size("k_cache", "batch", k_cache.shape[0], q.shape[0], "q")
    check_size("k_cache", "head_dim", k_cache.shape[3], q.shape[2], "q")
    check_size("lengths", "batch", lengths.shape[0], q.shape[0], "q")
    check_heads(q.shape[1], k_cache.shape[2])
