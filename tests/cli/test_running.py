"""`tilewise run`: a program and its children are served without an edit; without torch nothing happens; failures do not reach the program."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tilewise.cli import grammar, running
from tilewise.compat import everywhere

SOURCES = Path(running.__file__).parents[2]


def ran(code: str, *arguments: str, path: str = "", **environment: str) -> subprocess.CompletedProcess:
    """The code in a Python below `tilewise run`."""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCES), path))), **environment}
    given.pop(everywhere.SAID, None)
    command = [sys.executable, "-m", "tilewise", "run", *arguments, "--", sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, env=given, check=False)


def test_a_program_and_its_children():
    done = ran("""
        import subprocess, sys
        import torch
        from torch.nn.functional import scaled_dot_product_attention
        import flash_attn, flash_attn_interface
        print(scaled_dot_product_attention.__module__, flash_attn.__version__)
        x = torch.randn(1, 2, 9, 8)
        want = (x @ x.mT * 8**-0.5).softmax(-1) @ x
        assert torch.allclose(scaled_dot_product_attention(x, x, x), want, atol=1e-5)
        child = "import torch; print(torch.nn.functional.scaled_dot_product_attention.__module__)"
        sys.exit(subprocess.run([sys.executable, "-c", child]).returncode + 7)
    """)
    assert done.returncode == 7, done.stderr
    assert sorted(done.stdout.split()) == ["2.8.4+tilewise", "tilewise.compat.sdpa", "tilewise.compat.sdpa"]
    said = [line for line in done.stderr.splitlines() if line.startswith("tilewise run:")]
    assert said == [
        "tilewise run: attention by torch.nn.functional.scaled_dot_product_attention, flash_attn, flash_attn_3 is tilewise's, and in "
        'transformers and diffusers by the name "tilewise"'
    ], "once in a tree of processes"


def test_a_program_that_asks_for_tilewise_first():
    done = ran("import tilewise, torch; print(torch.nn.functional.scaled_dot_product_attention.__module__)")
    assert done.stdout.strip() == "tilewise.compat.sdpa", done.stderr


def test_a_program_without_torch_is_left_alone(tmp_path):
    """And the sitecustomize that ours hides is run."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.theirs = 1\n")
    code = """
        import importlib.util, sys
        spec = importlib.util.find_spec("torch")
        assert "torch" not in sys.modules and "tilewise" not in sys.modules and spec.origin.endswith("__init__.py")
        print(sys.theirs, sys.argv)
    """
    done = ran(code, path=str(tmp_path))
    assert done.returncode == 0 and done.stdout.strip() == "1 ['-c']" and not done.stderr, done.stderr


def test_threads_and_a_real_package(tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("real = True\n")
    code = "import os, torch, flash_attn; print(os.environ['OMP_NUM_THREADS'], flash_attn.real, torch.__loader__.__class__.__name__)"
    done = ran(code, "--threads", "1", path=str(tmp_path))
    assert done.stdout.split() == ["1", "True", "SourceFileLoader"], done.stderr
    assert "real packages are left as they are: flash_attn\n" in done.stderr


@pytest.mark.slow
def test_transformers_and_diffusers():
    if not all(map(importlib.util.find_spec, ("transformers", "diffusers"))):
        pytest.skip("transformers or diffusers is not installed")
    done = ran("""
        from diffusers.models.attention_dispatch import AttentionBackendName
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
        print(AttentionBackendName("tilewise").value, AttentionInterface()["tilewise"].__module__)
    """)
    assert done.stdout.split() == ["tilewise", "tilewise.compat.transformers"], done.stderr


def test_what_fails_leaves_the_program_as_it_is():
    done = ran("""
        import sys
        sys.modules["tilewise.compat.everywhere"] = None
        import torch
        print(torch.nn.functional.scaled_dot_product_attention.__module__)
    """)
    assert done.returncode == 0 and done.stdout.strip() == "torch._C._nn", done.stderr
    assert "tilewise run: torch is not served: " in done.stderr


def test_wrong_usage(capsys):
    assert grammar.main(["run"]) == grammar.main(["run", "--"]) == 2
    assert "give a program after --, as in: tilewise run -- python train.py" in capsys.readouterr().err
    assert grammar.main(["run", "--", "no-such-program-anywhere"]) == 3
    assert "tilewise run: no-such-program-anywhere: No such file or directory" in capsys.readouterr().err
