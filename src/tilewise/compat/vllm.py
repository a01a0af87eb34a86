"""tilewise as an attention backend of vLLM: `register()`, which vLLM calls by itself where tilewise is installed, then `attention_backend="CUSTOM"`.

Keys and values are read where vLLM keeps them, in either of its layouts, by one call of `tilewise.decode` for every batch: prompts, chunks of prompts
and single tokens, with windows, sinks, softcap, ALiBi, grouped heads, and caches in e4m3. Those of long chunks are copied out of their pages first.
What is not served is refused when the backend is chosen. vllm_backend.py is what vLLM then calls; nothing is imported of vLLM before it asks.

vLLM's CPU platform has one backend, whatever is asked for: with TILEWISE_VLLM_CPU=1 tilewise takes its place there. Latent heads (MLA) have backends
of their own, and CUSTOM is one: with TILEWISE_VLLM_MLA=1 vLLM's FLASH_ATTN_MLA is tilewise (vllm_mla.py).
"""

import os

BACKEND = "tilewise.compat.vllm_backend.Backend"
LATENT = "tilewise.compat.vllm_mla.Backend"
CPU, MLA = "TILEWISE_VLLM_CPU", "TILEWISE_VLLM_MLA"


def register() -> None:
    """Name the backend to vLLM, as CUSTOM, and where variables of the environment ask for it in the place of CPU_ATTN and of FLASH_ATTN_MLA.

    As good twice as once. ImportError without vLLM.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # pyright: ignore[reportMissingImports]

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    for variable, name, backend in ((CPU, "CPU_ATTN", BACKEND), (MLA, "FLASH_ATTN_MLA", LATENT)):
        if os.environ.get(variable, "0") not in ("", "0"):
            register_backend(AttentionBackendEnum[name], backend)
