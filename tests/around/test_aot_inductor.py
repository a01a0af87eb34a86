"""torch.export, then AOTInductor: a package gives what the eager call gives, with tensors in the mask and without."""

import pytest
import torch
from surroundings import FUNCTIONS, check_close
from torch import nn

import tilewise
from tilewise.runtime import append_operator, decode_operator, operator

NAMES = ("attention", "attention, every operand", "attention_varlen", "attention, padding", "decode", "decode, every operand", "append")


class Module(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, tensors):
        return tuple(x * 1 for x in self.call(**tensors))  # a copy of what is written in place


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_packages_give_what_the_call_gives(name, tmp_path):
    function = FUNCTIONS[name]
    module = Module(function.call)
    with torch.no_grad():
        program = torch.export.export(module, (function.make(),))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        check_close(torch._inductor.aoti_load_package(path)(function.make()), module(function.make()))


@pytest.mark.parametrize("module", [operator, decode_operator, append_operator], ids=lambda module: module.__name__)
def test_no_operator_takes_an_empty_list(module):
    """It reaches a package's operators as None: a list is one that may be absent."""
    assert "Tensor[] " not in module.SCHEMA


def test_a_mask_without_tensors_has_none():
    q = torch.zeros(1, 2, 1, 8)
    program = torch.export.export(Module(lambda q: (tilewise.attention(q, q, q, causal=True),)), ({"q": q},))
    calls = [node for node in program.graph.nodes if node.target == torch.ops.tilewise.attention_forward.default]
    assert len(calls) == 1 and [] not in calls[0].args and calls[0].args[operator.TENSORS] is None
