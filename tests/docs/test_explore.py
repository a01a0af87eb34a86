"""The page that computes what a tile costs and plays traces: in a browser its numbers are Python's, and its forms show them."""

import json
import random
import re
from dataclasses import asdict
from xml.etree import ElementTree

import pytest
import torch
from browser import found_by, needs_chromium
from worklog_pages import FOLDER, ROOT, TEXTS

from tilewise import bench
from tilewise.cli import ladder as command
from tilewise.ladder.tracing import OF_GRADIENTS, WORDS
from tilewise.machine.roofline import Shape, Tile, estimate
from tilewise.machine.sheets import MACHINES
from tilewise.masks import Causal, Full

SCRIPTS = ROOT / "docs" / "javascripts"
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
TRACES = sorted(path.stem for path in (FOLDER / "traces").iterdir())
PAGE = """<!doctype html><meta charset="utf-8"><div id="explore"></div>DATA
<div id="trace-player" data-folder="traces" data-first="k6" data-traces="TRACES"></div>
<script src="model.js"></script><script src="trace.js"></script><script src="explore.js"></script>
<script>
const wait = () => new Promise(done => setTimeout(done, 50));
const lines = () => [...document.querySelectorAll("#explore-results tr")];
const shown = () => Object.fromEntries(lines().map(row => [row.cells[0].textContent, row.cells.item(1)?.textContent ?? ""]));
(async () => {
  const found = {errors: [], estimates: [], forms: [], traces: {}};
  addEventListener("error", event => found.errors.push(event.message));
  const { machines } = JSON.parse(document.getElementById("explore-data").textContent);
  for (const [call, tile, machine] of CASES) found.estimates.push(tilewise.estimate(call, tile, machines[machine]));
  for (const changes of FORMS) {
    for (const [name, value] of changes) {
      const input = document.querySelector(`[name=${name}]`);
      input.value = value;
      input.dispatchEvent(new Event("input", {bubbles: true}));
    }
    found.forms.push(shown());
  }
  for (const name of "TRACES".split(" ")) {
    const trace = traces.parse(await (await fetch(`traces/${name}.svg`)).text());
    found.traces[name] = {phases: trace.phases, panels: trace.panels.map(panel => ({...panel, spent: traces.shares(panel, panel.end)}))};
  }
  const player = document.getElementById("trace-player");
  while (!player.querySelector("rect")) await wait();
  const slider = player.querySelector("input");
  slider.value = 500;
  slider.dispatchEvent(new Event("input"));
  const count = what => player.querySelectorAll(what).length;
  found.player = [count("rect"), player.querySelector(".trace-title").textContent, count(".trace-now tr"), count(".trace-legend .trace-mark")];
  player.querySelector("button").click();
  while (+slider.value <= 500) await wait();
  player.querySelector("button").click();
  found.played = +slider.value;
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


def cases(count: int) -> list[tuple[dict, dict, str]]:
    """Calls and tiles of all kinds: odd lengths, tiles that do not fit, scores in shared memory, eight bits."""
    draw = random.Random(53)
    found = []
    for _ in range(count):
        machine, dtype = draw.choice([("A100", "bf16"), ("H100", "bf16"), ("H200", "bf16"), ("H100", "e4m3"), ("H200", "e4m3")])
        call = {
            "batch": draw.choice((1, 2, 7)),
            "heads": draw.choice((1, 3, 16, 64)),
            "seqlen": draw.choice((1, 17, 128, 1000, 4096, 8191, 65536)),
            "head_dim": draw.choice((64, 72, 96, 128, 192, 256)),
            "dtype": dtype,
            "causal": draw.random() < 0.5,
        }
        tile = {
            "tile_m": draw.choice((16, 64, 128, 192, 320)),
            "tile_n": draw.choice((16, 64, 80, 128, 256)),
            "stages": draw.randint(1, 6),
            "threads": draw.choice((32, 128, 256, 384, 1024)),
            "scores_bytes": draw.choice((0, 2, 4)),
            "kv_shared": draw.random() < 0.3,
        }
        found.append((call, tile, machine))
    return found


CASES = cases(200)
FORMS = [
    [["rung", "k4_2"]],
    [["stages", 2]],
    [["rung", "k7"], ["head_dim", 64]],
    [["machine", "A100"]],
    [["machine", "H100"], ["head_dim", 128], ["rung", "k6"], ["tile_n", 256]],
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explore")
    data = re.search(r'<script type="application/json" id="explore-data">.*?</script>', TEXTS["explore.md"])[0]
    text = PAGE.replace("DATA", data).replace("TRACES", " ".join(TRACES))
    (folder / "page.html").write_text(text.replace("CASES", json.dumps(CASES)).replace("FORMS", json.dumps(FORMS)), encoding="utf-8")
    for script in ("model.js", "trace.js", "explore.js"):
        (folder / script).symlink_to(SCRIPTS / script)
    (folder / "traces").symlink_to(FOLDER / "traces")
    return found_by(folder, "page.html", folder / "profile", timeout_s=60)


@needs_chromium
def test_numbers_are_pythons(found):
    assert not found["errors"] and len(found["estimates"]) == len(CASES)
    for (call, tile, machine), shown in zip(CASES, found["estimates"], strict=True):
        mask = Causal() if call["causal"] else Full()
        shape = Shape(
            batch=call["batch"], seqlen_q=call["seqlen"], seqlen_k=call["seqlen"], heads_q=call["heads"], heads_k=call["heads"],
            head_dim=call["head_dim"], dtype=DTYPES[call["dtype"]], pairs=mask.pairs(call["seqlen"], call["seqlen"], call["batch"], call["heads"]),
        )  # fmt: skip
        names = {"stages": "kv_stages"}
        own = Tile(**{names.get(name, name): value for name, value in tile.items()})
        wanted = estimate(shape, machine=MACHINES[machine], tile=own)
        assert shown["flops"] == wanted.flops and shown["bytes"] == wanted.bytes, (call, tile)
        assert shown["shared_bytes"] == wanted.smem_bytes and shown["accumulators"] == wanted.registers, (call, tile)
        assert shown["blocks_per_sm"] == wanted.blocks_per_sm, (call, tile, machine)
        assert shown["bound"] == wanted.bound and shown["attainable"] == pytest.approx(wanted.attainable, rel=1e-12)
        assert shown["seconds"][shown["bound"]] == pytest.approx(wanted.seconds, rel=1e-12)
        launch = asdict(wanted.launches["FA2"])
        assert {name: shown[name] for name in launch} == pytest.approx(launch, rel=1e-12)


@needs_chromium
def test_clocks_of_a_step_are_the_worklogs(found):
    """Those of K6's page, for bf16."""
    namespace: dict = {}
    block = next(block for block in re.findall(r"```python\n(.*?)```", TEXTS["k6.md"], re.DOTALL) if "def clocks" in block)
    exec(block, namespace)
    for (call, tile, _), shown in zip(CASES, found["estimates"], strict=True):
        if call["dtype"] == "bf16":
            products, softmax, _ = namespace["clocks"](call["head_dim"], tile["tile_n"])
            assert (shown["products"], shown["softmax"]) == (products, softmax)
            assert shown["in_step"] == pytest.approx(products / (products + softmax))


@needs_chromium
def test_forms_show_what_was_chosen(found):
    k4_2, two_stages, k7, a100, wide = found["forms"]
    assert k4_2["shared memory of a block"].startswith("176 KB of 227") and k4_2["blocks on an SM"].startswith(
        "1, limited by shared memory"
    )
    assert two_stages["shared memory of a block"].startswith("80 KB") and two_stages["blocks on an SM"].startswith("2,")
    assert k7["predicted bound"].startswith("exponentials")
    assert list(a100) == ["A100 SXM 80GB has no tensor cores for e4m3"]
    assert "more than one block may have" in wide["shared memory of a block"] and "does not fit" in wide["blocks on an SM"]
    assert "a thread has 255" in wide["accumulators of a thread"]


@needs_chromium
@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_read_as_it_is_drawn(found, name):
    """Boxes, lanes and colours against the picture, by another reader."""
    root = ElementTree.parse(FOLDER / "traces" / f"{name}.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    shown = found["traces"][name]
    assert set(shown["phases"]) <= {*WORDS.values(), *OF_GRADIENTS.values()} and len(set(shown["phases"].values())) == len(shown["phases"])
    axes = [each for each in root.iter(f"{svg}g") if each.get("id", "").startswith("axes_")]
    assert len(shown["panels"]) == len(axes) == 2
    for panel, group in zip(shown["panels"], axes, strict=True):
        boxes = [path for each in group.iter(f"{svg}g") if "PolyCollection" in each.get("id", "") for path in each.iter(f"{svg}path")]
        spans = [span for lane in panel["lanes"] for span in lane["spans"]]
        assert len(boxes) == len(spans) > 0
        widths: dict[str, float] = {}
        for path in boxes:
            xs = [float(x) for x in re.findall(r"[ML] ([\d.-]+) ", path.get("d"))]
            colour = re.search(r"#\w+", path.get("style"))[0]
            widths[colour] = widths.get(colour, 0) + max(xs) - min(xs)
        spent: dict[str, float] = {}
        for lane in panel["spent"]:
            for phase, us in lane.items():
                spent[phase] = spent.get(phase, 0) + us
        whole = sum(widths.values()) / sum(spent.values())
        assert {shown["phases"][phase]: us * whole for phase, us in spent.items()} == pytest.approx(widths, rel=1e-6)
        for lane in panel["lanes"]:
            assert lane["name"].startswith("warp ")
            assert all(one["end"] <= other["start"] + 1e-3 for one, other in zip(lane["spans"], lane["spans"][1:], strict=False))
    start, steady = shown["panels"]
    assert start["name"] == "the beginning" and abs(start["start"]) < 0.01 and steady["name"] == "steady state"


@needs_chromium
def test_a_trace_is_played(found):
    boxes, title, lanes, legend = found["player"]
    assert (
        boxes > 20
        and lanes == 3
        and legend == len(found["traces"]["k6"]["phases"])
        and title.startswith("k6, NVIDIA H100 80GB HBM3")
        and title.endswith(" us")
    )
    assert 500 < found["played"] <= 1000


def test_answers_of_the_exercises_are_there(capsys):
    """Each command prints what was measured, of all that it names, on a machine without a GPU."""
    commands = re.findall(r"^((?:[A-Z]+=\S+ )*)python -m tilewise\.ladder --measured (.+)$", TEXTS["explore.md"], re.MULTILINE)
    assert len(commands) == 5
    for environment, names in commands:
        arguments = names.split()
        assert command.main(["--measured", *arguments], dict(each.split("=") for each in environment.split())) == 0
        out = capsys.readouterr().out
        assert all(contender.name in out for contender in bench.find(",".join(arguments))), names


def test_the_page_names_every_trace():
    assert sorted(re.search(r'data-traces="([^"]+)"', TEXTS["explore.md"])[1].split()) == TRACES
