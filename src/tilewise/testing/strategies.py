"""Random problems for property tests, drawn by hypothesis (which only these need): masks, and whole cases over given dimensions and dtypes."""

from itertools import pairwise

from hypothesis import strategies as st

from tilewise.masks import Causal, ChunkedCausal, Chunks, Documents, FirstKeys, Full, Padding, PerHead, PrefixLM, PrefixTree, SlidingWindow
from tilewise.testing.cases import DTYPES, LAYOUTS, Case, random_mask

LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65]), st.integers(0, 150))
HEAD_DIMS = st.one_of(st.sampled_from([1, 8, 64, 72, 128, 256]), st.integers(1, 256))


def cumulative(draw, total: int, documents: int) -> list[int]:
    """`documents` cuts of `total` tokens, as cu_seqlens."""
    return [0, *sorted(draw(st.lists(st.integers(0, total), min_size=documents, max_size=documents)))]


@st.composite
def prefix_trees(draw, tokens: int):
    """A tree of at most `tokens` tokens, with nodes that need not lie depth first, with or without a window."""
    ends = cumulative(draw, tokens, draw(st.integers(1, 6)))
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(ends) - 1)]
    return PrefixTree(parents, [end - start for start, end in pairwise(ends)], draw(st.one_of(st.none(), st.integers(0, 60))))


@st.composite
def band_masks(draw, seqlen_q: int, seqlen_k: int, depth: int = 2):
    """A random expression: constructors joined by & | - ~."""
    if depth and draw(st.integers(0, 2)) == 0:
        a, b = (draw(band_masks(seqlen_q, seqlen_k, depth - 1)) for _ in range(2))
        return draw(st.sampled_from([a & b, a | b, a - b, ~a]))
    n, side = draw(st.integers(1, 40)), st.one_of(st.none(), st.integers(0, 80))
    documents = draw(st.integers(1, 4))
    cu_q, cu_k = cumulative(draw, seqlen_q, documents), cumulative(draw, seqlen_k, documents)
    simple = [
        Full(),
        Causal(align=draw(st.sampled_from(["bottom_right", "top_left"]))),
        SlidingWindow(draw(side), draw(side)),
        PrefixLM(n),
        FirstKeys(n),
        ChunkedCausal(n),
        Chunks(n),
        draw(prefix_trees(min(seqlen_q, seqlen_k))),
    ]
    return draw(
        st.sampled_from([*simple, Documents(cu_q, cu_k, inner=draw(st.sampled_from(simple[:-1])))])
    )  # a tree need not fit into a document


@st.composite
def cases(draw, lengths=LENGTHS, head_dims=HEAD_DIMS, dtypes=tuple(DTYPES), dropouts=(0.0, 0.0, 0.25)):
    """A `Case` with any feature; `lengths` and `head_dims` are strategies, of `dtypes` and `dropouts` one is taken."""
    group, heads_k = draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.integers(1, 3))
    seqlen_q, seqlen_k, batch = draw(lengths), draw(lengths), draw(st.integers(0, 2))
    heads = group * heads_k
    mask = draw(band_masks(seqlen_q, seqlen_k))
    if draw(st.integers(0, 4)) == 0:
        mask = draw(st.sampled_from([random_mask(seqlen_q, seqlen_k), random_mask(seqlen_q, seqlen_k) & mask]))
    if batch and draw(st.integers(0, 4)) == 0:
        ends = [sorted(draw(st.integers(0, seqlen_k)) for _ in range(2)) for _ in range(batch)]
        mask = mask & Padding([end - start for start, end in ends], draw(st.sampled_from([None, [start for start, _ in ends]])))
    if heads > 1 and draw(st.integers(0, 4)) == 0:
        mask = PerHead({(0, 1): mask, (1, heads): draw(band_masks(seqlen_q, seqlen_k, 0))})
    return Case(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads,
        heads_k=heads_k,
        head_dim=draw(head_dims),
        head_dim_v=draw(st.one_of(st.none(), head_dims)),
        mask=mask,
        dtype=draw(st.sampled_from(dtypes)),
        layout=draw(st.sampled_from(LAYOUTS)),
        scale=draw(st.sampled_from([None, 0.3])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.5])),
        bias=draw(st.sampled_from([None, None, "", "q", "bhq"])),
        alibi=draw(st.sampled_from([None, None, "h", "bh"])),
        sink=draw(st.booleans()),
        dropout=draw(st.sampled_from(dropouts)),
        lse_grad=draw(st.booleans()),
    )
