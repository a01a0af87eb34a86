"""The gradient of an additive bias on Hopper: call.py (seen from torch), kernel.py."""
