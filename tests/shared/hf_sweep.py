"""Every model of transformers, as small as its config lets itself be made, with inputs that it takes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_MAPPING

VOCABULARY, LENGTH, IMAGE, MOST = 61, 24, 32, 8_000_000  # the most weights of a model that counts as small
CLOSE = 1e-5
SIZES = (  # and the names of the fields that are set to each
    (32, "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim encoder_hidden_size projection_dim decoder_hidden_size"),
    (32, "word_embed_proj_dim"),
    (48, "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner mlp_dim decoder_intermediate_size mlp_hidden_size"),
    (48, "shared_expert_intermediate_size intermediate_size_mlp"),
    (2, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers depth"),
    (2, "decoder_num_hidden_layers encoder_num_hidden_layers num_experts_per_tok n_group num_key_value_heads decoder_num_key_value_heads"),
    (
        4,
        "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads decoder_num_attention_heads patch_size",
    ),
    (4, "encoder_num_attention_heads num_experts num_local_experts n_routed_experts attention_heads"),
    (8, "head_dim d_kv attention_head_dim v_head_dim qk_nope_head_dim num_mel_bins kv_lora_rank window_size rotary_dim qk_rope_head_dim"),
    (16, "moe_intermediate_size q_lora_rank vocab_size_per_layer_input"),
    (7, "sliding_window"),
    (9, "attention_chunk_size"),
    (IMAGE, "image_size"),
    (VOCABULARY, "vocab_size"),
    (64, "max_position_embeddings n_positions max_target_positions"),
)
SMALL = {name: size for size, names in SIZES for name in names.split()}
LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "mlp_only_layers")  # one entry a layer, which the config makes again
IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id")


def classes(part: int = 0, parts: int = 1) -> list[type]:
    """The base models that say that their implementation of attention can be chosen: every `parts`-th from `part` on."""
    found = []
    for config in list(MODEL_MAPPING.keys())[part::parts]:
        with contextlib.suppress(ValueError):  # a class that transformers itself does not find
            kinds = MODEL_MAPPING[config]
            found += kinds if isinstance(kinds, tuple) else (kinds,)
    return [
        kind for kind in dict.fromkeys(found) if getattr(kind, "_can_set_attn_implementation", bool)()
    ]  # some need packages that are not here


def small(kind: type, heads_k: int, default: Any = None) -> dict[str, Any]:
    """The fields of a config of this class that make it small, those of its parts included."""
    default, found = default if default is not None else kind(), {}
    for name, value in vars(default).items():
        if name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            found[name] = heads_k if name.endswith("key_value_heads") else SMALL[name]
        elif name in IDS and isinstance(value, int):
            found[name] = 1
        elif "dropout" in name and isinstance(value, float):
            found[name] = 0.0
        elif name in LISTS and value:
            found[name] = [value[0], value[-1]]
    for name in kind.sub_configs or {}:
        value = getattr(default, name, None)
        if isinstance(value, hf.PreTrainedConfig):
            found[name] = {"model_type": value.model_type} | small(type(value), heads_k, value)
    return found


def small_config(kind: type, heads_k: int) -> hf.PreTrainedConfig | None:
    """A config of which a model has few weights; None where these fields alone make none."""
    with contextlib.suppress(Exception):
        config = kind.config_class(**small(kind.config_class, heads_k))
        with torch.device("meta"):
            if sum(x.numel() for x in kind(config).parameters()) <= MOST:
                return kind.config_class(**small(kind.config_class, heads_k))
    return None


def verdict(kind: type, implementation: str) -> tuple[str, str]:
    """How the class does with `implementation`: "agrees", "refuses" or "differs"; "not small" or "no input" where eager attention cannot be had."""
    found = "not small", ""
    with torch.random.fork_rng(devices=[]):
        for heads_k in (2, 4):
            torch.manual_seed(0)
            config = small_config(kind, heads_k)
            try:
                eager = None if config is None else kind._from_config(config, attn_implementation="eager").eval()
            except Exception:
                continue
            if eager is None:
                continue
            for x in eager.parameters():  # some are made so small that attention hardly differs from a mean
                if x.dim() == 2 and x.is_floating_point():
                    torch.nn.init.normal_(x, std=0.15)
            given = next(filter(lambda each: runs(eager, each), candidates()), None)
            if given is not None:
                return compared(kind, heads_k, implementation, eager, given)
            found = "no input", ""
    return found


def compared(kind: type, heads_k: int, implementation: str, eager: hf.PreTrainedModel, given: dict[str, Any]) -> tuple[str, str]:
    want = results(eager, given)
    try:
        off = error(kind, small_config(kind, heads_k), implementation, eager, given, want)
    except Exception as refusal:
        return "refuses", f"{type(refusal).__name__}: {refusal}"
    if off > CLOSE:  # perhaps the model magnifies rounding errors
        with contextlib.suppress(Exception):
            off_sdpa = error(kind, small_config(kind, heads_k), "sdpa", eager, given, want)
            return ("agrees" if off <= 2 * off_sdpa else "differs"), f"{off:.1e} {off_sdpa:.1e}"
    return ("agrees" if off <= CLOSE else "differs"), f"{off:.1e} {'+'.join(given)}"


def error(kind: type, config, implementation: str, eager: hf.PreTrainedModel, given: dict[str, Any], want: list[Tensor]) -> float:
    """The largest difference to eager attention, relative to the largest number where that is above 1; inf where shapes differ."""
    other = kind._from_config(config, attn_implementation=implementation).eval()
    other.load_state_dict(eager.state_dict())
    got = results(other, given)
    if [x.shape for x in got] != [x.shape for x in want]:
        return float("inf")
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1.0)).item() for a, b in zip(got, want, strict=True) if a.numel())


def runs(net: hf.PreTrainedModel, given: dict[str, Any]) -> bool:
    """Whether the model takes these inputs, and gives finite numbers, the same each time."""
    with contextlib.suppress(Exception):
        one, two = results(net, given), results(net, given)
        return bool(one) and all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(one, two, strict=True))
    return False


def candidates() -> Iterator[dict[str, Any]]:
    """Inputs, of which a model takes one."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=draw)
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[0, 1:5] = 0  # behind a token, so that every query sees one
    image = torch.randn(2, 3, IMAGE, IMAGE, generator=draw)
    mels, sound = torch.randn(2, 8, 128, generator=draw), torch.randn(2, 4000, generator=draw)
    yield {"input_ids": tokens, "attention_mask": padding}
    yield {"input_ids": tokens, "attention_mask": padding, "use_cache": False}
    yield {"input_ids": tokens, "attention_mask": padding, "decoder_input_ids": tokens}
    yield {"input_ids": tokens, "attention_mask": padding, "pixel_values": image}
    yield {"pixel_values": image}
    yield {"pixel_values": torch.randn(2, 3, 4, IMAGE, IMAGE, generator=draw)}
    yield {"pixel_values": torch.randn(2, 8, 3, IMAGE, IMAGE, generator=draw)}
    yield {"pixel_values_videos": torch.randn(2, 8, 3, IMAGE, IMAGE, generator=draw)}
    yield {"input_features": mels}
    yield {"input_features": mels, "decoder_input_ids": tokens}
    yield {"input_features": mels.transpose(1, 2)}
    yield {"input_values": sound}
    yield {"input_values": sound[:, None]}
    yield {"input_values": sound, "decoder_input_ids": tokens}


def results(net: hf.PreTrainedModel, given: dict[str, Any]) -> list[Tensor]:
    """All floating tensors of the output; where they have an entry a token, those of padding are left out."""
    torch.manual_seed(2)
    with torch.no_grad():
        found = net(**given)
    flat = [x for x in torch.utils._pytree.tree_leaves(dict(found)) if isinstance(x, Tensor) and x.is_floating_point()]
    mask = given.get("attention_mask")
    return [x[mask.bool()] if mask is not None and x.dim() > 2 and x.shape[:2] == mask.shape else x for x in flat if x.dim() < 4]
