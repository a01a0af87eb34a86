"""Packed documents as a long-context corpus has them, for tests and measurements."""

import numpy as np

# Documents by length: (shortest, longest, how many), the histogram that MagiAttention's benchmark is published with.
LENGTHS = [
    (0, 10, 30254), (11, 50, 391188), (51, 100, 699596), (101, 200, 1377757), (201, 500, 3794735), (501, 1024, 3316785), (1025, 2048, 2106566),
    (2049, 4096, 988525), (4097, 8192, 410002), (8193, 16384, 173574), (16385, 32768, 115007), (32769, 65536, 18428), (65537, 131072, 22513),
    (131073, 196608, 18284),
]  # fmt: skip


def pack(total: int, rng: np.random.Generator, share: float = 0.25) -> list[int]:
    """cu_seqlens of documents that fill `total` tokens; those longer than `share` of it are cut."""
    most = int(total * share)
    values, weights = [], []
    for low, high, count in LENGTHS:
        whole, rest = divmod((low + high) // 2, most)
        values += [most, rest]
        weights += [count * whole, count * (rest > 0)]
    chance = np.array(weights) / sum(weights)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(int(rng.choice(values, p=chance)), left))
    rng.shuffle(lengths)
    return np.cumsum([0, *lengths]).tolist()
