"""What was to be reached next to the newest row, by hand-made rows."""

from tilewise.bench.sets import SETS
from tilewise.bench.store import Row
from tilewise.bench.tables import fill
from tilewise.bench.tables.goals import GOALS, goals_table, kind_of

CELLS = {(cell.head_dim, kind_of(cell), cell.direction): cell for way in ("fwd", "bwd") for cell in SETS["triton"](direction=way)}


def row(
    head_dim, kind, direction, tflops, date="2026-11-28T01:00:00", device="NVIDIA H100 80GB HBM3", clock="events", impl="tilewise:triton"
):
    cell, environment = CELLS[head_dim, kind, direction], {"device": device, "date": date}
    return Row(impl=impl, name="triton", case=cell.case, clock=clock, flops_per_s=tflops * 1e12, environment=environment)


def lines(*rows):
    return {
        tuple(cells[:2]): cells[2:] for cells in ([x.strip() for x in one.split("|")[1:-1]] for one in goals_table(rows).splitlines()[2:])
    }


def test_every_cell_has_a_goal():
    assert {(head_dim, kind) for head_dim, kind, _ in CELLS} >= GOALS.keys() and len(CELLS) == 36
    assert {kind for _, kind, _ in CELLS} >= {"softcap", "softcap of large scores", "ALiBi", "a bias", "a sink"}
    assert all(found[1:] == [*["–"] * 3, "not measured"] for found in lines().values()) and len(lines()) == 36


def test_the_newest_row_counts_and_the_kernels_clock():
    older, newer = "2026-11-27T09:00:00", "2026-11-28T01:00:00"
    rows = [row(128, "causal", "fwd", 460, newer, "NVIDIA H200"), row(128, "causal", "fwd", 300, older)]
    rows += [row(128, "causal", "fwd", 400, newer, "NVIDIA H200", "wall"), row(128, "causal", "fwd", 900, newer, impl="flex")]
    assert lines(*rows)["128, causal", "fwd"] == ["450", "460", "1.02", "H200, 2026-11-28", "**reached**"]


def test_misses_say_why_where_that_is_known():
    found = lines(row(128, "softcap", "fwd", 240), row(128, "causal", "bwd", 333))
    assert found["128, softcap", "fwd"][:4] == ["330", "240", "0.73", "H100, 2026-11-28"]
    assert found["128, softcap", "fwd"][4].startswith("missed: a score takes some nine more")
    assert found["128, causal", "bwd"][4] == "missed: cause not known"


def test_changed_scores_are_held_to_the_causal_mask_of_the_same_gpu():
    rows = [row(64, "causal", "fwd", 400), row(64, "ALiBi", "fwd", 340), row(64, "causal", "fwd", 100, device="NVIDIA H200")]
    assert lines(*rows)["64, ALiBi", "fwd"] == ["85 % of causal", "85 %", "1.00", "H100, 2026-11-28", "**reached**"]
    assert lines(rows[1])["64, ALiBi", "fwd"][4] == "not measured"


def test_rows_of_two_gpus_may_stand_in_one_table():
    rows = [row(64, "causal", "fwd", 400), row(64, "causal", "fwd", 380, "2026-11-29T00:00:00", "NVIDIA H200")]
    text = fill("<!-- tilewise:begin goals:triton -->\n<!-- tilewise:end goals:triton -->\n", rows)
    assert "| 64, causal | fwd | 390 | 380 | 0.97 | H200, 2026-11-29 |" in text
