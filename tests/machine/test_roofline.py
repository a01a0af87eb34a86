"""The roofline against the figures of the papers and of the worklogs the design comes from."""

import pytest
import torch

from tilewise.machine.roofline import (
    Launch,
    Shape,
    Tile,
    estimate,
    fa1_blocks,
    fa1_tiles,
    fa2_blocks,
    flops,
    hbm_bytes,
    paper_flops,
    score_matrix_bytes,
)
from tilewise.machine.sheets import A100, H100, KB, MACHINES, machine_for


def shape(seqlen=4096, head_dim=128, heads=1, batch=1, **changes):
    sizes = {"batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "heads_q": heads, "heads_k": heads, "head_dim": head_dim}
    return Shape(**{**sizes, **changes})


def test_forward_is_two_products_and_backward_five():
    square = shape(seqlen=512, head_dim=64, heads=8, batch=2)
    assert flops(square) == 4 * 512 * 512 * 64 * 8 * 2
    assert flops(square, "bwd") == 2.5 * flops(square)
    assert flops(square, "fwd+bwd") == 3.5 * flops(square)


def test_head_dim_v_counts_in_the_products_it_takes_part_in():
    narrow = shape(seqlen=10, head_dim=3, head_dim_v=5)
    assert flops(narrow) == 2 * 100 * (3 + 5)
    assert flops(narrow, "bwd") == 2 * 100 * (3 + 5 + 5 + 3 + 3)


def test_papers_convention_halves_causal_where_exact_counts_do_not():
    n = 1024
    causal = shape(seqlen=n, pairs=n * (n + 1) // 2)
    assert paper_flops(causal, causal=True) == 4 * n * n * 128 // 2
    assert flops(causal) == 4 * 128 * n * (n + 1) // 2
    assert paper_flops(causal, causal=False, direction="fwd+bwd") == 3.5 * 4 * n * n * 128


def test_score_matrix_sizes():
    assert score_matrix_bytes(shape(seqlen=10**6), itemsize=4) == 4e12  # 4 TB
    assert score_matrix_bytes(shape(seqlen=8192)) == 128 * 2**20
    assert score_matrix_bytes(shape(seqlen=8192, heads=40, batch=4)) == pytest.approx(21.5e9, rel=0.01)


def test_ridges():
    assert A100.ridge(torch.float16) == pytest.approx(156)
    per_element = H100.ridge(torch.bfloat16) * 2
    assert per_element == pytest.approx(590, abs=1)


def test_machines():
    assert A100.sms * A100.l1_bytes == pytest.approx(20 * 2**20, rel=0.02)
    assert A100.peak[torch.float16] / A100.scalar_peak == 16
    assert H100.sms == 132 and H100.smem_bytes == 228 * KB and H100.smem_block_bytes == 227 * KB
    # FA3 section 3.1: at head_dim 128 there are 512 FLOPs a exponential, and exponentials take half as long as the products.
    assert (1 / H100.exp_peak) / (512 / H100.peak[torch.float16]) == pytest.approx(0.5, abs=0.01)
    assert MACHINES["H200"].peak == H100.peak and MACHINES["H200"].hbm_bandwidth > H100.hbm_bandwidth
    assert len({hash(machine) for machine in MACHINES.values()}) == 3


def test_the_roof_is_slanted_below_the_ridge_and_flat_above():
    assert A100.attainable(64, torch.float16) == 64 * 2.0e12
    assert A100.attainable(4096, torch.float16) == 312e12


def test_intensity_of_naive_and_ideal_attention():
    long = shape(seqlen=1 << 17)
    assert flops(long) / hbm_bytes(long, "naive") == pytest.approx(128 / 2, rel=0.01)  # head_dim / 2 FLOP/byte in 16 bits
    medium = shape(seqlen=4096)
    per_element = flops(medium) / (hbm_bytes(medium, "once") / 2)
    assert per_element == pytest.approx(4096, rel=0.01)  # seqlen FLOPs an element, so half as many a byte


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fa1_traffic_is_theorem_2(head_dim):
    n, on_chip = 1 << 17, 192 * KB
    long = shape(seqlen=n, head_dim=head_dim)
    m = on_chip // 2  # elements
    elements = hbm_bytes(long, "fa1", tiles=fa1_tiles(long, on_chip)) / 2
    assert elements == pytest.approx(12 * n * n * head_dim**2 / m, rel=0.15)  # 15 %: m and l, which the theorem drops


def test_traffic_scales_as_theorem_2_says():
    def traffic(n=1 << 15, head_dim=64, on_chip=96 * KB):
        long = shape(seqlen=n, head_dim=head_dim)
        return hbm_bytes(long, "fa1", tiles=fa1_tiles(long, on_chip))

    assert traffic(n=1 << 16) / traffic() == pytest.approx(4, rel=0.01)
    assert traffic(head_dim=128) / traffic() == pytest.approx(4, rel=0.15)
    assert traffic(on_chip=192 * KB) / traffic() == pytest.approx(1 / 2, rel=0.05)


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_each_algorithm_moves_less_than_the_one_before(direction):
    moved = [hbm_bytes(shape(seqlen=8192), name, direction) for name in ("naive", "fa1", "fa2", "once")]
    assert moved == sorted(moved, reverse=True) and len(set(moved)) == 4


def test_naive_traffic_by_hand():
    n, d = 100, 10
    assert hbm_bytes(shape(seqlen=n, head_dim=d), "naive") == 2 * (4 * n * n + 4 * n * d)
    assert hbm_bytes(shape(seqlen=n, head_dim=d), "naive", "bwd") == 2 * (7 * n * n + 8 * n * d)


def test_grouped_heads_read_fewer_keys():
    few = shape(heads=8, heads_k=2)
    assert hbm_bytes(shape(heads=8), "once") - hbm_bytes(few, "once") == 2 * 2 * 4096 * 128 * 6
    with pytest.raises(ValueError, match="algorithm is 'fa9'; it must be one of naive, fa1, fa2, once"):
        hbm_bytes(few, "fa9")


def test_thread_blocks_of_fa1_and_fa2():
    model = shape(seqlen=8192, heads=32)
    fa1 = Launch.of(fa1_blocks(model), A100)
    fa2 = Launch.of(fa2_blocks(model, tile_m=64), A100)
    assert (fa1.blocks, fa1.idle_sms, fa1.waves) == (32, 76, 1)
    assert (fa2.blocks, fa2.idle_sms, fa2.waves) == (4096, 0, 38)
    assert fa1.tail_efficiency == pytest.approx(32 / 108)
    assert fa2.tail_efficiency == pytest.approx(4096 / (38 * 108))


def test_launch_with_several_blocks_an_sm_and_with_none():
    assert Launch.of(217, A100, blocks_per_sm=2).waves == 2
    assert Launch.of(0, A100) == Launch(blocks=0, idle_sms=108, waves=0, tail_efficiency=1.0)


@pytest.mark.parametrize(
    ("tile", "kilobytes"),
    [
        (Tile(tile_m=64, tile_n=64, threads=256, kv_shared=True, scores_bytes=4), 48),  # K2: Q, one buffer for K and V, S in fp32
        (Tile(tile_m=64, tile_n=64, threads=256, kv_stages=5, scores_bytes=4), 192),  # K3.3: Q, five stages of K and V, S in fp32
        (Tile(tile_m=64, tile_n=64, kv_stages=5), 176),  # K4.2: the same without S, which stays in registers
        (Tile(tile_m=128, tile_n=176, threads=256, kv_stages=2), 208),  # FA3's tile for head_dim 128
    ],
)
def test_shared_memory_of_the_ladders_tiles(tile, kilobytes):
    assert tile.smem_bytes(shape()) == kilobytes * KB
    assert tile.smem_bytes(shape()) <= H100.smem_block_bytes
    assert tile.blocks_per_sm(shape(), H100) == {48: 4, 192: 1, 176: 1, 208: 1}[kilobytes]


def test_accumulator_registers():
    assert Tile(tile_m=64, tile_n=64).accumulators(shape()) == {"acc_S": 32, "acc_O": 64, "P": 16}  # K4: one warpgroup
    assert Tile(tile_m=64, tile_n=64, threads=256, scores_bytes=4).accumulators(shape()) == {"acc_S": 0, "acc_O": 32, "P": 0}  # K2


def test_a_tile_that_does_not_fit():
    wide = Tile(tile_m=128, tile_n=128, threads=256, kv_stages=4)
    assert wide.blocks_per_sm(shape(head_dim=256), H100) == 0


def test_estimate_on_h100():
    cost = estimate(shape(seqlen=8192, heads=16, batch=2), machine=H100, tile=Tile(tile_m=128, tile_n=128, threads=256, kv_stages=2))
    assert cost.bound == "compute" and cost.attainable == pytest.approx(H100.peak[torch.bfloat16])
    assert cost.launches["FA2"].blocks == 2 * 16 * 64 and cost.blocks_per_sm == 1
    assert any("bound by compute" in line for line in cost.lines()) and any("160 KB" in line for line in cost.lines())


def test_estimate_knows_the_other_two_bounds():
    decode = shape(seqlen_q=1, seqlen=8192, heads=32, batch=16)
    assert estimate(decode, machine=H100).bound == "memory"
    assert estimate(shape(head_dim=32), machine=H100).bound == "exponentials"


def test_estimate_without_a_machine_and_of_nothing():
    assert estimate(shape()).seconds is None and len(estimate(shape()).lines()) == 5
    empty = estimate(shape(seqlen=0), machine=H100)
    assert empty.flops == 0 and empty.attainable == 0.0
    with pytest.raises(ValueError, match=r"torch.float8_e4m3fn has no peak rate on A100"):
        estimate(shape(dtype=torch.float8_e4m3fn), machine=A100)


def test_no_preset_for_a_cpu():
    assert machine_for("cpu") is None


def test_shape_of_tensors_counts_the_masks_pairs():
    from tilewise.masks import Causal

    q, k, v = torch.zeros(2, 5, 4, 8), torch.zeros(2, 9, 2, 8), torch.zeros(2, 9, 2, 6)
    made = Shape.of(q, k, v, Causal())
    assert made.pairs == 2 * 4 * sum(range(5, 10)) and made.head_dim_v == 6 and made.heads_k == 2
    assert Shape.of(q, k, v, Causal()).dtype is torch.float32
