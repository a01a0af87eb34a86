"""Compiled functions give what eager ones give, in every surrounding: other default dtypes and devices, without autograd."""

import pytest
import torch
from surroundings import FUNCTIONS, check_close, check_equal, of, plain
from test_defaults import DEVICES, MODES, default_dtype

FAST = (
    "attention",
    "attention, every operand",
    "attention_varlen, every operand",
    "attention, padding",
    "decode, every operand",
)  # the others take the same ways
# How many results Inductor leaves as they are: it fuses what torch adds up, merged parts and the gradients of a bias of one key and of several sinks.
EXACT = {"merge": 0, "attention, padding": 5, "attention, every operand": 6, "attention, tiled": 6}
DRAWN = "attention, seed drawn"  # from the compiled program's generator


NAMES = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in FUNCTIONS if name != DRAWN]
SURROUNDINGS = (
    ("grad", torch.float32, "cpu"),
    ("grad", torch.bfloat16, "meta"),
    ("no_grad", torch.float64, "cpu"),
    ("inference_mode", torch.float16, "meta"),
)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_the_eager_call(name):
    function = FUNCTIONS[name]
    for mode, dtype, device in SURROUNDINGS:
        torch._dynamo.reset()
        grad = mode == "grad"
        want = plain(name, grad)
        compiled = function._replace(call=torch.compile(function.call, backend="aot_eager", fullgraph=True))
        with default_dtype(dtype), DEVICES[device](), MODES[mode]():
            for _ in range(2):
                check_equal([x.clone() for x in of(compiled, function.make(), grad)], want)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_inductor(name):
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    compiled = function._replace(call=torch.compile(function.call, fullgraph=True))
    for _ in range(2):
        found, want, exact = of(compiled, function.make()), plain(name), EXACT.get(name)
        check_equal(found[:exact], want[:exact])
        check_close(found[exact:], want[exact:])
