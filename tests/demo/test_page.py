"""The page is one file, says what was measured, and holds every chart as text that a browser can draw."""

import math
import re
import struct
import xml.etree.ElementTree as ElementTree
from html import escape

import pytest

from tilewise.demo import charts, share
from tilewise.demo.numbers import against, byline, headlines, megabytes, milliseconds, verdict
from tilewise.demo.page import render

CHARTS = 9  # of the training: loss, difference, time, memory; of the sweep: forward, both, memory, two errors
SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


@pytest.fixture(scope="module")
def page(make_report):
    return render(make_report())


def test_page_loads_nothing(page):
    assert not re.findall(r"(?:src|srcset|action)\s*=|@import|<script|<link|<iframe|url\((?!#)", page)
    assert all(target.startswith(("#", "data:")) for target in re.findall(r'(?:href|xlink:href)="([^"]*)"', page))


def test_every_chart_is_well_formed_scales_and_has_a_name(page):
    svgs = SVG.findall(page)
    assert len(svgs) == CHARTS + 1
    for svg in svgs:
        root = ElementTree.fromstring(svg)
        assert "width" not in root.attrib and "height" not in root.attrib and root.attrib["viewBox"]
        assert root.attrib["role"] == "img" and root.attrib["aria-label"]
        assert "metadata" not in svg


def test_charts_take_their_colours_from_the_page(page):
    drawn = "".join(SVG.findall(page)[:CHARTS])
    for variable in ("--ink", "--grid", "--tilewise", "--sdpa", "--naive"):
        assert f"var({variable})" in drawn
        assert page.count(f"{variable}: #") == 2, "one colour for a light page and one for a dark one"
    assert not any(colour in page for colour in charts.VARIABLES), "a placeholder colour was left in"


def test_page_says_what_was_measured(page):
    for expected in (
        "The two trainings agree: at each of 12 steps the losses differ by at most 1.0e-07",
        "loss (nats a byte)",
        "naive formula at 2,048 tokens: not run.",
        "6 skipped, 4 partial, 6 full",
        "backend: tiled",
        "a &lt;machine&gt;",
        "it needs &lt;a GPU&gt; &amp; a driver",
        "<b>1.25x faster</b>",
        "attention at 2,048 tokens, forward + backward: 96.0 ms, SDPA 120 ms",
    ):
        assert expected in page, expected
    assert "nan" not in re.sub(r"<style.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL).lower().split()


def test_disagreement_is_shouted(make_report, make_training):
    page = render(make_report(training=make_training(off_by=0.01)))
    assert "The two trainings DISAGREE" in page and 'class="verdict bad"' in page
    assert "DISAGREE" in verdict(make_training(off_by=math.nan))


def test_page_without_memory_and_without_points(make_report, make_training, make_sweep):
    no_memory = render(make_report(training=make_training(peak_bytes=None), sweep=make_sweep(peak_bytes=None)))
    assert "not measured" in no_memory and len(SVG.findall(no_memory)) == CHARTS - 2 + 1
    nothing = render(make_report(sweep=make_sweep(seqlens=())))
    assert len(SVG.findall(nothing)) == 4 + 1


def test_shortened_training_is_said(make_report, make_training):
    training = make_training()
    for curve in training.curves:
        del curve.losses[7:], curve.seconds[7:]
    page = render(make_report(training=training))
    assert "Ended early: the time budget was spent after 7 of 12 steps." in page and "7 of 12 steps of 2 x 1,024 bytes" in page
    assert byline(make_report(training=training)).endswith(", ended early at 7 of 12 steps")
    assert "Ended early" not in render(make_report())


def test_page_begins_with_what_matters(make_report):
    """Name, version, day, machine and command; whether they agree; speed, memory and agreement ahead of the rest."""
    machine = (("device", "a <machine>"), ("tilewise", "9.8.7"), ("date", "2031-02-03T04:05:06+00:00"), ("threads", "2"))
    report = make_report(machine=machine, command="tilewise demo --steps 12", seconds=73.2)
    assert byline(report) == "tilewise 9.8.7, 2031-02-03, a <machine>, 2 threads, tilewise demo --steps 12: 73 s"
    page = render(report)
    head, _, rest = page.partition("</header>")
    assert escape(byline(report)) in head and "The two trainings agree" in head and page.count(escape(byline(report))) == 3
    numbers = re.findall(r'<div class="card"><b>(.*?)</b><span>(.*?)</span>', rest)
    assert [each for each, _ in numbers[:3]] == ["1.25x faster", "20 MB", "1.0e-07"] and [
        tuple(each) for each in headlines(report)
    ] == numbers
    assert "attention at 2,048" in numbers[0][1] and "extra memory" in numbers[1][1] and "difference of the loss" in numbers[2][1]
    assert (
        rest.index("card") < rest.index("What it writes") < rest.index("<h2>Training</h2>")
        and "<pre>tilewise demo --steps 12</pre>" in page
    )


def test_page_shows_what_the_models_write(make_report, make_training):
    same = render(make_report())
    assert '<pre><span class="soft">A &lt;prompt&gt; </span>is continued' in same and "writes the same 12 characters" in same
    training = make_training()
    training.curves[1].written = "is contained"
    assert "writes the same 7 characters, then others" in render(make_report(training=training))


def test_the_picture_is_a_png_of_the_size_that_links_have(make_report, make_training, make_sweep):
    for report in (make_report(), make_report(sweep=make_sweep(seqlens=())), make_report(training=make_training(off_by=math.nan))):
        picture = share.draw(report)
        assert picture[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", picture[16:24]) == (1200, 630)
    page = render(make_report(picture=b"png"))
    assert 'download="tilewise-report.png" href="data:image/png;base64,cG5n"' in page and "image/png" not in render(make_report())


def test_one_step_and_one_length_can_be_drawn(make_report, make_training, make_sweep):
    page = render(make_report(training=make_training(steps=1), sweep=make_sweep(seqlens=(512,))))
    assert len(SVG.findall(page)) == CHARTS + 1


def test_numbers_are_written_for_people():
    assert megabytes(None) == "not measured" and megabytes(2_500_000) == "2.5 MB" and megabytes(1_234_000_000) == "1,234 MB"
    assert milliseconds(9.87) == "9.9 ms" and milliseconds(1234.5) == "1,234 ms"
    assert against(1.0, 2.0) == "2.00x faster" and against(3.0, 2.0) == "1.50x slower" and against(math.nan, 1.0) == "not comparable"


def test_whole_decades():
    assert charts.whole_decades((2e-7, 9e-7)) == pytest.approx((1e-7, 1e-6))
