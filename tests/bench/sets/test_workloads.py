"""Workloads, the named sets, and workloads from text."""

import pytest
import torch

from tilewise.bench.sets import (
    DEFAULTS,
    ROWS,
    Workload,
    chosen,
    cpu_sweep,
    mask_from,
    mask_shapes,
    model_shapes,
    paper_sweep,
    workloads_from,
)
from tilewise.bench.sets.trees import trees
from tilewise.masks import Causal, ChunkedCausal, Dense, Documents, Full, PrefixLM, SlidingWindow


def test_defaults_follow_the_query():
    workload = Workload(name="w", batch=2, seqlen_q=6, heads_q=4, head_dim=8)
    assert (workload.seqlen_k, workload.heads_k, workload.head_dim_v, workload.mask) == (6, 4, 8, Full())
    assert workload.case == {
        **{"batch": 2, "seqlen_q": 6, "seqlen_k": 6, "heads_q": 4, "heads_k": 4, "head_dim": 8, "head_dim_v": 8},
        **{"mask": "Full()", "dtype": "fp32", "direction": "fwd"},
    }


def test_ids_are_short_and_tell_everything():
    workload = Workload(
        name="w", batch=1, seqlen_q=5, seqlen_k=9, heads_q=8, heads_k=2, head_dim=192, head_dim_v=128, mask=Causal(), dtype=torch.bfloat16
    )
    assert workload.id == "w b1 s5x9 h8/2 d192/128 Causal() bf16 fwd"


def test_counts():
    workload = Workload(name="w", batch=2, seqlen_q=8, heads_q=4, heads_k=2, head_dim=16, mask=Causal(), direction="fwd+bwd")
    assert workload.flops == 3.5 * 4 * 36 * 16 * 8
    assert workload.paper_flops == 3.5 * 4 * 32 * 16 * 8
    q, kv, statistics = 2 * 8 * 4 * 16 * 4, 2 * 8 * 2 * 16 * 4, 2 * 8 * 4 * 4
    assert workload.bytes == (2 * q + 2 * kv + statistics) + (4 * q + 4 * kv + statistics)


def test_the_papers_count_only_full_and_causal_squares():
    sizes = {"name": "w", "batch": 1, "seqlen_q": 8, "heads_q": 1, "head_dim": 16}
    assert Workload(**sizes, mask=SlidingWindow(3, 0)).paper_flops is None
    assert Workload(**sizes, seqlen_k=9, mask=Causal()).paper_flops is None
    assert Workload(**sizes).paper_flops == Workload(**sizes).flops


def test_inputs_are_fresh_normal_and_repeatable():
    workload = Workload(name="w", batch=2, seqlen_q=50, seqlen_k=70, heads_q=4, heads_k=2, head_dim=32, head_dim_v=16, direction="bwd")
    q, k, v, d_o = workload.inputs(seed=3)
    assert (q.shape, k.shape, v.shape, d_o.shape) == ((2, 50, 4, 32), (2, 70, 2, 32), (2, 70, 2, 16), (2, 50, 4, 16))
    assert q.requires_grad and k.requires_grad and v.requires_grad and not d_o.requires_grad
    assert torch.equal(q, workload.inputs(seed=3).q) and not torch.equal(q, workload.inputs(seed=4).q)
    assert q.detach().std().item() == pytest.approx(1, abs=0.1)
    assert not Workload(name="w", batch=1, seqlen_q=2, heads_q=1, head_dim=4).inputs(0).q.requires_grad


def test_bad_workloads():
    with pytest.raises(ValueError, match="direction is 'sideways'; it must be one of fwd, bwd, fwd"):
        Workload(name="w", batch=1, seqlen_q=8, heads_q=1, head_dim=16, direction="sideways")
    with pytest.raises(ValueError, match="heads_q is 5 and heads_k is 2; heads_q must be a multiple"):
        Workload(name="w", batch=1, seqlen_q=8, heads_q=5, heads_k=2, head_dim=16)


def test_the_papers_sweep():
    sweep = paper_sweep()
    assert len(sweep) == 6 * 3 * 2
    assert all(each.batch * each.seqlen_q == 16384 and each.heads_q * each.head_dim == 2048 for each in sweep)
    assert {each.mask for each in sweep} == {Full(), Causal()} and {each.dtype for each in sweep} == {torch.bfloat16}


def test_every_set_counts_and_has_distinct_cases():
    for sweep in (paper_sweep(), cpu_sweep(), mask_shapes(), model_shapes(direction="bwd")):
        assert len({each.id for each in sweep}) == len(sweep)
        assert all(each.flops > 0 for each in sweep)
    work = [each.flops for each in mask_shapes()]
    assert work == sorted(work, reverse=True)
    by_name = {each.name: each for each in model_shapes()}
    assert len(by_name) == len(ROWS) >= 40
    whisper, deepseek = by_name["Whisper-large-cross"], by_name["DeepSeek-V3-prefill"]
    assert (whisper.seqlen_q, whisper.seqlen_k, deepseek.head_dim, deepseek.head_dim_v, deepseek.heads_k) == (448, 1500, 192, 128, 128)
    llama = by_name["Llama-3-8B"]
    assert (llama.heads_q, llama.heads_k, llama.head_dim) == (32, 8, 128)
    assert by_name["Llama-3-8B-packed"].flops < llama.flops
    assert by_name["Mistral-7B-window"].mask.pairs(16384, 16384) < 16384 * 4096


def test_trees_beside_their_rollouts_alone():
    rows = {each.name: each for each in trees(direction="bwd")}
    assert [each.seqlen_q for name, each in rows.items() if "unshared" not in name] == [20480, 33792, 35886, 62000, 62000]
    for name, tree in rows.items():
        if apart := rows.get(f"{name}-unshared"):
            assert apart.seqlen_q == tree.mask.weights().sum() and apart.flops > 1.2 * tree.flops
    nodes = [len(rows[f"tree-{nodes}-nodes"].mask.parents) for nodes in (60, 300)]
    assert nodes == [60, 300] and rows["tree-300-nodes"].mask.resolve(62000, 62000).pairs() < 62000**2 / 8


def test_dense_masks_are_named_by_their_size():
    dense = Workload(name="w", batch=1, seqlen_q=2, heads_q=1, head_dim=4, mask=Dense(torch.tensor([[True, False], [True, True]])))
    assert dense.case["mask"] == "bitmap mask of 3 pairs"


def test_from_text_makes_all_combinations():
    made = workloads_from({"seqlen": "512, 1024x2048", "heads": "8/2", "head_dim": "64,192/128", "causal": "0,1", "dtype": "fp32,bf16"})
    assert len(made) == 2 * 2 * 2 * 2
    last = made[-1]
    assert (last.seqlen_q, last.seqlen_k, last.heads_q, last.heads_k, last.head_dim, last.head_dim_v) == (1024, 2048, 8, 2, 192, 128)
    assert last.mask == Causal() and last.dtype is torch.bfloat16
    assert len(workloads_from({})) == len(DEFAULTS["seqlen"].split(",")) * len(DEFAULTS["mask"].split(","))
    assert workloads_from({"seqlen": 256, "mask": None})[0].seqlen_q == 256


def test_sets_have_a_dtype_of_their_own():
    assert [workloads_from({"set": name})[0].dtype for name in ("fp8", "papers", "cpu")] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_sets_from_text():
    assert len(workloads_from({"set": "cpu,models", "dtype": "fp32,bf16"})) == 2 * (len(cpu_sweep()) + len(model_shapes()))
    assert {each.direction for each in workloads_from({"set": "papers", "direction": "fwd,bwd"})} == {"fwd", "bwd"}


@pytest.mark.parametrize(
    ("patterns", "sizes"),
    [
        (None, 18),
        ("fp8", 18),
        ("* s8192 h16 d128 Full*", 1),
        ("* d128 Full* fwd, * d64 *", 9),
    ],
)
def test_chosen_by_names_and_ids(patterns, sizes):
    found = workloads_from({"set": "fp8"})
    some = chosen(found, patterns)
    assert len(some) == sizes and set(some) <= set(found)


def test_patterns_of_nothing():
    with pytest.raises(ValueError, match=r"only is 'T5\*,d', which matches none of the workloads fp8; give names .* ids such as 'fp8 b8 "):
        chosen(workloads_from({"set": "fp8"}), "T5*,d")


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("full", Full()),
        (" causal", Causal()),
        ("window:1023", SlidingWindow(1023, 0)),
        ("window:7:3", SlidingWindow(7, 3)),
        ("prefix:4", PrefixLM(4)),
        ("chunked:8", ChunkedCausal(8)),
        ("documents:3:5", Documents([0, 3, 8], inner=Causal())),
    ],
)
def test_masks_from_text(text, mask):
    assert mask_from(text) == mask


@pytest.mark.parametrize("text", ["", "window", "window:-1", "window:1:2:3", "full:3", "prefix:x", "documents", "diagonal:4"])
def test_bad_masks_from_text(text):
    with pytest.raises(ValueError, match=r"^mask is .*; it must be full, causal, window:LEFT"):
        mask_from(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seqlen": "0"}, "seqlen is '0'; each item of its comma-separated list must be a positive number, or two as in 8x2"),
        ({"seqlen": "1x2x3"}, "seqlen is '1x2x3'"),
        ({"heads": "8/2,a"}, "heads is 'a'"),
        ({"heads": "5/2"}, "heads_q is 5 and heads_k is 2"),
        ({"dtype": "int8"}, "dtype is 'int8'; each item of its comma-separated list must be one of fp64, fp32, bf16, fp16"),
        ({"direction": "up"}, "direction is 'up'"),
        ({"causal": "yes"}, "causal is 'yes'; each item of its comma-separated list must be 0 or 1"),
        ({"causal": "1", "mask": "full"}, "causal and mask both choose the mask"),
        ({"set": "papers", "heads": "8"}, "set fixes the sizes, so heads cannot be given with it"),
        ({"set": "mine"}, "set is 'mine'; each item of its comma-separated list must be one of papers, ladder, cpu, masks, gpu-shapes"),
        ({"sequence": "8"}, "sequence: no such option; there are batch, seqlen"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError) as error:
        workloads_from(options)
    assert message in str(error.value)
