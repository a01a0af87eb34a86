"""torch's BlockMask (flex_attention) and tilewise masks, both ways."""

from typing import TYPE_CHECKING

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


def from_flex(block_mask: "BlockMask") -> Packed:
    """The pairs that flex_attention computes with `block_mask`: full blocks whole, partial ones as its mask_mod says, others not at all.

    mask_mod is evaluated on partial blocks only, a row of blocks at a time; the result is one bit a pair.
    Raises ShapeError where `block_mask` is no BlockMask, UnsupportedError beyond 65536 x 65536 pairs.
    """
    if not all(hasattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod", "seq_lengths", "BLOCK_SIZE")):
        raise ShapeError(f"block_mask must be a torch.nn.attention.flex_attention.BlockMask, got {type(block_mask).__name__}")
    seqlen_q, seqlen_k = block_mask.seq_lengths
    if seqlen_q * seqlen_k > MAX_PAIRS:
        raise UnsupportedError(
            f"a BlockMask of {seqlen_q} x {seqlen_k} is more than 65536 x 65536 pairs, which are held as bits; "
            "build the mask from tilewise's own constructors, which need no bits"
        )
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    size_q = block_mask.BLOCK_SIZE[0]
    bits = np.empty((batch, heads, seqlen_q, -(-seqlen_k // 8)), dtype=np.uint8)
    for b in range(batch):
        for h in range(heads):
            for m_block, q0 in enumerate(range(0, seqlen_q, size_q)):
                bits[b, h, q0 : q0 + size_q] = np.packbits(_row_of_blocks(block_mask, b, h, m_block)[: seqlen_q - q0], axis=1)
    return Packed(torch.from_numpy(bits), seqlen_k)


def _row_of_blocks(block_mask: "BlockMask", b: int, h: int, m_block: int) -> np.ndarray:
    """The visible pairs of one row of blocks, bool (block size, seqlen_k)."""
    size_q, size_k = block_mask.BLOCK_SIZE
    seqlen_k = block_mask.seq_lengths[1]
    out = torch.zeros(size_q, -(-seqlen_k // size_k), size_k, dtype=torch.bool, device="cpu")
    partial = block_mask.kv_indices[b, h, m_block, : block_mask.kv_num_blocks[b, h, m_block]].long()
    new = {"dtype": torch.int64, "device": partial.device}
    if len(partial):
        index = [torch.tensor(value, **new) for value in (b, h)]
        rows = torch.arange(m_block * size_q, (m_block + 1) * size_q, **new)
        # Keys past the end are looked at in the place of the last one and cut off below: mask_mod may index tensors of that length.
        rows = rows.clamp(max=block_mask.seq_lengths[0] - 1)
        keys = (partial[:, None] * size_k + torch.arange(size_k, **new)).clamp(max=seqlen_k - 1)
        pairs = torch.vmap(torch.vmap(block_mask.mask_mod, (None, None, None, 0)), (None, None, 0, None))(*index, rows, keys.flatten())
        out[:, partial.cpu()] = pairs.reshape(size_q, len(partial), size_k).cpu()
    if block_mask.full_kv_num_blocks is not None:
        out[:, block_mask.full_kv_indices[b, h, m_block, : block_mask.full_kv_num_blocks[b, h, m_block]].long().cpu()] = True
    return out.flatten(1)[:, :seqlen_k].numpy()


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
