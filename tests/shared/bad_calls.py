"""Good calls with one to three things changed at random: each either says what is wrong, in a sentence of tilewise's, or gives the right value.

A script (attack_child.py). A call that raises leaves every tensor as it was. One that does not is held to the oracle, which gets copies.
"""

import math
import traceback
from contextlib import suppress
from pathlib import Path
from random import Random

import attack_child
import torch
from torch import Tensor

import tilewise as tw
from tilewise.masks import Causal, Dense, Documents, Full, Padding, PerHead, SlidingWindow

OURS = Path(tw.__file__).parent
ERRORS = ValueError, NotImplementedError, TypeError  # ShapeError is the first, UnsupportedError the second
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int8, torch.int16,
          torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip
NUMBERS = 0, 1, -1, 2, 3, 7, 16, 2**31 - 1, -(2**31), 2**31, 2**62, -(2**63), 0.5, -0.5, 1e30, 1e300, math.nan, math.inf, -math.inf
OTHERS = None, True, False, "1", "", b"q", [], (), {}, [1.0], object()
BACKENDS = None, "cpu", "tiled", "reference", "hopper", "cudnn", "", 3
NEAR = {
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-8,
}  # above roundings of numbers of this size; else 8 bits


def masks(r: Random, rows: int, keys: int) -> object:
    shape = r.choice(
        ((rows, keys), (1, keys), (rows, 1), (3, keys), (rows, keys + 1), (2, 1, rows, keys), (1, 3, rows, keys), (keys,), (0, keys))
    )
    return r.choice((
        Full(), Causal(), Causal(offset=r.choice((-5, 5, 10**9))), SlidingWindow(r.randint(0, 9), r.randint(0, 9)), Full, "causal", 3,
        Dense(torch.ones(shape, dtype=torch.bool)) if len(shape) > 1 else Full(), Padding((1, 2)), Padding((3, 99)), Documents((0, 2, 4), (0, 3, 5)),
        PerHead({(0, 1): Causal()}), PerHead({(0, 1): Causal(), (1, 99): Full()}), torch.ones(rows, keys, dtype=torch.bool),
    ))  # fmt: skip


def tensors(r: Random, x: Tensor, words: dict) -> object:
    """Something in place of a tensor."""
    dim = r.randrange(x.dim()) if x.dim() else 0
    others = [y for y in words.values() if isinstance(y, Tensor)]
    ways = [
        lambda: x.to(r.choice(DTYPES)),
        lambda: x.to(r.choice(DTYPES)),
        lambda: x.to("meta"),
        lambda: x[None],
        lambda: x.flatten(),
        lambda: x.squeeze(),
        lambda: x.new_empty(0),
        lambda: x.new_zeros(()),
        lambda: x.to_sparse(),
        lambda: torch.nested.nested_tensor([x, x]),
        lambda: x.clone().requires_grad_(),
        lambda: torch.nn.Parameter(x.clone(), requires_grad=False),
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: torch._neg_view(x),
        lambda: r.choice(others),
        lambda: r.choice(others),
        lambda: freed(x),
        lambda: x.clone().fill_(math.nan),
        lambda: r.choice(OTHERS + NUMBERS),
    ]
    if x.dim():
        n = x.shape[dim]
        ways += [
            lambda: x.narrow(dim, 0, r.randint(0, n)),
            lambda: x.narrow(dim, 0, r.randint(0, n)),
            lambda: x.narrow(dim, 0, max(n - 1, 0)),
            lambda: torch.cat((x, x), dim),
            lambda: x.narrow(dim, 0, min(n, 1)).expand(x.shape),
            lambda: x.select(dim, 0),
            lambda: x.transpose(dim, r.randrange(x.dim())),
            lambda: x.flip(dim),
            lambda: torch.stack((x, x), -1)[..., 0],
            lambda: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
            lambda: x.as_strided(x.shape, [r.choice((s, 0, 1)) for s in x.stride()]),
        ]
    if x.dtype in (torch.int32, torch.int64):
        ways += [lambda: spoiled(r, x)] * 12
    return r.choice(ways)()


def spoiled(r: Random, x: Tensor) -> Tensor:
    """Some indices out of any range, or slightly."""
    found = x.clone()
    info = torch.iinfo(x.dtype)
    for _ in range(r.randint(1, 3)):
        if found.numel():
            found.view(-1)[r.randrange(found.numel())] = r.choice(
                (-1, 0, 1, 2, 5, 12, 13, 100, info.max, info.min, info.max - 1, -(2**20), 2**20)
            )
    return found


def freed(x: Tensor) -> Tensor:
    found = x.clone()
    found.untyped_storage().resize_(0)
    return found


def changed(words: dict, r: Random, extra: dict) -> dict:
    """extra: what else the call takes, and what makes a value of it."""
    found = dict(words)
    for _ in range(r.choice((1, 1, 1, 2, 2, 3))):
        if extra and r.random() < 0.45:
            name = r.choice(sorted(extra))
            found[name] = extra[name]()
        else:
            name = r.choice(sorted(words))
            x = words[name]  # not what it was changed to: torch's own operations crash on memory that was given back
            found[name] = tensors(r, x, words) if isinstance(x, Tensor) else r.choice((*OTHERS, *NUMBERS))
    return found


def copied(words: dict) -> dict:
    """The same call on memory of its own, where tensors share what they shared."""
    known: dict[int, torch.UntypedStorage] = {}

    def of(x: object) -> object:
        if (
            not isinstance(x, Tensor)
            or x.layout != torch.strided
            or x.is_nested
            or x.is_meta
            or x.is_neg()
            or not x.untyped_storage().size()
        ):
            return x
        storage = x.untyped_storage()
        copy = known.setdefault(storage.data_ptr(), storage.clone())
        return torch.empty(0, dtype=x.dtype).set_(copy, x.storage_offset(), x.shape, x.stride()).requires_grad_(x.requires_grad)

    return {name: of(x) for name, x in words.items()}


def bits(words: dict) -> dict[str, bytes]:
    """What the memory of each tensor holds."""
    there = {
        name: x for name, x in words.items() if isinstance(x, Tensor) and not x.is_meta and x.layout == torch.strided and not x.is_nested
    }
    return {name: bytes(x.untyped_storage()) for name, x in there.items()}


def held(function, words: dict) -> None:
    before, oracle = bits(words), copied(words)
    try:
        found = function(**words)
    except ERRORS as failure:
        last = Path(traceback.extract_tb(failure.__traceback__)[-1].filename)
        assert OURS in last.parents, f"an error that is none of ours, raised in {last}: {type(failure).__name__}: {failure}"
        assert len(str(failure)) > 15, f"no sentence: {failure}"
        assert bits(words) == before, f"tensors were written to by a call that raised {failure}"
        return
    if isinstance(found, Tensor | tuple) and not any(x.numel() for x in (found if isinstance(found, tuple) else (found,))):
        return  # of no rows, whose masks not every backend looks at
    want = function(**oracle | {"backend": "reference"} if function is not tw.append else oracle)
    for name, x in before.items():
        if name not in ("k_cache", "v_cache", "out") and not any(
            shares(words[name], words.get(each)) for each in ("k_cache", "v_cache", "out")
        ):
            assert bits({name: words[name]})[name] == x, f"{name} was written to"
    if found is None:
        return
    for got, expected in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, want)), strict=True):
        assert got.shape == expected.shape, f"shape {tuple(got.shape)}, but the oracle has {tuple(expected.shape)}"
        near = 0.2 if words.get("precision") else NEAR.get(words["q"].dtype, 0.2)
        off = (got.double() - expected.double()).abs().max()
        assert torch.allclose(got.double(), expected.double(), rtol=near, atol=near, equal_nan=True), f"off by {off}"


def shares(x: object, y: object) -> bool:
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def described(words: dict) -> str:
    def of(x: object) -> object:
        if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested:
            numbers = (
                x.tolist()
                if x.dtype in (torch.int32, torch.int64) and not x.is_meta and x.numel() < 20 and x.untyped_storage().size()
                else ""
            )
            return f"{x.dtype}{tuple(x.shape)}{x.stride()}{x.device}{numbers}"
        return f"{type(x).__name__} {str(x)[:60]}"

    return ", ".join(f"{name}={of(x)}" for name, x in words.items())


def tried(function, words: dict, r: Random, extra: dict) -> None:
    found = None
    while found is None:
        with suppress(RuntimeError, TypeError, IndexError, NotImplementedError, ValueError):  # torch does not make every such tensor
            found = changed(words, r, extra)
    print(described(found), flush=True)
    held(function, found)


def cached(r: Random) -> tuple[dict, dict]:
    """A good call of decode, and what else it takes."""
    draw = torch.Generator().manual_seed(r.randrange(1 << 30))
    batch, page, heads_k, dims = r.choice((1, 2)), r.choice((0, 4)), r.choice((1, 2)), (16, 8)
    kind, index = r.choice((torch.float32, torch.bfloat16, torch.float16)), r.choice((torch.int32, torch.int64))
    lead = (7, page) if page else (batch, 12)
    k_cache, v_cache = (torch.randn(*lead, heads_k, dim, generator=draw).to(kind) for dim in dims)
    heads_q, queries = 2 * heads_k, r.choice((1, 3))
    lengths = torch.tensor([r.randint(0, 9) for _ in range(batch)], dtype=index)
    words = {"k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths, "return_lse": True}
    if page:
        words["page_table"] = torch.tensor(
            [r.sample(range(7), 3) for _ in range(batch)] if batch == 1 else [[0, 2, 4], [1, 6, 5]], dtype=index
        )
    total = batch * queries
    if r.random() < 0.4:
        words |= {
            "q": torch.randn(total, heads_q, 16, generator=draw).to(kind),
            "cu_seqlens_q": torch.arange(0, total + 1, queries, dtype=index),
        }
        rows = (total,)
    else:
        words["q"] = torch.randn(batch, queries, heads_q, 16, generator=draw).to(kind)
        rows = (batch, queries)
    if r.random() < 0.5:
        new = rows if r.random() < 0.7 or len(rows) == 1 else (batch, 2)
        words |= {name: torch.randn(*new, heads_k, dim, generator=draw).to(kind) for name, dim in zip(("k", "v"), dims, strict=True)}
    angles = torch.randn(40, 4, generator=draw)

    def scale() -> Tensor:
        shape = r.choice(((), (heads_k,), (batch, heads_k), (*lead, heads_k), (3,), (1, 1, 1, 1)))
        return torch.full(shape, r.choice((1.0, 0.5, math.nan, math.inf, -1.0)))

    def tokens(cache: Tensor) -> Tensor:
        return cache.to(r.choice((torch.float8_e4m3fn, torch.int8)))

    extra = {
        "page_table": lambda: torch.tensor([[0, 1, 2]] * batch, dtype=r.choice((index, torch.int16))),
        "cu_seqlens_q": lambda: torch.tensor([0, *[r.randint(0, 9) for _ in range(batch)]], dtype=index),
        "cache_batch_idx": lambda: torch.tensor([r.randint(-1, batch) for _ in range(batch)], dtype=index),
        "leftpad": lambda: torch.tensor([r.choice((0, 1, 3, 50, -1)) for _ in range(batch)], dtype=index),
        "tree": lambda: torch.ones(r.choice((1, batch)), r.choice((1, 2, 40)), 2, dtype=torch.bool),
        "rotary_cos": lambda: angles.cos(),
        "rotary_sin": lambda: angles.sin(),
        "scale": lambda: r.choice((*NUMBERS, "1", None)),
        "softcap": lambda: r.choice((*NUMBERS, "1", None)),
        "split": lambda: r.choice((*NUMBERS, None, "1", True)),
        "shared_prefix": lambda: r.choice((*NUMBERS, None, "1", True)),
        "cache_seqlens": lambda: r.choice((*NUMBERS, None, "1", True, [1, 2])),
        "backend": lambda: r.choice(BACKENDS),
        "causal": lambda: r.choice((True, False, 1, None)),
        "mask": lambda: masks(r, queries, r.choice((12, lengths.max().item()))),
        "alibi_slopes": lambda: torch.rand(r.choice(((heads_q,), (batch, heads_q), (1, heads_q), (heads_q + 1,), (3, heads_q)))),
        "sink": lambda: torch.randn(r.choice((heads_q, 1, heads_q + 1))),
        "k_scale": scale,
        "v_scale": scale,
        "k_cache": lambda: r.choice((v_cache, tokens(k_cache), k_cache[:1].expand(k_cache.shape), k_cache[..., :8])),
        "v_cache": lambda: r.choice((k_cache, tokens(v_cache), k_cache[..., :8], v_cache[:1].expand(v_cache.shape))),
        "k": lambda: r.choice((k_cache[:, :1], torch.zeros(batch, 1, heads_k, 16, dtype=kind), None)),
        "v": lambda: r.choice((v_cache[:, :1], torch.zeros(batch, 1, heads_k, 8, dtype=kind), None)),
        "out": lambda: r.choice(
            (v_cache[:, :1], torch.empty(*rows, heads_q, 8, dtype=kind), torch.empty(*rows, heads_q, 8), words["q"][..., :8])
        ),
        "check": lambda: r.choice((True, False, 1, None)),
        "interleaved": lambda: r.choice((True, False, 1, None)),
        "return_lse": lambda: r.choice((True, False, 1, None)),
    }
    return words, extra


def decode(seed: int) -> None:
    r = Random(seed)
    words, extra = cached(r)
    tried(tw.decode, words, r, extra)


def append(seed: int) -> None:
    r = Random(seed)
    words, extra = cached(r)
    while "k" not in words:
        words, extra = cached(r)
    names = "k_cache", "v_cache", "k", "v", "cache_seqlens", "page_table"
    given = {name: words[name] for name in names if name in words}
    if words["k"].dim() == 3:
        given["cu_seqlens"] = words["cu_seqlens_q"]
    names = (
        "page_table",
        "cache_batch_idx",
        "cache_seqlens",
        "k",
        "v",
        "k_cache",
        "v_cache",
        "rotary_cos",
        "rotary_sin",
        "check",
        "interleaved",
    )
    more = {name: extra[name] for name in names}
    more |= {"rotary_first": extra["leftpad"], "cu_seqlens": extra["cu_seqlens_q"]}
    tried(tw.append, given, r, more)


def dense(r: Random) -> tuple[dict, dict]:
    """A good call of attention, and what else it takes."""
    draw = torch.Generator().manual_seed(r.randrange(1 << 30))
    batch, heads_k, rows, keys = r.choice((1, 2)), r.choice((1, 2)), r.choice((1, 5)), r.choice((1, 5, 9))
    kind, heads_q = r.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64)), 2 * heads_k
    shapes = {"q": (batch, rows, heads_q, 16), "k": (batch, keys, heads_k, 16), "v": (batch, keys, heads_k, 8)}
    words = {name: torch.randn(shape, generator=draw).to(kind) for name, shape in shapes.items()} | {"return_lse": True}

    def scale(heads: int, tokens: int) -> Tensor:
        return torch.full(
            r.choice(((), (heads,), (batch, heads), (batch, heads, tokens), (batch, heads, 1), (3,))), r.choice((1.0, 0.5, math.nan))
        )

    def bias() -> Tensor:
        return torch.randn([r.choice((1, n, n, n + 1)) for n in (batch, heads_q, rows, keys)][r.randint(0, 3) :]).to(
            r.choice((kind, torch.float32))
        )

    extra = {
        "bias": bias,
        "scale": lambda: r.choice((*NUMBERS, "1", None)),
        "softcap": lambda: r.choice((*NUMBERS, "1", None)),
        "dropout_p": lambda: r.choice((0.0, 1.0, -0.5, math.nan, "0", None)),
        "dropout_seed": lambda: r.choice((*NUMBERS, "1", None)),
        "dropout_offset": lambda: r.choice((*NUMBERS, "1", None)),
        "backend": lambda: r.choice(BACKENDS),
        "causal": lambda: r.choice((True, False, 1, None)),
        "deterministic": lambda: r.choice((True, False, 1, None)),
        "mask": lambda: masks(r, rows, keys),
        "alibi_slopes": lambda: torch.rand(r.choice(((heads_q,), (batch, heads_q), (1, heads_q), (heads_q + 1,), (3, heads_q)))),
        "sink": lambda: torch.randn(r.choice((heads_q, 1, heads_q + 1))),
        "precision": lambda: r.choice((None, "int8", "fp8", "int8_qk", "fp4", 8)),
        "q_scale": lambda: scale(heads_q, rows),
        "k_scale": lambda: scale(heads_k, keys),
        "v_scale": lambda: scale(heads_k, keys),
        "out": lambda: r.choice(
            (torch.empty(batch, rows, heads_q, 8, dtype=kind), torch.empty(batch, rows, heads_q, 8), words["q"][..., :8])
        ),
        "return_lse": lambda: r.choice((True, False, 1, None)),
    }
    return words, extra


def attention(seed: int) -> None:
    r = Random(seed)
    words, extra = dense(r)
    tried(tw.attention, words, r, extra)


def varlen(seed: int) -> None:
    r = Random(seed)
    words, extra = dense(r)
    index = r.choice((torch.int32, torch.int64))
    words = {name: x[0] if isinstance(x, Tensor) else x for name, x in words.items()}
    rows, keys = words["q"].shape[0], words["k"].shape[0]
    words |= {
        "cu_seqlens_q": torch.tensor([0, rows // 2, rows], dtype=index),
        "cu_seqlens_k": torch.tensor([0, keys // 2, keys], dtype=index),
    }
    pages = torch.tensor([[0], [0]], dtype=index)
    more = {
        "seqused_k": lambda: torch.tensor([r.choice((0, 1, 2, 9, -1)) for _ in range(2)], dtype=index),
        "page_table": lambda: r.choice((pages, pages + 1)),
        "cu_seqlens_k": lambda: None,
        "batch_invariant": lambda: r.choice((True, False, 1)),
    }
    extra["out"] = lambda: torch.empty(*words["q"].shape[:2], 8, dtype=words["q"].dtype)
    tried(tw.attention_varlen, words, r, extra | more)


if __name__ == "__main__":
    attack_child.serve({f.__name__: f for f in (decode, append, attention, varlen)})
