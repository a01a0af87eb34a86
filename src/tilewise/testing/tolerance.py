"""The only tolerance of the repository: an implementation may be at most twice as wrong as the naive formula in the same dtype.

    whole tensor   max |got - ref|     <=  2 max |naive - ref|     + 2 ulp(max magnitude)
    every row r    rms(got_r - ref_r)  <=  2 rms(naive_r - ref_r)  + 2 ulp(max magnitude_r)
    lse            |got - ref| in ulps at max(1, magnitude)  <=  2 (naive's worst) + 2

`ref` is the fp64 formula on the inputs as rounded, `naive` the same formula with every operation in the inputs' dtype, `ulp` that of the
output's dtype; a row is the last dimension. NaN and infinities must be where ref (rounded to the output's dtype) has them, and every
comparison is written so that NaN fails. What the lines above leave open, and why it is settled this way:

- *magnitude* is |ref|, or the root of the sum of the squares of the terms that ref adds up, where that is larger. The two are alike for
  random data; but a gradient may cancel to exactly nothing (dQ of a query that sees one key), and then no arithmetic reaches an ulp of ref.
- *rms(naive_r - ref_r)*: naive can be exact on a row by luck (a row that sees one key), so each row is given naive's error relative to the
  magnitude at its worst row, times the row's own magnitude. One bad row cannot hide behind the others, however small its values are.
- *lse* is fp32 whatever the inputs are, and backward passes and merges rely on it: its naive runs in fp32. Its *magnitude* is |ref| or, where
  that is larger, the same root for q.k (times scale, on average over P): a score may be the small rest of large products. For fp16 and bf16,
  where matrix units truncate as they add up products, its naive error is at least the typical one, as for few rows below.
- *row_max*, each row's largest score, is held as LSE is, by the naive formula's own maximum in fp32.
- *gradients*: autograd of the formula keeps P, and so takes delta as rowsum(P dP): its rounding errors can cancel against those of dP to
  the last bit. What does not keep P takes rowsum(dO O) and exp(S - LSE), with the O and LSE that a forward pass returned. So naive is
  autograd, the latter in fp32 from the naive O and LSE, and the same from the exact ones rounded (the best there are); the worst counts.
- *fp64*: the formula cannot be measured against itself. Rounding errors scale with the unit roundoff, so the naive error is taken from the
  fp32 formula on the inputs rounded to fp32, times 2**-29; once more for ref's own rounding, 3 in place of 2 in all of the above; and times
  sqrt(2), since a register holds half as many fp64 elements and each of its sums runs over twice as many terms.
- *few rows*: all that comes from one query row shares the rounding of its LSE, so the naive error of an output with fewer than 1024 elements,
  or from fewer than 256 query rows, is chance. There it is at least the typical error to first order, relative to the magnitude: the
  unit roundoff of the inputs' dtype once, for rounding P or dS to it, and that of the statistics sqrt(n) + 2 max |s| times: sqrt(n) for dot
  products of length n = head_dim or head_dim_v (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019), |s| each
  for a score and for the LSE about as large, which P = exp(s - LSE) passes on; scores that P is too small to notice do not count.
- *subnormal numbers* (a sink that takes nearly the whole row leaves an O of 1e-38): `floor` is added to every allowance but LSE's. What a
  probability that was taken for 0 would have multiplied counts: where operands are larger than normal ones ever are, as often as they are.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.backends import reference
from tilewise.problem import Call, Gradients

FEW_NUMBERS, FEW_ROWS = 1024, 256
FLUSHED = 8  # products of a probability that was taken for 0 with values of usual size, added up
USUAL = 6.0  # standard normal elements are not larger


@dataclass(frozen=True)
class Yardstick:
    """What one output should be, and how wrong the naive formula is about it. Tensors are fp64 and of the output's shape."""

    ref: Tensor
    naive_error: Tensor  # |naive - ref|; not finite where naive overflows
    magnitude: Tensor  # >= |ref|; the size of the terms that ref is the sum of
    dtype: torch.dtype  # the output's
    roundoff: float = 0.0  # the least that naive_error / magnitude can be taken for, where there is too little to measure it
    unusual: float = 1.0  # how many times larger than usual is what probabilities are multiplied by


@dataclass(frozen=True)
class Expected:
    """The yardsticks of one call; those of the gradients are None without a d_o, and where the input is absent."""

    o: Yardstick
    lse: Yardstick
    q: Yardstick | None = None
    k: Yardstick | None = None
    v: Yardstick | None = None
    bias: Yardstick | None = None
    sink: Yardstick | None = None


@torch.no_grad()
def expected(call: Call, d_o: Tensor | None = None, d_lse: Tensor | None = None) -> Expected:
    """The yardsticks of `call`, and of its gradients when `d_o` (shaped as O; `d_lse` as LSE) is given.

    Costs a few score matrices (batch, heads_q, seqlen_q, seqlen_k) in fp64.
    """
    exact = o, lse, grads = _reference(call, d_o, d_lse)
    o_error, lse_error, grad_errors = _naive_errors(call, d_o, d_lse, exact)
    o_terms, lse_terms, grad_terms = magnitudes(call, o, lse, d_o, d_lse)
    steepest = _steepest(call, lse)
    dtype, stats = call.q.dtype, reference.lse_dtype(call.q.dtype)
    score_error = (math.sqrt(max(call.head_dim, call.head_dim_v)) + 2.0 * steepest) * torch.finfo(stats).eps / 2
    roundoff = score_error + torch.finfo(dtype).eps / 2

    def yardstick(ref: Tensor, error: Tensor, terms: Tensor, out: torch.dtype, roundoff: float = roundoff, few: bool = False) -> Yardstick:
        few = few or ref.numel() < FEW_NUMBERS or lse.numel() < FEW_ROWS
        return Yardstick(ref, error, torch.maximum(terms, ref.abs()), out, roundoff if few else 0.0)

    on_matrix_units = dtype in (torch.float16, torch.bfloat16)
    want = {
        "o": yardstick(o, o_error, o_terms, dtype),
        "lse": yardstick(lse, lse_error, lse_terms.clamp(min=1.0), stats, score_error, few=on_matrix_units),
    }
    for name in Gradients._fields if grads is not None else ():
        if (given := getattr(call, name)) is not None:
            ref, error, terms = (getattr(group, name) for group in (grads, grad_errors, grad_terms))
            want[name] = yardstick(ref, error, terms, given.dtype)
    unusual = _unusual(call, d_o)
    return Expected(**{name: replace(each, unusual=unusual[name]) for name, each in want.items()})


def check_outputs(call: Call, o: Tensor, lse: Tensor, expect: Expected | None = None) -> float:
    """Raise AssertionError unless O and LSE are within tolerance; else the largest share of an allowance that they use (0..1)."""
    expect = expected(call) if expect is None else expect
    return max(hold("o", o, expect.o), check_lse("lse", lse, expect.lse))


@torch.no_grad()
def check_row_max(call: Call, row_max: Tensor) -> float:
    """Raise AssertionError unless each row's largest score is within LSE's tolerance, likewise; else the share of an allowance used (0..1)."""
    ref, stats, shrink = reference.row_max(call), reference.lse_dtype(call.q.dtype), 1.0
    scores = reference.visible_scores(reference.cast(call, torch.float64))
    squares = (reference.fold(call, call.q.double().square()), call.k.double().square().transpose(1, 2), scores.visible)
    terms = abs(call.scale) * torch.nn.functional.pad(reference.pair_products(*squares).sqrt(), (1, 0)).amax(-1).reshape(ref.shape)
    measured, against = call, ref
    if stats == torch.float64:
        measured, shrink = reference.cast(call, torch.float32), 1.5 * math.sqrt(2.0) * 2.0**-29
        against = reference.row_max(measured)
    error = (reference.row_max(measured, torch.float32).double() - against).abs() * shrink
    largest = float(ref.abs().masked_fill(~ref.isfinite(), 0.0).max()) if ref.numel() else 0.0
    roundoff = (math.sqrt(call.head_dim) + 2.0 * largest) * torch.finfo(stats).eps / 2
    return check_lse("row_max", row_max, Yardstick(ref, error, torch.maximum(terms, ref.abs()).clamp(min=1.0), stats, roundoff))


def check_gradients(call: Call, grads: Gradients, d_o: Tensor, d_lse: Tensor | None = None, expect: Expected | None = None) -> float:
    """Raise AssertionError unless every gradient is within tolerance; else the largest share of an allowance that they use (0..1).

    The bias's gradient is checked where there is one; all others that `call` has must be there.
    """
    expect = expected(call, d_o, d_lse) if expect is None else expect
    used = 0.0
    for name in Gradients._fields:
        got, want = getattr(grads, name), getattr(expect, name)
        if want is None or (name == "bias" and got is None):
            continue
        if got is None:
            raise AssertionError(f"d{name}: missing, expected {tuple(want.ref.shape)} {want.dtype}")
        used = max(used, hold(f"d{name}", got, want))
    return used


def check(name: str, got: Tensor, ref: Tensor, naive: Tensor) -> float:
    """Raise AssertionError unless `got` is within tolerance of `ref` (fp64) by the measure of `naive`; else the share it uses (0..1)."""
    return hold(name, got, Yardstick(ref.double(), (naive.double() - ref.double()).abs(), ref.double().abs(), got.dtype))


def hold(name: str, got: Tensor, want: Yardstick) -> float:
    """Raise AssertionError unless `got` is within tolerance of `want`; else the largest share of an allowance that it uses (0..1)."""
    error = _finite_error(name, got, want)
    if error.numel() == 0:
        return 0.0
    magnitude = want.magnitude.masked_fill(~want.magnitude.isfinite(), 0.0)
    naive = want.naive_error.masked_fill(~want.naive_error.isfinite(), 0.0)

    largest = magnitude.max()
    least = floor(want.dtype, want.unusual)
    tol = 2.0 * torch.maximum(naive.max(), want.roundoff * largest) + 2.0 * ulp(largest, want.dtype) + least
    used = _require(name, "", error, tol, got, want)

    rows, naive_rows, sizes = (_rows(x).square().mean(-1).sqrt() for x in (error, naive, magnitude))
    relative = (naive_rows / sizes.clamp(min=torch.finfo(want.dtype).tiny)).max().clamp(min=want.roundoff)
    naive_rows = torch.maximum(naive_rows, relative * sizes)  # its own where a row is subnormal: O was, too, when delta was made of it
    tol = 2.0 * naive_rows + 2.0 * ulp(_rows(magnitude).amax(-1), want.dtype) + least
    return max(used, _require(name, "rms of a row, ", rows, tol, got, want))


def check_lse(name: str, got: Tensor, want: Yardstick) -> float:
    """`check` for the logarithm of the denominator: every number in ulps at max(1, |ref|)."""
    error = _finite_error(name, got, want)
    if error.numel() == 0:
        return 0.0
    unit = ulp(want.magnitude.masked_fill(~want.magnitude.isfinite(), 1.0), want.dtype)
    naive = (want.naive_error / unit).masked_fill(~want.naive_error.isfinite(), 0.0).max()
    least = want.roundoff / torch.finfo(want.dtype).eps
    return _require(name, "in ulps, ", error / unit, 2.0 * naive.clamp(min=least) + 2.0, got, want)


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of `dtype` at |x|, in fp64 (that of the smallest normal number below it)."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.double().abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent)


def floor(dtype: torch.dtype, unusual: float = 1.0) -> float:
    """The error that a number may have however small it is: a step of the subnormal numbers of `dtype`, in which outputs are stored, and what is
    lost where the arithmetic inside (fp32, or fp64 for fp64) takes subnormal probabilities and products for 0, as the exponentials of GPUs do;
    `unusual` times as much where probabilities multiply elements that large.
    """
    info, inside = torch.finfo(dtype), torch.finfo(reference.lse_dtype(dtype))
    return info.smallest_normal * info.eps + FLUSHED * inside.smallest_normal * unusual


def _unusual(call: Call, d_o: Tensor | None) -> dict[str, float]:
    """Of each output, how many times larger than usual the products of elements are by which P is multiplied to make it."""

    def times(x: Tensor | None) -> float:
        return 1.0 if x is None or x.numel() == 0 else max(1.0, float(x.abs().masked_fill(~x.isfinite(), 0.0).max()) / USUAL)

    q, k, v, out = (times(x) for x in (call.q, call.k, call.v, d_o))
    return {"o": v, "lse": 1.0, "q": k * v * out, "k": q * v * out, "v": out, "bias": v * out, "sink": v * out}


Results = tuple[Tensor, Tensor, Gradients | None]


def _by_hand(call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, dtype: torch.dtype = torch.float64) -> Gradients:
    at = reference.linearise(call, lse, dtype)
    return reference.differentiate(call, at, reference.delta(call, o, lse, d_o, d_lse, dtype), d_o)


def _reference(call: Call, d_o: Tensor | None, d_lse: Tensor | None) -> Results:
    o, lse = reference.eager(call)
    return o, lse, None if d_o is None else _by_hand(call, o, lse, d_o, d_lse)


def _naive_errors(call: Call, d_o: Tensor | None, d_lse: Tensor | None, exact: Results) -> Results:
    """|naive - exact| for O, LSE and the gradients."""
    dtype, shrink = call.q.dtype, 1.0
    if dtype == torch.float64:
        call, dtype, shrink = reference.cast(call, torch.float32), torch.float32, 1.5 * math.sqrt(2.0) * 2.0**-29
        exact = _reference(call, d_o, d_lse)

    def error(naive: Tensor, ref: Tensor) -> Tensor:
        return (naive.double() - ref).abs() * shrink

    exact_o, exact_lse, exact_grads = exact
    o, lse = reference.eager(call, torch.float32)
    o = o if dtype == torch.float32 else reference.eager(call, dtype)[0]
    errors = error(o, exact_o), error(lse, exact_lse)
    if d_o is None or exact_grads is None:
        return *errors, None
    forwards = (o, lse), (exact_o.to(dtype), exact_lse.float())
    naive = [reference.autograd(call, d_o, d_lse, dtype), *(_by_hand(call, *kept, d_o, d_lse, torch.float32) for kept in forwards)]
    every = zip(*naive, exact_grads, strict=True)
    worst = (None if ref is None else torch.stack([error(x, ref) for x in xs]).amax(0) for *xs, ref in every)
    return *errors, Gradients._make(worst)


def magnitudes(call: Call, o: Tensor, lse: Tensor, d_o: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor, Tensor, Gradients | None]:
    """Root of the sum of the squares of the terms that make up O, LSE's scores and each gradient: the same formulas, on squares."""
    once = reference.linearise(call, lse)
    at = once.squared()
    squares = replace(call, q=call.q.double().square(), k=call.k.double().square(), v=call.v.double().square())
    products = reference.pair_products(reference.fold(call, squares.q), squares.k.transpose(1, 2), at.visible).sqrt()
    lse_terms = call.scale * (once.p * products).sum(-1).reshape(lse.shape)
    weights = at.p if at.keep is None else at.p * at.keep
    o_terms = reference.unfold(call, reference.weigh(weights, squares.v.transpose(1, 2), at.visible)).sqrt()
    if d_o is None:
        return o_terms, lse_terms, None
    d_o, d_lse = d_o.double().square(), None if d_lse is None else d_lse.double().square()
    minus_delta = -reference.delta(call, o.square(), lse, d_o, None if d_lse is None else -d_lse)  # dP - delta: the squares add up
    grads = reference.differentiate(squares, at, minus_delta, d_o)
    return o_terms, lse_terms, Gradients._make(None if g is None else g.sqrt() for g in grads)


def _steepest(call: Call, lse: Tensor) -> float:
    """The largest |s| of the pairs that P notices in fp32; a bias of -1e30 is not among them."""
    s = reference.visible_scores(reference.cast(call, torch.float64)).s
    noticed = s[s.isfinite() & (s > lse.reshape(*s.shape[:-1], 1) - 100.0)]
    return float(noticed.abs().max()) if noticed.numel() else 0.0


def _rows(x: Tensor) -> Tensor:
    """Rows of a tensor; the elements of a vector are rows of one."""
    return x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x[:, None]


def _finite_error(name: str, got: Tensor, want: Yardstick) -> Tensor:
    """|got - ref| in fp64, 0 where both are the same NaN or infinity; raises when shape, dtype or the places of those differ."""
    if got.shape != want.ref.shape or got.dtype != want.dtype:
        given, expected = (f"{tuple(x.shape)} {x.dtype}" for x in (got, want.ref.to(want.dtype)))
        raise AssertionError(f"{name}: is {given}, expected {expected}")
    rounded = want.ref.to(want.dtype)
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    special = ~(got.isfinite() & rounded.isfinite())
    wrong = special & ~same
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{name}{list(at)}: {got[at].item()}, expected {rounded[at].item()} ({int(wrong.sum())} such)")
    return (got.double() - want.ref).abs().masked_fill(special, 0.0)


def _require(name: str, what: str, error: Tensor, tol: Tensor, got: Tensor, want: Yardstick) -> float:
    """Raise unless error <= tol everywhere; else the largest error / tol."""
    share = error / tol.expand(error.shape)
    worst = int(share.nan_to_num(nan=math.inf).argmax())
    err, allowance = float(error.flatten()[worst]), float(tol.expand(error.shape).flatten()[worst])
    if (error <= tol).all():
        return err / allowance
    shape = got.shape if error.numel() == got.numel() else got.shape[:-1]
    at = [int(i) for i in torch.unravel_index(torch.tensor(worst, dtype=torch.int64, device="cpu"), shape)]
    given = f", is {got[tuple(at)].item():.7g}, expected {want.ref[tuple(at)].item():.7g}" if len(at) == got.dim() else ""
    beyond = int((~(error <= tol)).sum())
    raise AssertionError(f"{name}{at}: {what}error {err:.3g} > {allowance:.3g}{given} ({beyond} of {error.numel()} beyond their allowance)")
