"""The forward pass on Hopper: call.py (seen from torch), config.py (tiles), kernel.py (the kernel) and its parts."""
