"""vLLM's backend: what it answers, batches of every kind in both layouts against attention alone, padding, caches of 8 bits, refusals; the engine."""

import dataclasses
import importlib
import importlib.util
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
from tilewise.compat import vllm, vllm_chunks
from tilewise.errors import UnsupportedError

HEADS, HEADS_K, DIM, BLOCK = 4, 2, 16, 16
LAYER = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
BATCHES = {  # tokens of each sequence, of them new, padding
    "decode": ([40, 7, 130], [1, 1, 1], 0),
    "speculative": ([40, 9, 130], [4, 4, 4], 0),
    "prompts": ([33, 5, 64], [33, 5, 64], 0),
    "mixed": ([40, 7, 130, 20], [1, 7, 50, 1], 3),
    "padded to look uniform": ([40, 20], [3, 1], 2),
    "padded decode": ([40, 7], [1, 1], 2),
    "one": ([17], [17], 0),
}
LAYERS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 9}, {"mask": tw.SlidingWindow(8, 0)}),
    "softcap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "sinks": ({"sinks": torch.linspace(-1, 1, HEADS).bfloat16()}, {"sink": torch.linspace(-1, 1, HEADS).bfloat16().float()}),
    "alibi": ({"alibi_slopes": [0.5, 0.25, 0.1, 0.0]}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}),
    "e4m3": ({"kv_cache_dtype": "fp8"}, {}),
}


@pytest.fixture
def backend(monkeypatch):
    layout = standin.install(monkeypatch)
    module = importlib.import_module("tilewise.compat.vllm_backend")
    module.layout = layout
    yield module
    sys.modules.pop("tilewise.compat.vllm_backend", None)


def config(interleave=1, **of_model):
    return SimpleNamespace(
        model_config=SimpleNamespace(**of_model), parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=interleave)
    )


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def pool_of(backend, blocks, eight=False):
    """A layer's cache as vLLM allocates it: memory in one order, seen in another. NaN, or its byte, where nothing was written."""
    shape = backend.Backend.get_kv_cache_shape(blocks, BLOCK, HEADS_K, DIM)
    order = backend.Backend.get_kv_cache_stride_order()
    memory = torch.full([shape[dim] for dim in order], 0x7F if eight else torch.nan, dtype=torch.uint8 if eight else torch.float32)
    return memory.permute([order.index(dim) for dim in range(4)])


def held(output, query, keys, values, new, layer, options):
    """Each sequence's rows against attention alone; what is written of padding is 0."""
    start = 0
    for b, m in enumerate(new):
        k, v = keys[b], values[b]
        if layer == "e4m3":
            k, v = ((x / scale).to(torch.float8_e4m3fn).float() * scale for x, scale in ((k, 0.5), (v, 0.25)))
        want = tw.attention(query[None, start : start + m], k[None], v[None], causal=True, scale=0.3, **options)[0]
        torch.testing.assert_close(output[start : start + m], want, atol=2e-5, rtol=2e-5)
        start += m
    assert output[start:].count_nonzero() == 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", BATCHES)
def test_batches(backend, kind, layer, layout):
    backend.layout[0] = layout
    attends(backend, kind, layer)


def attends(backend, kind, layer):
    lengths, new, padding = BATCHES[kind]
    given, options = LAYERS[layer]
    common, blocks = standin.batch(lengths, new, BLOCK, padding)
    impl = backend.Impl(HEADS, DIM, 0.3, HEADS_K, **given)
    cache = pool_of(backend, blocks, eight=layer == "e4m3")
    keys, values = ([normal(n, HEADS_K, DIM, seed=seed + b) for b, n in enumerate(lengths)] for seed in (10, 20))
    table = common.block_table_tensor
    for b, (n, m) in enumerate(zip(lengths, new, strict=True)):  # what came in earlier batches
        at = torch.arange(n - m)
        slots = table[b, at // BLOCK].long() * BLOCK + at % BLOCK
        impl.do_kv_cache_update(LAYER, keys[b][: n - m], values[b][: n - m], cache, slots)
    fresh = [torch.cat([x[b][n - m :] for b, (n, m) in enumerate(zip(lengths, new, strict=True))]) for x in (keys, values)]
    fresh = [torch.cat([x, torch.full((padding, HEADS_K, DIM), torch.nan)]) for x in fresh]
    query = normal(sum(new) + padding, HEADS, DIM, seed=5)
    builder = backend.Builder(None, ["layer"], config(rswa_window=None), torch.device("cpu"))
    metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
    assert metadata.uniform == (new[0] if len(set(new)) == 1 and not padding else 0)
    output = torch.full_like(query, torch.nan)
    impl.do_kv_cache_update(LAYER, *fresh, cache, common.slot_mapping)
    assert impl.forward(LAYER, query, *fresh, cache, metadata, output) is output
    held(output, query, keys, values, new, layer, options)


class NoMemory:
    def __getitem__(self, place):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", BATCHES)
def test_long_chunks_are_copied_out_of_their_pages(monkeypatch, kind, layer, layout):
    """But those of 8 bits and of windows, where most sequences have few new tokens, where pairs are few, and where memory is short."""
    standin.install(monkeypatch, cpu=False)[0] = layout
    backend = importlib.import_module("tilewise.compat.vllm_backend")
    monkeypatch.setattr(vllm_chunks, "LONG", 5)
    called = []
    for name in ("decode", "attention_varlen"):
        function = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *x, name=name, function=function, **y: called.append(name) or function(*x, **y))
    attends(backend, kind, layer)
    monkeypatch.setattr(vllm_chunks, "PAIRS", 0)
    attends(backend, kind, layer)
    copied = kind in ("prompts", "mixed", "one") and layer not in ("e4m3", "window")
    assert called == ["decode", "attention_varlen" if copied else "decode"]
    of = vllm_chunks.Chunks.of
    with monkeypatch.context() as patch:
        patch.setattr(vllm_chunks.Chunks, "of", lambda common: (found := of(common)) and dataclasses.replace(found, block_table=NoMemory()))
        attends(backend, kind, layer)
    monkeypatch.setattr(vllm_chunks, "MOST_COPIED", 1000)
    attends(backend, kind, layer)
    assert called[2:] == ["decode", "decode"]
    sys.modules.pop("tilewise.compat.vllm_backend", None)


@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", ["decode", "speculative", "mixed", "padded decode", "prompts"])
def test_ranks_that_share_caches(backend, kind, layer, interleave):
    """Decode context parallelism: each of three ranks has its own query heads, all keys' heads, and every third run of a sequence's tokens."""
    (lengths, new, padding), (given, options), world, heads = BATCHES[kind], LAYERS[layer], 3, 2
    common, blocks = standin.batch(lengths, new, BLOCK, padding)
    ranks = standin.Ranks(world)
    sys.modules["vllm.distributed.parallel_state"].get_dcp_group = lambda: ranks
    of_heads = {name: torch.linspace(-1, 1, world * heads) for name in given if name in ("sinks", "alibi_slopes")}
    options = options | {{"sinks": "sink"}.get(name, name): x for name, x in of_heads.items()}
    keys, values = ([normal(n, 1, DIM, seed=seed + b) for b, n in enumerate(lengths)] for seed in (10, 20))
    query = normal(sum(new) + padding, world * heads, DIM, seed=5)

    def slots(rank):
        found = []
        for row, n in zip(common.block_table_tensor.long(), lengths, strict=True):
            at = torch.arange(n)
            local = at // (world * interleave) * interleave + at % interleave
            found.append(torch.where(at // interleave % world == rank, row[local // BLOCK] * BLOCK + local % BLOCK, -1))
        return torch.cat(found)

    def work(rank):
        mine = slice(rank * heads, (rank + 1) * heads)
        own = given | {name: x[mine].tolist() if name == "alibi_slopes" else x[mine] for name, x in of_heads.items()}
        impl = backend.Impl(heads, DIM, 0.3, 1, **own)
        impl.dcp_world_size, impl.dcp_rank = world, rank
        eight = layer == "e4m3"
        cache = torch.full((blocks, 1, BLOCK, 2 * DIM), 0x7F if eight else torch.nan, dtype=torch.uint8 if eight else torch.float32)
        impl.do_kv_cache_update(LAYER, torch.cat(keys), torch.cat(values), cache, slots(rank))
        metadata = backend.Builder(None, [], config(interleave), torch.device("cpu")).build(0, common)
        output = torch.full_like(query[:, mine], torch.nan)
        return impl.forward(LAYER, query[:, mine], None, None, cache, metadata, output)

    held(torch.cat(ranks.run(work), 1), query, keys, values, new, layer, options)


def test_a_cache_of_one_head_is_read_where_it_lies(backend, monkeypatch):
    """Its stride of heads means nothing: vLLM may have any there."""
    common, blocks = standin.batch([40, 20], [1, 1], BLOCK)
    memory = normal(blocks, BLOCK, 1, 2 * DIM, seed=1)
    cache = memory.as_strided((blocks, 1, BLOCK, 2 * DIM), (BLOCK * 2 * DIM, 1, 2 * DIM, 1))
    impl = backend.Impl(HEADS, DIM, 0.3, 1)
    seen = []
    monkeypatch.setattr(backend, "decode", lambda q, k, v, **words: seen.extend((k, v)) or words["out"].zero_())
    builder = backend.Builder(None, [], config(), torch.device("cpu"))
    query = normal(2, HEADS, DIM, seed=2)
    impl.forward(LAYER, query, None, None, cache, builder.build(0, common), torch.empty_like(query))
    assert seen[0].data_ptr() == memory.data_ptr() and seen[1].data_ptr() == memory.data_ptr() + DIM * 4
    assert seen[0].shape == (blocks, BLOCK, 1, DIM) and torch.equal(seen[0][3, 2, 0], memory[3, 2, 0, :DIM])
    chunks = vllm_chunks.Chunks(torch.tensor([0, 20]), torch.zeros(20, dtype=torch.int64), torch.arange(20), common.block_table_tensor[1:])
    first, second = common.block_table_tensor[1, :2].tolist()
    assert torch.equal(torch.cat(chunks.copied(cache), -1), torch.cat([memory[first], memory[second, :4]]))
    views = impl._views(cache)
    assert impl._views(cache)[0] is views[0], "made once a layer"


def test_what_it_answers(backend):
    Backend = backend.Backend
    assert (Backend.get_name(), Backend.get_impl_cls(), Backend.get_builder_cls()) == ("CPU_ATTN", backend.Impl, backend.Builder)
    assert Backend.get_kv_cache_shape(7, 16, 2, 64) == (7, 2, 16, 128) and not Backend.forward_includes_kv_cache_update
    assert [Backend.get_kv_cache_stride_order(layers) for layers in (False, True)] == [(0, 2, 1, 3), (1, 0, 3, 2, 4)]
    assert Backend.get_supported_kernel_block_sizes()[0].base == Backend.get_preferred_block_size(16) == 16
    assert Backend.supports_sink() and Backend.supports_sliding_window() and Backend.supports_batch_invariance() and not Backend.is_mla()
    assert backend.Builder._cudagraph_support is standin.AttentionCGSupport.UNIFORM_BATCH
    words = {"block_size": 16, "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False}

    def says(head_size=64, dtype=torch.bfloat16, cache="auto", capability=(9, 0)):
        major, minor = capability
        return Backend.supports_combination(head_size, dtype, cache, *words.values(), SimpleNamespace(major=major, minor=minor))

    assert says() is says(head_size=256, cache="fp8") is says(dtype=torch.float16) is says(dtype=torch.float32) is None
    assert "multiples of 8, up to 256, not 320" in says(head_size=320) and "not 20" in says(head_size=20)
    assert "of e4m3 with a scale a layer (auto, float16, bfloat16, fp8, fp8_e4m3), not fp8_e5m2" in says(cache="fp8_e5m2")
    assert says(capability=(8, 0)) == "tilewise decodes on GPUs of compute capability 9.0 (H100, H200), not 8.0"


def test_on_a_gpu_it_has_another_name_and_no_fp32(monkeypatch):
    standin.install(monkeypatch, cpu=False)
    module = importlib.import_module("tilewise.compat.vllm_backend")
    try:
        assert module.Backend.get_name() == "CUSTOM"
        assert [module.Backend.get_preferred_block_size(size) for size in (16, 128)] == [64, 128]
        assert "in pieces of 16 bytes, which a head size of 72 is no multiple of" in module.why_not(72, torch.bfloat16, "fp8")
        assert module.why_not(80, torch.bfloat16, "fp8") is module.why_not(72, torch.bfloat16, "auto") is None
        assert module.why_not(64, torch.float32, None) == "tilewise serves float32 on CPUs alone; load the model in bfloat16 or float16"
    finally:
        sys.modules.pop("tilewise.compat.vllm_backend", None)


REFUSED = {
    "head size": (lambda b: b.Impl(4, 20, 1.0), "multiples of 8, up to 256, not 20"),
    "encoder": (lambda b: b.Impl(4, 64, 1.0, attn_type=standin.AttentionType.ENCODER_ONLY), "serves decoder layers here"),
    "cache": (lambda b: b.Impl(4, 64, 1.0, kv_cache_dtype="int8_per_token_head"), "not int8_per_token_head"),
    "unknown": (lambda b: b.Impl(4, 64, 1.0, use_alibi_sqrt=True), "does not know use_alibi_sqrt of this layer"),
    "unknown tensor": (lambda b: b.Impl(4, 64, 1.0, novel=torch.ones(2)), "does not know novel of this layer"),
    "window": (lambda b: b.Builder(None, [], config(rswa_window=9), None), "R-SWA"),
}


@pytest.mark.parametrize("make, sentence", REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_where_it_is_made(backend, make, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        make(backend)
    assert backend.Impl(4, 64, 1.0, use_alibi_sqrt=False, chunk_lookback=-1).num_kv_heads == 4


def test_odd_batches(backend):
    common, _ = standin.batch([40, 20], [1, 1], BLOCK)
    builder = backend.Builder(None, [], config(), torch.device("cpu"))
    common.causal = torch.tensor([True, False])
    with pytest.raises(UnsupportedError, match="serves causal layers in vLLM"):
        builder.build(0, common)
    common.causal = True
    metadata = builder.build(0, common)
    other = builder.update_block_table(metadata, common.block_table_tensor + 1, common.slot_mapping[:1])
    assert torch.equal(other.block_table, metadata.block_table + 1) and other.slot_mapping.shape == (1,) and other.uniform == 1
    impl = backend.Impl(HEADS, DIM, 0.3, HEADS_K)
    output = torch.full((2, HEADS, DIM), torch.nan)
    assert impl.forward(LAYER, output.clone(), None, None, torch.empty(0), None, output).count_nonzero() == 0  # the profile
    impl.do_kv_cache_update(LAYER, output, output, torch.empty(0), common.slot_mapping)


def test_batch_invariance_is_pieces_of_one_size(monkeypatch):
    standin.install(monkeypatch, invariant=True)
    module = importlib.import_module("tilewise.compat.vllm_backend")
    try:
        assert module.Impl(4, 64, 1.0).options["split"] == 256
    finally:
        sys.modules.pop("tilewise.compat.vllm_backend", None)


def test_registering(monkeypatch):
    standin.install(monkeypatch)
    registered = sys.modules["vllm.v1.attention.backends.registry"].registered
    for variable in (vllm.CPU, vllm.MLA):
        monkeypatch.delenv(variable, raising=False)
    vllm.register()
    vllm.register()
    assert registered == {"CUSTOM": "tilewise.compat.vllm_backend.Backend"}
    monkeypatch.setenv(vllm.CPU, "1")
    vllm.register()
    assert registered["CPU_ATTN"] == registered["CUSTOM"] and "tilewise.compat.vllm_backend" not in sys.modules
    monkeypatch.setenv(vllm.MLA, "1")
    vllm.register()
    assert registered["FLASH_ATTN_MLA"] == "tilewise.compat.vllm_mla.Backend"


def test_vllm_finds_it():
    tomllib = importlib.import_module("tomllib")
    path = os.path.join(os.path.dirname(__file__), "..", "..", "pyproject.toml")
    with open(path, "rb") as file:
        points = tomllib.load(file)["project"]["entry-points"]["vllm.general_plugins"]
    module, _, name = points["tilewise"].partition(":")
    assert getattr(importlib.import_module(module), name) is vllm.register


PYTHON = os.environ.get("TILEWISE_TEST_VLLM", "")  # the interpreter of an environment that has vLLM


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="TILEWISE_TEST_VLLM names no interpreter of an environment with vLLM")
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_the_engine_says_the_same_tokens(model, tmp_path):
    """vLLM's own engine with random models in fp32: chunked prefill, a prefix cache, mixed batches; its own backend and this one."""
    tool = os.path.join(os.path.dirname(__file__), "..", "..", "tools", "vllm_tokens.py")
    said = {}
    for backend in ("theirs", "tilewise"):
        done = subprocess.run([PYTHON, tool, model, backend, str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        said[backend] = json.loads((tmp_path / f"{backend}.json").read_text())
    assert said["tilewise"]["backend"] == "tilewise.compat.vllm_backend" != said["theirs"]["backend"]
    assert said["tilewise"]["tokens"] == said["theirs"]["tokens"] and sum(map(len, said["theirs"]["tokens"])) > 200
    for a, b in zip(said["tilewise"]["logprobs"], said["theirs"]["logprobs"], strict=True):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="TILEWISE_TEST_VLLM names no interpreter of an environment with vLLM")
def test_the_standin_is_like_vllm():
    """The parameters that vLLM passes are those that are taken here."""
    code = """
        import dataclasses, inspect, json
        from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
        from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
        print(json.dumps({
            "common": [each.name for each in dataclasses.fields(CommonAttentionMetadata)],
            "impl": list(inspect.signature(TritonAttentionImpl.__init__).parameters),
            "forward": list(inspect.signature(TritonAttentionImpl.forward).parameters),
            "write": list(inspect.signature(TritonAttentionImpl.do_kv_cache_update).parameters),
            "build": list(inspect.signature(AttentionMetadataBuilder.build).parameters),
            "table": list(inspect.signature(AttentionMetadataBuilder.update_block_table).parameters),
        }))
    """
    out = subprocess.run([PYTHON, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True).stdout
    theirs = json.loads(out.splitlines()[-1])
    source = importlib.util.find_spec("tilewise.compat.vllm_backend").origin
    assert {each.name for each in dataclasses.fields(standin.CommonAttentionMetadata)} <= set(theirs["common"])
    with pytest.MonkeyPatch.context() as patch:
        standin.install(patch)
        module = importlib.import_module("tilewise.compat.vllm_backend")
        assert module.__file__ == source
        own = list(inspect.signature(module.Impl.__init__).parameters)
        assert [name for name in own if name != "others"] == [name for name in theirs["impl"] if name in own]
        for name, function in (("forward", module.Impl.forward), ("write", module.Impl.do_kv_cache_update)):
            assert list(inspect.signature(function).parameters) == theirs[name]
        for name, function in (("build", module.Builder.build), ("table", module.Builder.update_block_table)):
            assert list(inspect.signature(function).parameters) == theirs[name]
        sys.modules.pop("tilewise.compat.vllm_backend", None)
