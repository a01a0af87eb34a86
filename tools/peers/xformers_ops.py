"""pytest plugin: xformers' own tests of `memory_efficient_attention` over `tilewise.compat.xformers`, from a checkout that you name.

    python -m pip install pytest scipy xformers==0.0.35
    git clone --depth 1 --branch v0.0.35 https://github.com/facebookresearch/xformers /path/to/xformers
    cd /path/to/xformers
    PYTHONPATH=/path/to/tilewise/tools/peers python -m pytest -p xformers_ops tests/test_mem_eff_attention.py \\
        -o addopts= --tilewise-sample 100 --tilewise-seed 0

In the place of xformers' kernels stand a forward and a backward operator "tilewise" that run on CPUs and take all bias classes which the drop-in has;
shapes, dtypes and bounds are those of xformers' cutlass kernels. docs/compat.md has the counts.
"""

import re

import torch
from cases import choose_backend, pytest_addoption, pytest_terminal_summary, select  # noqa: F401 (hooks)

WANTED = r"test_(forward|backward|custom_scale|grad_checkpointing|forward_gqa|backward_gqa|empty_tensors\w*|memeff_compile|dropout)\b"
EXCLUDED = {  # what a case's id matches: why it is left out
    r"test_memeff_compile": "it makes its tensors on a GPU, whatever device is asked for",
    r"test_dropout": "it reads the random numbers of one kernel, ck's or cutlass's",
}


def pytest_configure(config):
    import xformers.ops
    from xformers.ops import fmha

    from tilewise.compat import xformers as ours

    choose_backend(config)

    def operator(base: type, *known: str) -> type:
        """One of xformers' operators for CPUs and these bias classes; pages have no gradient, theirs neither."""
        biases = {type(None), torch.Tensor} | {kind for name, kind in vars(fmha.attn_bias).items() if name in known}
        own = {"NAME": "tilewise", "SUPPORTED_DEVICES": {"cpu"}, "SUPPORTED_ATTN_BIAS_TYPES": biases}
        takes_all = {"is_available": classmethod(lambda cls: True), "not_supported_reasons": classmethod(lambda cls, inputs: [])}
        return type(base.__name__, (base,), own | takes_all)

    trained = (*ours.MASKS, ours.WITH_BIAS)
    forward, backward = operator(fmha.cutlass.FwOp, *trained, *ours.PAGED), operator(fmha.cutlass.BwOp, *trained)
    fmha.ALL_FW_OPS, fmha.ALL_BW_OPS = (forward,), (backward,)

    def attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
        return ours.memory_efficient_attention(query, key, value, attn_bias, p, scale, output_dtype=output_dtype)

    @torch.no_grad()
    def attention_forward(*args, **options):
        return attention(*args, **options)

    for module in (xformers.ops, fmha):
        module.memory_efficient_attention, module.memory_efficient_attention_forward = attention, attention_forward


def pytest_collection_modifyitems(config, items):
    select(config, items, WANTED, EXCLUDED, lambda item: re.sub(r"\[.*", "", item.name))
