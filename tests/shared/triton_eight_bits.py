"""What is held of the Triton backend's forward pass in 8 bits, where its kernels are interpreted (interpreted.py calls these) and on a GPU.

Calls are made, and what is wanted of them is computed, on the CPU; `device` is where the kernels run.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import append_problems
import torch
import triton
import triton.language as tl
from eight_bits_problems import Quantised, held, made, spoil, with_numbers_that_are_not_finite
from torch import Tensor

import tilewise as tw
from tilewise.backends import eight_bits
from tilewise.backends.triton import Triton
from tilewise.backends.triton.bound import Bound
from tilewise.backends.triton.kernels import eight_bits as kernels
from tilewise.masks import DeviceDocuments, Documents
from tilewise.problem import Call
from tilewise.testing import poison


def moved(call: Call, device: str) -> Call:
    """Its tensors there, its mask's lengths too."""
    fields: dict = {name: x.to(device) for name, x in vars(call).items() if isinstance(x, Tensor)}
    if isinstance(call.mask, DeviceDocuments):
        fields["mask"] = DeviceDocuments(call.mask.cu_seqlens_q.to(device), call.mask.cu_seqlens_k.to(device), inner=call.mask.inner)
    return replace(call, **fields)


def computed(call: Call, device: str) -> list[Tensor]:
    """What the backend's forward pass gives on the device, in memory that was NaN."""
    call = moved(call, device)
    with poison.memory():
        return [x.cpu() for x in Triton().forward(call)]


def holds(case: Quantised, changes: Mapping[str, object] | None = None, spoiled: bool = False, device: str = "cpu") -> None:
    """As the emulation, written to memory that was NaN, the same bits twice. spoiled: numbers of all operands are not finite."""
    call = replace(made(case), **changes or {})
    if spoiled:
        call = with_numbers_that_are_not_finite(call)
    results = [computed(call, device) for _ in range(2)]
    assert all(append_problems.same(*pair) for pair in zip(*results, strict=True))
    held(call, *results[0])
    if spoiled:
        o, lse, *_ = results[0]
        assert o.isnan().any() and o.isinf().any() == (case.way == "int8_qk" and case.mask != tw.Full())
        assert case.mask == tw.Full() or not lse.isnan().all()


def holds_where_scales_are_not_finite(device: str = "cpu") -> None:
    """And numbers of e4m3, of which some rows see each."""
    for way, per in (("given", ("token", "tile", "head")), ("given int8", ("token", "token", "tensor"))):
        call = made(Quantised(way, 60, 150, per=per, mask=tw.SlidingWindow(40, 3)))
        call.q_scale[0, 1, 3] = math.nan
        call.k_scale[0, 0, 1 if per[1] == "tile" else 130] = math.nan
        call.v.view(torch.uint8)[0, 90, 0, 3] = 0x7F
        if way == "given":
            call.k.view(torch.uint8)[0, 60, 0, 1] = 0x7F
        o, lse = computed(call, device)
        held(call, o, lse)
        assert 0 < lse.isnan().sum() < lse.numel() and o.isnan().sum() > lse.isnan().sum() * o.shape[-1]


def holds_for_scales_of_any_size_and_sign(way: str, device: str = "cpu") -> None:
    """Nothing of a token whose scale is 0; NaN for the rows that see one whose scale is not finite, and for no others."""
    call, source = made(Quantised(way, 60, 200, per=("token",) * 3, mask=tw.SlidingWindow(40, 3))), torch.Generator().manual_seed(5)
    k, v = (x * torch.randn(x.shape, generator=source, dtype=torch.float32) for x in (call.k_scale, call.v_scale))
    k[..., 160], v[..., 143], v[..., 150:170] = 0.0, 0.0, 0.0
    k[..., 195], v[..., 140], v[..., 145] = math.nan, math.inf, math.nan
    call = replace(call, k_scale=k, v_scale=v)
    o, lse = computed(call, device)
    held(call, o, lse)
    assert 0 < o.isnan().any(-1).any(-1).sum() < 60 and lse.isnan().any()


def quantises_to_the_bit(case: Quantised, spoiled: bool, device: str = "cpu") -> None:
    """The quantiser gives the contract's numbers, scales and centres; e4m3 in fp16."""
    call = made(case)
    call.k[:, -9:] = 0.0
    if spoiled:
        spoil(call)
    there = moved(call, device)
    bound = Bound(there)
    with poison.memory():
        operands, scales = bound.quantiser(there.q, there.k, there.v, None, bound.small)
    kept_v = operands["v"] is there.v
    operands, scales = ({name: x.cpu() for name, x in each.items() if isinstance(x, Tensor)} for each in (operands, scales))
    want, rows = eight_bits.operands_of(call), [i for i in range(call.seqlen_q) if i != 2 or not spoiled]
    pairs = [(operands[name][..., : x.shape[-1]].float(), x.float()) for name, x in (("q", want.q), ("k", want.k))]
    if want.v_channel is None:
        assert kept_v
    else:
        dim = call.head_dim_v
        pairs += [(operands["v"][..., :dim].float(), want.v.float())]
        pairs += [(scales[name][:, :dim], x.flatten(0, 1)) for name, x in (("v_scale", want.v_channel), ("v_centre", want.v_centre))]
    lost = scales["k_lost"].view(call.batch, call.heads_k, -1)
    pairs += [(scales["row_factor"], want.q_scale * want.factor), (scales["k_scale"].view_as(want.k_scale), want.k_scale)]
    if want.key_nan is not None:
        assert torch.equal(lost.isnan(), want.key_nan) and not lost[~want.key_nan].any()
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scales["row_shift"][..., rows], want.shift[..., rows], rtol=1e-4, atol=1e-4, equal_nan=True)


def packed(way: str, device: str = "cpu") -> None:
    """Documents whose lengths stay on the device: what lies behind the last one is not there."""
    call = made(Quantised(way, seqlen_q=80, seqlen_k=150))
    for ends in (((0, 20, 20, 70), (0, 30, 70, 130)), ((0, 0, 60, 60), (0, 0, 80, 80)), ((0, 0), (0, 0))):
        q, k, v = (x.clone() for x in (call.q, call.k, call.v))
        for x, end in zip((q, k, v), (ends[0][-1], ends[1][-1], ends[1][-1]), strict=True):
            x[:, end:] = 1e30
        cu_seqlens = (torch.tensor(x, dtype=torch.int32) for x in ends)
        given = replace(call, q=q, k=k, v=v, mask=DeviceDocuments(*cu_seqlens, inner=tw.Causal()))
        results = computed(given, device)
        held(replace(given, mask=Documents(*ends, inner=tw.Causal())), *results)


def keeps_gradients(precision: str, device: str = "cpu") -> None:
    """Straight through: the bits of the call without `precision`, by name."""
    call = made(Quantised(seqlen_q=20, seqlen_k=40, mask=tw.Causal()), device)
    leaves = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
    outputs = [tw.attention(*leaves, causal=True, precision=name, backend="triton") for name in (precision, None)]
    grads, wanted = (torch.autograd.grad(o, leaves, torch.ones_like(o)) for o in outputs)
    assert not torch.equal(*outputs) and all(map(torch.equal, grads, wanted))


def rounds_to_e4m3(device: str = "cpu") -> None:
    """All that 16 bits of fp32 say, numbers half way between two of e4m3, and those beside them."""
    every = torch.arange(0, 1 << 16, dtype=torch.int32) << 16
    halves = torch.arange(0, 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn).float().unfold(0, 2, 1).mean(-1)
    beside = torch.cat([halves.nextafter(torch.tensor(x)) for x in (-math.inf, math.inf)])
    x = torch.cat([every.view(torch.float32), halves, -halves, beside, -beside]).clamp(-448.0, 448.0)
    x = torch.cat([x, torch.full((-len(x) % 1024,), 0.1)])
    found = torch.full_like(x, -1.0, device=device)
    rounding[(len(x) // 1024,)](x.to(device), found)
    torch.testing.assert_close(found.cpu(), x.to(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def rounding(x, found):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(found + at, kernels.e4m3(tl.load(x + at)))


def holds_on_hard_inputs(way: str, device: str = "cpu") -> None:
    call, source = made(Quantised(way, 20, 500, heads=(1, 1))), torch.Generator().manual_seed(3)
    call.v.add_(10.0)
    call.k[..., ::16] += 12.0
    outliers = torch.rand(call.q.shape, generator=source) < 1e-2
    for q in (call.q, torch.where(outliers, call.q * 30.0, call.q), call.q * 8.0):
        each = replace(call, q=q)
        held(each, *computed(each, device))
