"""The command line, in this process, with small settings: what it prints, what it writes, and what it returns."""

import json
import subprocess
import sys

import pytest

from tilewise import checks, cli, dispatch
from tilewise.backends.reference import Reference
from tilewise.demo import job, pictures, sweep
from tilewise.errors import UnsupportedError

TINY = ["--steps", "2", "--seqlens", "64,128", "--batch", "1", "--context", "64"]


def test_help_of_every_command_has_examples_and_exit_codes(capsys):
    assert cli.main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"tilewise {name}" in overview
        assert cli.main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"examples:\n  tilewise {name}" in text and "exit codes:\n  0 " in text and "130  interrupted" in text


@pytest.mark.parametrize("line", [line for text in cli.EXAMPLES.values() for line in text.splitlines()])
def test_every_example_parses(line):
    command = line.split("  ")[1] if "(" not in line else "tilewise explain --mask Causal()&SlidingWindow(255,None)|FirstKeys(4)"
    options = cli.parser().parse_args(command.split()[1:])
    assert options.command == command.split()[1]


def test_defaults_of_the_demo_are_those_of_the_job():
    options = vars(cli.parser().parse_args(["demo"]))
    assert {name: options[name] for name in vars(job.Options())} == vars(job.Options())


@pytest.mark.parametrize(
    "argv",
    [[], ["paint"], ["demo", "--steps", "0"], ["demo", "--seqlens", "64,x"], ["demo", "--budget", "nan"], ["check", "--device", "toaster"]],
)
def test_wrong_usage_is_2(argv, capsys):
    assert cli.main(argv) == 2
    assert "usage: tilewise" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "sentence"),
    [
        (["check", "--case", "no such case"], 2, "tilewise check: --case 'no such case' is in no check's name"),
        (["check", "--backend", "abacus"], 2, "tilewise check: backend must be one of 'tiled', 'reference' or None, got 'abacus'"),
        (["check", "--device", "meta"], 3, "tilewise check: there is no device meta here"),
        (["bench", "--mask", "window"], 2, "tilewise bench: mask is 'window'"),
        (["bench", "--impl", "abacus"], 2, "tilewise bench: impl is 'abacus'"),
        (["explain", "--seqlen", "64,128"], 2, "tilewise explain: explain describes one call"),
        (["explain", "--mask", "Cauchy()"], 2, "tilewise explain: "),
        (["report", "missing.jsonl"], 3, "tilewise report: missing.jsonl: No such file or directory"),
        (["demo", *TINY[:-1], "99999999"], 2, "tilewise demo: context is 99999999, but the text holds"),
    ],
)
def test_errors_are_one_sentence(argv, code, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == code
    said = capsys.readouterr().err
    assert said.startswith(sentence) and said.count("\n") == 1


def test_traceback_on_demand():
    with pytest.raises(ValueError, match="is in no check's name"):
        cli.main(["check", "--case", "no such case", "--traceback"])


def test_interruption_is_130(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "run", interrupt)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_unexpected_errors_point_to_traceback(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("the sky fell\nin many lines")

    monkeypatch.setattr(job, "run", fail)
    assert cli.main(["demo"]) == 3
    assert capsys.readouterr().err == "tilewise demo: the sky fell (run it with --traceback to see where)\n"


def test_demo_writes_its_page_and_says_what_ran(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "TIMING_BUDGET_S", 0.01)
    page = tmp_path / "new folder" / "report.html"
    assert cli.main(["demo", *TINY, "--out", str(page)]) == 0
    out = capsys.readouterr().out
    assert "The two trainings agree: at each of 2 steps" in out and "backend: " in out and "report.html" in out
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.count("<svg") == 9 + len(pictures.MASKS)


def test_demo_that_disagrees_is_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "TIMING_BUDGET_S", 0.01)
    ours = job.ATTENTIONS["tilewise"]
    monkeypatch.setitem(job.ATTENTIONS, "tilewise", lambda q, k, v: 1.5 * ours(q, k, v))
    assert cli.main(["demo", *TINY, "--out", str(tmp_path / "report.html")]) == 1
    assert "DISAGREE" in capsys.readouterr().out


def test_check_passes_and_lists(capsys):
    assert cli.main(["check", "--case", "closed form: key order", "--backend", "reference"]) == 0
    assert "reference" in capsys.readouterr().out
    assert cli.main(["check", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) > 100 and "closed form: ones give ones" in names and any("causal-bf16" in name for name in names)


class Wrong:
    """The reference, off by half."""

    name = "wrong"

    def __init__(self):
        self.right = Reference()

    def why_not(self, problem):
        return []

    def forward(self, call):
        o, lse = self.right.forward(call)
        return 1.5 * o, lse

    def backward(self, *args, **kwargs):
        return self.right.backward(*args, **kwargs)


class Refusing(Wrong):
    """Takes nothing."""

    name = "refusing"

    def why_not(self, problem):
        return ["it takes nothing"]


class Crashing(Wrong):
    """Fails in its own way."""

    name = "crashing"

    def forward(self, call):
        raise IndexError("out of the blue")


def test_checks_find_what_is_wrong_and_name_what_is_skipped():
    form = "closed form: ones give ones"
    wrong, refusing, crashing = (outcome for outcome in checks.run(checks.plan([Wrong(), Refusing(), Crashing()], contains=form)))
    assert (wrong.state, refusing.state, crashing.state) == ("failed", "skipped", "failed")
    assert wrong.reason.startswith("o[") and "it takes nothing" in refusing.reason and crashing.reason == "IndexError: out of the blue"


@pytest.mark.parametrize(("backend", "code", "said"), [(Wrong, 1, "failed: wrong, closed form"), (Refusing, 3, "skipped 8: ")])
def test_check_exit_codes(backend, code, said, monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "backends", lambda: (backend(),))
    assert cli.main(["check", "--case", "closed form"]) == code
    assert said in capsys.readouterr().out


def test_bench_writes_rows_that_report_turns_into_tables_plots_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--seqlen", "32,64", "--heads", "2/1", "--head-dim", "16", "--mask", "causal", "--budget", "0.01"]
    assert cli.main(["bench", *sizes, "--impl", "tilewise,sdpa", "--out", "results/rows.jsonl"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "results" / "rows.jsonl").read_text().splitlines()]
    assert {(row["impl"], row["case"]["seqlen_q"], row["passed"]) for row in rows} == {
        (impl, seqlen, True) for impl in ("tilewise", "sdpa") for seqlen in (32, 64)
    }
    document = tmp_path / "document.md"
    document.write_text("<!-- tilewise:begin time -->\n<!-- tilewise:end time -->\n")
    assert cli.main(["report", "results/rows.jsonl", "--docs", str(document), "--plots", "plots"]) == 0
    assert "| time (ms, median) | tilewise | sdpa |" in document.read_text()
    assert (tmp_path / "plots" / "time.svg").read_text().count("<svg") == 1
    assert cli.main(["report", "results/rows.jsonl", "--html", "page.html"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 4 and "tilewise" in page and "<script" not in page
    capsys.readouterr()


def test_bench_lists_its_contenders(capsys):
    assert cli.main(["bench", "--list"]) == 0
    assert {"tilewise", "sdpa", "naive"} <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize("mask", ["causal", "window:15", "documents:20:44", "Causal()&SlidingWindow(15,None)|FirstKeys(4)"])
def test_explain_names_the_backend(mask, capsys):
    assert cli.main(["explain", "--seqlen", "64", "--heads", "4/2", "--dtype", "bf16", "--mask", mask, "--grad"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("backend: ") and "visible pairs: " in out


def test_doctor_reports_packages_and_backends(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "tiled" in out and "nvidia-cutlass-dsl" in out
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] and found["packages"]["numpy"]
    assert {"name": "tiled", "device": "cpu", "reasons": []} in found["backends"]


def test_doctor_without_a_usable_backend_is_3(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "backends", lambda: (Refusing(),))
    assert cli.main(["doctor"]) == 3
    assert "it takes nothing" in capsys.readouterr().out


def test_a_missing_package_is_named(monkeypatch, capsys):
    def missing(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(job, "run", missing)
    assert cli.main(["demo"]) == 3
    assert "the package 'matplotlib' is not installed; install it with: pip install matplotlib" in capsys.readouterr().err


def test_no_backend_is_3(monkeypatch, capsys):
    def unsupported(*args, **kwargs):
        raise UnsupportedError("no backend can run this problem")

    monkeypatch.setattr(job, "run", unsupported)
    assert cli.main(["demo"]) == 3
    assert capsys.readouterr().err == "tilewise demo: no backend can run this problem\n"


def test_module_runs_and_importing_the_command_line_is_light():
    done = subprocess.run([sys.executable, "-m", "tilewise", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tilewise ")
    probe = "import sys, tilewise.cli; print([name for name in ('rich', 'matplotlib', 'pydoc_data.topics') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
