"""flex_attention by tilewise: which mask_mods become which masks, which score_mods become which features, and that results are the formula's."""

import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, create_mask, noop_mask, or_masks
from torch_operators import normal

import tilewise as tw
from tilewise.compat import flex
from tilewise.compat.flex import flex_attention, mask_of
from tilewise.compat.flex_mods import Unrecognised, record
from tilewise.errors import ShapeError, UnsupportedError

DOCUMENT = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 20, 5, 29]))
TWICE = torch.tensor([0, 0, 1, 1, 0, 0, 2, 2] * 8)
LENGTHS, SHOWN = torch.tensor([50, 7]), normal(64) > -0.5


def causal(b, h, q, k):
    return q >= k


def same_document(b, h, q, k):
    return DOCUMENT[q] == DOCUMENT[k]


CAUSAL, NONE = tw.Causal(), tw.Full() - tw.Full()
RECOGNISED = {  # a mask_mod, and how its mask reads for 64 x 64; "" where that is not to the point
    "causal": (causal, "Causal()"),
    "causal, the other way": (lambda b, h, q, k: k <= q, "Causal()"),
    "strictly": (lambda b, h, q, k: q > k, "Full()-SlidingWindow(0,None)"),
    "window": (lambda b, h, q, k: (q >= k) & (q - k <= 7), "SlidingWindow(7,0)"),
    "window by abs": (lambda b, h, q, k: (q - k).abs() <= 7, "SlidingWindow(7,7)"),
    "and_masks": (and_masks(causal, lambda b, h, q, k: q - k < 8), "SlidingWindow(7,0)"),
    "sink and window": (or_masks(lambda b, h, q, k: k < 4, lambda b, h, q, k: (q >= k) & (q - k < 8)), "FirstKeys(4)|SlidingWindow(7,0)"),
    "documents": (same_document, "Documents([0,10,30,35,64])"),
    "causal documents": (and_masks(causal, same_document), "Causal()&Documents([0,10,30,35,64])"),
    "documents in pieces": (lambda b, h, q, k: TWICE[q] == TWICE[k], ""),
    "other documents": (lambda b, h, q, k: DOCUMENT[q] != DOCUMENT[k], ""),
    "ordered documents": (lambda b, h, q, k: DOCUMENT[q] >= DOCUMENT[k], ""),
    "prefix": (or_masks(causal, lambda b, h, q, k: k < 9), "Causal()|FirstKeys(9)"),
    "prefix by batch": (lambda b, h, q, k: (q >= k) | (k < LENGTHS[b]), "Causal()|FirstKeys(7)"),
    "chunks": (lambda b, h, q, k: (q // 16 == k // 16) & (q >= k), "Documents([0,16,32,48,64])&Causal()"),
    "by head": (lambda b, h, q, k: (q >= k) & (q - k < 4 * (h + 1)), "SlidingWindow(11,0)"),
    "offset": (lambda b, h, q, k: q + 5 >= k, "SlidingWindow(None,5)"),
    "far": (lambda b, h, q, k: q - k >= 10, "Full()-SlidingWindow(9,None)"),
    "ahead": (lambda b, h, q, k: (k - q >= 3) & (k - q <= 9), "SlidingWindow(None,9)-SlidingWindow(None,2)"),
    "diagonal": (lambda b, h, q, k: q == k, "SlidingWindow(0,0)"),
    "dilated": (lambda b, h, q, k: (q - k) % 4 == 0, ""),
    "padding": (lambda b, h, q, k: SHOWN[k] & (q >= k), ""),
    "rows": (lambda b, h, q, k: (q < 5) | (q == k), ""),
    "where": (lambda b, h, q, k: torch.where(q < 20, k < 20, q >= k), ""),
    "xor": (lambda b, h, q, k: (q >= k) ^ (k < 3), ""),
    "not": (lambda b, h, q, k: ~(q >= k), ""),
    "nothing": (lambda b, h, q, k: q < 0, "Full()-Full()"),
    "everything": (noop_mask, "Full()"),
}


@pytest.mark.parametrize("mod, text", RECOGNISED.values(), ids=RECOGNISED)
def test_mask_mods_become_bands(mod, text):
    program = record(mod, torch.device("cpu"))
    for seqlen_q, seqlen_k in ((64, 64), (40, 64), (64, 33), (1, 64), (64, 1)):
        mask = program.mask(1, 2, seqlen_q, seqlen_k)
        assert torch.equal(mask.dense(seqlen_q, seqlen_k), create_mask(mod, 2, 3, seqlen_q, seqlen_k, device="cpu")[1, 2]), mask
        assert mask.kind != "bitmap"
    assert not text or str(program.mask(1, 2, 64, 64)) == text


def two_dimensions(b, h, q, k):
    return ((q // 8 - k // 8).abs() <= 1) & ((q % 8 - k % 8).abs() <= 1)


def by_values(b, h, q, k):
    return (q >= k) if bool(q < 3) else (q == k)


def in_place(b, h, q, k):
    shown = q >= k
    shown |= k < 3
    return shown


UNRECOGNISED = {
    "two dimensions": (two_dimensions, "brings query and key together by sub"),
    "decides": (by_values, "decides by the values of its indices"),
    "writes": (in_place, "writes to a tensor"),
    "out of range": (lambda b, h, q, k: DOCUMENT[q + 60] == DOCUMENT[k], "cannot be followed"),
    "no bool": (lambda b, h, q, k: q - k, "gives no bool"),
    "any of a list": (lambda b, h, q, k: (q >= k) | (k == GLOBAL).any(), "not one number from step to step"),
    "all": (lambda b, h, q, k: (q >= k).all(), "not one number from step to step"),
    "a row's first number": (lambda b, h, q, k: COLUMN[q][0] == COLUMN[k][0], "not one number from step to step"),
    "twice the key": (lambda b, h, q, k: torch.sub(q, k, alpha=2) >= 0, "with \\['alpha'\\]"),
    "a bool as an integer": (lambda b, h, q, k: (~(DOCUMENT[q] == DOCUMENT[k]).int()).bool(), "brings query and key together"),
}
GLOBAL, COLUMN = torch.tensor([0]), torch.arange(64)[:, None] % 3


@pytest.mark.parametrize("mod, why", UNRECOGNISED.values(), ids=UNRECOGNISED)
def test_other_mask_mods_are_not_mistaken(mod, why):
    with pytest.raises(Unrecognised, match=why):
        record(mod, torch.device("cpu")).mask(0, 0, 64, 64)


@pytest.fixture
def no_bits(monkeypatch):
    """No BlockMask is evaluated pair by pair."""

    def refuse(block_mask):
        raise AssertionError("evaluated pair by pair")

    monkeypatch.setattr(flex, "from_flex", refuse)


def test_long_block_masks_need_no_bits(no_bits):
    ids = torch.arange(8192) // 700
    made = create_block_mask(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, 8192, 8192, device="cpu", _compile=False)
    mask = mask_of(made)
    assert mask.kind == "runs" and mask.pairs(8192, 8192) == 11 * 700 * 701 // 2 + 492 * 493 // 2


def test_masks_by_batch_entry_and_head(no_bits):
    for mod, batch, heads, kind in ((RECOGNISED["prefix by batch"][0], 2, None, "bitmap"), (RECOGNISED["by head"][0], None, 3, "runs")):
        made = create_block_mask(mod, batch, heads, 64, 64, device="cpu", BLOCK_SIZE=16)
        mask = mask_of(made)
        assert mask.kind == kind
        assert torch.equal(
            mask.dense(64, 64).expand(batch or 1, heads or 1, 64, 64), create_mask(mod, batch or 1, heads or 1, 64, 64, device="cpu")
        )


def test_a_mod_that_differs_by_head_wants_no_mask_that_does(no_bits):
    mod = RECOGNISED["by head"][0]
    wide = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 12), None, None, 64, 64, device="cpu", BLOCK_SIZE=64)
    wide.mask_mod = mod
    assert torch.equal(mask_of(wide, heads=3).dense(64, 64), create_mask(mod, 1, 3, 64, 64, device="cpu"))


def test_what_is_not_recognised_is_read_pair_by_pair():
    made = create_block_mask(two_dimensions, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert mask_of(made).kind == "bitmap"
    assert torch.equal(
        mask_of(made).dense(64, 64)[0, 0] if mask_of(made).dense(64, 64).dim() == 4 else mask_of(made).dense(64, 64),
        create_mask(two_dimensions, 1, 1, 64, 64, device="cpu")[0, 0],
    )


@pytest.mark.parametrize("name", ["any of a list", "all", "a row's first number", "twice the key"])
def test_what_single_numbers_alone_may_do_is_read_pair_by_pair(name):
    """On whole axes these are something else, of the same shape."""
    mod, _ = UNRECOGNISED[name]
    mask = mask_of(create_block_mask(mod, None, None, 64, 64, device="cpu"), 2, 4)
    assert torch.equal(mask.dense(64, 64).expand(1, 1, 64, 64), create_mask(mod, 1, 1, 64, 64, device="cpu"))


def test_where_with_a_captured_bool():
    mod = lambda b, h, q, k: torch.where(DOCUMENT[q] == DOCUMENT[k], q >= k, False)  # noqa: E731
    mask = mask_of(create_block_mask(mod, None, None, 64, 64, device="cpu"))
    assert mask.kind == "runs" and torch.equal(mask.dense(64, 64), create_mask(mod, 1, 1, 64, 64, device="cpu")[0, 0])


def test_blocks_that_say_otherwise_win():
    """A BlockMask made by hand, whose mask_mod alone would mean more pairs: block (0, 1) full, (1, 0) partial."""
    number = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[1, 0]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    made = BlockMask.from_kv_blocks(number[0], index[0], number[1], index[1], BLOCK_SIZE=8, mask_mod=causal)
    expected = torch.zeros(16, 16, dtype=torch.bool)
    expected[:8, 8:] = True
    expected[8:, :8] = True
    assert torch.equal(mask_of(made).dense(16, 16).reshape(16, 16), expected)


def tensors():
    return [normal(2, heads, 33, 8, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))]


def test_the_signature_is_torchs():
    given, own = (inspect.signature(function).parameters for function in (torchs.flex_attention, flex_attention))
    assert [(name, x.default, x.kind) for name, x in own.items()] == [(name, x.default, x.kind) for name, x in given.items()]


def test_keys_of_batch_one():
    q, k, v = tensors()
    made = create_block_mask(causal, 2, None, 33, 33, device="cpu", BLOCK_SIZE=16)
    got = flex_attention(q, k[:1], v[:1], block_mask=made, enable_gqa=True)
    torch.testing.assert_close(
        got, flex_attention(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), block_mask=made, enable_gqa=True)
    )


def refused(**options):
    q, k, v = (x.detach() for x in tensors())
    return lambda: flex_attention(**({"query": q, "key": k, "value": v, "enable_gqa": True} | options))


SHORT = create_block_mask(causal, None, None, 32, 33, device="cpu", BLOCK_SIZE=16)
THREE = create_block_mask(causal, 3, None, 33, 33, device="cpu", BLOCK_SIZE=16)
REFUSED = {
    "lengths": (
        refused(block_mask=SHORT),
        ShapeError,
        "block_mask is made for seqlen_q 32 and seqlen_k 33, the call has 33 and 33; make a BlockMask",
    ),
    "batch": (refused(block_mask=THREE), ShapeError, "block_mask is made for batch 3, the call has batch 2"),
    "heads": (refused(enable_gqa=False), ShapeError, "query has 4 heads and key 2; pass enable_gqa=True"),
    "dimensions": (
        refused(query=torch.zeros(4, 33, 8)),
        ShapeError,
        r"query must be a dense tensor \(batch, heads, seqlen, head_dim\), got shape \(4, 33, 8\)",
    ),
    "maxima": (refused(return_aux=AuxRequest(max_scores=True)), UnsupportedError, "return_aux.max_scores is not computed here"),
    "dtype": (
        refused(query=torch.zeros(2, 4, 33, 8).half()),
        ShapeError,
        r"^tilewise.compat.flex.flex_attention: key is torch.*, but query is",
    ),
    "both": (refused(return_aux=AuxRequest(lse=True), return_lse=True), ValueError, "leave return_lse out"),
}


@pytest.mark.parametrize("call, error, message", REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_argument_and_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()


def made_within(q, k, v):
    ids = torch.arange(33) // 10
    made = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, 33, 33, device="cpu", BLOCK_SIZE=16)
    return flex_attention(q, k, v, block_mask=made, enable_gqa=True)


def with_mods(mask_mod, score_mod=None):
    made = create_block_mask(mask_mod, None, None, 33, 33, device="cpu", BLOCK_SIZE=16)
    return lambda q, k, v: flex_attention(q, k, v, score_mod, made, enable_gqa=True)


TRANSFORMED = {
    "bands": with_mods(causal),
    "bits": with_mods(two_dimensions),
    "bias": with_mods(causal, lambda score, b, h, q, k: torch.where(DOCUMENT[q] == DOCUMENT[k], 2 * score + BIAS[h, k], -torch.inf)),
    "slopes": with_mods(causal, lambda score, b, h, q, k: score - 0.5 * (q - k)),
    "made within": made_within,
}
BIAS = normal(4, 33, seed=9)


@pytest.mark.parametrize("function", TRANSFORMED.values(), ids=TRANSFORMED)
def test_transforms_of_query_key_and_value(function):
    q, k, v = tensors()
    expected = torch.autograd.grad(function(q, k, v).square().sum(), (q, k, v))
    q, k, v = (x.detach() for x in (q, k, v))
    for got in (
        torch.func.grad(lambda *qkv: function(*qkv).square().sum(), (0, 1, 2))(q, k, v),
        torch.func.vjp(lambda *qkv: function(*qkv).square().sum(), q, k, v)[1](torch.tensor(1.0)),
    ):
        assert all(map(torch.equal, got, expected))
    both = torch.stack((q, q + 1))
    each = [torch.func.grad(lambda q: function(q, k, v).square().sum())(one) for one in both]
    torch.testing.assert_close(torch.vmap(torch.func.grad(lambda q: function(q, k, v).square().sum()))(both), torch.stack(each))


QKV = [x.detach() for x in tensors()]


def by_captured_mask(ids):
    """With a mask_mod that cannot be recorded, so that its pairs are read one by one."""

    def mask_mod(b, h, q, k):
        shown = q >= k
        shown &= ids[q] == ids[k]
        return shown

    block_mask = create_block_mask(noop_mask, None, None, 33, 33, device="cpu", BLOCK_SIZE=16)
    lists = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    block_mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=mask_mod, seq_lengths=(33, 33))
    return flex_attention(*QKV, block_mask=block_mask, enable_gqa=True)


def by_captured_scores(x):
    return flex_attention(*QKV, lambda score, b, h, q, k: score + x[k], enable_gqa=True)


def by_captured_hiding(x):
    return flex_attention(*QKV, lambda score, b, h, q, k: torch.where(x[k] > 3, score, -torch.inf), enable_gqa=True)


CAPTURED = {
    "mask_mod": (by_captured_mask, "block_mask reads a tensor of a transform of torch.func"),
    "score_mod": (by_captured_scores, r"score_mod reads .* call tilewise.attention\(bias="),
    "score_mod that hides": (by_captured_hiding, "score_mod reads"),
}


@pytest.mark.parametrize("function, message", CAPTURED.values(), ids=CAPTURED)
def test_captured_tensors_that_are_vmapped_are_refused(function, message):
    numbers = torch.arange(33.0)
    with pytest.raises(UnsupportedError, match=message):
        torch.vmap(function)(torch.stack((numbers // 4, numbers // 5)))


def test_captured_tensors_that_are_differentiated():
    """Scores would lose their derivative; a mask has none."""
    numbers = torch.arange(33.0) // 4
    with pytest.raises(UnsupportedError, match="score_mod reads a tensor of a transform of torch.func"):
        torch.func.grad(lambda x: by_captured_scores(x).sum())(numbers)
    assert torch.func.grad_and_value(lambda x: by_captured_mask(x).sum())(numbers)[1] == by_captured_mask(numbers).sum()


def test_tracing_is_refused_and_the_way_out_compiles():
    torch._dynamo.reset()
    made = create_block_mask(causal, None, None, 33, 33, device="cpu", BLOCK_SIZE=16)
    q, k, v = (x.detach() for x in tensors())
    with pytest.raises(Exception, match="cannot be traced, because it reads block_mask"):
        torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=made, enable_gqa=True), backend="eager", fullgraph=True)(q, k, v)
    mask = mask_of(made)
    compiled = torch.compile(lambda *x: tw.attention(*(each.transpose(1, 2) for each in x), mask=mask), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v).transpose(1, 2), flex_attention(q, k, v, block_mask=made, enable_gqa=True))
