"""What the Hopper kernels share, from the ladder's first rung to production: the DSL, the compiler, and device code that no rung teaches.

Nothing is imported here: `nvidia-cutlass-dsl` is optional, and everything that needs it is imported where it is used.
"""
