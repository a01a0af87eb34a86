"""What the host takes for a small call, by the wall clock: tilewise itself, with tensors beside q, k and v, through each drop-in, and torch's own.

python tools/gpu/host_time.py [--json FILE]       on a Hopper GPU, under 60 s with kernels in the cache
python tools/gpu/host_time.py --device cpu        a rehearsal

Batch 1, 128 tokens, 2 heads of 64, bf16: kernels take less time than the host, so that the time of a call is the host's. One JSON line a case: `us`,
the median of calls; `of` is the case to compare with, whose calls alternate with it; `above_us` the mean of the middle half of the differences of
neighbours, and `spread_us` how far two halves of the measurement are apart in it. A drop-in may take 3 % or 15 us more.

With gradients a call waits twice for another thread, autograd's, to wake up, which takes 100 us of most of the time and is another number each time.
The third pass has autograd on the caller's thread: what is left is what the host computes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise.compat import flash_attn, sdpa, torch_flash

SEQLEN, HEADS, HEAD_DIM = 128, 2, 64
PAIRS = {"cuda": 600, "cpu": 200}
PASSES = {"forward": (False, True), "forward and backward": (True, True), "forward and backward, one thread": (True, False)}
MOST_SHARE, MOST_US = 0.03, 15.0


def cases(device: str, grad: bool) -> Iterator[tuple[str, str | None, Callable, list[torch.Tensor]]]:
    """Name, name of the case to compare with, call, and its leaves."""

    def new(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)

    q, k, v = x = [new(1, SEQLEN, HEADS, HEAD_DIM) for _ in range(3)]
    heads_first = [new(1, HEADS, SEQLEN, HEAD_DIM) for _ in range(3)]
    packed = [new(SEQLEN, HEADS, HEAD_DIM) for _ in range(3)]
    chunk = [new(1, 1, 8 * HEADS, HEAD_DIM), new(1, SEQLEN, HEADS, HEAD_DIM), new(1, SEQLEN, HEADS, HEAD_DIM)]
    bias, row, sink = new(1, HEADS, SEQLEN, SEQLEN), new(1, HEADS, SEQLEN, SEQLEN, dtype=torch.float32), new(HEADS)
    fixed, slopes = bias.detach(), torch.rand(HEADS, device=device)
    cu = torch.tensor([0, 50, SEQLEN], dtype=torch.int32, device=device)
    window = tw.SlidingWindow(31, 0)
    yield "attention", None, lambda: tw.attention(q, k, v, causal=True), x
    yield "return_lse", "attention", lambda: tw.attention(q, k, v, causal=True, return_lse=True)[0], x
    yield "bias", "attention", lambda: tw.attention(q, k, v, bias=bias), [*x, bias]
    yield "bias fp32", "attention", lambda: tw.attention(q, k, v, bias=row), [*x, row]
    yield "bias without gradient", "attention", lambda: tw.attention(q, k, v, bias=fixed), x
    yield "sink, window", "attention", lambda: tw.attention(q, k, v, mask=window, sink=sink), [*x, sink]
    yield "alibi", "attention", lambda: tw.attention(q, k, v, causal=True, alibi_slopes=slopes), x
    yield "window", "attention", lambda: tw.attention(q, k, v, mask=window), x
    yield "packed heads", "attention", lambda: tw.attention(*chunk, causal=True), chunk
    yield "attention_varlen", "attention", lambda: tw.attention_varlen(*packed, cu, cu, causal=True), packed
    if not grad:
        yield from decoding(new, device)
        yield from in_eight_bits([y.detach() for y in x], [y.detach() for y in packed], cu)
    yield "flash_attn_func", "attention", lambda: flash_attn.flash_attn_func(q, k, v, causal=True), x
    yield "flash_attn_func, window", "window", lambda: flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(31, 0)), x
    yield (
        "flash_attn_varlen_func",
        "attention_varlen",
        lambda: flash_attn.flash_attn_varlen_func(*packed, cu, cu, 78, 78, causal=True),
        packed,
    )

    def as_torch(function, tensors=heads_first):
        return lambda: function(*tensors, is_causal=True)

    turned = [y.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(grad) for y in heads_first]
    yield "sdpa patched", "attention", as_torch(sdpa.scaled_dot_product_attention), heads_first
    yield "sdpa patched, tokens first", "attention", as_torch(sdpa.scaled_dot_product_attention, turned), turned
    yield "sdpa patched, bias", "bias", lambda: sdpa.scaled_dot_product_attention(*heads_first, attn_mask=bias), [*heads_first, bias]
    hf = transformers_attention()
    if hf is not None:
        module = SimpleNamespace(is_causal=True)
        yield "transformers", "attention", lambda: hf(module, *heads_first, None, scaling=0.125)[0], heads_first
        yield (
            "transformers, sink",
            "sink, window",
            lambda: hf(module, *heads_first, None, scaling=0.125, s_aux=sink)[0],
            [*heads_first, sink],
        )
    yield "torch", None, as_torch(F.scaled_dot_product_attention), heads_first
    call = torch_call if device == "cuda" else operator_call
    yield "registry", "attention", as_torch(call), heads_first
    yield "registry, tokens first", "attention", as_torch(call, turned), turned


def decoding(new: Callable, device: str) -> Iterator[tuple[str, str | None, Callable, list[torch.Tensor]]]:
    """One new token of four sequences against a cache, contiguous and paged."""
    q, k, v = new(4, 1, 4 * HEADS, HEAD_DIM), new(4, SEQLEN, HEADS, HEAD_DIM), new(4, SEQLEN, HEADS, HEAD_DIM)
    lengths = torch.full((4,), SEQLEN // 2, dtype=torch.int32, device=device)
    pages = [x.view(4 * SEQLEN // 16, 16, HEADS, HEAD_DIM) for x in (k, v)]
    table = torch.arange(4 * SEQLEN // 16, dtype=torch.int32, device=device).view(4, SEQLEN // 16)
    yield "decode", None, lambda: tw.decode(q, k, v, cache_seqlens=lengths), [q, k, v]
    where = {"cache_seqlens": lengths, "page_table": table}
    yield "decode, paged", "decode", lambda: tw.decode(q, *pages, **where), [q, k, v]
    more = {name: new(4, 1, HEADS, HEAD_DIM) for name in "kv"}
    angles = torch.rand(SEQLEN, HEAD_DIM // 2, device=device)
    out, rotary = torch.empty_like(q), {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    yield "decode, paged, new tokens", "decode", lambda: tw.decode(q, *pages, **where, **more), [q, k, v]
    yield "decode, paged, new tokens rotated", "decode", lambda: tw.decode(q, *pages, **where, **more, **rotary), [q, k, v]
    yield (
        "decode, paged, new tokens, out",
        "decode",
        lambda: tw.decode(q, *pages, **where, **more, out=out),
        [q, k, v],
    )


def in_eight_bits(x: list[torch.Tensor], packed: list[torch.Tensor], cu: torch.Tensor) -> Iterator[tuple[str, str | None, Callable, list]]:
    """Quantised on the way, and given with scales: two or three launches each."""
    (q, a), (k, b), (v, c) = (tw.quantise(y, per="head") for y in x)
    scales = {"q_scale": a, "k_scale": b, "v_scale": c}
    for precision in ("int8", "fp8"):
        yield precision, "attention", lambda precision=precision: tw.attention(*x, causal=True, precision=precision), x
    yield "e4m3 with scales", "attention", lambda: tw.attention(q, k, v, causal=True, **scales), [q, k, v]
    yield "e4m3", "attention", lambda: tw.attention(q, k, v, causal=True), [q, k, v]
    yield "int8, packed", "attention_varlen", lambda: tw.attention_varlen(*packed, cu, cu, causal=True, precision="int8"), packed


def torch_call(q, k, v, is_causal: bool):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def operator_call(q, k, v, is_causal: bool):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


class Registry:
    """tilewise under torch's flash attention."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        if self.device == "cpu":
            self.handle, self.only_flash = torch_flash.Kernels("CPU"), nullcontext()
        else:
            self.handle, self.only_flash = torch_flash.register(), sdpa_kernel(SDPBackend.FLASH_ATTENTION)
            torch.nn.attention.activate_flash_attention_impl("tilewise")
        self.only_flash.__enter__()

    def __exit__(self, *error) -> None:
        self.only_flash.__exit__(*error)
        self.handle.remove()


def transformers_attention() -> Callable | None:
    try:
        from tilewise.compat.transformers import attention
    except ImportError:
        return None
    return attention


def alternating(run: Callable, other: Callable | None, pairs: int) -> dict:
    """The row's numbers, of calls of `other` and `run` in turns, each the first in half of the turns."""
    clock, taken = time.perf_counter, ([], [])
    for turn in range(pairs):
        for which in (turn % 2, 1 - turn % 2):
            if (call := (other, run)[which]) is not None:
                start = clock()
                call()
                taken[which].append((clock() - start) * 1e6)
    row = {"us": round(statistics.median(taken[1]), 2)}
    if other is not None:
        above = [b - a for a, b in zip(*taken, strict=True)]
        halves = middle(above[: pairs // 2]), middle(above[pairs // 2 :])
        usual = statistics.median(taken[0])
        row |= {"of_us": round(usual, 2), "above_us": round(middle(above), 2), "spread_us": round(abs(halves[0] - halves[1]), 2)}
        row["within"] = row["above_us"] <= max(MOST_US, MOST_SHARE * usual)
    return row


def middle(x: list[float]) -> float:
    """The mean of the middle half."""
    x = sorted(x)
    return statistics.fmean(x[len(x) // 4 : len(x) - len(x) // 4])


def trained(call: Callable, leaves: list[torch.Tensor]) -> Callable:
    def run():
        for x in leaves:
            x.grad = None
        call().sum().backward()

    return run


def rows(device: str, pairs: int, passes: Iterable[str], only: Sequence[str] = ()) -> Iterator[dict]:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for kind in passes:
        grad, threads = PASSES[kind]
        found = {}
        for name, of, call, leaves in cases(device, grad):
            run = found[name] = trained(call, leaves) if grad else call
            if only and not any(part in name for part in only):
                continue
            row, other = {"case": name, "pass": kind} | ({} if of is None else {"of": of}), found.get(of)
            try:
                with torch.autograd.set_multithreading_enabled(threads), Registry(device) if name.startswith("registry") else nullcontext():
                    for _ in range(20):  # for what is compiled and remembered
                        run()
                        if other is not None:
                            other()
                    wait()
                    row |= alternating(run, other, pairs)
                    wait()
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            yield row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--pairs", type=int, help=f"turns of each case; {PAIRS}")
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="cases whose names hold one of these")
    parser.add_argument("--json", help="also write the rows to this file, with the machine and torch's version, as JSON lines")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device; --device cpu rehearses", file=sys.stderr)
        return 2
    if options.device == "cpu":
        torch.set_num_threads(1)  # which are not waited for
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    common, wrong, lines = {"machine": machine, "torch": torch.__version__, "tilewise": tw.__version__}, 0, []
    for row in rows(options.device, options.pairs or PAIRS[options.device], options.passes, options.only):
        print(json.dumps(row), flush=True)
        lines.append(json.dumps(row | common))
        wrong += "error" in row
    if options.json:
        with open(options.json, "w") as file:
            file.write("\n".join(lines) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
