"""The numbers of a run in words: for the page, the picture and the terminal alike."""

from typing import TYPE_CHECKING, NamedTuple

from tilewise.demo.place import SAME_FIRST_LOSS, Place
from tilewise.demo.train import Training

if TYPE_CHECKING:
    from tilewise.demo.page import Report


class Headline(NamedTuple):
    number: str
    text: str


def megabytes(count: int | None) -> str:
    return "not measured" if count is None else f"{count / 1e6:,.0f} MB" if count >= 20e6 else f"{count / 1e6:,.1f} MB"


def milliseconds(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:,.1f} ms"


def against(ours: float, theirs: float) -> str:
    """A time next to another in words, such as "1.30x faster"."""
    if not (ours > 0 and theirs > 0):
        return "not comparable"
    return f"{theirs / ours:.2f}x faster" if ours <= theirs else f"{ours / theirs:.2f}x slower"


def precision(place: Place) -> str:
    return place.name if place.name == "fp32" else f"{place.name} with weights in fp32"


def what_was_trained(training: Training) -> str:
    steps = f"{training.steps} of {training.config.steps}" if training.ended_early else f"{training.steps}"
    return f"{steps} steps of {training.config.batch} x {training.model.context:,} bytes, {precision(training.place)}"


def verdict(training: Training) -> str:
    """Whether the trainings agree, in a sentence."""
    first = f"at the first step by {training.differences[0]:.1e} (relative; {SAME_FIRST_LOSS:g} is allowed)"
    every = f"{training.worst:.1e} (relative; {training.place.same_loss:g} is allowed)"
    if training.same:
        return f"The two trainings agree: at each of {training.steps} steps the losses differ by at most {every}, {first}."
    return f"The two trainings DISAGREE: at the worst of {training.steps} steps the losses differ by {every}, {first}."


def ended_early(training: Training) -> str:
    """What a training that the time budget cut can say and what it cannot; empty for a whole one."""
    if not training.ended_early:
        return ""
    return (
        f"Ended early: the time budget was spent after {training.steps} of {training.config.steps} steps. Both trainings stopped at the same "
        "step, so they compare; the loss is higher than a whole training's, as the learning rate had not come down yet. A larger --budget, or "
        "a machine with nothing else to do, trains to the end."
    )


def byline(report: "Report") -> str:
    """Name, version, day, machine, command, how long it took, and whether that was all of it."""
    where = dict(report.machine)
    machine = [where.get("device"), f"{threads} threads" if (threads := where.get("threads")) else None]
    training = report.training
    name, took = f"tilewise {where.get('tilewise', '')}".strip(), f"{report.command}: {report.seconds:.0f} s"
    early = f"ended early at {training.steps} of {training.config.steps} steps" if training.ended_early else None
    parts = (name, where.get("date", "")[:10], *machine, took, early)
    return ", ".join(filter(None, parts))


def headlines(report: "Report") -> list[Headline]:
    """Speed, memory and agreement; then the training's."""
    training, sweep = report.training, report.sweep
    ours, theirs = training.curves
    agreement = Headline(f"{training.worst:.1e}", f"largest relative difference of the loss to training with {theirs.name}, over all steps")
    step = Headline(
        against(ours.median_ms, theirs.median_ms),
        f"a training step: {milliseconds(ours.median_ms)}, with {theirs.name} {milliseconds(theirs.median_ms)}",
    )
    memory = Headline(
        megabytes(ours.peak_bytes),
        f"peak memory of a step, beyond weights and optimizer; {megabytes(theirs.peak_bytes)} with {theirs.name}",
    )
    loss = Headline(
        f"{ours.losses[0]:.2f} → {ours.losses[-1]:.2f}",
        f"loss (nats a byte) over {training.steps} steps; {ours.held_out:.3f} on held-out text",
    )
    if not sweep.points:
        return [step, memory, agreement, loss]
    last, other = (sweep.of(name)[-1] for name in (ours.name, theirs.name))
    scores = sweep.place.dtype.itemsize * sweep.heads_q * last.seqlen**2
    alone = Headline(
        against(last.both_ms, other.both_ms),
        f"attention at {last.seqlen:,} tokens, forward + backward: {milliseconds(last.both_ms)}, {theirs.name} {milliseconds(other.both_ms)}",
    )
    extra = Headline(megabytes(last.peak_bytes), f"its peak extra memory; one score matrix would take {megabytes(scores)}")
    return [alone, extra, agreement, step, memory, loss]
