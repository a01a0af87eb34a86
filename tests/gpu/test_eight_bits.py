"""8 bits on a GPU, by whichever backend is chosen there: as wrong as the emulation on the CPU is, by the same arithmetic, and no wronger."""

import math

import pytest
import torch
from eight_bits_problems import NEEDLE_WAYS, attend_by, needles, not_found
from torch import Tensor

import tilewise as tw
from tilewise.backends.eight_bits import RECIPES
from tilewise.backends.reference import Reference
from tilewise.backends.tiled import Tiled
from tilewise.bench.eight_bits import INPUTS, inputs
from tilewise.problem import Call

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

DEVICE, E4M3 = "cuda", torch.float8_e4m3fn
ROUNDED = 2.0**-9  # O to bf16, relative to its RMS
MASKS = {"full": tw.Full(), "causal": tw.Causal(), "window": tw.SlidingWindow(200, 30)}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).bfloat16()


def qkv(seqlen_q: int = 300, seqlen_k: int = 700, heads: tuple[int, int] = (4, 2), dim: int = 128) -> list[Tensor]:
    shapes = (seqlen_q, heads[0], dim), (seqlen_k, heads[1], dim), (seqlen_k, heads[1], dim)
    return [randn(2, *shape, seed=n) for n, shape in enumerate(shapes)]


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def hold(o: Tensor, lse: Tensor, call: Call, slack: float = 1.1, apart: float = 1 / 3, sums: float = 1e-4) -> None:
    """The errors are those of the emulation, but for one in ten of them; and O is that of the emulation within `apart` of them.

    sums: what e4m3 products lose of a log-sum-exp, whose sums in tensor cores have 13 bits.
    Where a unit's keys are shared by thread blocks (full masks), each begins with a maximum of its own, and P is rounded otherwise, though no worse.
    """
    same, same_lse = Tiled().forward(call)
    exact, exact_lse = Reference().forward(Call(**{**vars(call), "out_dtype": torch.float64}))
    o, lse, size = o.cpu(), lse.cpu(), rms(exact)
    assert torch.equal(lse.isfinite(), same_lse.isfinite())
    seen = same_lse.isfinite()
    error, least = rms(o - exact), rms(same - exact)
    assert error <= slack * least + ROUNDED * size, (error / size, least / size)
    assert rms((lse - exact_lse)[seen]) <= slack * rms((same_lse - exact_lse)[seen]) + sums
    assert rms(o.double() - same.double()) <= apart * least + 2 * ROUNDED * size


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 72, 96, 128, 256])
@pytest.mark.parametrize("precision", RECIPES)
def test_recipes(precision, dim, mask):
    q, k, v = qkv(dim=dim)
    k = k + 5.0 * randn(dim, seed=9)  # a common vector, which LSE has to have again
    call = Call(q=q, k=k, v=v, mask=MASKS[mask], scale=dim**-0.5, precision=precision)
    o, lse = tw.attention(*(x.to(DEVICE) for x in (q, k, v)), mask=MASKS[mask], precision=precision, return_lse=True)
    hold(o, lse, call)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("precision", RECIPES)
def test_more_keys_than_the_tensor_cores_may_sum_up(precision, mask):
    """At head_dim 256 on Hopper, each tile is then added to O in fp32, too."""
    q, k, v = qkv(130, 4200, dim=256)
    o, lse = tw.attention(*(x.to(DEVICE) for x in (q, k, v)), mask=MASKS[mask], precision=precision, return_lse=True)
    hold(o, lse, Call(q=q, k=k, v=v, mask=MASKS[mask], scale=256**-0.5, precision=precision))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("precision", RECIPES)
def test_values_that_are_narrower(precision, mask):
    q, k, _ = qkv(dim=192)
    v = qkv()[2]
    o, lse = tw.attention(*(x.to(DEVICE) for x in (q, k, v)), mask=MASKS[mask], precision=precision, return_lse=True)
    hold(o, lse, Call(q=q, k=k, v=v, mask=MASKS[mask], scale=192**-0.5, precision=precision))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("precision", RECIPES)
def test_changed_scores_in_fp16(precision, mask):
    q, k, v = (x.half() for x in qkv())
    given = {"softcap": 20.0, "alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.0]), "sink": torch.tensor([0.5, -1.0, 3.0, 0.0])}
    on_device = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in given.items()}
    o, lse = tw.attention(*(x.to(DEVICE) for x in (q, k, v)), mask=MASKS[mask], precision=precision, return_lse=True, **on_device)
    given["alibi_slopes"] = given["alibi_slopes"][None]
    hold(o, lse, Call(q=q, k=k, v=v, mask=MASKS[mask], scale=128**-0.5, precision=precision, **given))


@pytest.mark.parametrize("per", [("tensor",) * 3, ("head",) * 3, ("token", "tile", "head"), ("token",) * 3, ("head", "token", "tile")])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_given_tensors(dim, mask, per):
    tensors, scales = zip(*(tw.quantise(x, "fp8", per=each) for x, each in zip(qkv(dim=dim), per, strict=True)), strict=True)
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    call = Call(**dict(zip("qkv", tensors, strict=True)), **named, mask=MASKS[mask], scale=dim**-0.5, out_dtype=torch.bfloat16)
    on_device = {name: x.to(DEVICE) for name, x in named.items()}
    o, lse = tw.attention(*(x.to(DEVICE) for x in tensors), **on_device, mask=MASKS[mask], return_lse=True)
    hold(o, lse, call, apart=1.0 if "token" in per[1:] or mask == "full" else 1 / 3)  # tiles of fewer keys, and other maxima


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_scales_of_tokens_of_any_size_and_sign(precision):
    q, k, v = qkv(700)
    x, q_scale = tw.quantise(q, precision, per="token")
    y, k_scale = tw.quantise(k, precision, per="token")
    z, v_scale = tw.quantise(v, "fp8", per="token")
    source = torch.Generator().manual_seed(5)
    k_scale, v_scale = (scale * torch.randn(scale.shape, generator=source, dtype=torch.float32) for scale in (k_scale, v_scale))
    k_scale[..., 30], v_scale[..., 128:256], v_scale[..., 300] = 0.0, 0.0, math.nan
    named = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    call = Call(q=x, k=y, v=z, **named, mask=tw.Causal(), scale=128**-0.5, out_dtype=torch.bfloat16)
    on_device = {name: scale.to(DEVICE) for name, scale in named.items()}
    o, lse = tw.attention(*(each.to(DEVICE) for each in (x, y, z)), **on_device, causal=True, return_lse=True)
    assert torch.equal(o[:, :300].isfinite(), torch.ones_like(o[:, :300], dtype=torch.bool)) and o[:, 300:].isnan().all()
    v_scale[..., 300] = 0.0
    o, lse = tw.attention(
        *(each.to(DEVICE) for each in (x, y, z)), **(on_device | {"v_scale": v_scale.to(DEVICE)}), causal=True, return_lse=True
    )
    hold(o, lse, call, apart=1.0, sums=3e-4)  # scores are up to three times as large


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("precision", RECIPES)
def test_kinds_of_inputs(precision, kind, mask):
    q, k, v = inputs(kind, 2048, 128, 16, 128)
    o, lse = tw.attention(*(x.to(DEVICE) for x in (q, k, v)), mask=MASKS[mask], precision=precision, return_lse=True)
    call = Call(q=q, k=k, v=v, mask=MASKS[mask], scale=128**-0.5, precision=precision)
    hold(o, lse, call, apart=1.0 if mask == "full" else 1 / 3)


@pytest.mark.parametrize("precision", ["int8", "int8_qk"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 15), (17, 16), (127, 129), (129, 127), (5, 128)])
def test_lengths(lengths, precision):
    q, k, v = qkv(*lengths)
    o, lse = tw.attention(*(x.to(DEVICE) for x in (q, k, v)), causal=True, precision=precision, return_lse=True)
    hold(o, lse, Call(q=q, k=k, v=v, mask=tw.Causal(), scale=128**-0.5, precision=precision), slack=1.5)


def test_integers_are_exact():
    v = torch.randint(-8, 9, (1, 128, 2, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE, E4M3)
    q, k = torch.zeros(1, 5, 4, 64).to(DEVICE, E4M3), randn(1, 128, 2, 64).to(DEVICE, E4M3)
    o, lse = tw.attention(q, k, v, return_lse=True)
    want = v.float().mean(1).repeat_interleave(2, 1)[:, None].expand(1, 5, 4, 64)
    assert torch.equal(o, want.bfloat16()) and (lse - math.log(128.0)).abs().max() < 1e-5


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sums_do_not_stop_growing(dim):
    """65,536 equal keys: what a tensor core's sum of e4m3 products forgets, it forgets here."""
    n = 1 << 16
    q, k, v = randn(1, 64, 1, dim).to(DEVICE), torch.ones(1, n, 1, dim).to(DEVICE), torch.full((1, n, 1, dim), 10.0).to(DEVICE)
    for precision in RECIPES:
        o, lse = tw.attention(q, k.bfloat16(), v.bfloat16(), precision=precision, return_lse=True)
        want = q.double().sum(-1).permute(0, 2, 1) * dim**-0.5 + math.log(n)
        assert (o - 10.0).abs().max() < 0.05 and (lse - want).abs().max() < 0.02
    given = tw.attention(q.to(E4M3), k.to(E4M3), v.to(E4M3))
    assert (given - 10.0).abs().max() < 0.1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("way", NEEDLE_WAYS)
def test_one_key_of_many_is_found(way, dim, seed):
    """131,072 keys, of which each of 128 queries looks for another one: all are found, and exactly where they are (`not_found`)."""
    problem = needles(1 << 17, dim, seed, DEVICE)
    assert not not_found(attend_by(way, problem), problem)


@pytest.mark.parametrize("precision", RECIPES)
def test_what_is_hidden_may_be_anything_and_what_is_seen_shows(precision):
    q, k, v = (x.clone() for x in qkv(700))
    k[0, 450, 0, 3], v[0, 400, 1, 2], q[0, 100, 3, 0], v[0, 420, 0, 5] = math.inf, math.nan, math.nan, -math.inf
    o = tw.attention(*(x.to(DEVICE) for x in (q, k, v)), causal=True, precision=precision).cpu()
    spoiled = torch.zeros(o.shape, dtype=torch.bool)
    spoiled[0, 450:, :2], spoiled[0, 400:, 2:, 2], spoiled[0, 100, 3], spoiled[0, 420:, :2, 5] = True, True, True, True
    assert torch.equal(o.isfinite(), ~spoiled)
    assert torch.isneginf(o).sum() == (2 * 30 if precision == "int8_qk" else 0)  # e4m3 has no infinity


@pytest.mark.parametrize("precision", RECIPES)
def test_queries_that_are_not_finite_and_see_nothing(precision):
    q, k, v = qkv(700, 300)
    q[0, 100, 1, 3], q[0, 600, 2, 3] = math.nan, math.inf
    o, lse = tw.attention(*(x.to(DEVICE) for x in (q, k, v)), causal=True, precision=precision, return_lse=True)
    assert not o[:, :400].any() and torch.isneginf(lse[:, :, :400]).all()
    assert o[0, 600, 2].isnan().all() and o.isnan().any(-1).sum() == 1


ENDS = (0, 300, 301, 301, 431, 931, 990), (0, 310, 330, 340, 500, 1000, 1090)
KERNELS = 5  # of a call: intervals of keys, the order of tiles, what all tokens decide, the quantiser, attention


def packed(dim: int, seed: int = 0) -> list[Tensor]:
    """(total, heads, dim), with numbers behind the last document that would be the largest by far."""
    shapes = (ENDS[0][-1] + 30, 4, dim), (ENDS[1][-1] + 30, 2, dim), (ENDS[1][-1] + 30, 2, dim)
    tensors = [randn(*shape, seed=3 * seed + n) for n, shape in enumerate(shapes)]
    for x in tensors:
        x[-30:] = 1e30
    return tensors


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("precision", RECIPES)
def test_packed_documents(precision, dim, mask):
    """As the emulation has them as one sequence; twice, as the second call is a cached one."""
    cu_seqlens = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ENDS]
    for seed in range(2):
        q, k, v = packed(dim, seed)
        o, lse = tw.attention_varlen(
            *(x.to(DEVICE) for x in (q, k, v)), *cu_seqlens, mask=MASKS[mask], precision=precision, return_lse=True
        )
        assert not o[ENDS[0][-1] :].any() and (lse[:, ENDS[0][-1] :] == -math.inf).all()
        there = q[: ENDS[0][-1]], k[: ENDS[1][-1]], v[: ENDS[1][-1]]
        call = Call(
            **{name: x[None] for name, x in zip("qkv", there, strict=True)},
            mask=tw.Documents(*ENDS, inner=MASKS[mask]),
            scale=dim**-0.5,
            precision=precision,
        )
        hold(o[None, : ENDS[0][-1]], lse[None, :, : ENDS[0][-1]], call)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("number", [1, 200])
def test_how_many_kernels_documents_take(precision, number):
    q, k, v = (x.to(DEVICE) for x in packed(128))
    cu = torch.linspace(0, 990, number + 1).int().to(DEVICE)
    for _ in range(2):
        tw.attention_varlen(q, k, v, cu, cu, causal=True, precision=precision)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        tw.attention_varlen(q, k, v, cu, cu, causal=True, precision=precision)
        torch.cuda.synchronize()
    kernels = [event.name for event in found.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels) <= KERNELS, kernels


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_documents_in_a_graph(precision):
    """Their ends are read at each replay."""
    q, k, v = (x.to(DEVICE) for x in packed(128))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ENDS)

    def attend():
        return tw.attention_varlen(q, k, v, cu_q, cu_k, causal=True, precision=precision)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for ends in (ENDS, ((0, 10, 500, 501, 600, 700, 960), (0, 100, 500, 501, 700, 800, 1050)), ((0,) * 6 + (100,), (0,) * 6 + (100,))):
        cu_q.copy_(torch.tensor(ends[0]))
        cu_k.copy_(torch.tensor(ends[1]))
        graph.replay()
        found = captured.clone()
        assert torch.equal(found, attend())


@pytest.mark.parametrize("per", ["tensor", "head"])
def test_packed_tensors_in_8_bits(per):
    """By one set of scales for all documents, in one launch, or by documents' own."""
    tensors, scales = zip(*(tw.quantise(x[None, :-30], "fp8", per=per) for x in packed(128)), strict=True)
    named, number = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)), len(ENDS[0]) - 1
    cu_seqlens = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ENDS]
    call = Call(
        **dict(zip("qkv", tensors, strict=True)),
        **named,
        mask=tw.Documents(*ENDS, inner=tw.Causal()),
        scale=128**-0.5,
        out_dtype=torch.bfloat16,
    )
    for own in (False, True) if per == "head" else (False,):
        of = {name: (x.expand(number, -1) if own else x).to(DEVICE) for name, x in named.items()}
        o, lse = tw.attention_varlen(*(x[0].to(DEVICE) for x in tensors), *cu_seqlens, **of, causal=True, return_lse=True)
        hold(o[None], lse[None], call, apart=1.5 if own else 1 / 3)  # tiles begin where documents do, and P is rounded otherwise


@pytest.mark.parametrize("precision", RECIPES)
def test_gradients_go_straight_through(precision):
    leaves, d_o = [x.to(DEVICE).requires_grad_() for x in qkv()], randn(2, 300, 4, 128, seed=5).to(DEVICE)
    got, want = (torch.autograd.grad(tw.attention(*leaves, causal=True, precision=each), leaves, d_o) for each in (precision, None))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("shape", [(), (2,), (3, 2), (20, 16, 2)])
def test_caches(shape):
    """Against the same call on the CPU, where they are dequantised."""
    k, v = (randn(20, 16, 2, 64, seed=n).to(E4M3) for n in range(2))
    q, lengths = randn(3, 2, 8, 64, seed=2), torch.tensor([5, 96, 77], dtype=torch.int32)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:18].view(3, 6).to(torch.int32)
    scales = {name: 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(n)) for n, name in enumerate(("k_scale", "v_scale"))}
    words = {"cache_seqlens": lengths, "page_table": table, **scales}
    want, want_lse = tw.decode(q, k, v, **words, return_lse=True)
    on_device = {name: x.to(DEVICE) for name, x in words.items()}
    o, lse = tw.decode(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), **on_device, return_lse=True)
    assert rms(o.cpu() - want) < 0.01 * rms(want) and (lse.cpu() - want_lse).abs().max() < 0.02
