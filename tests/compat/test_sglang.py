"""SGLang's backend: batches of every kind in pages of several sizes against attention alone, pools of windows and of latent heads, graphs' tensors,
refusals; the engine."""

import importlib
import inspect
import json
import os
import subprocess
import sys
import textwrap

import pytest
import sglang_standin as standin
import torch

import tilewise as tw
from tilewise.compat import sglang
from tilewise.errors import UnsupportedError

HEADS, HEADS_K, DIM = 4, 2, 16
BATCHES = {  # tokens of each request, and of them new
    "decode": ([40, 7, 130], [1, 1, 1]),
    "prompts": ([33, 5, 64], [33, 5, 64]),
    "chunks": ([100, 9, 130], [36, 4, 66]),
    "mixed": ([40, 7, 130], [1, 7, 50]),
    "one": ([1], [1]),
}
LAYERS = {
    "plain": ({}, {}, {}),
    "window": ({"sliding_window_size": 8}, {}, {"mask": tw.SlidingWindow(8, 0)}),
    "softcap": ({"logit_cap": 2.0}, {}, {"softcap": 2.0}),
    "sinks": ({}, {"sinks": torch.linspace(-1, 1, HEADS).bfloat16()}, {"sink": torch.linspace(-1, 1, HEADS).bfloat16().float()}),
    "values of another width": ({"v_head_dim": 8}, {}, {}),
    "both ways": ({"attn_type": standin.AttentionType.ENCODER_ONLY}, {}, {"causal": False}),
    "a window both ways": (
        {"attn_type": standin.AttentionType.ENCODER_ONLY, "sliding_window_size": 5},
        {},
        {"causal": False, "mask": tw.SlidingWindow(5, 5)},
    ),
}


@pytest.fixture
def module(monkeypatch):
    standin.install(monkeypatch)
    yield importlib.import_module("tilewise.compat.sglang_backend")
    sys.modules.pop("tilewise.compat.sglang_backend", None)


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def run(backend, runner, layer, lengths, new, which, words, heads_k=HEADS_K):
    """What the backend says of a batch whose earlier tokens are in the pool, and the keys and values of each request."""
    dim, dim_v = layer.qk_head_dim, layer.v_head_dim
    keys = [normal(n, heads_k, dim, seed=10 + b) for b, n in enumerate(lengths)]
    values = [normal(n, heads_k, dim_v, seed=20 + b) for b, n in enumerate(lengths)]
    if any(n > m for n, m in zip(lengths, new, strict=True)):  # an earlier batch
        held = [(r, b, n - m) for r, b, n, m in zip(which, range(len(which)), lengths, new, strict=True) if n > m]
        early = standin.batch(runner, [r for r, *_ in held], [n for *_, n in held], [n for *_, n in held], decoding=False)
        backend.init_forward_metadata(early)
        rows = [torch.cat([x[b][:n] for _, b, n in held]).flatten(1) for x in (keys, values)]
        backend.forward(normal(rows[0].shape[0], layer.tp_q_head_num * dim, seed=1), *per_head(layer, *rows), layer, early, **words)
    batch = standin.batch(runner, which, lengths, new)
    query = normal(sum(new), layer.tp_q_head_num * dim, seed=5)
    rows = [torch.cat([x[b][n - m :] for b, (n, m) in enumerate(zip(lengths, new, strict=True))]).flatten(1) for x in (keys, values)]
    backend.init_forward_metadata(batch)
    return backend.forward(query, *per_head(layer, *rows), layer, batch, **words), query, keys, values


def per_head(layer, k, v):
    """As RadixAttention hands them on."""
    return k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)


def check(output, query, keys, values, layer, new, options):
    start, heads = 0, layer.tp_q_head_num
    assert output.shape == (sum(new), heads * layer.v_head_dim)
    for k, v, m in zip(keys, values, new, strict=True):
        q = query[start : start + m].view(1, m, heads, layer.qk_head_dim)
        want = tw.attention(q, k[None], v[None], **{"causal": True, "scale": 0.3, **options})[0].flatten(1)
        torch.testing.assert_close(output[start : start + m], want, atol=2e-5, rtol=2e-5)
        start += m


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", BATCHES)
def test_batches(module, name, kind, page):
    (lengths, new), (given, words, options) = BATCHES[name], LAYERS[kind]
    if "both ways" in kind and name != "prompts":
        return  # an encoder sees whole prompts
    layer = standin.layer(HEADS, HEADS_K, DIM, **given)
    pool = standin.Pool(standin.slots_of(5, page), HEADS_K, DIM, layer.v_head_dim)
    runner = standin.runner(pool, 5, page)
    which = [3, 0, 4][: len(lengths)]
    output, query, keys, values = run(module.Backend(runner), runner, layer, lengths, new, which, words)
    check(output, query, keys, values, layer, new, options)


def test_a_pool_of_windows_has_places_of_its_own(module):
    pool = standin.WindowPool(standin.slots_of(3, 1), HEADS_K, DIM, DIM)
    runner, layer = standin.runner(pool, 3), standin.layer(HEADS, HEADS_K, DIM, sliding_window_size=20)
    for lengths, new in BATCHES["decode"], BATCHES["chunks"]:
        pool.k[0].fill_(torch.nan)
        output, query, keys, values = run(module.Backend(runner), runner, layer, lengths, new, [2, 0, 1], {})
        check(output, query, keys, values, layer, new, {"mask": tw.SlidingWindow(20, 0)})


def test_caches_of_e4m3(module):
    half, quarter = torch.tensor(0.5), torch.tensor([0.25])
    pool = standin.Pool(standin.slots_of(3, 16), HEADS_K, DIM, DIM, dtype=torch.float8_e4m3fn)
    runner = standin.runner(pool, 3, 16, dtype=torch.float8_e4m3fn)
    for scales in (half, quarter), (None, None):
        layer = standin.layer(HEADS, HEADS_K, DIM, k_scale=scales[0], v_scale=scales[1])
        lengths, new = BATCHES["decode"]
        output, query, *both = run(module.Backend(runner), runner, layer, lengths, new, [2, 0, 1], {})
        for xs, scale in zip(both, scales, strict=True):
            unit = 1.0 if scale is None else scale
            xs[:] = [(x / unit).to(torch.float8_e4m3fn).float() * unit for x in xs]
        check(output, query, *both, layer, new, {})


@pytest.mark.parametrize("apart", [False, True], ids=["one key", "nope and rope apart"])
def test_latent_heads(module, apart):
    rank, rope = 32, 16
    pool = standin.LatentPool(standin.slots_of(3, 1), rank, rope)
    runner, layer = standin.runner(pool, 3, latent=True), standin.layer(HEADS, 1, rank + rope, rank)
    for lengths, new in BATCHES["decode"], BATCHES["chunks"]:
        backend, which = module.Backend(runner), [2, 0, 1]
        held = [normal(n, 1, rank + rope, seed=10 + b) for b, n in enumerate(lengths)]
        for b, n in enumerate(lengths):
            pool.k[0][runner.req_to_token_pool.req_to_token[which[b], :n].long()] = held[b]
        batch = standin.batch(runner, which, lengths, new)
        fresh = torch.cat([x[n - m :] for x, n, m in zip(held, lengths, new, strict=True)])
        pool.k[0][batch.out_cache_loc] = torch.nan  # the backend writes it
        query = normal(sum(new), HEADS * (rank + rope), seed=5)
        backend.init_forward_metadata(batch)
        if apart:
            q = query.view(-1, HEADS, rank + rope)
            words = {"q_rope": q[..., rank:], "k_rope": fresh[..., rank:]}
            output = backend.forward(q[..., :rank], fresh[..., :rank], fresh[..., :rank], layer, batch, **words)
        else:
            output = backend.forward(query, fresh, fresh[..., :rank], layer, batch)
        check(output, query, held, [x[..., :rank] for x in held], layer, new, {})


def test_whole_prompts_of_a_latent_model_are_read_before_they_are_stored(module):
    pool = standin.LatentPool(standin.slots_of(3, 1), 32, 16)
    runner, layer = standin.runner(pool, 3, latent=True), standin.layer(HEADS, HEADS, 24, DIM)
    lengths, new = BATCHES["prompts"]
    output, query, keys, values = run(module.Backend(runner), runner, layer, lengths, new, [2, 0, 1], {"save_kv_cache": False}, HEADS)
    check(output, query, keys, values, layer, new, {})
    assert pool.k[0].isnan().all()


@pytest.mark.parametrize("windows", [False, True])
def test_graphs_read_the_same_tensors_for_every_batch(module, windows):
    """Two batches through the tensors of one capture; the second's are what a replay would read."""
    make = standin.WindowPool if windows else standin.Pool
    pool = make(standin.slots_of(4, 1), HEADS_K, DIM, DIM)
    runner = standin.runner(pool, 4)
    layer = standin.layer(HEADS, HEADS_K, DIM, sliding_window_size=30 if windows else -1)
    backend = module.Backend(runner)
    backend.init_cuda_graph_state(4, 4)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    seen = []
    for seed, (which, lengths) in enumerate([([1, 2], [30, 90]), ([3, 0], [77, 4])]):
        keys, values = ([normal(n, HEADS_K, DIM, seed=seed + s + b) for b, n in enumerate(lengths)] for s in (30, 40))
        slots = [runner.req_to_token_pool.req_to_token[r, :n].long() for r, n in zip(which, lengths, strict=True)]
        for at, k, v in zip(slots, keys, values, strict=True):
            at = pool.translate_loc_from_full_to_swa(at) if windows else at
            pool.k[0][at], pool.v[0][at] = k, v
        batch, query = standin.batch(runner, which, lengths, [1, 1]), normal(2, HEADS * DIM, seed=seed)
        backend.init_forward_metadata_out_graph(batch, in_capture=seed == 0)
        seen.append({name: x.data_ptr() for name, x in vars(backend.forward_metadata).items() if isinstance(x, torch.Tensor)})
        fresh = [torch.cat([x[-1:] for x in xs]) for xs in (keys, values)]
        output = backend.forward(query, *fresh, layer, batch)
        check(output, query, keys, values, layer, [1, 1], {"mask": tw.SlidingWindow(30, 0)} if windows else {})
    assert seen[0] == seen[1] and len(seen[0]) == (4 if windows else 2)
    with pytest.raises(UnsupportedError, match="graphs of decode alone"):
        backend.init_forward_metadata_out_graph(standin.batch(runner, [0], [5], [5], decoding=False))


def test_padding_and_outputs_that_are_given(module):
    pool = standin.Pool(standin.slots_of(3, 1), HEADS_K, DIM, DIM)
    runner, layer = standin.runner(pool, 3), standin.layer(HEADS, HEADS_K, DIM)
    backend, batch = module.Backend(runner), standin.batch(runner, [1, 2], [6, 9], [6, 9], decoding=False)
    backend.init_forward_metadata(batch)
    rows = [normal(15, HEADS_K, DIM, seed=s) for s in (1, 2)]
    query = torch.cat([normal(15, HEADS * DIM, seed=3), torch.full((3, HEADS * DIM), torch.nan)])
    batch._attn_output = torch.full((18, HEADS * DIM), torch.nan)
    output = backend.forward(query, *rows, layer, batch)
    assert output.data_ptr() == batch._attn_output.data_ptr() and output[15:].count_nonzero() == 0
    check(output[:15], query, [rows[0][:6], rows[0][6:]], [rows[1][:6], rows[1][6:]], layer, [6, 9], {})


def test_deterministic_inference_is_pieces_of_one_size(module):
    pool = standin.Pool(standin.slots_of(3, 1), HEADS_K, DIM, DIM)
    backend = module.Backend(standin.runner(pool, 3, enable_deterministic_inference=True))
    assert backend._options(standin.layer())["split"] == 256


REFUSED = {
    "drafts": ({"speculative_algorithm": "EAGLE"}, {}, {}, "does not verify drafts"),
    "an encoder": ({}, {"is_encoder_decoder": True}, {}, "with an encoder"),
    "chunks": ({}, {"is_local_attention_model": True}, {}, "attention by chunks"),
    "a shared sequence": ({"attn_cp_size": 2}, {}, {}, "share one sequence among GPUs"),
    "e5m2": ({}, {}, {"kv_cache_dtype": torch.float8_e5m2}, "not of torch.float8_e5m2"),
    "mxfp8": ({}, {}, {"kv_cache_dtype": torch.float8_e4m3fn, "kv_cache_dtype_str": "mxfp8"}, "not of mxfp8"),
    "a kept prompt": ({}, {}, {"prefill_aware_swa": True}, "no window that keeps the prompt"),
}


@pytest.mark.parametrize("arguments, model, own, sentence", REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_when_the_server_starts(module, arguments, model, own, sentence):
    runner = standin.runner(standin.Pool(64, 1, 8, 8), 1, context=32, **arguments)
    vars(runner.model_config).update(model)
    vars(runner).update(own)
    with pytest.raises(UnsupportedError, match=sentence):
        module.Backend(runner)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"is_cross_attention": True}, "layers that see an encoder"),
        ({"attn_type": standin.AttentionType.DECODER_BIDIRECTIONAL}, "images both ways"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode=ALIBI"),
        ({"logit_cap": 3.0, "logit_capping_method": "sqrt"}, "logit_capping_method=sqrt"),
        ({"xai_temperature_len": 9}, "temperatures by position"),
    ],
)
def test_layers_that_are_not_served(module, given, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        module.options_of(standin.layer(**given))


def test_words_of_a_layer_that_are_not_known(module):
    runner = standin.runner(standin.Pool(64, HEADS_K, DIM, DIM), 1, context=32)
    backend = module.Backend(runner)
    with pytest.raises(UnsupportedError, match="before init_forward_metadata"):
        backend.forward_decode(normal(1, HEADS * DIM, seed=1), None, None, standin.layer(), None)
    backend.init_forward_metadata(batch := standin.batch(runner, [0], [3], [1]))
    with pytest.raises(UnsupportedError, match="does not know score_mod of this layer"):
        backend.forward_decode(normal(1, HEADS * DIM, seed=1), None, None, standin.layer(), batch, score_mod=max, rel_bias=None)


def test_registering(monkeypatch):
    standin.install(monkeypatch)
    sglang.register()
    sglang.register()
    arguments = sys.modules["sglang.srt.server_args"]
    for choices in (
        arguments.ATTENTION_BACKEND_CHOICES,
        arguments.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        arguments.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        assert choices == ["fa3", "tilewise"]
    create = sys.modules["sglang.srt.layers.attention.attention_registry"].ATTENTION_BACKENDS["tilewise"]
    assert "tilewise.compat.sglang_backend" not in sys.modules
    made = create(standin.runner(standin.Pool(64, 1, 8, 8), 1, context=32))
    assert type(made).__module__ == "tilewise.compat.sglang_backend"
    sys.modules.pop("tilewise.compat.sglang_backend", None)


def test_sglang_finds_it():
    tomllib = importlib.import_module("tomllib")
    path = os.path.join(os.path.dirname(__file__), "..", "..", "pyproject.toml")
    with open(path, "rb") as file:
        points = tomllib.load(file)["project"]["entry-points"]["sglang.srt.plugins"]
    name, _, function = points["tilewise"].partition(":")
    assert getattr(importlib.import_module(name), function) is sglang.register


def test_how_far_two_runs_agree(monkeypatch):
    """Up to each request's first other token."""
    monkeypatch.syspath_prepend(os.path.join(os.path.dirname(__file__), "..", "..", "tools"))
    tool = importlib.import_module("sglang_tokens")
    first = [{"tokens": [1, 2, 3], "logprobs": [-0.1, -0.2, -0.3]}, {"tokens": [4, 5], "logprobs": [-0.1, -0.4]}]
    other = [{"tokens": [1, 2, 4], "logprobs": [-0.1, -0.25, -0.9]}, {"tokens": [4, 5], "logprobs": [-0.1, -0.4]}]
    assert tool.agreement(first, other) == "4 of 5 tokens, log-probabilities at most 0.05 apart"
    assert tool.agreement(first, first) == "5 of 5 tokens, log-probabilities at most 0 apart"


PYTHON = os.environ.get("TILEWISE_TEST_SGLANG", "")  # the interpreter of an environment that has SGLang
NEEDS = pytest.mark.skipif(not PYTHON, reason="TILEWISE_TEST_SGLANG names no interpreter of an environment with SGLang")


@pytest.mark.slow
@NEEDS
def test_the_engine_says_the_same_tokens(tmp_path):
    """SGLang's own engine on a CPU with a random model in fp32: chunked prompts, a cached prefix, mixed lengths; its own backend and this one."""
    tool = os.path.join(os.path.dirname(__file__), "..", "..", "tools", "sglang_tokens.py")
    said = {}
    for backend in ("torch_native", "tilewise"):
        done = subprocess.run([PYTHON, tool, backend, str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        said[backend] = json.loads((tmp_path / f"{backend}.json").read_text())
    assert said["tilewise"] == said["torch_native"] and sum(map(len, said["tilewise"])) > 200


@pytest.mark.slow
@NEEDS
def test_the_standin_is_like_sglang():
    """What SGLang passes is what is taken here, by name and in its order."""
    code = """
        import inspect, json
        from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
        from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch
        names = lambda function: list(inspect.signature(function).parameters)
        print(json.dumps({
            "forward": names(AttentionBackend.forward_decode),
            "graph": names(AttentionBackend.init_forward_metadata_out_graph),
            "state": names(AttentionBackend.init_cuda_graph_state),
            "types": [each.name for each in AttentionType],
            "layer": sorted(vars(RadixAttention(4, 16, 0.3, 2, 0)).keys()),
            "write": names(MHATokenToKVPool.set_kv_buffer),
            "latent": names(MLATokenToKVPool.set_kv_buffer),
            "apart": names(MLATokenToKVPool.set_mla_kv_buffer),
            "place": names(KVWriteLoc),
            "batch": names(ForwardBatch),
        }))
    """
    out = subprocess.run([PYTHON, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True).stdout
    theirs = json.loads(out.splitlines()[-1])
    assert theirs["types"] == [each.name for each in standin.AttentionType]
    assert set(vars(standin.layer())) <= set(theirs["layer"])
    assert theirs["place"][:2] == ["loc", "swa_loc"]
    for name, function in (
        ("write", standin.Pool.set_kv_buffer),
        ("latent", standin.LatentPool.set_kv_buffer),
        ("apart", standin.LatentPool.set_mla_kv_buffer),
    ):
        own = list(inspect.signature(function).parameters)
        assert own == theirs[name][: len(own)]
    made = standin.batch(standin.runner(standin.Pool(64, 1, 8, 8), 1, context=32), [0], [3], [1])
    assert set(vars(made)) <= set(theirs["batch"])
    with pytest.MonkeyPatch.context() as patch:
        standin.install(patch)
        backend = importlib.import_module("tilewise.compat.sglang_backend").Backend
        for name, function in (
            ("forward", backend.forward_decode),
            ("graph", backend.init_forward_metadata_out_graph),
            ("state", backend.init_cuda_graph_state),
        ):
            own = [each for each in inspect.signature(function).parameters if each != "others"]
            assert own == [each for each in theirs[name] if each != "kwargs"]
        sys.modules.pop("tilewise.compat.sglang_backend", None)
