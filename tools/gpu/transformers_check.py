"""Models of transformers with `attn_implementation="tilewise"` on a GPU: their errors beside SDPA's, and what the interface costs; one JSON.

    python tools/gpu/transformers_check.py out.json                 # a minute or two on an H100, most of it compiling kernels
    python tools/gpu/transformers_check.py out.json --device cpu --small

errors: bf16 models (logits and gradients, with padding, packed and without) against the same weights in fp32 with eager attention: root mean square
of the difference over that of the fp32 numbers. `theirs` is SDPA's, or eager's in bf16 where a model has no SDPA. At most twice theirs is asked of
models whose experts are not chosen by rounding errors.
interface: microseconds of `compat.transformers.attention` and of `tilewise.attention` on the same q, k, v, in turns; at most 3 % or 15 us more is
asked. steps: milliseconds of a training step of layers with Llama's shapes. generate: with a dynamic cache, and with a static one, for which
transformers compiles the model on GPUs. static: the steps of the latter one by one, compiled into CUDA graphs and not.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/shared"))

import hf_models
import transformers as hf

import tilewise as tw
from tilewise.compat import transformers as ours

CASES = {
    "llama": ("none", "left", "right", "packed", "user"),
    "mistral": ("none", "left", "packed"),
    "gemma2": ("none", "right"),
    "gemma3": ("none", "packed"),
    "gpt_oss": ("none", "left"),
    "deepseek_v3": ("none",),
    "llama4": ("none", "right"),
    "bert": ("none", "right"),
    "modernbert": ("right",),
    "vit": ("none",),
    "t5": ("none", "right"),
    "whisper": ("none",),
}


def numbers(name: str, mask: str, implementation: str, dtype: torch.dtype, device: str, length: int) -> list[torch.Tensor]:
    """The model's output, and the gradients of its mean square; weights and inputs are bf16 numbers whatever the dtype."""
    net = hf_models.built(name, implementation).to(torch.bfloat16).to(device, dtype)
    given = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in hf_models.inputs(name, mask, length=length).items()}
    given = {key: x.bfloat16().to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in given.items()}
    if mask == "user":  # the least number of the dtype that is added to it
        given["attention_mask"] = torch.zeros_like(given["attention_mask"]).masked_fill(given["attention_mask"] < 0, torch.finfo(dtype).min)
    out = hf_models.output(net, given)
    out.double().square().mean().backward()
    return [out.detach(), *(x.grad for x in net.parameters() if x.grad is not None)]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> tuple[float, float]:
    """Of the output, and of all gradients together."""
    return relative(got[:1], want[:1]), relative(got[1:], want[1:])


def relative(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> float:
    """Root mean square of the difference, relative to the exact numbers."""
    off, size = (
        sum(f(x.double(), y.double()) for x, y in zip(xs, ys, strict=True))
        for f in (lambda x, y: (x - y).square().sum(), lambda x, y: y.square().sum())
    )
    return (off / size).sqrt().item()


def errors(device: str, length: int) -> list[dict]:
    rows = []
    for name, masks in CASES.items():
        for mask in masks:
            row = {"model": name, "mask": mask, "experts": hf_models.MODELS[name].chooses}
            try:
                want = numbers(name, mask, "eager", torch.float32, device, length)
                mine = error(numbers(name, mask, "tilewise", torch.bfloat16, device, length), want)
                try:
                    theirs, row["of"] = error(numbers(name, mask, "sdpa", torch.bfloat16, device, length), want), "sdpa"
                except ValueError:  # softcap, or no SDPA for this model
                    theirs, row["of"] = error(numbers(name, mask, "eager", torch.bfloat16, device, length), want), "eager"
                row |= {"output": mine[0], "gradients": mine[1], "theirs_output": theirs[0], "theirs_gradients": theirs[1]}
                # Padding on the left has rows that see nothing, of which only SDPA makes zeros as well: gradients are alike beside it alone.
                compared = mine[:1] if mask == "left" else mine
                row["ok"] = all(a <= 2 * b for a, b in zip(compared, theirs, strict=False))
            except Exception as failure:
                row |= {"ok": False, "failure": f"{type(failure).__name__}: {failure}"[:500]}
            rows.append(row)
            print(row, flush=True)
    return rows


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_turns(ways: dict[str, Callable], device: str, calls: int = 20, rounds: int = 15) -> dict[str, float]:
    """The median of microseconds a call, `calls` at a time, each way in turn."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(rounds + 3):
        for name, way in ways.items():
            wait(device)
            start = time.perf_counter()
            for _ in range(calls):
                way()
            wait(device)
            if n >= 3:
                found[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def interface(device: str, lengths: tuple[int, ...]) -> list[dict]:
    rows, module = [], torch.nn.Module()
    for length in lengths:
        for window in (None, 1024):
            q, k, v = (torch.randn(1, length, heads, 128, device=device, dtype=torch.bfloat16).transpose(1, 2) for heads in (32, 8, 8))
            function = (
                hf.masking_utils.causal_mask_function if window is None else hf.masking_utils.sliding_window_causal_mask_function(window)
            )
            pairs, mask = (
                ours.make_mask(1, length, length, mask_function=function),
                tw.Causal() if window is None else tw.SlidingWindow(window - 1, 0),
            )
            for backward in (False, True):
                leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]

                def direct(leaves=leaves, mask=mask):
                    return tw.attention(*(x.transpose(1, 2) for x in leaves), mask=mask, scale=0.1)

                def drop_in(leaves=leaves, pairs=pairs):
                    return ours.attention(module, *leaves, pairs, scaling=0.1, dropout=0.0)[0]

                def step(way):
                    torch.autograd.grad(way().sum(), leaves)  # noqa: B023

                ways = {"direct": direct, "drop_in": drop_in}
                if backward:
                    ways = {name: lambda way=way: step(way) for name, way in ways.items()}
                found = in_turns(ways, device, calls=20 if length < 16384 else 5)
                ok = found["drop_in"] <= max(1.03 * found["direct"], found["direct"] + 15)
                rows.append({"seqlen": length, "window": window, "backward": backward, **found, "ok": ok})
                print(rows[-1], flush=True)
    return rows


def steps(device: str, small: bool) -> list[dict]:
    sizes = dict(hidden_size=256, intermediate_size=512) if small else dict(hidden_size=4096, intermediate_size=14336)
    config = hf.LlamaConfig(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=sizes["hidden_size"] // 128,
        num_key_value_heads=2 if small else 8,
        vocab_size=1024,
    )
    length, rows = (256 if small else 8192), []
    for mask in ("none", "right"):
        batch = 1 if mask == "none" else 4
        tokens = torch.randint(1024, (batch, length // batch), device=device)
        given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        if mask == "right":
            given["attention_mask"] = hf_models.padding("right", *tokens.shape).to(device)
        ways = {}
        for implementation in ("tilewise", "sdpa"):
            net = hf.LlamaForCausalLM._from_config(config, attn_implementation=implementation).to(device, torch.bfloat16).train()

            def step(net=net, given=given):
                net(**given).loss.backward()
                net.zero_grad()

            ways[implementation] = step
        found = {name: us / 1000 for name, us in in_turns(ways, device, calls=2, rounds=5).items()}
        rows.append({"mask": mask, "batch": batch, "seqlen": length // batch, "milliseconds": found})
        print(rows[-1], flush=True)
    return rows


def generate(device: str) -> list[dict]:
    rows = []
    for name in ("llama", "gemma3"):
        for mask in ("none", "left"):
            for cache in (None, "static"):
                given = {key: x.to(device) for key, x in hf_models.inputs(name, mask).items()}
                row, tokens = {"model": name, "mask": mask, "cache": cache or "dynamic"}, {}
                for implementation in ("eager", "tilewise"):
                    try:
                        net, start = hf_models.built(name, implementation).to(device), time.perf_counter()  # fp32: the tokens are the same
                        tokens[implementation] = net.generate(
                            **given, do_sample=False, min_new_tokens=12, max_new_tokens=12, cache_implementation=cache
                        )
                        row[f"{implementation}_s"] = time.perf_counter() - start
                    except Exception as failure:
                        row[f"{implementation}_failure"] = f"{type(failure).__name__}: {failure}"[:500]
                        traceback.print_exc()
                rows.append({**row, "ok": len(tokens) == 2 and torch.equal(*tokens.values())})
                print(rows[-1], flush=True)
    return rows


STEPS = 12  # of one token each


def steps_of(net, tokens: torch.Tensor, padding: torch.Tensor | None, compiled: bool) -> torch.Tensor:
    """Logits of the last STEPS tokens, each of them a step with a static cache."""
    first = tokens.shape[1] - STEPS
    cache = hf.StaticCache(config=net.config, max_cache_len=tokens.shape[1] + 20)
    run, found = (torch.compile(net, mode="reduce-overhead") if compiled else net), []
    with torch.no_grad():
        net(tokens[:, :first], attention_mask=None if padding is None else padding[:, :first], past_key_values=cache)
        for n in range(first, tokens.shape[1]):
            mask = None if padding is None else padding[:, : n + 1]
            step = net.prepare_inputs_for_generation(tokens[:, : n + 1], past_key_values=cache, next_sequence_length=1, attention_mask=mask)
            found.append(run(**step).logits.clone())
    return torch.cat(found, dim=1).float()


def static(device: str) -> list[dict]:
    """Steps with a static cache, compiled into CUDA graphs and not: their logits' error beside fp32's, in bf16 beside eager's own error."""
    rows = []
    for name in ("llama", "gemma3", "gpt_oss"):
        for mask in ("none", "left"):
            given = hf_models.inputs(name, mask)
            tokens, padding = given["input_ids"].to(device), given.get("attention_mask")
            padding = None if padding is None else padding.to(device)
            nets = {
                (implementation, dtype): hf_models.built(name, implementation).to(torch.bfloat16).to(device, dtype)
                for implementation in ("tilewise", "eager")
                for dtype in (torch.float32, torch.bfloat16)
            }
            want = steps_of(nets["eager", torch.float32], tokens, padding, False)
            theirs = relative([steps_of(nets["eager", torch.bfloat16], tokens, padding, False)], [want])
            for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2 * theirs)):
                for compiled in (False, True):
                    row = {"model": name, "mask": mask, "dtype": str(dtype), "compiled": compiled, "most": most}
                    row["experts"] = hf_models.MODELS[name].chooses
                    try:
                        torch.compiler.reset()
                        row["error"] = relative([steps_of(nets["tilewise", dtype], tokens, padding, compiled)], [want])
                        row["ok"] = row["error"] <= most
                    except Exception as failure:
                        row |= {"ok": False, "failure": f"{type(failure).__name__}: {failure}"[:500]}
                        traceback.print_exc()
                    rows.append(row)
                    print(row, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument(
        "--part", action="append", choices=("errors", "interface", "steps", "generate", "static"), help="only this; may be given again"
    )
    given = parser.parse_args()
    ours.register()
    hf.logging.set_verbosity_error()
    versions = {"transformers": hf.__version__, "torch": torch.__version__, "tilewise": tw.__version__}
    print(versions, flush=True)
    where = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    found: dict = {"device": where, "versions": versions, "not_understood": sorted(set(ours.hf_masks.CAPTURED) - ours.understood())}
    hf_models.SCALE["head_dim"] = 16 if given.small else 64
    parts = {
        "errors": lambda: errors(given.device, 24 if given.small else 120),
        "interface": lambda: interface(given.device, (64,) if given.small else (512, 2048, 8192, 16384)),
        "steps": lambda: steps(given.device, given.small),
        "generate": lambda: generate(given.device),
        "static": lambda: static(given.device),
    }
    for name in given.part or parts:
        found[name] = parts[name]()
        given.out.write_text(json.dumps(found, indent=1))
    bad = [row for part in parts for row in found.get(part, []) if not row.get("ok", True) and not row.get("experts")]
    print(f"{len(bad)} rows are not as they should be", *bad, sep="\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
