"""Hopper kernels without a GPU: what the DSL compiles is read as PTX and carried out, 32 lanes at a time, by numpy.

    ptx.py          the text of a module as instructions
    program.py      a kernel as functions of Python (translation.py, arithmetic.py)
    machine.py      thread blocks, and what is asked of the copy engine
    cluster.py      blocks that reach each other's shared memory
    warp.py         32 threads: their way through the program, memory, barriers (copies.py, products.py)
    proxies.py      what copy engine and tensor cores see of what threads write to shared memory
    memory.py       the call's tensors, tensor maps
    host.py, host.c the launch functions, as the DSL compiled them, with a stand-in for the CUDA runtime
    prebuilt.py, driver.c those of prebuilt kernels, with a stand-in for the CUDA driver
    backend.py      all of it as a backend of tilewise
    triton.py       kernels that Triton compiled for Ampere, in place of its launcher

It is for checking, not for speed: 150 queries and keys take seconds. What it cannot tell: how long anything takes, what ptxas makes of the
PTX, and whether a fence is missing in global memory (there everybody sees what is written at once).
"""
