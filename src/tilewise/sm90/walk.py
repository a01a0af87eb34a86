"""Which tiles of keys a block of queries visits. From K2 on; the ladder's masks are full and causal, and seqlen_q = seqlen_k."""

from tilewise.sm90.dsl import Int32, arch, const_expr, cute


@cute.jit
def block_of(config) -> tuple[Int32, Int32]:
    """(block of queries, head) of this thread block; under the causal mask those with the most keys start first."""
    m_block, head, _ = arch.block_idx()
    if const_expr(config.causal):
        m_block = arch.grid_dim()[0] - 1 - m_block
    return m_block, head


@cute.jit
def key_blocks(m_block: Int32, seqlen: Int32, config) -> tuple[Int32, Int32]:
    """(tiles to visit, how many of them, from the first, need no mask)."""
    end, free = seqlen, seqlen
    if const_expr(config.causal):
        end = min(end, (m_block + 1) * config.tile_m)
        free = min(free, m_block * config.tile_m + 1)
    return cute.ceil_div(end, config.tile_n), free // config.tile_n
