"""What several ranks compute beside one process: mask families, options, layouts, and the comparison. Run inside a rank (ranks.py)."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import tilewise as tw
from tilewise.masks import Part

LONG, SHORT = 1152, 1000


def documents(length: int) -> list[int]:
    """cu_seqlens of a few uneven documents."""
    return [0, length // 14, length // 14 + 1, length // 2, length // 2, length * 3 // 4, length]


def families(n: int) -> dict[str, tw.Mask]:
    """Masks over n tokens."""
    generator = torch.Generator().manual_seed(n)
    tree = [[0, n], [n // 4, n // 2], [n // 2, n]]  # a trunk that two branches share
    return {
        "full": tw.Full(),
        "causal": tw.Causal(),
        "window": tw.SlidingWindow(n // 12, 0),
        "window, first keys": tw.SlidingWindow(n // 9, 30) | tw.FirstKeys(17),
        "prefix": tw.PrefixLM(n // 5),
        "documents": tw.Documents(documents(n), inner=tw.Causal()),
        "documents, window": tw.Documents(documents(n), inner=tw.SlidingWindow(n // 20, 0)),
        "documents, full": tw.Documents(documents(n)),
        "prefix tree": tw.Slices(tree, [[0, n // 4], [n // 4, n // 2], [n // 2, n]], [1, 1, 1]),
        "slices": tw.Slices([[0, n // 2], [n // 2, n]], [[0, n // 2], [0, n]], [0, 3]),
        "holes": tw.Causal() & tw.Slices([[0, n // 8], [n // 4, n]], [[0, n], [0, n]], [0, 0]),
        "chunks": tw.ChunkedCausal(n // 5),
        "dense": tw.Dense(torch.rand(n, n, generator=generator) < 0.2),
        "heads": tw.PerHead({(0, 1): tw.Causal(), (1, 4): tw.SlidingWindow(40, 7)}),
        "nothing": tw.Full() - tw.Full(),
    }


@dataclass(frozen=True)
class Case:
    """One call; `mask` names a family."""

    mask: str
    layout: str = "auto"
    seqlen: int = LONG
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    batch: int = 1
    extras: tuple[str, ...] = ()
    options: dict = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options.items())
        where = f"{self.mask}/{self.layout}/{self.seqlen}/{str(self.dtype)[6:]}/{self.heads}/{self.dims}/b{self.batch}"
        return f"{where} {' '.join(self.extras)}{options}"


def compare(case: Case, mesh, thorough: bool = False) -> list[str]:
    """What differs between this rank's results and one process's rows; empty where nothing does.

    Gradients of keys that several ranks have parts of are held to those of one process, or, `thorough`, to fp64.
    """
    from tilewise import distributed

    n, (heads_q, heads_k), (dim, dim_v) = case.seqlen, case.heads, case.dims
    generator = torch.Generator().manual_seed(3)

    def draw(*shape, dtype=case.dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, d_o = draw(case.batch, n, heads_q, dim), draw(case.batch, n, heads_q, dim_v)
    k, v = draw(case.batch, n, heads_k, dim), draw(case.batch, n, heads_k, dim_v)
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    d_lse = draw(case.batch, heads_q, n, dtype=wide)
    extras = {
        "sink": lambda: {"sink": draw(heads_q)},
        "bias": lambda: {"bias": draw(1, heads_q, n, n)},
        "bias of keys": lambda: {"bias": draw(heads_q, 1, n)},
        "alibi": lambda: {"alibi_slopes": torch.rand(heads_q, generator=generator)},
    }
    given = {name: x for extra in case.extras for name, x in extras[extra]().items()} | case.options
    mask = families(n)[case.mask]
    plan = distributed.plan(mask, n, mesh, heads=case.heads, head_dim=dim, layout=case.layout, tile=96)
    rows = plan.position_ids()
    leaves = ("sink", "bias")

    def run(attend, q, k, v, d_o, d_lse, given):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        given = {name: x.clone().requires_grad_() if name in leaves else x for name, x in given.items()}
        o, lse = attend(*inputs, return_lse=True, **given)
        tensors = [*inputs, *(given[name] for name in leaves if name in given)]
        grads = torch.autograd.grad([o, lse], tensors, [d_o, d_lse])
        names = ["dq", "dk", "dv", *(f"d_{name}" for name in leaves if name in given)]
        return {"o": o.detach(), "lse": lse.detach()} | dict(zip(names, grads, strict=True))

    def one(q, k, v, stages=1, **rest):
        return tw.attention(q, k, v, mask=Part(mask, n, [(0, n)]), **rest)

    want = run(one, q, k, v, d_o, d_lse, given)
    local = dict(given)
    if "bias" in given and given["bias"].shape[-2] == n:
        local["bias"] = given["bias"].index_select(-2, rows)
    ours = [plan.dispatch(x) for x in (q, k, v, d_o)]

    def several(q, k, v, **rest):
        return distributed.attention(q, k, v, plan, **rest)

    got = run(several, *ours, d_lse.index_select(2, rows), local)
    wrong = []

    def expect(good: bool, what: str) -> None:
        if not good:
            wrong.append(f"{case}: {what}")

    pieces = {"o": plan.dispatch(want["o"]), "lse": want["lse"].index_select(2, rows), "dq": plan.dispatch(want["dq"])}
    of_keys = {"dk": plan.dispatch(want["dk"]), "dv": plan.dispatch(want["dv"])}
    if "bias" in given and given["bias"].shape[-2] == n:
        pieces["d_bias"] = want["d_bias"].index_select(-2, rows)
    if len(plan.rows) == 1:
        pieces |= of_keys
    if case.dtype == torch.float64:
        for name, x in (pieces | of_keys).items():
            finite = x.isfinite()
            expect(torch.equal(finite, got[name].isfinite()), f"{name} is not finite where it should be")
            worst = (got[name] - x)[finite].abs().max().item() if finite.any() else 0.0
            expect(worst <= 1e-14 * max(1.0, x[finite].abs().max().item() if finite.any() else 0.0), f"{name} is off by {worst:.1e}")
        return wrong
    for name, x in pieces.items():
        expect(torch.equal(got[name], x), f"{name} has other bits in {(got[name] != x).sum()} of {x.numel()} places")
    if len(plan.rows) > 1:
        right = of_keys
        if thorough:
            leaves64 = {a: b.double() if a in leaves else b for a, b in given.items()}
            exact = run(one, *(x.double() for x in (q, k, v, d_o)), d_lse.double(), leaves64)
            right = {name: plan.dispatch(exact[name]) for name in of_keys}
        for name, x in of_keys.items():
            ulp = torch.finfo(case.dtype).eps * (right[name].abs().max().item() if x.numel() else 0.0)
            error, naive = ((y.double() - right[name].double()).abs().max().item() if x.numel() else 0.0 for y in (got[name], x))
            expect(error <= 2 * naive + (2 if thorough else 4) * ulp, f"{name} is off by {error:.1e}, one process by {naive:.1e}")
    if "sink" in given:
        total = got["d_sink"].double().clone()
        dist.all_reduce(total, group=mesh) if plan.place.world > 1 else None
        error = (total - want["d_sink"].double()).abs().max().item()
        expect(error <= 1e-3 * want["d_sink"].abs().max().item(), f"d_sink, summed, is off by {error:.1e}")
    again = run(several, *ours, d_lse.index_select(2, rows), local)
    expect(all(torch.equal(again[name], x) for name, x in got.items()), "a second run has other bits")
    return wrong


EVERY = [Case(name) for name in families(SHORT)]
LAYOUTS = [
    Case(mask, layout)
    for mask in ("causal", "documents, window", "window, first keys", "dense")
    for layout in ("contiguous", "zigzag", "ulysses")
]
OPTIONS = [
    Case("causal", extras=("sink", "alibi"), options={"softcap": 3.0}),
    Case("documents", extras=("bias",), heads=(2, 2)),
    Case("window", extras=("bias of keys", "sink")),
    Case("prefix", options={"dropout_p": 0.3, "dropout_seed": 5}),
    Case("heads", "ulysses", heads=(4, 4), options={"dropout_p": 0.3, "dropout_seed": 5}, extras=("sink", "alibi", "bias of keys")),
    Case("causal", dtype=torch.bfloat16, dims=(32, 24)),
    Case("heads", extras=("sink", "alibi", "bias"), heads=(4, 4), options={"stages": 2, "dropout_p": 0.2, "dropout_seed": 3}),
    Case("documents, window", "ulysses", heads=(32, 16), extras=("sink", "bias of keys"), options={"stages": 2}),
    Case("documents", dtype=torch.float16, batch=2),
    Case("documents, window", dtype=torch.float64, seqlen=400),
    Case("causal", "ulysses", dtype=torch.float64, seqlen=400, heads=(6, 6)),
    Case("causal", seqlen=SHORT),
    Case("documents", seqlen=SHORT, layout="ulysses", heads=(12, 6)),
    Case("slices", seqlen=SHORT, layout="zigzag"),
    Case("causal", seqlen=37),
    Case("causal", seqlen=200, layout="ulysses"),
    Case("documents", seqlen=97),
    Case("causal", seqlen=5),
]


def matrix() -> list[Case]:
    """Every family with every layout, dtype and length."""
    return [
        Case(mask, layout, seqlen, dtype, heads=(4, 4) if mask == "heads" else (8, 4) if layout == "ulysses" else (4, 2))
        for mask in families(SHORT)
        for layout in ("auto", "contiguous", "zigzag", "ulysses")
        for seqlen in (LONG, 1111, 130)
        for dtype in (torch.float32, torch.bfloat16)
    ]


def groups(rank: int, world: int, sizes: tuple[int, ...], name: str) -> list[str]:
    """Every case of the list `name` in the first `size` ranks, for each size; what differs. quick: another list for each size."""
    wrong = []
    for size in sizes:
        group = dist.new_group(list(range(size)))
        cases = {
            "quick": {2: OPTIONS, 3: EVERY, 4: LAYOUTS}.get(size, []),
            "all": [*EVERY, *LAYOUTS, *OPTIONS],
            "matrix": matrix()[:: 1 if size < 8 else 4],
        }[name]
        if rank < size:
            for case in cases:
                wrong += [f"{size} ranks, rank {rank}: {each}" for each in compare(case, group, name == "matrix")]
    return wrong
