"""The chart of the set context-parallel: what it shows of its rows, and where it is written."""

import json
import xml.etree.ElementTree as ET

import pytest

from tilewise.bench import scheme_plot
from tilewise.cli import grammar

WHERE = {"device": "NVIDIA H200"}


def row(scheme, rate, mask="full", seqlen=16384, direction="forward", **more):
    same = {"set": "context-parallel", "heads": [64, 8], "world": 2, "environment": WHERE}
    return same | {"scheme": scheme, "mask": mask, "seqlen": seqlen, "direction": direction, "tflops_per_gpu": rate} | more


ROWS = [
    *(row(scheme, 500.0 + place) for place, scheme in enumerate(("one", "tilewise", "ring"))),
    *(row(scheme, 600.0 + place, mask="causal", seqlen=131072) for place, scheme in enumerate(("one", "tilewise", "torch:cudnn"))),
    row("tilewise", 400.0, mask="alone"),  # nothing to compare it with
    row("tilewise", 300.0, direction=None),  # decode
    row("ring", 300.0, heads=[32, 8]),
]


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "benchmarks" / "results" / "distributed"
    folder.mkdir(parents=True)
    (folder / "gpu.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    return folder


def test_what_is_read(results):
    assert len(scheme_plot.load(results)) == 7 and scheme_plot.load(results / "none") == []


def test_what_is_drawn(results):
    text = scheme_plot.scheme_svg(scheme_plot.load(results))
    words = " ".join(ET.fromstring(text).itertext())
    for shown in (
        "TFLOP/s a GPU",
        "forward, 2 GPUs, heads 64:8 of 128",
        "one GPU alone",
        "tilewise",
        "ring",
        "torch:cudnn",
        "16k",
        "128k",
        "causal",
    ):
        assert shown in words, shown
    assert "alone" not in words.replace("GPU alone", "") and "backward" not in words
    with pytest.raises(ValueError, match="no row of the set context-parallel"):
        scheme_plot.scheme_svg([])


def test_report_draws_it_where_no_rows_are_named(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "benchmarks" / "results" / "cpu.jsonl"
    rows.touch()
    (tmp_path / "page.md").write_text("A page.\n")
    assert grammar.main(["report", str(rows), "--docs", "page.md", "--plots", "named"]) == 0
    assert not list(tmp_path.rglob("*.svg"))
    assert grammar.main(["report", "--docs", "page.md", "--plots", "plots"]) == 0
    assert [path.name for path in tmp_path.rglob("*.svg")] == ["context-parallel-nvidia-h200.svg"]


def test_nothing_is_written_without_rows(tmp_path):
    assert scheme_plot.save_schemes(tmp_path, tmp_path / "plots") == [] and not (tmp_path / "plots").exists()
