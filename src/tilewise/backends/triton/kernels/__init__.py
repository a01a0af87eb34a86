"""The kernels, in Triton: one source for every GPU, without atomics; tiles and flags are constants that launch.py compiles for."""
