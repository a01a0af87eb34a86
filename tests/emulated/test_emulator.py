"""The emulator itself: arithmetic against torch's, small kernels written by hand, and what it has to refuse."""

import ctypes
import struct

import numpy as np
import pytest
import torch
from emulator import arithmetic, ptx
from emulator.host import Grid
from emulator.machine import PACES, Machine
from emulator.memory import Fault, Memory
from emulator.program import Program
from emulator.translation import Unknown

HEAD = """
.version 8.8
.target sm_90a
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry kernel(
	.param .u64 x,
	.param .u32 n
)
{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<30>;
	.reg .b64 %rd<9>;
	ld.param.b64 %rd1, [x];
	ld.param.b32 %r1, [n];
	mov.u32 %r2, %tid.x;
	mul.wide.u32 %rd2, %r2, 4;
	add.s64 %rd3, %rd1, %rd2;
"""
STORE = "\tst.global.b32 [%rd3], %r9;\n\tret;\n}\n"


def run(body, threads=32, blocks=1, n=0, pace="random", seed=0, x=None, end=STORE, cluster=1):
    """What `body` leaves in %r9 of every thread; x: instead of that a tensor that it may change."""
    x = torch.zeros(threads, dtype=torch.int32) if x is None else x
    given = [ctypes.create_string_buffer(struct.pack(*each), 8) for each in (("<Q", x.data_ptr()), ("<I", n))]
    addresses = (ctypes.c_void_p * 2)(*map(ctypes.addressof, given))
    (kernel,) = ptx.parse(HEAD + body + end).values()
    machine = Machine(Memory([x]), slots=2, pace=pace, seed=seed)
    machine.run(Program(kernel), Grid("kernel", (blocks, 1, 1), threads, 1024, addresses, cluster))
    return x.tolist()


@pytest.mark.parametrize("more", [208, 216])
def test_warps_share_out_the_registers_of_their_launch(more):
    """Three warpgroups of 168 a thread each, of which the first gives 80 back and the others take 40, or more than there are."""
    body = f"""
    setp.lt.u32 %p1, %r2, 128;
    @%p1 bra LESS;
    setmaxnreg.inc.sync.aligned.u32 {more};
    bra.uni OUT;
    LESS: setmaxnreg.dec.sync.aligned.u32 88;
    OUT: mov.u32 %r9, 1;
    """
    if more == 208:
        assert run(body, threads=384) == [1] * 384
    else:
        with pytest.raises(Fault, match="and their launch has 168 each: one waits for ever"):
            run(body, threads=384)


def test_threads_go_ways_of_their_own():
    """A loop that lane i leaves after i rounds, an inner branch, and labels of two blocks with the same names."""
    count = """
    {
    .reg .pred again;
    ROUND: setp.lt.u32 again, %r8, %r2;
    @!again bra OUT;
    add.s32 %r8, %r8, 1;
    add.s32 %r9, %r9, %r8;
    bra.uni ROUND;
    OUT:
    }
"""
    odd = "\tand.b32 %r7, %r2, 1;\n\tsetp.eq.b32 %p1, %r7, 0;\n\t@%p1 bra EVEN;\n\tadd.s32 %r9, %r9, 1000;\nEVEN:\n"
    found = run(f"\tmov.b32 %r9, 0;\n\tmov.b32 %r8, 0;\n{count}\tmov.b32 %r8, 0;\n{count}{odd}")
    assert found == [i * (i + 1) + 1000 * (i % 2) for i in range(32)]


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("shfl.sync.bfly.b32 %r9, %r2, 5, 31, -1;", [i ^ 5 for i in range(32)]),
        ("shfl.sync.idx.b32 %r9, %r2, 7, 31, -1;", [7] * 32),
        ("setp.lt.u32 %p1, %r2, 3;\n vote.sync.ballot.b32 %r9, %p1, -1;", [7] * 32),
        ("setp.lt.u32 %p1, %r2, 3;\n vote.sync.any.pred %p2, %p1, -1;\n selp.b32 %r9, 1, 0, %p2;", [1] * 32),
        ("setp.lt.u32 %p1, %r2, 3;\n vote.sync.all.pred %p2, %p1, -1;\n selp.b32 %r9, 1, 0, %p2;", [0] * 32),
        ("redux.sync.max.s32 %r9, %r2, -1;", [31] * 32),
        ("elect.sync %r3|%p1, -1;\n selp.b32 %r9, 5, %r3, %p1;", [5] + [0] * 31),
        ("sub.s32 %r9, %r2, 3;\n max.relu.s32 %r9, %r9, 2;\n", [max(i - 3, 2) for i in range(32)]),
        *(  # halves: NaN (bits 7FFF) and infinity, 2 and -3
            (
                f"mov.b32 %r3, {0x7FFF << 16 | two};\n mov.b32 %r4, {infinity << 16 | minus_three};\n {name}.{kind}x2 %r9, %r3, %r4;",
                [want] * 32,
            )
            for kind, two, infinity, minus_three in (("bf16", 0x4000, 0x7F80, 0xC040), ("f16", 0x4000, 0x7C00, 0xC200))
            for name, want in (("max", infinity << 16 | two), ("min", infinity << 16 | minus_three))
        ),
        ("shl.b32 %r9, 1, %r2;\n shr.u32 %r9, %r9, 30;\n", [0] * 30 + [1, 2]),
        ("sub.s32 %r3, 4, %r2;\n mul.hi.s32 %r9, %r3, 1073741824;\n", [(4 - i) >> 2 for i in range(32)]),
        ("sub.s32 %r3, %r2, 9;\n div.s32 %r9, %r3, 4;\n", [int((i - 9) / 4) for i in range(32)]),
        ("sub.s32 %r3, %r2, 9;\n rem.s32 %r9, %r3, 4;\n", [int(np.fmod(i - 9, 4)) for i in range(32)]),
        (  # bits of bf16 from NaN (lane 0) to infinity (1) and down, all with a sign
            "sub.s32 %r3, 65409, %r2;\n cvt.u16.u32 %rs1, %r3;\n abs.bf16 %rs1, %rs1;\n mov.b16 %rs2, 32640;\n setp.equ.bf16 %p1, %rs1, %rs2;\n"
            " selp.b32 %r9, 1, 0, %p1;",
            [1, 1] + [0] * 30,
        ),
        (  # of two halves NaN is above
            f"mov.b32 %r3, {0x7FFF << 16 | 0x3C00};\n setp.nan.f16x2 %p1|%p2, %r3, %r3;\n selp.b32 %r4, 1, 0, %p1;\n selp.b32 %r9, 3, %r4, %p2;",
            [3] * 32,
        ),
        ("cvt.u16.u32 %rs1, %r2;\n cvt.s8.s32 %rs2, -3;\n mov.b32 %r9, {%rs1, %rs2};", [i | 0xFFFD0000 - (1 << 32) for i in range(32)]),
    ],
)
def test_instructions(code, want):
    assert run(f"\t{code}\n") == want


@pytest.mark.parametrize("pace", PACES)
def test_warps_wait_for_each_other(pace):
    """Each thread reads what a thread of another warp wrote."""
    code = """
	mov.b32 %r3, __dynamic_shmem__0;
	shl.b32 %r4, %r2, 2;
	add.s32 %r5, %r3, %r4;
	st.shared.b32 [%r5], %r2;
	bar.sync 0;
	xor.b32 %r6, %r4, 252;
	add.s32 %r7, %r3, %r6;
	ld.shared.b32 %r9, [%r7];
"""
    assert run(code, threads=64, pace=pace) == list(range(63, -1, -1))
    raced = [run(code.replace("bar.sync 0;", ""), threads=64, pace=pace, seed=seed) for seed in range(4)]
    assert any(found != list(range(63, -1, -1)) for found in raced)


FENCE = "fence.proxy.async.shared::cta;"
SENT = """
	mov.b32 %r3, __dynamic_shmem__0;
	shl.b32 %r4, %r2, 2;
	add.s32 %r5, %r3, %r4;
	st.shared.b32 [%r5], %r2;
	BEFORE
	bar.sync 0;
	setp.eq.u32 %p1, %r2, 0;
	@%p1 AFTER
	@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 256;
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 0;
	ret;
}
"""


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("place", ["BEFORE", "AFTER"])
def test_a_fence_between_what_threads_write_and_the_copy_engine_reads(place, pace):
    """Of those who write, before they say that they have, or of who asks the copy engine, once it knows; its own ahead of that is too early."""
    code = SENT.replace(place, FENCE)
    assert run(code.replace("BEFORE", "").replace("@%p1 AFTER", ""), threads=64, pace=pace, end="") == list(range(64))
    early = SENT.replace("BEFORE", f"setp.eq.u32 %p1, %r2, 0;\n@%p1 {FENCE}")
    for wrong in (early, SENT.replace("BEFORE", "")):
        with pytest.raises(Fault, match=r"no fence\.proxy\.async"):
            run(wrong.replace("@%p1 AFTER", ""), threads=64, pace=pace, end="")


def test_several_numbers_are_added_at_once():
    x = torch.zeros(4)
    four = (
        "mov.b32 %r3, 0f3F800000;\n mov.b32 %r4, 0f40000000;\n red.relaxed.gpu.global.add.v4.f32 [%rd1], {%r3, %r4, %r4, %r3};\n ret;\n}\n"
    )
    assert run(four, blocks=3, x=x, end="") == [96, 192, 192, 96]


READ = "ld.shared.b32 %r9, [%r5];\n"
MET = "barrier.cluster.arrive;\nbarrier.cluster.wait;"
TO_EACH_OTHER = f"""
	mov.u32 %r3, %cluster_ctarank;
	xor.b32 %r4, %r3, 1;
	mov.b32 %r5, __dynamic_shmem__0;
	shl.b32 %r6, %r2, 2;
	add.s32 %r5, %r5, %r6;
	mapa.shared::cluster.u32 %r7, %r5, %r4;
	mov.u32 %r8, %ctaid.x;
	mul.wide.u32 %rd2, %r8, 128;
	add.s64 %rd3, %rd3, %rd2;
	{MET}
	st.shared::cluster.b32 [%r7], %r8;
	{MET}
	{READ}"""


def test_blocks_of_a_cluster_reach_each_other():
    """Each thread writes its block's number for the neighbour; four blocks, two at a time. Who reads ahead of the barrier finds what was there."""
    x = torch.zeros(128, dtype=torch.int32)
    assert run(TO_EACH_OTHER, blocks=4, x=x, cluster=2) == [1] * 32 + [0] * 32 + [3] * 32 + [2] * 32
    early = TO_EACH_OTHER.removesuffix(READ).removesuffix(f"{MET}\n\t") + READ + MET
    assert any(min(run(early, blocks=4, x=x, cluster=2, seed=seed)) < 0 for seed in range(4))


def test_a_block_of_a_cluster_ends_and_another_still_writes_to_it():
    late = TO_EACH_OTHER.replace(f"{MET}\n\tld", "ld").replace("st.", "setp.eq.u32 %p1, %r3, 1;\n@%p1 bra END;\nnanosleep.u32 9;\nst.")
    with pytest.raises(Fault, match="a thread block that has ended"):
        run(late + "\tEND:\n", blocks=2, x=torch.zeros(64, dtype=torch.int32), cluster=2)


def test_blocks_add_to_one_number():
    x = torch.zeros(1, dtype=torch.int32)
    assert run("\tred.relaxed.gpu.global.add.s32 [%rd1], 1;\n\tret;\n}\n", threads=64, blocks=5, x=x, end="") == [320]


def test_a_product_of_integers():
    """mma.m16n8k32 by the figures of its fragments (PTX ISA 9.7.14.5.11): four neighbours in a register, the largest sums among them."""
    body = """
    mul.lo.s32 %r3, %r2, 48;
    cvt.u64.u32 %rd4, %r3;
    add.s64 %rd3, %rd1, %rd4;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd3];
    ld.global.v2.b32 {%r8, %r9}, [%rd3+16];
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3+32];
    mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 {%r14, %r15, %r16, %r17}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, {%r10, %r11, %r12, %r13};
    st.global.v4.b32 [%rd3], {%r14, %r15, %r16, %r17};
    """
    source = np.random.default_rng(0)
    a, b = source.integers(-128, 128, (16, 32), np.int8), source.integers(-128, 128, (32, 8), np.int8)
    a[3], b[:, 5] = -128, -128
    c = source.integers(-(1 << 30), 1 << 30, (16, 8), np.int32)
    lane, i = np.arange(32)[:, None], np.arange(4)[None, :]
    row, quad, number = lane // 4, lane % 4, np.arange(4)
    of_a = a[(row + 8 * (i % 2))[..., None], (16 * (i // 2) + 4 * quad)[..., None] + number]
    of_b = b[(16 * i[:, :2] + 4 * quad)[..., None] + number, row[..., None]]
    at = row + 8 * (i // 2), 2 * quad + i % 2
    words = [np.ascontiguousarray(x).view(np.int32)[..., 0] for x in (of_a, of_b)]
    x = torch.from_numpy(np.ascontiguousarray(np.concatenate([*words, np.zeros_like(words[1]), c[at]], axis=1)))
    run(body, x=x, end="\tret;\n}\n")
    assert np.array_equal(x[:, :4].numpy(), (a.astype(np.int32) @ b.astype(np.int32) + c)[at])


@pytest.mark.parametrize(("operation", "after"), [("relaxed.gpu.global.inc.u32", 320 % 7), ("acq_rel.gpu.global.cas.b32", 6)])
def test_blocks_count_to_a_number_and_swap_one(operation, after):
    """From 0 to 6 and then from 0 on; 6 in place of 0, once."""
    given, x = "6" if "inc" in operation else "0, 6", torch.zeros(1, dtype=torch.int32)
    assert run(f"\tatom.{operation} %r9, [%rd1], {given};\n\tret;\n}}\n", threads=64, blocks=5, x=x, end="") == [after]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("ld.global.b32 %r9, [%rd3+128];", "in no tensor"),
        ("st.global.b32 [%rd3+-4], %r2;", "in no tensor"),
        ("ld.global.b32 %r9, [%rd3+2];", "no multiple"),
        ("mov.b32 %r3, __dynamic_shmem__0;\n ld.shared.b32 %r9, [%r3+1024];", "not all in shared memory"),
        ("bar.sync 1, 64;", "nothing happens any more"),
        ("mov.b32 %r3, __dynamic_shmem__0;\n mbarrier.arrive.shared.b64 %rd4, [%r3], 1;", "no barrier"),
        (
            "mov.b32 %r3, __dynamic_shmem__0;\n mbarrier.init.shared.b64 [%r3], 31;\n mbarrier.arrive.shared.b64 %rd4, [%r3], 40;",
            "more than 31",
        ),
    ],
)
def test_what_a_gpu_would_not_do(code, sentence):
    with pytest.raises(Fault, match=sentence):
        run(f"\t{code}\n")


def test_what_is_not_known_is_not_left_out():
    with pytest.raises(Unknown, match=r"lop3\.b32"):
        run("\tlop3.b32 %r9, %r2, %r2, %r2, 3;\n")


def test_halves_are_rounded_as_torch_rounds_them():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    numbers = np.concatenate([bits.view(np.float32), np.float32([0.0, -0.0, np.inf, -np.inf, 65519.9, 65520.0, 6e-8, 2.9e-8])])
    with np.errstate(all="ignore"):
        found = (arithmetic.bf16(numbers), torch.bfloat16), (arithmetic.f16(numbers), torch.float16)
    for mine, dtype in found:
        theirs = torch.from_numpy(numbers).to(dtype)
        equal = torch.from_numpy(mine.view(np.int16)) == theirs.view(torch.int16)
        assert (equal | theirs.isnan()).all()
        assert torch.from_numpy(mine.view(np.int16)).view(dtype)[theirs.isnan()].isnan().all()


def test_comparisons_with_NaN():
    x, nan = np.float32([1.0, np.nan]), np.float32([np.nan, np.nan])
    assert not any(compare(x, nan).any() for compare in (arithmetic.eq, arithmetic.ne, arithmetic.lt, arithmetic.ge))
    assert all(compare(x, nan).all() for compare in (arithmetic.equ, arithmetic.neu, arithmetic.ltu, arithmetic.geu))
