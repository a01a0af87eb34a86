"""flex_attention's score_mods by tilewise: which become which features, and that results and gradients are the formula's."""

import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, create_mask
from torch_operators import normal

import tilewise as tw
from tilewise.compat.flex import flex_attention
from tilewise.compat.flex_scores import bias_of, changes_of
from tilewise.errors import UnsupportedError

DOCUMENT = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 20, 5, 29]))
GLOBAL = torch.tensor([0])


def causal(b, h, q, k):
    return q >= k


def same_document(b, h, q, k):
    return DOCUMENT[q] == DOCUMENT[k]


SLOPES, ROWS = torch.tensor([0.5, 0.25, 0.125, 0.0625]), normal(2, 33, seed=7)
TABLE = normal(4, 90, seed=8).requires_grad_()
PLACES = normal(33, 3, seed=5)
TRAINED = torch.tensor(0.5, requires_grad=True)


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
        found = changes_of(score_mod, leaves[0], 33, None)
        bias = None if found.term is None else tuple(bias_of(found, leaves[0], 33).shape)
        assert (found.softcap, found.slopes is not None, bias) == changes


def test_linear_alibi_under_a_causal_mask_needs_no_bias():
    q = tensors()[0]
    found = changes_of(SCORES["alibi, linear"][0], q, 33, tw.Causal())
    torch.testing.assert_close(found.slopes, 2.0 ** -torch.tensor([2.0, 4.0, 6.0, 8.0]))
    trained = SLOPES.clone().requires_grad_()
    tenths = torch.full((4,), 0.1, dtype=torch.float64)  # which fp32 slopes would round
    assert changes_of(lambda s, b, h, q, k: s + tenths[h] * (k - q), q.double(), 33, tw.Causal()).slopes is None
    assert changes_of(lambda s, b, h, q, k: s + trained[h] * (k - q), q, 33, tw.Causal()).slopes is None


LEARNED = {  # the shape of what a score_mod captures, the term that it adds, and that term for all pairs of 33 keys
    "a function of it": ((4,), lambda p, h, q, k: p.exp()[h] * (k - q), lambda p, q, k: p.exp()[:, None, None] * (k - q)),
    "in two steps": ((4, 2), lambda p, h, q, k: p[h, 0] * (k - q).abs(), lambda p, q, k: p[:, 0, None, None] * (k - q).abs()),
    "turned": ((4, 33), lambda p, h, q, k: p.T[k, h], lambda p, q, k: p[:, None, :]),
    "a number's power": ((4,), lambda p, h, q, k: p[h] * 0.9 ** (q - k).abs(), lambda p, q, k: p[:, None, None] * 0.9 ** (q - k).abs()),
}


@pytest.mark.parametrize(("shape", "term", "of_all"), LEARNED.values(), ids=LEARNED)
def test_what_is_computed_from_a_captured_tensor_gives_it_a_gradient(shape, term, of_all):
    q, k, v = (normal(1, 4, 33, 8, dtype=torch.float64, seed=seed) for seed in range(3))
    p = normal(*shape, dtype=torch.float64, seed=4).mul_(0.1).requires_grad_()
    o = flex_attention(q, k, v, lambda s, b, h, i, j: s + term(p, h, i, j))
    at = torch.arange(33, dtype=torch.float64)
    want = ((q @ k.mT) * 8**-0.5 + of_all(p, at[:, None], at)).softmax(-1) @ v
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), p) for x in (o, want)))


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


def refused(score_mod):
    q, k, v = (x.detach() for x in tensors())
    return lambda: flex_attention(q, k, v, score_mod, enable_gqa=True)


REFUSED = {
    "squared": (
        refused(lambda s, b, h, q, k: s * s),
        UnsupportedError,
        r"score_mod does something to the score .*aten.mul.Tensor.*recognised are a \* score",
    ),
    "by position": (refused(lambda s, b, h, q, k: s * SLOPES[h]), UnsupportedError, "score_mod does something to the score"),
    "no score": (
        refused(lambda s, b, h, q, k: q - k),
        UnsupportedError,
        "score_mod gives what does not depend on the score; .*torch's flex_attention",
    ),
    "decides": (
        refused(lambda s, b, h, q, k: s if bool(q > k) else s * 2),
        UnsupportedError,
        "score_mod decides by the values of its indices",
    ),
    "softcap of a sum": (
        refused(lambda s, b, h, q, k: torch.tanh(s + q)),
        UnsupportedError,
        "score_mod does something to the score",
    ),
    "as integers": (refused(lambda s, b, h, q, k: s.int()), UnsupportedError, "score_mod does something .*_to_copy"),
    "rounded": (refused(lambda s, b, h, q, k: s.half()), UnsupportedError, "score_mod does something .*_to_copy"),
    "floored": (refused(lambda s, b, h, q, k: torch.div(s, 2, rounding_mode="floor")), UnsupportedError, "Tensor_mode"),
    "divided by 0": (refused(lambda s, b, h, q, k: s / 0), UnsupportedError, "score_mod divides the score by 0"),
    "sum of everything": (
        refused(lambda s, b, h, q, k: s + (PLACES[q] * PLACES[k]).sum()),
        UnsupportedError,
        "score_mod cannot be followed on whole axes, where aten.sum.default would see other numbers.* by element and sums over dim=-1",
    ),
    "any of a list": (
        refused(lambda s, b, h, q, k: s + 2.0 * (k == GLOBAL).any()),
        UnsupportedError,
        "on whole axes, where aten.eq",
    ),
    "largest": (refused(lambda s, b, h, q, k: s + (q - k).max()), UnsupportedError, "on whole axes, where aten.max.default"),
    "hidden, negated": (
        refused(lambda s, b, h, q, k: -torch.where(q >= k, s, -float("inf"))),
        UnsupportedError,
        "score_mod turns -inf into something else",
    ),
    "of its own shape": (
        refused(lambda s, b, h, q, k: s * 2 if q.dim() else s),
        UnsupportedError,
        "score_mod asks for the shape of its indices",
    ),
    "detached": (refused(lambda s, b, h, q, k: s.detach() + h), UnsupportedError, "score_mod detaches the score"),
    "a trained scale": (refused(lambda s, b, h, q, k: s * TRAINED.exp()), UnsupportedError, "score_mod does something to the score"),
    "drawn": (refused(lambda s, b, h, q, k: s + torch.rand_like(s)), UnsupportedError, "score_mod draws random numbers"),
}


@pytest.mark.parametrize("call, error, message", REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_argument_and_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()
