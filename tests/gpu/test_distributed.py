"""Several GPUs have the bits of one: on one GPU by parts of a call, on two or more by NCCL (tools/gpu/context_parallel.py)."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import decode_shares
import pytest
import torch
import wide_keys
from decode_problems import DecodeCase, by_kernel, made
from distributed_cases import families
from hopper_problems import NEEDS_HOPPER

import tilewise as tw
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward.config import TILES
from tilewise.masks import Part
from tilewise.testing.cases import Case, random_mask

pytestmark = NEEDS_HOPPER

ROOT = Path(__file__).parents[2]
N, ROWS = 2000, ((0, 256), (640, 1152), (1920, 2000))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", list(families(N)))
def test_rows_have_the_bits_of_the_whole_call(name, dim):
    mask, places = families(N)[name], torch.cat([torch.arange(*rows) for rows in ROWS]).cuda()
    generator = torch.Generator("cuda").manual_seed(dim)
    q, k, v, d_o = (torch.randn(1, N, heads, dim, generator=generator, device="cuda").bfloat16() for heads in (4, 2, 2, 4))

    def results(q, d_o, rows):
        q = q.clone().requires_grad_()
        o, lse = tw.attention(q, k, v, mask=Part(mask, N, rows), return_lse=True, backend="hopper")
        return o.detach(), lse.detach().transpose(1, 2), torch.autograd.grad(o, q, d_o)[0]

    whole, ours = results(q, d_o, ((0, N),)), results(q[:, places], d_o[:, places], ROWS)
    for what, x, y in zip(("o", "lse", "dq"), ours, whole, strict=True):
        assert torch.equal(x, y[:, places]), what


MASKS = tw.Full(), tw.Causal(), tw.SlidingWindow(200, 9)
WIDE = [
    ((1100, 1100, (4, 2)), (*MASKS, tw.Documents((0, 300, 1100), inner=tw.Causal()), random_mask(1100, 1100))),
    ((1100, 77, (4, 2)), MASKS),
]
WIDE.append(((3000, 3000, (16, 1)), MASKS))  # query heads of a group are apart


@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("turn", range(len(WIDE)))
def test_wide_keys(turn, dims):
    """dK and dV in fp32 round to the bits that are given without, and are nearer to fp64; masks by all ways of seeing."""
    (seqlen_q, seqlen_k, heads), masks = WIDE[turn]
    sizes = {"batch": 1, "head_dim": dims[0], "head_dim_v": dims[1], "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for i, mask in enumerate(masks):
        case = Case(**sizes, heads_q=heads[0], heads_k=heads[1], mask=mask, dtype=("bf16", "fp16")[(turn + i) % 2], lse_grad=i % 3 == 1)
        wide_keys.held(Hopper(), case, device="cuda")


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_wide_keys_are_exact_where_they_can_be(dims):
    wide_keys.sums_are_exact(Hopper(), dims, device="cuda")


@pytest.mark.parametrize(
    "given",
    [
        (DecodeCase(lengths=(0, 1, 63, 3000), queries=4, heads=(8, 2), dims=(128, 128)), 2, 16, 64),
        (
            DecodeCase(
                lengths=(700, 1, 3000, 9), queries=(3, 1, 0, 90), heads=(6, 2), mask=tw.SlidingWindow(500, 0), alibi=True, sink=True
            ),
            3,
            1,
            0,
        ),
        (DecodeCase(lengths=(700, 1, 3000), queries=2, heads=(16, 1), dims=(576, 512), latent=True), 4, 16, 16),
    ],
    ids=str,
)
def test_decode_by_shares(given):
    """What ranks find of their shares, one after another on this GPU, is the whole when it is merged."""

    case, *of_ranks = given

    def compute(call):
        moved = {name: x.cuda() for name, x in vars(call).items() if isinstance(x, torch.Tensor)}
        if case.latent:  # values are to be in the memory of their keys there, too
            moved["v_cache"] = moved["k_cache"][..., : case.dims[1]]
        return tuple(x.cpu() for x in by_kernel(replace(call, **moved)))

    decode_shares.check(made(case), compute, *of_ranks)


def test_decode_by_shares_in_a_graph():
    """Nothing is read on the host: a captured call follows lengths that are written later."""
    q, k, v = (torch.randn(2, n, h, 64, device="cuda").bfloat16() for n, h in ((1, 4), (256, 2), (256, 2)))
    lengths, words = torch.tensor([500, 3], dtype=torch.int32, device="cuda"), {"cp_rank": 1, "cp_world": 2, "cp_interleave": 16}
    tw.decode(q, k, v, cache_seqlens=lengths, **words)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tw.decode(q, k, v, cache_seqlens=lengths, **words)
    for numbers in ([500, 3], [17, 512], [0, 100]):
        lengths.copy_(torch.tensor(numbers, dtype=torch.int32))
        graph.replay()
        assert torch.equal(o, tw.decode(q, k, v, cache_seqlens=lengths.clone(), **words))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs")
def test_two_gpus():
    environment = os.environ | {"PYTHON": sys.executable, "OUT": os.devnull}
    done = subprocess.run(
        [ROOT / "tools/gpu/context_parallel.sh", "--gpus", "2", "--parts", "decode,check"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
