"""Masks as models get them are data: pickled, copied, saved and sent to other processes they are the same, and work as before."""

import copy
import io
import pickle
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed: pip install 'transformers>=5'")

import transformers as hf
from hf_models import CHUNK, LENGTH, built, inputs
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import masking_utils

import tilewise as tw
from tilewise.compat import transformers as ours
from tilewise.compat.hf_documents import Said, apart

N = 20  # queries: so many that rows of several masks are folded


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy, "copy": copy.copy, "torch.save": saved}


def padding(side: str) -> Tensor:
    seen = torch.ones(2, N, dtype=torch.bool)
    if side == "middle":
        seen[0, 3:6] = seen[1, 9:14] = False
    else:
        seen[0, slice(0, 4) if side == "left" else slice(-4, None)] = False
    return seen


def made(**given) -> ours.Pairs:
    return ours.make_mask(2, N, N, device="cpu", allow_is_causal_skip=False, **given)


def chunked() -> ours.Pairs:
    return made(mask_function=masking_utils.chunked_causal_mask_function(CHUNK, torch.zeros(2, dtype=torch.int64)))


def blocks() -> ours.Pairs:
    ids = torch.arange(N).expand(2, -1) // 6
    return made(mask_function=masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(ids)))


def with_documents() -> ours.Pairs:
    pairs = made()
    cu = torch.tensor([0, 7, N, N + 9, 2 * N])
    apart(Said("cu_seq_lens_q", cu, cu), pairs, True, pairs.shape)
    return pairs


MASKS = {
    "causal": made,
    "window": lambda: made(mask_function=masking_utils.sliding_window_causal_mask_function(5)),
    "chunks": chunked,
    "blocks": blocks,
    "left": lambda: made(attention_mask=padding("left")),
    "right": lambda: made(attention_mask=padding("right")),
    "folded": lambda: made(attention_mask=padding("middle")),
    "unread": lambda: made(mask_function=lambda batch, head, q, k: k % 2 <= q),
    "with room": lambda: ours.make_mask(2, N, N + 9, torch.tensor(0), device="cpu"),
    "documents": with_documents,
    "own": lambda: ours.as_attention_mask(tw.PrefixLM(6) | tw.SlidingWindow(2, 2), 2, N, N),
    "own tensor": lambda: ours.as_attention_mask(tw.Dense(torch.rand(2, 1, N, N) < 0.5) & tw.Padding([N, 9]), 2, N, N),
}


def attended(pairs: ours.Pairs) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 8, generator=draw) for heads, n in ((4, N), (2, pairs.shape[3]), (2, pairs.shape[3])))
    return ours.attention(torch.nn.Identity(), q, k, v, pairs)[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MASKS)
def test_they_are_data(name, way):
    pairs = MASKS[name]()
    again = WAYS[way](pairs)
    assert type(again) is ours.Pairs and again.shape == pairs.shape and again.mask == pairs.mask and again.folded == pairs.folded
    assert torch.equal(attended(again), attended(pairs))
    assert torch.equal(again.bits(), pairs.bits())
    cu = torch.tensor([0, 4, N, N + 11, 2 * N])
    if name not in ("unread", "own tensor"):
        given = Said("cu_seq_lens_q", cu, cu), True
        documents = [apart(given[0], each, given[1], each.shape) for each in (pairs, WAYS[way](again))]
        assert torch.equal(attended(documents[0]), attended(documents[1]))


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_data(way):
    """With its tensors, as with a static cache and padding on the left."""
    pairs = ours.make_mask(2, 1, 9, torch.tensor(5), device="cpu", attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6]) > 0)
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8)
    again = WAYS[way](pairs)
    assert again.step is not None
    assert torch.equal(*(ours.attention(torch.nn.Identity(), q, k, k, each)[0] for each in (pairs, again)))


@pytest.mark.parametrize("name", ["causal", "left", "folded", "with room", "documents", "blocks"])
def test_bits_are_what_transformers_says(name, monkeypatch):
    """They come of the structure, while transformers asks its closures pair by pair."""
    with monkeypatch.context() as patched:
        patched.setattr(ours, "Pairs", lambda masks, shape, keys, bits=None, *args: bits)
        patched.setattr(ours.hf_masks, "read", lambda *args: None)
        want = MASKS[name]() if name != "documents" else made()
    assert torch.equal(MASKS[name]().bits(), want)


@pytest.mark.parametrize("rest", ["blocks", "chunks", "window", "blocks in a window"])
def test_documents_are_what_transformers_makes_of_positions(rest):
    """Of the same documents; blocks of tokens are cut where documents end."""
    ends = [0, 7, 8, N]
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)]).expand(2, -1)
    inner, after = masking_utils.causal_mask_function, None
    if "window" in rest:
        inner = masking_utils.sliding_window_causal_mask_function(5)
    if rest == "chunks":
        inner = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    if "blocks" in rest:
        after = masking_utils.blockwise_overlay(torch.arange(N).expand(2, -1) // 6)

    def function(remapped):
        found = masking_utils.remap_positions_for_packed_sequence(inner, places) if remapped else inner
        found = found if after is None else masking_utils.or_masks(found, after)
        packed = masking_utils.packed_sequence_mask_function(masking_utils.find_packed_sequence_indices(places))
        return masking_utils.and_masks(found, packed) if remapped else found

    want, plain = made(mask_function=function(True)), made(mask_function=function(False))
    cu = torch.tensor([*ends[:-1], *(N + end for end in ends)])
    numbers = torch.tensor([n for n, (a, b) in enumerate(pairwise(ends)) for _ in range(b - a)])[None]
    assert not torch.equal(plain.bits(), want.bits())
    for said in (Said("cu_seq_lens_q", cu, cu), Said("seq_idx", seq_idx=numbers), Said("seq_idx", cu, cu, numbers)):
        assert torch.equal(apart(said, plain, True, plain.shape).bits(), want.bits())
        assert torch.equal(apart(said, want, True, plain.shape).bits(), want.bits())


class Batches(Dataset):
    """Masks that are made in a worker."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, n: int) -> dict:
        tokens = inputs("llama")["input_ids"][n]
        return {"input_ids": tokens, "attention_mask": ours.as_attention_mask(tw.PrefixLM(4 + n), 1, LENGTH, LENGTH)}


def test_of_a_worker():
    loader = DataLoader(Batches(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    ours.register()
    net = built("llama", "tilewise")
    with torch.no_grad():
        for n, batch in enumerate(loader):
            tokens, mask = batch["input_ids"][None], ours.as_attention_mask(tw.PrefixLM(4 + n), 1, LENGTH, LENGTH)
            assert torch.equal(net(tokens, attention_mask=batch["attention_mask"]).logits, net(tokens, attention_mask=mask).logits)


def _attend(pairs, answers) -> None:
    answers.put(attended(pairs).numpy())  # a tensor would be shared by a process that ends here


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_of_another_process(start):
    context = torch.multiprocessing.get_context(start)
    answers = context.SimpleQueue()
    for name in ("folded", "own tensor"):
        pairs = MASKS[name]()
        worker = context.Process(target=_attend, args=(pairs, answers))
        worker.start()
        assert torch.equal(torch.from_numpy(answers.get()), attended(pairs))
        worker.join(60)
        assert worker.exitcode == 0


def test_what_a_layer_is_called_with():
    """As pipelines and checkpointing send it elsewhere."""
    ours.register()
    net, calls = built("gemma3", "tilewise"), []
    layer = net.model.layers[0]
    layer.register_forward_pre_hook(lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        net(**inputs("gemma3", "left"), use_cache=False)
        args, kwargs = calls[0]
        want = layer(*args, **kwargs)
        args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))
        got = layer(*args, **kwargs)
    assert torch.equal(*(x if isinstance(x, Tensor) else x[0] for x in (got, want)))
    assert isinstance(kwargs["attention_mask"], ours.Pairs) and isinstance(net, hf.PreTrainedModel)
