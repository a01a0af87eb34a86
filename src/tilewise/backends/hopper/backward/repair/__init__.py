"""Repair: gradients that are NaN only because of hidden elements, computed again from visible pairs, by the last kernel of the backward pass.

A hidden NaN or infinity meets P = 0 or dS = 0 in a product of tiles, and 0 * NaN is NaN. A hidden element makes NaN and no other value, so only
elements that are written as NaN are holes. The earlier kernels list the parts of gradients that are not finite: an entry of the list is 16 rows
of a gradient and some of its columns. This kernel works the list off:

    reports.py    the list, as the earlier kernels fill it
    entries.py    an entry's gradient, rows and operands
    holes.py      the NaN of an entry, a bit each: found, closed, written
    pieces.py     rows of Q, K, V and dO that hold large elements: found once, and remembered
    settle.py     NaN by right, closed where hidden elements and statistics show it, a warp an entry
    sums.py       the other holes: sums over visible pairs, a thread block an entry
    kernel.py     the kernel: first settles, then sums; and its launch
    call.py       the launch seen from torch
    config.py     what the kernel depends on
    elements.py   16-bit elements of a matrix in a lane's registers, two a word

NaN by right is the usual case, as gradients overflow in training, and so it is settled first. The same code serves dQ, dK and dV, which differ in
the operands of their products. It hardly ever has anything to do, but no backward pass ends without it, and so it has to be compiled in little time:
what need not be fast is a loop, and lies in shared memory, as a loop cannot index registers.
"""
