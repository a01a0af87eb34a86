"""Made-up measurements for tests of the page: quick to build, with every feature that the page shows."""

import math

import pytest

from tilewise.demo.model import GPTConfig
from tilewise.demo.page import Report
from tilewise.demo.sweep import Point, Sweep
from tilewise.demo.train import Curve, TrainConfig, Training

SVG = (
    '<?xml version="1.0"?><svg width="10pt" height="10pt" viewBox="0 0 10 10" xmlns="http://www.w3.org/2000/svg">'
    '<metadata>m</metadata><rect width="9" height="9" fill="#336699"/></svg>'
)


def training(steps: int = 12, off_by: float = 1e-7, peak_bytes: int | None = 123_000_000) -> Training:
    losses = [5.5 * math.exp(-step / 20) for step in range(steps)]
    curves = (
        Curve(
            name="tilewise",
            losses=[loss * (1 + off_by * step / max(steps - 1, 1)) for step, loss in enumerate(losses)],
            seconds=[0.2] * steps,
            held_out=2.5,
            peak_bytes=peak_bytes,
            written="is continued",
        ),
        Curve(name="SDPA", losses=losses, seconds=[0.21] * steps, held_out=2.5, peak_bytes=peak_bytes, written="is continued"),
    )
    return Training(model=GPTConfig(), config=TrainConfig(steps=steps), parameters=1_500_000, curves=curves, prompt="A <prompt> ")


def sweep(seqlens: tuple[int, ...] = (512, 1024, 2048), peak_bytes: int | None = 20_000_000) -> Sweep:
    points = tuple(
        Point(name, seqlen, slow * (seqlen / 512) ** 2, 3 * slow * (seqlen / 512) ** 2, peak_bytes, 3e-7, 1e-6)
        for seqlen in seqlens
        for name, slow in (("tilewise", 2.0), ("SDPA", 2.5), ("naive", 8.0))
        if (name, seqlen) != ("naive", 2048)
    )
    return Sweep(heads_q=4, heads_k=2, head_dim=64, points=points, omitted=("naive formula at 2,048 tokens: not run.",))


def report(**changes) -> Report:
    parts = {
        "training": training(),
        "sweep": sweep(),
        "explanation": "backend: tiled\npassed over: other (it needs <a GPU> & a driver)",
        "pictures": (("Causal", SVG, "6 skipped, 4 partial, 6 full"),),
        "machine": (("device", "a <machine>"), ("torch", "2.13.0")),
        "seconds": 100.0,
    }
    return Report(**{**parts, **changes})


@pytest.fixture
def make_training():
    return training


@pytest.fixture
def make_sweep():
    return sweep


@pytest.fixture(scope="session")
def make_report():
    return report
