"""tilewise under torch's SDPA on a GPU: are results right, is it ours that runs, and what does the way there cost?

python tools/gpu/torch_flash_check.py [--json FILE]        on a Hopper GPU, about two minutes
python tools/gpu/torch_flash_check.py --device cpu         a rehearsal: the operators are called by name, under the CPU's key

Results of SDPA (registered, and patched) and of varlen_attn, forward and backward, must be within the repository's tolerance of the fp64 oracle, and
have the bits of tilewise.attention. Their times may be 3 % or 15 us above those of tilewise.attention, whichever is more. Exits with 1 otherwise.
"""

import argparse
import json
import sys
from contextlib import nullcontext
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise.bench.timing import interleave
from tilewise.compat import sdpa, torch_flash
from tilewise.problem import Call
from tilewise.testing import tolerance

MOST_SHARE, MOST_S = 0.03, 15e-6
RIGHT = [  # batch, heads_q, heads_k, seqlen, head_dim
    (2, 8, 8, 1000, 128),
    (1, 8, 2, 777, 64),
    (2, 4, 4, 130, 72),
    (1, 4, 4, 513, 256),
]
TIMED = [(2, 4, 4, 128, 64), (4, 16, 16, 2048, 128), (2, 32, 8, 4096, 128), (1, 16, 16, 16384, 128), (4, 16, 16, 4096, 64)]


def tensors(batch: int, heads_q: int, heads_k: int, seqlen: int, head_dim: int, dtype: torch.dtype, device: str, grad: bool = True):
    """q, k and v (batch, seqlen, heads, head_dim)."""
    new = {"dtype": dtype, "device": device, "requires_grad": grad}
    return [torch.randn(batch, seqlen, heads, head_dim, **new) for heads in (heads_q, heads_k, heads_k)]


def registered(q, k, v, causal: bool):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0].transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def patched(q, k, v, causal: bool):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def direct(q, k, v, causal: bool):
    return tw.attention(q, k, v, causal=causal)


WAYS = {"registered": registered, "patched": patched}


def right(way, sizes: tuple, dtype: torch.dtype, causal: bool, contiguous: bool, device: str) -> dict:
    """How much of the tolerance O and gradients use, and whether they have the bits of tilewise.attention."""
    leaves = tensors(*sizes, dtype, device)
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) if contiguous else x for x in leaves]
    o = way(*given, causal)
    d_o = torch.randn_like(o)
    grads = torch.autograd.grad(o, leaves, d_o)
    own = direct(*leaves, causal)
    same = torch.equal(o, own) and all(map(torch.equal, grads, torch.autograd.grad(own, leaves, d_o)))
    q, k, v = (x.detach() for x in leaves)
    call = Call(q=q, k=k, v=v, mask=tw.Causal() if causal else tw.Full(), scale=sizes[-1] ** -0.5, grad=True)
    expect = tolerance.expected(call, d_o)
    used = {"o": tolerance.hold("o", o.detach(), expect.o)}
    used |= {f"d{name}": tolerance.hold(f"d{name}", grad, getattr(expect, name)) for name, grad in zip("qkv", grads, strict=True)}
    return {"used": {name: round(share, 3) for name, share in used.items()}, "same_bits": same}


def packed(dtype: torch.dtype, window: tuple[int, int], device: str) -> dict:
    """varlen_attn against the oracle, and the bits of attention_varlen."""
    from torch.nn.attention.varlen import varlen_attn

    starts = [0, 300, 300, 1000, 1234]
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    leaves = [torch.randn(1300, heads, 128, dtype=dtype, device=device, requires_grad=True) for heads in (8, 2, 2)]
    grouped = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__kwdefaults__ else {}  # torch 2.11 takes grouped heads as they are
    o = varlen_attn(*leaves, cu, cu, 700, 700, window_size=window, **grouped)
    d_o = torch.randn_like(o)
    grads = torch.autograd.grad(o, leaves, d_o)
    inner = tw.SlidingWindow(*(None if size < 0 else size for size in window))
    own = tw.attention_varlen(*leaves, cu, cu, mask=inner)
    same = torch.equal(o, own) and all(map(torch.equal, grads, torch.autograd.grad(own, leaves, d_o)))
    q, k, v = (x.detach()[None] for x in leaves)
    call = Call(q=q, k=k, v=v, mask=tw.Documents(starts, inner=inner), scale=128**-0.5, grad=True)
    expect = tolerance.expected(call, d_o[None])
    used = {"o": tolerance.hold("o", o.detach()[None], expect.o)}
    used |= {f"d{name}": tolerance.hold(f"d{name}", grad[None], getattr(expect, name)) for name, grad in zip("qkv", grads, strict=True)}
    return {"used": {name: round(share, 3) for name, share in used.items()}, "same_bits": same}


def compiled(device: str) -> dict:
    """SDPA in a compiled function, whose layouts inductor asserts."""
    leaves = tensors(2, 8, 8, 1000, 128, torch.bfloat16, device)

    def step(q, k, v):
        return registered(q, k, v, True) * 2.0

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        o = function(*leaves)
        results.append([o, *torch.autograd.grad(o, leaves, torch.ones_like(o))])
    return {"same_bits": all(map(torch.equal, *results))}


def timed(sizes: tuple, backward: bool, device: str, clock: str, budget_s: float) -> dict:
    """Microseconds of the three ways."""
    leaves = tensors(*sizes, torch.bfloat16, device, grad=backward)
    d_o = torch.randn_like(leaves[0])

    def call(way):
        def run():
            o = way(*leaves, True)
            return torch.autograd.grad(o, leaves, d_o) if backward else o

        return run

    stats = interleave({name: call(way) for name, way in {"direct": direct, **WAYS}.items()}, budget_s=budget_s, device=device, clock=clock)
    least = stats["direct"].median
    allowed = least + max(MOST_SHARE * least, MOST_S)
    row = {f"{name}_us": round(each.median * 1e6, 2) for name, each in stats.items()}
    return row | {"ok": all(stats[name].median <= allowed for name in WAYS)}


def checks(device: str, quick: bool):
    """Every row, as a dictionary; `ok` says whether it is as it should be."""
    dtypes = (torch.bfloat16, torch.float16)
    for (name, way), sizes, dtype, causal, contiguous in product(
        WAYS.items(), RIGHT[2:3] if quick else RIGHT, dtypes, (False, True), (False, True)
    ):
        what = {"check": "sdpa", "way": name, "sizes": sizes, "dtype": str(dtype), "causal": causal, "contiguous_bhsd": contiguous}
        yield what, partial(right, way, sizes, dtype, causal, contiguous, device)
    for dtype, window in product(dtypes, ((-1, -1), (-1, 0), (255, 0))):
        yield {"check": "varlen_attn", "dtype": str(dtype), "window": window}, partial(packed, dtype, window, device)
    if not quick:
        yield {"check": "compiled"}, partial(compiled, device)
    clocks = ("wall",) if device == "cpu" else ("wall", "events")
    for sizes, backward, clock in product(TIMED[:1] if quick else TIMED, (False, True), clocks):
        yield (
            {"check": "time", "sizes": sizes, "backward": backward, "clock": clock},
            partial(timed, sizes, backward, device, clock, 0.05 if quick else 1.0),
        )


def run(device: str, quick: bool) -> list[dict]:
    rows = []
    torch.manual_seed(0)
    for what, check in checks(device, quick):
        try:
            row = what | check()
            row.setdefault("ok", row.get("same_bits", True))
        except Exception as error:
            row = what | {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="one size")
    parser.add_argument("--json", help="also write the rows to this file, with the GPU and torch's version")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device; --device cpu rehearses", file=sys.stderr)
        return 2
    if options.device == "cpu":
        kernels, flash = torch_flash.Kernels("CPU"), nullcontext()
    else:
        kernels, flash = torch_flash.register(), sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        torch.nn.attention.activate_flash_attention_impl("tilewise")
    try:
        with flash:
            rows = run(options.device, options.quick)
    finally:
        kernels.remove()
    wrong = [row for row in rows if not row["ok"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} as they should be")
    if options.json:
        machine = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "torch": torch.__version__, "tilewise": tw.__version__, "rows": rows}, file, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
