"""The page is one file, says what was measured, and holds every chart as text that a browser can draw."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from tilewise.demo import charts
from tilewise.demo.page import against, megabytes, milliseconds, render, verdict

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
        "1.25x faster than SDPA",
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
    assert "The time budget ended the training 5 steps early." in render(make_report(training=training))


def test_one_step_and_one_length_can_be_drawn(make_report, make_training, make_sweep):
    page = render(make_report(training=make_training(steps=1), sweep=make_sweep(seqlens=(512,))))
    assert len(SVG.findall(page)) == CHARTS + 1


def test_numbers_are_written_for_people():
    assert megabytes(None) == "not measured" and megabytes(2_500_000) == "2.5 MB" and megabytes(1_234_000_000) == "1,234 MB"
    assert milliseconds(9.87) == "9.9 ms" and milliseconds(1234.5) == "1,234 ms"
    assert against(1.0, 2.0) == "2.00x faster" and against(3.0, 2.0) == "1.50x slower" and against(math.nan, 1.0) == "not comparable"


def test_whole_decades():
    assert charts.whole_decades((2e-7, 9e-7)) == pytest.approx((1e-7, 1e-6))
