"""Nobody is handed a list of thirty things: launches take at most ten parameters, other functions twelve; drop-ins take what their peers take."""

import ast
import json
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "tilewise"
LAUNCH, OTHERS = 10, 12
PUBLIC = {
    ("api.py", "attention"),
    ("varlen.py", "attention_varlen"),
    ("decoding.py", "decode"),
    ("decoding.py", "append"),
    ("distributed/context.py", "attention"),
    ("distributed/decoding.py", "decode"),
}
OPERATORS = ("_scaled_dot_product_flash_attention_backward", "_flash_attention_forward", "_flash_attention_backward")
PUBLIC |= {("compat/torch_flash.py", name) for name in OPERATORS}  # whose signatures are torch's

SIGNATURES = json.loads((Path(__file__).parents[1] / "compat" / "signatures.json").read_text())
KERNELS = "backends/triton/kernels/"  # Triton's, which take tensors, strides and constants one by one
DROP_INS = {(f"compat/{module}.py", name) for module, names in SIGNATURES.items() for name in names}


@cache
def functions() -> list[tuple[str, str, int]]:
    """(file, function, parameters)."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                found.append((str(path.relative_to(SOURCE)), node.name, count))
    return found


def test_parameters():
    wrong = {
        (path, name): count
        for path, name, count in functions()
        if (path, name) not in PUBLIC | DROP_INS
        and not path.startswith(KERNELS)
        and count > (LAUNCH if name.startswith("launch") else OTHERS)
    }
    assert not wrong


def test_launches_are_seen():
    found = functions()
    assert sum(name == "launch" for _, name, _ in found) >= 10 and {(path, name) for path, name, _ in found} >= PUBLIC
