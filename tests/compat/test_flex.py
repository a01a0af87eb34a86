"""flex_attention by tilewise: which mask_mods become which masks, which score_mods become which features, and that results are the formula's."""

import functools
import inspect
import warnings

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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_mod_that_cannot_be_followed_is_for_the_heads_that_its_block_mask_is_made_for():
    q, k, v = (x.detach() for x in tensors())

    def shown(b, h, q, k):
        x = (b >= 0) & (h >= 0) & (q >= k)
        x |= k < 3 * h
        return x

    made = create_block_mask(shown, None, None, 33, 33, device="cpu")
    with pytest.raises(
        UnsupportedError, match="cannot be followed, and may depend on b, but block_mask is made for batch 1 and the call has 2"
    ):
        flex_attention(q, k, v, block_mask=made, enable_gqa=True)
    made = create_block_mask(shown, 2, 4, 33, 33, device="cpu")
    expected = torchs.flex_attention(q, k, v, block_mask=made, enable_gqa=True)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=made, enable_gqa=True), expected)


def test_blocks_that_say_otherwise_win():
    """A BlockMask made by hand, whose mask_mod alone would mean more pairs: block (0, 1) full, (1, 0) partial."""
    number = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[1, 0]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    made = BlockMask.from_kv_blocks(number[0], index[0], number[1], index[1], BLOCK_SIZE=8, mask_mod=causal)
    expected = torch.zeros(16, 16, dtype=torch.bool)
    expected[:8, 8:] = True
    expected[8:, :8] = True
    assert torch.equal(mask_of(made).dense(16, 16).reshape(16, 16), expected)


def test_a_mask_is_found_again_until_its_tensors_change(monkeypatch):
    ids = DOCUMENT.clone()
    made = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) | (q < 0), None, None, 64, 64, device="cpu", BLOCK_SIZE=64)
    seen = []
    monkeypatch.setattr(flex, "record", lambda *args: seen.append(1) or record(*args))
    assert mask_of(made) is mask_of(made) and len(seen) == 1
    ids[:] = TWICE
    assert torch.equal(mask_of(made).dense(64, 64), TWICE[:, None] == TWICE) and len(seen) == 2
    made.mask_mod = causal
    assert mask_of(made) == tw.Causal() and len(seen) == 3


SLOPES, ROWS = torch.tensor([0.5, 0.25, 0.125, 0.0625]), normal(2, 33, seed=7)
TABLE = normal(4, 90, seed=8).requires_grad_()
PLACES = normal(33, 3, seed=5)


@torch.library.custom_op("approx::tanh", mutates_args=())
def approximate_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


class ApproximateTanh(torch.autograd.Function):
    """As attention-gym's softcap has it."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return torch.ops.approx.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def vmap(info, in_dims, x):
        return torch.tanh(x), in_dims[0]


SCORES = {  # a score_mod, and what it becomes without a mask: softcap, slopes, the bias's shape
    "as it is": (lambda s, b, h, q, k: s, (0.0, False, None)),
    "scaled": (lambda s, b, h, q, k: s * 2 - 1, (0.0, False, (1, 1, 1, 33))),
    "turned round": (lambda s, b, h, q, k: 3.0 - s, (0.0, False, (1, 1, 1, 33))),
    "softcap": (lambda s, b, h, q, k: 5 * torch.tanh(s / 5), (5.0, False, None)),
    "softcap, otherwise": (lambda s, b, h, q, k: torch.tanh(s * 0.5) * -3.0, (3.0, False, None)),
    "alibi": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), (0.0, True, None)),
    "alibi, linear": (lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 4)), (0.0, False, (1, 4, 33, 33))),
    "table": (lambda s, b, h, q, k: s + TABLE[h, q - k + 40], (0.0, False, (1, 4, 33, 33))),
    "softcap and table": (lambda s, b, h, q, k: TABLE[h, q - k + 40] + 5 * torch.tanh(s / 5), (5.0, False, (1, 4, 33, 33))),
    "by key": (lambda s, b, h, q, k: s + ROWS[b, k], (0.0, False, (2, 1, 1, 33))),
    "products of rows": (lambda s, b, h, q, k: s + (PLACES[q] * PLACES[k]).sum(-1), (0.0, False, (1, 1, 33, 33))),
    "softcap, approximate": (lambda s, b, h, q, k: 5 * ApproximateTanh.apply(s / 5), (5.0, False, None)),
    "subtracted": (lambda s, b, h, q, k: ROWS[b, q] - s, (0.0, False, (2, 1, 33, 33))),
    "hidden": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), (0.0, False, None)),
    "hidden, added": (lambda s, b, h, q, k: (s + ROWS[b, k]).masked_fill(q - k > 9, float("-inf")), (0.0, False, (2, 1, 1, 33))),
    "hidden, the other way": (lambda s, b, h, q, k: torch.where(q < k, -float("inf"), s * 3.0), (0.0, False, None)),
}


def formula(q, k, v, score_mod, block_mask):
    """flex_attention written out, for 4-D q, k and v."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    index = [torch.arange(size).view([-1 if at == dim else 1 for at in range(4)]) for dim, size in enumerate(s.shape)]
    s = s if score_mod is None else score_mod(s, *index)
    s = s if block_mask is None else s.masked_fill(~create_mask(block_mask.mask_mod, *s.shape, device="cpu"), -torch.inf)
    lse = s.logsumexp(-1)
    return torch.exp(s - lse[..., None]).nan_to_num(0.0) @ v, lse


def tensors():
    return [normal(2, heads, 33, 8, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))]


@pytest.mark.parametrize(
    "block_mask",
    [None, create_block_mask(and_masks(causal, same_document), None, None, 33, 33, device="cpu", BLOCK_SIZE=16)],
    ids=["full", "masked"],
)
@pytest.mark.parametrize("score_mod, changes", SCORES.values(), ids=SCORES)
def test_score_mods_are_computed(score_mod, changes, block_mask):
    leaves = [*tensors(), TABLE]
    results = []
    for o, lse in (
        flex_attention(*leaves[:3], score_mod, block_mask, enable_gqa=True, return_lse=True),
        formula(*leaves[:3], score_mod, block_mask),
    ):
        gradients = torch.autograd.grad((o, lse), leaves, (normal(*o.shape, seed=4), normal(*lse.shape, seed=5)), allow_unused=True)
        results.append([o, lse, *(torch.zeros(()) if x is None else x for x in gradients)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)
    if block_mask is None:
        found = flex._changes(score_mod, leaves[0], 33, None)
        bias = None if found.term is None else tuple(flex._bias(found, leaves[0], 33).shape)
        assert (found.softcap, found.slopes is not None, bias) == changes


def test_linear_alibi_under_a_causal_mask_needs_no_bias():
    q = tensors()[0]
    found = flex._changes(SCORES["alibi, linear"][0], q, 33, tw.Causal())
    torch.testing.assert_close(found.slopes, 2.0 ** -torch.tensor([2.0, 4.0, 6.0, 8.0]))
    trained = SLOPES.clone().requires_grad_()
    tenths = torch.full((4,), 0.1, dtype=torch.float64)  # which fp32 slopes would round
    assert flex._changes(lambda s, b, h, q, k: s + tenths[h] * (k - q), q.double(), 33, tw.Causal()).slopes is None
    assert flex._changes(lambda s, b, h, q, k: s + trained[h] * (k - q), q, 33, tw.Causal()).slopes is None


def test_results_are_those_of_torchs_flex_attention():
    """On CPUs torch's has no gradient."""
    made = create_block_mask(and_masks(causal, same_document), None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    q, k, v = (normal(2, heads, 64, 16, dtype=torch.float32, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    score_mod = SCORES["softcap"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want, want_aux = torchs.flex_attention(q, k, v, score_mod, made, enable_gqa=True, return_aux=AuxRequest(lse=True))
    got, aux = flex_attention(q, k, v, score_mod, made, enable_gqa=True, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(aux.lse, want_aux.lse)
    assert type(aux) is type(want_aux) and aux.max_scores is None


class Window:
    def __init__(self, left):
        self.left, self.ids, self.model = left, DOCUMENT, torch.nn.Sequential(*(torch.nn.Identity() for _ in range(99)))

    def __call__(self, b, h, q, k):
        return ((q - k).abs() <= self.left) & (self.ids[q] == self.ids[k])

    def method(self, b, h, q, k):
        return self(b, h, q, k)


@pytest.mark.parametrize("bound", ["object", "method", "partial", "closure"])
def test_a_mask_is_made_anew_where_its_mod_holds_another_value(bound, monkeypatch):
    window = Window(3)
    mod = {
        "object": window,
        "method": functools.partial(lambda given, b, h, q, k: given(b, h, q, k), window.method),
        "partial": functools.partial(lambda given, b, h, q, k: given(b, h, q, k), window),
        "closure": lambda b, h, q, k: window(b, h, q, k),
    }[bound]
    made = create_block_mask(mod, None, None, 64, 64, device="cpu")
    first = mask_of(made)
    assert mask_of(made) is first
    for name, value in (("left", 9), ("ids", DOCUMENT.flip(0))):
        setattr(window, name, value)
        mask = mask_of(made)
        assert mask is not first and mask_of(made) is mask
        assert torch.equal(mask.dense(64, 64), create_mask(mod, 1, 1, 64, 64, device="cpu")[0, 0])


class Slotted:
    __slots__ = ("left",)

    def __init__(self, left):
        self.left = left


SETTINGS, LIMIT = Slotted(3), torch.tensor(3)


def by_a_global(b, h, q, k):
    return (q - k).abs() <= SETTINGS.left


def by_a_global_within(b, h, q, k):
    def left():
        return SETTINGS.left

    return (q - k).abs() <= left()


def by_a_number_read(b, h, q, k):
    return (q - k).abs() <= LIMIT.item()


@pytest.mark.parametrize("mod", [by_a_global, by_a_global_within, by_a_number_read])
def test_a_mask_is_made_anew_where_globals_hold_another_value(mod, monkeypatch):
    made = create_block_mask(mod, None, None, 64, 64, device="cpu")
    first = mask_of(made)
    assert mask_of(made) is first
    monkeypatch.setattr(SETTINGS, "left", 9)
    LIMIT.fill_(9)
    mask = mask_of(made)
    LIMIT.fill_(3)
    assert torch.equal(mask.dense(64, 64), tw.SlidingWindow(9, 9).dense(64, 64))


def test_parameters_and_caches_beside_a_mod_may_be_written_to():
    """As every step of training or of decoding does: a model's masks stay."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.cache, self.left = torch.nn.Parameter(torch.ones(4)), torch.zeros(99), 3

        def mod(self, b, h, q, k):
            return (q - k).abs() <= self.left

    model = Model()
    made = create_block_mask(lambda b, h, q, k: model.mod(b, h, q, k), None, None, 64, 64, device="cpu")
    first = mask_of(made)
    with torch.no_grad():
        model.scale.fill_(2.0)
        model.cache.fill_(1.0)
    assert mask_of(made) is first


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
ONE = create_block_mask(two_dimensions, None, None, 33, 33, device="cpu", BLOCK_SIZE=16)
ONE.mask_mod = lambda b, h, q, k: two_dimensions(b, h, q, k) & (k < LENGTHS[b])
REFUSED = {
    "squared": (
        refused(score_mod=lambda s, b, h, q, k: s * s),
        UnsupportedError,
        r"score_mod does something to the score .*aten.mul.Tensor.*recognised are a \* score",
    ),
    "by position": (refused(score_mod=lambda s, b, h, q, k: s * SLOPES[h]), UnsupportedError, "score_mod does something to the score"),
    "no score": (
        refused(score_mod=lambda s, b, h, q, k: q - k),
        UnsupportedError,
        "score_mod gives what does not depend on the score; .*torch's flex_attention",
    ),
    "decides": (
        refused(score_mod=lambda s, b, h, q, k: s if bool(q > k) else s * 2),
        UnsupportedError,
        "score_mod decides by the values of its indices",
    ),
    "softcap of a sum": (
        refused(score_mod=lambda s, b, h, q, k: torch.tanh(s + q)),
        UnsupportedError,
        "score_mod does something to the score",
    ),
    "as integers": (refused(score_mod=lambda s, b, h, q, k: s.int()), UnsupportedError, "score_mod does something .*_to_copy"),
    "rounded": (refused(score_mod=lambda s, b, h, q, k: s.half()), UnsupportedError, "score_mod does something .*_to_copy"),
    "floored": (refused(score_mod=lambda s, b, h, q, k: torch.div(s, 2, rounding_mode="floor")), UnsupportedError, "Tensor_mode"),
    "divided by 0": (refused(score_mod=lambda s, b, h, q, k: s / 0), UnsupportedError, "score_mod divides the score by 0"),
    "sum of everything": (
        refused(score_mod=lambda s, b, h, q, k: s + (PLACES[q] * PLACES[k]).sum()),
        UnsupportedError,
        "score_mod cannot be followed on whole axes, where aten.sum.default would see other numbers.* by element and sums over dim=-1",
    ),
    "any of a list": (
        refused(score_mod=lambda s, b, h, q, k: s + 2.0 * (k == GLOBAL).any()),
        UnsupportedError,
        "on whole axes, where aten.eq",
    ),
    "largest": (refused(score_mod=lambda s, b, h, q, k: s + (q - k).max()), UnsupportedError, "on whole axes, where aten.max.default"),
    "hidden, negated": (
        refused(score_mod=lambda s, b, h, q, k: -torch.where(q >= k, s, -float("inf"))),
        UnsupportedError,
        "score_mod turns -inf into something else",
    ),
    "lengths": (
        refused(block_mask=SHORT),
        ShapeError,
        "block_mask is made for seqlen_q 32 and seqlen_k 33, the call has 33 and 33; make a BlockMask",
    ),
    "batch": (refused(block_mask=THREE), ShapeError, "block_mask is made for batch 3, the call has batch 2"),
    "batch of the mod": (
        refused(block_mask=ONE),
        UnsupportedError,
        "mask_mod depends on b, but block_mask is made for batch 1 and the call has 2",
    ),
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


def test_tracing_is_refused_and_the_way_out_compiles():
    torch._dynamo.reset()
    made = create_block_mask(causal, None, None, 33, 33, device="cpu", BLOCK_SIZE=16)
    q, k, v = (x.detach() for x in tensors())
    with pytest.raises(Exception, match="cannot be traced, because it reads block_mask"):
        torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=made, enable_gqa=True), backend="eager", fullgraph=True)(q, k, v)
    mask = mask_of(made)
    compiled = torch.compile(lambda *x: tw.attention(*(each.transpose(1, 2) for each in x), mask=mask), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v).transpose(1, 2), flex_attention(q, k, v, block_mask=made, enable_gqa=True))
