"""torch's BlockMask (flex_attention) and tilewise masks, both ways."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks.arguments import check_count
from tilewise.masks.bitmap import MAX_PAIRS
from tilewise.masks.dense import Packed
from tilewise.masks.mask import Mask
from tilewise.masks.tiles import FULL, Runs, lower

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

EMPTY_TILE, FULL_TILE = 0, 1  # the first two bit tiles of `to_flex`'s mask_mod
NOT_LISTED, PARTIAL, WHOLE = range(3)  # what the lists of a BlockMask say of a block
PAIRS_A_CALL = 1 << 20  # of mask_mod
STRIP_BYTES = 1 << 26  # of rows of blocks that are filled together


def from_flex(block_mask: "BlockMask", batch: int = 1, heads: int = 1) -> Packed:
    """The pairs that flex_attention computes with `block_mask`: full blocks whole, partial ones as its mask_mod says, others not at all.

    mask_mod is evaluated on partial blocks only, many at a time; the result is one bit a pair.

    Args:
        batch, heads: of the query, where mask_mod depends on them and the lists are made for 1, which stands for all.

    Raises:
        ShapeError: `block_mask` is no BlockMask, is made for another batch or heads, its lists do not fit its lengths, or its mask_mod gives no bool
            a pair.
        UnsupportedError: more than 65536 x 65536 pairs.
    """
    check_block_mask(block_mask)
    seqlen_q, seqlen_k = block_mask.seq_lengths
    if seqlen_q * seqlen_k > MAX_PAIRS:
        raise UnsupportedError(
            f"a BlockMask of {seqlen_q} x {seqlen_k} is more than 65536 x 65536 pairs, which are held as bits; "
            "build the mask from tilewise's own constructors, which need no bits"
        )
    listed = listed_blocks(block_mask)
    shape = (*mask_extent(block_mask, batch, heads), *listed.shape[2:])
    listed = np.broadcast_to(listed, shape)
    size_q, size_k = (min(size, length) for size, length in zip(block_mask.BLOCK_SIZE, (seqlen_q, seqlen_k + -seqlen_k % 8), strict=True))
    of_row = listed.reshape(shape[0] * shape[1] * shape[2], shape[3])
    bits = np.empty((len(of_row), size_q, -(-seqlen_k // 8)), np.uint8)
    packed = size_k % 8 == 0  # a block is whole bytes
    width = shape[3] * (size_k // 8 if packed else size_k)
    together = max(1, STRIP_BYTES // max(1, size_q * width))
    for row in range(0, len(of_row), together):
        strip = of_row[row : row + together]
        cells = np.zeros((len(strip), size_q, shape[3], size_k // 8 if packed else size_k), np.uint8)
        blocks = cells.swapaxes(1, 2)
        blocks[strip == WHOLE] = 0xFF if packed else 1
        for rows, n_blocks, queries in _pieces(strip == PARTIAL, size_q, size_k):
            pairs = _pairs(block_mask, np.unravel_index(row + rows, shape[:3]), n_blocks, queries, size_k)
            blocks[rows, n_blocks, queries.start : queries.stop] = np.packbits(pairs, axis=2) if packed else pairs
        cells = cells.reshape(len(strip), size_q, width)
        bits[row : row + together] = cells[..., : bits.shape[2]] if packed else np.packbits(cells[..., :seqlen_k], axis=2)
    if seqlen_k % 8:
        bits[..., -1] &= 0xFF00 >> seqlen_k % 8 & 0xFF
    bits = bits.reshape(*shape[:2], shape[2] * size_q, bits.shape[2])[:, :, :seqlen_q]
    return Packed(torch.from_numpy(np.ascontiguousarray(bits)), seqlen_k)


def check_block_mask(given: Any) -> None:
    if not all(hasattr(given, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod", "seq_lengths", "BLOCK_SIZE")):
        raise ShapeError(f"block_mask must be a torch.nn.attention.flex_attention.BlockMask, got {type(given).__name__}")


def listed_blocks(block_mask: "BlockMask") -> np.ndarray:
    """What the lists say of each block, NOT_LISTED, PARTIAL or WHOLE: int8 (batch or 1, heads or 1, m_blocks, n_blocks).

    A block listed as partial is WHOLE where the BlockMask is made of lists alone. Raises ShapeError where the lists do not fit the lengths.
    """
    from torch.nn.attention.flex_attention import noop_mask

    m_blocks, n_blocks = (-(-length // size) for length, size in zip(block_mask.seq_lengths, block_mask.BLOCK_SIZE, strict=True))
    found = np.zeros((*lists_extent(block_mask), m_blocks, n_blocks), np.int8)
    for state, name in ((WHOLE if block_mask.mask_mod is noop_mask else PARTIAL, "kv"), (WHOLE, "full_kv")):
        if getattr(block_mask, f"{name}_num_blocks") is None:
            continue
        number = getattr(block_mask, f"{name}_num_blocks").cpu().numpy()
        index = getattr(block_mask, f"{name}_indices").cpu().numpy()
        if number.shape != index.shape[:-1] or number.shape[-1] != m_blocks or (number > index.shape[-1]).any():
            raise ShapeError(
                f"block_mask: {name}_num_blocks {number.shape} and {name}_indices {index.shape} do not fit together with seqlen_q "
                f"{block_mask.seq_lengths[0]}, which is {m_blocks} blocks of {block_mask.BLOCK_SIZE[0]}; expected (batch or 1, heads or 1, "
                f"{m_blocks}), the same with one more dimension, and numbers of at most that many blocks"
            )
        *at, place = np.nonzero(np.arange(index.shape[-1]) < number[..., None])
        column = index[(*at, place)]
        if ((column < 0) | (column >= n_blocks)).any():
            raise ShapeError(
                f"block_mask: {name}_indices lists block {column[(column < 0) | (column >= n_blocks)][0]}, but seqlen_k "
                f"{block_mask.seq_lengths[1]} is {n_blocks} blocks of {block_mask.BLOCK_SIZE[1]}; expected indices from 0 to {n_blocks - 1}"
            )
        one = np.zeros((*number.shape, n_blocks), np.int8)
        one[(*at, column)] = state
        found = np.maximum(found, one)
    return found


def lists_extent(block_mask: "BlockMask") -> tuple[int, int]:
    """(batch, heads) that the lists tell apart, 1 where one stands for all."""
    *_, batch, heads = 1, 1, *block_mask.kv_num_blocks.shape[:-1]
    return batch, heads


def mask_extent(block_mask: "BlockMask", batch: int, heads: int) -> tuple[int, int]:
    """(batch, heads) of the mask of a call with these, where 1 is any. Raises ShapeError where the lists are made for others."""
    extent = []
    for name, had, has in zip(("batch", "heads"), lists_extent(block_mask), (batch, heads), strict=True):
        extent.append(max(had, check_count(name, has, least=1)))
        if had != 1 and has not in (1, had):
            raise ShapeError(f"block_mask is made for {name} {had}, but {name} is {has}; they must agree, or one of them be 1")
    return tuple(extent)


def _pieces(partial: np.ndarray, size_q: int, size_k: int) -> Iterator[tuple[np.ndarray, np.ndarray, range]]:
    """(rows of blocks, n_blocks, queries within a block) of up to PAIRS_A_CALL pairs, of the blocks that are true in `partial`."""
    rows, n_blocks = np.nonzero(partial)
    blocks, queries = max(1, PAIRS_A_CALL // (size_q * size_k or 1)), max(1, PAIRS_A_CALL // (size_k or 1))
    for first in range(0, len(rows), blocks):
        for q0 in range(0, size_q, queries):
            yield rows[first : first + blocks], n_blocks[first : first + blocks], range(q0, min(q0 + queries, size_q))


def _pairs(block_mask: "BlockMask", at: tuple, n_blocks: np.ndarray, queries: range, size_k: int) -> np.ndarray:
    """What mask_mod says of blocks n_blocks (blocks,) of rows at = (b, h, m_block), bool (blocks, queries, size_k)."""
    b, h, m_block = at
    seqlen_q, seqlen_k = block_mask.seq_lengths
    # Indices past the end are looked at in the place of the last one and cut off by the caller: mask_mod may index tensors of that length.
    q = np.minimum(m_block[:, None] * block_mask.BLOCK_SIZE[0] + np.arange(queries.start, queries.stop), seqlen_q - 1)
    k = np.minimum(n_blocks[:, None] * block_mask.BLOCK_SIZE[1] + np.arange(size_k), seqlen_k - 1)
    inputs = [torch.from_numpy(x.astype(np.int64)).to(block_mask.kv_num_blocks.device) for x in (b, h, q, k)]
    mod = block_mask.mask_mod
    for axes in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        mod = torch.vmap(mod, axes)
    with torch.no_grad():
        pairs = mod(*inputs)
    if pairs.shape != (len(q), len(queries), size_k):
        raise ShapeError(
            f"block_mask: mask_mod gives a tensor of shape {tuple(pairs.shape[3:])} for one query and key, expected one bool, of shape ()"
        )
    return pairs.bool().cpu().numpy()


def to_flex(mask: Mask, seqlen_q: int, seqlen_k: int, block_size: int = 128, device: torch.device | str = "cpu") -> "BlockMask":
    """`mask` as a BlockMask of block_size x block_size blocks on `device`.

    Its mask_mod looks pairs up in the bits of the partial blocks, so it costs the same for every mask.
    Raises ShapeError where the mask does not fit the lengths, ValueError for a mask that is none, a length below 0 or a block_size below 1.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a tilewise mask, got {type(mask).__name__} {mask!r:.100}")
    block_size = check_count("block_size", block_size, least=1)
    seqlen_q, seqlen_k = check_count("seqlen_q", seqlen_q), check_count("seqlen_k", seqlen_k)
    batch, heads = mask.extent
    planes = mask.planes(seqlen_q, seqlen_k, batch, heads)
    tiles = [np.zeros((block_size, block_size), dtype=bool), np.ones((block_size, block_size), dtype=bool)]
    grid = torch.zeros(batch, heads, -(-seqlen_q // block_size), -(-seqlen_k // block_size), dtype=torch.int32, device="cpu")
    for plane in planes:
        blocks = _grid(lower(plane.region, block_size, block_size), tiles)
        grid[plane.batch.start : plane.batch.stop, plane.heads.start : plane.heads.stop] = blocks
    grid = grid.to(device)
    bits = torch.from_numpy(np.packbits(np.stack(tiles), axis=2)).to(device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        tile = grid[b if batch > 1 else 0, h if heads > 1 else 0, q_idx // block_size, kv_idx // block_size]
        key = kv_idx % block_size
        return (bits[tile, q_idx % block_size, key // 8] >> (7 - key % 8)) & 1 == 1

    partial, full = _listed(grid > FULL_TILE), _listed(grid == FULL_TILE)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=block_size, mask_mod=mask_mod, seq_lengths=(seqlen_q, seqlen_k))


def _grid(runs: Runs, tiles: list[np.ndarray]) -> Tensor:
    """For each tile the index of its bits in `tiles`, int32 (m_blocks, n_blocks); the bits of partial tiles are appended."""
    grid = torch.full((runs.m_blocks, runs.n_blocks), EMPTY_TILE, dtype=torch.int32, device="cpu")
    for m_block in range(runs.m_blocks):
        for run in runs.row(m_block):
            if runs.kind[run] == FULL:
                grid[m_block, runs.n0[run] : runs.n1[run]] = FULL_TILE
                continue
            for n_block in range(runs.n0[run], runs.n1[run]):
                if grid[m_block, n_block] == EMPTY_TILE:
                    grid[m_block, n_block] = len(tiles)
                    tiles.append(np.zeros_like(tiles[EMPTY_TILE]))
                seen = runs.mask_tile(m_block, run, n_block)
                tiles[grid[m_block, n_block]][: seen.shape[0], : seen.shape[1]] |= seen
    return grid


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(num_blocks, indices) of a boolean grid, as BlockMask wants them: the chosen columns of each row first, in order."""
    return chosen.sum(dim=-1, dtype=torch.int32), torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
