"""cuDNN's FP8 attention by its Python frontend; its kernels for 16 bits are those of `sdpa:cudnn`."""

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.bench.peers.contender import Eight, not_here, not_in_eight_bits, quantised_ahead
from tilewise.bench.sets import Attend, Workload
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Full


@dataclass(frozen=True)
class CudnnInEightBits:
    """cuDNN's FP8 attention by its Python frontend (`pip install nvidia-cudnn-frontend`), on e4m3 tensors with a scale a tensor."""

    name: str = "cudnn:fp8"
    in_eight_bits = True

    def why_not(self, workload: Workload, device: torch.device) -> list[str]:
        wrong = not_in_eight_bits(workload) + workload.lacking("scale") + not_here(self.name, "cudnn", device)
        if workload.mask not in (Full(), Causal()) or workload.seqlen_q != workload.seqlen_k:
            wrong.append("full and causal masks of equal lengths only here")
        return wrong

    def prepare(self, workload: Workload, device: torch.device) -> Attend:
        cudnn = importlib.import_module("cudnn")
        handle = cudnn.create_handle()
        graph, tensors, scalars, outputs, dtype = _graph(cudnn, handle, workload)
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

        return quantised_ahead(attend, per="tensor")


def _graph(cudnn, handle, workload: Workload):
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
