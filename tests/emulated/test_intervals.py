"""The kernels that find the rows of packed documents, carried out without a GPU: each row's keys, each tile's walk, and the order of tiles."""

from itertools import pairwise

import pytest
import torch
from emulator.backend import NEEDED, Emulated

from tilewise.backends.hopper.forward import rows
from tilewise.backends.hopper.forward.intervals import FEW
from tilewise.backends.tables import documents
from tilewise.masks import Causal

pytestmark = NEEDED

TILE_M, TILE_N = 64, 32
UNWRITTEN = -7


def keys_of(ends_q: list[int], ends_k: list[int], row: int) -> tuple[int, int]:
    """Of a causal document's row: none where it is nobody's."""
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        if q0 <= row < q1:
            begin, end = k0, min(k1, row + k1 - q1 + 1)
            return (begin, end) if begin < end else (0, 0)
    return 0, 0


@pytest.mark.parametrize("cluster", [1, 2])
def test_few_tiles_and_more(cluster):
    """One launch for few, two for more: numbers of tiles on both sides of where that changes, and documents in which long tiles come first."""
    config = rows.RowsConfig(tile_m=TILE_M, tile_n=TILE_N, cluster=cluster)
    with Emulated().on_gpu():
        find = rows.finder(documents.offsets(Causal()), 700, config)
        for tiles in (1, 2, FEW - 1, FEW, FEW + 1):
            seqlen_q = TILE_M * tiles - 3
            ends_q, ends_k = [0, seqlen_q // 2, seqlen_q // 2, seqlen_q - 1], [0, 500, 510, 700]
            cu_seqlens = [torch.tensor(ends, dtype=torch.int32, device="cpu") for ends in (ends_q, ends_k)]
            shapes = rows.shapes(seqlen_q, config)
            memory = [torch.full((torch.Size(shape).numel() + 16,), UNWRITTEN, dtype=torch.int32) for shape in shapes]
            made = rows.Rows(*(x[8:-8].view(shape) for x, shape in zip(memory, shapes, strict=True)))
            find(*cu_seqlens, made)
            assert all((x[:8] == UNWRITTEN).all() and (x[-8:] == UNWRITTEN).all() for x in memory)
            wanted = [keys_of(ends_q, ends_k, row) for row in range(seqlen_q)]
            assert [*zip(*made.ends.tolist(), strict=True)] == wanted
            for tile, (first, last, *_) in enumerate(made.walks.tolist()):
                seen = [pair for pair in wanted[tile * TILE_M : (tile + 1) * TILE_M] if pair[0] < pair[1]]
                if seen:
                    assert (first, last) == (min(begin for begin, _ in seen) // TILE_N, -(-max(end for _, end in seen) // TILE_N))
            of_units = made.walks.split(cluster)
            visited = [int(walks[:, 1].max() - walks[:, 0].min()) for walks in of_units]
            assert made.order.tolist() == sorted(range(len(visited)), key=lambda unit: (visited[unit], unit))
