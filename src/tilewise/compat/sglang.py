"""tilewise as an attention backend of SGLang: `register()`, which SGLang calls by itself where both are installed; `--attention-backend tilewise`.

Keys and values are read where SGLang keeps them, in pages of any size, by one call of `tilewise.decode` for every batch: prompts, chunks of prompts
behind a cached prefix, and single tokens, with windows, sinks, softcap, grouped heads, latent heads (MLA), and caches in e4m3. What is not served is
refused when the server starts. sglang_backend.py is what SGLang then calls; nothing is imported of SGLang before it asks.
"""

NAME = "tilewise"


def register() -> None:
    """Name the backend to SGLang, as one to choose, also for deterministic inference. As good twice as once. ImportError without SGLang."""
    from sglang.srt import server_args  # pyright: ignore[reportMissingImports]
    from sglang.srt.layers.attention.attention_registry import register_attention_backend  # pyright: ignore[reportMissingImports]

    register_attention_backend(NAME)(_create)
    for choices, add in (
        (server_args.ATTENTION_BACKEND_CHOICES, server_args.add_attention_backend_choices),
        (server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, server_args.add_deterministic_attention_backend_choices),
        (
            server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            server_args.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if NAME not in choices:
            add([NAME])


def _create(runner):
    from tilewise.compat.sglang_backend import Backend

    return Backend(runner)
