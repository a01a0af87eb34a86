"""The named sets of workloads (SETS): the papers' sweep, what two cores can do, what a GPU or a CPU is held to, hard inputs, models."""

import itertools
import random
from dataclasses import replace

import torch

from tilewise.bench.sets.distributions import DISTRIBUTIONS, HIDDEN, NORMAL
from tilewise.bench.sets.trees import trees
from tilewise.bench.sets.workload import Workload
from tilewise.machine.roofline import Direction
from tilewise.masks import Causal, Documents, FirstKeys, Full, Mask, PrefixLM, SlidingWindow


def paper_sweep(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """FA2 section 4.1, FA3 section 4.1: hidden dimension 2048, 16,384 tokens in all, head_dim 64 to 256, with and without causal mask."""
    return _sweep("papers", (512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256), 2048, 16384, dtype, direction)


def ladder_sweep(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """The papers' sweep without head_dim 256, which the ladder has no kernels for."""
    return ladder_cells(dtype=dtype, direction=direction)


def ladder_cells(
    seqlens=(512, 1024, 2048, 4096, 8192, 16384), head_dims=(128, 64), causal=(False, True), dtype=torch.bfloat16, direction="fwd"
) -> list[Workload]:
    """Cells of the ladder's sweep, at any length: hidden dimension 2048, and as many sequences as make 16,384 tokens, at least one."""
    cells = _sweep("ladder", seqlens, head_dims, 2048, 16384, dtype, direction)
    return [cell for cell in cells if (cell.mask == Causal()) in causal]


def cpu_sweep(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """The papers' sweep cut down to seconds on two cores: hidden dimension 512, 4,096 tokens, head_dim 64 and 128."""
    return _sweep("cpu", (512, 1024, 2048, 4096), (64, 128), 512, 4096, dtype, direction)


def mask_shapes(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """What skipping tiles is worth: the same 8,192 tokens under masks that hide more and more of the score matrix; grouped heads."""
    packed = Documents([0, 1024, 1536, 3584, 4096, 4224, 6272, 8192], inner=Causal())
    masks = (Causal(), SlidingWindow(1023, 0), packed, SlidingWindow(127, 0) | FirstKeys(4))
    return [
        Workload(
            name="masks",
            batch=1,
            seqlen_q=8192,
            heads_q=8,
            heads_k=2,
            head_dim=64,
            mask=mask,
            dtype=dtype,
            direction=direction,
        )
        for mask in masks
    ]


def _sweep(name, seqlens, head_dims, hidden, tokens, dtype, direction) -> list[Workload]:
    return [
        Workload(
            name=name,
            batch=max(1, tokens // seqlen),
            seqlen_q=seqlen,
            heads_q=hidden // head_dim,
            head_dim=head_dim,
            mask=mask,
            dtype=dtype,
            direction=direction,
        )
        for head_dim in head_dims
        for mask in (Full(), Causal())
        for seqlen in seqlens
    ]


def gpu_shapes(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """What the papers' sweep leaves out on a GPU: windows, grouped heads, keys wider than values, and 32,768 tokens of packed documents."""

    def made(name: str, seqlen: int, heads: int, head_dim: int = 128, mask: Mask | None = None, **other) -> Workload:
        sizes = {"batch": 1, "seqlen_q": seqlen, "heads_q": heads, "head_dim": head_dim, **other}
        return Workload(name=name, mask=mask or Causal(), dtype=dtype, direction=direction, **sizes)

    rows = [made("gpu-window", 16384, 2048 // dim, dim, SlidingWindow(width - 1, 0)) for dim in (128, 64) for width in (1024, 4096)]
    rows += [made("gpu-gqa", 4096, 32, batch=4, heads_k=8), made("gpu-wide", 8192, 16, 192, head_dim_v=128)]
    zipf = [round(6762 / rank) for rank in range(1, 72)]
    zipf[0] += 32768 - sum(zipf)
    packed = {"1k": [1024] * 32, "128": [128] * 256, "zipf": zipf, "long": [24576] + [256] * 32}
    return rows + [
        made(f"gpu-documents-{name}", 32768, 16, mask=Documents([0, *itertools.accumulate(lengths)], inner=Causal()))
        for name, lengths in packed.items()
    ]


def gpu_cross(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """Cross-attention of an image's tokens to the 77 of a text."""
    sizes = [(4096, 10, 64), (1024, 20, 64), (4096, 8, 96), (4096, 8, 128), (1024, 16, 128), (4096, 8, 192)]
    return [
        Workload(
            name="gpu-cross", batch=8, seqlen_q=seqlen, seqlen_k=77, heads_q=heads, head_dim=dim, head_dim_v=min(dim, 128),
            mask=Full(), dtype=dtype, direction=direction,
        )
        for seqlen, heads, dim in sizes
    ]  # fmt: skip


def fp8_sweep(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """The papers' sweep from 2,048 tokens on, for contenders in 8 bits as well as those in 16; with errors."""
    return [replace(cell, rms=True) for cell in _sweep("fp8", (2048, 8192, 16384), (64, 128, 256), 2048, 16384, dtype, direction)]


def fp8_small(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """The same for the emulation on a CPU, which is checked rather than timed there."""
    return [replace(cell, rms=True) for cell in _sweep("fp8-small", (256, 512), (64, 128), 256, 512, dtype, direction)]


def cpu_table(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """Every kind of work that the CPU kernel is held to a target in; what is about one dtype or direction appears in that one only."""

    def made(name: str, seqlen: int, heads: int, head_dim: int, mask: Mask | None = None, **other) -> Workload:
        sizes = {"batch": 1, "seqlen_q": seqlen, "heads_q": heads, "head_dim": head_dim, **other}
        return Workload(name=name, mask=mask or Full(), dtype=dtype, direction=direction, **sizes)

    causal, both = Causal(), (Full(), Causal())
    if dtype == torch.float16:
        return [made("cpu-dense", 1024, 8, 64, mask) for mask in both]
    lengths = (1024, 2048, 4096, 8192) if dtype == torch.float32 else (1024, 4096)
    rows = [made("cpu-dense", seqlen, 8, 64, mask) for mask in both for seqlen in lengths]
    rows += [made("cpu-dense", seqlen, 4, 128, mask) for mask in both for seqlen in (1024, 4096)]
    rows += [made("cpu-gqa", 1024, heads_q, 128, causal, heads_k=heads_k) for heads_q, heads_k in ((32, 8), (16, 2))]
    rows += [made("cpu-window", 16384, 2, 64, SlidingWindow(1023, 0)), made("cpu-wide", 1024, 8, 192, causal, head_dim_v=128)]
    rows += [made("cpu-BERT", 128, 12, 32, batch=8), made("cpu-ViT", 197, 12, 64, batch=16)]
    if direction == "fwd":
        rows.append(made("cpu-decode", 1, 8, 64, seqlen_k=16384))
        rows += [made("cpu-tiny", 7, 1, 64)] if dtype == torch.float32 else []
    return rows


def cpu_packed(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """Sixteen documents of 32 to 2,048 tokens in one sequence, for `sdpa:padded` and `sdpa:loop`."""
    lengths = random.Random(16)
    cu_seqlens = [0, 2048]
    for _ in range(15):
        cu_seqlens.append(cu_seqlens[-1] + lengths.randint(32, 700))
    mask = Documents(cu_seqlens, inner=Causal())
    return [
        Workload(
            name="cpu-packed",
            batch=1,
            seqlen_q=cu_seqlens[-1],
            heads_q=8,
            head_dim=64,
            mask=mask,
            dtype=dtype,
            direction=direction,
        )
    ]


LONGEST = 11  # of a sequence drawn at random, the logarithm to base 2


def cpu_random(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """Twenty shapes and masks drawn at random, none of more than some tens of milliseconds; others for another dtype or direction."""
    return _drawn("cpu-random", random.Random(f"{dtype} {direction}"), LONGEST, dtype, direction)


def cpu_seeds(dtype: torch.dtype = torch.float32, direction: Direction = "fwd") -> list[Workload]:
    """The same of three other seeds, and as many with few queries (1 to 32), where Python and threads count and blocks are ragged."""
    seeds = [f"{dtype} {direction} {seed}" for seed in (1, 2, 3)]
    rows = [row for seed in seeds for row in _drawn("cpu-seeds", random.Random(seed), LONGEST, dtype, direction)]
    return rows + [row for seed in seeds for row in _drawn("cpu-seeds-few", random.Random(seed + " few"), 5, dtype, direction)]


def _drawn(name: str, draw: random.Random, log_q: int, dtype: torch.dtype, direction: Direction) -> list[Workload]:
    """Twenty workloads of at most 2^log_q queries and 2^LONGEST keys."""
    rows: list[Workload] = []
    while len(rows) < 20:
        seqlen_q, seqlen_k = (round(2 ** draw.uniform(0, log)) for log in (log_q, LONGEST))
        heads_k, group, batch = draw.choice((1, 2, 4, 7)), draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 5, 16))
        head_dim = draw.choice((16, 32, 40, 64, 64, 80, 96, 128, 128, 192))
        mask, square = (
            draw.choice((Full(), Full(), Causal(), Causal(), SlidingWindow(draw.randint(0, 300), 0), PrefixLM(10))),
            draw.random() < (0.7 if log_q == LONGEST else 0.3),
        )
        made = Workload(
            name=name,
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_q if square else seqlen_k,
            heads_q=heads_k * group,
            heads_k=heads_k,
            head_dim=head_dim,
            mask=mask,
            dtype=dtype,
            direction=direction,
        )
        if 4 * made.seqlen_q * made.seqlen_k * made.batch * made.heads_q * head_dim < 1e10:
            rows.append(made)
    return rows


def hard_inputs(
    dtype: torch.dtype = torch.bfloat16,
    direction: Direction = "fwd",
    *,
    seqlen: int = 8192,
    heads: int | None = None,
    head_dims: tuple[int, ...] = (64, 128, 256),
    masks: tuple[Mask, ...] | None = None,
    data: tuple[str, ...] = tuple(DISTRIBUTIONS),
) -> list[Workload]:
    """Every distribution under every mask: what makes an attention slow or wrong is not its shape alone.

    Without `heads` the hidden dimension is 2048, as in the papers' sweep.
    The masks: full, causal, a window of an eighth; and a padded sequence, which alone can hide something from all queries.
    """
    masks = (Full(), Causal(), SlidingWindow(max(1, seqlen // 8) - 1, 0), padded(seqlen)) if masks is None else masks
    return [
        Workload(
            name="hard-inputs",
            batch=1,
            seqlen_q=seqlen,
            heads_q=heads or 2048 // head_dim,
            head_dim=head_dim,
            mask=mask,
            dtype=dtype,
            direction=direction,
            data=each,
            rms=True,
        )
        for head_dim in head_dims
        for mask in masks
        for each in data
        if each == NORMAL or (each in HIDDEN) == isinstance(mask, Documents)
    ]


def padded(seqlen: int) -> Documents:
    """The mask of a sequence that ends in padding, a sixteenth of it and a few tokens more."""
    return Documents([0, max(1, seqlen - seqlen // 16 - 5)], inner=Full())


def _window(keys: int) -> Mask:
    return SlidingWindow(keys - 1, 0)


def _packed(lengths) -> Mask:
    return Documents([0, *itertools.accumulate(lengths)], inner=Causal())


ZIPF = [1690, *(round(1690 / rank) for rank in range(2, 72))]
ZIPF[0] += 8192 - sum(ZIPF)
PACKED = _packed([1024, 512, 2048, 512, 128, 2048, 1920])
PAIR = {"bias": "hqk", "bias_grad": True}

# The set `models`: one layer's attention in models that people run, by their published configurations, at lengths that they are trained or used at.
# A row a line: name, batch, queries (and keys, where they are not as many), heads (of queries:keys), head_dim (and head_dim_v), mask, and what else
# changes scores, as fields of `Workload`: Gemma's softcap and scale, gpt-oss's sinks, the learnt biases of T5 and AlphaFold, which all sequences of a
# batch share and which need a gradient in training.
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
WHY_BEHIND: dict[tuple[str, str], str] = {
    **{(name, "fwd"): _LEVEL for name in ("T5-large-encoder", "T5-XXL-encoder", "chunk-Qwen2.5-7B")},
    **{(name, "fwd"): _SHORT for name in ("BERT-large-short", "SD1.5-16x16")},
    (
        "SD1.5-cross",
        "fwd",
    ): "few keys: a launch of one or two rounds of blocks; behind in these rows, an H200 two days later had 36 us for 41",
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


LOW_SOFTCAP = 1.0  # softcap of scores of a normal distribution


def triton_cells(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """What the Triton backend is held to on a GPU: 8,192 tokens of hidden dimension 2048 under the masks that models use, and
    causal ones with changed scores, each to be within 15 % of the plain causal mask: a softcap, ALiBi, a bias that all heads share, a sink, and a
    softcap that most scores are near.
    """
    documents = Documents([*range(0, 8193, 1024)], inner=Causal())
    cells = [(mask, {}) for mask in (Full(), Causal(), SlidingWindow(1023, 0), documents)]
    cells += [
        (Causal(), changes) for changes in ({"softcap": 30.0}, {"alibi": True}, {"bias": "qk"}, {"sink": True}, {"softcap": LOW_SOFTCAP})
    ]
    sizes = {"name": "triton", "batch": 1, "seqlen_q": 8192, "dtype": dtype, "direction": direction}
    return [Workload(**sizes, heads_q=2048 // dim, head_dim=dim, mask=mask, **changes) for dim in (128, 64) for mask, changes in cells]


def triton_papers(dtype: torch.dtype = torch.bfloat16, direction: Direction = "fwd") -> list[Workload]:
    """The papers' sweep for the Triton backend, under a name of its own: what it meets is what runs on any GPU."""
    return [replace(cell, name="triton-papers") for cell in paper_sweep(dtype, direction)]


SETS = {
    "papers": paper_sweep,
    "ladder": ladder_sweep,
    "cpu": cpu_sweep,
    "masks": mask_shapes,
    "gpu-shapes": gpu_shapes,
    "gpu-cross": gpu_cross,
    "fp8": fp8_sweep,
    "fp8-small": fp8_small,
    "cpu-table": cpu_table,
    "cpu-packed": cpu_packed,
    "cpu-random": cpu_random,
    "cpu-seeds": cpu_seeds,
    "models": model_shapes,
    "triton": triton_cells,
    "triton-papers": triton_papers,
    "trees": trees,
    "hard-inputs": hard_inputs,
}
