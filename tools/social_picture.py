"""The picture that programs show of a link to the site: `python tools/social_picture.py FILE.png`. The site's build draws it (site_hooks.py)."""

import io
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from tilewise.bench.plots import COLOURS
from tilewise.bench.store import load
from tilewise.bench.tables.ladder import at_place, caption
from tilewise.display.style import STYLE

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SIZE, DPI = (12.0, 6.3), 100  # 1,200 x 630 pixels
SHOWN = {"tilewise": "tilewise", "fa4": "FlashAttention-4", "fa3:vllm": "FlashAttention-3", "sdpa:cudnn": "cuDNN"}
BLUE, GREY = COLOURS[0], "#9aa3ad"


def rates() -> dict[str, float]:
    """TFLOP/s of the forward pass without a mask, of the newest rows at the place where the ladder is compared."""
    found = at_place(load(*sorted(RESULTS.glob("*.jsonl"))))
    return {words: found[name]["full"].flops_per_s / 1e12 for name, words in SHOWN.items() if "full" in found.get(name, {})}


def where() -> str:
    """The case, the machine and the day."""
    found = at_place(load(*sorted(RESULTS.glob("*.jsonl"))))
    row = found["tilewise"]["full"]
    return f"{caption([row]).split('Rungs')[0].strip()} {row.environment['date'][:10]}."


def draw() -> bytes:
    """A PNG of 1,200 x 630 pixels, the same bytes for the same rows."""
    shown = rates()
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "font.size": 15}):
        figure = Figure(figsize=SIZE, dpi=DPI, facecolor="white")
        figure.text(0.05, 0.84, "tilewise", fontsize=44, weight="bold", color=BLUE)
        figure.text(0.05, 0.75, "Exact attention in Python: forward and backward, any mask, CPUs and GPUs", fontsize=20)
        figure.text(0.05, 0.63, "Forward pass on an H100, TFLOP/s", fontsize=15, color="#5d6670")
        axes = figure.add_axes((0.24, 0.14, 0.66, 0.46))
        bars = axes.barh(list(shown), list(shown.values()), color=[BLUE if name == "tilewise" else GREY for name in shown], height=0.62)
        axes.bar_label(bars, fmt="{:,.0f}", padding=6, fontsize=17)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelbottom=False, labelsize=17)
        figure.text(0.05, 0.05, where(), fontsize=11, color="#5d6670")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(draw())
