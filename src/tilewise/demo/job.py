"""The demo from end to end: train, sweep, write the page, print the numbers."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tilewise
from tilewise.bench.provenance import provenance
from tilewise.demo import data, pictures, share
from tilewise.demo.model import GPTConfig, sdpa_attention, tilewise_attention
from tilewise.demo.numbers import byline, ended_early, megabytes, milliseconds, verdict, what_was_trained
from tilewise.demo.page import Report, render
from tilewise.demo.place import CPU, Place, place_of
from tilewise.demo.sweep import Sweep, sweep
from tilewise.demo.train import TrainConfig, Training, train
from tilewise.display.progress import progress

ATTENTIONS = {"tilewise": tilewise_attention, "SDPA": sdpa_attention}
SIZES = {
    "cpu": {"batch": 2, "context": 1024, "seqlens": (512, 1024, 2048, 4096, 8192)},
    "cuda": {"batch": 16, "context": 4096, "seqlens": (1024, 2048, 4096, 8192, 16384, 32768)},
}
"""What the demo takes where it is not told: a GPU has more to do in a step than a CPU, or its host would be all that is timed."""
TRAINING_SHARE = 0.6  # of the time budget; the sweep has the rest


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `tilewise demo` was asked for. `budget_s` bounds training and sweep together; a step or a length is never cut short."""

    batch: int
    context: int
    seqlens: tuple[int, ...]
    place: Place = CPU
    steps: int = 100
    seed: int = 0
    budget_s: float = 100.0
    out: Path = Path("tilewise-report.html")
    line: str = "tilewise demo"  # the command

    @property
    def picture(self) -> Path:
        """Next to the page."""
        return self.out.with_name(f"{self.out.stem}-picture.png")


def options(device: torch.device | None = None, **given) -> Options:
    """The options of a run on `device`, by default a GPU where there is one; what is not given, or None, is SIZES' for such a device."""
    place = place_of(device)
    sizes = SIZES["cuda" if place.device.type == "cuda" else "cpu"]
    return Options(place=place, **{**sizes, **{name: value for name, value in given.items() if value is not None}})


def run(options: Options, console: Console) -> bool:
    """Run the demo; True when the two trainings agree. Writes `options.out` and `options.picture`, in a folder that must exist.

    Raises ValueError for a context longer than the text, OSError where the page cannot be written.
    """
    import matplotlib  # noqa: F401  (the page is drawn with it at the end: where it is missing, that is said before the work)

    start = time.monotonic()
    data.check_context(data.split(data.corpus())[1], options.context)
    model = GPTConfig(context=options.context)
    explanation = explain(model, options.batch, options.place)  # before the work: it refuses where no backend can run
    with progress(console) as bars:
        training = _train(options, model, start + TRAINING_SHARE * options.budget_s, bars)
        measured = _sweep(options, model, start + options.budget_s, bars)
        report = Report(
            training=training,
            sweep=measured,
            explanation=explanation,
            pictures=pictures.draw(),
            machine=machine(options.place),
            seconds=time.monotonic() - start,
            command=options.line,
        )
        report = replace(report, picture=share.draw(report))
        options.picture.write_bytes(report.picture)
        options.out.write_text(render(report), encoding="utf-8")
    console.print(training_table(training))
    console.print(sweep_table(measured))
    for sentence in measured.omitted:
        console.print(sentence, style="dim", highlight=False)
    console.print(f"\n{explanation.rstrip()}\n", highlight=False, markup=False)
    if early := ended_early(training):
        console.print(f"{early}\n", style="bold yellow", highlight=False, markup=False)
    console.print(verdict(training), style="bold green" if training.same else "bold red")
    console.print(f"Report: {options.out.resolve()}", highlight=False, soft_wrap=True)
    console.print(byline(report), style="dim", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Picture to share: {options.picture.resolve()}", highlight=False, soft_wrap=True)
    return training.same


def _train(options: Options, model: GPTConfig, deadline: float, bars: Progress) -> Training:
    config = TrainConfig(steps=options.steps, batch=options.batch, seed=options.seed)
    task = bars.add_task("Training both models", total=config.steps, note="")

    def on_step(done: int, losses: list[float]) -> None:
        bars.update(
            task, completed=done, note="loss " + "  ".join(f"{name} {loss:.4f}" for name, loss in zip(ATTENTIONS, losses, strict=True))
        )

    training = train(ATTENTIONS, model, config, place=options.place, deadline=deadline, on_step=on_step)
    bars.update(task, total=training.steps)
    return training


def _sweep(options: Options, model: GPTConfig, deadline: float, bars: Progress) -> Sweep:
    task = bars.add_task("Attention alone", total=len(set(options.seqlens)), note="")

    def on_point(seqlen: int) -> None:
        bars.update(task, advance=1, note=f"{seqlen:,} tokens")

    measured = sweep(ATTENTIONS, options.seqlens, model, place=options.place, deadline=deadline, on_point=on_point)
    bars.update(task, total=len({point.seqlen for point in measured.points}))
    return measured


def explain(model: GPTConfig, batch: int, place: Place) -> str:
    """What `tilewise.explain` says about the attention of the model that was trained."""
    shapes = ((batch, model.context, heads, model.head_dim) for heads in (model.heads_q, model.heads_k, model.heads_k))
    q, k, v = (torch.empty(shape, device=place.device, dtype=place.dtype) for shape in shapes)
    return str(tilewise.explain(q.requires_grad_(), k, v, causal=True))


def machine(place: Place) -> tuple[tuple[str, str], ...]:
    """Where the numbers come from, as (name, value)."""
    return tuple((name, str(value)) for name, value in provenance(place.device).items() if value is not None)


def training_table(training: Training) -> Table:
    table = Table(title=f"Training, {what_was_trained(training)}", title_justify="left")
    for column in ("attention", "first loss", "last loss", "held-out", "a step", "peak memory"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for curve in training.curves:
        losses = (f"{loss:.4f}" for loss in (curve.losses[0], curve.losses[-1], curve.held_out))
        table.add_row(curve.name, *losses, milliseconds(curve.median_ms), megabytes(curve.peak_bytes))
    return table


def sweep_table(sweep: Sweep) -> Table:
    """One row a length; every cell has one number for each contender."""
    names = " / ".join(sweep.names)
    table = Table(title=f"Attention alone, causal, {sweep.place.name}, forward + backward ({names})", title_justify="left")
    for column in ("tokens", "time, ms", "peak extra memory, MB", "largest error of O"):
        table.add_column(column, justify="right")
    for seqlen in sorted({point.seqlen for point in sweep.points}):
        points = [next((point for point in sweep.of(name) if point.seqlen == seqlen), None) for name in sweep.names]
        cells = (
            ["-" if point is None else milliseconds(point.both_ms).removesuffix(" ms") for point in points],
            ["-" if point is None or point.peak_bytes is None else f"{point.peak_bytes / 1e6:,.0f}" for point in points],
            ["-" if point is None else f"{point.error_o:.0e}" for point in points],
        )
        table.add_row(f"{seqlen:,}", *(" / ".join(cell) for cell in cells))
    return table
