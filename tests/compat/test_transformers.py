"""`attn_implementation="tilewise"` gives what eager attention gives: models, masks, caches, training and tracing; and what it refuses."""

import re
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed: pip install 'transformers>=5'")

import transformers as hf
from hf_models import CHUNK, LENGTH, MODELS, WINDOW, built, inputs, output
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils

import tilewise as tw
from tilewise.compat import hf_masks
from tilewise.compat import transformers as ours
from tilewise.errors import ShapeError, UnsupportedError
from tilewise.runtime import call_cache

MASKS = ("none", "left", "right", "packed", "user")
ONCE = {"image": ("none",), "speech": ("none",), "seq2seq": ("none", "left", "right")}
PASSED_OVER = ("gpt_oss", "bert")  # whose eager masks know no positions, while documents are kept apart here (test_hf_documents.py)
CASES = [(name, mask) for name in MODELS for mask in ONCE.get(MODELS[name].kind, MASKS) if not (mask == "packed" and name in PASSED_OVER)]
NO_CACHE = {"use_cache": False}
STEPS = 6  # tokens to generate: beyond the windows of models that have one, which the prompt exceeds already


@pytest.fixture(autouse=True)
def registered():
    ours.register()
    yield
    torch._dynamo.reset()


@cache
def model(name: str, implementation: str) -> hf.PreTrainedModel:
    ours.register()
    return built(name, implementation)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within 1e-6 of the largest number."""
    bound = 1e-6 * max(1.0, want.abs().max().item())
    assert (got - want).abs().max().item() <= bound, f"{(got - want).abs().max().item()} > {bound}"


def alike(name: str, given: dict, **options) -> None:
    with torch.no_grad():
        close(output(model(name, "tilewise"), given, **options), output(model(name, "eager"), given, **options))


@pytest.mark.parametrize(("name", "mask"), CASES)
def test_forward(name, mask):
    alike(name, inputs(name, mask))


@pytest.mark.parametrize("mask", ("left", "right", "packed", "user"))
def test_masks_matter(mask):
    """To a model here, so that one that was ignored would be seen."""
    given = inputs("llama", mask)
    without = output(model("llama", "eager"), {"input_ids": given["input_ids"]})
    if mask in ("left", "right"):
        without = without.unflatten(0, given["input_ids"].shape)[given["attention_mask"].bool()]
    if mask != "right":  # a causal model's tokens see no padding on their right
        assert (output(model("llama", "eager"), given) - without).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["mistral", "llama4", "bert"])
@pytest.mark.parametrize("length", (1, 2, CHUNK + 1, 67))
def test_lengths(name, length):
    for batch in (1, 3):
        alike(name, inputs(name, "none", batch, length))
        if length > 20:
            alike(name, inputs(name, "left", batch, length))


def gradients(name: str, implementation: str, mask: str, checkpointing: dict | None = None) -> list[torch.Tensor]:
    net = built(name, implementation).train()
    for part in net.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    if checkpointing is not None:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    call_cache.forget()
    output(net, inputs(name, mask) | NO_CACHE).square().mean().backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in net.parameters()]


def same_gradients(name: str, mask: str, checkpointing: dict | None = None) -> None:
    want = gradients(name, "eager", mask)
    largest = max(x.abs().max().item() for x in want)
    for got, expected in zip(gradients(name, "tilewise", mask, checkpointing), want, strict=True):
        assert (got - expected).abs().max().item() <= 2e-6 * max(1.0, largest)


TRAINED = [
    (name, mask) for name, mask in CASES if mask != "left"
]  # eager gives rows of padding on the left the mean of V, tilewise and sdpa nothing
QUICK_TRAINED = [("llama", "right"), ("gemma2", "packed"), ("gpt_oss", "none"), ("t5", "right"), ("deepseek_v3", "user"), ("bert", "none")]


@pytest.mark.parametrize(("name", "mask"), QUICK_TRAINED)
def test_gradients(name, mask):
    same_gradients(name, mask)


@pytest.mark.parametrize(("name", "mask", "reentrant"), [("llama", "right", False), ("gemma3", "packed", True), ("bert", "right", False)])
def test_checkpointing(name, mask, reentrant):
    same_gradients(name, mask, {"use_reentrant": reentrant})


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", (None, {"use_reentrant": False}), ids=("plain", "checkpointed"))
@pytest.mark.parametrize(("name", "mask"), TRAINED)
def test_every_gradient(name, mask, checkpointing):
    same_gradients(name, mask, checkpointing)


CACHES = {"none": {"use_cache": False}, "dynamic": {}, "static": {"cache_implementation": "static"}, "chunks": {"prefill_chunk_size": 5}}


def generated(name: str, implementation: str, mask: str, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens, and the logits of each step."""
    given = inputs(name, mask)
    given.pop("decoder_input_ids", None)
    found = model(name, implementation).generate(
        **given, do_sample=False, min_new_tokens=STEPS, max_new_tokens=STEPS, return_dict_in_generate=True, output_logits=True, **options
    )
    return found.sequences, torch.stack(found.logits)


def generates_alike(name: str, mask: str, kept: str) -> None:
    tokens, logits = generated(name, "tilewise", mask, CACHES[kept])
    wanted, expected = generated(name, "eager", mask, CACHES[kept])
    close(logits, expected)
    assert torch.equal(tokens, wanted)


@pytest.mark.parametrize(
    ("name", "mask", "kept"),
    [
        ("llama", "left", "dynamic"),
        ("llama", "none", "static"),
        ("mistral", "none", "chunks"),
        ("gemma3", "none", "dynamic"),
        ("gemma3", "left", "static"),
        ("gpt_oss", "left", "chunks"),
        ("llama4", "none", "static"),
        ("t5", "left", "dynamic"),
        ("whisper", "none", "static"),
    ],
)
def test_generate(name, mask, kept):
    generates_alike(name, mask, kept)


GENERATED = [
    (name, mask, kept)
    for name, mask, kept in product(MODELS, ("none", "left"), CACHES)
    if (MODELS[name].kind == "decoder" or (MODELS[name].kind in ("seq2seq", "speech") and kept != "chunks"))
    and mask in ONCE.get(MODELS[name].kind, MASKS)
]


@pytest.mark.parametrize(
    ("name", "mask", "layers"), [("llama", "left", 2), ("gemma3", "left", 2), ("gpt_oss", "none", 1), ("llama4", "none", 1)]
)
def test_steps_with_a_static_cache_are_decode(name, mask, layers, monkeypatch):
    """One token after the prompt, with as many keys as there are; but for masks in chunks, and windows that are full of tokens."""
    calls, decode = [], tw.decode

    def counted(q, *args, **options):
        calls.append((q.shape[1], options["cache_seqlens"].tolist(), None if options["leftpad"] is None else options["leftpad"].tolist()))
        return decode(q, *args, **options)

    monkeypatch.setattr(tw, "decode", counted)
    logits = generated(name, "tilewise", mask, CACHES["static"])[1]
    monkeypatch.setattr(tw, "decode", decode)
    close(logits, generated(name, "eager", mask, CACHES["static"])[1])
    assert len(calls) == (STEPS - 1) * layers
    assert calls[0] == (1, [LENGTH + 1] * 2, [3, 0] if mask == "left" else None) or name == "gemma3"  # whose first layers keep a window


@pytest.mark.parametrize("holes", (False, True))
def test_a_step_whose_padding_is_in_the_middle(holes):
    """Tokens that do not lie side by side are seen by a tensor."""
    net, eager = (model("llama", each) for each in ("tilewise", "eager"))
    tokens = inputs("llama")["input_ids"]
    padding = torch.ones_like(tokens)
    padding[0, : (0 if holes else 4)], padding[1, 5:8] = 0, int(not holes)
    with torch.no_grad():
        results = []
        for each in (net, eager):
            kept = hf.StaticCache(config=each.config, max_cache_len=LENGTH + 3)
            each(tokens[:, :-1], attention_mask=padding[:, :-1], cache=kept)
            results.append(each(tokens[:, -1:], attention_mask=padding, cache=kept).logits)
    close(*results)


def step_of(batch: int, seqlen_k: int, at: int | torch.Tensor, **given) -> ours.Pairs:
    return ours.make_mask(batch, 1, seqlen_k, at, device="cpu", **given)


def test_a_step_within_the_padding():
    """A prompt that is fed token by token, with the mask of all of it: the first tokens are none, and see nothing."""
    net, eager = (model("llama", each) for each in ("tilewise", "eager"))
    given, results = inputs("llama", "left"), []
    with torch.no_grad():
        for each in (net, eager):
            kept = hf.StaticCache(config=each.config, max_cache_len=LENGTH)
            steps = [each(given["input_ids"][:, n : n + 1], attention_mask=given["attention_mask"], cache=kept).logits for n in range(5)]
            results.append(torch.cat(steps, dim=1))
    close(*(x[1] for x in results))
    close(*(x[0, 3:] for x in results))


def test_a_step_for_a_layer_of_a_larger_batch():
    """What is seen is the same for all of the layer's entries, as by a tensor's broadcast."""
    q, k = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 9, 8)
    pairs = step_of(1, 9, torch.tensor(5))
    assert pairs.step is not None
    found, _ = ours.attention(torch.nn.Identity(), q, k, k, pairs)
    close(found, tw.attention(*(x.transpose(1, 2) for x in (q, k[:, :, :6], k[:, :, :6]))))


def test_a_step_with_sinks_that_are_trained():
    """And nothing else is."""
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8)
    sink = torch.zeros(4, requires_grad=True)
    found, _ = ours.attention(torch.nn.Identity(), q, k, k, step_of(2, 9, torch.tensor(5)), s_aux=sink)
    assert torch.autograd.grad(found.sum(), sink)[0].abs().sum() > 0


def test_a_step_of_a_layer_elsewhere(monkeypatch):
    """Layers may be spread over devices, and the mask is made on one."""
    on = []
    monkeypatch.setattr(
        tw, "decode", lambda q, *_, cache_seqlens, leftpad, **options: on.append((cache_seqlens.device, leftpad.device)) or q
    )
    q, k = torch.empty(2, 4, 1, 8, device="meta"), torch.empty(2, 2, 9, 8, device="meta")
    padding = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    ours.attention(torch.nn.Identity(), q, k, k, step_of(2, 9, torch.tensor(5), attention_mask=padding.bool()))
    assert on == [(q.device, q.device)]


def test_a_traced_step_with_a_closure_of_the_callers(monkeypatch):
    """Beside a window it is no band, as transformers says by use_vmap."""
    monkeypatch.setattr(ours, "is_tracing", lambda x=None: True)
    config, window = hf.MistralConfig(sliding_window=4), masking_utils.sliding_window_causal_mask_function(4)
    more = masking_utils.and_masks(window, lambda batch, head, q, k: k % 2 == 0)
    given = {"local_size": 4, "config": config, "allow_is_causal_skip": False}
    assert step_of(2, 9, torch.tensor(5), mask_function=window, **given).step.left == 3
    assert step_of(2, 9, torch.tensor(5), mask_function=more, use_vmap=True, **given).step is None


def test_bits_that_are_asked_for_late():
    """The layers' caches count their tokens in the tensor that said where the queries start."""
    at = torch.tensor(2)
    pairs = ours.make_mask(1, 3, 9, at, device="cpu")
    want = masking_utils.sdpa_mask(1, 3, 9, 2, allow_is_causal_skip=False)
    at.add_(3)
    assert pairs.mask is not None and torch.equal(pairs.bits(), want)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mask", "kept"), GENERATED)
def test_every_generate(name, mask, kept):
    generates_alike(name, mask, kept)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_caches_by_hand(name):
    """Prefill in pieces of several sizes with each cache, which also has room to spare."""
    tokens = inputs(name)["input_ids"]
    for make in (lambda config: hf.DynamicCache(config=config), lambda config: hf.StaticCache(config=config, max_cache_len=LENGTH + 9)):
        results = []
        for implementation in ("tilewise", "eager"):
            net, pieces = model(name, implementation), []
            kept = make(net.config)
            with torch.no_grad():
                for piece in tokens.split((10, 1, 5, 1, 7), dim=1):
                    pieces.append(net(piece, cache=kept).logits)
            results.append(torch.cat(pieces, dim=1))
        close(*results)


def compiles_alike(name: str, mask: str, backend: str = "aot_eager") -> None:
    given = inputs(name, mask)
    run = torch.compile(model(name, "tilewise"), fullgraph=True, backend=backend)
    with torch.no_grad():
        close(output(run, given), output(model(name, "eager"), given))


@pytest.mark.parametrize(("name", "mask"), [("llama", "left"), ("gemma2", "packed")])
def test_compile(name, mask):
    compiles_alike(name, mask)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mask"), [case for case in CASES if case[0] != "whisper"])
def test_every_compile(name, mask):
    compiles_alike(name, mask)


@pytest.mark.slow
def test_compiled_training():
    """By inductor, with gradients, for two lengths."""
    nets = [built("llama", implementation).train() for implementation in ("tilewise", "eager")]
    run = torch.compile(nets[0], fullgraph=True)
    for length in (LENGTH, LENGTH + 7):
        given = inputs("llama", "right", length=length)
        results = [output(each, given | NO_CACHE) for each in (run, nets[1])]
        close(*results)
        grads = [torch.autograd.grad(x.square().mean(), net.parameters()) for x, net in zip(results, nets, strict=True)]
        for got, want in zip(*grads, strict=True):
            close(got, want)


def test_a_compiled_decode_is_compiled_once():
    """Each step with a static cache has another mask, and none of them another program."""
    compiled = []

    def backend(graph, example):
        compiled.append(graph)
        return graph.forward

    net, tokens = model("llama", "tilewise"), inputs("llama")["input_ids"]
    run, kept, got = torch.compile(net, fullgraph=True, backend=backend), hf.StaticCache(config=net.config, max_cache_len=LENGTH + 9), []
    with torch.no_grad():
        net(tokens[:, :8], cache=kept)
        for n in range(8, 16):
            step = net.prepare_inputs_for_generation(tokens[:, : n + 1], cache=kept, next_sequence_length=1, attention_mask=None)
            assert isinstance(step["attention_mask"], ours.Pairs) or isinstance(step["attention_mask"]["full_attention"], ours.Pairs)
            got.append(run(**step).logits)
        want = model("llama", "eager")(tokens[:, :16]).logits[:, 8:]
    close(torch.cat(got, dim=1), want)
    assert len(compiled) <= 2


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_export(name):
    net, given = model(name, "tilewise"), inputs(name, "left")
    with torch.no_grad():
        program = torch.export.export(net, (), given | NO_CACHE)
        close(output(program.module(), given | NO_CACHE), output(model(name, "eager"), given))
    assert any(node.target == torch.ops.tilewise.attention_forward.default for node in program.graph.nodes)


SHORT = {
    "none": {},
    "full": {"is_causal": False},
    "sink": {"s_aux": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "bias": {"position_bias": torch.linspace(-1, 1, 4 * 36).view(1, 4, 6, 6), "is_causal": False},
    "mask": {"mask": tw.SlidingWindow(2, 0), "softcap": 2.0, "scaling": 0.3},
}


@pytest.mark.parametrize("given", SHORT.values(), ids=SHORT)
def test_calls_like_one_before(given, monkeypatch):
    """The interface's function gives the same bits by whichever way, and O is (batch, seqlen, heads, head_dim), which may be changed in place."""
    given = dict(given)
    mask = given.pop("mask", None)

    def run(seed):
        torch.manual_seed(seed)
        leaves = [torch.randn(2, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2)]
        pairs = None if mask is None else ours.as_attention_mask(mask, 2, 6, 6)
        o, _ = ours.attention(torch.nn.Identity(), *leaves, pairs, **given)
        return [o, *torch.autograd.grad(o, leaves, torch.randn(2, 6, 4, 8)), o.detach().mul_(2.0)]

    ours.call_cache.forget()
    run(0)
    with monkeypatch.context() as patched:
        patched.setattr(tw, "attention", None)
        short = run(1)
    with monkeypatch.context() as patched:
        patched.setattr(ours.call_cache, "find", lambda *_: None)
        assert all(map(torch.equal, short, run(1)))
    x = torch.randn(2, 4, 6, 8)
    with pytest.raises(ShapeError, match="attention_mask is for batch"):
        ours.attention(torch.nn.Identity(), x, x[:, :2], x[:, :2], ours.as_attention_mask(mask or tw.Causal(), 2, 5, 6))


def seen_masks(name: str, given: dict, monkeypatch, **options) -> set:
    """The masks and shapes of the calls that a forward makes."""
    found = set()

    def attend(q, k, v, **how):
        found.add((how.get("mask"), tuple(q.shape[:2]), k.shape[1]))
        return attention(q, k, v, **how)

    attention = tw.attention
    monkeypatch.setattr(tw, "attention", attend)
    monkeypatch.setattr(ours.call_cache, "find", lambda *_: None)  # a cached call would not be seen
    with torch.no_grad():
        model(name, "tilewise")(**given, **options)
    return found


def test_masks_stay_structure(monkeypatch):
    n, whole = LENGTH, (2, LENGTH)
    causal, window = tw.Causal(), tw.SlidingWindow(WINDOW - 1, 0)
    ends = [0, 5, 6, 21, 24]
    assert seen_masks("llama", inputs("llama"), monkeypatch) == {(causal, whole, n)}
    assert seen_masks("gemma3", inputs("gemma3"), monkeypatch) == {(causal, whole, n), (window, whole, n)}
    chunked = tw.Documents([0, CHUNK, 2 * CHUNK, n], inner=causal)
    assert seen_masks("llama4", inputs("llama4"), monkeypatch) == {(causal, whole, n), (chunked, whole, n)}
    packed = inputs("gemma3", "packed", batch=1)
    assert seen_masks("gemma3", packed, monkeypatch) == {(tw.Documents(ends, inner=inner), (1, n), n) for inner in (causal, window)}
    both = tw.Documents([0, 5, 6, 21, 24, 30, 31, 45, 48], inner=causal)
    assert seen_masks("llama", inputs("llama", "packed"), monkeypatch) == {(both, (1, 2 * n), 2 * n)}
    assert seen_masks("bert", inputs("bert"), monkeypatch) == {(None, whole, n)}
    assert seen_masks("bert", inputs("bert", "right"), monkeypatch) == {(tw.Padding([n - 3, n]), whole, n)}
    assert seen_masks("llama", inputs("llama", "right"), monkeypatch) == {(causal & tw.Padding([n - 3, n]), whole, n)}
    assert seen_masks("llama", inputs("llama", "left"), monkeypatch) == {(causal & tw.Padding(start=[3, 0]), whole, n)}


def test_a_static_cache_is_cut_to_what_it_holds(monkeypatch):
    net = model("llama", "tilewise")
    kept, tokens = hf.StaticCache(config=net.config, max_cache_len=100), inputs("llama")["input_ids"]
    for piece, length in ((tokens[:, :10], 10), (tokens[:, 10:17], 17)):
        calls = seen_masks("llama", {"input_ids": piece}, monkeypatch, cache=kept)
        assert calls == {(tw.Causal(), (2, piece.shape[1]), length)}


def test_a_mask_of_ones_own():
    """A mask of tilewise in place of a 4-D tensor."""
    given = inputs("llama")
    structure = given | {"attention_mask": ours.as_attention_mask(tw.PrefixLM(6), 2, LENGTH, LENGTH)}
    seen = tw.PrefixLM(6).dense(LENGTH, LENGTH).expand(2, 1, -1, -1)
    dense = given | {"attention_mask": torch.where(seen, 0.0, torch.finfo(torch.float32).min)}
    with torch.no_grad():
        close(model("llama", "tilewise")(**structure).logits, model("llama", "eager")(**dense).logits)
        run = torch.compile(model("llama", "tilewise"), fullgraph=True, backend="aot_eager")
        close(run(**structure).logits, model("llama", "eager")(**dense).logits)
    assert torch.equal(structure["attention_mask"].bits(), seen)


def test_a_decoder_that_looks_both_ways():
    config = MODELS["llama"].config()
    config.is_causal = False
    nets = [hf.LlamaForCausalLM._from_config(config, attn_implementation=each).eval() for each in ("tilewise", "eager")]
    nets[0].load_state_dict(nets[1].state_dict())
    for mask in ("none", "right"):
        given = inputs("llama", mask)
        with torch.no_grad():
            close(*(output(net, given) for net in nets))
            given["input_ids"][:, -4] += 1
            early = [net(**given).logits[-1, 0] for net in nets]
            given["input_ids"][:, -4] -= 1
            assert all((net(**given).logits[-1, 0] - x).abs().max() > 1e-3 for net, x in zip(nets, early, strict=True))


def test_dropout_is_applied():
    config = MODELS["llama"].config()
    config.attention_dropout = 0.5
    net = hf.LlamaForCausalLM._from_config(config, attn_implementation="tilewise").train()
    given = inputs("llama")
    assert not torch.equal(net(**given).logits, net(**given).logits)
    assert torch.equal(net.eval()(**given).logits, net(**given).logits)


@pytest.mark.parametrize("name", ["BloomModel", "MptModel", "MPNetModel"])
def test_models_that_use_the_mask_themselves_are_refused(name):
    config = getattr(hf, name.replace("Model", "Config"))(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    config.update({"d_model": 32, "n_heads": 4, "n_layers": 1, "intermediate_size": 48, "alibi": False})
    net = getattr(hf, name)._from_config(config, attn_implementation="tilewise").eval()
    given = inputs("llama", "left")
    with pytest.raises(UnsupportedError, match='the attention mask that tilewise made is .* load it with attn_implementation="sdpa"'):
        net(**given)


def test_falcon_has_its_own_list():
    with pytest.raises(KeyError, match="tilewise"):
        hf.FalconModel._from_config(
            hf.FalconConfig(hidden_size=32, num_attention_heads=4, vocab_size=61, num_hidden_layers=1), attn_implementation="tilewise"
        )


def test_misuse_of_a_mask_says_so():
    pairs = ours.as_attention_mask(tw.Causal(), 2, 5, 7)
    assert pairs.shape == (2, 1, 5, 7) and pairs.ndim == 4 and pairs.to("cpu", non_blocking=True) is pairs
    assert repr(pairs) == "Pairs(Causal(), shape=(2, 1, 5, 7))"
    for misuse, how in (
        (lambda: torch.ones(2, 1, 5, 7) + pairs, "is passed to add|is added to scores"),
        (lambda: torch.ones(2, 1, 5, 7).masked_fill(pairs, 0.0), "is passed to masked_fill"),
        (lambda: pairs[:, :, :, :3], "is sliced"),
        (lambda: pairs + 1, "is added to scores"),
    ):
        with pytest.raises(UnsupportedError, match=how):
            misuse()
    with pytest.raises(AttributeError, match="is asked for .dtype"):
        _ = pairs.dtype


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_flash", "name must not contain 'flash', .*; got 'my_flash'"),
        ("sdpa", "name 'sdpa' is transformers' own or registered by another package; choose another"),
        ("eager", "name 'eager' is transformers' own"),
        ("paged|ours", r"name must be an identifier such as 'tilewise' .* got 'paged\|ours'"),
        (None, "name must be an identifier such as 'tilewise'"),
    ],
)
def test_names_that_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        ours.register(name)


def test_register_and_unregister():
    ours.register("other_name")
    ours.register("other_name")
    assert "other_name" in hf.AttentionInterface().valid_keys() and "other_name" in hf.AttentionMaskInterface().valid_keys()
    ours.unregister("other_name")
    assert "other_name" not in hf.AttentionInterface().valid_keys() and "other_name" not in hf.AttentionMaskInterface().valid_keys()
    with pytest.raises(ValueError, match=r"name 'other_name' is not registered; registered are \['tilewise'\]"):
        ours.unregister("other_name")


def test_an_old_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(ours, "peer_version", "4.57.1")
    with pytest.raises(UnsupportedError, match=r"needs transformers 5 or later, found 4\.57\.1"):
        ours.register()


def call(mask=None, **how):
    q = torch.randn(2, 4, 5, 8)
    module = torch.nn.Module()
    return ours.attention(module, q, *torch.randn(2, 2, 2, 7, 8), mask, **{"is_causal": False} | how)


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda: call(output_attentions=True), UnsupportedError, 'output_attentions asks for the weights .* attn_implementation="eager"'),
        (lambda: call(sinks=torch.zeros(2, 4, 5, 1)), UnsupportedError, "sinks asks for sinks of each query's own"),
        (lambda: call(indices=torch.zeros(2, 5, 3, dtype=torch.int64)), UnsupportedError, "indices asks for keys that an indexer chose"),
        (lambda: call(torch.ones(2, 7)), ShapeError, r"attention_mask must reach attention as \(batch or 1, .* got shape \(2, 7\)"),
        (lambda: call(torch.ones(2, 1, 5, 7, dtype=torch.int64)), ShapeError, "attention_mask must be bool .* got torch.int64"),
        (
            lambda: call(ours.as_attention_mask(tw.Causal(), 2, 5, 6)),
            ShapeError,
            "is for batch 2, 5 queries and 6 keys, but the layer has .* 7 keys",
        ),
        (
            lambda: call(create_block_mask(lambda b, h, q, k: q >= k, 2, None, 5, 7, device="cpu")),
            UnsupportedError,
            "is a BlockMask of flex_attention; pass",
        ),
        (lambda: call(dropout=0.5, s_aux=torch.zeros(3)), ShapeError, "attention: s_aux has heads_q 3, but query has heads_q 4"),
        (lambda: ours.as_attention_mask("causal", 2, 5, 7), ValueError, "mask must be a mask of tilewise, got str 'causal'"),
        (lambda: ours.as_attention_mask(tw.Dense(torch.ones(3, 3) > 0), 2, 5, 7), ShapeError, "Dense: the mask is 3 x 3"),
        (lambda: ours.as_attention_mask(tw.PerHead({(0, 2): tw.Causal()}), 2, 5, 7), ShapeError, "differs by head"),
    ],
)
def test_bad_calls(run, error, message):
    with pytest.raises(error, match=message):
        run()


def test_output_attentions_are_refused_by_models():
    with pytest.raises((ValueError, UnsupportedError), match="attn_implementation"):
        model("llama", "tilewise")(**inputs("llama"), output_attentions=True)


def test_a_mask_of_one_query_is_for_all():
    """As a tensor's would be by broadcasting, for keys that are padding."""
    q, k, v = torch.randn(2, 4, 5, 8), *torch.randn(2, 2, 2, 7, 8)
    seen = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]) > 0
    for mask in (tw.FirstKeys(3), tw.Dense(seen[:, None, None])):
        pairs = ours.as_attention_mask(mask, 2, 1, 7)
        got, want = (ours.attention(torch.nn.Module(), q, k, v, each, is_causal=False)[0] for each in (pairs, pairs.bits()))
        assert torch.equal(got, want) and got.shape == (2, 5, 4, 8)


def test_masks_as_tensors():
    """Bool, float, and float with a position bias; longer than the keys; a batch of 1 beside a larger one."""
    q, k, v = torch.randn(2, 4, 5, 8), *torch.randn(2, 2, 2, 7, 8)
    seen = torch.rand(2, 1, 5, 9) < 0.7
    seen[..., 0] = True
    bias = torch.randn(1, 4, 5, 7)
    floats = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    module = torch.nn.Module()

    def want(mask):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    for mask, position_bias, added in (
        (seen, None, floats),
        (floats, None, floats),
        (seen, bias, floats[..., :7] + bias),
        (floats[..., :7], bias, floats[..., :7] + bias),
    ):
        close(ours.attention(module, q, k, v, mask, position_bias=position_bias)[0], want(added[..., :7]))
    one = ours.attention(module, q[:1], k, v, None, is_causal=False)[0]
    close(one, ours.attention(module, q[:1].expand(2, -1, -1, -1), k, v, None, is_causal=False)[0])


def test_no_mask_with_room_in_the_cache():
    """Causal from the top left, as transformers means it where it leaves the mask out: keys beyond the queries are empty places."""
    q, k, v = torch.randn(1, 4, 5, 8), *torch.randn(2, 1, 2, 9, 8)
    k[:, :, 5:], v[:, :, 5:] = float("nan"), float("nan")
    bias = torch.randn(1, 4, 5, 9)
    for added in (None, bias):
        got = ours.attention(torch.nn.Module(), q, k, v, None, position_bias=added)[0]
        floats = torch.full((5, 5), float("-inf")).triu(1) + (0.0 if added is None else bias[..., :5])
        want = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], attn_mask=floats, enable_gqa=True)
        close(got, want.transpose(1, 2))


def test_closures_that_changed_their_meaning_are_asked_pair_by_pair(monkeypatch):
    """As another version of transformers might: the same name, one key more."""

    def sliding_window_overlay(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    for made in (sliding_window_overlay, sliding_window_overlay(2)):
        made.__module__ = hf_masks.MODULE
    code = sliding_window_overlay.__code__
    monkeypatch.setattr(masking_utils.sliding_window_overlay, "__code__", code)
    ours.register()
    assert set(hf_masks.CAPTURED) - ours.understood() == {"sliding_window_overlay"}


def test_it_is_imported_by_nothing_else():
    code = "import sys, tilewise, tilewise.compat.hf_masks; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_every_model_agrees_or_refuses(part):
    """Those that can be made small by their config's usual fields, and take one of a handful of inputs."""
    from hf_sweep import classes, verdict  # which loads every model of transformers

    found = {kind.__name__: verdict(kind, "tilewise") for kind in classes(part, 16)}
    assert not {name: why for name, why in found.items() if why[0] == "differs"}
    refused = [why for how, why in found.values() if how == "refuses"]
    assert all("attn_implementation=" in why or "KeyError: 'tilewise'" in why for why in refused), refused
    assert sum(how == "agrees" for how, _ in found.values()) > 8


def test_the_guide_runs():
    page = Path(__file__).parents[2] / "docs" / "guide" / "transformers.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    exec(compile("\n".join(blocks), str(page), "exec"), {})
