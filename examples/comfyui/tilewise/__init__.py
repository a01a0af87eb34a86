"""A custom node for ComfyUI, "Attention by tilewise": copy this folder to custom_nodes/ of a ComfyUI.

It needs tilewise installed there.
"""

from tilewise.compat.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
