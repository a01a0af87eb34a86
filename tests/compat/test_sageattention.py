"""sageattention's functions: what each computes, where 8 bits pay, errors with a V far from 0, ComfyUI's and diffusers' ways to call them."""

import inspect
import subprocess
import sys
import textwrap
from importlib import metadata
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tilewise import compat
from tilewise.bench.eight_bits import PER_TENSOR, SAGE, video_errors, video_inputs
from tilewise.compat import _paying, sageattention
from tilewise.errors import ShapeError, UnsupportedError

PADDED = {  # every function of padded tensors, and what it rounds
    "sageattn": "int8",
    "sageattn_qk_int8_pv_fp8_cuda": "int8",
    "sageattn_qk_int8_pv_fp8_cuda_sm90": "int8",
    "sageattn_qk_int8_pv_fp16_cuda": "int8_qk",
    "sageattn_qk_int8_pv_fp16_triton": "int8_qk",
}


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def inputs(seqlen_q=70, seqlen_k=300, heads=(4, 2), dim=128, dtype=torch.bfloat16):
    """(batch, seqlen, heads, head_dim)."""
    return normal(2, seqlen_q, heads[0], dim, dtype=dtype), *(normal(2, seqlen_k, heads[1], dim, seed=seed, dtype=dtype) for seed in (1, 2))


@pytest.fixture
def pays(monkeypatch):
    """As on a machine that has the kernels."""
    monkeypatch.setattr(_paying, "_kernel", lambda *args: True)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", PADDED)
def test_each_is_the_recipe_of_its_name(name, layout, pays):
    q, k, v = inputs(seqlen_q=9, seqlen_k=_paying.FEWEST_KEYS + 40)
    want, want_lse = tw.attention(q, k, v, precision=PADDED[name], return_lse=True)
    given = [x.transpose(1, 2) if layout == "HND" else x for x in (q, k, v)]
    o, lse = getattr(sageattention, name)(*given, tensor_layout=layout, return_lse=True)
    assert torch.equal(o.transpose(1, 2) if layout == "HND" else o, want) and torch.equal(lse, want_lse)
    assert torch.equal(getattr(sageattention, name)(*given, layout), o)


def test_packed(pays):
    q, k, v = (x[0] for x in inputs(2500, 2500, (2, 2)))
    cu = torch.tensor([0, 900, 2500], dtype=torch.int32)
    for is_causal in (False, True):
        want = tw.attention_varlen(q, k, v, cu, cu, causal=is_causal, precision="int8_qk", scale=0.1)
        assert torch.equal(sageattention.sageattn_varlen(q, k, v, cu, cu, 1600, 1600, is_causal, 0.1), want)
    apart = torch.tensor([0, 1000, 2500], dtype=torch.int32)
    want = tw.attention_varlen(q, k, v, cu, apart, mask=tw.Causal("top_left"), precision="int8_qk")
    assert torch.equal(sageattention.sageattn_varlen(q, k, v, cu, apart, 1600, 1500, True, smooth_k=False), want)


def test_sixteen_bits_where_eight_do_not_pay(pays):
    few, small, single = inputs(), inputs(4, 2100, dim=64), inputs(4, 2100, dtype=torch.float32)
    for q, k, v in (few, small, single):
        assert torch.equal(sageattention.sageattn(q, k, v, "NHD"), tw.attention(q, k, v))
    q, k, v = inputs(4, 2100)
    numbers = normal(4, 2100, seed=3)
    assert torch.equal(sageattention.sageattn(q, k, v, "NHD", attn_mask=numbers), tw.attention(q, k, v, bias=numbers[None, None]))
    assert not torch.equal(sageattention.sageattn(q, k, v, "NHD"), tw.attention(q, k, v))
    for precision in (None, "fp8"):  # by name, whatever pays
        asked = sageattention.sageattn(q, k, v, "NHD", precision=precision)
        assert torch.equal(asked, tw.attention(q, k, v, precision=precision))


def test_without_a_kernel_it_is_sixteen_bits():
    q, k, v = inputs(4, 2100)
    assert torch.equal(sageattention.sageattn(q, k, v, "NHD"), tw.attention(q, k, v))


def test_masks_and_causal(pays):
    q, k, v = inputs(2100, 2100, (2, 2))
    q, k, v = (x[:1] for x in (q, k, v))
    assert torch.equal(sageattention.sageattn(q, k, v, "NHD", True), tw.attention(q, k, v, causal=True, precision="int8"))
    top_left = tw.attention(q[:, :9], k, v, mask=tw.Causal("top_left"), precision="int8")
    assert torch.equal(sageattention.sageattn(q[:, :9], k, v, "NHD", True), top_left)
    shown = torch.rand(1, 1, 9, 2100, generator=torch.Generator().manual_seed(1)) < 0.5
    want = tw.attention(q[:, :9], k, v, mask=tw.Dense(shown), precision="int8")
    assert torch.equal(sageattention.sageattn(q[:, :9], k, v, "NHD", attn_mask=shown), want)
    keys = shown[..., :1, :]  # of keys, as text encoders hand it on
    want = tw.attention(q[:, :9], k, v, mask=tw.Dense(keys), precision="int8_qk")
    assert torch.equal(sageattention.sageattn_qk_int8_pv_fp16_cuda(q[:, :9], k, v, "NHD", attn_mask=keys), want)


def test_in_the_place_of_torchs_function():
    q, k, v = (x.transpose(1, 2) for x in inputs(30, 30, (4, 4), 16, torch.float32))
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.3}
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(sageattention.sageattn(q, k, v, **options), want, atol=1e-5, rtol=1e-5)


def test_compiled_whole(pays):
    q, k, v = inputs(9, 2100)
    compiled = torch.compile(lambda q, k, v: sageattention.sageattn(q, k, v, tensor_layout="NHD"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), tw.attention(q, k, v, precision="int8"))


def test_what_comfyui_looks_for():
    assert "attn_mask" in inspect.signature(sageattention.sageattn).parameters
    q, k, v = (x.transpose(1, 2) for x in inputs(40, 50, (4, 4), 64))
    mask = normal(2, 1, 40, 50, seed=4)
    options = {"attn_mask": mask, "is_causal": False, "tensor_layout": "HND", "sm_scale": None, "smooth_k": False}
    assert sageattention.sageattn(q, k, v, **options).shape == q.shape


def rms(o, exact):
    return float((o.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("seqlen_k", [5_000, 40_000, pytest.param(163_840, marks=pytest.mark.slow)])
def test_values_far_from_zero_do_no_harm(seqlen_k):
    """At the length of a video of a few seconds, for some of its queries: keys and values are scaled over all of it."""
    q, k, v = video_inputs(10.0, seqlen_k)
    exact = tw.attention(q.double(), k.double(), v.double())
    error = {name: rms(sageattention.sageattn(q, k, v, "NHD", precision=name), exact) for name in (None, "int8", "int8_qk")}
    assert error["int8_qk"] < error["int8"] < 1.2 * error[None]  # bf16 has multiples of 1/16 near 10
    of_ways = video_errors(10.0, seqlen_k)
    assert of_ways["int8_qk"] < of_ways["int8"] < 0.012 and 5 * of_ways["int8"] < min(of_ways[SAGE], of_ways[PER_TENSOR])


@pytest.mark.slow
def test_many_queries_of_a_long_video():
    q, k, v = video_inputs(10.0, 163_840, queries=1024, heads=2)
    exact = tw.attention(q.double(), k.double(), v.double())
    assert rms(sageattention.sageattn(q, k, v, "NHD", precision="int8"), exact) < 1.2 * rms(tw.attention(q, k, v), exact)


X = torch.zeros(1, 2, 5, 8)
REFUSED = {
    "layout": (lambda: sageattention.sageattn(X, X, X, "BSH"), ShapeError, r"sageattention.sageattn: tensor_layout must be 'HND' or 'NHD'"),
    "dropout": (lambda: sageattention.sageattn(X, X, X, dropout_p=0.5), UnsupportedError, "dropout_p must be 0, got 0.5"),
    "unknown": (lambda: sageattention.sageattn(X, X, X, window=3), UnsupportedError, "window is not known; leave it out, or call"),
    "scales": (
        lambda: sageattention.sageattn(X, X, X, sm_scale=1.0, scale=2.0),
        ShapeError,
        "sm_scale is 1.0, and by torch's word it is 2.0; give one",
    ),
    "both": (lambda: sageattention.sageattn(X, X, X, is_causal=True, attn_mask=X), ShapeError, "attn_mask must be None where is_causal"),
    "mask": (lambda: sageattention.sageattn(X, X, X, attn_mask=X[..., :3]), ShapeError, "attn_mask of shape .* does not broadcast"),
    "no tensor": (lambda: sageattention.sageattn(X, X, [X]), ShapeError, "v must be a torch.Tensor"),
    "packed mask": (
        lambda: sageattention.sageattn_varlen(X[0], X[0], X[0], None, None, 5, 5, attn_mask=X),
        UnsupportedError,
        "attn_mask cannot be given for packed",
    ),
    "precision": (lambda: sageattention.sageattn(X, X, X, precision="int4"), ShapeError, "precision must be one of"),
}


@pytest.mark.parametrize("call, error, message", REFUSED.values(), ids=REFUSED)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, RuntimeError)


def test_installed():
    assert find_spec("sageattention") is None
    compat.install("sageattention")
    try:
        from sageattention import sageattn
        from sageattention.core import sageattn_varlen

        assert sageattn is sageattention.sageattn and sageattn_varlen is sageattention.sageattn_varlen
        assert metadata.version("sageattention") == sageattention.__version__ == "2.2.0+tilewise"
    finally:
        compat.uninstall("sageattention")
    assert find_spec("sageattention") is None


@pytest.mark.slow
def test_the_names_of_diffusers():
    if find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed")
    code = """
        import torch
        from tilewise import attention, compat
        compat.install("sageattention")
        from diffusers import WanTransformer3DModel
        from diffusers.models import attention_dispatch as dispatch
        assert dispatch._CAN_USE_SAGE_ATTN
        options = {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16}
        model = WanTransformer3DModel(**options, freq_dim=32, ffn_dim=32, num_layers=1, rope_max_seq_len=32).eval().bfloat16()
        x, text = torch.randn(1, 4, 2, 8, 8).bfloat16(), torch.randn(1, 8, 16).bfloat16()
        with torch.no_grad():
            want = model(x, torch.tensor([1]), text).sample
            for name in dispatch.AttentionBackendName:
                if "sage" in name.value and "hub" not in name.value:
                    model.set_attention_backend(name.value)
                    torch.testing.assert_close(model(x, torch.tensor([1]), text).sample, want, atol=0.03, rtol=0.03)
                    print(name.value)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True).stdout
    assert len(out.split()) == 6


@pytest.mark.parametrize(("backend", "pays"), [("hopper", True), ("triton", False), ("tiled", False)])
def test_it_pays_where_it_was_measured_to(backend, pays, monkeypatch):
    """By Triton, whose kernels of 8 bits were slower than those of 16 bits where they were timed, calls stay in 16."""
    monkeypatch.setattr(_paying.dispatch, "choose", lambda problem: SimpleNamespace(name=backend))
    _paying._kernel.cache_clear()
    try:
        q, k, v = (torch.empty(1, n, 2, 128, dtype=torch.bfloat16) for n in (4, _paying.FEWEST_KEYS + 1, _paying.FEWEST_KEYS + 1))
        assert _paying.paying("int8", q, k, v) == ("int8" if pays else None)
    finally:
        _paying._kernel.cache_clear()
