"""What is held of the Triton backend's decode, append and dropout where its kernels are interpreted (interpreted.py calls these)."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import append_problems
import capped
import decode_problems
import decode_shares
import pytest
import torch
from append_problems import AppendCase
from decode_fuzz import checked, kind, problem
from decode_problems import DecodeCase, held, with_eight_bits, with_int64, with_rotary
from torch import Tensor

import tilewise as tw
from tilewise.backends.triton import Triton
from tilewise.backends.triton import bound as bounds
from tilewise.backends.triton.bound import Bound
from tilewise.backends.triton.kernels import bias as bias_gradient
from tilewise.backends.triton.targets import Target
from tilewise.masks import Causal, Full, Mask, Part, SlidingWindow
from tilewise.problem import Call, DecodeCall, Dropout
from tilewise.testing import poison, tolerance

MOST_WORK = 60_000  # rows times keys of a random call: more are slow to interpret
LONGEST = 90  # tokens of its sequences, mostly


def decoded(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """O and LSE, written to memory that was NaN; the same bits twice."""
    results = []
    for _ in range(2):
        with poison.memory():
            found = Triton().decode(call)
        assert found is not None, "it is refused"
        results.append(found)
    assert all(map(append_problems.same, *results))
    return results[0]


def holds(case: DecodeCase) -> None:
    call = decode_problems.made(case)
    held(call, *decoded(call))


def holds_shares(case: DecodeCase, world: int, interleave: int, page: int, rotary: int = 0, kinds: tuple | None = None) -> None:
    """Ranks with a share of the tokens each."""
    call = exact = decode_problems.made(case)
    if rotary:
        call, exact = with_rotary(call, rotary, False)
    if kinds:
        call, exact = with_eight_bits(call, kinds, ("token", "head"))
    decode_shares.check(call, decoded, world, interleave, page, exact)


def rounds_wide_outputs(case: DecodeCase) -> None:
    """O in fp32 rounds to what is given without."""
    call = decode_problems.made(case)
    (plain, lse), (wide, other) = decoded(call), decoded(replace(call, out_dtype=torch.float32))
    assert wide.dtype == torch.float32 and torch.equal(wide.to(case.dtype), plain) and torch.equal(lse, other)
    assert not torch.equal(wide, plain.float())


def merges(shape: tuple[int, ...], apart: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """O and LSE from parts (parts, ..., rows, heads, dim), which are so many elements apart, as in fp64; rows that some or all parts do not see."""
    draw = torch.Generator().manual_seed(2)
    parts, *rest = torch.randn(shape, generator=draw), torch.randn(shape[:-1], generator=draw) * 9
    memory = torch.full((shape[0], parts[0].numel() + apart), math.nan)
    memory[:, : parts[0].numel()] = parts.flatten(1)
    lses = rest[0].masked_fill(torch.rand(shape[:-1], generator=draw) < 0.3, -math.inf)
    outputs = memory.to(device)[:, : parts[0].numel()].view(shape)
    outputs[lses == -math.inf] = math.nan  # nothing is written there
    o, lse = Triton().merge(outputs, lses.to(device), dtype)
    want, want_lse = tw.merge([x.double() for x in parts], [x.double().transpose(-1, -2) for x in lses])
    assert o.dtype == dtype and (want_lse == -math.inf).any()
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-6, atol=1e-6)
    close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(o.cpu().double(), want, **close)


def rounds_wide_keys(dtype: torch.dtype) -> None:
    """dK and dV in fp32 round to what is given without; where NaN had to be kept from others, whose sums are then more exact, to its neighbour."""
    draw = torch.Generator().manual_seed(1)
    q, k, v, d_o = (torch.randn(1, n, h, 64, generator=draw).to(dtype) for n, h in ((70, 4), (90, 2), (90, 2), (70, 4)))
    for spoiled in (False, True):
        d_o[0, 3] = math.nan if spoiled else 1.0
        call = Call(q=q, k=k, v=v, mask=Causal(), scale=0.125, grad=True)
        o, lse = Triton().forward(call)[:2]
        plain, wide = (Triton().backward(each, o, lse, d_o, None) for each in (call, replace(call, wide_keys=True)))
        assert torch.equal(plain.q.nan_to_num(7.0), wide.q.nan_to_num(7.0))
        for narrow, found in ((plain.k, wide.k), (plain.v, wide.v)):
            assert found.dtype == torch.float32 and torch.equal(found.isnan(), narrow.isnan())
            within = {} if spoiled else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(found.to(dtype), narrow, equal_nan=True, **within)


def holds_with_int64(case: DecodeCase) -> None:
    call = decode_problems.made(case)
    assert all(map(torch.equal, decoded(call), decoded(with_int64(call))))


def holds_in_eight_bits(
    case: DecodeCase, kinds: tuple[torch.dtype, torch.dtype], scales: tuple[str | None, str | None], arch: str = "sm_80"
) -> None:
    """As a cache in q's dtype that holds what they stand for; e4m3 by its bits, or as GPUs that know it convert it."""
    from tilewise.backends.triton import decode

    eight, exact = with_eight_bits(decode_problems.made(case), kinds, scales)
    with mock.patch.object(decode, "of_device", lambda device: Target(arch)):
        held(exact, *decoded(eight))


def holds_with_rotary(case: DecodeCase, half: int, interleaved: bool, dtype: torch.dtype) -> None:
    """The bits of queries that torch has rotated."""
    given, turned = with_rotary(decode_problems.made(case), half, interleaved, dtype)
    assert all(map(torch.equal, decoded(given), decoded(turned)))


def reads_a_prefix_once(case: DecodeCase, scales: tuple[str | None, str | None] | None = None) -> None:
    """As if each sequence read it; unused tokens of the others may be anything there."""
    from tilewise.backends.triton import prefix

    given = exact = decode_problems.made(case)
    if scales is not None:
        given, exact = with_eight_bits(given, (torch.float8_e4m3fn, torch.int8), scales)
    with mock.patch.object(prefix, "LEAST_SAVED", 1):
        assert prefix.pays(given)
        o, lse = decoded(given)
        held(exact, o, lse)
        bound = Triton().bind_decode(given)
        assert isinstance(bound, prefix.Prefixed)
        for call in (given, replace(given, q=given.q.flip(-1).contiguous(), seqlens=given.seqlens // 2)):  # for other tensors
            assert all(map(torch.equal, bound(call.tensors, call.seqlens), decoded(call)))


def keeps_what_some_see_from_others(case: DecodeCase, number: float) -> None:
    """NaN or inf among the last tokens' values reaches the queries that see them, and no others."""
    call = decode_problems.made(case)
    n = int(call.seqlens[0])
    call.v_cache[0, n - 1, :, 3] = number
    call.v_cache[0, n - 3, 0, 5] = -number
    o, lse = decoded(call)
    clean = call.v_cache.nan_to_num(0.0, 0.0, 0.0)
    want, same_lse = decoded(replace(call, v_cache=clean))
    assert torch.equal(lse, same_lse)
    group, wrong = call.q.shape[2] // call.k_cache.shape[2], torch.zeros_like(o, dtype=torch.bool)
    wrong[0, -1:, :, 3] = True
    wrong[0, -3:, :group, 5] = True
    assert torch.equal(o[~wrong], want[~wrong])
    for rows, column, reached in ((o[0, -1:], 3, number), (o[0, -3:, :group], 5, -number)):
        assert torch.equal(rows[..., column], torch.full_like(rows[..., column], reached)) or (
            math.isnan(number) and rows[..., column].isnan().all()
        )


def a_weight_of_0_meets_an_infinity(case: DecodeCase) -> None:
    """0 times an infinity is NaN for the queries that see it, and nothing to the others."""
    call = decode_problems.made(case)
    n = int(call.seqlens[0])
    call.q.fill_(1.0)
    call.k_cache[0, n - 2] = -1000.0
    call.v_cache[0, n - 2, :, 3] = math.inf
    o, _ = decoded(call)
    sees = torch.arange(o.shape[1]) >= o.shape[1] - 2
    assert torch.equal(o[0, ..., 3].isnan(), sees[:, None].expand(o.shape[1:3])) and not o[..., 4:].isnan().any()


def does_not_read_what_does_not_exist(case: DecodeCase) -> None:
    """Lengths, pages, entries and bounds out of every range, without a word to the sequences that are right."""
    call = decode_problems.made(case)
    o, lse = decoded(call)
    wild = {"seqlens": call.seqlens.clone()}
    wild["seqlens"][0] = 2**31 - 1
    for name in ("page_table", "cache_batch_idx"):
        if (x := getattr(call, name)) is not None:
            wild[name] = x.clone()
            wild[name][0] = 2**31 - 1
    found = decoded(replace(call, **wild))
    assert torch.equal(found[0][1:], o[1:]) and torch.equal(found[1][1:], lse[1:])


def writes_where_it_is_told(case: DecodeCase) -> None:
    """O goes to `out`; without one to memory of its own. What was bound serves other tensors."""
    call = decode_problems.made(case)
    bound = Triton().bind_decode(call)
    o, _ = bound(call.tensors, call.seqlens)
    out = torch.full_like(o, math.nan)
    assert bound(call.tensors, call.seqlens, out)[0] is out and torch.equal(out, o)
    other = replace(call, q=call.q.flip(-1).contiguous(), seqlens=call.seqlens // 2)
    assert all(map(torch.equal, bound(other.tensors, other.seqlens), decoded(other)))


def random_call(seed: int) -> bool:
    """Whether a random call was small enough; it is held as on a GPU, by decode itself."""
    one = kind(seed, kernels=True)
    one = replace(one, dtype=torch.float32) if seed % 3 == 0 and not one.latent else one
    made = problem(one, seed, most=LONGEST)
    call = made.call
    if call.q.numel() // call.q.shape[-1] * int(call.seqlens.max()) > MOST_WORK:
        return False

    def run(**words):
        with poison.memory():
            return tw.decode(**words, backend="triton")

    checked(made, alone=one.split, run=run, backend="triton")
    return True


def appended(case: AppendCase) -> None:
    """The bits that torch writes, where it writes them, and nowhere else."""
    call = append_problems.made(case)
    with pytest.MonkeyPatch.context() as patch:
        want = append_problems.by_torch(call, patch)
    before = call.k_cache._version
    ends = Triton().append(call)
    assert ends is not None
    assert append_problems.same(call.k_cache, want[0]) and append_problems.same(call.v_cache, want[1])
    assert call.k_cache._version > before  # autograd is told
    lengths = torch.tensor(case.lengths) + torch.tensor(case.new)
    assert ends.dtype == torch.int32 and torch.equal(ends.long(), lengths.clamp(-(2**31) + 1, 2**31 - 1))


def appends_by(bounds: tuple[int, ...]) -> None:
    """No fault, whatever the bounds of packed tokens, and no write beside the caches."""
    with poison.memory():
        call = append_problems.made(AppendCase(lengths=(5, 0, 75), new=(1, 2, 7)))
        assert Triton().append(replace(call, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))) is not None


def appends_what_is_strided() -> None:
    call = append_problems.made(AppendCase(lengths=(5, 0, 75), rotary=64, page=16))
    with pytest.MonkeyPatch.context() as patch:
        want = append_problems.by_torch(call, patch)
    apart = torch.empty(call.k.numel() + 1, dtype=call.k.dtype)[1:].view(call.k.shape).copy_(call.k)
    strided = torch.empty(*call.v.shape, 2, dtype=call.v.dtype)[..., 0].copy_(call.v)
    wide = torch.empty(*call.page_table.shape, 2, dtype=torch.int32)[..., 0].copy_(call.page_table)
    assert Triton().append(replace(call, k=apart, v=strided, page_table=wide, rotary_cos=call.rotary_cos.mT.contiguous().mT)) is not None
    assert append_problems.same(call.k_cache, want[0]) and append_problems.same(call.v_cache, want[1])
    scattered = torch.full((*call.k_cache.shape, 2), 7.0, dtype=call.k.dtype)[..., 0]
    assert Triton().append(replace(call, k_cache=scattered)) is None and (scattered == 7.0).all()


def drops_what_the_whole_call_would(hidden: bool) -> None:
    """A part of a call, with all gradients, has what its rows and heads have in the whole one. hidden: NaN in a key that nobody sees."""
    source, batch, n, n_k = torch.Generator().manual_seed(2), *((1, 36, 20) if hidden else (2, 90, 70))
    rows, heads, dropout = ((4, 12), (30, n)) if hidden else ((16, 48), (80, n)), (3, 6, 6), Dropout(0.4, 77, 3)
    places, mask = torch.cat([torch.arange(*each) for each in rows]), tw.SlidingWindow(40, 0)
    q, k, v, d_o = (torch.randn(batch, a, b, 32, generator=source) for a, b in ((n, 6), (n_k, 2), (n_k, 2), (n, 6)))
    if hidden:
        mask = tw.Dense(torch.arange(n_k).expand(n, n_k) != 5)
        k[:, 5], v[:, 5] = math.nan, math.inf
    bias = torch.randn(1, 6, n, n_k, generator=source)
    mine = torch.zeros(n, 6, dtype=torch.bool)
    mine[places, 3:] = True
    d_o = torch.where(mine[None, :, :, None], d_o, 0.0)

    def results(q, k, v, d_o, bias, mask, dropout):
        call = Call(q=q, k=k, v=v, mask=mask, scale=0.2, grad=True, dropout=dropout, bias=bias)
        o, lse = Triton().forward(call)
        return o, *Triton().backward(call, o, lse, d_o, None, bias_grad=True)[:4]

    part = Part(mask, n, rows, heads)
    whole = results(q, k, v, d_o, bias, mask, dropout)
    ours = results(q[:, places, 3:], k[:, :, 1:], v[:, :, 1:], d_o[:, places, 3:], bias[:, 3:, places], part, dropout._replace(part=part))
    wanted = whole[0][:, places, 3:], whole[1][:, places, 3:], whole[2][:, :, 1:], whole[3][:, :, 1:], whole[4][:, 3:, places]
    for x, y in zip(ours, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=4e-6)


def no_queries_have_no_gradient_of_a_bias() -> None:
    """dBias has no element then, and nothing is to be written."""
    k, bias = torch.randn(2, 40, 1, 16), torch.empty(1, 2, 0, 40, requires_grad=True)
    call = Call(q=torch.empty(2, 0, 2, 16), k=k, v=k, mask=Full(), scale=1.0, bias=bias, grad=True)
    bound, launched = Bound(call), []
    o, lse = bound.results(call)
    with mock.patch.object(bound, "run", lambda function, *_, **__: lambda *_: launched.append(function)):
        *_, d_bias, _sink = bound.backward(call.q, k, k, o, lse, o, None, call.extras, True)
    assert d_bias is not None and d_bias.shape == bias.shape and launched and bias_gradient.dbias not in launched


def what_lies_beyond_all_rows_is_not_read(mask: Mask, visible: int) -> None:
    """The kernels that mend what a hidden NaN has reached have nothing to do where keys and queries from `visible` on are hidden from all."""
    q, k, v, d_o = (torch.randn(2, 150, heads, 16, dtype=torch.float16) for heads in (2, 1, 1, 2))
    found = []
    for hidden in (0.0, math.nan):
        for x in (q, k, v, d_o):
            x[:, visible:] = hidden
        call = Call(q=q, k=k, v=v, mask=mask, scale=0.3, grad=True)
        bound, without = Bound(call), {}
        run = bound.run

        def unmended(function, *given, run=run, without=without, **more):
            return without.setdefault if more.get("CAREFUL") else run(function, *given, **more)

        with mock.patch.object(bound, "run", unmended):
            o, lse = bound.results(call)
            grads = bound.backward(q, k, v, o, lse, d_o, None, call.extras, False)[:3]
        found.append([x[:, :visible] for x in (o, *grads)])
        assert without  # the kernels that mend were asked for
    assert all(map(torch.equal, *found))


def few_programs_mend_many_tiles(processors: int, batch: int, spoiled: list[int]) -> None:
    """NaN in the first key and the last query of some of more batch entries, a tile each, than programs mend: other rows are as without it."""
    mask, seqlen = SlidingWindow(3, 0), 12
    clean = [torch.randn(1, seqlen, 1, 16) for _ in range(4)]
    dirty = [x.repeat(batch, 1, 1, 1) for x in clean]
    for x, row in zip(dirty, (-1, 0, 0, -1), strict=True):  # q, k, v, dO
        x[spoiled, row] = math.nan
    sees = mask.dense(seqlen, seqlen)
    queries = sees[:, 0] | (torch.arange(seqlen) == seqlen - 1)
    keys, found = sees[queries].any(0), []
    with mock.patch.object(bounds, "multiprocessors", lambda _: processors):
        for q, k, v, d_o in (clean, dirty):
            call = Call(q=q, k=k, v=v, mask=mask, scale=0.3, grad=True)
            o, lse = Triton().forward(call)
            found.append((o, *Triton().backward(call, o, lse, d_o, None)[:3]))
    for without, ours, lost in zip(*found, (queries, queries, keys, keys), strict=True):
        wanted = without.repeat(batch, 1, 1, 1)
        wanted[torch.tensor(spoiled)[:, None], lost.nonzero()[:, 0]] = math.nan
        assert not lost.all()
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def what_is_not_finite_stays_the_formulas(mask: Mask, dtype: torch.dtype) -> None:
    """NaN and infinities of K, V, Q and dO, some of which some rows see and others do not: O and gradients as pair by pair in fp64."""
    generator, size = torch.Generator("cpu").manual_seed(3), 70
    shapes = (2, 24), (1, 24), (1, 20), (2, 20)
    q, k, v, d_o = (torch.randn(1, size, *shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes)
    for x, row, column, value in (
        (v, 69, 3, math.nan), (v, 40, 5, math.inf), (v, 41, 5, -math.inf), (v, 60, 6, -math.inf), (v, 12, 7, math.inf),
        (k, 66, 2, math.nan), (k, 33, 9, math.inf), (q, 5, 4, math.nan), (d_o, 50, 1, math.nan), (d_o, 20, 2, -math.inf), (d_o, 9, 8, math.inf),
    ):  # fmt: skip
        x[:, row, :, column] = value
    call = Call(q=q, k=k, v=v, mask=mask, scale=0.2, grad=True)
    o, lse = Triton().forward(call)
    ours = o, *Triton().backward(call, o, lse, d_o, None)[:3]
    for x, wanted in zip(ours, _pair_by_pair(q, k, v, d_o, mask, 0.2, o, lse), strict=True):
        close = torch.isclose(x.double(), wanted, rtol=2e-2, atol=8e-2, equal_nan=True)
        assert close.all(), (x[~close], wanted[~close])


def _pair_by_pair(q, k, v, d_o, mask, scale, o, lse) -> tuple[Tensor, ...]:
    """O, dQ, dK and dV of a batch of one and a key head of one in fp64, of visible pairs alone; gradients from this O and LSE."""
    sees = mask.dense(q.shape[1], k.shape[1])
    o, lse, q, k, v, d_o = (x.double() for x in (o, lse, q, k, v, d_o))
    found = torch.zeros_like(o), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for i, h in itertools.product(range(q.shape[1]), range(q.shape[2])):
        keys = sees[i].nonzero()[:, 0]
        p = torch.exp(k[0, keys, 0] @ q[0, i, h] * scale - lse[0, h, i])[:, None]
        found[0][0, i, h] = (p * v[0, keys, 0]).sum(0)
        d_s = p * ((v[0, keys, 0] * d_o[0, i, h]).sum(1) - (o[0, i, h] * d_o[0, i, h]).sum())[:, None] * scale
        found[1][0, i, h] = (d_s * k[0, keys, 0]).sum(0)
        found[2][0, keys, 0] += d_s * q[0, i, h]
        found[3][0, keys, 0] += p * d_o[0, i, h]
    return found


def a_row_as_low_as_its_dtype_goes_hides_nothing_more() -> None:
    """A bias of finfo.min for a whole row leaves an ordinary row, and NaN that the mask hides from others stays hidden; gradients are finite."""
    q, k, v, d_o = (torch.randn(1, 40, heads, 16) for heads in (2, 1, 1, 2))
    bias = torch.zeros(1, 1, 40, 40)
    bias[..., 3, :] = torch.finfo(torch.float32).min
    call = Call(q=q, k=k, v=v, mask=Causal(), scale=0.3, bias=bias, grad=True)
    found = []
    for hidden in (0.0, math.nan):
        k[:, -1], v[:, -1] = hidden, hidden
        o, lse = Triton().forward(call)
        found.append([x[:, :-1] for x in (o, *Triton().backward(call, o, lse, d_o * (torch.arange(40) < 39)[:, None, None], None)[:1])])
    assert all(map(torch.equal, *found)) and all(x.isfinite().all() for x in found[0])


def a_large_lse_bounds_its_gradients(backend) -> None:
    """P is at most 1, though an LSE of 3e8 is rounded by 16: dV of ones is at most as many as queries see the key."""
    generator = torch.Generator("cpu").manual_seed(1)
    q, k, v = (torch.randn(1, 24, 2, 16, generator=generator) for _ in range(3))
    call = Call(q=q * 3e4, k=k * 3e4, v=v, mask=Full(), scale=0.25, grad=True)
    o, lse = backend.forward(call)
    assert lse.abs().max() > 1e8
    d_v = backend.backward(call, o, lse, torch.ones_like(o), None)[2]
    assert d_v.abs().max() <= 24.0 + 1e-3


def a_scale_overflows_beside_its_softcap(softcap: float, scale: float) -> None:
    q, k = torch.randn(1, 9, 2, 16), torch.randn(1, 21, 2, 16)
    q[:, 0] = 0.0  # scores of 0 times whatever factor
    call = Call(q=q, k=k, v=k, mask=Causal(), scale=scale, softcap=softcap, grad=True)
    o, lse = Triton().forward(call)
    tolerance.check_outputs(call, o, lse)
    assert all(x.isfinite().all() for x in Triton().backward(call, o, lse, torch.randn(o.shape), None)[:3])


def a_softcap_bends(loud: slice) -> None:
    """Scores of the queries `loud` reach far beyond the softcap, those of the others stay far below it, in tiles of both and of one kind; where a NaN
    meets a query, its row alone is NaN.
    """
    generator = torch.Generator("cpu").manual_seed(2)
    q, k, v, d_o = (torch.randn(1, 150, 1, 16, generator=generator) for _ in range(4))
    q *= 0.1
    q[:, loud] *= 300.0
    q, k, v, d_o = (x.bfloat16() for x in (q, k, v, d_o))
    call = Call(q=q, k=k, v=v, mask=Causal(), scale=0.25, softcap=2.0, grad=True)
    o, lse = Triton().forward(call)
    expected = tolerance.expected(call, d_o, None)
    tolerance.check_outputs(call, o, lse, expected)
    tolerance.check_gradients(call, Triton().backward(call, o, lse, d_o, None), d_o, None, expected)
    q[0, 9] = math.nan
    o, lse = Triton().forward(call)
    assert o[0, 9].isnan().all() and lse[0, 0, 9].isnan() and o.isnan().any(-1).sum() == 1


def gradients_at_the_cap() -> None:
    capped.held_at_the_cap(Triton(), (6, 10, 12))
