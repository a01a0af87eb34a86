"""A node for ComfyUI that lets one model attend by tilewise, in 8 bits or in 16.

ComfyUI finds it by a folder of one file, custom_nodes/tilewise/__init__.py (examples/comfyui has it):

    from tilewise.compat.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

The node sets the model's `optimized_attention_override`, which ComfyUI asks before its own attention function. Nothing of ComfyUI is imported.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilewise.api import attention
from tilewise.backends.eight_bits import RECIPES
from tilewise.compat._attn_mask import mask_and_bias
from tilewise.compat._paying import paying
from tilewise.errors import UnsupportedError
from tilewise.machine import once

SIXTEEN = "16 bits"
LAYER = "tilewise in ComfyUI"
CHANGING_NOTHING = {"transformer_options", "low_precision_attention"}  # beyond the precision


def override(precision: str | None) -> Callable[..., Tensor]:
    """What ComfyUI calls in the place of an attention function of its own, with that one first."""

    def attend(
        theirs: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """q, k, v: (batch, seqlen, heads * head_dim), or (batch, heads, seqlen, head_dim) with `skip_reshape`; O likewise, by `skip_output_reshape`.

        mask: bool (True: visible) or values to add, (seqlen_q, seqlen_k), (batch, seqlen_q, seqlen_k) or with heads. What tilewise cannot compute
        goes to ComfyUI's function, which is said once.
        """
        query, key, value = (x.transpose(1, 2) if skip_reshape else x.unflatten(-1, (heads, -1)) for x in (q, k, v))
        sizes = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
        try:
            if unknown := kwargs.keys() - CHANGING_NOTHING:
                raise UnsupportedError(f"{LAYER}: {', '.join(sorted(unknown))} is not known")
            visible, bias = None, None
            if mask is not None:
                visible, bias = mask_and_bias(mask[:, None] if mask.dim() == 3 else mask, query, sizes, LAYER)
            wanted = precision if kwargs.get("low_precision_attention", True) else None
            o = attention(query, key, value, mask=visible, bias=bias, precision=paying(wanted, query, key, value, bias))
        except UnsupportedError as error:
            once.warn(f"{error}; ComfyUI's own attention computes such calls")
            options = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape, **kwargs}
            return theirs(q, k, v, heads, mask=mask, attn_precision=attn_precision, **options)
        return o.transpose(1, 2) if skip_output_reshape else o.flatten(2)

    return attend


class Attention:
    """The node: a model in, the same model out, with its attention by tilewise."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model_patches"
    DESCRIPTION = "Attention by tilewise; in 8 bits where they are faster than 16 (many keys, head_dim above 64, an H100 or H200)."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, tuple]]:
        return {"required": {"model": ("MODEL",), "precision": (["int8", *(name for name in RECIPES if name != "int8"), SIXTEEN],)}}

    def patch(self, model: Any, precision: str) -> tuple[Any]:
        patched = model.clone()
        options = patched.model_options.get("transformer_options", {})
        mine = {"optimized_attention_override": override(None if precision == SIXTEEN else precision)}
        patched.model_options = {**patched.model_options, "transformer_options": {**options, **mine}}
        return (patched,)


NODE_CLASS_MAPPINGS = {"TilewiseAttention": Attention}
NODE_DISPLAY_NAME_MAPPINGS = {"TilewiseAttention": "Attention by tilewise"}
