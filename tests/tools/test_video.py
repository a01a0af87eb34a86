"""The errors of 8 bits for video: table and picture are what the rows say, and the rows are what the code computes."""

import importlib.util
import json
from pathlib import Path

import pytest

from tilewise.bench.eight_bits import PER_TENSOR, SAGE, video_errors

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("tool_video", ROOT / "tools" / "video.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_what_the_rows_say(tool):
    text = tool.PAGE.read_text()
    assert tool.filled(text) == text and "(../plots/video-errors.svg)" in text and tool.PICTURE.exists()
    rows = [json.loads(line) for line in tool.ROWS.read_text().splitlines()]
    assert [(row["tokens"], row["mean"]) for row in rows] == [(tokens, mean) for tokens in tool.TOKENS for mean in tool.MEANS]


def test_a_row_is_what_is_computed(tool):
    row = tool.rows()[3]
    assert (row["tokens"], row["mean"]) == (8192, 10)
    found = video_errors(10, 8192)
    assert found == pytest.approx(row["rms"], rel=1e-3)
    assert 5 * found["int8"] < min(found[SAGE], found[PER_TENSOR])
