"""The demo's page in a real browser: every chart is drawn and legible, nothing is cut off, loaded or complained about."""

import json
import shutil
import subprocess
from html import escape

import pytest
from matplotlib import image

from tilewise.cli import grammar
from tilewise.demo import pictures, sweep

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH; on Debian: apt-get install chromium")

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr")
CHARTS = 9
PROBE = """<script>
addEventListener("load", () => {
const svgs = [...document.querySelectorAll("figure svg")].map(svg => {
  const box = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")];
  return {label: svg.getAttribute("aria-label"), width: box.width, height: box.height, right: box.right,
          text: texts.length ? Math.min(...texts.map(t => t.getBoundingClientRect().height)) : 0,
          ink: texts.length ? getComputedStyle(texts[0]).fill : "",
          strokes: [...new Set([...svg.querySelectorAll("path, use")].map(p => getComputedStyle(p).stroke))]};
});
const found = {svgs, inner: innerWidth, scroll: document.documentElement.scrollWidth,
  loaded: performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:")).length,
  page: getComputedStyle(document.body).backgroundColor};
const out = document.createElement("script"); out.type = "application/json"; out.id = "probe";
out.textContent = JSON.stringify(found); top.document.body.append(out);
});
</script>"""
TILEWISE_BLUE = (0x0F, 0x7F, 0xC4)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "TIMING_BUDGET_S", 0.01)
        assert grammar.main(["demo", "--steps", "3", "--seqlens", "64,128", "--batch", "1", "--context", "64", "--out", str(path)]) == 0
    return path


def browse(*flags: str, page) -> subprocess.CompletedProcess:
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = (CHROMIUM, *FLAGS, profile, *flags, page.as_uri())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done


def probe(page, width: int) -> dict:
    """The page as laid out `width` pixels wide: in a frame, because a window has a least width, with a script added that looks at it."""
    probed = page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>")
    frame = page.with_name(f"frame-{width}.html")
    style = f"width: {width}px; height: 900px; border: 0"
    frame.write_text(f'<body><iframe style="{style}" srcdoc="{escape(probed)}"></iframe></body>', encoding="utf-8")
    dom = browse("--dump-dom", "--window-size=1400,1000", page=frame).stdout
    return json.loads(dom.split('id="probe">')[1].split("</script>")[0])


@pytest.mark.parametrize("width", [1280, 390])
def test_every_chart_and_picture_is_drawn_legible_and_inside_the_screen(page, width):
    found = probe(page, width)
    assert len(found["svgs"]) == CHARTS + len(pictures.MASKS)
    assert found["loaded"] == 0 and found["inner"] == width and found["scroll"] <= width
    for svg in found["svgs"]:
        assert svg["label"] and svg["width"] > 280 and svg["height"] > 150 and svg["right"] <= width, svg
        assert svg["text"] >= 9, f"text of {svg['text']} pixels: {svg}"
    for svg in found["svgs"][:CHARTS]:
        assert svg["ink"] == "rgb(29, 33, 38)" and svg["ink"] in svg["strokes"], f"the page's colours did not arrive: {svg}"


def test_screenshot_shows_the_curves(page):
    shot = page.with_name("shot.png")
    browse(f"--screenshot={shot}", "--window-size=1280,4000", page=page)
    pixels = (image.imread(shot)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (4000, 1280)
    blue = (abs(pixels - TILEWISE_BLUE).max(axis=-1) <= 2).sum()
    assert blue > 500, f"only {blue} pixels have the colour of tilewise's curves"
