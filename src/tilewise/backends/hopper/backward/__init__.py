"""The backward pass on Hopper: call.py (seen from torch), config.py (tiles), kernel.py (the launches), and the roles of their warps."""
