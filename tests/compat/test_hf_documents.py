"""Padding-free batches: keywords that say where documents are give each document what it gives alone, or are refused by name."""

from functools import cache
from itertools import chain, product

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed: pip install 'transformers>=5'")

import transformers as hf
from hf_models import MODELS, VOCABULARY, WINDOW, built

import tilewise as tw
from tilewise.compat import hf_keywords
from tilewise.compat import transformers as ours
from tilewise.errors import ShapeError, UnsupportedError

LENGTHS = (5, 1, 17, 9)  # more than the windows and chunks of the models that have some
CUT = {"return_flash_attn_kwargs": True}
COLLATED = {
    "lengths": CUT,
    "lengths and seq_idx": CUT | {"return_seq_idx": True},
    "seq_idx": {"return_seq_idx": True},
    "lengths alone": CUT | {"return_position_ids": False},
    "positions": {},
}
DECODERS = [name for name, model in MODELS.items() if model.kind == "decoder"]
ENCODERS = ("bert", "modernbert")


@pytest.fixture(autouse=True)
def registered():
    ours.register()
    yield
    torch._dynamo.reset()


@cache
def model(name: str) -> hf.PreTrainedModel:
    ours.register()
    return built(name, "tilewise")


@cache
def documents(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]


def batch_of(how: str, lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """What transformers' collator makes of the documents; positions are their own in each case, or the right answer would be another."""
    found = hf.DataCollatorWithFlattening(**COLLATED[how])([{"input_ids": tokens} for tokens in documents(lengths)])
    found.pop("labels")
    if "position_ids" not in found:
        found["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    return found


def output(net: torch.nn.Module, given: dict, **options) -> torch.Tensor:
    found = net(**given, **options)
    return found.logits if "logits" in found else found.last_hidden_state


def each_alone(net: torch.nn.Module, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return torch.cat([output(net, {"input_ids": torch.tensor([tokens])}) for tokens in documents(lengths)], dim=1)


def close(got: torch.Tensor, want: torch.Tensor, bound: float = 2e-6) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max().item() <= bound * max(1.0, want.abs().max().item())


HOW = [(name, how) for name in DECODERS for how in COLLATED if name in ("llama", "mistral", "gemma3", "llama4") or how == "lengths"]


@pytest.mark.parametrize(("name", "how"), HOW)
def test_decoders(name, how):
    """With the default cache, and without."""
    net, given = model(name), batch_of(how)
    with torch.no_grad():
        want = each_alone(net)
        as_one = output(net, {"input_ids": given["input_ids"]})
        assert (as_one - want).abs().max() > 1e-2
        if (name, how) != ("llama4", "positions"):  # which does not hand them on to its layers
            close(output(net, given), want)
        close(output(net, given, use_cache=False), want)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [case for case in product(DECODERS, COLLATED) if case not in HOW])
def test_every_decoder(name, how):
    test_decoders(name, how)


@pytest.mark.parametrize(("name", "how"), [case for case in product(ENCODERS, COLLATED) if case != ("modernbert", "positions")])
def test_encoders(name, how):
    net, given = model(name), batch_of(how)
    with torch.no_grad():
        close(output(net, given), each_alone(net))


def gradients(net: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(net.parameters(), found, strict=True)]


@pytest.mark.parametrize(
    ("name", "how"), [("llama", "lengths"), ("gemma3", "lengths and seq_idx"), ("gpt_oss", "seq_idx"), ("modernbert", "lengths")]
)
def test_gradients(name, how):
    """A step of training: dropout is off, and the loss is a mean over all tokens."""
    net = model(name)
    want = gradients(net, each_alone(net).square().mean())
    got = gradients(net, output(net, batch_of(how)).square().mean())
    largest = max(x.abs().max().item() for x in want)
    assert largest > 1e-3
    for one, other in zip(got, want, strict=True):
        assert (one - other).abs().max().item() <= 3e-6 * max(1.0, largest)


def test_checkpointed_layers_that_are_trained():
    net = built("mistral", "tilewise").train()
    want = gradients(net, each_alone(net).square().mean())
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for got, expected in zip(gradients(net, output(net, batch_of("lengths")).square().mean()), want, strict=True):
        close(got, expected, 3e-6)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", "lengths"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product(("gemma2", "bert"), ("lengths", "seq_idx"))),
        pytest.param("mistral", "lengths and seq_idx", marks=pytest.mark.slow),
        pytest.param("bert", "positions", marks=pytest.mark.slow),
    ],
)
def test_compiled(name, how):
    """One program for other documents of the same number; the mask of bands stays structure."""
    compiled = []

    def backend(graph, example):
        compiled.append(graph)
        return graph.forward

    run = torch.compile(model(name), fullgraph=True, backend=backend)
    with torch.no_grad():
        for lengths in (LENGTHS, (9, 17, 2, 4)):
            close(output(run, batch_of(how, lengths)), each_alone(model(name), lengths))
    assert len(compiled) == 1


def test_a_batch_of_two():
    """Lengths count the tokens of both entries end to end; seq_idx is a row each, or one for both."""
    rows = [documents((5, 19)), documents((9, 8, 7))]
    tokens = torch.tensor([[*chain(*row)] for row in rows])
    cu = torch.tensor([0, 5, 24, 33, 41, 48], dtype=torch.int32)
    numbers = torch.tensor([[0] * 5 + [1] * 19, [0] * 9 + [1] * 8 + [2] * 7])
    places = torch.stack([torch.cat([torch.arange(len(x)) for x in row]) for row in rows])
    for name, given in product(("llama", "gemma3", "llama4", "bert"), ({"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}, {"seq_idx": numbers})):
        net = model(name)
        with torch.no_grad():
            want = torch.cat([torch.cat([output(net, {"input_ids": torch.tensor([x])}) for x in row], dim=1) for row in rows])
            close(output(net, {"input_ids": tokens, "position_ids": places, **given}), want)
            one = {key: x[:1] if key == "seq_idx" else x[:3] for key, x in given.items()}
            close(output(net, {"input_ids": tokens[:1], "position_ids": places[:1], **one}), want[:1])
            if "seq_idx" in given:
                twice = {"input_ids": tokens[:1].repeat(2, 1), "position_ids": places[:1].repeat(2, 1)}
                close(output(net, {**twice, **one}), want[:1].repeat(2, 1, 1))


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "bert"])
def test_padding_besides(name):
    """Which flash attention would pass over: it takes the padding, and not the documents."""
    net, given = model(name), batch_of("lengths")
    padding = torch.ones_like(given["input_ids"])
    padding[0, -3:] = 0
    with torch.no_grad():
        last = output(net, {"input_ids": given["input_ids"][:, -9:-3]})
        close(output(net, given | {"attention_mask": padding})[:, :-3], torch.cat((each_alone(net)[:, :-9], last), dim=1))


@pytest.mark.parametrize("kind", ["bool", "float", "structure"])
def test_a_mask_of_ones_own_besides(kind):
    net, given, n = model("llama"), batch_of("lengths"), sum(LENGTHS)
    causal = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    floats = torch.where(causal, 0.0, torch.finfo(torch.float32).min)
    mask = {"bool": causal, "float": floats, "structure": ours.as_attention_mask(tw.Causal(), 1, n, n)}[kind]
    with torch.no_grad():
        close(output(net, given | {"attention_mask": mask}), each_alone(net))


def test_a_static_cache_that_is_empty():
    net, given = model("mistral"), batch_of("lengths")
    kept = hf.StaticCache(config=net.config, max_cache_len=sum(LENGTHS) + 11)
    with torch.no_grad():
        close(output(net, given, cache=kept), each_alone(net))


def test_position_bias_besides():
    """Of T5, whose decoder hands the same keywords on to its cross attention, too."""
    net = built("t5", "tilewise")
    given = batch_of("lengths")
    with torch.no_grad():
        want = torch.cat([net.encoder(torch.tensor([x])).last_hidden_state for x in documents()], dim=1)
        del given["position_ids"]
        close(net.encoder(**given).last_hidden_state, want)


def test_tokens_after_the_last_document_see_nothing():
    q, k = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    cu = torch.tensor([0, 4, 7], dtype=torch.int32)
    for given in ({}, {"position_bias": torch.zeros(1, 4, 9, 9)}):
        found, _ = ours.attention(torch.nn.Identity(), q, k, k, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu, **given)
        assert not found[:, 7:].any() and found[:, :7].abs().sum(-1).all()


def test_other_keys_than_queries():
    """As flash attention has them: the last query of a document sees all of its keys."""
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 12, 8)
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 8, 12])
    found, _ = ours.attention(torch.nn.Identity(), q, k, k, None, is_causal=True, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k)
    close(found[0], tw.attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, k)), cu_q, cu_k, causal=True))


def call(mask=None, batch: int = 1, seqlen_k: int = 7, module: torch.nn.Module | None = None, **how) -> torch.Tensor:
    q, k = torch.randn(batch, 4, 7, 8), torch.randn(batch, 2, seqlen_k, 8)
    return ours.attention(module or torch.nn.Identity(), q, k, k, mask, **how)[0]


def cut(*ends: int) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(ends))


REFUSED = {
    "a dict": (
        {"cu_seq_lens_q": {"full_attention": torch.tensor([0, 7])}},
        ShapeError,
        r"cu_seq_lens_q must be integers of shape .documents \+ 1,., got dict",
    ),
    "two dims": ({"cu_seq_lens_q": torch.tensor([[0, 7]])}, ShapeError, "cu_seq_lens_q must be integers"),
    "floats": ({"seq_idx": torch.zeros(1, 7)}, ShapeError, "seq_idx must be integers of shape"),
    "too many tokens": (cut(0, 9), ShapeError, "cu_seq_lens_q"),
    "decreasing": (cut(0, 5, 3, 7), ShapeError, "cu_seq_lens_q"),
    "another length": ({"seq_idx": torch.zeros(1, 6, dtype=torch.int32)}, ShapeError, r"seq_idx must be \(1 or 1, 7\)|seq_idx must be"),
    "from one entry into the next": (
        cut(0, 9, 14) | {"batch": 2},
        ShapeError,
        "cu_seq_lens_q must count the tokens of all 2 entries .* 7 is not",
    ),
    "one entry of two": (cut(0, 7) | {"batch": 2}, ShapeError, "14 is not among its ends"),
    "other keys": (
        {"seq_idx": torch.zeros(1, 7, dtype=torch.int32), "seqlen_k": 9},
        UnsupportedError,
        "seq_idx gives the documents of 7 queries, but there are 9 keys",
    ),
    "a page table": ({"block_table": torch.zeros(1, 3)}, UnsupportedError, "block_table asks for a cache in pages"),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 7])}, UnsupportedError, "cu_seqlens asks for documents, by a name that is none"),
    "a tensor": (
        {"document_ids": torch.zeros(1, 7)},
        UnsupportedError,
        "document_ids is a keyword that tilewise does not know, .* Tensor, could say which keys",
    ),
    "a mask": ({"block_mask": tw.Causal()}, UnsupportedError, "block_mask is a keyword"),
    "a function": ({"score_mod": lambda score, *where: score}, UnsupportedError, "score_mod is a keyword"),
    "tensors": ({"masks": [torch.zeros(7)]}, UnsupportedError, "masks is a keyword"),
    "a window that is none": ({"sliding_window": 0}, ValueError, "sliding_window must be an integer from 1 on, or None, got 0"),
    "a window beside a mask": (
        {"sliding_window": 3, "mask": torch.ones(1, 1, 7, 7) > 0},
        UnsupportedError,
        "sliding_window=3 is not the layer's own",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    given, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call(**given)


def test_models_refuse_what_they_hand_on():
    tokens, net = batch_of("lengths")["input_ids"], model("llama")
    for given, message in (
        ({"document_ids": tokens}, "document_ids is a keyword that tilewise does not know"),
        ({"sliding_window": 4}, "sliding_window=4 is not the layer's own"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            net(tokens, **given)


def test_is_causal_is_in_the_mask():
    """transformers makes the mask by this keyword, with padding as well."""
    net, given = model("llama"), batch_of("lengths")
    other = hf.LlamaForCausalLM._from_config(net.config, attn_implementation="sdpa").eval()
    other.load_state_dict(net.state_dict())
    net.set_attn_implementation("tilewise")
    padding = torch.ones_like(given["input_ids"])
    padding[0, -3:] = 0
    with torch.no_grad():
        for mask in (None, padding):
            seen = {"input_ids": given["input_ids"], "attention_mask": mask, "is_causal": False}
            close(output(net, seen)[:, :-3], output(other, seen)[:, :-3])
        cut = torch.cat([output(net, {"input_ids": torch.tensor([x]), "is_causal": False}) for x in documents()], dim=1)
        close(output(net, given, is_causal=False), cut)


def test_documents_that_a_cache_goes_on_with_are_refused():
    """As in `generate`, which hands the prompt's lengths on to each step."""
    given = batch_of("lengths")
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q gives the documents of 1 queries, but there are 33 keys"):
        model("llama").generate(**given, max_new_tokens=3, do_sample=False)


def test_what_trainers_and_tokenizers_put_beside_is_harmless(monkeypatch):
    given, net = batch_of("lengths"), model("llama")
    with torch.no_grad():
        want = output(net, given)
        beside = {"num_items_in_batch": torch.tensor([32]), "token_type_ids": given["input_ids"] * 0, "shift_labels": given["input_ids"]}
        assert torch.equal(output(net, given, **beside, output_router_logits=False, pixel_values=None), want)
        monkeypatch.setattr(hf_keywords, "ignored", set())
        ours.register(ignore=("my_column",))
        assert torch.equal(output(net, given, my_column=torch.ones(3)), want)


@pytest.mark.parametrize("causal", (True, False))
def test_a_window_that_nothing_else_says(causal):
    """As flash attention has it: as many tokens as it says, with the query's own; where it is not causal, likewise from there on."""
    module = torch.nn.Identity()
    module.is_causal = causal
    torch.manual_seed(0)
    got = call(sliding_window=3, module=module)
    torch.manual_seed(0)
    close(got, call(ours.as_attention_mask(tw.SlidingWindow(2, 0 if causal else 2), 1, 7, 7), module=module))
    torch.manual_seed(0)
    packed = call(sliding_window=3, module=module, **cut(0, 4, 7))
    torch.manual_seed(0)
    mask = tw.Documents([0, 4, 7], inner=tw.SlidingWindow(2, 0 if causal else 2))
    close(packed, call(ours.as_attention_mask(mask, 1, 7, 7), module=module))


def test_the_layer_s_own_window_is_in_its_mask():
    net, given = model("mistral"), batch_of("lengths")
    with torch.no_grad():
        assert net.config.sliding_window == WINDOW
        close(output(net, given), each_alone(net))


def test_it_is_read_once_for_all_layers(monkeypatch):
    """Documents that the host has to know."""
    read = []
    numbers = ours.hf_documents._numbers
    monkeypatch.setattr(ours.hf_documents, "_numbers", lambda *args: read.append(args) or numbers(*args))
    with torch.no_grad():
        model("llama")(**batch_of("seq_idx"))
        assert len(read) == 1
        model("llama")(**batch_of("positions"))
        assert len(read) == 2
        model("llama")(**batch_of("lengths"))
        assert len(read) == 2
