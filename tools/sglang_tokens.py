"""What SGLang's engine says on a CPU of nine prompts to a small random Llama in fp32, by torch's attention or by tilewise: their tokens.

python tools/sglang_tokens.py torch_native|tilewise FOLDER [PAGE]     writes FOLDER/torch_native.json or FOLDER/tilewise.json

It runs in an environment with SGLang 0.5.17 that need not have tilewise installed. Prompts are of 1 to 150 tokens, one behind the beginning of
another; 64 tokens a batch cut them into chunks, so batches are mixed. Pages of more than one token are found by a Triton kernel of SGLang:
TRITON_INTERPRET=1.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

LENGTHS = 5, 17, 33, 90, 150, 64, 1, 40
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}


def save(folder: Path) -> None:
    """A random model, the same in every run."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.06)).save_pretrained(folder)


def plugin(folder: Path) -> None:
    """A distribution whose entry point is tilewise's, for the engine's processes, where tilewise is not installed."""
    info = folder / "tilewise_for_sglang-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tilewise-for-sglang\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ntilewise = tilewise.compat.sglang:register\n")
    source = str(Path(__file__).parents[1] / "src")
    os.environ["PYTHONPATH"] = os.pathsep.join([source, str(folder), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = [source, str(folder)]


def run(folder: Path, backend: str, page: int) -> list[list[int]]:
    import random

    import sglang

    draw = random.Random(1)
    prompts = [[draw.randrange(3, 500) for _ in range(n)] for n in LENGTHS]
    prompts.append([*prompts[4][:100], 7, 8, 9])
    engine = sglang.Engine(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        attention_backend=backend,
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=0.1,
        max_total_tokens=4096,
        max_running_requests=8,
        page_size=page,
        chunked_prefill_size=64,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        log_level="warning",
    )
    try:
        said = engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 24, "ignore_eos": True})
        return [each["output_ids"] for each in said]
    finally:
        engine.shutdown()


if __name__ == "__main__":
    backend, where = sys.argv[1], Path(sys.argv[2])
    os.environ.update(ENVIRONMENT)
    if not (where / "llama").exists():
        save(where / "llama")
    with tempfile.TemporaryDirectory() as folder:
        plugin(Path(folder))
        tokens = run(where / "llama", backend, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    (where / f"{backend}.json").write_text(json.dumps(tokens))
