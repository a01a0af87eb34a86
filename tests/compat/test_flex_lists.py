"""flex_attention by tilewise over lists of blocks made by hand: of one batch entry or head for all, of any block size, with full blocks."""

import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask
from torch_operators import normal

import tilewise as tw
from tilewise.compat.flex import flex_attention, mask_of
from tilewise.errors import ShapeError

BATCH, HEADS = 2, 4
LENGTHS = torch.tensor([50, 7])


def causal(b, h, q, k):
    return q >= k


def as_lists(chosen):
    """(num_blocks, indices) of a bool grid (batch, heads, m_blocks, n_blocks), columns from the last to the first."""
    order = torch.argsort(chosen.flip(-1).int(), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), (chosen.shape[-1] - 1 - order).int()


def dense_of(grid, block_size, seqlen_q, seqlen_k):
    return grid.repeat_interleave(block_size[0], -2).repeat_interleave(block_size[1], -1)[..., :seqlen_q, :seqlen_k]


def check(block_mask, dense):
    """O, LSE and gradients are those of `dense` (batch or 1, heads or 1, seqlen_q, seqlen_k)."""
    seqlen_q, seqlen_k = dense.shape[-2:]
    q, k, v = (normal(BATCH, HEADS, n, 8, seed=seed).requires_grad_() for seed, n in enumerate((seqlen_q, seqlen_k, seqlen_k)))
    s = (q @ k.mT * 8**-0.5).masked_fill(~dense, -torch.inf)
    expected = torch.softmax(s, -1).nan_to_num(0.0) @ v, s.logsumexp(-1)
    got = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)
    some = dense.any(-1).expand(BATCH, HEADS, -1)[..., None]  # softmax of no key has no gradient
    do = normal(*got[0].shape, seed=9) * some
    grads = torch.autograd.grad(got[0], (q, k, v), do), torch.autograd.grad(expected[0], (q, k, v), do)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other.nan_to_num(0.0), atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("extent", [(1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)], ids=str)
@pytest.mark.parametrize(
    "block_size, seqlen_q, seqlen_k", [((16, 16), 64, 64), ((16, 32), 45, 70), ((20, 12), 50, 41), ((128, 128), 33, 57)]
)
@pytest.mark.parametrize("mod", [None, causal], ids=["lists alone", "causal"])
def test_lists_stand_for_all_batch_entries_and_heads(extent, block_size, seqlen_q, seqlen_k, mod):
    shape = (*extent, -(-seqlen_q // block_size[0]), -(-seqlen_k // block_size[1]))
    state = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(sum(extent)))
    made = BlockMask.from_kv_blocks(
        *as_lists(state == 1), *as_lists(state == 2), BLOCK_SIZE=block_size, mask_mod=mod, seq_lengths=(seqlen_q, seqlen_k)
    )
    partial, full = (dense_of(state == at, block_size, seqlen_q, seqlen_k) for at in (1, 2))
    shown = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    check(made, full | (partial & (shown if mod is None else shown.tril())))


@pytest.mark.parametrize("mod", [None, noop_mask], ids=["none", "noop"])
def test_lists_without_full_blocks(mod):
    grid = torch.tensor([[1, 1], [0, 1]]).bool()[None, None]
    check(BlockMask.from_kv_blocks(*as_lists(grid), BLOCK_SIZE=32, mask_mod=mod), dense_of(grid, (32, 32), 64, 64))


def test_lists_narrower_than_the_keys_and_without_batch_or_heads():
    """As of a sparse pattern, where each row lists few of the blocks."""
    number, index = torch.tensor([1, 2, 2], dtype=torch.int32), torch.tensor([[0, 9], [1, 4], [3, 0]], dtype=torch.int32)
    grid = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]).bool()
    for lead in ((), (1,), (1, 1)):
        lists = number.expand(*lead, 3), index.expand(*lead, 3, 2)
        made = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=8, seq_lengths=(24, 37), compute_q_blocks=False)
        check(made, dense_of(grid, (8, 8), 24, 37)[None, None])


def by_batch(b, h, q, k):
    return (q >= k) | (k < LENGTHS[b])


def by_head(b, h, q, k):
    return ((q // 4 - k // 4).abs() <= h) & (q * k % 3 == 0)


def by_both(b, h, q, k):
    shown = (q >= k) & (k % (h + 2) != 0) & (b >= 0)
    shown |= k < LENGTHS[b]
    return shown


@pytest.mark.parametrize("mod", [by_batch, by_head, by_both], ids=lambda each: each.__name__)
def test_a_mod_of_batch_and_head_is_asked_for_those_of_the_call(mod, monkeypatch):
    """With the lists of one entry, and one head, in which all blocks are partial; the oracle is torch's own formula."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    q, k, v = (normal(BATCH, HEADS, 64, 8, seed=seed) for seed in range(3))
    everywhere = as_lists(torch.ones(1, 1, 4, 4, dtype=torch.bool))
    made = BlockMask.from_kv_blocks(*everywhere, BLOCK_SIZE=16, mask_mod=mod)
    for _ in range(2):
        torch.testing.assert_close(
            flex_attention(q, k, v, block_mask=made), torchs.flex_attention(q, k, v, block_mask=made), atol=1e-11, rtol=1e-11
        )
    assert mask_of(made, BATCH, HEADS).extent == (BATCH if mod is not by_head else 1, HEADS if mod is not by_batch else 1)
    whole = create_block_mask(mod, BATCH, HEADS, 64, 64, device="cpu", BLOCK_SIZE=16)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=made), flex_attention(q, k, v, block_mask=whole))


def hand_made(number, index, **options):
    number, index = torch.tensor([[number]], dtype=torch.int32), torch.tensor([[index]], dtype=torch.int32)
    return BlockMask.from_kv_blocks(number, index, BLOCK_SIZE=8, compute_q_blocks=False, **options)


BAD = {
    "column": (hand_made([1, 2], [[0, 1], [1, 7]], seq_lengths=(16, 16)), "kv_indices lists block 7, but seqlen_k 16 is 2 blocks of 8"),
    "negative": (hand_made([1, 2], [[0, 1], [-1, 1]], seq_lengths=(16, 16)), "kv_indices lists block -1"),
    "rows": (hand_made([1], [[0, 1]], seq_lengths=(16, 16)), r"do not fit together with seqlen_q 16, which is 2 blocks of 8; expected"),
    "number": (hand_made([1, 3], [[0, 1], [0, 1]], seq_lengths=(16, 16)), "numbers of at most that many blocks"),
}


@pytest.mark.parametrize("made, message", BAD.values(), ids=BAD)
def test_lists_that_do_not_fit_are_refused(made, message):
    q = torch.zeros(1, 1, 16, 8)
    with pytest.raises(ShapeError, match=message):
        flex_attention(q, q, q, block_mask=made)


def test_another_batch_is_refused():
    made = BlockMask.from_kv_blocks(*as_lists(torch.ones(3, 1, 2, 2, dtype=torch.bool)), BLOCK_SIZE=8)
    assert mask_of(made) == mask_of(made, 3, 2) == tw.Full()
    with pytest.raises(ShapeError, match="block_mask is made for batch 3, but batch is 4; they must agree, or one of them be 1"):
        mask_of(made, 4)
    with pytest.raises(ValueError, match="heads must be an integer, 1 or more, got 0"):
        mask_of(made, 3, 0)


def test_what_is_no_block_mask_and_what_gives_no_bool_are_refused():
    q = torch.zeros(1, 1, 16, 8)
    with pytest.raises(ShapeError, match="block_mask must be a torch.nn.attention.flex_attention.BlockMask, got Tensor"):
        flex_attention(q, q, q, block_mask=torch.ones(16, 16))
    made = hand_made([1, 2], [[0, 1], [1, 0]])
    made.mask_mod = lambda b, h, q, k: torch.stack([q >= k, q == k])
    with pytest.raises(ShapeError, match=r"mask_mod gives a tensor of shape \(2,\) for one query and key, expected one bool"):
        flex_attention(q, q, q, block_mask=made)
