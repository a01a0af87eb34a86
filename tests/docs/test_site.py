"""The site: mkdocs.yml names every page and no other, pages of docs/start say what the code has, `mkdocs build --strict` passes, and fits a phone."""

import importlib
import json
import os
import re
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from browser import found_by, needs_chromium

from tilewise import masks
from tilewise.cli import grammar
from tilewise.runtime import dispatch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PHONE, HIGHEST = 400, 20_000  # pixels
SCALE, TALLEST = 0.65, 1_500  # of a chart on a phone: letters of 10 points stay 8 pixels high; pixels
ADDRESS = "https://example.org/docs/"


def start(name: str) -> str:
    return (DOCS / "start" / name).read_text(encoding="utf-8")


def named(settings: str) -> list[str]:
    """The pages in the navigation, in order."""
    return re.findall(r"^ +- (?:.+: )?([\w/.-]+\.md)$", settings[settings.index("\nnav:") :], re.MULTILINE)


def test_the_navigation_has_every_page_once():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(named(SETTINGS)) == sorted(pages)


def test_a_page_that_is_missing_is_seen():
    assert named("x\nnav:\n  - A: a.md\n  - B:\n      - b/c-d.md\n") == ["a.md", "b/c-d.md"]


def test_what_the_workflow_sets_is_read():
    """mkdocs.yml takes addresses from the environment, as no checkout knows where it is served."""
    workflow = (ROOT / ".github/workflows/site.yml").read_text(encoding="utf-8")
    read = set(re.findall(r"!ENV \[(\w+),", SETTINGS))
    assert read == {"SITE_URL", "REPOSITORY_URL"} and all(f"{name}: ${{{{" in workflow for name in read)
    assert "tests/docs/test_site.py" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_backends_are_those_of_the_code_in_their_order():
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (.*) \|$", start("backends.md").partition("Nothing falls back")[0], re.MULTILINE)
    assert [name for name, _ in rows] == [backend.name for backend in dispatch.backends()]
    by_name = [name for name, chosen_for in rows if chosen_for.startswith("nothing, unless it is asked for")]
    assert sorted(by_name) == sorted(backend.name for backend in dispatch.backends() if backend.by_name)


def test_commands_are_those_of_the_code():
    rows = re.findall(r"^\| `tilewise (\w+)` \|", start("command-line.md"), re.MULTILINE)
    assert sorted(rows) == sorted(grammar.COMMANDS)
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", start("command-line.md"), re.MULTILINE)}
    assert codes == {int(code) for code in re.findall(r"^  (\d+) ", grammar.EXIT_CODES, re.MULTILINE)}


def test_masks_are_those_of_the_code():
    table = start("masks.md").partition("## Masks are sets")[0]
    listed = set(re.findall(r"`(\w+)\(", "\n".join(line.partition(" | ")[0] for line in table.splitlines() if line.startswith("| `"))))
    public = {name for name in importlib.import_module("tilewise").__all__ if isinstance(getattr(masks, name, None), type)}
    assert listed == public - {"Mask", "Band", "Part"}  # the base class, and two that backends and ranks are made with


def test_a_plot_that_was_not_drawn_leaves_its_words(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    without_missing = importlib.import_module("site_hooks").without_missing
    text = "See [time](plots/time.svg), [a page](numerics.md).\n![Errors](../plots/a/e.svg)\n"
    assert without_missing(text, lambda target: True) == text
    kept = "See time, [a page](numerics.md).\n*(Errors: not drawn in this build)*\n"
    assert without_missing(text, lambda target: False) == kept
    assert without_missing(text, lambda target: target == "plots/time.svg").startswith("See [time](plots/time.svg)")


def test_no_line_breaks_in_short_code(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    short_code_whole = importlib.import_module("site_hooks").short_code_whole
    assert short_code_whole("with <code>--precision int8</code>") == 'with <code class="whole">--precision int8</code>'
    block, long = "<pre><code>pip install .\n</code></pre>", f"<code>{'x' * 31}</code>"
    assert short_code_whole(block + long) == block + long


def test_scripts_take_the_width_that_a_page_is_laid_out_in():
    """While a page loads, a phone's innerWidth counts what is too wide: the longest page was not folded."""
    assert not [path.name for path in DOCS.glob("javascripts/*.js") if "innerWidth" in path.read_text(encoding="utf-8")]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    if any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings", "mathjax")):
        pytest.skip("mkdocs is not installed: pip install -c constraints.txt '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "REPOSITORY_URL": "https://example.org/tilewise", "SITE_URL": ADDRESS, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


def test_the_site_builds_without_a_warning(built):
    pages = {path.relative_to(built).as_posix() for path in built.rglob("index.html")}
    assert len(pages) == len(named(SETTINGS))
    first = (built / "index.html").read_text(encoding="utf-8")
    for part in (
        "md-tabs",
        'data-md-color-scheme="slate"',
        "https://example.org/tilewise",
        'data-md-component="search"',
        "papers-h100.svg",
        "2026-",
    ):
        assert part in first, part
    assert (built / "search/search_index.json").stat().st_size > 100_000
    assert "fonts.googleapis" not in first
    assert f'property="og:image" content="{ADDRESS}social.png"' in first and 'name="twitter:card"' in first
    assert struct.unpack(">II", (built / "social.png").read_bytes()[16:24]) == (1200, 630)
    results = re.findall(r">Returns:</span></p>(.*?)</table>", (built / "api/index.html").read_text(encoding="utf-8"), re.DOTALL)
    assert results and all(table.count('"doc-section-item"') == 1 for table in results), "a result is cut up into its docstring's lines"


def test_the_site_serves_all_that_it_loads(built):
    """Scripts, styles, fonts and pictures of every page are files of the site; MathJax on the pages that have formulas, and on no other."""
    for path in built.rglob("index.html"):
        text = path.read_text(encoding="utf-8")
        tags = re.findall(r"<(?:script|img|source|link)\b[^>]*>", text)
        loaded = [tag for tag in tags if not tag.startswith("<link") or re.search(r'rel="(?:stylesheet|icon|preload)"', tag)]
        for target in re.findall(r'\s(?:src|href)="([^"]+)"', "".join(loaded)):
            assert not re.match(r"(?:https?:)?//", target), f"{path}: {target}"
            if not target.startswith("data:"):
                assert (path.parent / re.split("[?#]", target)[0]).exists(), f"{path}: {target}"
        assert ("mathjax/tex-chtml.js" in text) == ('class="arithmatex"' in text), path
    assert len(list((built / "javascripts/mathjax/output/chtml/fonts/woff-v2").glob("*.woff"))) > 10


PROBE = """<!doctype html><title>probe</title><body><script>
const pages = PAGES, found = {};
async function measure() {
  for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style.cssText = "width:WIDTHpx;height:800px;border:0";
    await new Promise(done => { frame.onload = done; frame.src = page; document.body.append(frame); });
    const root = frame.contentDocument.documentElement;
    for (let wait = 0; frame.contentDocument.querySelector(".arithmatex") && wait < 100; wait++) {
      if (frame.contentDocument.querySelector(".arithmatex mjx-container")) break;
      await new Promise(done => setTimeout(done, 50));
    }
    const wide = [...root.querySelectorAll("article *")].filter(e => e.getBoundingClientRect().right > WIDTH + 1 && !e.closest(SCROLLS));
    const formulas = [root.querySelectorAll(".arithmatex").length, root.querySelectorAll("mjx-container").length];
    const shown = [...root.querySelectorAll('article img[src$=".svg"]')].filter(e => e.offsetParent);
    const charts = shown.filter(e => e.width < SCALE * e.naturalWidth || e.height > TALLEST).map(e => [e.src, e.width, e.height]);
    found[page] = [root.scrollWidth, root.clientWidth, root.scrollHeight, formulas, wide.slice(0, 3).map(e => e.outerHTML.slice(0, 120)), charts];
    frame.remove();
  }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
}
measure();
</script>"""
SCROLLS = ".md-typeset__scrollwrap, pre, .arithmatex, p:has(> img)"  # boxes in which what is too wide scrolls


@needs_chromium
def test_no_page_is_wider_than_a_phone_or_without_an_end(built, tmp_path):
    pages = sorted(f"/{path.relative_to(built).as_posix()}" for path in built.rglob("index.html"))
    text = PROBE.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(PHONE)).replace("SCROLLS", json.dumps(SCROLLS))
    text = text.replace("SCALE", str(SCALE)).replace("TALLEST", str(TALLEST))
    (built / "probe.html").write_text(text, encoding="utf-8")
    found = found_by(built, "probe.html", tmp_path / "profile")
    assert found.keys() == set(pages)
    assert not {page: said for page, said in found.items() if said[0] > said[1]}
    assert not {page: height for page, (_, _, height, *_) in found.items() if height > HIGHEST}
    assert not {page: formulas for page, (_, _, _, formulas, *_) in found.items() if formulas[0] != formulas[1]}
    assert not {page: charts for page, (*_, charts) in found.items() if charts}


CUT = """<!doctype html><body><script>
async function measure() {
  const found = {};
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style.cssText = "width:1400px;height:800px;border:0";
    await new Promise(done => { frame.onload = done; frame.src = page; document.body.append(frame); });
    const code = [...frame.contentDocument.querySelectorAll("article pre > code")].filter(e => e.scrollWidth > e.clientWidth + 1);
    found[page] = code.map(e => e.textContent.split("\\n").reduce((a, b) => a.length < b.length ? b : a));
    frame.remove();
  }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
}
measure();
</script>"""


@needs_chromium
def test_no_code_is_cut_on_a_wide_screen(built, tmp_path):
    """Excerpts and listings of sources too, whose lines have up to 150 columns; what tools write may scroll."""
    pages = sorted(f"/{path.relative_to(built).as_posix()}" for path in built.rglob("index.html"))
    (built / "cut.html").write_text(CUT.replace("PAGES", json.dumps(pages)), encoding="utf-8")
    found = found_by(built, "cut.html", tmp_path / "profile")
    assert found.keys() == set(pages)
    assert not {page: lines for page, lines in found.items() if lines}


CONTRAST = 4.5  # of letters and what they stand on, at least (WCAG 2.2, 1.4.3)
LETTERS = """<!doctype html><body><script>
async function measure() {
  const found = {};
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const known = {};
  const parsed = colour => known[colour] ??= drawn(colour);
  const drawn = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = rgb => rgb.slice(0, 3).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  for (const page of PAGES) for (const scheme of ["default", "slate"]) {
    const frame = document.createElement("iframe");
    frame.style.cssText = "width:1400px;height:800px;border:0";
    await new Promise(done => { frame.onload = done; frame.src = page; document.body.append(frame); });
    const view = frame.contentWindow, body = frame.contentDocument.body;
    body.setAttribute("data-md-color-scheme", scheme);
    await new Promise(done => setTimeout(done, 400));
    const least = {}, grounds = new Map();
    const ground = at => {
      if (!at) return [255, 255, 255, 1];
      if (!grounds.has(at)) grounds.set(at, over(parsed(view.getComputedStyle(at).backgroundColor), ground(at.parentElement)));
      return grounds.get(at);
    };
    for (const e of body.querySelectorAll("article *, nav *")) {
      if (!e.offsetParent || e.closest("svg, mjx-container, .headerlink")) continue;
      if (![...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim())) continue;
      const under = ground(e);
      const [a, b] = [over(parsed(view.getComputedStyle(e).color), under), under].map(light);
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const name = e.tagName + "." + e.className;
      if (!(least[name] && least[name][0] <= ratio)) least[name] = [ratio, e.textContent.slice(0, 40)];
    }
    found[page + " " + scheme] = least;
    frame.remove();
  }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
}
measure().catch(error => fetch("/found", {method: "POST", body: JSON.stringify(String(error))}));
</script>"""


@needs_chromium
def test_letters_stand_out_from_what_they_stand_on(built, tmp_path):
    pages = [
        "/index.html",
        "/worklog/k5/index.html",
        "/worklog/explore/index.html",
        "/benchmarks/index.html",
        "/guide/transformers/index.html",
    ]
    assert all((built / page[1:]).exists() for page in pages)
    (built / "letters.html").write_text(LETTERS.replace("PAGES", json.dumps(pages)), encoding="utf-8")
    found = found_by(built, "letters.html", tmp_path / "profile")
    assert isinstance(found, dict), found
    faint = {page: {name: each for name, each in least.items() if each[0] < CONTRAST} for page, least in found.items()}
    assert len(found) == 2 * len(pages) and all(len(least) > 5 for least in found.values())
    assert not any(faint.values()), json.dumps(faint)
