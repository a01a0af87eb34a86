"""The contenders: tilewise and its backends, torch's SDPA and FlexAttention, the plain formula, and FlashAttention where it is installed.

All are the same kind of object: `why_not` says in sentences why a workload is beyond it, `prepare` does what a user does once (builds the
mask, compiles) and returns what is checked and timed: `attend(q, k, v, **extras) -> o`, all (batch, seqlen, heads, head_dim), differentiable;
the extras are those of `Workload.extras`, which most workloads have none of.
"""

import importlib
import itertools
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench.memory import available_bytes
from tilewise.bench.packed_impls import SdpaDocuments, documents_of
from tilewise.bench.workloads import Workload
from tilewise.machine.roofline import score_matrix_bytes
from tilewise.masks import Causal, Documents, Full, SlidingWindow

Attend = Callable[..., Tensor]


class Impl(Protocol):
    """One way to compute attention, as its users call it."""

    name: str
    # One that sets `heads_first = True` is given inputs whose memory is (batch, heads, seqlen, head_dim), so that it copies none. One that sets
    # `in_eight_bits = True` is held to the tolerance of testing/eight_bits.py in place of that for 16 bits and more.

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        """Sentences that say why `workload` cannot run there; empty when it is worth trying."""

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        """Everything that is done once, before the first call."""


@dataclass(frozen=True)
class Tilewise:
    """`tilewise.attention`, with its own choice of backend or the one named."""

    backend: str | None = None

    @property
    def name(self) -> str:
        return "tilewise" if self.backend is None else f"tilewise:{self.backend}"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        from tilewise.errors import UnsupportedError
        from tilewise.runtime.dispatch import choose

        try:
            chosen = choose(workload.problem(device), self.backend)
        except UnsupportedError as error:
            return [str(error)]
        return _too_large(workload, device, matrices=6, itemsize=8) if chosen.name == "reference" else []

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        import tilewise

        options = {"mask": workload.mask, "scale": workload.scale, "softcap": workload.softcap, "backend": self.backend}
        return lambda q, k, v, **extras: tilewise.attention(q, k, v, **options, **extras)


@dataclass(frozen=True)
class Sdpa:
    """`torch.nn.functional.scaled_dot_product_attention`, with its own choice of kernel or the one named.

    Masks it has no argument for are given as its users give them: as a dense boolean tensor, built once. A bias is its attn_mask, and -inf in it
    where a mask hides a pair.
    """

    kernel: str | None = None  # "flash", "math", "efficient", "cudnn"

    ON_CPU = (None, "flash", "math")

    @property
    def name(self) -> str:
        return "sdpa" if self.kernel is None else f"sdpa:{self.kernel}"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        if device.type == "cpu" and self.kernel not in self.ON_CPU:
            return [f"torch has no {self.kernel} kernel on a CPU"]
        if self.kernel == "flash" and device.type == "cuda" and "attn_mask" in self._arguments(workload):
            return ["its flash kernel takes no mask but its own causal one"]
        wrong = workload.lacking("scale", *(() if self.kernel == "flash" else ("bias", "bias gradient")))
        return wrong or (_too_large(workload, device, matrices=3) if self.kernel == "math" else [])

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        options = {"enable_gqa": workload.heads_q != workload.heads_k, "scale": workload.scale}
        if workload.bias is None:
            options |= self._mask(workload, device)
        backends, hidden = self._backends(), _hidden(workload, device) if workload.bias else None

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            given = {"attn_mask": bias if hidden is None else bias.masked_fill(hidden, -math.inf)} if bias is not None else {}
            return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options, **given).transpose(1, 2)

        if backends is None:
            return attend

        def attend_with_kernel(q: Tensor, k: Tensor, v: Tensor, **extras: Tensor) -> Tensor:
            with torch.nn.attention.sdpa_kernel(backends):
                return attend(q, k, v, **extras)

        return attend_with_kernel

    def _backends(self):
        from torch.nn.attention import SDPBackend

        names = {"flash": "FLASH_ATTENTION", "math": "MATH", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
        return None if self.kernel is None else [getattr(SDPBackend, names[self.kernel])]

    def _arguments(self, workload: Workload) -> tuple[str, ...]:
        """How the mask is given."""
        if workload.mask == Full():
            return ()
        return ("is_causal",) if workload.mask == Causal() and workload.seqlen_q == workload.seqlen_k else ("attn_mask",)

    def _mask(self, workload: Workload, device: torch.device) -> dict[str, Tensor | bool]:
        made = {"is_causal": lambda: True, "attn_mask": lambda: workload.mask.dense(workload.seqlen_q, workload.seqlen_k).to(device)}
        return {name: made[name]() for name in self._arguments(workload)}


@dataclass(frozen=True)
class Flex:
    """torch's FlexAttention, compiled, with the mask_mod and the score_mod that its users would write; a sink is worked in by the LSE."""

    name: str = "flex"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        reasons = []
        if device.type == "cpu" and workload.grad:
            reasons.append("FlexAttention has no backward on a CPU")
        if device.type == "cpu" and not _compiler():
            reasons.append("torch.compile needs a C++ compiler, and neither $CXX nor g++ nor clang++ is here")
        if device.type == "cpu" and workload.sink:
            reasons.append("FlexAttention returns no LSE on a CPU, which a sink is worked in by")
        if workload.mask != Full() and _mask_mod(workload, device) is None:
            reasons.append("only full, causal, window and document masks are written as a mask_mod here")
        return reasons

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        from torch._functorch import config
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        # A backward is timed by running it again and again on one graph, which a compiled backward that frees its inputs cannot do.
        config.donated_buffer = False
        # After eight shapes torch.compile gives up on a function and runs it eagerly; forgetting the earlier ones prevents that.
        torch.compiler.reset()
        mask_mod = _mask_mod(workload, device)
        block_mask = None
        if mask_mod is not None:
            block_mask = create_block_mask(mask_mod, None, None, workload.seqlen_q, workload.seqlen_k, device=device)
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        options = {"block_mask": block_mask, "enable_gqa": workload.heads_q != workload.heads_k, "scale": workload.scale}

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sink: Tensor | None = None) -> Tensor:
            heads_first, score_mod = [x.transpose(1, 2) for x in (q, k, v)], _score_mod(workload, bias)
            if sink is None:
                return compiled(*heads_first, score_mod, **options).transpose(1, 2)
            o, aux = compiled(*heads_first, score_mod, return_aux=AuxRequest(lse=True), **options)
            return (o * torch.sigmoid(aux.lse - sink.float()[:, None])[..., None]).to(q.dtype).transpose(1, 2)

        return attend


def _score_mod(workload: Workload, bias: Tensor | None) -> Callable | None:
    """The function of a score that adds the bias, or caps; None where scores stay as they are."""
    if bias is None and not workload.softcap:
        return None
    by_batch, by_head, by_query = (axis in (workload.bias or "") for axis in "bhq")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if workload.softcap:
            score = workload.softcap * torch.tanh(score / workload.softcap)
        if bias is not None:
            score = score + bias[b if by_batch else 0, h if by_head else 0, i if by_query else 0, j]
        return score

    return score_mod


def _hidden(workload: Workload, device: torch.device) -> Tensor | None:
    """What the mask hides, as a dense tensor; None where that is nothing."""
    return None if workload.mask == Full() else ~workload.mask.dense(workload.seqlen_q, workload.seqlen_k).to(device)


def _mask_mod(workload: Workload, device: torch.device) -> Callable | None:
    mask, diagonal = workload.mask, workload.seqlen_k - workload.seqlen_q
    if mask == Causal():
        return lambda b, h, i, j: j <= i + diagonal
    if isinstance(mask, SlidingWindow) and mask.align == "bottom_right":
        left, right = (workload.seqlen_k if side is None else side for side in (mask.left, mask.right))
        return lambda b, h, i, j: (j >= i + diagonal - left) & (j <= i + diagonal + right)
    if isinstance(mask, Documents) and mask.cu_seqlens_k == mask.cu_seqlens_q and mask.inner in (Full(), Causal()):
        new = {"dtype": torch.int64, "device": device}
        ends = torch.tensor(mask.cu_seqlens_q[1:], **new)
        document = torch.bucketize(torch.arange(workload.seqlen_k, **new), ends, right=True)
        none = len(ends)  # what lies beyond the last document is in none, and sees nothing
        if mask.inner == Full():
            return lambda b, h, i, j: (document[i] == document[j]) & (document[i] < none)
        return lambda b, h, i, j: (document[i] == document[j]) & (document[i] < none) & (j <= i)
    return None


def _compiler() -> str | None:
    return next((path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None)


@dataclass(frozen=True)
class Naive:
    """The formula as it is written, in the inputs' dtype, with the whole score matrix in memory."""

    name: str = "naive"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        return _too_large(workload, device, matrices=5 if workload.grad else 3)

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        scale, softcap, group = workload.softmax_scale, workload.softcap, workload.heads_q // workload.heads_k
        hidden = _hidden(workload, device)
        blind = None if hidden is None else hidden.all(-1, keepdim=True)  # rows that see nothing, where the softmax is 0 / 0
        if blind is not None and not blind.any():
            blind = None

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sink: Tensor | None = None) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if group > 1:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            s = (q @ k.mT) * scale
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            if bias is not None:
                s = s + bias
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


@dataclass(frozen=True)
class FlashAttention:
    """Dao-AILab's kernels, where they are installed. `unbounded` is how this generation writes a window without an end.

    `has`: what it takes of `Workload.changes`, in both directions. FlashAttention-4 would also take a score_mod in its own DSL that reads a bias, and
    gives no gradient of it.
    """

    name: str
    module: str
    unbounded: int | None
    has: tuple[str, ...] = ("scale", "softcap")

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append(f"{self.name} runs on CUDA devices only")
        if not installed(self.module):
            reasons.append(f"{self.module} is not installed")
        if workload.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"{self.name} takes fp16 and bf16 only")
        if self._window(workload) is None and documents_of(workload) is None:
            reasons.append("only full, causal and window masks and packed documents can be expressed in its arguments")
        return reasons + workload.lacking(*self.has)

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        if documents_of(workload):
            return self._packed(workload, device)
        function = importlib.import_module(self.module).flash_attn_func
        options = self._window(workload) | self._scores(workload)

        def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
            learnt = {} if sink is None else {"learnable_sink": sink}
            result = function(q, k, v, **options, **learnt)
            return result[0] if isinstance(result, tuple) else result  # some versions return the LSE beside O

        return attend

    def _packed(self, workload: Workload, device: torch.device) -> Attend:
        function = importlib.import_module(self.module).flash_attn_varlen_func
        *starts, causal = documents_of(workload)
        options = {"causal": causal, **self._scores(workload)}
        for side, cu_seqlens in zip("qk", starts, strict=True):
            options[f"cu_seqlens_{side}"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
            options[f"max_seqlen_{side}"] = max(end - start for start, end in itertools.pairwise(cu_seqlens))

        def attend(*qkv: Tensor, sink: Tensor | None = None) -> Tensor:
            packed = (x.flatten(0, 1) for x in qkv)  # autograd would fill zeros and copy for x[0], a third of a backward pass
            learnt = {} if sink is None else {"learnable_sink": sink}
            result = function(*packed, **options, **learnt)
            return (result[0] if isinstance(result, tuple) else result)[None]

        return attend

    def _scores(self, workload: Workload) -> dict[str, float]:
        given = {"softmax_scale": workload.scale, "softcap": workload.softcap or None}
        return {name: value for name, value in given.items() if value is not None}

    def _window(self, workload: Workload) -> dict | None:
        mask = workload.mask
        if mask in (Full(), Causal()):
            return {"causal": mask == Causal()}
        if isinstance(mask, SlidingWindow) and mask.align == "bottom_right":
            left, right = (self.unbounded if side is None else side for side in (mask.left, mask.right))
            return {"causal": right == 0, "window_size": (left, right)}
        return None


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package is missing, or is no package
        return False


def _too_large(workload: Workload, device: torch.device, *, matrices: int, itemsize: int | None = None) -> list[str]:
    """A sentence when `matrices` score matrices would take more than half of the memory that is free."""
    need, free = matrices * score_matrix_bytes(workload.shape, itemsize), available_bytes(device)
    if free is None or need <= free / 2:
        return []
    return [f"it keeps {matrices} score matrices, {need / 1e9:.1f} GB here, and half of the free memory is {free / 2e9:.1f} GB"]


def ours(name: str) -> bool:
    """Whether a contender is tilewise or a kernel of its ladder; the others are peers."""
    from tilewise.ladder import ALIASES, DECODE_RUNGS, RUNGS, VARIANTS

    return name.partition(":")[0] == "tilewise" or name in {*RUNGS, *VARIANTS, *ALIASES, *DECODE_RUNGS}


def known() -> dict[str, Impl]:
    """Every contender by name, whether or not it can run here."""
    from tilewise.bench.eight_bit_impls import eight_bit_impls
    from tilewise.bench.gpu_impls import gpu_impls
    from tilewise.runtime.dispatch import backends

    everyone: list[Impl] = [
        Tilewise(),
        *(Tilewise(backend.name) for backend in backends()),
        Sdpa(),
        *(Sdpa(kernel) for kernel in ("flash", "math", "efficient", "cudnn")),
        *(SdpaDocuments(way) for way in ("padded", "loop")),
        Flex(),
        Naive(),
        FlashAttention("fa2", "flash_attn", -1),
        FlashAttention("fa3", "flash_attn_interface", -1),
        FlashAttention("fa4", "flash_attn.cute", None, ("scale", "softcap", "sink")),
        *gpu_impls(),
        *eight_bit_impls(),
    ]
    return {impl.name: impl for impl in everyone}


def find(names: str = "tilewise,sdpa,naive") -> list[Impl]:
    """The contenders of a comma-separated list, in which `k2..k5` stands for the rungs from k2 to k5.

    ValueError for a name that `known` does not have.
    """
    everyone = known()
    wanted = list(dict.fromkeys(name for item in names.split(",") for name in _expanded(item.strip())))
    if missing := [name for name in wanted if name not in everyone]:
        raise ValueError(f"impl is {', '.join(map(repr, missing))}; it must be among {', '.join(everyone)}")
    return [everyone[name] for name in wanted]


def _expanded(item: str) -> list[str]:
    """The rungs of a range, in the ladder's order; another item as it is, or by its first name."""
    from tilewise.ladder import ALIASES, RUNGS

    ladder, (first, dots, last) = list(RUNGS), item.partition("..")
    if not dots:
        return [ALIASES.get(item, item)]
    if first not in ladder or last not in ladder or ladder.index(first) > ladder.index(last):
        raise ValueError(f"impl is {item!r}; a range goes up the ladder, from one of {', '.join(ladder)} to another: k1..k8")
    return ladder[ladder.index(first) : ladder.index(last) + 1]
