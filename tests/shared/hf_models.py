"""Small randomly initialised models of transformers, a pair of each: one with eager attention, one with another implementation."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import transformers as hf
from torch import Tensor

VOCABULARY, LENGTH = 61, 24
HEADS, HEADS_K = 4, 2
WINDOW, CHUNK = 7, 9
SCALE = {"head_dim": 8}  # of most models; all their widths follow


def text(**other) -> dict:
    """The fields that most configs have; initializer_range is so wide that weights of attention differ."""
    d = SCALE["head_dim"]
    sizes = dict(
        hidden_size=HEADS * d, intermediate_size=6 * d, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=HEADS_K
    )
    ids = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=None, max_position_embeddings=128)
    return sizes | ids | {"initializer_range": 1.2 / d} | other


def alternating(**other) -> dict:
    return text(layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW, head_dim=SCALE["head_dim"], **other)


class Model(NamedTuple):
    """kind: "decoder" (causal, with a cache), "encoder", "image", "seq2seq" or "speech"; chooses: experts, where rounding may tip the balance."""

    kind: str
    cls: str
    config: Callable[[], hf.PreTrainedConfig]
    chooses: bool = False


def _deepseek() -> hf.PreTrainedConfig:
    n = SCALE["head_dim"] // 4
    ranks = dict(kv_lora_rank=4 * n, q_lora_rank=6 * n, qk_rope_head_dim=2 * n, qk_nope_head_dim=4 * n, v_head_dim=3 * n)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1)
    return hf.DeepseekV3Config(**text(num_key_value_heads=HEADS), **ranks, **experts)


def _llama4() -> hf.PreTrainedConfig:
    experts = dict(num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=24, head_dim=SCALE["head_dim"])
    layers = dict(layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0], attention_chunk_size=CHUNK)
    return hf.Llama4TextConfig(**text(), **experts, **layers)


def _whisper() -> hf.PreTrainedConfig:
    d = SCALE["head_dim"]
    sizes = dict(d_model=HEADS * d, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS)
    more = dict(encoder_ffn_dim=6 * d, decoder_ffn_dim=6 * d, max_source_positions=20, max_target_positions=1024, num_mel_bins=8)
    ids = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    return hf.WhisperConfig(**sizes, **more, **ids)


def _t5() -> hf.PreTrainedConfig:
    d = SCALE["head_dim"]
    sizes = dict(d_model=HEADS * d, d_kv=d, d_ff=6 * d, num_layers=2, num_heads=HEADS, vocab_size=VOCABULARY, dropout_rate=0.0)
    return hf.T5Config(**sizes, relative_attention_num_buckets=8, relative_attention_max_distance=20, decoder_start_token_id=0)


def _modernbert() -> hf.PreTrainedConfig:
    layers = dict(num_hidden_layers=3, global_attn_every_n_layers=3, local_attention=2 * WINDOW)
    return hf.ModernBertConfig(**text(cls_token_id=1, sep_token_id=1, **layers))


def _vit() -> hf.PreTrainedConfig:
    d = SCALE["head_dim"]
    sizes = dict(hidden_size=HEADS * d, intermediate_size=6 * d, num_hidden_layers=2, num_attention_heads=HEADS)
    return hf.ViTConfig(**sizes, image_size=16, patch_size=4, initializer_range=1.2 / d)


def _gpt_oss() -> hf.PreTrainedConfig:
    return hf.GptOssConfig(**alternating(num_local_experts=2, num_experts_per_tok=1))


MODELS = {
    "llama": Model("decoder", "LlamaForCausalLM", lambda: hf.LlamaConfig(**text())),
    "mistral": Model("decoder", "MistralForCausalLM", lambda: hf.MistralConfig(**text(sliding_window=WINDOW))),
    "qwen3": Model("decoder", "Qwen3ForCausalLM", lambda: hf.Qwen3Config(**text(head_dim=SCALE["head_dim"]))),
    "phi3": Model("decoder", "Phi3ForCausalLM", lambda: hf.Phi3Config(**text(sliding_window=WINDOW))),
    "gemma2": Model("decoder", "Gemma2ForCausalLM", lambda: hf.Gemma2Config(**alternating(attn_logit_softcapping=2.0))),
    "gemma3": Model("decoder", "Gemma3ForCausalLM", lambda: hf.Gemma3TextConfig(**alternating())),
    "gpt_oss": Model("decoder", "GptOssForCausalLM", _gpt_oss, chooses=True),
    "deepseek_v3": Model("decoder", "DeepseekV3ForCausalLM", _deepseek, chooses=True),
    "llama4": Model("decoder", "Llama4ForCausalLM", _llama4, chooses=True),
    "bert": Model("encoder", "BertModel", lambda: hf.BertConfig(**text(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))),
    "modernbert": Model("encoder", "ModernBertModel", _modernbert),
    "vit": Model("image", "ViTModel", _vit),
    "t5": Model("seq2seq", "T5ForConditionalGeneration", _t5),
    "whisper": Model("speech", "WhisperForConditionalGeneration", _whisper),
}


def built(name: str, implementation: str) -> hf.PreTrainedModel:
    """The model, in eval mode; the same weights for every implementation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(hf, MODELS[name].cls)._from_config(MODELS[name].config(), attn_implementation=implementation).eval()
        for key, x in model.named_parameters():  # some are made as zeros, which hides what is multiplied by them
            if "sink" in key or "relative_attention_bias" in key:
                torch.nn.init.normal_(x)
    return model


def inputs(name: str, mask: str = "none", batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    """What the model is called with. mask: "none", "left", "right" (padding), "packed" (position_ids) or "user" (a 4-D mask of floats)."""
    draw = torch.Generator().manual_seed(1)
    kind, found = MODELS[name].kind, {}
    tokens = torch.randint(3, VOCABULARY, (batch, length), generator=draw)
    if kind == "image":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=draw)}
    if kind == "speech":
        return {"input_features": torch.randn(batch, 8, 40, generator=draw), "decoder_input_ids": tokens}
    found["input_ids"] = tokens
    if kind == "seq2seq":
        found["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, length - 5), generator=draw)
    if mask in ("left", "right"):
        found["attention_mask"] = padding(mask, batch, length)
    elif mask == "packed":
        found["use_cache"] = False  # with a cache, transformers takes positions for no more than positions
        ends = [(0, 5 + n, 6 + n, length - 3, length) for n in range(batch)]
        found["position_ids"] = torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in ends])
    elif mask == "user":
        seen = torch.rand(batch, 1, length, length, generator=draw) < 0.5
        seen |= torch.eye(length, dtype=torch.bool)
        found["attention_mask"] = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    return found


def padding(side: str, batch: int, length: int) -> Tensor:
    """A padding mask, int64 (batch, length): other padding in each entry, none in the last."""
    seen = torch.ones(batch, length, dtype=torch.int64)
    for n in range(batch - 1):
        hidden = slice(None, 3 + 2 * n) if side == "left" else slice(length - 3 - 2 * n, None)
        seen[n, hidden] = 0
    return seen


def output(model: hf.PreTrainedModel, given: dict[str, Tensor], **options) -> Tensor:
    """The model's logits, or its last hidden state, where there are tokens: (tokens, size)."""
    found = model(**given, **options)
    x = found.logits if "logits" in found else found.last_hidden_state
    mask = given.get("attention_mask")
    return x[mask.bool()] if mask is not None and mask.dim() == 2 and mask.shape == x.shape[:2] else x.flatten(0, 1)
