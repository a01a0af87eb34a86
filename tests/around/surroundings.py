"""The public functions as a table, what a call of them gives, and cells that run apart.

A cell is a call of one function in one of torch's surroundings. It is right where results and gradients are those of the plain call, or where one
sentence refuses it. Cells of a file run in a process of their own, because a wrong one may end it; the file's test says which were wrong.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.runtime import call_cache

HERE = Path(__file__)
TIME_LIMIT_S = 300


class Function(NamedTuple):
    """One way to call a public function on small tensors."""

    make: Callable[[], dict[str, Tensor]]  # its tensors by name, mostly in fp32, the same numbers at every call
    call: Callable[..., tuple[Tensor, ...]]
    grads: tuple[str, ...] = ()  # the tensors that take a gradient


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


def integers(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cpu")


def qkv(batch: int = 2, seqlen_q: int = 5, seqlen_k: int = 7) -> dict[str, Tensor]:
    """q (batch, seqlen_q, 4, 8), k and v (batch, seqlen_k, 2, 8)."""
    k, v = normal(2, batch, seqlen_k, 2, 8, seed=1).unbind(0)
    return {"q": normal(batch, seqlen_q, 4, 8), "k": k, "v": v}


def _with_everything() -> dict[str, Tensor]:
    shown = normal(5, 7, seed=2) > 0
    shown[:, 0] = True
    more = {"bias": normal(1, 4, 5, 7, seed=3), "slopes": normal(4, seed=4).abs(), "sink": normal(3, 4, seed=5), "shown": shown}
    return qkv() | more


def _everything(q, k, v, bias, slopes, sink, shown, backend: str = "cpu") -> tuple[Tensor, ...]:
    options = {"mask": tw.Dense(shown), "softcap": 3.0, "dropout_p": 0.25, "dropout_seed": 7, "return_lse": True, "backend": backend}
    return tw.attention(q, k, v, bias=bias, alibi_slopes=slopes, sink=sink, **options)


def _packed() -> dict[str, Tensor]:
    tensors = {name: x.flatten(0, 1) for name, x in qkv().items()}
    return tensors | {
        "cu_q": integers(0, 4, 4, 10),
        "cu_k": integers(0, 5, 9, 14),
        "slopes": normal(4, seed=4).abs(),
        "sink": normal(4, seed=5),
    }


def _varlen(q, k, v, cu_q, cu_k, slopes, sink) -> tuple[Tensor, ...]:
    return tw.attention_varlen(q, k, v, cu_q, cu_k, alibi_slopes=slopes, sink=sink, return_lse=True)


def _of_documents() -> dict[str, Tensor]:
    more = {"used": integers(3, 2, 5), "bias": normal(3, 4, 6, 6, seed=6), "slopes": normal(3, 4, seed=4).abs()}
    return _packed() | more


def _varlen_of_documents(q, k, v, cu_q, cu_k, slopes, sink, used, bias) -> tuple[Tensor, ...]:
    return tw.attention_varlen(
        q,
        k,
        v,
        cu_q,
        cu_k,
        causal=True,
        bias=bias,
        alibi_slopes=slopes,
        sink=sink,
        seqused_k=used,
        return_lse=True,
        dropout_p=0.25,
        dropout_seed=7,
    )


def _padded() -> dict[str, Tensor]:
    return qkv() | {"lengths": integers(3, 7), "start": integers(2, 0, dtype=torch.int64), "bias": normal(4, 5, 1, seed=3)}


def _padding(q, k, v, lengths, start, bias) -> tuple[Tensor, ...]:
    return tw.attention(q, k, v, causal=True, mask=tw.Padding(lengths, start), bias=bias, return_lse=True)


def _with_largest(q, k, v) -> tuple[Tensor, ...]:
    """The largest scores have no gradient, so they come with what has one."""
    o, lse, largest = tw.attention(q, k, v, causal=True, return_lse=True, return_max_logits=True)
    return o, lse * largest[..., None]


def _seeded(q, k, v) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (tw.attention(q, k, v, dropout_p=0.5),)


def _cache() -> dict[str, Tensor]:
    tensors = qkv(seqlen_q=1)
    return tensors | {"lengths": integers(3, 7), "sink": normal(4, seed=5)}


def _decode(q, k, v, lengths, sink) -> tuple[Tensor, ...]:
    return tw.decode(q, k, v, cache_seqlens=lengths, sink=sink, return_lse=True)


def _pages() -> dict[str, Tensor]:
    """Two sequences in 5 pages of 3 tokens."""
    k, v = normal(2, 5, 3, 2, 8, seed=1).unbind(0)
    shown = normal(1, 4, 2, 6, seed=2) > -1
    more = {"lengths": integers(3, 5), "pages": integers(4, 0, 1, 3).view(2, 2), "slopes": normal(2, 4, seed=4).abs()}
    return {"q": normal(2, 2, 4, 8), "k": k, "v": v, "shown": shown, "sink": normal(4, seed=5)} | more


def _paged(q, k, v, lengths, pages, slopes, sink, shown) -> tuple[Tensor, ...]:
    options = {"mask": tw.Dense(shown), "softcap": 3.0, "scale": 0.3, "return_lse": True}
    return tw.decode(q, k, v, cache_seqlens=lengths, page_table=pages, alibi_slopes=slopes, sink=sink, **options)


def _entries() -> dict[str, Tensor]:
    """Two sequences of 1 and 3 queries, in a cache of three entries of 7 tokens."""
    tree = torch.tensor([[[1, 0], [0, 1]]], dtype=torch.bool, device="cpu")
    index = {"cu": integers(0, 1, 4), "lengths": integers(7, 5), "entries": integers(2, 0), "leftpad": integers(1, 0)}
    k, v = normal(2, 3, 7, 2, 8, seed=1).unbind(0)
    return {"q": normal(4, 4, 8), "k": k, "v": v, "tree": tree, "cos": normal(9, 2, seed=2), "sin": normal(9, 2, seed=3)} | index


def _packed_decode(q, k, v, cu, lengths, entries, leftpad, tree, cos, sin) -> tuple[Tensor, ...]:
    places = {"cu_seqlens_q": cu, "cache_seqlens": lengths, "cache_batch_idx": entries, "leftpad": leftpad}
    return tw.decode(q, k, v, tree=tree, rotary_cos=cos, rotary_sin=sin, return_lse=True, **places)


def _new() -> dict[str, Tensor]:
    """One and two new tokens for two sequences, in 5 pages of 3 tokens."""
    k_cache, v_cache = normal(2, 5, 3, 2, 8, seed=1).unbind(0)
    more = {"cu": integers(0, 1, 3), "lengths": integers(3, 2), "pages": integers(4, 0, 1, 3).view(2, 2)}
    new = {"k": normal(3, 2, 8, seed=4), "v": normal(3, 2, 8, seed=5), "cos": normal(9, 2, seed=2), "sin": normal(9, 2, seed=3)}
    return {"k_cache": k_cache.clone(), "v_cache": v_cache.clone()} | new | more


def _append(k_cache, v_cache, k, v, cu, lengths, pages, cos, sin) -> tuple[Tensor, ...]:
    tw.append(k_cache, v_cache, k, v, cache_seqlens=lengths, cu_seqlens=cu, page_table=pages, rotary_cos=cos, rotary_sin=sin)
    return k_cache, v_cache


def _queries_and_new() -> dict[str, Tensor]:
    """One and two queries, as many as there are new tokens."""
    return _new() | {"q": normal(3, 4, 8), "out": torch.empty(3, 4, 8, dtype=torch.float32, device="cpu")}


def _decode_appending(k_cache, v_cache, k, v, cu, lengths, pages, cos, sin, q, out) -> tuple[Tensor, ...]:
    words = {"cu_seqlens_q": cu, "cache_seqlens": lengths, "page_table": pages, "rotary_cos": cos, "rotary_sin": sin, "out": out}
    return *tw.decode(q, k_cache, v_cache, k=k, v=v, return_lse=True, **words), k_cache, v_cache


def _parts() -> dict[str, Tensor]:
    return {"o": normal(2, 5, 4, 8), "other": normal(2, 5, 4, 8, seed=1), "lse": normal(2, 4, 5, seed=2), "more": normal(2, 4, 5, seed=3)}


def _merge(o, other, lse, more) -> tuple[Tensor, ...]:
    return tw.merge([o, other], [lse, more])


def _halves() -> dict[str, Tensor]:
    return {name: x.bfloat16() for name, x in qkv().items()} | {"sink": normal(4, seed=5)}


def _quantised_inside(q, k, v, sink) -> tuple[Tensor, ...]:
    return tw.attention(q, k, v, causal=True, precision="int8", sink=sink, softcap=3.0, return_lse=True)


def _int8(x: Tensor) -> Tensor:
    """Of e4m3 torch makes no negated, nested, sparse or stacked tensors."""
    return (x * 30.0).clamp(-127.0, 127.0).to(torch.int8)


def _in_eight_bits() -> dict[str, Tensor]:
    """q and k in int8, each with a scale of another kind, and v in bf16; torch can do too little with e4m3."""
    tensors = {name: x.bfloat16() if name == "v" else _int8(x) for name, x in qkv().items()}
    return tensors | {"q_scale": normal(2, 4, 5, seed=2).abs(), "k_scale": normal(2, 2, 1, seed=3).abs()}


def _eight_bits(q, k, v, q_scale, k_scale) -> tuple[Tensor, ...]:
    return tw.attention(q, k, v, q_scale=q_scale, k_scale=k_scale, return_lse=True)


def _eight_bit_cache() -> dict[str, Tensor]:
    tensors = _pages()
    caches = {name: _int8(tensors[name]) for name in ("k", "v")}
    scales = {"k_scale": normal(5, 3, 2, seed=7).abs(), "v_scale": normal(2, seed=8).abs()}
    return {name: tensors[name] for name in ("q", "lengths", "pages")} | caches | scales


def _decode_eight_bits(q, k, v, lengths, pages, k_scale, v_scale) -> tuple[Tensor, ...]:
    return tw.decode(q, k, v, cache_seqlens=lengths, page_table=pages, k_scale=k_scale, v_scale=v_scale, return_lse=True)


def _quantise(x) -> tuple[Tensor, ...]:
    return *tw.quantise(x, "int8", per="tile", hadamard=True, centre=True), *tw.quantise(x, "fp8", per="token")


WRITING = "append", "decode, appending"  # which write caches
QKV = ("q", "k", "v")
FUNCTIONS = {
    "attention": Function(qkv, lambda q, k, v: (tw.attention(q, k, v, causal=True),), QKV),
    "attention, lse": Function(qkv, lambda q, k, v: tw.attention(q, k, v, mask=tw.SlidingWindow(3, 0), return_lse=True), QKV),
    "attention, largest scores": Function(qkv, _with_largest, QKV),
    "attention, every operand": Function(_with_everything, _everything, (*QKV, "bias", "sink")),
    "attention, tiled": Function(_with_everything, partial(_everything, backend="tiled"), (*QKV, "bias", "sink")),
    "attention, seed drawn": Function(qkv, _seeded, QKV),
    "attention_varlen": Function(_packed, _varlen, (*QKV, "sink")),
    "attention_varlen, every operand": Function(_of_documents, _varlen_of_documents, (*QKV, "sink", "bias")),
    "attention, padding": Function(_padded, _padding, (*QKV, "bias")),
    "decode": Function(_cache, _decode),
    "decode, every operand": Function(_pages, _paged),
    "decode, packed": Function(_entries, _packed_decode),
    "append": Function(_new, _append),
    "decode, appending": Function(_queries_and_new, _decode_appending),
    "attention, quantised inside": Function(_halves, _quantised_inside, (*QKV, "sink")),
    "attention, 8 bits": Function(_in_eight_bits, _eight_bits),
    "decode, 8 bits": Function(_eight_bit_cache, _decode_eight_bits),
    "quantise": Function(lambda: {"x": normal(2, 5, 4, 8)}, _quantise),
    "merge": Function(_parts, _merge, ("o", "other", "lse", "more")),
}


def of(function: Function, tensors: dict[str, Tensor], grad: bool = True) -> list[Tensor]:
    """What the function gives, and with `grad` the gradients of a weighted sum of it."""
    tensors = {name: x.detach().requires_grad_(grad and name in function.grads) for name, x in tensors.items()}
    return with_gradients(function.call(**tensors), [tensors[name] for name in function.grads] if grad else [])


def with_gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    weights = [normal(*x.shape, seed=9 + n).to(x.dtype) for n, x in enumerate(outputs)]
    if leaves:
        torch.autograd.backward(outputs, weights)
    return [x.detach() for x in (*outputs, *(leaf.grad for leaf in leaves))]


def plain(name: str, grad: bool = True) -> list[Tensor]:
    """The right results, from a first call where nothing else takes part."""
    call_cache.forget()
    return of(FUNCTIONS[name], FUNCTIONS[name].make(), grad)


def check_equal(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    """Bit for bit, dtypes included."""
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a, b):
            found = (
                f"{tuple(a.shape)} {a.dtype}, expected {tuple(b.shape)} {b.dtype}"
                if a.shape != b.shape or a.dtype != b.dtype
                else f"{a} not {b}"
            )
            raise AssertionError(f"result {n} differs: {found}")


def check_close(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    """Up to rounding, where sums are in another order."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def check_refused(run: Callable, *words: str) -> None:
    """`run` must raise, in one sentence that has one of the words."""
    try:
        got = run()
    except Exception as error:
        if not any(word in str(error) for word in words):
            raise AssertionError(f"expected a sentence with one of {words}, got {type(error).__name__}: {error}") from error
        return
    raise AssertionError(f"expected an error with one of {words}, got {got!r:.200}")


SHARES = pytest.mark.parametrize("share", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])


def check_cells(file: str, share: float) -> None:
    """Run a share of a file's CELLS in processes of their own; AssertionError names those that fail."""
    import sampled  # which is not on the path of those

    module = _load(file)
    cells = sampled.some(list(module.CELLS), share, file.rpartition("/")[2])
    done: dict[str, str] = {}
    while len(done) < len(cells):
        before = len(done)
        process = subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE), file, json.dumps([name for name in cells if name not in done])],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
        done |= dict(json.loads(line) for line in process.stdout.splitlines() if line.startswith("["))
        if len(done) < len(cells):  # the process ended in the next one
            if len(done) == before and process.returncode == 0:
                raise AssertionError(f"no cell of {file} ran:\n{process.stderr[-2000:]}")
            died = next(name for name in cells if name not in done)
            done[died] = f"the process ended with {process.returncode}: {process.stderr[-300:]}"
    wrong = {name: error for name, error in done.items() if error}
    assert not wrong, f"{len(wrong)} of {len(done)} cells:\n" + "\n".join(f"  {name}: {error}" for name, error in wrong.items())


def _load(file: str):
    spec = spec_from_file_location(Path(file).stem, file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(file: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    module = _load(file)
    for name in names:
        print("\n" + json.dumps([name, _error(module.CELLS[name])]), flush=True)


def _error(cell: Callable[[], None]) -> str:
    """What was wrong; empty for nothing."""
    try:
        cell()
        return ""
    except Exception as found:
        return f"{type(found).__name__}: {found}"[:500]


if __name__ == "__main__":
    _run(sys.argv[1], json.loads(sys.argv[2]))
