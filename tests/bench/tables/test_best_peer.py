"""The table of the set `models`: both clocks, the best peer by each, geometric means, and why a cell is not led."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench import tables
from tilewise.bench.sets import WHY_BEHIND, model_shapes
from tilewise.bench.store import Row, append
from tilewise.bench.tables.best_peer import leads, models_table
from tilewise.cli import grammar

CELLS = {each.name: each for each in model_shapes(torch.bfloat16, "bwd")}
ENVIRONMENT = {"device": "a GPU", "torch": "2.11.0", "date": "2026-11-26T00:00:00"}


def row(name, impl, clock, ms, **other):
    fields = {"passed": True, "median_s": ms * 1e-3, "p10_s": ms * 1e-3, "p90_s": ms * 1e-3, "samples": 3, "environment": ENVIRONMENT}
    return Row(impl=impl, name=name, case=CELLS[name].case, clock=clock, **{**fields, **other})


def untimed(name, impl, reason, passed=None):
    return Row(impl=impl, name=name, case=CELLS[name].case, clock="none", reason=reason, passed=passed, environment=ENVIRONMENT)


LED = [
    row("GPT-2", "tilewise", "graph", 1.0),
    row("GPT-2", "tilewise", "wall", 2.0),
    row("GPT-2", "fa4", "events", 4.0),
    row("GPT-2", "fa4", "wall", 3.0),
    row("GPT-2", "sdpa:cudnn", "events", 2.0),
    row("GPT-2", "sdpa:cudnn", "wall", 8.0),
]
LOST = [
    row("Llama-3-8B", "tilewise", "events", 1.0),
    row("Llama-3-8B", "tilewise", "wall", 4.0),
    row("Llama-3-8B", "fa4", "events", 2.0),
    row("Llama-3-8B", "fa4", "wall", 3.0),
]
ALONE = [
    row("T5-XXL-encoder", "tilewise", "events", 1.0),
    row("T5-XXL-encoder", "tilewise", "wall", 1.5),
    untimed("T5-XXL-encoder", "fa4", "it has no bias"),
]


def lines(rows):
    return {
        line.split("|")[1].strip(" *"): [text.strip() for text in line.split("|")[2:-1]]
        for line in models_table(rows).splitlines()
        if "|" in line
    }


def test_both_clocks_and_the_best_peer_by_each():
    found = lines(LED + LOST + ALONE)
    assert found["GPT-2"][1:] == ["1.000", "2.000 sdpa:cudnn", "2.00", "2.000", "3.000 fa4", "1.50", ""]
    assert found["Llama-3-8B"][1:] == ["1.000", "2.000 fa4", "2.00", "4.000", "3.000 fa4", "0.75", "not explained yet"]
    assert found["T5-XXL-encoder"][1:] == ["1.000", "–", "–", "1.500", "–", "–", ""]
    assert "bias hqk with gradient" in found["T5-XXL-encoder"][0]
    means = found["geometric mean"]
    assert (means[0], means[3], means[6]) == ("ahead by both clocks in 2 of 3", "**2.000**", f"**{(1.5 * 0.75) ** 0.5:.3f}**")
    assert models_table(LED).splitlines()[-1] == (
        "Peers: fa4, sdpa:cudnn. Measured on a GPU, torch 2.11.0, 2026-11-26; medians, side by side in one process."
    )


def test_why_a_cell_is_not_led_is_said_beside_it(monkeypatch):
    monkeypatch.setitem(WHY_BEHIND, ("Llama-3-8B", "bwd"), "the host | is slow")
    assert "| the host \\| is slow |" in models_table(LOST)
    wrong = [row for row in LED if row.impl != "tilewise"] + [untimed("GPT-2", "tilewise", "missed the tolerance: o", passed=False)]
    cells = lines(wrong)["GPT-2"]
    assert cells[1:] == ["wrong", "2.000 sdpa:cudnn", "–", "wrong", "3.000 fa4", "–", "no time: missed the tolerance: o"]
    assert not leads(tables.cells_of_models(wrong)[0])


def test_the_last_measurement_counts():
    again = [row("GPT-2", "tilewise", "events", 1.6), row("GPT-2", "tilewise", "wall", 6.0)]
    assert lines(LED + again)["GPT-2"][1:7] == ["1.600", "2.000 sdpa:cudnn", "1.25", "6.000", "3.000 fa4", "0.50"]
    gone = [*LED, untimed("GPT-2", "fa4", "cannot run this: out of memory")]
    assert lines(gone)["GPT-2"][5] == "8.000 sdpa:cudnn"


def test_rungs_and_other_backends_of_ours_are_no_peers():
    assert lines([*LED, row("GPT-2", "tilewise:tiled", "events", 0.1), row("GPT-2", "k5", "events", 0.1)])["GPT-2"][3] == "2.00"


def test_cells_come_in_the_order_of_the_set_and_old_ones_are_left_out():
    assert [cell["wall"].name for cell in tables.cells_of_models(ALONE + LED + LOST)] == ["Llama-3-8B", "GPT-2", "T5-XXL-encoder"]
    old = [replace(each, case={**each.case, "heads_k": 1}) for each in LED]
    assert tables.cells_of_models([*old, replace(LED[0], name="no-model")]) == []


def test_the_marker_takes_a_direction_and_a_device():
    text = "<!-- tilewise:begin models::bwd:gpu -->\n<!-- tilewise:end models::bwd:gpu -->\n"
    assert "| GPT-2 |" in tables.fill(text, LED) and "| GPT-2 |" not in tables.fill(text.replace("bwd", "fwd"), LED)


@pytest.mark.parametrize("name", [name for name, _ in WHY_BEHIND] or [None])
def test_reasons_are_of_cells_that_there_are(name):
    assert name is None or name in CELLS


def test_report_writes_the_table_and_no_chart_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    append(tmp_path / "rows.jsonl", LED + LOST)
    (tmp_path / "page.md").write_text("<!-- tilewise:begin models::bwd:gpu -->\n<!-- tilewise:end models::bwd:gpu -->\n")
    assert grammar.main(["report", "rows.jsonl", "--docs", "page.md", "--plots", "plots"]) == 0
    assert "| ahead by both clocks in 1 of 2 |" in (tmp_path / "page.md").read_text()
    assert not list(tmp_path.rglob("*.svg"))
    assert grammar.main(["report", "rows.jsonl", "--html", "page.html"]) == 0
    assert "b8 s1024 h12 d64 Causal()" in (tmp_path / "page.html").read_text()
