"""Training steps: the model trains, contenders are checked and timed on one model, and memory that runs out is said in rows."""

import json
import xml.etree.ElementTree as ET
from dataclasses import dataclass, replace

import pytest
import torch

from tilewise.bench import tables, training
from tilewise.bench.peers import Naive, Sdpa, Tilewise
from tilewise.bench.plots import save_trainings, training_svg
from tilewise.bench.store import Row, append, load
from tilewise.bench.tables.training import training_table
from tilewise.bench.training import GPT, SIZES, Plan, Training, fewer, flops_of_step, parts_of, train
from tilewise.cli import grammar
from tilewise.machine.sheets import H100

CPU = torch.device("cpu")
TINY = replace(SIZES["tiny"], hidden=16, heads=1)
PLAN = Plan(budget_s=0.0, tokens=16)
SEQLEN = 8


@pytest.fixture(scope="module")
def rows():
    return train([TINY], [SEQLEN], [Tilewise(), Sdpa("math"), Sdpa("cudnn")], device=CPU, plan=PLAN)


def test_rows_are_complete(rows):
    ours, math, cudnn = rows
    assert [row.impl for row in rows] == ["tilewise", "sdpa:math", "sdpa:cudnn"]
    for row in (ours, math):
        assert row.passed and row.reason is None and row.clock == "wall" and row.samples >= 3
        assert row.tokens_per_s == pytest.approx(16 / row.median_s) and row.flops_per_s == pytest.approx(row.flops / row.median_s)
        assert row.mfu is None and row.peak_bytes is None and row.environment["torch"] == torch.__version__
    assert cudnn.reason == "torch has no cudnn kernel on a CPU" and cudnn.median_s is None and cudnn.passed is None
    assert (ours.case["model"], ours.case["layers"], ours.case["batch"], ours.case["seqlen_q"]) == ("tiny", 2, 2, SEQLEN)


def weights_of(size, layers):
    return layers * (12 * size.hidden**2 + 13 * size.hidden) + size.vocabulary * size.hidden + 2 * size.hidden


@pytest.mark.parametrize(("name", "layers", "heads", "billions"), [("1.3B", 24, 16, 1.31), ("2.7B", 32, 20, 2.65)])
def test_sizes_are_those_of_the_table(name, layers, heads, billions):
    size = SIZES[name]
    assert (size.layers, size.heads, size.head_dim) == (layers, heads, 128)
    assert weights_of(size, layers) == pytest.approx(billions * 1e9, rel=0.01)


def test_weights_and_flops_are_counted_by_the_formula():
    model = GPT(TINY, 3, SEQLEN, dtype=torch.float32, device=CPU)
    assert model.weights == weights_of(TINY, 3)
    assert flops_of_step(1000, 3, 16, 8, 32) == 32 * (6 * 1000 + 12 * 3 * 16 * 8)
    assert Training(TINY, 2, SEQLEN, PLAN, CPU).flops == 16 * (6 * weights_of(TINY, 2) + 12 * 2 * TINY.hidden * SEQLEN)


def test_the_model_learns():
    run = Training(TINY, 2, SEQLEN, replace(PLAN, autocast=True), CPU)
    attend = Tilewise().prepare(training.attention_of(TINY, SEQLEN, 2), CPU)
    run.optimiser.param_groups[0]["lr"] = 1e-2
    with torch.no_grad():
        before = run.loss(run.tokens, attend)
    for _ in range(8):
        run.step(attend, 2)
    with torch.no_grad():
        assert run.loss(run.tokens, attend) < before - 0.5


@pytest.mark.parametrize("part", [1, 2])
def test_parts_of_a_batch_add_up_to_its_gradient(part):
    run = Training(TINY, 1, SEQLEN, replace(PLAN, autocast=True), CPU)
    attend = Naive().prepare(training.attention_of(TINY, SEQLEN, part), CPU)
    kept = {}
    run.optimiser.step = lambda: kept.update({name: x.grad.clone() for name, x in run.model.named_parameters()})
    run.step(attend, part)
    run.model.zero_grad()
    run.loss(run.tokens, attend).backward()
    for name, x in run.model.named_parameters():
        torch.testing.assert_close(kept[name], x.grad, rtol=5e-2, atol=5e-4)


def test_logits_in_parts_are_the_same_loss(monkeypatch):
    run, found = Training(TINY, 1, SEQLEN, PLAN, CPU), []
    run.model.float()
    attend = Naive().prepare(training.attention_of(TINY, SEQLEN, 2), CPU)
    for at_a_time in (2 * SEQLEN, 2 * SEQLEN - 5):
        monkeypatch.setattr(training, "AT_A_TIME", at_a_time)
        run.model.zero_grad()
        loss = run.model.loss(run.tokens, attend)
        loss.backward()
        found.append([loss.detach(), *(x.grad.clone() for x in run.model.parameters())])
    torch.testing.assert_close(*found)


def test_what_is_tried_where_memory_runs_out():
    assert list(fewer(32))[:4] == [32, 28, 25, 22] and list(fewer(3)) == [3, 2, 1]
    assert parts_of(8) == [8, 4, 2, 1] and parts_of(6) == [6, 3] and parts_of(1) == [1]


@dataclass(frozen=True)
class Hungry(Naive):
    """Out of memory in a step, beyond some sequences at a time or some layers of the model."""

    name: str = "hungry"
    most_sequences: int = 8
    most_layers: int = 8

    def prepare(self, workload, device):
        right = Naive().prepare(workload, device)

        def attend(q, k, v):
            run = RUNNING[-1]
            if run.stepping and (len(q) > self.most_sequences or run.layers > self.most_layers):
                raise torch.OutOfMemoryError("no more")
            return right(q, k, v)

        return attend


RUNNING = []


@pytest.fixture
def watched(monkeypatch):
    class Watched(Training):
        stepping = False

        def __post_init__(self):
            super().__post_init__()
            RUNNING.append(self)

        def step(self, attend, part):
            self.stepping = True
            super().step(attend, part)

    monkeypatch.setattr(training, "Training", Watched)
    yield
    RUNNING.clear()


def test_a_batch_is_taken_in_parts_where_memory_asks(watched):
    hungry, fine = train([TINY], [SEQLEN], [Hungry(most_sequences=1), Naive()], device=CPU, plan=PLAN)
    assert hungry.reason == "1 of 2 sequences at a time, as memory asks" and hungry.median_s > 0
    assert fine.reason is None and hungry.case == fine.case


def test_layers_are_fewer_where_memory_asks_and_the_row_says_so(watched):
    rows = train([replace(TINY, layers=3)], [SEQLEN], [Naive(), Hungry(most_layers=2)], device=CPU, plan=PLAN)
    assert [row.case["layers"] for row in rows] == [2, 2] and all(row.median_s > 0 for row in rows)
    assert "2 of its 3 layers" in training_table(rows)


def test_who_keeps_score_matrices_asks_nobody_for_fewer_layers(watched):
    math, fine = train([TINY], [SEQLEN], [Hungry(name="sdpa:math", most_layers=0), Tilewise()], device=CPU, plan=PLAN)
    assert math.reason == "out of memory, with 1 sequence at a time" and math.median_s is None
    assert fine.median_s > 0 and fine.case["layers"] == 2
    assert "| no flash (sdpa:math) | – | – | – | – | out of memory, with 1 sequence at a time |" in training_table([math, fine])


@dataclass(frozen=True)
class Spoiled(Naive):
    name: str = "spoiled"
    error: type = AssertionError

    def prepare(self, workload, device):
        right = Naive().prepare(workload, device)

        def attend(q, k, v):
            if self.error is not AssertionError:
                raise self.error("no such kernel")
            return right(q, k, v) * 1.1

        return attend


def test_a_wrong_contender_is_not_timed_and_one_that_breaks_takes_nobody_along():
    impls = [Spoiled(), Spoiled(name="broken", error=OSError), Naive()]
    wrong, broken, fine = train([TINY], [SEQLEN], impls, device=CPU, plan=PLAN)
    assert wrong.passed is False and wrong.reason.startswith("missed the tolerance: o") and wrong.median_s is None
    assert broken.reason == "cannot run this: OSError: no such kernel" and broken.passed is None and fine.median_s > 0


def test_contenders_are_checked_on_views_as_the_model_gives_them():
    @dataclass(frozen=True)
    class Blind(Naive):
        """Reads memory as if it were contiguous."""

        name: str = "blind"

        def prepare(self, workload, device):
            right = Naive().prepare(workload, device)
            return lambda *qkv: right(*(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()) for x in qkv))

    (row,) = train([TINY], [SEQLEN], [Blind()], device=CPU, plan=PLAN)
    assert row.passed is False and row.reason.startswith("missed the tolerance: o")


def test_a_cell_that_fails_stops_nothing_and_none_is_begun_after_the_limit():
    broken = replace(TINY, vocabulary=0)
    rows = train([broken, TINY], [SEQLEN], [Naive()], device=CPU, plan=PLAN)
    assert rows[0].reason.startswith("this workload cannot be measured: ") and rows[1].median_s > 0
    assert train([TINY], [SEQLEN], [Naive()], device=CPU, plan=replace(PLAN, limit_s=-1.0)) == []


def on_a_gpu(row: Row, tokens: float, **case) -> Row:
    mfu = {
        "tokens_per_s": tokens,
        "flops_per_s": tokens * 1e10,
        "mfu": tokens * 1e10 / H100.peak[torch.bfloat16],
        "peak_bytes": 42_500_000_000,
    }
    environment = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "date": "2026-11-26"}
    return replace(row, **mfu, case={**row.case, **case}, environment=environment)


def test_the_table(rows):
    ours, math, cudnn = rows
    made = [
        on_a_gpu(ours, 50_000.0),
        on_a_gpu(math, 25_000.0),
        replace(on_a_gpu(cudnn, 1.0), tokens_per_s=None, reason="out of memory | so"),
    ]
    lines = training_table(made).splitlines()
    assert lines[2] == "| GPT tiny, 8: 2 layers, 2 x 8 tokens a step | tilewise | **50,000** | **500** | **50.5%** | **42.5** |  |"
    assert lines[3] == "|  | no flash (sdpa:math) | 25,000 | 250 | 25.3% | 42.5 |  |"
    assert lines[4] == "|  | sdpa:cudnn | – | – | – | – | out of memory \\| so |"
    again = [on_a_gpu(ours, 60_000.0, layers=1)]  # another number of layers replaces the cell
    assert training_table(made + again).count("tilewise") == 1 and "1 of its 2 layers" in training_table(made + again)
    marked = "<!-- tilewise:begin training:training::h100 -->\n<!-- tilewise:end training:training::h100 -->\n"
    assert "**50,000**" in tables.fill(marked, made) and "50,000" not in tables.fill(marked, rows)


def test_the_chart(rows, tmp_path):
    made = [on_a_gpu(row, 50_000.0, seqlen_q=length) for length in (2048, 16384) for row in rows[:2]]
    made[-1] = replace(made[-1], median_s=None, flops_per_s=None, reason="out of memory, with 1 sequence at a time")
    (path,) = save_trainings([*made, replace(made[0], name="papers")], tmp_path)
    assert path.name == "training-nvidia-h100-80gb-hbm3.svg"
    text = path.read_text()
    assert ET.fromstring(text).tag.endswith("svg") and text == training_svg(made)
    for label in ("GPT tiny", "2k", "16k", "tilewise", "no flash (sdpa:math)", "out of memory"):
        assert f">{label}<" in text
    assert save_trainings([], tmp_path) == []
    with pytest.raises(ValueError, match="no row of a training has a time to draw"):
        training_svg([made[-1]])


def test_rows_survive_the_file(rows, tmp_path):
    append(tmp_path / "rows.jsonl", rows)
    assert load(tmp_path / "rows.jsonl") == rows


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SIZES, "tiny", TINY)
    small = ["--model", "tiny", "--seqlen", "8", "--tokens", "8", "--device", "cpu", "--budget", "0.001"]
    assert grammar.main(["bench", "train", "tilewise", *small, "--out", "rows.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "GPT tiny, 8 tokens" in out and "| tilewise | **" in out and "1 rows appended to rows.jsonl" in out
    (row,) = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (row["name"], row["impl"], row["passed"]) == ("training", "tilewise", True)
    document = tmp_path / "page.md"
    document.write_text("<!-- tilewise:begin training -->\n<!-- tilewise:end training -->\n")
    assert grammar.main(["report", "rows.jsonl", "--docs", str(document), "--plots", "plots"]) == 0
    assert "| tilewise | **" in document.read_text() and len(list((tmp_path / "plots").glob("training-*.svg"))) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--model", "9B"], "model is '9B'; each item of its comma-separated list must be one of 1.3B, 2.7B, tiny"),
        (["train", "--heads", "8"], "train fixes what is computed, so heads cannot be given with it; model, layers and seqlen can"),
        (["train", "--seqlen", "8,x"], "seqlen is '8,x'; of train it must be a comma-separated list of positive numbers"),
        (["train", "sdpa", "--impl", "naive"], "the contenders are named twice"),
        (["--layers", "2"], "layers: an option of `bench train` alone; write `tilewise bench train --layers ...`"),
        (["--set", "models", "--only", "GPT-9"], "only is 'GPT-9', which matches none of the workloads Llama-3-8B"),
    ],
)
def test_wrong_usage(arguments, said, capsys):
    assert grammar.main(["bench", *arguments, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err
