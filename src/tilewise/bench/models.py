"""One layer's attention in models that people run, by their published configurations, at lengths that they are trained or used at: the set `models`.

A row a line: name, batch, queries (and keys, where they are not as many), heads (of queries:keys), head_dim (and head_dim_v), mask, and what else
changes scores, as fields of `Workload`: Gemma's softcap and scale, gpt-oss's sinks, the learnt biases of T5 and AlphaFold, which all sequences of a
batch share and whose gradient a training wants.
"""

import itertools
from dataclasses import replace

import torch

from tilewise.bench.workloads import Direction, Workload
from tilewise.masks import Causal, Documents, Full, Mask, SlidingWindow


def _window(keys: int) -> Mask:
    return SlidingWindow(keys - 1, 0)


def _packed(lengths) -> Mask:
    return Documents([0, *itertools.accumulate(lengths)], inner=Causal())


ZIPF = [1690, *(round(1690 / rank) for rank in range(2, 72))]
ZIPF[0] += 8192 - sum(ZIPF)
PACKED = _packed([1024, 512, 2048, 512, 128, 2048, 1920])
PAIR = {"bias": "hqk", "bias_grad": True}

ROWS = [
    # decoders, in training and prefill
    ("Llama-3-8B", 1, 8192, "32:8", 128, Causal()),
    ("Llama-3-8B-b4", 4, 2048, "32:8", 128, Causal()),
    ("Llama-3-8B-32k", 1, 32768, "32:8", 128, Causal()),
    ("Llama-3-8B-packed", 1, 8192, "32:8", 128, PACKED),
    ("Llama-3-8B-zipf", 1, 8192, "32:8", 128, _packed(ZIPF)),
    ("Llama-3-70B", 1, 8192, "64:8", 128, Causal()),
    ("Llama-3-405B", 1, 8192, "128:8", 128, Causal()),
    ("Llama-3.2-1B", 4, 4096, "32:8", 64, Causal()),
    ("Qwen2.5-0.5B", 8, 2048, "14:2", 64, Causal()),
    ("Qwen2.5-7B", 1, 8192, "28:4", 128, Causal()),
    ("Qwen2.5-7B-odd", 3, 3001, "28:4", 128, Causal()),
    ("Qwen3-30B-A3B", 1, 8192, "32:4", 128, Causal()),
    ("Qwen3-235B-A22B", 1, 4096, "64:4", 128, Causal()),
    ("Mistral-7B-window", 1, 16384, "32:8", 128, _window(4096)),
    ("Gemma-2-9B-window", 1, 8192, "16:8", 256, _window(4096), {"softcap": 50.0}),
    ("Gemma-2-9B-full", 1, 8192, "16:8", 256, Causal(), {"softcap": 50.0}),
    ("Gemma-2-27B-full", 1, 8192, "32:16", 128, Causal(), {"softcap": 50.0, "scale": 144**-0.5}),
    ("Gemma-3-27B-window", 1, 8192, "32:16", 128, _window(1024), {"scale": 168**-0.5}),
    ("Gemma-3-4B-window", 2, 4096, "8:4", 256, _window(1024)),
    ("gpt-oss-20b-window", 1, 8192, "64:8", 64, _window(128), {"sink": True}),
    ("gpt-oss-20b-full", 1, 8192, "64:8", 64, Causal(), {"sink": True}),
    ("Phi-3-mini", 2, 4096, "32", 96, Causal()),
    ("Phi-3-medium", 2, 4096, "40:10", 128, Causal()),
    ("DeepSeek-V3-prefill", 1, 4096, "128", (192, 128), Causal()),
    ("DeepSeek-V2-Lite", 4, 4096, "16", (192, 128), Causal()),
    ("GPT-2", 8, 1024, "12", 64, Causal()),
    ("GPT-3-1.3B", 8, 2048, "16", 128, Causal()),
    ("GPT-3-2.7B", 8, 2048, "32", 80, Causal()),
    # chunks of a prefill: few queries, at the end of many keys
    ("chunk-Llama-3-8B", 4, (512, 16384), "32:8", 128, Causal()),
    ("chunk-Llama-3-70B", 1, (2048, 32768), "64:8", 128, Causal()),
    ("chunk-Qwen2.5-7B", 1, (1024, 8192), "28:4", 128, Causal()),
    # encoders
    ("BERT-base", 32, 512, "12", 64, Full()),
    ("BERT-large-short", 64, 128, "16", 64, Full()),
    ("ModernBERT-window", 4, 8192, "12", 64, SlidingWindow(64, 64)),
    ("T5-large-encoder", 16, 512, "16", 64, Full(), {"scale": 1.0, **PAIR}),
    ("T5-XXL-encoder", 8, 512, "64", 64, Full(), {"scale": 1.0, **PAIR}),
    ("ViT-B/16", 128, 197, "12", 64, Full()),
    ("ViT-L/16-384", 32, 577, "16", 64, Full()),
    ("ViT-H/14", 32, 257, "16", 80, Full()),
    ("SigLIP-So400m", 16, 729, "16", 72, Full()),
    ("Whisper-large-encoder", 8, 1500, "20", 64, Full()),
    ("Whisper-large-cross", 8, (448, 1500), "20", 64, Full()),
    # proteins: attention along rows of an alignment, over a triangle's edges, and of a diffusion's tokens
    ("AlphaFold2-MSA-row", 128, 384, "8", 32, Full(), PAIR),
    ("AlphaFold2-triangle", 384, 384, "4", 32, Full(), PAIR),
    ("AlphaFold3-diffusion", 48, 384, "16", 48, Full(), PAIR),
    # images and video
    ("SD1.5-64x64", 8, 4096, "8", 40, Full()),
    ("SD1.5-32x32", 8, 1024, "8", 80, Full()),
    ("SD1.5-16x16", 32, 256, "8", 160, Full()),
    ("SD1.5-cross", 8, (4096, 77), "8", 40, Full()),
    ("SDXL-64x64", 8, 4096, "10", 64, Full()),
    ("SDXL-cross", 8, (4096, 77), "10", 64, Full()),
    ("SD3", 4, 4250, "24", 64, Full()),
    ("Flux", 1, 4608, "24", 128, Full()),
    ("Wan2.1-1.3B-32k", 1, 32760, "12", 128, Full()),
    ("Wan2.1-1.3B-75k", 1, 75600, "12", 128, Full()),
]

# Why ours is not ahead of every peer by both clocks in a cell, by (name, direction): what the table says of it.
_LEVEL = "level: within 2 % by the kernel's clock"
_ONCE = "one call of 50 ms and more a clock: calls of the same kernel lie up to 10 % apart"
_SHORT = "a short sequence, or few keys: a launch of one or two rounds of blocks, and its kernel is behind"
WHY: dict[tuple[str, str], str] = {
    **{(name, "fwd"): _LEVEL for name in ("T5-large-encoder", "T5-XXL-encoder", "chunk-Qwen2.5-7B")},
    **{(name, "fwd"): _SHORT for name in ("BERT-large-short", "SD1.5-16x16", "SD1.5-cross")},
    **{("Wan2.1-1.3B-75k", direction): _ONCE for direction in ("fwd", "bwd")},
    ("BERT-large-short", "bwd"): "level: the host's time, which spreads by a quarter from call to call",
    ("Llama-3-8B-packed", "bwd"): "level; the heads of a group are walked together under packed documents",
}


def model_shapes(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """All of ROWS."""
    return [replace(_workload(*row), dtype=dtype, direction=direction) for row in ROWS]


def _workload(
    name: str,
    batch: int,
    seqlen: int | tuple[int, int],
    heads: str,
    head_dim: int | tuple[int, int],
    mask: Mask,
    changes: dict | None = None,
) -> Workload:
    seqlen_q, seqlen_k = seqlen if isinstance(seqlen, tuple) else (seqlen, seqlen)
    dim, dim_v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    heads_q, _, heads_k = heads.partition(":")
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": int(heads_q), "heads_k": int(heads_k or heads_q)}
    return Workload(name=name, **sizes, head_dim=dim, head_dim_v=dim_v, mask=mask, **(changes or {}))
