"""The ladder: attention on a Hopper GPU, kernel by kernel, from the formula as it is written to warpgroups that take turns.

`RUNGS["k5"](q, k, v, causal=True)` runs one; `python -m tilewise.ladder` lists, checks and times them. docs/worklog tells the story.
Decoding is a branch of its own, from K5.1: `DECODE_RUNGS["d2"](q, k_cache, v_cache, lengths)`; `tilewise bench d1,d2 --set decode` times it.
"""

from tilewise.ladder.backward_rung import BackwardRung
from tilewise.ladder.decode_rung import DecodeRung
from tilewise.ladder.rung import Rung

RUNGS: dict[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung("k1", "k1_naive", "three kernels, the score matrix in global memory"),
        Rung("k2", "k2_fused", "one fused kernel on CUDA cores, online softmax"),
        Rung("k3_1", "k3_tma", "loads by TMA, 1 stage", {"kv_stages": 1}),
        Rung("k3_2", "k3_tma", "loads by TMA, 2 stages", {"kv_stages": 2}),
        Rung("k3_3", "k3_tma", "loads by TMA, 5 stages", {"kv_stages": 5}),
        Rung("k4_1", "k4_1_wgmma_qk", "S on the tensor cores (WGMMA)"),
        Rung("k4_2", "k4_2_wgmma", "both products on the tensor cores, S and P in registers"),
        Rung("k5_1", "k5_1_roles", "a producer warp loads, one consumer warpgroup computes"),
        Rung("k5", "k5_warp_specialised", "two or three consumers share wider tiles and the producer's registers"),
        Rung("k6_1", "k6_1_turns", "consumers take turns at the tensor cores (ping-pong)"),
        Rung("k6", "k6_pingpong", "the next scores under this softmax as well"),
        Rung("k7", "k7_fp8", "8 bits: e4m3 with one scale a tensor, P packed in place", recipe="per_tensor"),
        Rung("k8", "k8_fp8_incoherent", "incoherent Q and K, finer scales, centred V, O in true fp32", recipe="incoherent"),
    )
}

# Other choices that a rung's page discusses; measured, but no rungs of their own.
VARIANTS: dict[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung("k4_2:stages2", "k4_2_wgmma", "K4.2 with 2 stages, two or more blocks a multiprocessor", {"kv_stages": 2}),
        Rung("k6:overlap", "k6_pingpong", "K6 with the overlap within a warpgroup only", {"pingpong": False}),
    )
}

DECODE_RUNGS: dict[str, DecodeRung] = {
    rung.name: rung
    for rung in (
        DecodeRung("d1", "d1_split_kv", "keys cut over thread blocks, a second kernel adds the pieces up"),
        DecodeRung("d2", "d2_one_launch", "one launch: the last block to arrive adds them up"),
    )
}

BACKWARD_RUNGS: dict[str, BackwardRung] = {
    rung.name: rung
    for rung in (
        BackwardRung("b1", "b1_one_tile", "one block a tile of keys, dQ by atomics"),
        BackwardRung("b2", "b2_roles", "a producer warp a tile ahead, two consumers share Q and dO"),
        BackwardRung("b3", "b3_ordered", "dQ in one order: the same bits in every run"),
    )
}

# Other names that answer: those of the worklog that the ladder follows, and names under which a rung was measured.
ALIASES: dict[str, str] = {"k3": "k3_3", "k4_qk": "k4_1", "k4": "k4_2", "k5_2": "k5", "k6:turns": "k6_1", "k6_2": "k6"}

__all__ = ["ALIASES", "BACKWARD_RUNGS", "DECODE_RUNGS", "RUNGS", "VARIANTS", "BackwardRung", "DecodeRung", "Rung"]
