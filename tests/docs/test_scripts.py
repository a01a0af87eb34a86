"""What the site's scripts do with a page, in a browser: long tables are sorted and filtered, long pages are folded on a phone."""

import pytest
from browser import found_by, needs_chromium
from worklog_pages import ROOT

SCRIPTS = ROOT / "docs" / "javascripts"
ROWS = [
    ("1,024", "0.76 fa4", "causal"),
    ("8k", "12.5 sdpa:cudnn", "full"),
    ("16k", "–", "full"),
    ("512", "1.3e-3", "causal"),
    ("2k", "-3.5", "window"),
    ("128", "", "causal <b>bold</b>"),
    ("64", "7", "Full"),
    ("32", "0.5 fa4", "causal"),
]
PAGE = """<!doctype html><meta charset="utf-8"><style>.fold[hidden], tr[hidden] {display: none}</style><article>
<h1>Page</h1><p>first</p>
<h2 id="one">One<a class="headerlink" href="#one">#</a></h2><div id="inner" style="height: HEIGHTpx">text</div><h3 id="sub">Sub</h3>
<h2 id="two">Two</h2>
<table id="long"><thead><tr><th>tokens</th><th>ms</th><th></th></tr></thead><tbody>ROWS</tbody></table>
<table id="short"><thead><tr><th>a</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>
<h2 id="three">Three</h2>
</article><script src="tables.js"></script><script src="fold.js"></script>"""
PROBE = """<!doctype html><body><script>
const found = {};
addEventListener("unhandledrejection", event => fetch("/found", {method: "POST", body: JSON.stringify({error: String(event.reason)})}));
const load = (page, width) => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:800px;border:0`;
  frame.onload = () => done(frame.contentDocument);
  frame.src = page;
  document.body.append(frame);
});
const seen = element => element.getClientRects().length > 0;
(async () => {
  let page = await load("short.html", 400);
  const table = page.getElementById("long"), rows = () => [...table.tBodies[0].rows];
  const column = n => rows().map(row => row.cells[n].textContent);
  const input = page.querySelector(".table-bar input"), count = page.querySelector(".table-bar span");
  found.bars = page.querySelectorAll(".table-bar").length;
  found.sorted = [];
  for (const n of [0, 0, 1, 1, 2]) {
    const heading = table.tHead.rows[0].cells[n];
    heading.querySelector("button").click();
    found.sorted.push([column(n), heading.ariaSort]);
  }
  found.filtered = [];
  for (const words of ["CAUSAL fa4", "nothing here", ""]) {
    input.value = words;
    input.dispatchEvent(new Event("input"));
    found.filtered.push([rows().filter(seen).length, count.textContent]);
  }
  found.unfolded = page.querySelectorAll(".fold").length;
  found.wide = (await load("long.html", 1400)).querySelectorAll(".fold").length;
  page = await load("long.html", 400);
  const heading = page.querySelector("#one .fold-button"), inner = page.getElementById("inner");
  found.fold = [page.documentElement.scrollHeight, seen(inner), seen(page.getElementById("two")), page.querySelectorAll(".fold").length];
  heading.click();
  found.opened = [seen(inner), heading.ariaExpanded];
  heading.click();
  found.closed = [seen(inner), heading.ariaExpanded];
  found.addressed = [];
  for (const target of ["long.html#sub", "long.html#one", "long.html#missing"]) {
    found.addressed.push(seen((await load(`${target.replace("#", "?" + Math.random() + "#")}`, 400)).getElementById("inner")));
  }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in ROWS)
    for name, height in (("short", 100), ("long", 30_000)):
        (folder / f"{name}.html").write_text(PAGE.replace("ROWS", rows).replace("HEIGHT", str(height)), encoding="utf-8")
    (folder / "page.html").write_text(PROBE, encoding="utf-8")
    for script in ("tables.js", "fold.js"):
        (folder / script).symlink_to(SCRIPTS / script)
    found = found_by(folder, "page.html", folder / "profile", timeout_s=60)
    assert "error" not in found, found["error"]
    return found


@needs_chromium
def test_a_click_on_a_heading_sorts_numbers_as_numbers(found):
    assert found["bars"] == 1  # the short table has none
    (down, way), (up, other), (ms, _), (ms_up, _), (words, _) = found["sorted"]
    assert down == ["16k", "8k", "2k", "1,024", "512", "128", "64", "32"] and way == "descending"
    assert up == down[::-1] and other == "ascending"
    assert ms[:-2] == ["12.5 sdpa:cudnn", "7", "0.76 fa4", "0.5 fa4", "1.3e-3", "-3.5"] and sorted(ms[-2:]) == [
        "",
        "–",
    ]  # what is empty is last
    assert ms_up[:-2] == ms[:-2][::-1] and sorted(ms_up[-2:]) == ["", "–"]
    assert words[0] == "window" and words[-1] == "causal"


@needs_chromium
def test_words_filter_rows(found):
    assert found["filtered"] == [[2, "2 of 8 rows"], [0, "0 of 8 rows"], [8, "8 rows"]]


@needs_chromium
def test_a_long_page_is_folded_on_a_phone_alone(found):
    assert found["unfolded"] == 0 and found["wide"] == 0
    height, inner, two, sections = found["fold"]
    assert height < 2000 and not inner and two and sections == 2  # the last heading has nothing to fold
    assert found["opened"] == [True, "true"] and found["closed"] == [False, "false"]


@needs_chromium
def test_a_link_into_a_section_opens_it(found):
    assert found["addressed"] == [True, True, False]
