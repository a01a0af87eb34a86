"""The forward pass in 8 bits: a quantiser, and a kernel for operands of 8 bits."""
