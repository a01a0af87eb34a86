"""Train the same model with several attention functions, a step of each in turn, and record what each step cost and gave."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from tilewise.bench.memory import peak_extra_bytes
from tilewise.demo import data
from tilewise.demo.model import GPT, Attention, GPTConfig, as_text, build, write
from tilewise.demo.place import CPU, SAME_FIRST_LOSS, Place

PROMPT, WRITTEN, WRITTEN_EARLY = 100, 180, 40  # bytes; of a training that ended early, on a machine that has no time


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the model is trained: AdamW, a linear warm-up, then a cosine down to a tenth of the peak rate."""

    steps: int = 100
    batch: int = 2
    seed: int = 0
    peak_rate: float = 1e-3
    warmup: int = 20

    def rate(self, step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.peak_rate * min(1.0, (step + 1) / self.warmup) * (0.1 + 0.9 * cosine)


@dataclass(kw_only=True)
class Curve:
    """What one contender's training gave: a loss (nats a byte) and a time for each step, and the cost in memory of one more step."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out: float = math.nan
    peak_bytes: int | None = None
    written: str = ""  # what the trained model puts after Training.prompt

    @property
    def median_ms(self) -> float:
        """Median time of a step in milliseconds, without the first, which also warms up."""
        return 1e3 * median(self.seconds[1:] or self.seconds)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The curves of all contenders; the first is the one that the others are held against."""

    model: GPTConfig
    config: TrainConfig
    parameters: int
    curves: tuple[Curve, ...]
    place: Place = CPU
    prompt: str = ""  # of text never trained on

    @property
    def ended_early(self) -> bool:
        """Whether the time budget was spent before all steps were done."""
        return self.steps < self.config.steps

    @property
    def steps(self) -> int:
        return len(self.curves[0].losses)

    @property
    def differences(self) -> list[float]:
        """For each step the largest relative difference of any contender's loss to the first one's."""
        losses = torch.tensor([curve.losses for curve in self.curves], dtype=torch.float64, device="cpu")
        return ((losses[1:] - losses[0]).abs() / losses[0].abs()).amax(0).tolist()  # amax lets NaN through

    @property
    def worst(self) -> float:
        """The largest difference of any step; NaN where a loss was."""
        return torch.tensor(self.differences, dtype=torch.float64, device="cpu").max().item()

    @property
    def same(self) -> bool:
        """Whether the first losses agree, and every step's as far as the dtype lets them (`Place.same_loss`); a NaN anywhere does not."""
        return self.differences[0] <= SAME_FIRST_LOSS and self.worst <= self.place.same_loss


class Trainee:
    """One model, its optimizer and its record."""

    def __init__(self, name: str, attention: Attention, model: GPTConfig, config: TrainConfig, place: Place) -> None:
        self.config, self.place = config, place
        self.model: GPT = build(model, attention, config.seed).to(place.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.peak_rate, betas=(0.9, 0.95), weight_decay=0.1)
        self.curve = Curve(name=name)

    def loss(self, batch: data.Batch) -> Tensor:
        with self.place.autocast():
            return self.model.loss(*batch)

    def step(self, step: int, batch: data.Batch) -> float:
        """One update of the weights; returns the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(step)
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()  # which waits for a GPU

    def timed_step(self, step: int, batch: data.Batch) -> None:
        start = time.perf_counter()
        loss = self.step(step, batch)
        self.curve.seconds.append(time.perf_counter() - start)
        self.curve.losses.append(loss)

    def finish(self, step: int, batch: data.Batch, held_out: data.Batch) -> None:
        """Loss and some text on text never trained on, then the peak memory of one more, untimed step beyond weights and optimizer state."""
        with torch.no_grad(), self.place.autocast():
            self.curve.held_out = self.loss(held_out).item()
            length = WRITTEN if step == self.config.steps else WRITTEN_EARLY
            self.curve.written = write(self.model, prompt_of(held_out), length, self.config.seed)
        self.optimizer.zero_grad()
        _, self.curve.peak_bytes = peak_extra_bytes(lambda: self.step(step, batch), self.place.device)


def prompt_of(held_out: data.Batch) -> Tensor:
    """(length,) int64."""
    return held_out.inputs[0, :PROMPT]


def train(
    attentions: Mapping[str, Attention],
    model: GPTConfig,
    config: TrainConfig,
    *,
    place: Place = CPU,
    deadline: float = math.inf,
    on_step: Callable[[int, list[float]], None] = lambda step, losses: None,
) -> Training:
    """Train one model for each attention function from the same seed on the same batches.

    The contenders take each step in turn, and who goes first alternates, so that what else the machine does hits all of them alike.
    Training ends after `config.steps` steps, or earlier when `time.monotonic()` passes `deadline` (never before two steps).
    `on_step(steps_done, losses)` is called after each step with every contender's loss.
    Raises ValueError for a context longer than the text.
    """
    text, held_out = data.split(data.corpus())

    def batch_at(source: Tensor, step: int) -> data.Batch:
        return data.batch_at(source, step, batch=config.batch, context=model.context, seed=config.seed).to(place.device)

    unseen = batch_at(held_out, 0)
    trainees = [Trainee(name, attention, model, config, place) for name, attention in attentions.items()]
    done = 0
    while done < config.steps and (done < 2 or time.monotonic() < deadline):
        batch = batch_at(text, done)
        for trainee in trainees if done % 2 == 0 else reversed(trainees):
            trainee.timed_step(done, batch)
        done += 1
        on_step(done, [trainee.curve.losses[-1] for trainee in trainees])
    for trainee in trainees:
        trainee.finish(done, batch_at(text, done), unseen)
    parameters = sum(parameter.numel() for parameter in trainees[0].model.parameters())
    curves = tuple(trainee.curve for trainee in trainees)
    return Training(model=model, config=config, parameters=parameters, curves=curves, place=place, prompt=as_text(prompt_of(unseen)))
