"""What every backend is put through: the cases at the one tolerance, poison, and closed forms that need no reference.

All of these raise AssertionError where the backend is wrong and UnsupportedError, with its reasons, where it cannot run the problem.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends import Backend, reference
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.problem import Call, Gradients
from tilewise.testing import eight_bits, poison, tolerance
from tilewise.testing.cases import DTYPES, Case, make, upstream

Device = torch.device | str


def run_case(backend: Backend, case: Case, seed: int = 0, device: Device = "cpu") -> float:
    """Forward and backward on random inputs and poisoned memory; the largest share of an allowance that they use (0..1)."""
    call, (d_o, d_lse) = make(case, seed, device, grad=True), upstream(case, seed, device)
    inputs = [x.clone() for x in (call.q, call.k, call.v, d_o)]
    results = _run(backend, call, d_o, d_lse)
    if not all(torch.equal(x, kept) for x, kept in zip((call.q, call.k, call.v, d_o), inputs, strict=True)):
        raise AssertionError("an input was modified")
    return _check(call, results, d_o, d_lse)


def run_forward(backend: Backend, case: Case, seed: int = 0, device: Device = "cpu") -> float:
    """The forward half of `run_hidden`, for kernels that have no backward; run twice, and the bits must agree. A backend that is `in_eight_bits` is
    held to what 8 bits can reach.
    """
    call = make(case, seed, device)
    poisoned, guards = poison.guard(poison.hide(call, call.q)[0])
    _require_support(backend, poisoned)
    with poison.memory():
        o, lse = backend.forward(poisoned)
        again, lse_again = backend.forward(poisoned)
    for name, guard in guards.items():
        guard.verify(name)
    used = (eight_bits if getattr(backend, "in_eight_bits", False) else tolerance).check_outputs(call, o, lse)
    if not (torch.equal(o, again) and torch.equal(lse, lse_again)):
        raise AssertionError("two runs on the same inputs differ: a race")
    return used


def run_row_max(backend: Backend, case: Case, seed: int = 0, device: Device = "cpu") -> float:
    """O, LSE and each row's largest score of a call that wants it, with all that is hidden, or allocated, poisoned."""
    call = replace(make(case, seed, device), row_max=True)
    poisoned, guards = poison.guard(poison.hide(call, call.q)[0])
    _require_support(backend, poisoned)
    with poison.memory():
        o, lse, row_max = backend.forward(poisoned)
    for name, guard in guards.items():
        guard.verify(name)
    return max(tolerance.check_outputs(call, o, lse), tolerance.check_row_max(call, row_max))


def run_hidden(backend: Backend, case: Case, seed: int = 0, device: Device = "cpu") -> float:
    """As `run_case`, with NaN and infinities in all that the mask hides and around every input: the result must not change."""
    call, (d_o, d_lse) = make(case, seed, device, grad=True), upstream(case, seed, device)
    poisoned, poisoned_d_o, poisoned_d_lse = poison.hide(call, d_o, d_lse)
    poisoned, guards = poison.guard(poisoned)
    guards["d_o"] = poison.Guarded(poisoned_d_o)
    results = _run(backend, poisoned, guards["d_o"].view, poisoned_d_lse)
    for name, guard in guards.items():
        guard.verify(name)
    return _check(call, results, d_o, d_lse)


def run_spoiled(backend: Backend, case: Case, seed: int = 0, device: Device = "cpu", backward: bool = True) -> float:
    """As `run_case`, with NaN in one key and value that some queries see, in one number of a query's dO, and a bias of +inf for the first query's
    first key, if it has one of its own: they must reach what the naive formula has them reach and nothing else.
    """
    call, (d_o, d_lse) = make(case, seed, device, grad=backward), upstream(case, seed, device)
    d_o, k, v = d_o.clone(), call.k.clone(), call.v.clone()
    query, key = (slice(n, n + 1) for n in (call.seqlen_q // 3, call.seqlen_k // 2))
    d_o[:, query, :, -1], k[:, key], v[:, key] = torch.nan, torch.nan, torch.nan
    call = replace(call, k=k, v=v)
    if call.bias is not None and call.bias.shape[2] > 1:
        bias = call.bias.clone()
        bias[:, :, 0, 0] = torch.inf
        call = replace(call, bias=bias)
    if not backward:
        _require_support(backend, call)
        o, lse = backend.forward(call)
        return tolerance.check_outputs(call, o, lse)
    return _check(call, _run(backend, call, d_o, d_lse), d_o, d_lse)


def run_overflown(backend: Backend, case: Case, seed: int = 0, device: Device = "cpu") -> float:
    """As `run_case`, with infinities of both signs in one column of dO, of two queries: where a key sees both, its dV is NaN. (Only for cases
    with no probability so small that it is rounded to 0, for infinity times that is NaN.)
    """
    call, (d_o, d_lse) = make(case, seed, device, grad=True), upstream(case, seed, device)
    d_o = d_o.clone()
    d_o[:, call.seqlen_q // 5, :, 0], d_o[:, call.seqlen_q * 3 // 4, :, 0] = torch.inf, -torch.inf
    return _check(call, _run(backend, call, d_o, d_lse), d_o, d_lse)


def run_scattered(backend: Backend, case: Case, seed: int = 0, device: Device = "cpu") -> float:
    """As `run_hidden`, and NaN in what is seen, too: here and there in V, in two rows of Q, in one key, and in two elements of dO.

    Not for a bias of -inf, of which the contract does not say what it hides of a NaN.
    """
    call, (d_o, d_lse) = make(case, seed, device, grad=True), upstream(case, seed, device)
    q, k, v, d_o = (x.clone() for x in (call.q, call.k, call.v, d_o))
    v[torch.rand(v.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu").to(device) < 2e-3] = torch.nan
    if call.batch and call.seqlen_q and call.seqlen_k:
        for row in (call.seqlen_q // 7, call.seqlen_q * 2 // 3):
            q[:, row, -1] = torch.nan
        k[:, call.seqlen_k * 7 // 8, 0, 0] = torch.nan
        d_o[0, call.seqlen_q // 4, 0, 0], d_o[-1, call.seqlen_q // 2, -1, -1] = torch.nan, torch.nan
    call = replace(call, q=q, k=k, v=v)
    poisoned, poisoned_d_o, poisoned_d_lse = poison.hide(call, d_o, d_lse)
    return _check(call, _run(backend, poisoned, poisoned_d_o, poisoned_d_lse), d_o, d_lse)


def _require_support(backend: Backend, call: Call) -> None:
    if reasons := backend.why_not(call.problem):
        raise UnsupportedError(f"{backend.name} cannot run this: {'; '.join(reasons)}")


def _run(backend: Backend, call: Call, d_o: Tensor, d_lse: Tensor | None) -> tuple[Tensor, Tensor, Gradients]:
    _require_support(backend, call)
    with poison.memory():
        o, lse = backend.forward(call)
        return o, lse, backend.backward(call, o, lse, d_o, d_lse, bias_grad=call.bias is not None)


def _check(call: Call, results: tuple[Tensor, Tensor, Gradients], d_o: Tensor, d_lse: Tensor | None) -> float:
    """Hold results to `call`, which need not be the one they come from."""
    o, lse, grads = results
    if call.bias is not None and grads.bias is None:
        raise AssertionError("dbias: missing")
    expect = tolerance.expected(call, d_o, d_lse)
    return max(tolerance.check_outputs(call, o, lse, expect), tolerance.check_gradients(call, grads, d_o, d_lse, expect))


def _calls(backend: Backend, device: Device, **fields) -> Iterator[Call]:
    """A call on random inputs in every dtype that the backend takes; UnsupportedError if it takes none."""
    calls = [make(Case(dtype=dtype, **fields), device=device) for dtype in DTYPES]
    able = [call for call in calls if not backend.why_not(call.problem)]
    if not able:
        _require_support(backend, calls[-1])
    return iter(able)


def _naive(call: Call) -> tuple[Tensor, Tensor]:
    return reference.eager(call, call.q.dtype)


def ones_give_ones(backend: Backend, device: Device = "cpu") -> None:
    """V = 1: the rows of P sum to one, so O = 1, and nothing reaches Q and K through O."""
    for call in _calls(backend, device, seqlen_q=50, seqlen_k=150, mask=SlidingWindow(40, 0)):
        call = replace(call, v=torch.ones_like(call.v))
        o, _ = backend.forward(call)
        tolerance.check("o", o, torch.ones_like(o).double(), _naive(call)[0])


def zero_queries_give_the_mean(backend: Backend, device: Device = "cpu") -> None:
    """Q = 0: every visible key weighs the same, so O is the mean of the visible V and LSE the logarithm of their number."""
    for call in _calls(backend, device, seqlen_q=70, seqlen_k=70, mask=Causal()):
        call = replace(call, q=torch.zeros_like(call.q))
        count = torch.arange(1, 71, dtype=torch.float64, device=device)
        v = call.v.double().repeat_interleave(call.group, dim=2)
        o, lse = backend.forward(call)
        tolerance.check("o", o, v.cumsum(1) / count[:, None, None], _naive(call)[0])
        tolerance.check("lse", lse, count.log().expand(lse.shape), reference.eager(call, lse.dtype)[1])


def one_hot_values_give_probabilities(backend: Backend, device: Device = "cpu") -> None:
    """V = identity: O is P itself."""
    for call in _calls(backend, device, seqlen_q=40, seqlen_k=64, heads_k=4, head_dim_v=64):
        call = replace(call, v=torch.eye(64, dtype=call.q.dtype, device=device)[:, None].expand(call.batch, 64, 4, 64))
        scores = call.scale * torch.einsum("bihd,bjhd->bihj", call.q.double(), call.k.double())
        o, _ = backend.forward(call)
        tolerance.hold("o", o, replace(tolerance.expected(call).o, ref=scores.softmax(-1)))


def key_order_is_irrelevant(backend: Backend, device: Device = "cpu") -> None:
    """A permutation of the keys with their values changes nothing."""
    for call in _calls(backend, device, seqlen_q=40, seqlen_k=200):
        order = torch.randperm(200, generator=torch.Generator().manual_seed(3), dtype=torch.int64, device="cpu").to(device)
        o, lse = backend.forward(replace(call, k=call.k[:, order], v=call.v[:, order]))
        tolerance.check_outputs(call, o, lse)


def halves_merge_to_the_whole(backend: Backend, device: Device = "cpu") -> None:
    """Attention over two halves of the keys, merged by their LSE, is attention over all of them."""
    from tilewise.merge import merge

    for call in _calls(backend, device, seqlen_q=70, seqlen_k=130):
        parts = [backend.forward(replace(call, k=call.k[:, half], v=call.v[:, half])) for half in (slice(0, 90), slice(90, 130))]
        o, lse = merge(*zip(*parts, strict=True))
        tolerance.check_outputs(call, o, lse)


def doubled_values_double_the_output(backend: Backend, device: Device = "cpu") -> None:
    """O is linear in V, and exactly so for powers of two (of values well away from the subnormal numbers)."""
    for call in _calls(backend, device, mask=Causal()):
        call = replace(call, v=1.0 + call.v.abs())
        once, twice = backend.forward(call)[0], backend.forward(replace(call, v=2.0 * call.v))[0]
        if not torch.equal(twice, 2.0 * once):
            raise AssertionError(
                f"{call.q.dtype}: O for doubled V is not twice O; off by up to {(twice - 2.0 * once).abs().max().item():.3g}"
            )


def scale_moves_into_queries(backend: Backend, device: Device = "cpu") -> None:
    """Doubling Q and halving the scale leaves every score the same, exactly."""
    for call in _calls(backend, device, mask=Causal()):
        moved = replace(call, q=2.0 * call.q, scale=call.scale / 2.0)
        for name, x, y in zip(("O", "LSE"), backend.forward(call), backend.forward(moved), strict=True):
            if not torch.equal(x, y):
                raise AssertionError(f"{call.q.dtype}: {name} changes by up to {(x - y).abs().max().item():.3g}")


def one_key_is_copied(backend: Backend, device: Device = "cpu") -> None:
    """One key: P = 1, O = V, and the gradients of Q and K vanish while V takes all of dO."""
    for call in _calls(backend, device, seqlen_q=30, seqlen_k=1, mask=Full()):
        call = replace(call, grad=True)
        if backend.why_not(call.problem):
            continue
        o, lse = backend.forward(call)
        if not torch.equal(o, call.v.expand(-1, 30, -1, -1).repeat_interleave(call.group, dim=2)):
            raise AssertionError(f"{call.q.dtype}: O of a single key is not its value")
        d_o = torch.ones_like(o)
        grads = backend.backward(call, o, lse, d_o, None)
        expect = tolerance.expected(call, d_o)
        assert expect.v is not None
        nothing = {name: replace(getattr(expect, name), ref=torch.zeros_like(getattr(expect, name).ref)) for name in ("q", "k")}
        everything = replace(expect.v, ref=torch.full_like(expect.v.ref, 30.0 * call.group))
        tolerance.check_gradients(call, grads, d_o, expect=replace(expect, v=everything, **nothing))


def huge_biases_keep_what_rounding_keeps(backend: Backend, device: Device = "cpu") -> None:
    """A huge bias on every key of one query hides none: its row is as without it as far as s + bias keeps s, others are as they were.

    The most that fp32 may lose is a few ulps of the bias in every score. P never exceeds 1 in the backward pass, though rounding LSE may
    lose the logarithm of the sum.
    """
    row = 3
    others = [i for i in range(45) if i != row]
    for call in _calls(backend, device, seqlen_q=45, seqlen_k=150, mask=Causal(), bias="q"):
        assert call.bias is not None
        none = torch.zeros_like(call.bias)
        plain = replace(call, bias=none)
        d_o = torch.ones_like(call.q)
        expect, eps = tolerance.expected(plain, d_o), torch.finfo(call.q.dtype).eps
        assert expect.q is not None
        v = call.v[:, : 150 - 45 + row + 1].double().repeat_interleave(call.group, dim=2)
        low, high, largest = v.amin(1), v.amax(1), float(v.abs().max())
        info = torch.finfo(call.bias.dtype)
        for fill in (-1e4, -1e10, -1e30, info.min, 1e10):
            bias = none.clone()
            bias[:, :, row] = max(min(fill, info.max), info.min)
            biased, fill = replace(call, bias=bias), float(bias[0, 0, row, 0])
            o, lse = backend.forward(biased)
            lost = 4.0 * torch.finfo(lse.dtype).eps * abs(fill)
            what = f"{call.q.dtype}, row of {fill:.3g}"
            _within(f"{what}: o", o[:, row].double(), low - 4.0 * eps * largest, high + 4.0 * eps * largest)
            reach = (lost + 4.0 * eps) * largest
            _within(f"{what}: o", o[:, row].double(), expect.o.ref[:, row] - reach, expect.o.ref[:, row] + reach)
            around = fill + expect.lse.ref[..., row]
            _within(f"{what}: lse", lse[..., row].double(), around - lost - 1e-3, around + lost + 1e-3)
            tolerance.hold("o", o[:, others], _rows_of(expect.o, 1, others))
            tolerance.check_lse("lse", lse[..., others], _rows_of(expect.lse, 2, others))
            if not backend.why_not(replace(biased, grad=True).problem):
                grads = backend.backward(replace(biased, grad=True), o, lse, d_o, None)
                tolerance.hold("dq", grads.q[:, others], _rows_of(expect.q, 1, others))
                least, most = grads.v.new_tensor([0.0, 45.0 * call.group * 1.02], dtype=torch.float64)
                _within(f"{what}: dv", grads.v.double(), least, most)
                for name in ("q", "k"):
                    if not (g := getattr(grads, name)).isfinite().all():
                        raise AssertionError(f"{what}: d{name} has {int((~g.isfinite()).sum())} numbers that are not finite")


def _rows_of(want: tolerance.Yardstick, dim: int, rows: list[int]) -> tolerance.Yardstick:
    index = torch.tensor(rows, dtype=torch.int64, device=want.ref.device)
    return replace(want, **{name: getattr(want, name).index_select(dim, index) for name in ("ref", "naive_error", "magnitude")})


def _within(name: str, got: Tensor, low: Tensor, high: Tensor) -> None:
    outside = ~((got >= low) & (got <= high))
    if outside.any():
        at = tuple(outside.nonzero()[0].tolist())
        bounds = (float(x.expand(got.shape)[at]) for x in (low, high))
        raise AssertionError(f"{name}{list(at)}: {float(got[at]):.7g} is not in [{', '.join(f'{x:.7g}' for x in bounds)}]")


CLOSED_FORMS: dict[str, Callable[..., None]] = {
    form.__name__: form
    for form in (
        ones_give_ones,
        zero_queries_give_the_mean,
        one_hot_values_give_probabilities,
        key_order_is_irrelevant,
        halves_merge_to_the_whole,
        doubled_values_double_the_output,
        scale_moves_into_queries,
        one_key_is_copied,
        huge_biases_keep_what_rounding_keeps,
    )
}
