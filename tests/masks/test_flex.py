"""torch's BlockMask both ways, and flex_attention as the judge of what a BlockMask means."""

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, flex_attention

from tilewise.blockmask import from_flex, to_flex
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import Causal, Dense, Documents, FirstKeys, Full, PerHead, SlidingWindow, parse

torch.manual_seed(0)
DOCUMENT = torch.repeat_interleave(torch.arange(3), torch.tensor([40, 70, 90]))
SLOPE = torch.tensor([1, 3])


def causal(b, h, q, k):
    return q >= k


def documents(b, h, q, k):
    return DOCUMENT[q] == DOCUMENT[k]


def by_head(b, h, q, k):
    return (q - k).abs() % (SLOPE[h] + b) == 0


@pytest.mark.parametrize("block_size", [128, 64, (32, 16), (20, 24)])
@pytest.mark.parametrize(
    "mask_mod, batch, heads",
    [(causal, 1, 1), (and_masks(causal, documents), 1, 1), (by_head, 3, 2), (by_head, 1, 2), (lambda b, h, q, k: q < 0, 1, 1)],
)
def test_from_flex_is_what_torch_says(mask_mod, batch, heads, block_size):
    block_mask = create_block_mask(mask_mod, batch, heads, 200, 200, device="cpu", BLOCK_SIZE=block_size)
    mask = from_flex(block_mask)
    expected = create_mask(mask_mod, batch, heads, 200, 200, device="cpu")
    assert torch.equal(mask.dense(200, 200), expected[0, 0] if expected.shape[:2] == (1, 1) else expected)
    assert mask.kind == "bitmap"
    tensors = []
    assert parse(mask.text(tensors), tensors) == mask


def test_full_blocks_are_full_whatever_mask_mod_says():
    """A BlockMask made by hand: block (0, 1) full, (1, 0) partial, nothing else; flex skips mask_mod on full blocks."""
    number = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[1, 0]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(number[0], index[0], number[1], index[1], BLOCK_SIZE=8, mask_mod=lambda b, h, q, k: q == k + 8)
    expected = torch.zeros(16, 16, dtype=torch.bool)
    expected[:8, 8:] = True
    expected[8:, :8] = torch.eye(8, dtype=torch.bool)
    assert torch.equal(from_flex(block_mask).dense(16, 16), expected)


MASKS = [
    Full(),
    Causal(),
    Documents([0, 40, 110, 190], inner=Causal()),
    SlidingWindow(20, 3) | FirstKeys(5),
    PerHead({(0, 1): Causal(), (1, 3): FirstKeys(5)}),
    Dense(torch.rand(2, 1, 200, 190) > 0.5),
    Dense(torch.rand(2, 1, 200, 190) > 0.5) & PerHead({(0, 2): Causal(), (2, 3): Full()}),
]


@pytest.mark.parametrize("block_size", [128, 20])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_flex_attention_computes_our_mask(mask, block_size):
    block_mask = to_flex(mask, 200, 190, block_size)
    assert block_mask.seq_lengths == (200, 190)
    dense = mask.dense(200, 190)
    assert torch.equal(from_flex(block_mask).dense(200, 190), dense)
    q, k, v = torch.randn(2, 3, 200, 16), torch.randn(2, 3, 190, 16), torch.randn(2, 3, 190, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled flex_attention warns that it is slow
        o = flex_attention(q, k, v, block_mask=block_mask)
    scores = (q @ k.mT / 4).masked_fill(~dense, -torch.inf)
    expected = torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v
    torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)


def test_blocks_are_classed_as_torch_classes_them():
    ours, theirs = to_flex(Causal(), 512, 512), create_block_mask(causal, None, None, 512, 512, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for row in range(4):
        assert torch.equal(ours.kv_indices[0, 0, row, :1], theirs.kv_indices[0, 0, row, :1])
        assert torch.equal(ours.full_kv_indices[0, 0, row, :row], theirs.full_kv_indices[0, 0, row, :row])


def test_a_mask_mod_is_evaluated_on_partial_blocks_only():
    seen = []

    def watched(b, h, q, k):
        seen.append(1)
        return causal(b, h, q, k)

    block_mask = to_flex(Causal(), 8192, 8192)
    block_mask.mask_mod = watched
    mask = from_flex(block_mask)
    assert mask.pairs(8192, 8192) == Causal().pairs(8192, 8192)
    assert len(seen) == 1  # with the 64 blocks of the diagonal, which alone are partial
    assert mask.bits.nbytes == 8192 * 8192 // 8


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match=r"block_mask must be a torch.nn.attention.flex_attention.BlockMask, got Tensor"):
        from_flex(torch.ones(2, 2))
    with pytest.raises(ValueError, match="block_size must be an integer, 1 or more, got 0"):
        to_flex(Causal(), 8, 8, block_size=0)
    for bad in (2.5, True, "128"):
        with pytest.raises(ValueError, match="block_size must be an integer, 1 or more, got"):
            to_flex(Causal(), 8, 8, block_size=bad)
    with pytest.raises(ValueError, match="mask must be a tilewise mask, got function"):
        to_flex(causal, 8, 8)
    with pytest.raises(ValueError, match="seqlen_k must be an integer, 0 or more, got -8"):
        to_flex(Causal(), 8, -8)
    with pytest.raises(ShapeError, match="cu_seqlens_q reaches position 9"):
        to_flex(Documents([0, 9]), 8, 8)
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    huge = BlockMask.from_kv_blocks(one, one[..., None] * 0, BLOCK_SIZE=1 << 20)
    with pytest.raises(UnsupportedError, match=r"1048576 x 1048576 is more than 65536 x 65536 pairs.*tilewise's own constructors"):
        from_flex(huge)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("mask", [Causal(), PerHead({(0, 1): Causal(), (1, 2): Full()})], ids=repr)
def test_no_queries_or_no_keys(mask, seqlen_q, seqlen_k):
    block_mask = to_flex(mask, seqlen_q, seqlen_k, 4)
    assert block_mask.seq_lengths == (seqlen_q, seqlen_k)
    assert torch.equal(from_flex(block_mask).dense(seqlen_q, seqlen_k), mask.dense(seqlen_q, seqlen_k))


def test_the_default_device_is_not_asked():
    mask = SlidingWindow(20, 3) | FirstKeys(5)
    with torch.device("meta"):  # as under torch.set_default_device
        block_mask = to_flex(mask, 200, 190, 64)
        dense = from_flex(block_mask).dense(200, 190)
    assert torch.equal(dense, mask.dense(200, 190))
