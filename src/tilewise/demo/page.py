"""The report of a demo run: the numbers first, then every curve with its table, then how it was measured."""

from dataclasses import dataclass
from html import escape

from tilewise.demo import charts, html
from tilewise.demo.numbers import byline, ended_early, headlines, megabytes, milliseconds, verdict, what_was_trained
from tilewise.demo.sweep import CHECKED_ROWS, Point, Sweep
from tilewise.demo.train import Training

PICTURE = "tilewise-report.png"  # what a browser calls the picture that it takes out of the page


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything the page shows. `pictures` are (title, SVG, caption) of masks; `machine` is (name, value) pairs."""

    training: Training
    sweep: Sweep
    explanation: str
    pictures: tuple[tuple[str, str, str], ...]
    machine: tuple[tuple[str, str], ...]
    seconds: float
    command: str = "tilewise demo"
    picture: bytes = b""  # a PNG (share.py)


def render(report: Report) -> str:
    """The whole page, self-contained."""
    body = [
        *_summary(report),
        *_written(report.training),
        *_training(report.training),
        *_sweep(report.sweep),
        *_masks(report),
        *_method(report),
    ]
    return html.page("tilewise: report of the demo", body, description=f"{verdict(report.training)} {byline(report)}.")


ROUNDING = {"fp32": "fp32 rounds at 6e-8", "bf16": "bf16, in which attention and matrix products read and write, rounds at 4e-3"}


def _summary(report: Report) -> list[str]:
    training = report.training
    model = training.model
    early = ended_early(training)
    return [
        "<header><h1>Exact attention without the score matrix</h1>",
        html.paragraph(byline(report), "soft"),
        html.paragraph(verdict(training), f"verdict {'good' if training.same else 'bad'}"),
        *([html.paragraph(early, "early")] if early else []),
        "</header>",
        html.cards(headlines(report)),
        html.paragraph(
            f"A byte-level GPT ({training.parameters / 1e6:.1f} million parameters, {model.layers} layers, {model.heads_q} heads with "
            f"{model.heads_k} key/value heads, head_dim {model.head_dim}, context {model.context:,}) learns the text of Python's language "
            "reference twice from the same seed and the same batches: once with tilewise.attention, once with torch's "
            "scaled_dot_product_attention (SDPA). Then attention alone, over growing sequences."
        ),
        *([html.download("A picture of this, to share", PICTURE, "image/png", report.picture)] if report.picture else []),
    ]


def _written(training: Training) -> list[str]:
    """What the models write after text that they were not trained on."""
    ours, theirs = training.curves
    same = next((place for place, (a, b) in enumerate(zip(ours.written, theirs.written, strict=False)) if a != b), len(ours.written))
    if ours.written == theirs.written:
        words = f"The model trained with {theirs.name} writes the same {len(ours.written)} characters."
    else:
        words = f"The model trained with {theirs.name} writes the same {same} characters, then others: rounding moved a draw."
    return [
        html.heading("What it writes"),
        html.paragraph(f"Held-out text in grey, then what the model trained with {ours.name} put after it, byte by byte. {words}"),
        html.continued(training.prompt, ours.written),
    ]


def _training(training: Training) -> list[str]:
    names = " and ".join(curve.name for curve in training.curves)
    rows = [
        (
            curve.name,
            f"{curve.losses[0]:.6f}",
            f"{curve.losses[-1]:.6f}",
            f"{curve.held_out:.6f}",
            milliseconds(curve.median_ms),
            megabytes(curve.peak_bytes),
        )
        for curve in training.curves
    ]
    return [
        html.heading("Training"),
        html.paragraph(f"{what_was_trained(training)}, AdamW."),
        html.figures(_training_figures(training, names)),
        html.table(("attention", "first loss", "last loss", "held-out loss", "median step", "peak memory a step"), rows),
    ]


def _training_figures(training: Training, names: str) -> list[str]:
    drawn = [
        html.figure("Loss", charts.loss_chart(training), f"{names}, drawn over each other: the thick line is below the thin one."),
        html.figure(
            "Difference of the losses",
            charts.difference_chart(training),
            f"Relative, at each step. {ROUNDING[training.place.name]}; steps with equal losses are drawn at the bottom.",
        ),
        html.figure("Time a step", charts.step_time_chart(training), charts.STEP_TIME_CAPTION),
    ]
    if memory := charts.step_memory_chart(training):
        drawn.append(html.figure("Memory a step", memory, "Of one step after the training, beyond weights and optimizer state."))
    return drawn


def _sweep(sweep: Sweep) -> list[str]:
    if not sweep.points:
        return [html.heading("Attention alone"), html.bullets(sweep.omitted)]

    def chart(title: str, column: str, ylabel: str, caption: str, scale: float = 1.0) -> str:
        """The figure of one column of the points; empty when no point has a value."""
        if all(getattr(point, column) is None for point in sweep.points):
            return ""

        def values(name: str) -> list[float | None]:
            return [None if (value := getattr(point, column)) is None else value * scale for point in sweep.of(name)]

        return html.figure(title, charts.sweep_chart(sweep, values, ylabel, f"{title} over the sequence length, logarithmic axes"), caption)

    drawn = [
        chart("Time, forward", "forward_ms", "ms", "Median; both axes logarithmic."),
        chart("Time, forward + backward", "both_ms", "ms", "Median; both axes logarithmic."),
        chart("Peak extra memory, forward + backward", "peak_bytes", "MB", "Above the level before the call; results included.", 1e-6),
        chart("Error of O", "error_o", "max |o - fp64|", "Against the formula in fp64 on the same inputs."),
        chart("Error of dQ, dK, dV", "error_grad", "max |grad - fp64|", "Against the formula's gradients in fp64."),
    ]
    header = ("", "tokens", "forward", "fwd + bwd", "peak memory", "error of O", "error of gradients")
    return [
        html.heading("Attention alone"),
        html.paragraph(
            f"Causal, {sweep.place.name}, batch 1, {sweep.heads_q} heads with {sweep.heads_k} key/value heads, head_dim {sweep.head_dim}."
        ),
        html.figures(filter(None, drawn)),
        html.table(header, [_row(point) for point in sorted(sweep.points, key=lambda point: point.seqlen)]),
        html.bullets(sweep.omitted),
    ]


def _row(point: Point) -> tuple[str, ...]:
    times = (milliseconds(point.forward_ms), milliseconds(point.both_ms))
    return (point.name, f"{point.seqlen:,}", *times, megabytes(point.peak_bytes), f"{point.error_o:.1e}", f"{point.error_grad:.1e}")


def _masks(report: Report) -> list[str]:
    return [
        html.heading("What a mask leaves to compute"),
        html.paragraph(
            "A mask is cut into tiles of queries x keys. A tile in which nothing is visible is skipped: neither loaded nor computed. "
            "A tile in which everything is visible needs no mask. Only the partial tiles compare positions."
        ),
        html.figures(html.figure(title, charts.embed(svg, title), caption, plate=True) for title, svg, caption in report.pictures),
        html.heading("What ran, and why"),
        html.preformatted(report.explanation),
    ]


CLOCKS = {"cpu": "", "cuda": ", of attention alone between two events on the GPU, the L2 cache flushed before"}
MEMORY = {
    "cpu": "that of the whole process above the level before the call (on Linux, the kernel's high-water mark, reset just before)",
    "cuda": "that of the GPU's allocator above the level before the call",
}


def _method(report: Report) -> list[str]:
    where = "cuda" if report.training.place.device.type == "cuda" else "cpu"
    return [
        html.heading("How it was measured"),
        html.bullets(
            [
                "Same process, same weights at the start, same batches in the same order. Times are wall-clock medians"
                f"{CLOCKS[where]}; the contenders take turns, so that what else the machine does slows them alike. The first training step "
                "is left out of the median.",
                f"Peak memory is {MEMORY[where]}, in a call of its own that is not timed.",
                f"The error is the largest absolute difference to the formula in fp64, for O and dQ at {CHECKED_ROWS} query rows spread "
                "over the sequence; all other rows receive a zero gradient, so that dK and dV are checked completely.",
                "The naive formula stores the score matrix; it is left out where one such matrix passes the limit.",
            ]
        ),
        html.heading("Machine and versions"),
        html.table(("", ""), report.machine),
        html.heading("How to make this page"),
        html.preformatted(report.command),
        f"<footer><p>{escape(byline(report))}.</p></footer>",
    ]
