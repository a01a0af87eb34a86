"""Every contender that runs on a CPU computes the same attention; the others say why they cannot."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench.gate import verify
from tilewise.bench.peers import Flex, Naive, Sdpa, Tilewise, contender, find, flex, known
from tilewise.bench.peers.flex import compiler, mask_mod_of
from tilewise.bench.sets import Workload
from tilewise.masks import Causal, Documents, Full, PerHead, PrefixLM, PrefixTree, SlidingWindow

CPU = torch.device("cpu")
SMALL = Workload(name="small", batch=2, seqlen_q=33, heads_q=4, heads_k=2, head_dim=16)
TREE = PrefixTree([-1, 0, 1, 1, 0, -1], [5, 7, 6, 0, 9, 6])
BREADTH_FIRST = PrefixTree([-1, 0, 0, 1, 2, 1], [5, 7, 6, 4, 5, 6])
MASKS = [Full(), Causal(), SlidingWindow(5, 2), PrefixLM(3), Documents([0, 10, 33], inner=Causal())]


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    "impl", [Tilewise(), Tilewise("reference"), Sdpa(), Sdpa("flash"), Sdpa("math"), Naive()], ids=lambda impl: impl.name
)
def test_contenders_pass_the_gate(impl, mask, direction):
    workload = replace(SMALL, mask=mask, direction=direction)
    assert impl.why_not(workload, CPU) == []
    assert verify(impl.prepare(workload, CPU), workload, 0, CPU) < 1e-5


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("mask", [Documents([0, 5, 11], inner=Causal()), PerHead({(0, 2): Full(), (2, 4): Documents([0, 11])})], ids=str)
def test_the_formula_gives_zero_where_a_row_sees_nothing(mask, direction):
    workload = replace(SMALL, mask=mask, direction=direction)
    assert verify(Naive().prepare(workload, CPU), workload, 0, CPU) < 1e-5


@pytest.mark.parametrize("impl", [Tilewise(), Sdpa(), Naive()], ids=lambda impl: impl.name)
def test_bottom_right_causal_with_more_keys_than_queries(impl):
    workload = replace(SMALL, seqlen_k=50, mask=Causal())
    assert verify(impl.prepare(workload, CPU), workload, 0, CPU) < 1e-5


def test_sdpa_uses_its_own_causal_flag_where_it_means_the_same():
    assert Sdpa()._mask(replace(SMALL, mask=Causal()), CPU) == {"is_causal": True}
    dense = Sdpa()._mask(replace(SMALL, seqlen_k=50, mask=Causal()), CPU)["attn_mask"]
    assert dense[0, :18].all() and not dense[0, 18:].any()
    assert Sdpa()._mask(SMALL, CPU) == {}


def test_why_not_on_a_cpu():
    assert Sdpa("cudnn").why_not(SMALL, CPU) == ["torch has no cudnn kernel on a CPU"]
    fa3 = known()["fa3"].why_not(replace(SMALL, mask=PrefixLM(3)), CPU)
    assert fa3[0] == "fa3 runs on CUDA devices only"
    assert "fa3 takes fp16 and bf16 only" in fa3
    assert fa3[-1] == "only full, causal and window masks and packed documents can be expressed in its arguments"
    assert "no backward on a CPU" in Flex().why_not(replace(SMALL, direction="bwd"), CPU)[0]
    assert "mask_mod" in Flex().why_not(replace(SMALL, mask=PrefixLM(3)), CPU)[-1]


def test_torchs_flash_kernel_takes_no_masks_on_a_gpu():
    flash, gpu = Sdpa("flash"), torch.device("cuda")
    assert flash.why_not(SMALL, gpu) == flash.why_not(replace(SMALL, mask=Causal()), gpu) == []
    for other in ({"mask": SlidingWindow(5, 0)}, {"mask": Causal(), "seqlen_k": 50}):
        assert flash.why_not(replace(SMALL, **other), gpu) == ["its flash kernel takes no mask but its own causal one"]
        assert Sdpa("efficient").why_not(replace(SMALL, **other), gpu) == []


def test_flex_without_a_compiler(monkeypatch):
    monkeypatch.setattr(flex.shutil, "which", lambda name: None)
    assert Flex().why_not(SMALL, CPU) == ["torch.compile needs a C++ compiler, and neither $CXX nor g++ nor clang++ is here"]


def test_flex_by_flash_attention_4(monkeypatch):
    peer, half, gpu = known()["flex:flash"], replace(SMALL, dtype=torch.bfloat16, mask=TREE), torch.device("cuda")
    monkeypatch.setattr(contender, "installed", lambda module: module == "flash_attn.cute")
    monkeypatch.setattr(flex, "mask_mod_of", lambda workload, device: "a function")
    assert peer.why_not(half, gpu) == []
    assert peer.why_not(SMALL, gpu) == ["flex:flash takes fp16 and bf16 only"]
    wanting = replace(half, bias="hqk", bias_grad=True)
    assert peer.why_not(wanting, CPU)[1] == "flex:flash has no gradient of what a score_mod reads"
    monkeypatch.setattr(contender, "installed", lambda module: False)
    assert peer.why_not(half, gpu) == ["flash_attn.cute is not installed"]
    assert peer.why_not(half, CPU)[0] == "flex:flash runs on CUDA devices only"


def test_flex_is_asked_for_the_kernels_that_are_named(monkeypatch):
    asked = []

    def compiled(*args, **options):
        asked.append(options.get("kernel_options"))
        return args[0]

    monkeypatch.setattr(flex.torch, "compile", lambda function, **how: compiled)
    for kernels in (None, "FLASH"):
        Flex(kernels).prepare(SMALL, CPU)(*SMALL.inputs(0)[:3])
    assert asked == [None, {"BACKEND": "FLASH"}]


MODS = [Causal(), SlidingWindow(5, 2), SlidingWindow(None, 0), Documents([0, 4, 12]), MASKS[-1], TREE, BREADTH_FIRST]


@pytest.mark.parametrize("mask", MODS, ids=str)
def test_mask_mods_say_what_the_masks_say(mask):
    lengths = (33, 33) if isinstance(mask, Documents | PrefixTree) else (20, 33)
    workload = replace(SMALL, seqlen_q=lengths[0], seqlen_k=lengths[1], mask=mask)
    mod = mask_mod_of(workload, CPU)
    visible = mod(None, None, torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None])
    assert torch.equal(visible, mask.dense(*lengths))


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="torch.compile needs a C++ compiler")
def test_flex_passes_the_gate():
    for mask in (Full(), Causal(), SlidingWindow(40, 0)):
        workload = replace(SMALL, seqlen_q=160, seqlen_k=160, mask=mask)
        assert verify(Flex().prepare(workload, CPU), workload, 0, CPU) < 1e-5


def test_the_whole_score_matrix_is_refused_where_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(contender, "available_bytes", lambda device: 8 << 30)
    long = replace(SMALL, batch=1, seqlen_q=65536, seqlen_k=65536, mask=Causal())
    assert Naive().why_not(long, CPU) == ["it keeps 3 score matrices, 206.2 GB here, and half of the free memory is 4.3 GB"]
    assert Sdpa("math").why_not(long, CPU) and Tilewise("reference").why_not(long, CPU)
    assert Tilewise().why_not(long, CPU) == [] and Sdpa().why_not(long, CPU) == []
    monkeypatch.setattr(contender, "available_bytes", lambda device: None)
    assert Naive().why_not(long, CPU) == []


def test_modules_that_are_not_there():
    assert not contender.installed("no_such_package.cute") and not contender.installed("no_such_package")


def test_contenders_by_name():
    assert [impl.name for impl in find("tilewise, sdpa:math,naive")] == ["tilewise", "sdpa:math", "naive"]
    assert {"tilewise", "tilewise:tiled", "tilewise:reference", "sdpa", "sdpa:flash", "flex", "naive", "fa2", "fa3", "fa4"} <= set(known())
    with pytest.raises(ValueError, match="impl is 'sdap'; it must be among tilewise, tilewise:"):
        find("tilewise,sdap")
