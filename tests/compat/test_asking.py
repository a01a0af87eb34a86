"""Models that never ask for an implementation of attention are told by their source, and by `check`."""

import pytest
import torch

from tilewise import compat
from tilewise.compat import _asking
from tilewise.errors import UnsupportedError


def test_peers_that_are_not_here_have_none(monkeypatch):
    monkeypatch.setattr(_asking._finder, "real_spec", lambda name: None)
    assert compat.silent_models() == {"transformers": (), "diffusers": ()}


def test_of_transformers():
    hf = pytest.importorskip("transformers", minversion="5")
    from hf_models import built

    from tilewise.compat import transformers as ours

    ours.register()
    silent = compat.silent_models()["transformers"]
    assert {"bloom", "falcon", "mpt", "deberta", "xlnet"} <= set(silent)
    assert not set(silent) & {"llama", "mistral", "gemma3", "bert", "modernbert", "t5", "whisper", "vit", "gpt_oss", "llama4", "llava"}
    for name in ("llama", "gemma3", "bert", "t5"):
        ours.check(built(name, "tilewise"))
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    for kind, config in (
        (hf.FalconModel, hf.FalconConfig(**sizes)),
        (hf.BloomModel, hf.BloomConfig(vocab_size=61, hidden_size=32, n_head=4, n_layer=1)),
    ):
        net = kind(config)
        net.set_attn_implementation("tilewise")
        with pytest.raises(
            UnsupportedError,
            match=rf"{kind.__name__} computes attention by itself in {kind.__name__[:6].rstrip('M')}\w*Attention, and does",
        ):
            ours.check(net)


def test_of_diffusers():
    """What `check` says is what a forward does: it calls the backend, or not."""
    peer = pytest.importorskip("diffusers")
    from tilewise.compat import diffusers as ours

    silent = compat.silent_models()["diffusers"]
    assert {"dit_transformer_2d", "unet_2d_condition", "pixart_transformer_2d"} <= set(silent)
    assert not set(silent) & {"transformer_flux", "transformer_wan", "transformer_qwenimage", "transformer_hunyuan_video"}
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 1, "sample_size": 8, "patch_size": 2}
    with pytest.raises(
        UnsupportedError,
        match=r"DiTTransformer2DModel computes attention by itself in AttnProcessor2_0, .* within tilewise.compat.sdpa.patch",
    ):
        ours.check(peer.DiTTransformer2DModel(**sizes, norm_num_groups=2))
    wan = peer.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
    )
    ours.check(wan)
    assert isinstance(wan, torch.nn.Module)
