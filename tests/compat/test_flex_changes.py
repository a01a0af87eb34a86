"""flex_attention by tilewise computes what a BlockMask means at each call, whatever its mask_mod reads, and keeps nothing of it alive."""

import array
import contextvars
import functools
import operator
import os
import types

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask
from torch_operators import normal

import tilewise as tw
from tilewise.compat import flex
from tilewise.compat.flex import flex_attention, mask_of

N, OLD, NEW = 64, 50, 2  # one block, in which a window shrinks


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """torch's flex_attention, the oracle, is its formula."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def window(read):
    return lambda b, h, q, k: (q - k < read()) & (q >= k)


class Config:
    window = OLD


class Slotted:
    __slots__ = ("left",)

    def __init__(self, left):
        self.left = left


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.ids, self.weight = OLD, torch.zeros(N, dtype=torch.int64), torch.nn.Parameter(torch.zeros(9))
        self.register_buffer("limit", torch.tensor(OLD))

    @property
    def half(self):
        return self.left // 2

    def mod(self, b, h, q, k):
        return (q - k < self.left) & (q >= k) & (self.ids[q] == self.ids[k])

    def __call__(self, b, h, q, k):
        return self.mod(b, h, q, k)


def class_attribute(set):
    return window(lambda: Config.window), lambda: set(Config, "window", NEW)


def module_attribute(set):
    other = types.ModuleType("other")
    exec("left = 50\ndef mod(b, h, q, k):\n    return (q - k < left) & (q >= k)", other.__dict__)
    return lambda b, h, q, k: other.mod(b, h, q, k), lambda: set(other, "left", NEW)


def numpy_memory(set):
    ids = np.zeros(N, np.int64)
    shared = torch.from_numpy(ids)
    return lambda b, h, q, k: shared[q] == shared[k], lambda: ids.__setitem__(slice(9, 20), 1)


def numpy_number(set):
    left = np.array(OLD)
    return window(lambda: int(left)), lambda: left.fill(NEW)


def written_through_data(set):
    ids = torch.zeros(N, dtype=torch.int64)
    return lambda b, h, q, k: ids[q] == ids[k], lambda: ids.data[9:20].fill_(1)


def written_while_inferring(set):
    with torch.inference_mode():
        ids = torch.zeros(N, dtype=torch.int64)

    def change():
        with torch.inference_mode():
            ids[9:20] = 1

    return lambda b, h, q, k: ids[q] == ids[k], change


def one_of_many_numbers(set):
    many = torch.full((1000,), OLD)
    return window(lambda: many[777].item()), lambda: many.data.fill_(NEW)


def many_objects(set):
    chain = Slotted(OLD)
    for _ in range(200):
        chain = Slotted(chain)

    def read(at=chain):
        while isinstance(at, Slotted):
            at, last = at.left, at
        return last.left

    def change():
        at = chain
        while isinstance(at.left, Slotted):
            at = at.left
        at.left = NEW

    return window(read), change


def a_property(set):
    layer = Layer()
    return window(lambda: layer.half), lambda: set(layer, "left", NEW)


def a_method(set):
    layer = Layer()
    return functools.partial(lambda given, b, h, q, k: given(b, h, q, k), layer.mod), lambda: set(layer, "left", NEW)


def callable_object(set):
    layer = Layer()
    return layer, lambda: set(layer, "ids", torch.arange(N) // 9)


def a_buffer(set):
    layer = Layer()
    return lambda b, h, q, k: (q - k < layer.limit) & (q >= k), lambda: layer.load_state_dict(
        layer.state_dict() | {"limit": torch.tensor(NEW)}
    )


def partial_of_partial(set):
    settings = {"left": OLD}
    mod = functools.partial(functools.partial(lambda given, plus, b, h, q, k: q - k < given["left"] + plus, settings), 0)
    return mod, lambda: settings.update(left=NEW)


def closure_of_closures(set):
    left = OLD

    def change():
        nonlocal left
        left = NEW

    def outer():
        def inner():
            return left

        return lambda: inner()

    return window(outer()), change


def built_in_object(set):
    holder, read = array.array("q", [OLD]), operator.itemgetter(0)
    return window(functools.partial(read, holder)), lambda: holder.__setitem__(0, NEW)


def environment(set):
    os.environ["FLEX_LEFT"] = str(OLD)
    return window(lambda: int(os.environ["FLEX_LEFT"])), lambda: os.environ.update(FLEX_LEFT=str(NEW))


def context_variable(set):
    left = contextvars.ContextVar("left", default=OLD)
    return window(left.get), lambda: left.set(NEW)


def other_branch(set):
    layer = Layer()
    return lambda b, h, q, k: (q >= k) if layer.training else (q <= k), layer.eval


def mods_together(set):
    return and_masks(lambda b, h, q, k: q >= k, window(lambda: Config.window)), lambda: set(Config, "window", NEW)


def written_in_place(set):
    def mod(b, h, q, k):
        shown = (q >= k) & (b >= 0) & (h >= 0)
        shown &= q - k < Config.window
        return shown

    return mod, lambda: set(Config, "window", NEW)


@torch.library.custom_op("tilewise_tests::near", mutates_args=())
def near(distance: torch.Tensor) -> torch.Tensor:
    return distance.abs() < Config.window


@near.register_vmap
def _(info, in_dims, distance):
    return near(distance), in_dims[0]


def operator_of_the_users(set):
    return lambda b, h, q, k: near(q - k), lambda: set(Config, "window", NEW)


CHANGES = [
    class_attribute,
    module_attribute,
    numpy_memory,
    numpy_number,
    written_through_data,
    written_while_inferring,
    one_of_many_numbers,
]
CHANGES += [many_objects, a_property, a_method, callable_object, a_buffer, partial_of_partial, closure_of_closures, built_in_object]
CHANGES += [environment, context_variable, other_branch, mods_together, written_in_place, operator_of_the_users]


def tensors(batch=1, heads=2, seqlen=N):
    return [normal(batch, heads, seqlen, 8, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_the_value_is_torchs_after_what_the_mod_reads_has_changed(change, monkeypatch):
    mod, act = change(monkeypatch.setattr)
    q, k, v = tensors()
    made = create_block_mask(mod, None, None, N, N, device="cpu")
    before = torchs.flex_attention(q, k, v, block_mask=made)
    for _ in range(2):
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=made), before, atol=1e-11, rtol=1e-11)
    act()
    after = torchs.flex_attention(q, k, v, block_mask=made)
    assert not torch.equal(after, before)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=made), after, atol=1e-11, rtol=1e-11)
    mask = mask_of(made)
    assert torch.equal(mask.dense(N, N).reshape(N, N), create_mask(mod, 1, 1, N, N, device="cpu")[0, 0])


@pytest.mark.parametrize("change", [class_attribute, numpy_number, written_through_data], ids=lambda each: each.__name__)
def test_score_mods_are_read_anew(change, monkeypatch):
    mod, act = change(monkeypatch.setattr)
    q, k, v = tensors()
    score_mod = lambda s, b, h, q, k: torch.where(mod(b, h, q, k), s, -float("inf"))  # noqa: E731
    for _ in range(2):
        torch.testing.assert_close(flex_attention(q, k, v, score_mod), torchs.flex_attention(q, k, v, score_mod), atol=1e-11, rtol=1e-11)
        act()


def test_the_lists_are_read_anew():
    number, index = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    made = BlockMask.from_kv_blocks(number, index, BLOCK_SIZE=8)
    for change in (
        lambda: index.data[0, 0, 0].copy_(torch.tensor([1, 0])),
        lambda: number.fill_(2),
        lambda: setattr(made, "mask_mod", causal),
    ):
        expected = torch.zeros(16, 16, dtype=torch.bool)
        for row in range(2):
            for column in index[0, 0, row, : number[0, 0, row]].tolist():
                expected[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = True
        assert torch.equal(mask_of(made).dense(16, 16).reshape(16, 16), expected)
        change()
    assert torch.equal(mask_of(made).dense(16, 16).reshape(16, 16), torch.ones(16, 16, dtype=torch.bool).tril())


def causal(b, h, q, k):
    return q >= k


def test_a_mod_that_does_the_same_again_has_the_same_mask(monkeypatch):
    """So nothing is made anew in the steps of training or decoding, which write to parameters and caches beside it."""
    layer, seen = Layer(), []
    made = create_block_mask(lambda b, h, q, k: layer.mod(b, h, q, k), None, None, N, N, device="cpu")
    monkeypatch.setattr(flex, "_made", lambda *args, made=flex._made: seen.append(1) or made(*args))
    first = mask_of(made)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    layer.ids = layer.ids.clone()
    assert mask_of(made) is first and len(seen) == 1
    layer.ids[5:] = 1
    assert mask_of(made) is not first and len(seen) == 2


def test_a_number_of_another_type_is_another(monkeypatch):
    """1 and True, or 2 and 2.0, are equal in Python, and are not in every operation."""
    monkeypatch.setattr(Config, "window", 2)
    made = create_block_mask(lambda b, h, q, k: (q * Config.window) // 3 >= k, None, None, N, N, device="cpu")
    first = mask_of(made)
    monkeypatch.setattr(Config, "window", 2.0)
    assert mask_of(made) is not first


ASKING = {"dim": torch.Tensor.dim, "ndim": lambda q: q.ndim, "shape": lambda q: len(q.shape), "size": lambda q: len(q.size())}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_a_mod_that_asks_for_shapes_sees_torchs(ask, monkeypatch):
    """An index has no dimension; the stand-ins have one."""
    made = create_block_mask(lambda b, h, q, k: (q - k).abs() <= Config.window - 20 * ask(q), None, None, N, N, device="cpu")
    for left in (9, 3):
        monkeypatch.setattr(Config, "window", left)
        assert torch.equal(mask_of(made).dense(N, N).reshape(N, N), tw.SlidingWindow(left, left).dense(N, N))


def written_after_it_was_read(b, h, q, k):
    SCRATCH.copy_(FIRST)
    one = SCRATCH[q]
    SCRATCH.copy_(SECOND)
    return one == SCRATCH[k]


SCRATCH, FIRST, SECOND = torch.zeros(N), torch.arange(N) // 9, torch.arange(N) // 5


def test_a_mod_that_writes_to_what_it_has_read():
    made = create_block_mask(written_after_it_was_read, None, None, N, N, device="cpu")
    assert torch.equal(mask_of(made).dense(N, N).reshape(N, N), FIRST[:, None] == SECOND)


def test_a_frozen_mask_stays(monkeypatch):
    made = create_block_mask(window(lambda: Config.window), None, None, N, N, device="cpu")
    q, k, v = tensors()
    first, before = mask_of(made, frozen=True), flex_attention(q, k, v, block_mask=made)
    monkeypatch.setattr(Config, "window", NEW)
    made.mask_mod = None  # is not asked
    assert mask_of(made) is first and mask_of(made, frozen=True) is first
    assert torch.equal(flex_attention(q, k, v, block_mask=made), before)


def test_a_frozen_mask_is_for_all_batch_entries_that_the_mod_does_not_tell_apart(monkeypatch):
    made = create_block_mask(lambda b, h, q, k: (q - k).abs() <= Config.window * (h + 1), None, None, N, N, device="cpu")
    first = mask_of(made, 1, 3, frozen=True)
    monkeypatch.setattr(made, "mask_mod", None)
    assert mask_of(made, 7, 3) is first


def test_freezing_takes_the_mask_of_now(monkeypatch):
    made = create_block_mask(window(lambda: Config.window), None, None, N, N, device="cpu")
    mask_of(made)
    monkeypatch.setattr(Config, "window", NEW)
    mask_of(made, frozen=True)
    q, k, v = tensors()
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=made), torchs.flex_attention(q, k, v, block_mask=made))


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_around_it_sees_changes(monkeypatch):
    made = create_block_mask(window(lambda: Config.window), None, None, N, N, device="cpu")
    q, k, v = tensors()
    whole = torch.compile(lambda q: flex_attention(q * 2, k, v, block_mask=made) + 1, backend="eager")
    masked = torch.compile(lambda q: flex.attention(*(x.transpose(1, 2) for x in (q * 2, k, v)), mask=mask_of(made)), backend="eager")
    for left in (OLD, NEW):
        monkeypatch.setattr(Config, "window", left)
        expected = torchs.flex_attention(q * 2, k, v, block_mask=made)
        torch.testing.assert_close(whole(q), expected + 1, atol=1e-11, rtol=1e-11)
        torch.testing.assert_close(masked(q).transpose(1, 2), expected, atol=1e-11, rtol=1e-11)
