"""vLLM's engine on one GPU by its attention backends: whether they say the same, and how long a token and a prompt take.

    python tools/gpu/vllm_bench.py --out rows.jsonl                        CUSTOM (tilewise), FLASH_ATTN and TRITON_ATTN
    python tools/gpu/vllm_bench.py --parts decode --sequences 1,16 --lengths 1024,8192
    python tools/gpu/vllm_bench.py --parts agree --model deepseek --backends TRITON_MLA,LATENT        latent heads, LATENT by tilewise

It needs vLLM 0.26.0 and transformers. Each backend has a process of its own, and each row is one JSON line. Parts:

agree    64 requests of 1 to 900 tokens to a small random model in bf16, eager and with CUDA graphs: log-probabilities of the tokens that were chosen,
         next to the first backend's, up to the first token that differs.
decode   layers of an 8B model (32 heads of 128, 8 of keys) with random weights: milliseconds of a step of so many sequences of so many tokens, the
         median of those in which each has a new one. A run before it has put the prompts into the prefix cache. With --busy also for how long
         the GPU ran kernels in a step, and which: the rest is the host's.
prefill  new tokens a second behind so many tokens that are in the cache.

Cells that do not fit the cache are left out, and said.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "src")]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip
PARTS = "agree", "decode", "prefill"
REQUESTS, LONGEST = 64, 900
TOKENS, FIRST, LAST = 64, 16, 4  # of a sequence, and how many steps at either end are not timed
TURNS = 3
PAGE = 64  # the largest that a backend has here
LATENT = "FLASH_ATTN_MLA"  # whose place tilewise takes for latent heads
OF_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backends", default="FLASH_ATTN,CUSTOM,TRITON_ATTN", help="the first is the one to compare with; default: %(default)s"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--model", default="llama", choices=("llama", "deepseek"), help="of the part `agree` (default: %(default)s)")
    parser.add_argument("--ways", default="eager,graphs", help="of the part `agree`; default: %(default)s")
    parser.add_argument("--layers", type=int, default=8, help="of the 8B model's 32 (default: %(default)s)")
    parser.add_argument("--sequences", type=numbers, default=[1, 16, 64, 256], metavar="N,...")
    parser.add_argument("--lengths", type=numbers, default=[1024, 8192, 32768], metavar="N,...")
    parser.add_argument("--new", type=numbers, default=[1024, 4096, 16384], metavar="N,...")
    parser.add_argument("--cached", type=numbers, default=[0, 16384, 65536], metavar="N,...")
    parser.add_argument("--hidden", type=int, default=0, help="a smaller model, for a rehearsal")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--busy", action="store_true", help="of the part `decode`: trace a step's kernels as well")
    parser.add_argument("--out", default="vllm.jsonl", metavar="FILE")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # backend;part;eager, in a process of its own
    parser.add_argument("--models", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        backend, part, eager = options.one.split(";")
        return child(backend, part, eager == "eager", options)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        parts = options.parts.split(",")
        jobs = ["agree"] * ("agree" in parts) + [",".join(part for part in parts if part != "agree")]  # what is timed, by one engine
        for backend, part in itertools.product(options.backends.split(","), filter(None, jobs)):
            for way in options.ways.split(",") if part == "agree" else ("graphs",):
                command = [sys.executable, __file__, *sys.argv[1:], "--one", f"{backend};{part};{way}", "--models", folder]
                start = time.perf_counter()
                code = subprocess.run(command, env=os.environ | ENVIRONMENT, check=False).returncode
                failed += code != 0
                print(f"{backend} {part} {way}: exit {code}, {time.perf_counter() - start:.0f} s", flush=True)
                if part == "agree" and code == 0:
                    compare(Path(folder), backend, way, options)
    return int(failed > 0)


def child(backend: str, part: str, eager: bool, options: argparse.Namespace) -> int:
    folder = Path(options.models)
    if part == "agree":
        said = agree(engine(small_model(folder, options.model), backend, eager, options.dtype, 2048, 2048))
        (folder / f"{backend}.{'eager' if eager else 'graphs'}.json").write_text(json.dumps(said))
        return 0
    llm = engine(
        large_model(folder, options), backend, eager, options.dtype, max(options.new) if "prefill" in part else 16384,
        max(*options.lengths, max(options.cached) + max(options.new)) + TOKENS + PAGE, dummy=True, sequences=max(options.sequences),
    )  # fmt: skip
    cache = llm.llm_engine.vllm_config.cache_config
    of_engine = {"backend": backend, "block": cache.block_size, "layers": options.layers, "dtype": options.dtype}
    for name in part.split(","):
        for row in {"decode": decode, "prefill": prefill}[name](llm, cache.num_gpu_blocks * cache.block_size, options):
            keep({"part": name, **of_engine, **row}, options)
    return 0


def engine(model: Path, backend: str, eager: bool, dtype: str, batched: int, longest: int, dummy: bool = False, sequences: int = REQUESTS):
    from vllm import LLM

    given = ({"load_format": "dummy"} if dummy else {}) | {"gpu_memory_utilization": 0.2 if backend.startswith("CPU") else 0.9}
    if backend.startswith("CPU"):  # a rehearsal: the CPU's platform takes no name
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TILEWISE_VLLM_CPU": str(int(backend == "CPU"))}
    else:
        given["attention_backend"] = LATENT if backend == "LATENT" else backend
        os.environ |= {"TILEWISE_VLLM_MLA": "1"} if backend == "LATENT" else {}
        if not dummy:  # a small model, which may share its GPU
            given |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30}
    if backend in ("CPU", "CUSTOM", "LATENT"):
        from tilewise.compat import vllm as plugin

        plugin.register()
    return LLM(
        model=str(model), dtype=dtype, enforce_eager=eager, skip_tokenizer_init=True, max_model_len=longest, max_num_seqs=sequences,
        max_num_batched_tokens=batched, enable_chunked_prefill=True, enable_prefix_caching=True, seed=0, **given,
    )  # fmt: skip


def small_model(folder: Path, name: str) -> Path:
    import vllm_tokens

    if not (folder / name).exists():
        vllm_tokens.save(name, folder / name)
    return folder / name


def large_model(folder: Path, options: argparse.Namespace) -> Path:
    from transformers import LlamaConfig

    sizes = OF_8B | {"num_hidden_layers": options.layers, "max_position_embeddings": 1 << 17}
    if options.hidden:
        sizes |= {
            "hidden_size": options.hidden,
            "intermediate_size": 2 * options.hidden,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
        }
    config = LlamaConfig(architectures=["LlamaForCausalLM"], tie_word_embeddings=False, dtype=options.dtype, **sizes)
    config.save_pretrained(folder / "large")
    return folder / "large"


def prompt(draw: random.Random, length: int) -> dict:
    return {"prompt_token_ids": [draw.randrange(3, 1000) for _ in range(length)]}


def generated(llm, prompts: list[dict], tokens: int, logprobs: int | None = None):
    """What it says, and seconds."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs)
    start = time.perf_counter()
    found = llm.generate(prompts, asked, use_tqdm=False)
    return found, time.perf_counter() - start


def agree(llm) -> list:
    draw = random.Random(1)
    prompts = [prompt(draw, draw.randint(1, LONGEST)) for _ in range(REQUESTS)]
    outputs = [each.outputs[0] for each in generated(llm, prompts, 32, logprobs=1)[0]]
    return [[(token, of[token].logprob) for of, token in zip(each.logprobs, each.token_ids, strict=True)] for each in outputs]


def compare(folder: Path, backend: str, way: str, options: argparse.Namespace) -> None:
    """A row of what this backend said, next to the first one's first run."""
    first, first_way = options.backends.split(",")[0], options.ways.split(",")[0]
    if not (folder / f"{first}.{first_way}.json").exists():  # it failed, and said so
        return
    base, found = (json.loads((folder / f"{each}.json").read_text()) for each in (f"{first}.{first_way}", f"{backend}.{way}"))
    alike, apart = 0, 0.0
    for one, other in zip(base, found, strict=True):
        for (token, logprob), (own, its) in zip(one, other, strict=True):
            if token != own:
                break
            alike, apart = alike + 1, max(apart, abs(logprob - its))
    row = {
        "model": options.model,
        "tokens": sum(map(len, base)),
        "before_the_first_difference": alike,
        "largest_difference_of_logprobs": apart,
    }
    keep({"part": "agree", "backend": backend, "way": way, "of": f"{first}.{first_way}", "dtype": options.dtype, **row}, options)


def decode(llm, room: int, options: argparse.Namespace):
    for length, sequences in itertools.product(options.lengths, options.sequences):
        cell = {"sequences": sequences, "length": length}
        if sequences * (length + TOKENS + PAGE) > room:
            yield {**cell, "left_out": f"{sequences * length} tokens, where the cache has {room}"}
            continue
        draw = random.Random(length * 1000 + sequences)
        prompts = [prompt(draw, length) for _ in range(sequences)]
        generated(llm, prompts, 1)
        taken = steps(llm, prompts)
        row = {**cell, "ms": 1e3 * statistics.median(taken), "quartiles_ms": [1e3 * each for each in statistics.quantiles(taken)]}
        yield row | (busy(llm, prompts) if options.busy else {})


def steps(llm, prompts: list[dict]) -> list[float]:
    """Seconds of each of the engine's steps in which every sequence has a new token."""
    ends, step = [], llm.llm_engine.step

    def noted():
        outputs = step()
        ends.append(time.perf_counter())
        return outputs

    llm.llm_engine.step = noted
    try:
        generated(llm, prompts, TOKENS)
    finally:
        llm.llm_engine.step = step
    return [end - start for start, end in itertools.pairwise(ends[FIRST:-LAST])]


def busy(llm, prompts: list[dict]) -> dict:
    """Milliseconds of a step in which the GPU ran kernels, and microseconds of a step by kernel, the longest ones: of a long run less a short one."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    runs = []
    for tokens in (FIRST, TOKENS):
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as traced:
            generated(llm, prompts, tokens)
        kernels = [each for each in traced.events() if each.device_type == DeviceType.CUDA]
        total, end, names = 0.0, 0.0, Counter()
        for each in sorted(kernels, key=lambda each: each.time_range.start):
            names[each.name] += each.time_range.elapsed_us()
            total += max(0.0, each.time_range.end - max(end, each.time_range.start))  # launched ahead, a kernel overlaps the one before
            end = max(end, each.time_range.end)
        runs.append((total, names))
    (short, few), (long, many) = runs
    many.subtract(few)
    steps = TOKENS - FIRST
    return {"busy_ms": (long - short) / steps / 1e3, "kernels_us": {name[:100]: us / steps for name, us in many.most_common(12)}}


def prefill(llm, room: int, options: argparse.Namespace):
    for cached, new in itertools.product(options.cached, options.new):
        cell = {"new": new, "cached": cached}
        if cached + new > room:
            yield {**cell, "left_out": f"{cached + new} tokens, where the cache has {room}"}
            continue
        draw = random.Random(cached * 1000 + new)
        behind = prompt(draw, cached)["prompt_token_ids"]
        if cached:
            generated(llm, [{"prompt_token_ids": behind}], 1)
        taken = []
        for _ in range(TURNS + 1):  # the first may compile
            whole = {"prompt_token_ids": behind + prompt(draw, new)["prompt_token_ids"]}
            taken.append(generated(llm, [whole], 1)[1])
        yield {**cell, "tokens_per_s": new / statistics.median(taken[1:]), "all_s": taken}


def keep(row: dict, options: argparse.Namespace) -> None:
    import vllm

    from tilewise.bench.provenance import provenance

    device = "cpu" if options.backends.startswith("CPU") else "cuda"
    line = json.dumps({"set": "vllm", **row, "environment": provenance(device) | {"vllm": vllm.__version__}})
    print(line[:300], flush=True)
    with open(options.out, "a", encoding="utf-8") as file:
        print(line, file=file)


if __name__ == "__main__":
    sys.exit(main())
