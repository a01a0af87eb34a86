"""Rotary embedding against complex numbers in fp64: both pairings, offsets, packed sequences, in place, gradients, the module."""

import pytest
import torch
from peer_oracle import randn

from tilewise.compat import rotary
from tilewise.testing import tolerance

ANGLES = torch.rand(40, 8, generator=torch.Generator().manual_seed(3)) * 6.0
COS, SIN = ANGLES.cos(), ANGLES.sin()


def exact(x, positions, interleaved):
    """fp64, x (..., seqlen, heads, dim) at positions (..., seqlen)."""
    first = x[..., :16].double()
    pairs = first.unflatten(-1, (8, 2)) if interleaved else first.unflatten(-1, (2, 8)).transpose(-1, -2)
    turn = torch.complex(COS[positions].double(), SIN[positions].double())[..., None, :]
    z = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn)
    return torch.cat(((z if interleaved else z.transpose(-1, -2)).flatten(-2), x[..., 16:].double()), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [16, 23])
@pytest.mark.parametrize("offsets", [0, 7, torch.tensor([3, 30], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_batches(interleaved, offsets, dim, dtype):
    x = randn(2, 5, 3, dim, dtype=dtype).requires_grad_()
    positions = (offsets[:, None] if isinstance(offsets, torch.Tensor) else offsets) + torch.arange(5).expand(2, 5)
    out = rotary.apply_rotary_emb(x, COS, SIN, interleaved=interleaved, seqlen_offsets=offsets)
    expected = exact(x.detach(), positions, interleaved)
    assert out.dtype == dtype
    tolerance.check("out", out.detach(), expected, expected.to(dtype))
    weight = randn(2, 5, 3, dim, seed=1, dtype=dtype)
    (gradient,) = torch.autograd.grad(out, x, weight)
    back = rotary.apply_rotary(
        weight, COS, SIN, seqlen_offsets=offsets, interleaved=interleaved, conjugate=True
    )  # rotations: the transpose turns back
    torch.testing.assert_close(gradient, back)
    inplace = x.detach().clone()
    assert rotary.apply_rotary_emb(inplace, COS, SIN, interleaved, True, offsets) is inplace and torch.equal(inplace, out)


@pytest.mark.parametrize("offsets", [2, torch.tensor([4, 0, 9])], ids=str)
def test_packed_sequences(offsets):
    cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    x = randn(9, 3, 16)
    out = rotary.apply_rotary_emb(x, COS, SIN, seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=5)
    first = [offsets] * 3 if isinstance(offsets, int) else offsets.tolist()
    positions = torch.tensor([first[0] + i for i in range(4)] + [first[2] + i for i in range(5)])
    torch.testing.assert_close(out, exact(x, positions, False).float(), atol=1e-6, rtol=1e-6)


def test_q_and_k_in_place():
    x = randn(2, 5, 3, 4, 16)
    expected = [rotary.apply_rotary_emb(x[:, :, n], COS, SIN, seqlen_offsets=n and 0) for n in range(2)]
    keys = rotary.apply_rotary_emb(x[:, :, 1], SIN, COS)
    got = x.clone()
    assert rotary.apply_rotary_emb_qkv_(got, COS, SIN) is got
    assert torch.equal(got, torch.stack((*expected, x[:, :, 2]), 2))
    got = rotary.apply_rotary_emb_qkv_(x.clone(), COS, SIN, SIN, COS)
    assert torch.equal(got, torch.stack((expected[0], keys, x[:, :, 2]), 2))
    flat = x.flatten(2, 3)[:, :, :8].clone()  # 4 heads of q, 2 of k, 2 of v
    got = rotary.apply_rotary_emb_qkv_(flat.clone(), COS, SIN, num_heads_q=4)
    assert torch.equal(got, torch.cat((rotary.apply_rotary_emb(flat[:, :, :6], COS, SIN), flat[:, :, 6:]), 2))
    kv = rotary.apply_rotary_emb_kv_(x[:, :, :2].clone(), COS, SIN)
    assert torch.equal(kv, torch.stack((expected[0], x[:, :, 1]), 2))


def test_gradients_through_tensors_rotated_in_place():
    x = randn(2, 5, 3, 4, 16).requires_grad_()
    weight = randn(2, 5, 3, 4, 16, seed=1)
    (gradient,) = torch.autograd.grad(rotary.apply_rotary_emb_qkv_(x.clone(), COS, SIN), x, weight)
    back = [rotary.apply_rotary(weight[:, :, n], COS, SIN, conjugate=True) for n in range(2)]
    torch.testing.assert_close(gradient, torch.stack((*back, weight[:, :, 2]), 2))


def test_module():
    """Angles are position * base ** (-2 d / dim); tables grow, and are in the dtype of what is rotated."""
    module = rotary.RotaryEmbedding(16, base=100.0, interleaved=True)
    angles = torch.arange(12.0)[:, None] * 100.0 ** (-torch.arange(0, 16, 2) / 16)
    x = randn(2, 5, 3, 4, 16)
    for offset, longest in ((0, None), (7, None), (torch.tensor([1, 7]), 12), (torch.tensor([1, 7]), None)):
        got = module(x.clone(), seqlen_offset=offset, max_seqlen=longest)
        expected = rotary.apply_rotary_emb_qkv_(x.clone(), angles.cos(), angles.sin(), interleaved=True, seqlen_offsets=offset)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    q, kv = module(x[:, :, 0].clone(), x[:, :, 1:].clone())
    torch.testing.assert_close(torch.cat((q[:, :, None], kv), 2), module(x.clone()), atol=1e-5, rtol=1e-5)
    assert module(x.bfloat16()).dtype == torch.bfloat16 and not module.state_dict()
    assert module(x.clone()).dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"scale_base \(xPos\) is not supported; leave it None"):
        rotary.RotaryEmbedding(16, scale_base=512)


WRONG = {
    "tables": (lambda x: rotary.apply_rotary_emb(x, COS, SIN[:3]), r"sin has shape torch.Size\(\[3, 8\]\), but cos has shape"),
    "dim": (lambda x: rotary.apply_rotary_emb(x[..., :12], COS, SIN), "rotary_dim must not be larger than head_dim"),
    "far": (lambda x: rotary.apply_rotary_emb(x, COS, SIN, seqlen_offsets=36), "cos and sin have 40 positions, but x reaches position 40"),
    "offsets": (
        lambda x: rotary.apply_rotary_emb(x, COS, SIN, seqlen_offsets=torch.zeros(3, dtype=torch.int32)),
        "seqlen_offsets has batch 3",
    ),
    "heads": (
        lambda x: rotary.apply_rotary_emb_qkv_(x, COS, SIN),
        "num_heads_q must say how many of the 3 heads of qkv are queries, got None",
    ),
}


@pytest.mark.parametrize("call, words", WRONG.values(), ids=WRONG)
def test_errors(call, words):
    with pytest.raises(RuntimeError, match=words) as caught:
        call(randn(2, 5, 3, 16))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("interleaved", [False, True])
def test_plain_torch_and_apply(interleaved):
    """Tables of one batch entry, or of each."""
    x, positions = randn(2, 5, 3, 23), torch.arange(5).expand(2, 5)
    expected = exact(x, positions, interleaved)
    for cos, sin in ((COS[:5], SIN[:5]), (COS[:5].expand(2, 5, 8), SIN[:5].expand(2, 5, 8))):
        torch.testing.assert_close(rotary.apply_rotary_emb_torch(x, cos, sin, interleaved).double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(rotary.ApplyRotaryEmb.apply(x, COS, SIN, interleaved), rotary.apply_rotary_emb(x, COS, SIN, interleaved))
    with pytest.raises(ValueError, match=r"apply_rotary_emb_torch: cos is for 16 dimensions, .* but x has head_dim 12"):
        rotary.apply_rotary_emb_torch(x[..., :12], COS[:5], SIN[:5])
