"""tilewise as an attention backend of diffusers, in its models."""

import inspect

import pytest
import torch
from torch_operators import normal

import tilewise as tw
from tilewise.errors import ShapeError, UnsupportedError

peer = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install -c constraints.txt diffusers")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
from tilewise.compat import diffusers  # noqa: E402 (after what it stands for)


def state():
    """All that registering touches."""
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    tables = registry._backends, registry._constraints, registry._supported_arg_names, names._member_map_, names._value2member_map_
    return [dict(table) for table in tables], list(names), list(names._member_names_), registry._active_backend


@pytest.fixture
def registered():
    handle = diffusers.register()
    yield handle
    handle.remove()


def flux():
    torch.manual_seed(0)
    model = peer.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    options = {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 8, 32), "pooled_projections": (1, 32)}
    inputs = {name: normal(*shape, dtype=torch.float32, seed=seed) for seed, (name, shape) in enumerate(options.items())}
    return model.eval(), inputs | {"timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}


def wan():
    torch.manual_seed(0)
    model = peer.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": normal(1, 4, 2, 8, 8, dtype=torch.float32),
        "encoder_hidden_states": normal(1, 8, 16, dtype=torch.float32, seed=1),
    }
    return model.eval(), inputs | {"timestep": torch.tensor([1])}


@pytest.mark.parametrize("make", [flux, wan])
def test_models_give_what_they_gave(make, registered, monkeypatch):
    model, inputs = make()
    calls, attention = [], diffusers.attention
    monkeypatch.setattr(diffusers, "attention", lambda *args, **options: calls.append(options) or attention(*args, **options))

    def step():
        loss = model(**inputs).sample.square().sum()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]

    want = step()
    assert not calls
    with dispatch.attention_backend("tilewise"):
        got = step()
    assert calls
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


def test_set_by_name_and_compiled_whole(registered):
    torch._dynamo.reset()
    model, inputs = flux()
    with torch.no_grad():
        want = model(**inputs).sample
        model.set_attention_backend("tilewise")
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).sample, want, atol=2e-6, rtol=2e-6)


def test_removing_leaves_diffusers_as_it_was():
    before, handle = state(), diffusers.register()
    assert dispatch.AttentionBackendName("tilewise") in dispatch._AttentionBackendRegistry.list_backends()
    with pytest.raises(RuntimeError, match="is registered already; remove"):
        diffusers.register()
    model, _ = flux()
    model.set_attention_backend("tilewise")
    model.reset_attention_backend()
    handle.remove()
    handle.remove()
    assert state() == before
    with pytest.raises(ValueError, match="tilewise"):
        dispatch.AttentionBackendName("tilewise")


def test_the_parameters_are_those_that_diffusers_passes():
    native = inspect.signature(dispatch._native_attention).parameters
    own = inspect.signature(diffusers.backend).parameters
    assert [(name, x.default) for name, x in own.items()] == [(name, x.default) for name, x in native.items()]


MASKS = {
    "none": (None, {}),
    "causal": (None, {"is_causal": True}),
    "keys": ((2, 7), {}),
    "pairs": ((5, 7), {}),
    "heads": ((4, 5, 7), {}),
    "all": ((2, 4, 5, 7), {}),
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape, options", MASKS.values(), ids=MASKS)
def test_masks_mean_what_they_mean_natively(shape, options, kind):
    q, k, v = normal(2, 5, 4, 8), normal(2, 7, 4, 8, seed=1), normal(2, 7, 4, 8, seed=2)
    mask = None if shape is None else normal(*shape, seed=3)
    if mask is not None and kind == "bool":
        mask = mask > -0.5
        mask[..., 0] = True
    got = diffusers.backend(q, k, v, mask, **options)
    torch.testing.assert_close(got, dispatch._native_attention(q, k, v, mask, **options), atol=1e-12, rtol=1e-12)


def test_grouped_heads_and_lse():
    q, k = normal(2, 5, 4, 8), normal(2, 5, 2, 8, seed=1)
    o, lse = diffusers.backend(q, k, k, is_causal=True, enable_gqa=True, return_lse=True)
    want, want_lse = tw.attention(q, k, k, causal=True, return_lse=True)
    assert torch.equal(o, want) and torch.equal(lse, want_lse.transpose(1, 2))


X = torch.zeros(2, 5, 4, 8)
REFUSED = {
    "parallel": (
        lambda: diffusers.backend(X, X, X, _parallel_config=object()),
        UnsupportedError,
        "_parallel_config is set, .*with another backend",
    ),
    "mask and causal": (
        lambda: diffusers.backend(X, X, X, torch.ones(5, 5) > 0, is_causal=True),
        ValueError,
        "attn_mask must be None where is_causal",
    ),
    "heads": (lambda: diffusers.backend(X, X[:, :, :2], X[:, :, :2]), ShapeError, "query has 4 heads and key 2; pass enable_gqa=True"),
    "mask's shape": (
        lambda: diffusers.backend(X, X, X, torch.zeros(3, 5)),
        ShapeError,
        r'^the diffusers backend "tilewise": attn_mask of shape \(3, 5\)',
    ),
    "dtype": (
        lambda: diffusers.backend(X, X.double(), X),
        ShapeError,
        r'^the diffusers backend "tilewise": key is torch.float64, but query is',
    ),
}


@pytest.mark.parametrize("call, error, message", REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_argument_and_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()
