"""transformers' own server: `generate_batch` with tilewise says what it says with transformers' implementations, prompts in chunks, keys in pages."""

import random
from collections import Counter

import pytest
import torch

peer = pytest.importorskip("transformers", reason="transformers is not installed: pip install -c constraints.txt transformers")
from tilewise.compat import hf_paged  # noqa: E402 (after what it stands for)
from tilewise.compat import transformers as ours  # noqa: E402
from tilewise.errors import UnsupportedError  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 150,
    "initializer_range": 0.2,  # as large as makes texts differ
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "llama": lambda: peer.LlamaForCausalLM(peer.LlamaConfig(**SIZES)),
    "windows": lambda: peer.MistralForCausalLM(peer.MistralConfig(**SIZES, sliding_window=8)),
    "both kinds": lambda: peer.Gemma3ForCausalLM(
        peer.Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    ),
    "sinks": lambda: peer.GptOssForCausalLM(
        peer.GptOssConfig(
            **SIZES, sliding_window=8, num_local_experts=2, num_experts_per_tok=1, layer_types=["sliding_attention", "full_attention"]
        )
    ),
}
IN_PAGES = {"llama"}  # of the others transformers has no block tables for some layers


@pytest.fixture
def registered():
    ours.register()
    yield
    ours.unregister()


@pytest.fixture
def calls(monkeypatch):
    counted = Counter()
    for name in ("attention_varlen", "decode"):
        function = getattr(hf_paged, name)
        monkeypatch.setattr(
            hf_paged, name, lambda *args, function=function, name=name, **words: counted.update([name]) or function(*args, **words)
        )
    return counted


def said(model, implementation, **changes):
    """The tokens of four requests, one of them with a prompt that takes several batches."""
    model.set_attn_implementation(implementation)
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 150) for _ in range(n)] for n in (5, 17, 40, 3)]
    config = peer.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=24, **changes)
    generation = peer.GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=config, progress_bar=False)
    return [found[name].generated_tokens for name in sorted(found)]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens(name, registered, calls):
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    want = said(model, "paged|eager")
    assert len(want) == 4 and all(len(tokens) == 9 for tokens in want) and len({tuple(tokens) for tokens in want}) == 4
    assert not calls
    assert said(model, "tilewise") == want
    assert calls["attention_varlen"] > 0 and (calls["decode"] > 0) == (name in IN_PAGES)
    calls.clear()
    assert said(model, "tilewise", max_blocks_per_request=0) == want and calls.keys() == {"attention_varlen"}


def test_padding_is_written_nowhere_and_sees_nothing():
    """As CUDA graphs have it: sequences of length 0, with no page."""
    pages = torch.full((6, 4, 2, 8), torch.nan)
    cache = pages[:4], pages[2:]  # one memory, moved by two pages
    table = torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32)
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    cache[0][0, :3], cache[1][0, :3] = torch.randn(2, 3, 2, 8)
    before = pages.clone()
    given = {"cu_seq_lens_q": torch.tensor([0, 1, 1]), "cu_seq_lens_k": torch.tensor([0, 4, 4], dtype=torch.int32), "block_table": table}
    o = hf_paged.attend(q, k, v, given | {"k_cache": cache[0], "v_cache": cache[1]}, None, None, 0.0, None)
    assert o.shape == (1, 2, 4, 8) and o[0, 1].count_nonzero() == 0 and o[0, 0].isfinite().all()
    changed = (~torch.eq(pages, before) & ~(pages.isnan() & before.isnan())).any(-1).any(-1).nonzero().tolist()
    assert changed == [[0, 3], [2, 3]] and torch.equal(pages[0, 3], k[0, :, 0]) and torch.equal(pages[2, 3], v[0, :, 0])


def test_a_mask_is_refused():
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UnsupportedError, match="attention_mask cannot be given where transformers serves from pages"):
        hf_paged.attend(x, x, x, {}, x, None, 0.0, None)


def test_transformers_is_as_it_was():
    manager, initialization = hf_paged.continuous_api.ContinuousBatchingManager, hf_paged.initialization
    before = manager.switch_to_cb_friendly_attn, initialization.ensure_decode_fast_path_is_available
    ours.register()
    ours.register("tilewise_again")
    assert manager.switch_to_cb_friendly_attn is not before[0]
    ours.unregister()
    assert manager.switch_to_cb_friendly_attn is not before[0], "another name is registered"
    ours.unregister("tilewise_again")
    assert (manager.switch_to_cb_friendly_attn, initialization.ensure_decode_fast_path_is_available) == before
    hf_paged.dismiss()
    assert manager.switch_to_cb_friendly_attn is before[0]
