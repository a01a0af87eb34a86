"""The command line, in this process, with small settings: what it prints, what it writes, and what it returns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import bench, compat
from tilewise.backends.reference import Reference
from tilewise.cli import grammar
from tilewise.demo import job, pictures, serve, sweep
from tilewise.demo.place import CPU
from tilewise.errors import UnsupportedError
from tilewise.runtime import dispatch
from tilewise.testing import checks
from tilewise.testing.conformance import CLOSED_FORMS

TINY = ["--steps", "2", "--seqlens", "64,128", "--batch", "1", "--context", "64"]


def test_help_of_every_command_has_examples_and_exit_codes(capsys):
    assert grammar.main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in grammar.COMMANDS:
        assert f"tilewise {name}" in overview
        assert grammar.main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"examples:\n  tilewise {name}" in text and "exit codes:\n  0 " in text and "130  interrupted" in text


@pytest.mark.parametrize("line", [line for text in grammar.EXAMPLES.values() for line in text.splitlines()])
def test_every_example_parses(line):
    command = line.split("  ")[1] if "(" not in line else "tilewise explain --mask Causal()&SlidingWindow(255,None)|FirstKeys(4)"
    options = grammar.parser().parse_args(command.split()[1:])
    assert options.command == command.split()[1]


def test_defaults_of_the_demo_are_those_of_the_job():
    given = vars(grammar.parser().parse_args(["demo", "--device", "cpu"]))
    whole = job.options(**{name: given[name] for name in ("device", *vars(job.options())) if name not in ("place", "line")})
    assert whole == job.options(torch.device("cpu"))


@pytest.mark.parametrize(
    "argv",
    [[], ["paint"], ["demo", "--steps", "0"], ["demo", "--seqlens", "64,x"], ["demo", "--budget", "nan"], ["check", "--device", "toaster"]]
    + [["demo", "--device", "toaster"]]
    + [["bench", "--budget", budget] for budget in ("-1", "0", "nan", "inf", "soon")]
    + [["bench", "--part", part] for part in ("0/2", "3/2", "1", "1/", "a/b")]
    + [["doctor", "--threads", number] for number in ("0", "99999", str(8 * os.cpu_count() + 1))],
)
def test_wrong_usage_is_2(argv, capsys):
    assert grammar.main(argv) == 2
    assert "usage: tilewise" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "sentence"),
    [
        (["check", "--case", "no such case"], 2, "tilewise check: --case 'no such case' is in no check's name"),
        (["check", "--backend", "abacus"], 2, "tilewise check: backend must be one of "),
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
    assert grammar.main(argv) == code
    said = capsys.readouterr().err
    assert said.startswith(sentence) and said.count("\n") == 1


def test_too_many_threads_are_refused_in_a_sentence(capsys):
    assert grammar.main(["explain", "--threads", "99999"]) == 2
    cores = os.cpu_count()
    sentence = f"argument --threads: 99999 is too many; this machine's {cores} cores take up to {8 * cores}, 8 for each\n"
    assert capsys.readouterr().err.endswith(sentence)


def test_as_many_threads_as_are_allowed():
    most = str(8 * os.cpu_count())
    done = subprocess.run([sys.executable, "-m", "tilewise", "explain", "--threads", most], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["demo", "bench"])
@pytest.mark.parametrize("out", ["a folder", "a file/report", "/proc/no such place/report"])
def test_where_nothing_can_be_written_is_said_before_the_work(command, out, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a folder").mkdir()
    Path("a file").write_text("kept")
    for module, work in ((job, "run"), (bench, "run")):
        monkeypatch.setattr(module, work, lambda *args, **kwargs: pytest.fail("it worked before it looked"))
    assert grammar.main([command, "--out", out]) == 3
    said = capsys.readouterr().err
    assert said.startswith(f"tilewise {command}: ") and said.count("\n") == 1 and out.split("/report")[0] in said
    assert Path("a file").read_text() == "kept" and not list(Path("a folder").iterdir())


def test_looking_whether_a_file_can_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", interrupt)
    new, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    old.write_text("a row\n")
    assert [grammar.main(["bench", "--out", str(path)]) for path in (new, old)] == [130, 130]
    assert not new.exists() and old.read_text() == "a row\n"


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("argv", [["doctor"], ["doctor", "--json"], ["explain"], ["check", "--list"], ["bench", "--list"]])
def test_output_that_nobody_reads_is_no_failure(argv):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "tilewise", *argv], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_traceback_on_demand():
    with pytest.raises(ValueError, match="is in no check's name"):
        grammar.main(["check", "--case", "no such case", "--traceback"])


def test_interruption_is_130(tmp_path, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "run", interrupt)
    monkeypatch.chdir(tmp_path)
    assert grammar.main(["demo"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_unexpected_errors_point_to_traceback(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("the sky fell\nin many lines")

    monkeypatch.setattr(job, "run", fail)
    assert grammar.main(["demo"]) == 3
    assert capsys.readouterr().err == "tilewise demo: the sky fell (run it with --traceback to see where)\n"


def test_demo_writes_its_page_and_says_what_ran(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "TIMING_BUDGET_S", 0.01)
    page = tmp_path / "new folder" / "report.html"
    assert grammar.main(["demo", *TINY, "--out", str(page)]) == 0
    out = capsys.readouterr().out
    assert "The two trainings agree: at each of 2 steps" in out and "report.html" in out
    q = torch.empty(1, 64, 4, 64, requires_grad=True)
    backend = tilewise.explain(q, *(torch.empty(1, 64, 2, 64) for _ in "kv"), causal=True).backend
    text = page.read_text(encoding="utf-8")
    assert f"backend: {backend}" in out and f"backend: {backend}" in text
    assert text.startswith("<!doctype html>") and text.count("<svg") == 9 + len(pictures.MASKS)
    assert "<pre>tilewise demo --steps 2 --batch 1 --context 64 --seqlens 64,128</pre>" in text
    picture = page.with_name("report-picture.png")
    assert picture.read_bytes().startswith(b"\x89PNG") and f"Picture to share: {picture}" in out
    assert "Ended early" not in text and "What it writes" in text


def test_demo_and_doctor_say_what_a_backend_says_of_itself(monkeypatch, capsys):
    config = job.GPTConfig(context=64)
    chosen = dispatch.named(job.tilewise.explain(*(torch.empty(1, 64, heads, 64) for heads in (4, 2, 2)), causal=True).backend)
    monkeypatch.setattr(type(chosen), "describe", lambda self: "for the [abacus] of 12 rods", raising=False)
    assert f"backend: {chosen.name} (for the [abacus] of 12 rods)\n" in job.explain(config, 1, CPU)
    monkeypatch.setenv("COLUMNS", "160")
    assert grammar.main(["doctor"]) == 0
    assert "for the [abacus] of 12 rods" in capsys.readouterr().out
    monkeypatch.setattr(type(chosen), "describe", lambda self: "")
    assert f"backend: {chosen.name}\n" in job.explain(config, 1, CPU)


def test_demo_serve_says_by_its_exit_code_whether_texts_agree(monkeypatch):
    given = []
    for same in (True, False):
        monkeypatch.setattr(serve, "run", lambda options, console, same=same: (given.append(options), same)[1])
        assert grammar.main(["demo", "--serve", "--device", "cpu", "--seed", "7"]) == (0 if same else 1)
    assert given[0] == serve.ServeOptions(device=torch.device("cpu"), seed=7)


@pytest.mark.slow
def test_demo_that_disagrees_is_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "TIMING_BUDGET_S", 0.01)
    ours = job.ATTENTIONS["tilewise"]
    monkeypatch.setitem(job.ATTENTIONS, "tilewise", lambda q, k, v: 1.5 * ours(q, k, v))
    assert grammar.main(["demo", *TINY, "--out", str(tmp_path / "report.html")]) == 1
    assert "DISAGREE" in capsys.readouterr().out


def test_check_passes_and_lists(capsys):
    assert grammar.main(["check", "--case", "closed form: key order", "--backend", "reference"]) == 0
    assert "reference" in capsys.readouterr().out
    assert grammar.main(["check", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) > 100 and "closed form: ones give ones" in names and any("causal-bf16" in name for name in names)


FORMS = len(CLOSED_FORMS)


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


@pytest.mark.parametrize(("backend", "code", "said"), [(Wrong, 1, "failed: wrong, closed form"), (Refusing, 3, f"skipped {FORMS}: ")])
def test_check_exit_codes(backend, code, said, monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "backends", lambda: (backend(),))
    assert grammar.main(["check", "--case", "closed form"]) == code
    assert said in capsys.readouterr().out


def test_bench_writes_rows_that_report_turns_into_tables_plots_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--seqlen", "32,64", "--heads", "2/1", "--head-dim", "16", "--mask", "causal", "--budget", "0.01"]
    assert grammar.main(["bench", *sizes, "--impl", "tilewise,sdpa", "--out", "results/rows.jsonl"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "results" / "rows.jsonl").read_text().splitlines()]
    assert {(row["impl"], row["case"]["seqlen_q"], row["passed"]) for row in rows} == {
        (impl, seqlen, True) for impl in ("tilewise", "sdpa") for seqlen in (32, 64)
    }
    document = tmp_path / "document.md"
    document.write_text("<!-- tilewise:begin time -->\n<!-- tilewise:end time -->\n")
    assert grammar.main(["report", "results/rows.jsonl", "--docs", str(document), "--plots", "plots"]) == 0
    assert "| time (ms, median) | tilewise | sdpa |" in document.read_text()
    assert (tmp_path / "plots" / "time.svg").read_text().count("<svg") == 1
    assert grammar.main(["report", "results/rows.jsonl", "--html", "page.html"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 4 and "tilewise" in page and "<script" not in page
    capsys.readouterr()


BLIND = ["bench", "--mask", "documents:5:6", "--seqlen", "100", "--budget", "0.01", "--no-memory"]


def test_rows_that_see_nothing_are_right_in_the_formula_too(capsys):
    assert grammar.main([*BLIND, "--impl", "tilewise,naive"]) == 0
    assert "wrong" not in capsys.readouterr().out


@pytest.mark.parametrize(("wrong", "code"), [("naive", 0), ("tilewise", 1), ("tilewise:reference", 1)])
def test_only_results_of_tilewise_decide_how_bench_ends(wrong, code, monkeypatch, capsys):
    spoiled = bench.known()[wrong]
    right = type(spoiled).prepare

    def prepare(self, workload, device):
        attend = right(self, workload, device)
        return (lambda q, k, v: 1.5 * attend(q, k, v)) if self.name == wrong else attend

    monkeypatch.setattr(type(spoiled), "prepare", prepare)
    assert grammar.main([*BLIND, "--impl", "tilewise,tilewise:reference,naive"]) == code
    out = capsys.readouterr().out
    assert out.count(" wrong") == 1 and f"{wrong}: missed the tolerance: o[" in out


def test_bench_lists_its_contenders(capsys):
    assert grammar.main(["bench", "--list"]) == 0
    assert {"tilewise", "sdpa", "naive"} <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize("mask", ["causal", "window:15", "documents:20:44", "Causal()&SlidingWindow(15,None)|FirstKeys(4)"])
def test_explain_names_the_backend(mask, capsys):
    assert grammar.main(["explain", "--seqlen", "64", "--heads", "4/2", "--dtype", "bf16", "--mask", mask, "--grad"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("backend: ") and "visible pairs: " in out


def test_doctor_reports_packages_and_backends(capsys):
    assert grammar.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "nvidia-cutlass-dsl" in out and all(backend.name in out for backend in dispatch.backends())
    assert grammar.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] and found["packages"]["numpy"]
    assert "flash_attn" in out and [each["name"] for each in found["integrations"]] == [each.name for each in compat.status()]
    assert [status["name"] for status in found["backends"] if status["device"] == "cpu"] == [each.name for each in dispatch.backends()]
    assert any(not status["reasons"] and status["description"] == "" for status in found["backends"])


def test_doctor_without_a_usable_backend_is_3(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "backends", lambda: (Refusing(),))
    assert grammar.main(["doctor"]) == 3
    assert "it takes nothing" in capsys.readouterr().out


@pytest.mark.parametrize(("package", "what"), [("matplotlib", '"tilewise[cli]"'), ("triton", "triton")])
def test_a_missing_package_is_named(package, what, monkeypatch, capsys):
    def missing(*args, **kwargs):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(job, "run", missing)
    assert grammar.main(["demo"]) == 3
    assert capsys.readouterr().err == f"tilewise demo: the package {package!r} is not installed; install it with: pip install {what}\n"


def test_a_demo_that_cannot_draw_says_so_before_the_work(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(job, "train", lambda *args, **kwargs: pytest.fail("it worked before it looked"))
    assert grammar.main(["demo", *TINY]) == 3
    assert capsys.readouterr().err == (
        "tilewise demo: the package 'matplotlib' is not installed; install it with: pip install \"tilewise[cli]\"\n"
    )


WITHOUT_PRINTERS = """
import pkgutil, runpy, sys
from importlib import import_module

sys.modules.update(dict.fromkeys(("rich", "matplotlib", "cutlass", "transformers", "diffusers")))  # as if they were not there
import tilewise
from tilewise.cli.grammar import main
from tilewise.errors import UnsupportedError

without = set()
for each in pkgutil.walk_packages(tilewise.__path__, "tilewise."):
    if not each.name.endswith(("__main__", "libtilewise_cpu")):
        try:
            import_module(each.name)
        except ModuleNotFoundError as error:
            without |= {each.name} if error.name.partition(".")[0] in ("rich", "matplotlib") else set()
print(*sorted(without))
print(main(["doctor"]), main(["doctor", "--json"]), main(["explain"]), main(["check", "--list"]), file=sys.stderr)
try:
    tilewise.Causal().show(9, 9, format="svg")
except UnsupportedError as error:
    print(error)
assert "#" in tilewise.Causal().show(9, 9)
runpy.run_module("tilewise.ladder", run_name="__main__")
"""


def test_without_rich_and_matplotlib():
    """All but what prints can be imported, and what prints says what to install."""
    found = subprocess.run([sys.executable, "-c", WITHOUT_PRINTERS], capture_output=True, text=True)
    lines, said = found.stdout.splitlines(), "the package 'rich' is not installed; install it with: pip install \"tilewise[cli]\""
    printing = lines[0].split()
    assert set(printing) - {"tilewise.demo.job", "tilewise.demo.serve", "tilewise.demo.several", "tilewise.display.progress"} == {
        f"tilewise.cli.{name}"
        for name in ("ahead", "commands", "decoding", "kernels", "ladder", "output", "training", "triton_tune", "triton_warmup")
    }
    assert "Backends, for causal attention with gradients" in lines and lines[-1].endswith("or take format='text'")
    assert found.stderr.splitlines() == [f"tilewise check: {said}", "0 0 0 3", f"tilewise.ladder: {said}"] and found.returncode == 1


def test_no_backend_is_3(monkeypatch, capsys):
    def unsupported(*args, **kwargs):
        raise UnsupportedError("no backend can run this problem")

    monkeypatch.setattr(job, "run", unsupported)
    assert grammar.main(["demo"]) == 3
    assert capsys.readouterr().err == "tilewise demo: no backend can run this problem\n"


def test_module_runs_and_importing_the_command_line_is_light():
    probe = "import sys, tilewise.cli; print([name for name in ('rich', 'matplotlib', 'pydoc_data.topics') if name in sys.modules]); "
    run = "import runpy; sys.argv[1:] = ['--version']; runpy.run_module('tilewise', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", probe + run], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[]\ntilewise ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["k1..k8", "--seqlen", "512", "--head-dim", "64", "--causal", "0", "--check"], 3, "there is no device cuda here"),
        (["k9"], 2, "impl is 'k9'; it must be among tilewise, "),
        (["k2..k9"], 2, "a range goes up the ladder, from one of k1, k2, k3_1"),
        (["k1", "--impl", "k2"], 2, "the contenders are named twice"),
        (["sdpa", "--clock", "sundial"], 2, "invalid list of clocks, events or wall value: 'sundial'"),
    ],
)
def test_rungs_on_the_command_line(arguments, code, message, capsys):
    assert grammar.main(["bench", *arguments]) == code
    assert message in capsys.readouterr().err


def test_parts_of_a_benchmark(tmp_path, capsys):
    """Between them, N processes measure every workload once; one that would have none says so."""
    sizes, codes = ["--seqlen", "16,32,48", "--heads", "1", "--head-dim", "8", "--mask", "causal"], []
    for part in range(1, 6):
        out = tmp_path / f"{part}.jsonl"
        codes.append(grammar.main(["bench", "naive", *sizes, "--check", "--part", f"{part}/5", "--out", str(out)]))
    found = [json.loads(line)["case"]["seqlen_q"] for path in sorted(tmp_path.glob("*.jsonl")) for line in path.read_text().splitlines()]
    assert codes == [0, 0, 0, 2, 2] and found == [16, 32, 48]
    assert "part is 4/5, and there are 3 workloads" in capsys.readouterr().err


def test_checks_without_times(capsys, tmp_path):
    sizes = ["--seqlen", "48", "--heads", "2", "--mask", "causal"]
    assert grammar.main(["bench", "tilewise", "sdpa,naive", *sizes, "--check", "--out", str(tmp_path / "rows.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "Against the fp64 oracle" in out and out.count("passed") == 3
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["impl"], row["passed"], row["median_s"]) for row in rows] == [(name, True, None) for name in ("tilewise", "sdpa", "naive")]


def test_cells_of_the_ladder_for_any_contender(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    cell = ["--set", "ladder", "--seqlen", "16", "--head-dim", "64", "--causal", "0"]
    assert grammar.main(["bench", "k5,sdpa:cudnn", *cell, "--device", "cpu", "--check"]) == 3
    out = capsys.readouterr().out
    assert "b1024 s16 h32 d64 Full() bf16 fwd" in out and "it runs on a Hopper GPU" in out and "torch has no cudnn kernel on a CPU" in out


def test_calls_that_no_machine_holds_are_refused_in_one_sentence(capsys):
    assert grammar.main(["explain", "--seqlen", "9999999999"]) == grammar.UNUSABLE
    said = "tilewise explain: q, k and v of this call would take 61,440 GB, which cpu does not have; give a smaller --seqlen"
    assert capsys.readouterr().err.startswith(said)
    assert grammar.main(["explain", "--seqlen", "9" * 30]) == grammar.UNUSABLE
    assert "GB, which cpu does not have" in capsys.readouterr().err
    error = RuntimeError(
        "[enforce fail at alloc.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 20479999997952 bytes."
    )
    assert grammar.sentence(error) == "out of memory: 20,480.0 GB were wanted at once; give smaller lengths, batches or heads"
