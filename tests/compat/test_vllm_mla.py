"""vLLM's backend for latent heads: what it answers, batches of every kind against attention alone, refusals; the base classes of vLLM where it is."""

import importlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import vllm_standin as standin

import tilewise as tw
from tilewise.errors import UnsupportedError

HEADS, RANK, ROPE, BLOCK = 4, 32, 16, 16
BATCHES = {  # tokens of each sequence, and of them new
    "decode": ([40, 7, 130], [1, 1, 1]),
    "speculative": ([40, 9, 130], [4, 4, 4]),
    "short chunks": ([40, 7, 130, 20], [1, 7, 50, 1]),
    "padded": ([40, 0], [1, 0]),
}
LAYER = {"q_lora_rank": None, "kv_lora_rank": RANK, "qk_nope_head_dim": 16, "qk_rope_head_dim": ROPE, "qk_head_dim": 32, "v_head_dim": 16}


@pytest.fixture
def module(monkeypatch):
    standin.install(monkeypatch)
    yield importlib.import_module("tilewise.compat.vllm_mla")
    for name in ("vllm_mla", "vllm_backend"):
        sys.modules.pop(f"tilewise.compat.{name}", None)


def impl_of(module, **given):
    words = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None} | given
    words = {"attn_type": standin.AttentionType.DECODER, "kv_sharing_target_layer_name": None} | words
    return module.Impl(HEADS, RANK + ROPE, 0.3, 1, **words, **LAYER, kv_b_proj=None)


@pytest.mark.parametrize("apart", [False, True], ids=["one query", "nope and rope apart"])
@pytest.mark.parametrize("kind", BATCHES)
def test_batches(module, kind, apart):
    lengths, new = BATCHES[kind]
    common, blocks = standin.batch(lengths, new, BLOCK)
    draw = torch.Generator().manual_seed(1)
    cache = torch.full((blocks, BLOCK, RANK + ROPE), torch.nan)
    held = [torch.randn((n, RANK + ROPE), generator=draw) for n in lengths]
    for b, keys in enumerate(held):
        at = torch.arange(lengths[b])
        cache[common.block_table_tensor[b, at // BLOCK].long(), at % BLOCK] = keys
    query = torch.randn((sum(new), HEADS, RANK + ROPE), generator=draw)
    builder = module.Builder(None, [], None, torch.device("cpu"))
    decoding = builder._build_decode(
        block_table_tensor=common.block_table_tensor,
        seq_lens_device=common.seq_lens,
        max_seq_len=max(lengths),
        query_start_loc_cpu=common.query_start_loc,
        query_start_loc_device=common.query_start_loc,
        num_decode_tokens=sum(new),
        dcp_tot_seq_lens_device=None,
    )
    assert decoding.uniform == (new[0] if len(set(new)) == 1 else 0)
    q = (query[..., :RANK], query[..., RANK:]) if apart else query
    o, lse = impl_of(module).forward_mqa(q, cache, SimpleNamespace(decode=decoding), None)
    assert lse is None and o.shape == (sum(new), HEADS, RANK)
    start = 0
    for keys, m in zip(held, new, strict=True):
        k = keys[None, :, None]
        want = tw.attention(query[None, start : start + m], k, k[..., :RANK], causal=True, scale=0.3)[0]
        torch.testing.assert_close(o[start : start + m], want, atol=2e-5, rtol=2e-5)
        start += m


def test_what_it_answers(module):
    Backend = module.Backend
    assert (Backend.get_name(), Backend.get_impl_cls(), Backend.get_builder_cls()) == ("FLASH_ATTN_MLA", module.Impl, module.Builder)
    assert Backend.is_mla() and Backend.supports_batch_invariance() and Backend.get_supported_kernel_block_sizes()[0].base == BLOCK
    for capability, served in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        assert Backend.supports_compute_capability(SimpleNamespace(major=capability[0], minor=capability[1])) is served
    impl = impl_of(module)
    assert not impl.can_return_lse_for_decode and not impl.supports_quant_query_input and impl.split is None
    assert module.Builder.query_len_support is standin.QueryLenSupport.VARLEN


def test_batch_invariance_is_pieces_of_one_size(monkeypatch):
    standin.install(monkeypatch, invariant=True)
    module = importlib.import_module("tilewise.compat.vllm_mla")
    try:
        assert impl_of(module).split == 256
    finally:
        for name in ("vllm_mla", "vllm_backend"):
            sys.modules.pop(f"tilewise.compat.{name}", None)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"attn_type": standin.AttentionType.ENCODER_ONLY}, "decoder layers of MLA"),
        ({"kv_cache_dtype": "fp8"}, "latent caches of 16 bits"),
        ({"sliding_window": 9, "logits_soft_cap": 3.0}, "no sliding_window, logits_soft_cap with MLA"),
    ],
)
def test_what_is_not_served_is_refused_where_it_is_made(module, given, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        impl_of(module, **given)


PYTHON = os.environ.get("TILEWISE_TEST_VLLM", "")  # the interpreter of an environment that has vLLM


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="TILEWISE_TEST_VLLM names no interpreter of an environment with vLLM")
def test_the_standin_is_like_vllm(module):
    code = """
        import dataclasses, inspect, json
        from vllm.model_executor.layers.attention import mla_attention as mla
        names = lambda function: list(inspect.signature(function).parameters)
        print(json.dumps({
            "impl": names(mla.MLACommonImpl.__init__),
            "forward": names(mla.MLACommonImpl.forward_mqa),
            "builder": names(mla.MLACommonMetadataBuilder.__init__),
            "decode": names(mla.MLACommonMetadataBuilder._build_decode),
            "fields": [each.name for each in dataclasses.fields(mla.MLACommonDecodeMetadata)],
            "lengths": [each.name for each in mla.QueryLenSupport],
        }))
    """
    out = subprocess.run([PYTHON, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True).stdout
    theirs = json.loads(out.splitlines()[-1])

    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(standin.MLACommonImpl.__init__) == theirs["impl"]
    assert names(module.Impl.forward_mqa) == theirs["forward"]
    assert names(standin.MLACommonMetadataBuilder.__init__) == theirs["builder"]
    assert names(module.Builder._build_decode) == theirs["decode"]
    assert list(standin.MLACommonDecodeMetadata.__dataclass_fields__) == theirs["fields"]
    assert [each.name for each in standin.QueryLenSupport] == theirs["lengths"]
