"""Compile a rung or kernel once for each (launch, config, scratch): the only place that calls the DSL's compiler.

The key holds nothing that changes from call to call: lengths, batch and strides are symbols of the compiled code.
"""

import os
from functools import cache
from importlib.util import find_spec

ARCH = "sm_90a"


def why_no_compiler() -> list[str]:
    """A sentence where the DSL is missing; compiling needs nothing else."""
    return [] if find_spec("cutlass") else ["NVIDIA's CuTe DSL is not installed: pip install 'tilewise[hopper]'"]


def why_not_here() -> list[str]:
    """Sentences that say why no Hopper kernel can run on this machine; empty where one can."""
    import torch

    if missing := why_no_compiler():
        return missing
    if not torch.cuda.is_available():
        return ["torch sees no GPU here: run it on a machine with an H100 or H200"]
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return [f"it needs a Hopper GPU (compute capability 9.0), and this is {capability[0]}.{capability[1]}"]
    return []


@cache
def compiled(launch, config, scratch: bool = False, options: str = ""):
    """`launch` for `config`: a function of (q, k, v, o, lse, scale_log2), torch tensors, on torch's current stream.

    q, k, v, o: (heads, seqlen, head_dim) bf16 whose rows start at multiples of 16 bytes; lse: (heads, seqlen) fp32, contiguous.
    With config.trace the function takes events last: (blocks * WARPS * SLOTS, 2) int32 (phases.py).
    """
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    from tilewise.hopper.dsl import BFloat16, Float32, Int32, cute, make_fake_stream, make_fake_tensor

    heads, seqlen = cute.sym_int(), cute.sym_int()

    def tensor():
        strides = cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1
        return make_fake_tensor(BFloat16, (heads, seqlen, config.head_dim), strides, assumed_align=16)

    lse = make_fake_tensor(Float32, (heads, seqlen), (cute.sym_int64(), 1), assumed_align=4)
    scores = [make_fake_tensor(Float32, (heads, seqlen, seqlen), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)] * scratch
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    events = [make_fake_tensor(Int32, (cute.sym_int(), 2), (2, 1), assumed_align=8)] * getattr(config, "trace", False)
    return cute.compile(
        launch, *(tensor() for _ in range(4)), lse, *scores, Float32(1.0), config, stream, *events, options=f"--enable-tvm-ffi {options}"
    )
