"""torch.export, then AOTInductor: a package gives what the eager call gives, with tensors in the mask and without."""

import pytest
import torch
from surroundings import FUNCTIONS, check_close
from torch import nn

import tilewise

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


def test_no_list_of_a_graph_is_empty():
    """A package would hand it to its operator as None."""
    q = torch.zeros(1, 2, 1, 8)
    calls = lambda q: (tilewise.attention(q, q, q, causal=True), tilewise.decode(q, q, q))  # noqa: E731
    program = torch.export.export(Module(calls), ({"q": q},))
    nodes = [node for node in program.graph.nodes if "tilewise" in str(node.target)]
    assert [str(node.target) for node in nodes] == ["tilewise.attention_forward.default", "tilewise.decode.default"]
    assert all([] not in node.args for node in nodes)
