"""lab/instruments/variants.py without a GPU: what a variant is, that the backward pass takes it, and what is compiled ahead."""

import argparse
import dataclasses
import importlib
from pathlib import Path

import pytest
import torch

from tilewise.backends.hopper import warmup
from tilewise.backends.hopper.backward import call as gradients
from tilewise.backends.hopper.backward import plan
from tilewise.backends.hopper.backward.config import configure
from tilewise.bench.sets.named import gpu_shapes, paper_sweep
from tilewise.bench.sets.trees import trees
from tilewise.masks import Full

GPU = plan.Gpu(132, 0)


@pytest.fixture
def variants(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "lab/instruments")
    return importlib.import_module("variants")


def of_gradients(variants, text):
    return variants.variant_from(text, variants.fields_of(argparse.Namespace(direction="bwd", precision="")))


def test_a_variant(variants):
    found = of_gradients(variants, "two: stages=4, pairwise=False, heads_interleaved=6")
    assert found == ("two", {"stages": 4, "pairwise": False}, {"heads_interleaved": 6})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("two", "is not of the form"),
        ("two:", "is not of the form"),
        ("two: stagse=4", "'stagse' is no choice of the Config"),
        ("two: stages=four", "stages is 'four', which is no value"),
    ],
)
def test_what_is_no_variant(variants, text, said):
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        of_gradients(variants, text)


def test_an_order_takes_its_place(variants):
    """And leaves it again. 64 heads of 128 at 4,096, of which 8 descend: 56 ascend, or 48 where 12 take turns."""
    given = configure(torch.bfloat16, 128, 128, "causal", 4096), 4, 4096, 16, 4096, 16, GPU, False
    shipped = plan._order(*given)
    assert shipped[:4] == (132, 56, 4, 8)
    with variants.in_place(of_gradients(variants, "turns: heads_per_step=12")):
        assert plan._order(*given) == (132, 48, 12, 16, shipped[4], 198 + 12 * 32)
    with variants.in_place(of_gradients(variants, "down: heads_interleaved=16")):
        assert plan._order(*given) == (132, 48, 4, 16, *shipped[4:])
    with variants.in_place(of_gradients(variants, "all: ascending=0, heads_interleaved=4, heads_per_step=1")):
        assert plan._order(*given) == (132, 0, 1, 4, shipped[4], 198 + 32)
    assert plan._order(*given) == shipped
    documents = configure(torch.bfloat16, 128, 128, "varlen"), 1, 4096, 32, 4096, 8, GPU, False
    assert plan._order(*documents)[1:4] == (plan.NONE_ASCENDS, 1, 8)
    with variants.in_place(of_gradients(variants, "four: heads_interleaved=4")):
        assert plan._order(*documents)[1:4] == (plan.NONE_ASCENDS, 1, 4)


def test_a_call_that_is_bound_each_time_has_its_order(variants):
    (workload,) = [each for each in trees(direction="bwd") if each.name == "tree-4k-16x1k-unshared"]
    given = configure(torch.bfloat16, 128, 128, "varlen"), 1, 4096, 32, 4096, 8, GPU, False
    variant = of_gradients(variants, "four: heads_interleaved=4")
    assert variants.as_bound(variant, lambda: plan._order(*given), workload, "")()[3] == 4 and plan._order(*given)[3] == 8


@pytest.mark.parametrize("order", ["heads_per_step=3", "heads_per_step=0", "heads_interleaved=65", "heads_interleaved=0"])
def test_an_order_that_would_leave_heads_out(variants, order):
    given = configure(torch.bfloat16, 128, 128, "varlen"), 1, 4096, 64, 4096, 64, GPU, False
    with variants.in_place(of_gradients(variants, f"wrong: {order}")), pytest.raises(ValueError, match="wrong: of 64 heads"):
        plan._order(*given)


def test_kernels_are_compiled_ahead(variants, monkeypatch):
    """Those of what ships and of the variant, each once; one that cannot be compiled ends it, by name."""
    asked = []

    def warm(kernels):
        asked.extend(kernels)
        return [warmup.Outcome(asked[-1], "failed", 0.1, reason="no such thing")]

    monkeypatch.setattr(warmup, "warm", warm)
    workloads = [paper_sweep(direction="bwd")[20], gpu_shapes(direction="bwd")[0]]
    with pytest.raises(SystemExit, match="no such thing"):
        variants.compile_ahead(
            variants.kernels_of(workloads, [variants.Variant("base", {}, {}), of_gradients(variants, "one: pairwise=False")])
        )
    backward = [kernel.config for kernel in asked if kernel.launch == gradients.LAUNCH]
    assert len(asked) == len(set(asked)) and sorted(each.whole.pairwise for each in backward) == [False, False, True, True]


@pytest.mark.parametrize(("precision", "text"), [("", "long: from_zero=False"), ("fp8", "one: cluster=1")])
def test_a_variant_of_the_forward_pass(variants, precision, text):
    variant = variants.variant_from(text, variants.fields_of(argparse.Namespace(direction="fwd", precision=precision)))
    (workload,) = [each for each in paper_sweep(direction="fwd") if each.head_dim == 128 and each.seqlen_q == 4096 and each.mask == Full()]
    base, other = (
        {kernel.config for kernel in variants.kernels_of([workload], [each], precision) if hasattr(kernel.config, "tile_m")}
        for each in (variants.Variant("base", {}, {}), variant)
    )
    assert len(base) == len(other) == 1 and other == {dataclasses.replace(*base, **variant.config)} != base


def test_a_line(variants):
    row = {
        "workload": "w",
        "results": {"base": {"ms": 2.0}, "one": {"ms": 1.5}, "fa4": {"ms": 2.5}},
        "same": {"base": True, "one": False},
        "bits_of_base": {"base": True, "one": False},
    }
    times = "w: base 2.0000 (1.0000)  one 1.5000 (0.7500)  fa4 2.5000 (1.2500)"
    assert variants.line(row) == f"{times}; OTHER RESULTS: one; other bits: one"
    assert variants.line(row | {"same": {"base": True, "one": True}}) == f"{times}; other bits: one"
    assert variants.line(row | {name: {"base": True, "one": True} for name in ("same", "bits_of_base")}) == times
