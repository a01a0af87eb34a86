"""Packing padded batches: there and back, gradients, tokens that are kept but not in use, several sequences a row."""

import pytest
import torch
from peer_oracle import randn

from tilewise.compat import bert_padding

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_there_and_back(dtype):
    x = randn(3, 5, 2, 4).requires_grad_()
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK.to(dtype))
    assert cu_seqlens.tolist() == [0, 3, 3, 7] and cu_seqlens.dtype == torch.int32 and longest == 4 and type(longest) is int
    assert used.tolist() == [3, 0, 4] and indices.tolist() == [0, 1, 2, 11, 12, 13, 14]
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    padded = bert_padding.pad_input(packed, indices, 3, 5)
    assert torch.equal(padded, x * MASK[..., None, None])
    weight = randn(3, 5, 2, 4, seed=1)
    (gradient,) = torch.autograd.grad((padded * weight).sum(), x)
    assert torch.equal(gradient, weight * MASK[..., None, None])


def test_tokens_that_are_kept_but_not_in_use():
    x, unused = randn(3, 5, 2), torch.tensor([[0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK, unused)
    assert cu_seqlens.tolist() == [0, 4, 5, 9] and used.tolist() == [3, 0, 4] and longest == 4 and packed.shape == (9, 2)
    assert indices.tolist() == [0, 1, 2, 3, 5, 11, 12, 13, 14]


def test_several_sequences_a_row():
    x = randn(2, 6, 3)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 11] and longest == 6 and indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert torch.equal(packed, x.flatten(0, 1)[indices])


def test_nothing_is_left():
    packed, _, cu_seqlens, longest, _ = bert_padding.unpad_input(randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
    assert packed.shape == (0, 4) and cu_seqlens.tolist() == [0, 0, 0] and longest == 0


def test_a_wrong_mask():
    with pytest.raises(
        RuntimeError, match=r"unpad_input: attention_mask must be \(batch, seqlen\) = \(3, 5\) as hidden_states, got \(3, 4\)"
    ):
        bert_padding.unpad_input(randn(3, 5, 4), MASK[:, :4])


def test_residual_and_functions_by_apply():
    x, indices = randn(6, 3).requires_grad_(), torch.tensor([4, 1])
    rows, rest = bert_padding.IndexFirstAxisResidual.apply(x, indices)
    assert torch.equal(rows, x[indices]) and torch.equal(rest, x)
    (gradient,) = torch.autograd.grad(rows.sum() + 2 * rest.sum(), x)
    assert torch.equal(gradient, 2 + torch.zeros(6, 3).index_fill(0, indices, 1.0))
    assert torch.equal(bert_padding.IndexFirstAxis.apply(x, indices), rows)
    put = bert_padding.IndexPutFirstAxis.apply(rows, indices, 6)
    assert torch.equal(put[indices], rows) and put.count_nonzero() == 6
