"""The gradient of a sink on Hopper: call.py (seen from torch), kernel.py."""
