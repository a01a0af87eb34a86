"""Masks from torch's `BlockMask` and to it: the public name of masks/flex.py."""

from tilewise.masks.flex import from_flex, to_flex

__all__ = ["from_flex", "to_flex"]
