"""What SGLang's engine says of nine prompts to a small random Llama, by its own attention or by tilewise.

python tools/sglang_tokens.py torch_native|tilewise FOLDER [PAGE]     on a CPU, in fp32: writes FOLDER/torch_native.json or FOLDER/tilewise.json
python tools/sglang_tokens.py triton,tilewise FOLDER [PAGE] --device cuda     on a GPU, in bf16, with and without CUDA graphs: how far the tokens of
    each run are the first one's, and how far apart the log-probabilities are up to there; FOLDER/cuda.json has all

It runs in an environment with SGLang 0.5.17 that need not have tilewise installed. Prompts are of 1 to 150 tokens, one behind the beginning of
another; 64 tokens a batch cut them into chunks, so batches are mixed. Pages of more than one token are found by a Triton kernel of SGLang:
TRITON_INTERPRET=1 on a CPU. Of the wheel of sglang-kernel 0.4.5 a Hopper GPU needs 20 MB: all but flash_ops, flashmla_ops, infllm_ops and sm100.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

LENGTHS = 5, 17, 33, 90, 150, 64, 1, 40
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
ON_A_CPU = {"SGLANG_USE_CPU_ENGINE": "1"}


def save(folder: Path, hidden: int = 256) -> None:
    """A random model, the same in every run, with 8 heads on 2."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": hidden, "intermediate_size": hidden * 3 // 2, "num_hidden_layers": 4}
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


def run(folder: Path, backend: str, page: int, device: str = "cpu", dtype: str = "float32", graphs: bool = False) -> list[dict]:
    """Of each request the tokens and their log-probabilities."""
    import random

    import sglang

    draw = random.Random(1)
    prompts = [[draw.randrange(3, 500) for _ in range(n)] for n in LENGTHS]
    prompts.append([*prompts[4][:100], 7, 8, 9])
    engine = sglang.Engine(
        model_path=str(folder),
        device=device,
        dtype=dtype,
        attention_backend=backend,
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=0.1,
        max_total_tokens=4096,
        max_running_requests=8,
        page_size=page,
        chunked_prefill_size=64,
        disable_cuda_graph=not graphs,
        disable_overlap_schedule=True,
        log_level="warning",
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        said = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        return [{"tokens": each["output_ids"], "logprobs": [one[0] for one in each["meta_info"]["output_token_logprobs"]]} for each in said]
    finally:
        engine.shutdown()


def agreement(first: list[dict], other: list[dict]) -> str:
    """Tokens of all requests up to the first that differs, and the largest difference of log-probabilities up to there."""
    equal, total, apart = 0, 0, 0.0
    for mine, its in zip(first, other, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(mine["tokens"], its["tokens"], strict=True)) if x != y), len(mine["tokens"]))
        equal, total = equal + same, total + len(mine["tokens"])
        apart = max([apart, *(abs(x - y) for x, y in zip(mine["logprobs"][:same], its["logprobs"][:same], strict=True))])
    return f"{equal} of {total} tokens, log-probabilities at most {apart:.2g} apart"


def on_a_gpu(folder: Path, backends: list[str], page: int, device: str, dtype: str) -> None:
    found: dict[str, list[dict]] = {}
    for backend in backends:
        for graphs in (False, True):
            name = f"{backend}, {'CUDA graphs' if graphs else 'eager'}"
            found[name] = run(folder / "llama-gpu", backend, page, device, dtype, graphs)
            print(f"{name}: {agreement(next(iter(found.values())), found[name])}", flush=True)
    (folder / "cuda.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", help="torch_native, tilewise; on a GPU several, with commas: triton,tilewise")
    parser.add_argument("folder", type=Path)
    parser.add_argument("page", type=int, nargs="?", default=1, help="tokens of a page")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", help="on a GPU (default: %(default)s)")
    given = parser.parse_args()
    on_a_cpu = given.device == "cpu"
    os.environ.update(ENVIRONMENT | (ON_A_CPU if on_a_cpu else {}))
    model = given.folder / ("llama" if on_a_cpu else "llama-gpu")
    if not model.exists():
        save(model, 256 if on_a_cpu else 1024)
    with tempfile.TemporaryDirectory() as folder:
        plugin(Path(folder))
        if not on_a_cpu:
            return on_a_gpu(given.folder, given.backends.split(","), given.page, given.device, given.dtype)
        said = run(model, given.backends, given.page)
    (given.folder / f"{given.backends}.json").write_text(json.dumps([each["tokens"] for each in said]))


if __name__ == "__main__":
    main()
