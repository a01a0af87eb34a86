"""Tables and charts say what the rows say."""

import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tilewise.bench import plots, tables
from tilewise.bench.store import Row
from tilewise.bench.tables import best_peer
from tilewise.bench.tables import rows as report

CASE = {
    **{"batch": 8, "seqlen_q": 512, "seqlen_k": 512, "heads_q": 8, "heads_k": 2, "head_dim": 64, "head_dim_v": 64},
    **{"mask": "Causal()", "dtype": "fp32", "direction": "fwd"},
}
OURS = Row(
    impl="tilewise",
    name="cpu",
    case=CASE,
    clock="wall",
    passed=True,
    error=1.5e-7,
    median_s=0.002,
    p10_s=0.0015,
    p90_s=0.004,
    samples=9,
    flops=10**9,
    flops_per_s=5e11,
    ceiling_share=0.625,
    peak_extra_bytes=12_300_000,
    environment={
        "device": "a CPU",
        "torch": "2.13.0",
        "python": "3.11",
        "threads": 2,
        "commit": "abc",
        "dirty": True,
        "date": "2026-11-21",
    },
)
THEIRS = replace(OURS, impl="sdpa", median_s=0.003, flops_per_s=10**9 / 0.003)
LONGER = replace(OURS, case={**CASE, "seqlen_q": 1024, "seqlen_k": 1024}, median_s=0.008)
UNABLE = replace(OURS, impl="fa3", passed=None, median_s=None, clock="none", reason="needs [CUDA]")
WRONG = replace(UNABLE, impl="broken", passed=False, reason="missed the tolerance: o")
ROWS = [OURS, THEIRS, UNABLE, WRONG, LONGER]


def test_markdown_of_times():
    assert report.markdown(ROWS).splitlines() == [
        "| time (ms, median) | tilewise | sdpa | fa3 | broken |",
        "|---|---:|---:|---:|---:|",
        "| cpu: b8 s512 h8/2 d64 Causal() fp32 fwd | **2.000** | 3.000 | – | wrong |",
        "| cpu: b8 s1024 h8/2 d64 Causal() fp32 fwd | 8.000 | – | – | – |",
    ]


def test_units_follow_the_rows_and_the_best_is_bold():
    assert "GFLOP/s on visible pairs" in report.markdown(ROWS, "throughput")
    assert "| **500.0** | 333.3 |" in report.markdown(ROWS, "throughput")
    fast = [replace(OURS, flops_per_s=6.5e14)]
    assert "TFLOP/s" in report.markdown(fast, "throughput") and "650.0" in report.markdown(fast, "throughput")
    assert (
        "1.5e-07" in report.markdown(ROWS, "error")
        and "12.3" in report.markdown(ROWS, "memory")
        and "62" in report.markdown(ROWS, "ceiling")
    )
    with pytest.raises(ValueError, match="metric is 'speed'; it must be one of time, throughput"):
        report.markdown(ROWS, "speed")


def test_the_last_row_of_a_measurement_counts_and_the_preferred_clock():
    later = replace(OURS, median_s=0.001)
    events = replace(OURS, clock="events", median_s=0.0005)
    assert "| 1.000 |" in report.markdown([OURS, later])
    assert "| 1.000 |" in report.markdown([later, events])
    assert "| 0.500 |" in report.markdown([later, events], clocks=("events", "wall"))


def test_ratio_to_sdpa():
    assert best_peer.against(ROWS).splitlines()[2:] == ["| cpu: b8 s512 h8/2 d64 Causal() fp32 fwd | 2.000 | 3.000 | 1.50x |"]


def test_against_the_best():
    times = {"tilewise": 2e-3, "fa4": 1e-3, "sdpa": 4e-3}
    rows = [replace(OURS, impl=impl, median_s=s, flops_per_s=1e9 / s) for impl, s in times.items()]
    rows += [
        replace(OURS, impl=impl, median_s=s, flops_per_s=1e9 / s, case={**CASE, "seqlen_q": 7})
        for impl, s in times.items()
        if impl != "fa4"
    ]
    lines = best_peer.against_best(rows).splitlines()
    assert [line.split("|")[3:5] for line in lines[2:]] == [[" 1.0 fa4 ", " 0.50 "], [" 0.2 sdpa ", " 2.00 "], [" ", " 1.000 "]]
    assert "ahead in 1 of 2" in lines[-1]
    (line,) = best_peer.by_kind(rows).splitlines()[2:-2]
    assert line.startswith("| fwd d64 Causal(), ") and line.endswith(" | 1.00 | 1 of 2 |")


def test_machines_are_listed_once():
    lines = report.machines([*ROWS, replace(OURS, environment={**OURS.environment, "date": "2026-11-22T05:06:07"})]).splitlines()
    assert len(lines) == 3 and lines[2] == "| a CPU | 2.13.0 | 3.11 | 2 | – | abc with changes | 2026-11-21 to 2026-11-22 05:06 |"


def test_terminal_table():
    from rich.console import Console

    made = report.table(ROWS)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(made)
    text = console.export_text()
    assert made.row_count == 4
    assert text.startswith("attention, b8 h8/2 d64 Causal() fp32 fwd") and text.count("s512") == text.count("s1024") == 1
    assert "2.000" in text and "1.500 – 4.000" in text and "wrong" in text and "fa3: needs [CUDA]" in text
    assert "broken: missed the tolerance: o" in text


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_table_fits_a_terminal_and_says_what_it_leaves_out(width):
    from rich.console import Console

    masks = ("Documents([0,5,11],inner=Causal())", "bitmap mask of 1600 pairs")
    rows = [*ROWS, *(replace(OURS, impl="tilewise:reference", case={**CASE, "mask": mask}, median_s=1234.5) for mask in masks)]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report.table(rows, width))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert sum("1234500.000" in line and "tilewise:reference" in line for line in lines) == 2, "a row was wrapped"
    assert any("bitmap mask of 1600 pairs" in line for line in lines)
    (left_out,) = (line for line in lines if line.startswith("Not shown"))
    assert "clock" in left_out and not any("wall" in line for line in lines)


def test_a_case_alone_is_named_in_full():
    made = report.table([OURS, THEIRS])
    assert made.title == "attention, b8 h8/2 d64 fp32 fwd" and list(made.columns[0].cells) == ["s512 Causal()", ""]
    assert report.table([UNABLE]).row_count == 0


DOCUMENT = """# Speed
<!-- tilewise:begin time -->
old
<!-- tilewise:end time -->
between
<!-- tilewise:begin time:gpu+cpu -->
<!-- tilewise:end time:gpu+cpu -->
<!-- tilewise:begin time:gpu -->
<!-- tilewise:end time:gpu -->
"""


def test_refresh_fills_between_markers_and_only_there(tmp_path):
    page, plain = tmp_path / "page.md", tmp_path / "plain.md"
    page.write_text(DOCUMENT)
    plain.write_text("no markers")
    assert tables.refresh([page, plain], ROWS) == [page]
    text = page.read_text()
    assert "old" not in text and text.startswith("# Speed\n") and "\nbetween\n" in text
    assert text.count("| **2.000** | 3.000 |") == 2  # the third has no rows of its set
    assert tables.refresh([page], ROWS) == []
    assert plain.read_text() == "no markers"


def filled(name, rows, *where):
    return tables.fill(f"<!-- tilewise:begin {name} -->\n<!-- tilewise:end {name} -->\n", rows, *where)


@pytest.mark.parametrize("name", sorted(tables.TABLES))
def test_every_table_can_be_written_even_from_nothing(name):
    for rows in (ROWS, []):
        assert re.search(r"\n\|---|Not measured yet\.", filled(name, rows))


def test_a_marker_names_a_set_and_a_direction():
    back = [replace(row, case={**row.case, "direction": "bwd"}, median_s=3 * row.median_s) for row in ROWS if row.median_s is not None]
    for direction, shown in (("fwd", ("| **2.000**",)), ("bwd", ("| **6.000**",)), ("", ("| **2.000**", "| **6.000**"))):
        name = f"time:cpu:{direction}".rstrip(":")
        text = filled(name, ROWS + back)
        assert [number for number in ("| **2.000**", "| **6.000**") if number in text] == list(shown)


def test_a_marker_leaves_out_what_another_set_has():
    again = [replace(row, name="dense") for row in (OURS, THEIRS)]
    longer = [replace(row, case={**row.case, "seqlen_q": 4096}, median_s=0.007) for row in again]
    for name, shown in (
        ("time:dense", ("| 2.000", "| 7.000")),
        ("time:dense!cpu", ("| 7.000",)),
        ("time:dense!other", ("| 2.000", "| 7.000")),
    ):
        text = filled(name, [OURS, THEIRS, *again, *longer]).replace("**", "")
        assert [number for number in ("| 2.000", "| 7.000") if number in text] == list(shown)


def test_a_marker_names_a_device():
    """And a table with two of them side by side is none."""
    elsewhere = [replace(row, environment={**row.environment, "device": "a GPU"}, median_s=0.001) for row in (OURS, THEIRS)]
    for name, shown in (("time:::cpu", "| **2.000** | 3.000 |"), ("time:cpu:fwd:gpu", "| 1.000 | 1.000 |")):
        assert shown in filled(name, [OURS, THEIRS, *elsewhere])
    for name, rows in (("time", [OURS, THEIRS, *elsewhere]), ("against-best:cpu", [OURS, elsewhere[1]])):
        with pytest.raises(ValueError, match=f"{name} would mix a CPU and a GPU; "):
            filled(name, rows)
    assert "a CPU" in filled("machines", [OURS, *elsewhere])


def test_markers_that_make_no_sense():
    with pytest.raises(ValueError, match=r"page.md: speed is no table; there are time, throughput"):
        filled("speed", ROWS, "page.md")
    with pytest.raises(ValueError, match="tilewise:begin time has no tilewise:end time after it"):
        tables.fill("<!-- tilewise:begin time -->\n", ROWS)


def test_charts_have_a_line_an_implementation_and_units():
    chart = plots.svg([*ROWS, replace(LONGER, impl="sdpa")], "time")
    ET.fromstring(chart)
    text = re.sub(r"<[^>]+>", "", chart)
    for words in ("tilewise", "sdpa", "time (ms, median)", "sequence length (keys)", "h8/2 d64 Causal() fp32 fwd", "512", "1k"):
        assert words in text
    assert "fa3" not in text
    assert chart == plots.svg([*ROWS, replace(LONGER, impl="sdpa")], "time")


def test_every_metric_that_the_rows_have_is_drawn(tmp_path):
    written = plots.save(ROWS, tmp_path / "plots")
    assert [path.name for path in written] == ["time.svg", "throughput.svg", "memory.svg", "error.svg"]
    assert all(path.read_text().lstrip().startswith("<?xml") for path in written)
    assert plots.save([UNABLE], tmp_path / "none") == []


def drawn_axes(monkeypatch, rows, metric):
    """The axes of a chart, as its labels were when it was written."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure) or figure.draw_without_rendering())
    plots.svg(rows, metric)
    return figures[0].axes


@pytest.mark.parametrize("metric", ["time", "throughput", "memory", "error"])
@pytest.mark.parametrize("spread", [1.0, 1.1, 3.0, 40.0, 1e7])
def test_labels_never_touch_and_always_tell_a_scale(monkeypatch, metric, spread):
    lengths = (500, 512, 520, 1000, 1024, 2048, 2100, 4096)
    rows = [
        replace(
            OURS,
            case={**CASE, "seqlen_q": length, "seqlen_k": length, "direction": direction},
            **{name: getattr(OURS, name) * factor for name in ("median_s", "p10_s", "p90_s", "flops_per_s", "error")},
            peak_extra_bytes=int(OURS.peak_extra_bytes * factor),
        )
        for direction in ("fwd", "bwd", "fwd+bwd")
        for length, factor in zip(lengths, (1.0, *[spread**0.5] * 6, spread), strict=True)
    ]
    panels = drawn_axes(monkeypatch, rows, metric)
    assert len(panels) == 3
    for axes in panels:
        for axis, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            low, high = sorted(getattr(axes, f"get_{side}lim")())
            boxes = [
                tick.label1.get_window_extent()
                for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
                if tick.label1.get_text() and tick.label1.get_visible() and low * 0.999 <= tick.get_loc() <= high * 1.001
            ]
            if boxes:  # of the panels of a line the first alone has labels
                assert len(boxes) >= 2, f"{side}: {len(boxes)} labels"
            boxes.sort(key=lambda box: getattr(box, f"{side}0"))
            for one, after in pairwise(boxes):
                assert getattr(one, f"{side}1") <= getattr(after, f"{side}0"), f"{side}: labels overlap"
        assert axes.get_xticklabels()[-1].get_text() == "4k"
    assert any(label.get_text() for label in panels[0].get_yticklabels())


def test_charts_of_several_devices_have_panels_of_their_own():
    """Else a line would go from one machine's time to the other's."""
    elsewhere = [replace(row, environment={**row.environment, "device": "a GPU"}) for row in (OURS, LONGER)]
    both = re.sub(r"<[^>]+>", "", plots.svg([OURS, LONGER, *elsewhere]))
    assert both.count("fp32 fwd, a CPU") == both.count("fp32 fwd, a GPU") == 1
    assert "a CPU" not in plots.svg([OURS, LONGER])


PAPERS = [
    replace(
        OURS,
        name="papers",
        clock="events",
        impl=impl,
        case={**CASE, "direction": direction, "seqlen_q": length, "seqlen_k": length},
        environment={**OURS.environment, "device": "NVIDIA H100"},
    )
    for impl in ("fa4", "tilewise")
    for direction in ("fwd", "bwd", "fwd+bwd")
    for length in (512, 1024)
]


def test_the_overview_has_a_panel_for_each_way_and_head_dim(tmp_path):
    text = plots.overview([*PAPERS, *ROWS])
    labels = re.findall(r">([^<>]+)</text>", text)
    assert [label for label in labels if "head_dim" in label] == ["forward, head_dim 64", "backward, head_dim 64"]
    assert labels.index("tilewise") < labels.index("fa4") and "TFLOP/s" in labels
    (path,) = plots.save_overview(PAPERS, tmp_path)
    assert path.read_text() == plots.overview(PAPERS)
    assert plots.overview(ROWS) is None and plots.save_overview(ROWS, tmp_path) == []


def test_panels_that_share_an_axis_show_every_point(monkeypatch):
    slow, fast = (replace(row, flops_per_s=rate) for row, rate in zip(PAPERS[:2], (1e12, 9e14), strict=True))
    far = replace(fast, case={**fast.case, "direction": "bwd"})
    one, other = drawn_axes(monkeypatch, [slow, far], "throughput")
    assert one.get_ylim()[0] == 0 and min(one.get_ylim()[1], other.get_ylim()[1]) > 900


def test_a_chart_is_small_and_keeps_its_labels():
    """Coordinates are rounded, what is written is not."""
    text = plots.small('<svg>\n  <path d="M 1.23456 -7.000001"/>\n  <text style="font-family: \'A\', b; x: 1">0.00125 ms</text>\n</svg>')
    assert text == '<svg>\n<path d="M 1.23 -7"/>\n<text style="font-family: sans-serif; x: 1">0.00125 ms</text>\n</svg>'


def test_charts_of_a_device_have_a_folder():
    assert plots.folder_of("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_charts_that_cannot_be_drawn():
    with pytest.raises(ValueError, match="no row has a time to draw"):
        plots.svg([UNABLE])
    with pytest.raises(ValueError, match="metric is 'speed'"):
        plots.svg(ROWS, "speed")


def test_the_markers_of_the_documents_are_tables():
    root = Path(__file__).parents[3]
    documents = [path for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if path.exists()]
    marked = [path for path in documents if "tilewise:begin" in path.read_text(encoding="utf-8")]
    assert root / "docs" / "benchmarks.md" in marked
    for path in marked:
        tables.fill(path.read_text(encoding="utf-8"), ROWS, path.name)


def test_a_case_that_cannot_be_described_says_what_it_lacks():
    row = replace(OURS, case={"batch": 8, "mask": "Causal()"})
    for make in (report.table, report.markdown):
        with pytest.raises(ValueError, match="a row's case has no seqlen_q, seqlen_k, .*, by which tables describe it; it has batch, mask"):
            make([row])


def test_a_time_without_its_spread():
    assert report.MISSING in _shown(report.table([replace(OURS, p10_s=None)]))


def _shown(table) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=300)
    console.print(table)
    return console.file.getvalue()
