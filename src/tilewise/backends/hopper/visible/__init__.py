"""Which queries see which keys, in device code: for the kernels of all passes.

config.mask_kind says what is known of the mask when a kernel is compiled:

    full      every query sees every key
    causal    the keys of each query begin at the first; band masks
    band      they go from a beginning to an end; band masks
    varlen    likewise, but each query's beginning and end are read from memory, and each key's: packed documents
    tiles     anything: the tiles to visit and what is seen of each come from tables

    bands.py      one band: the columns that a row sees, and the tiles that a block of rows does
    keys.py       of the forward pass: rows are queries, and blocks of them visit tiles of keys
    queries.py    of the backward pass: blocks of keys visit tiles of queries, and the other way round
    hiding.py     what is hidden of a tile of scores
"""
