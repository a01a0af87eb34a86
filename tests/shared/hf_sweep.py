"""Every model of transformers, as small as its config lets itself be made, with inputs that it takes."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_MAPPING

VOCABULARY, LENGTH, IMAGE, MOST = 61, 24, 32, 100_000_000  # the most weights of a model that counts as small
CLOSE = 1e-5
SIZES = (  # and the names of the fields that are set to each
    (1, "topk_group"),
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
    (16, "moe_intermediate_size q_lora_rank"),
    (7, "sliding_window"),
    (9, "attention_chunk_size"),
    (IMAGE, "image_size"),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
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


def small_config(kind: type, heads_k: int, variant: int = 0) -> hf.PreTrainedConfig | None:
    """A config of which a model has few weights, by the fields that `variants` gives there; None where there are no such."""
    found = variants(kind, heads_k)
    return kind.config_class(**copy.deepcopy(found[variant])) if variant < len(found) else None


RESNET = {"model_type": "resnet", "embedding_size": 32, "hidden_sizes": [32, 48, 64, 80], "depths": [1, 1, 1, 1], "layer_type": "basic"}
RESNET |= {"out_features": ["stage2", "stage3", "stage4"]}
MORE: tuple[dict[str, Any], ...] = (  # fields that some models need beside those that make them small, or larger than those
    {},
    {"head_dim": 8},
    {"head_dim": 64, "hidden_size": 256},
    {"head_dim": 128},
    {"num_kv_shared_layers": 0},
    {"hidden_size": 512},
    {"num_experts_per_tok": 1},
    {"prediction_length": 8},
    {"num_attention_heads": 4, "num_key_value_heads": 2},
    {"pad_token_id": 1, "vocab_size": VOCABULARY},
    {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": RESNET},
)
ROTATED = ("qk_rope_head_dim", "head_dim", "qk_nope_head_dim", "kv_lora_rank", "v_head_dim")  # which some rotations are made for
MOST_VARIANTS = 9


def with_more(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The fields, and some more of the model and of its text's part."""
    return fields | more | {key: value | more for key, value in fields.items() if key == "text_config"}


@cache
def variants(kind: type, heads_k: int) -> list[dict[str, Any]]:
    """Fields by which a model of this class is made and is small: those of `small`, some more, or one less."""
    found = []
    with contextlib.suppress(Exception):
        fields = small(kind.config_class, heads_k)
        without = [{key: value for key, value in fields.items() if key not in names} for names in (ROTATED, *((name,) for name in fields))]
        for each in (fields, without[0], *(with_more(fields, more) for more in MORE), *without):
            if len(found) < MOST_VARIANTS and each not in found:
                with contextlib.suppress(Exception), torch.device("meta"):
                    if sum(x.numel() for x in kind(kind.config_class(**copy.deepcopy(each))).parameters()) <= MOST:
                        found.append(each)
    return found


def verdict(kind: type, implementation: str) -> tuple[str, str]:
    """How the class does with `implementation`: "agrees", "refuses" or "differs"; "not small" or "no input" where eager attention cannot be had."""
    found = "not small", ""
    with torch.random.fork_rng(devices=[]):
        for variant, heads_k in itertools.product(range(MOST_VARIANTS), (2, 4)):
            torch.manual_seed(0)
            config = small_config(kind, heads_k, variant)
            try:
                eager = None if config is None else kind._from_config(config, attn_implementation="eager").eval()
            except Exception:
                continue
            if eager is None:
                continue
            for x in eager.parameters():  # some are made so small that attention hardly differs from a mean
                if x.dim() == 2 and x.is_floating_point():
                    torch.nn.init.normal_(x, std=0.15)
            given = next(filter(lambda each: runs(eager, each), candidates(eager.config)), None)
            if given is not None:
                return compared(partial(small_config, kind, heads_k, variant), implementation, eager, given)
            found = "no input", ""
    return found


def compared(config: Callable, implementation: str, eager: hf.PreTrainedModel, given: dict[str, Any]) -> tuple[str, str]:
    kind, want = type(eager), results(eager, given)
    try:
        off = error(kind, config(), implementation, eager, given, want)
    except Exception as refusal:
        return "refuses", f"{type(refusal).__name__}: {refusal}"
    if off > CLOSE:  # perhaps the model magnifies rounding errors
        with contextlib.suppress(Exception):
            off_sdpa = error(kind, config(), "sdpa", eager, given, want)
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


def candidates(config: hf.PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Inputs, of which a model takes one; the last ones' sizes are the config's."""
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
    parts = [config, *(part for name in config.sub_configs or {} if (part := getattr(config, name, None)) is not None)]
    for part in parts:
        yield from candidates_of(part, draw)
    yield {"input_features": torch.randn(1, getattr(config, "num_mel_bins", 8), 3000, generator=draw), "decoder_input_ids": tokens[:1]}


def candidates_of(config: hf.PreTrainedConfig, draw: torch.Generator) -> Iterator[dict[str, Any]]:
    """Of models that say how many channels, frames or patches they take."""

    def size(*names: str, default: int) -> int:
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), default)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw)

    channels, patch, frames = (
        size("in_channels", "in_chans", "num_channels", default=3),
        size("patch_size", default=4),
        size("num_frames", default=8),
    )
    image, grid = size("image_size", default=IMAGE), torch.tensor([[1, 4, 4], [1, 8, 4]])
    flat = normal(48, channels * size("temporal_patch_size", default=1) * patch**2)
    for name in ("grid_thw", "image_grid_thw"):
        yield {"hidden_states": flat, name: grid}
        yield {"pixel_values": flat, name: grid}
    shapes = {"pixel_attention_mask": torch.ones(2, 16, dtype=torch.int64), "spatial_shapes": torch.tensor([[4, 4], [2, 8]])}
    yield {"pixel_values": normal(2, 16, channels * patch**2), **shapes}
    yield {"pixel_values": normal(2, channels, image, image)}
    yield {"pixel_values": normal(1, frames, channels, image, image)}
    yield {"input_features": normal(2, LENGTH, size("feature_projection_input_dim", "input_feat_per_channel", "input_dim", default=160))}
    yield {"input_values": normal(2, size("max_length", default=1024), size("num_mel_bins", default=8))}
    context, ahead, lags = (
        size("context_length", default=32),
        size("prediction_length", default=8),
        getattr(config, "lags_sequence", None) or [0],
    )
    yield {"past_values": normal(2, context, size("num_input_channels", default=1))}
    past, features = context + max(lags), size("num_time_features", default=0)
    series = {"past_values": normal(2, past).abs(), "past_observed_mask": torch.ones(2, past), "future_values": normal(2, ahead).abs()}
    yield series | {"past_time_features": normal(2, past, features), "future_time_features": normal(2, ahead, features)}
    queries = {"query_embeds": normal(2, 8, size("hidden_size", default=32))}
    yield queries | {"encoder_hidden_states": normal(2, LENGTH, size("encoder_hidden_size", default=32))}
    yield {"inputs_embeds": normal(2, LENGTH, size("hidden_size", "d_model", default=32))}


def results(net: hf.PreTrainedModel, given: dict[str, Any]) -> list[Tensor]:
    """All floating tensors of the output; where they have an entry a token, those of padding are left out."""
    torch.manual_seed(2)
    with torch.no_grad():
        found = net(**given)
    flat = [x for x in torch.utils._pytree.tree_leaves(dict(found)) if isinstance(x, Tensor) and x.is_floating_point()]
    mask = given.get("attention_mask")
    return [
        x[mask.bool()] if mask is not None and x.dim() > 2 and x.shape[:2] == mask.shape else x
        for x in flat
        if x.dim() < 4 or "pixel_values" in given
    ]
