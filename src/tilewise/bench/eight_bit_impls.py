"""Contenders that multiply in 8 bits: tilewise's recipes, and FlashAttention-3 and cuDNN on e4m3 tensors.

They take the workload's 16-bit tensors. `Inside` quantises them in each call. The others are given e4m3 tensors: they quantise once for tensors that
they have not seen yet, outside of what is timed. All are held to the tolerance of testing/eight_bits.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.bench.gpu_impls import PackedFlashAttention3, library, packed
from tilewise.bench.workloads import Workload
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Full
from tilewise.problem import Problem

E4M3 = torch.float8_e4m3fn
EMULATION = "tiled"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Eight(NamedTuple):
    """q, k and v in e4m3, and their scales (batch, heads) fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: tuple[Tensor, Tensor, Tensor]


def prepared(attend: Callable[[Eight], Tensor], per: str = "head") -> Attend:
    """`attend` of e4m3 tensors as a contender on 16-bit ones, which it quantises when they are others than those of the last call."""
    seen: list[tuple[tuple, Eight]] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not seen or any(x is not y for x, y in zip(seen[0][0], (q, k, v), strict=True)):
            seen[:] = [((q, k, v), _quantised(q, k, v, per))]
        return attend(seen[0][1])

    return call


def _quantised(q: Tensor, k: Tensor, v: Tensor, per: str) -> Eight:
    from tilewise.quantising import quantise

    numbers, scales = zip(*(quantise(x.detach(), "fp8", per=per) for x in (q, k, v)), strict=True)
    spread = tuple(s.expand(x.shape[0], x.shape[2]).contiguous() for s, x in zip(scales, (q, k, v), strict=True))
    return Eight(*numbers, spread)


def _wrong(workload: Workload) -> list[str]:
    wrong = ["8 bits are for the forward pass"] if workload.grad else []
    if workload.dtype not in (torch.bfloat16, torch.float16):
        wrong.append("8 bits stand beside fp16 and bf16")
    return wrong


def _no_kernel(problem: Problem) -> list[str]:
    """Why tilewise has none for it; on a CPU its emulation is what there is."""
    from tilewise.runtime.dispatch import choose

    try:
        chosen = choose(problem)
    except UnsupportedError as error:
        return [str(error)]
    return (
        ["there is no kernel for that, and the emulation is no contender"] if chosen.name == EMULATION and problem.device != "cpu" else []
    )


@dataclass(frozen=True)
class Inside:
    """`tilewise.attention(..., precision=)`, quantising included."""

    precision: str
    in_eight_bits = True

    @property
    def name(self) -> str:
        return f"tilewise:{self.precision}"

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        wrong = _wrong(workload) + workload.lacking("scale", "softcap", "sink")
        return wrong or _no_kernel(replace(workload.problem(device), precision=self.precision))

    def prepare(self, workload: Workload, device: torch.device) -> Callable[..., Tensor]:
        from tilewise.api import attention

        options = {"mask": workload.mask, "scale": workload.scale, "softcap": workload.softcap, "precision": self.precision}
        return lambda q, k, v, **extras: attention(q, k, v, **options, **extras)


@dataclass(frozen=True)
class Given:
    """`tilewise.attention` of e4m3 tensors with a scale a head."""

    name: str = "tilewise:e4m3"
    in_eight_bits = True

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        problem = replace(workload.problem(device), dtype=E4M3, out_dtype=torch.bfloat16, scales=("head", "head", "head"))
        return _wrong(workload) + workload.lacking("scale", "softcap") or _no_kernel(problem)

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        from tilewise.api import attention

        options = {"mask": workload.mask, "scale": workload.scale, "softcap": workload.softcap}

        def attend(x: Eight) -> Tensor:
            a, b, c = x.scales
            return attention(x.q, x.k, x.v, q_scale=a, k_scale=b, v_scale=c, **options)

        return prepared(attend)


@dataclass(frozen=True)
class FlashAttention3InEightBits:
    """FlashAttention-3's forward on e4m3 tensors, from the library that vLLM ships (see `PackedFlashAttention3`)."""

    name: str = "fa3:fp8"
    in_eight_bits = True

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        return PackedFlashAttention3(self.name).why_not(workload, device)

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        attend, group = packed(library().fwd.default, workload, device), workload.heads_q // workload.heads_k

        def of_heads_k(x: Eight) -> dict[str, Tensor]:
            return {"q_descale": x.scales[0][:, ::group], "k_descale": x.scales[1], "v_descale": x.scales[2]}

        return prepared(lambda x: attend(x.q, x.k, x.v, **of_heads_k(x)), per="tensor")


@dataclass(frozen=True)
class CudnnInEightBits:
    """cuDNN's FP8 attention by its Python frontend (`pip install nvidia-cudnn-frontend`), on e4m3 tensors with a scale a tensor."""

    name: str = "cudnn:fp8"
    in_eight_bits = True

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        wrong = _wrong(workload) + workload.lacking("scale")
        if device.type != "cuda":
            wrong.append(f"{self.name} runs on CUDA devices only")
        if find_spec("cudnn") is None:
            wrong.append("cudnn, its Python frontend, is not installed")
        if workload.mask not in (Full(), Causal()) or workload.seqlen_q != workload.seqlen_k:
            wrong.append("full and causal masks of equal lengths only here")
        return wrong

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        import cudnn  # pyright: ignore[reportMissingImports]

        handle = cudnn.create_handle()
        graph, tensors, scalars, outputs, dtype = _cudnn_graph(cudnn, handle, workload)
        space = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)
        o = torch.empty((workload.batch, workload.seqlen_q, workload.heads_q, workload.head_dim_v), dtype=dtype, device=device)
        largest = [torch.zeros((1, 1, 1, 1), dtype=torch.float32, device=device) for _ in outputs[1:]]
        of_p = [torch.full((1, 1, 1, 1), x, dtype=torch.float32, device=device) for x in (1 / 256, 256.0, 1.0)]

        def attend(x: Eight) -> Tensor:
            scales = [each[0, 0].view(1, 1, 1, 1) for each in x.scales]
            given = dict(zip((*tensors, *scalars, *outputs), (*x[:3], *scales, *of_p, o, *largest), strict=True))
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute(given, space, handle=handle)
            return o

        return prepared(attend, per="tensor")


def _cudnn_graph(cudnn, handle, workload: Workload):
    """The graph, its tensors, its scalars, its outputs (O first) and O's dtype: the widest that this cuDNN gives."""
    b, s, h, d, dv = workload.batch, workload.seqlen_q, workload.heads_q, workload.head_dim, workload.head_dim_v
    error: Exception | None = None
    for name, dtype in (("BFLOAT16", torch.bfloat16), ("HALF", torch.float16)):
        fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
        sizes = ((h, d), (workload.heads_k, d), (workload.heads_k, dv))
        tensors = [
            graph.tensor(name=x, dim=(b, n, s, dim), stride=(s * n * dim, dim, n * dim, 1), data_type=fp8)
            for x, (n, dim) in zip("qkv", sizes, strict=True)
        ]
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scalars = {x: graph.tensor(name=x, dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=fp32) for x in names}
        causal = {"right_bound": 0, "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT} if workload.mask == Causal() else {}
        of = dict(zip("qkv", tensors, strict=True)) | scalars | causal
        o, _, *largest = graph.sdpa_fp8(**of, generate_stats=False, attn_scale=workload.softmax_scale, use_causal_mask=False)
        o.set_output(True).set_dim((b, h, s, dv)).set_stride((s * h * dv, dv, h * dv, 1)).set_data_type(getattr(cudnn.data_type, name))
        for x in largest:
            x.set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(fp32)
        try:
            graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except Exception as refusal:  # older ones write e4m3 alone
            error = refusal
            continue
        return graph, tensors, list(scalars.values()), [o, *largest], dtype
    raise UnsupportedError(f"this cuDNN gives no bf16 or fp16 from FP8: {error}")


def eight_bit_impls() -> list[Inside | Given | FlashAttention3InEightBits | CudnnInEightBits]:
    from tilewise.backends.eight_bits import RECIPES

    return [Given(), *(Inside(precision) for precision in RECIPES), FlashAttention3InEightBits(), CudnnInEightBits()]
