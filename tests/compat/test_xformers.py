"""xformers' memory_efficient_attention by tilewise.

xformers is not needed: its bias classes are stood in for by classes of the same names and fields (version 0.0.35), which say with `visible` what
they mean.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch_operators import normal

import tilewise as tw
from tilewise.compat.xformers import MASKS, PAGED, WITH_BIAS, memory_efficient_attention
from tilewise.errors import ShapeError, UnsupportedError


def made(name, **fields):
    """An object of a class of this name with these fields."""
    return type(name, (SimpleNamespace,), {})(**fields)


def sequences(*lengths):
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return SimpleNamespace(
        seqstart=torch.tensor(starts, dtype=torch.int32), seqstart_py=starts, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def slots(starts, lengths, total):
    return SimpleNamespace(seqstart_py=[*starts, total], seqlen_py=list(lengths), seqlen=torch.tensor(lengths, dtype=torch.int32))


def triangle(rows, columns, window=None, bottom_right=False):
    """A causal block; a window counts a query's own position."""
    shift = columns - rows if bottom_right else 0
    shown = torch.ones(rows, columns, dtype=torch.bool).tril(shift)
    return shown if window is None else shown.triu(shift - window + 1)


def local(rows, columns, left, right):
    return torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows - left).tril(columns - rows + right)


def blocks(queries, keys, inner):
    """Pairs (12, 20) of the intervals, one after the other."""
    shown = torch.zeros(12, 20, dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(queries, keys, strict=True):
        shown[q0:q1, k0:k1] = inner(q1 - q0, k1 - k0)
    return shown


def full(rows, columns):
    return torch.ones(rows, columns, dtype=torch.bool)


Q, K = sequences(3, 4, 5), sequences(6, 4, 10)
ROWS, KEYS = [(0, 3), (3, 7), (7, 12)], [(0, 6), (6, 10), (10, 20)]
PADDED = {"q_seqinfo": Q, "k_seqinfo": slots((0, 6, 13), (4, 6, 7), 20)}
PADDED_KEYS = [(0, 4), (6, 12), (13, 20)]
CASES = {  # name: fields, the visible pairs of 12 x 20
    "LowerTriangularMask": ({}, triangle(12, 20)),
    "LowerTriangularFromBottomRightMask": ({}, triangle(12, 20, bottom_right=True)),
    "LowerTriangularFromBottomRightLocalAttentionMask": ({"_window_size": 4}, triangle(12, 20, 4, True)),
    "LocalAttentionFromBottomRightMask": ({"window_left": 3, "window_right": 2}, local(12, 20, 3, 2)),
    "BlockDiagonalMask": ({"q_seqinfo": Q, "k_seqinfo": K}, blocks(ROWS, KEYS, full)),
    "BlockDiagonalCausalMask": ({"q_seqinfo": Q, "k_seqinfo": K}, blocks(ROWS, KEYS, triangle)),
    "BlockDiagonalCausalFromBottomRightMask": (
        {"q_seqinfo": Q, "k_seqinfo": K},
        blocks(ROWS, KEYS, lambda m, n: triangle(m, n, bottom_right=True)),
    ),
    "BlockDiagonalCausalLocalAttentionMask": (
        {"q_seqinfo": Q, "k_seqinfo": K, "_window_size": 2},
        blocks(ROWS, KEYS, lambda m, n: triangle(m, n, 2)),
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        {"q_seqinfo": Q, "k_seqinfo": K, "_window_size": 2},
        blocks(ROWS, KEYS, lambda m, n: triangle(m, n, 2, True)),
    ),
    "BlockDiagonalPaddedKeysMask": (PADDED, blocks(ROWS, PADDED_KEYS, full)),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (PADDED, blocks(ROWS, PADDED_KEYS, lambda m, n: triangle(m, n, bottom_right=True))),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        PADDED | {"window_left": 2, "window_right": 1},
        blocks(ROWS, PADDED_KEYS, lambda m, n: local(m, n, 2, 1)),
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        PADDED | {"_window_size": 3},
        blocks(ROWS, PADDED_KEYS, lambda m, n: triangle(m, n, 3, True)),
    ),
    "BlockDiagonalGappyKeysMask": (PADDED, blocks(ROWS, PADDED_KEYS, full)),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (
        {"q_seqinfo": Q, "k_seqinfo": slots((9, 0, 5), (8, 5, 7), 20)},  # out of order, and overlapping
        blocks(ROWS, [(9, 17), (0, 5), (5, 12)], lambda m, n: triangle(m, n, bottom_right=True)),
    ),
}


def qkv(batch=1):
    return [normal(batch, length, 2, 8, seed=seed).requires_grad_() for seed, length in enumerate((12, 20, 20))]


def formula(q, k, v, bias):
    """(batch, seqlen, heads, head_dim), with numbers to add."""
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 + bias
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1).nan_to_num(0.0), v)


def check(got, want, leaves):
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    d_o = normal(*got.shape, seed=5)
    for a, b in zip(torch.autograd.grad(got, leaves, d_o), torch.autograd.grad(want, leaves, d_o), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_every_class_has_a_case():
    assert CASES.keys() == MASKS.keys()


@pytest.mark.parametrize("name", CASES)
def test_bias_classes_mean_what_they_mean(name):
    fields, shown = CASES[name]
    q, k, v = leaves = qkv()
    seen = shown.any(1)
    got = memory_efficient_attention(q, k, v, made(name, **fields))
    assert got.is_contiguous() and not got[:, ~seen].any()
    want = formula(q[:, seen], k, v, torch.zeros(()).where(shown[seen], -torch.inf))
    check(got[:, seen], want, leaves)


def test_a_causal_mask_with_a_bias():
    q, k, v = qkv()
    bias = normal(1, 2, 12, 20, seed=3).requires_grad_()
    got = memory_efficient_attention(q, k, v, made(WITH_BIAS, _bias=bias))
    check(got, formula(q, k, v, bias.masked_fill(~triangle(12, 20), -torch.inf)), [q, k, v, bias])


@pytest.mark.parametrize("bottom_right", [False, True])
def test_a_causal_bias_of_torch_is_a_mask(bottom_right):
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # takes a second

    q, k, v = leaves = qkv()
    made_by = causal_lower_right if bottom_right else causal_upper_left
    got = memory_efficient_attention(q, k, v, made_by(12, 20))
    check(got, formula(q, k, v, torch.zeros(()).where(triangle(12, 20, bottom_right=bottom_right), -torch.inf)), leaves)


@pytest.mark.parametrize("shape", [(2, 2, 12, 20), (2, 1, 1, 20), (1, 2, 12, 20)])
def test_tensors_are_added(shape):
    q, k, v = qkv(batch=2)
    bias = normal(*shape, seed=3).requires_grad_()
    check(memory_efficient_attention(q, k, v, bias), formula(q, k, v, bias), [q, k, v, bias])


def test_three_dimensions_are_one_head():
    q, k, v = qkv(batch=2)
    bias = normal(2, 12, 20, seed=3).requires_grad_()
    got = memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], bias, scale=0.4)
    want = formula(q[:, :, :1] * (0.4 * 8**0.5), k[:, :, :1], v[:, :, :1], bias[:, None])[:, :, 0]
    check(got, want, [q, k, v, bias])


@pytest.mark.parametrize("expanded", [True, False])
def test_five_dimensions_are_groups(expanded):
    q = normal(2, 12, 2, 3, 8).requires_grad_()
    k, v = (normal(2, 20, 2, 1 if expanded else 3, 8, seed=seed).requires_grad_() for seed in (1, 2))
    wide = [x.expand(-1, -1, -1, 3, -1) for x in (k, v)]
    bias = normal(2, 2, 1, 12, 20, seed=3).requires_grad_()
    got = memory_efficient_attention(q, *(wide if expanded else (k, v)), bias)
    want = formula(q.flatten(2, 3), *(x.flatten(2, 3) for x in wide), bias.expand(-1, -1, 3, -1, -1).flatten(1, 2)).unflatten(2, (2, 3))
    check(got, want, [q, k, v, bias])


@pytest.mark.parametrize("lengths", [(2, 2, 2), (1, 3, 1), (3, 0, 2)])
@pytest.mark.parametrize("name", PAGED)
def test_pages_are_read(name, lengths):
    causal = PAGED[name]
    pages = [normal(6, 4, 2, 8, seed=seed) for seed in (1, 2)]
    table, used = torch.tensor([[3, 1, 0], [5, 0, 2], [4, 4, 4]], dtype=torch.int32), (9, 5, 3)
    q = normal(1, sum(lengths), 2, 8)
    bias = made(name, q_seqinfo=sequences(*lengths), k_seqinfo=slots((0, 12, 24), used, 36), block_tables=table, page_size=4)
    got = memory_efficient_attention(q, *(x.flatten(0, 1)[None] for x in pages), bias)
    for n, (queries, length) in enumerate(zip(q.split(lengths, 1), used, strict=True)):
        k, v = (x[table[n].long()].flatten(0, 1)[None, :length] for x in pages)
        torch.testing.assert_close(got.split(lengths, 1)[n], tw.attention(queries, k, v, causal=causal), atol=1e-12, rtol=1e-12)


def test_the_signature_is_xformers():
    """That of 0.0.35."""
    assert str(inspect.signature(memory_efficient_attention)) == (
        "(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *, "
        "op: Any = None, output_dtype: torch.dtype | None = None) -> torch.Tensor"
    )


def test_dropout_is_that_of_attention():
    q, k, v = (x.detach() for x in qkv())
    torch.manual_seed(1)
    got = memory_efficient_attention(q, k, v, p=0.3)
    torch.manual_seed(1)
    assert torch.equal(got, tw.attention(q, k, v, dropout_p=0.3))


X = torch.zeros(1, 12, 2, 8)
DERIVED = type("BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask", (type("BlockDiagonalGappyKeysMask", (), {}),), {})()
OF_OTHERS = {
    "q_seqinfo": sequences(5, 8),
    "k_seqinfo": slots((0, 6), (6, 6), 12),
    "block_tables": torch.zeros(2, 1, dtype=torch.int32),
    "page_size": 6,
}
REFUSED = {
    "op": (lambda: memory_efficient_attention(X, X, X, op="cutlass"), UnsupportedError, "op must be None, got 'cutlass': .*leave it out"),
    "output_dtype": (
        lambda: memory_efficient_attention(X, X, X, output_dtype=torch.float16),
        UnsupportedError,
        "output_dtype must be None or torch.float32, query's, got torch.float16; convert the result",
    ),
    "class": (
        lambda: memory_efficient_attention(X, X, X, DERIVED),
        UnsupportedError,
        "attn_bias is a BlockDiagonalLocal.*, which is not known; .*materialize",
    ),
    "bool": (
        lambda: memory_efficient_attention(X, X, X, torch.ones(12, 12) > 0),
        ShapeError,
        "attn_bias must be numbers to add, got torch.bool; .*Dense",
    ),
    "dimensions": (lambda: memory_efficient_attention(X, X[0], X[0]), ShapeError, "must be all 3-D, 4-D or 5-D"),
    "groups": (
        lambda: memory_efficient_attention(X[:, :, None], X[:, :, :, None], X[:, :, None]),
        ShapeError,
        r"key has \(2, 1\) \(groups, heads\), query has \(1, 2\); expand the heads, or pass 1",
    ),
    "bias of groups": (
        lambda: memory_efficient_attention(X[:, :, None], X[:, :, None], X[:, :, None], torch.zeros(1, 1, 3, 12, 12)),
        ShapeError,
        r"attn_bias has \(1, 3\) \(groups, heads\), expected \(1, 2\) or 1",
    ),
    "pages": (
        lambda: memory_efficient_attention(X, X, X, made("PagedBlockDiagonalPaddedKeysMask", **OF_OTHERS)),
        ShapeError,
        r"query must have batch 1 and 13 positions with this PagedBlockDiagonalPaddedKeysMask, got \(1, 12\)",
    ),
    "overlapping windows": (
        lambda: memory_efficient_attention(
            X,
            X,
            X,
            made(
                "BlockDiagonalLocalAttentionPaddedKeysMask",
                q_seqinfo=sequences(5, 7),
                k_seqinfo=slots((4, 0), (6, 6), 12),
                window_left=1,
                window_right=1,
            ),
        ),
        UnsupportedError,
        "overlap or are not in order, which goes with causal and full masks alone",
    ),
    "dropout": (
        lambda: memory_efficient_attention(X, X, X, p=1.5),
        ShapeError,
        r"^tilewise.compat.xformers.memory_efficient_attention: p must be a finite number in \[0, 1\), got 1.5",
    ),
}


@pytest.mark.parametrize("call, error, message", REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_argument_and_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()
