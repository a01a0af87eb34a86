"""What the kernel that appends covers, and by what it is found again."""

from dataclasses import replace

import pytest
import torch
from append_problems import AppendCase, made

from tilewise.backends.hopper.decode import append_call
from tilewise.sm90 import jit, prebuilt

CALL = made(AppendCase(lengths=(5, 9), rotary=32, page=16))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"k": CALL.k.float()}, "it writes bf16, fp16 and 8 bits, k and v of one size, as they are"),
        ({"v_cache": CALL.v_cache.half()}, "it writes bf16, fp16 and 8 bits, k and v of one size, as they are"),
        ({name: getattr(CALL, name).to(torch.int8) for name in ("k", "v", "k_cache", "v_cache")}, "it rotates nothing of 8 bits"),
        ({"v": CALL.v[..., :60]}, "it takes head_dim and head_dim_v that are multiples of 8, not 64 and 60"),
        (
            {"rotary_sin": CALL.rotary_sin.double()},
            "it takes rotary tables of one dtype, bf16, fp16 or fp32, not torch.float32 and torch.float64",
        ),
        ({"k": CALL.k[:, :0]}, "there is nothing to write, nowhere to write it, or nothing in a rotary table"),
        (
            {name: getattr(CALL, name)[:0] for name in ("rotary_cos", "rotary_sin")},
            "there is nothing to write, nowhere to write it, or nothing in a rotary table",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_what_it_does_not_cover(changes, sentence):
    call = replace(CALL, **changes)
    assert append_call.why_not(call) == [sentence]
    assert append_call.bound(call) is None


def test_without_a_compiler_only_prebuilt_kernels_do(monkeypatch):
    monkeypatch.setattr(jit, "why_no_compiler", lambda: ["cutlass is not installed"])
    monkeypatch.setattr(prebuilt, "entry", lambda launch, config, arch: config.rotary is None)
    assert not append_call.why_not(replace(CALL, rotary_cos=None, rotary_sin=None))
    (broadcast,) = append_call.why_not(CALL)
    assert broadcast.startswith("there is no kernel at hand for hopper.decode.append")


def test_a_kernel_is_found_again_by_what_it_depends_on():
    same = replace(CALL, k=CALL.k.clone(), page_table=CALL.page_table[:, :1], rotary_cos=CALL.rotary_cos[:9])
    assert append_call._key(same) == append_call._key(CALL) and append_call.config_of(same) == append_call.config_of(CALL)
    for changes in ({"page_table": CALL.page_table.long()}, {"interleaved": True}, {"rotary_first": CALL.cache_seqlens}):
        other = replace(CALL, **changes)
        assert append_call._key(other) != append_call._key(CALL) and append_call.config_of(other) != append_call.config_of(CALL)
