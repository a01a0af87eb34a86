"""Random calls on tensors whose memory begins or ends at a forbidden page, where reading or writing a byte too much kills the process.

A script (attack_child.py). Results have the bits of the same call in other memory, which other tests hold to the oracle.
"""

import ctypes
import mmap
from dataclasses import replace
from random import Random

import append_problems
import attack_child
import decode_fuzz
import torch
from torch import Tensor

import tilewise as tw
from tilewise.masks import Causal, Dense, Full, SlidingWindow
from tilewise.masks.mask import Combined
from tilewise.problem import Call
from tilewise.runtime.dispatch import named
from tilewise.testing import tolerance
from tilewise.testing.cases import FEATURES, Case, make, masks, upstream

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def placed(x: Tensor, behind: bool) -> Tensor:
    """x, with its strides, in memory that ends where a forbidden page begins (`behind`), or begins where one ends; both where it fills pages."""
    if x.numel() == 0:
        return x
    size = x.itemsize * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)))
    room = -(-size // PAGE) * PAGE
    area = mmap.mmap(-1, room + 2 * PAGE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for forbidden in (begin, begin + PAGE + room):
        if _libc.mprotect(forbidden, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(area, dtype=torch.uint8, offset=PAGE + (room - size if behind else 0), count=size).view(x.dtype)
    found = flat.as_strided(x.shape, x.stride())
    once = tuple(slice(0, 1 if step == 0 else n) for n, step in zip(x.shape, x.stride(), strict=True))  # expanded dimensions have one entry
    found[once].copy_(x[once])
    return found


def all_placed(words: dict, r: Random) -> dict:
    """Every tensor of a call, those of dense masks too; what begins in one place still does."""
    known: dict[tuple, Tensor] = {}

    def of(x):
        if isinstance(x, Dense):
            return Dense(of(x.tensor))
        if isinstance(x, Combined) and x.operation == "&":
            return of(x.left) & of(x.right)
        if not isinstance(x, Tensor) or x.numel() == 0:
            return x
        key = x.data_ptr(), x.dtype
        if key not in known:
            like = max((y for y in words.values() if isinstance(y, Tensor) and (y.data_ptr(), y.dtype) == key), key=Tensor.numel, default=x)
            known[key] = placed(like, r.random() < 0.7)
        return known[key].as_strided(x.shape, x.stride(), known[key].storage_offset())

    return {name: of(x) for name, x in words.items()}


def attention(seed: int) -> None:
    """Forward and backward by each backend of the CPU, held to the oracle."""
    r = Random(seed)
    sizes = {"seqlen_q": r.choice((1, 2, 17, 33, 64, 65, 100)), "seqlen_k": r.choice((1, 3, 16, 31, 64, 97, 130))}
    heads_k = r.choice((1, 2))
    heads = {"heads_k": heads_k, "heads_q": heads_k * r.choice((1, 2, 3))}
    dim = r.choice((1, 3, 8, 16, 24, 33, 40, 64, 72, 128))
    kinds = [Full(), Causal(), SlidingWindow(9, 2)]
    batch, features = r.choice((1, 2)), r.choice(({}, *FEATURES))
    if batch == 2 and min(sizes.values()) >= 16 and heads["heads_q"] == 4:
        kinds = masks(*sizes.values())
    layout = r.choice(("bshd", "bhsd", "sliced", "expanded"))
    case = Case(batch=batch, head_dim=dim, head_dim_v=r.choice((dim, 5, 32)), mask=r.choice(kinds), layout=layout, **sizes, **heads,
                dtype=r.choice(("fp32", "bf16", "fp16", "fp64")), **features)  # fmt: skip
    print(case.id, flush=True)
    call, (d_o, d_lse) = make(case, seed, grad=True), upstream(case, seed)
    names = [name for name, x in vars(call).items() if isinstance(x, Tensor)]
    expect = tolerance.expected(call, d_o, d_lse)
    for name in ("cpu", "tiled"):
        backend = named(name)
        if backend.why_not(call.problem):
            continue
        found: Call = replace(call, **all_placed({each: getattr(call, each) for each in names}, r))
        o, lse = backend.forward(found)
        tolerance.check_outputs(call, o, lse, expect)
        beside = [None if x is None else placed(x, r.random() < 0.7) for x in (o, lse, d_o, d_lse)]
        grads = backend.backward(found, *beside, found.bias is not None)
        tolerance.check_gradients(call, grads, d_o, d_lse, expect)


def varlen(seed: int) -> None:
    """Packed documents, some empty, some tokens behind the last; gradients, too."""
    r, draw = Random(seed), torch.Generator().manual_seed(seed)
    documents, kind = r.choice((1, 2, 5)), r.choice((torch.float32, torch.bfloat16, torch.float16))
    lengths = [[r.choice((0, 1, 7, 16, 33, 64)) for _ in range(documents)] for _ in range(2)]
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(each).cumsum(0).tolist()], dtype=r.choice((torch.int32, torch.int64))) for each in lengths)
    heads_k, dim, dim_v = r.choice((1, 2)), r.choice((8, 17, 64, 72)), r.choice((8, 64))
    shapes = (heads_k * r.choice((1, 3)), dim), (heads_k, dim), (heads_k, dim_v)
    totals = [sum(each) + r.choice((0, 0, 3)) for each in (lengths[0], lengths[1])]
    q, k, v = (torch.randn(n, *shape, generator=draw).to(kind) for n, shape in zip((totals[0], totals[1], totals[1]), shapes, strict=True))
    d_o = torch.randn(totals[0], shapes[0][0], dim_v, generator=draw).to(kind)
    words = {"causal": r.random() < 0.5, "softcap": r.choice((0.0, 5.0))}
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "d_o": d_o}
    if r.random() < 0.3:
        given["alibi_slopes"] = torch.rand(shapes[0][0], generator=draw)
    print(lengths, shapes, kind, words, flush=True)

    def run(d_o, **tensors):
        leaves = [tensors[name].detach().requires_grad_() for name in ("q", "k", "v")]
        o, lse = tw.attention_varlen(**tensors | dict(zip(("q", "k", "v"), leaves, strict=True)), **words, return_lse=True)
        return o, lse, *torch.autograd.grad(o, leaves, d_o)

    want = run(**given)
    for _ in range(3):
        assert all(map(torch.equal, run(**all_placed(given, r)), want))


def decode(seed: int) -> None:
    """decode_fuzz.py's calls, with new tokens, pages and packed queries."""
    r = Random(seed)
    made = decode_fuzz.problem(decode_fuzz.kind(seed, kernels=False), seed, most=150)
    print(made, flush=True)

    def run(out=None, **words):
        there = all_placed(words if out is None else words | {"out": out}, r)
        found = tw.decode(**there)
        for name in ("k_cache", "v_cache"):
            words[name].copy_(there[name])
        return found if out is None else out.copy_(found)

    # torch's products in fp64 may depend on where a tensor begins
    if made.call.q.dtype == torch.float64:
        run(**made.given)
    else:
        decode_fuzz.checked(made, alone=False, run=run)


def append(seed: int) -> None:
    """Into contiguous caches, entries and pages."""
    r = Random(seed)
    page, batch, packed = r.choice((0, 0, 1, 5, 16)), r.choice((1, 3)), r.random() < 0.5
    new = tuple(r.choice((0, 1, 4)) for _ in range(batch)) if packed else r.choice((1, 2, 5))
    case = append_problems.AppendCase(
        lengths=tuple(r.randint(0, 75) for _ in range(batch)), new=new, heads=r.choice((1, 2)), dims=r.choice(((64, 64), (8, 3), (17, 40))),
        page=page, entries=not page and r.random() < 0.5, index=r.choice((torch.int32, torch.int64)),
        rotary=r.choice((0, 0, 8)), interleaved=r.random() < 0.5, first=r.random() < 0.3,
        dtype=r.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    )  # fmt: skip
    print(case, flush=True)
    call = append_problems.made(case, seed)
    words = {name: x for name, x in vars(call).items() if x is not None}
    if "rotary_cos" not in words:
        words = {name: x for name, x in words.items() if name not in ("rotary_first", "interleaved")}
    elif "rotary_first" in words:
        words["rotary_first"] = words["rotary_first"].clamp(max=call.rotary_cos.shape[0] - 9)
    there, also = all_placed(words, r), words | {name: words[name].clone() for name in ("k_cache", "v_cache")}
    for each in (there, also):
        tw.append(**each)
    assert all(append_problems.same(there[name], also[name]) for name in ("k_cache", "v_cache"))


def beyond(seed: int) -> None:
    """A number behind, and one before: what guards are for."""
    x = placed(torch.zeros(100, dtype=torch.float32), behind=seed == 0)
    print(ctypes.c_float.from_address(x.data_ptr() + (x.nbytes if seed == 0 else -4)).value, flush=True)


if __name__ == "__main__":
    attack_child.serve({f.__name__: f for f in (attention, varlen, decode, append, beyond)})
