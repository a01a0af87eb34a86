"""Everything in torch that tilewise can serve in a process without an edit, at once: `serve()`, as `tilewise run` calls it in every process."""

import os
import sys

from tilewise.compat import install, sdpa
from tilewise.errors import UnsupportedError

NAMES = "flash_attn", "flash_attn_3"
SAID = "TILEWISE_RUN_SAID"  # by a process above

_patches: list[sdpa.Patch] = []


def serve() -> None:
    """torch's scaled_dot_product_attention from now on, and the names of FlashAttention-2 and -3 where there is no real package.

    As good twice as once. What is served is said on standard error, once in a tree of processes.
    """
    if _patches:
        return
    _patches.append(sdpa.patch())
    served, left = ["torch.nn.functional.scaled_dot_product_attention"], []
    for name in NAMES:
        try:
            install(name)
            served.append(name)
        except UnsupportedError:
            left.append(name)
    if os.environ.get(SAID) is None:
        os.environ[SAID] = "1"
        real = f"; real packages are left as they are: {', '.join(left)}" if left else ""
        later = 'in transformers and diffusers by the name "tilewise"'
        print(f"tilewise run: attention by {', '.join(served)} is tilewise's, and {later}{real}", file=sys.stderr)
