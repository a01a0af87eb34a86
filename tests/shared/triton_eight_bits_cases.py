"""Calls in 8 bits that the Triton backend is held to, where its kernels are interpreted and on a GPU."""

import torch
from eight_bits_problems import Quantised

from tilewise.backends.eight_bits import RECIPES
from tilewise.masks import Causal, ChunkedCausal, Dense, Documents, PrefixLM, SlidingWindow

FP16 = torch.float16
DENSE = Dense(torch.rand(70, 150, generator=torch.Generator().manual_seed(5)) > 0.4)
DENSE_ROWS = Dense(torch.rand(10, 150, generator=torch.Generator().manual_seed(5)) > 0.4)
CASES = [
    *(Quantised(way, 70, 150, mask=Causal(), row_max=True) for way in RECIPES),
    Quantised("int8", 130, 300, mask=SlidingWindow(40, 3), dims=(72, 40)),
    Quantised("int8", 40, 150, batch=2, heads=(4, 2), dtype=FP16, scale=-0.2),
    Quantised("int8_qk", 40, 150, batch=2, heads=(4, 2), dtype=FP16, dims=(96, 96)),
    Quantised("int8", 200, 30, mask=Causal(), row_max=True),  # rows that see nothing
    Quantised("int8_qk", 70, 150, mask=Documents((0, 20, 60), (0, 30, 130), inner=Causal())),
    Quantised("int8", 70, 150, mask=DENSE),
    Quantised("fp8", 70, 150, mask=ChunkedCausal(11)),
    Quantised("int8", 30, 140, dims=(192, 128)),
    Quantised("int8", 20, 140, dims=(300, 288), mask=PrefixLM(7)),
    Quantised("fp8", 10, 140, dims=(512, 512), heads=(1, 1)),
    *(Quantised("int8", 5, 20, dims=(d, d), row_max=True) for d in (1, 3, 8, 17)),
    *(Quantised("int8", n, k, heads=(1, 1)) for n, k in ((1, 1), (3, 15), (2, 16), (10, 127), (10, 128), (10, 129), (3, 0), (0, 3))),
]
GIVEN = [
    Quantised("given", 70, 40, per=("token", "tile", "head"), mask=Causal(), row_max=True),
    Quantised("given", 40, 300, batch=2, heads=(4, 2), per=("head", "head", "head"), scale=-0.2, dims=(72, 40)),
    Quantised("given int8", 40, 150, per=("token", "token", "tensor"), dims=(72, 40), mask=SlidingWindow(40, 3)),
    Quantised("given int8", 20, 300, batch=2, heads=(4, 2), per=("token", "tile", "head"), dtype=FP16, dims=(17, 96)),
    Quantised("given", 10, 150, per=("tensor", "token", "head"), dims=(288, 64), mask=DENSE_ROWS),
    Quantised("given", 40, 400, per=("tensor", "tile", "tile"), mask=Causal()),
    Quantised("given int8", 40, 300, per=("head", "token", "token"), dims=(96, 72), batch=2, heads=(4, 2), mask=Causal()),
    Quantised("given", 3, 1, per=("token", "token", "token")),
    Quantised("given", 3, 0, per=("token", "token", "token")),
    Quantised("given int8", 3, 1, per=("token", "token", "head")),
]
SPOILED = [
    *(Quantised(way, 40, 150, mask=mask) for way in RECIPES for mask in (Causal(), SlidingWindow(40, 3))),
    Quantised("int8", 30, 300),
    Quantised("int8", 40, 90, dtype=FP16, mask=PrefixLM(30)),
    Quantised("int8_qk", 30, 150),
]
CHANGES = {"sink": torch.tensor([0.5, 3.0]), "alibi_slopes": torch.tensor([[0.1, 0.5]]), "softcap": 2.0}
BITS = [
    Quantised(),
    Quantised(mask=Documents((0, 50, 130), (0, 20, 131))),
    Quantised("int8_qk", 5, 1500, dims=(72, 40)),
    Quantised("int8", dims=(256, 256), dtype=FP16),
    Quantised("int8", 130, 300, batch=2, heads=(4, 2), dims=(128, 128)),
    Quantised("int8", 5, 300, dims=(512, 512), heads=(1, 1)),
]
