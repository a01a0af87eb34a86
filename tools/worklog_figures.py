"""The figures of docs/worklog, from numbers that tilewise computes: `python tools/worklog_figures.py` redraws those that changed.

Each figure is a pair of functions: its numbers, and the drawing of such numbers. The numbers travel inside the SVG (its <desc>, as JSON), so
a test can tell whether a committed figure still shows what the code computes. `--redraw` draws all of them again, after a change of style.
"""

import html
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from matplotlib.ticker import StrMethodFormatter

from tilewise.bench.plots import COLOURS
from tilewise.bench.store import load
from tilewise.bench.tables.ladder import at_place
from tilewise.display.style import STYLE
from tilewise.ladder import RUNGS, VARIANTS
from tilewise.ladder.warp_splits import split_k, split_q
from tilewise.machine.roofline import Launch, Shape, fa1_blocks, fa2_blocks, flops, hbm_bytes, score_matrix_bytes
from tilewise.machine.sheets import A100, H100
from tilewise.masks import Causal
from tilewise.masks.tiles import lower

ROOT = Path(__file__).parents[1]
FOLDER, RESULTS = ROOT / "docs" / "worklog" / "figures", ROOT / "benchmarks" / "results"
PEERS = ("tilewise", "sdpa:cudnn", "fa3:vllm", "fa4")  # on the chart of the ladder
BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK = COLOURS
LENGTHS = tuple(1 << n for n in range(10, 21))
TILES = (16, 32, 64, 128, 256, 512)
SHAPE = Shape(batch=1, seqlen_q=8192, seqlen_k=8192, heads_q=16, heads_k=16, head_dim=128)  # bf16, what pages 3 to 5 count


def one_head(seqlen: int, head_dim: int = 128) -> Shape:
    return Shape(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=1, heads_k=1, head_dim=head_dim)


def score_memory() -> dict:
    """Bytes of Q, K, V, O and LSE of one head, and of one score matrix, by sequence length."""
    shapes = [one_head(seqlen) for seqlen in LENGTHS]
    return {
        "seqlen": list(LENGTHS),
        "operands": [hbm_bytes(shape, "once") for shape in shapes],
        "scores_bf16": [score_matrix_bytes(shape) for shape in shapes],
        "scores_fp32": [score_matrix_bytes(shape, itemsize=4) for shape in shapes],
    }


def draw_score_memory(data: dict) -> str:
    def draw(figure) -> None:
        axes = figure.subplots()
        for key, label, colour in (
            ("scores_fp32", "S in fp32", ORANGE),
            ("scores_bf16", "S in bf16", YELLOW),
            ("operands", "Q, K, V, O and LSE", BLUE),
        ):
            axes.plot(data["seqlen"], data[key], marker="o", markersize=4, color=colour, label=label)
        axes.axhline(80e9, color=BLACK, linewidth=1, linestyle="--")
        axes.annotate("80 GB: an H100's memory", (LENGTHS[0], 80e9), xytext=(0, -12), textcoords="offset points", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(LENGTHS[::2], [length(n) for n in LENGTHS[::2]])
        axes.set_yticks([1e6, 1e8, 1e10, 1e12], ["1 MB", "100 MB", "10 GB", "1 TB"])
        axes.set(xlabel="sequence length", ylabel="bytes of one head (head_dim 128)")
        axes.set_ylim(4e5, 3e13)
        axes.legend(loc="upper left")

    return svg(draw, (6.4, 3.8))


def running_softmax(keys: int = 2048, tile_n: int = 64) -> dict:
    """One row of scores through (11) to (14): maxima, rescale factors and denominators after each tile of keys."""
    draw = np.random.RandomState(6).standard_normal  # the stream of RandomState is frozen: the same row with every numpy
    head_dim = 64
    s = draw((keys, head_dim)) @ (1.5 * draw(head_dim)) * head_dim**-0.5
    m, l, rows = -np.inf, 0.0, []
    for tile in s.reshape(-1, tile_n):
        m_old, m = m, max(m, tile.max())  # Eq. 11
        rescale = np.exp(m_old - m)  # Eq. 13
        l = rescale * l + np.exp(tile - m).sum()  # Eq. 12, Eq. 14
        rows.append((tile.max(), m, rescale, l))
    final = np.cumsum(np.exp(s - m).reshape(-1, tile_n).sum(axis=1))  # Eq. 6, which needs the last maximum from the start
    columns = dict(zip(("tile_max", "m", "rescale", "l"), np.array(rows).T, strict=True)) | {"l_final": final}
    return {name: [short(x) for x in column] for name, column in columns.items()}


def draw_running_softmax(data: dict) -> str:
    def draw(figure) -> None:
        top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 3))
        tile = np.arange(1, len(data["m"]) + 1)
        top.plot(tile, data["tile_max"], "o", markersize=4, color=SKY, label="maximum of this tile")
        top.step(tile, data["m"], where="post", color=BLUE, label="$m$: maximum so far (11)")
        top.set_ylabel("score")
        top.set_ylim(min(data["tile_max"]) - 0.3, max(data["m"]) + 1)
        top.legend(fontsize=9, ncols=2, loc="upper left")
        middle.bar(tile, data["rescale"], color=[ORANGE if r < 1 else "#cccccc" for r in data["rescale"]])
        middle.set_ylabel("rescale $r$ (13)")
        bottom.plot(tile, data["l"], color=BLUE, marker="o", markersize=3, label="$l$ relative to the maximum so far (14)")
        bottom.plot(tile, data["l_final"], color=BLACK, linestyle="--", label="relative to the last maximum (6)")
        bottom.set(ylabel="denominator", xlabel="tile of 64 keys", xlim=(0, len(tile) + 1))
        bottom.legend(fontsize=9, loc="upper left")

    return svg(draw, (6.8, 5.6))


def roofline() -> dict:
    """Where each way to compute SHAPE stands on an H100's roofline, by the HBM bytes it asks for."""
    work = flops(SHAPE)
    ways = {"naive": ("naive", 128), "fa1": ("fa1", 128), "once": ("once", 128)} | {f"fa2 {m}": ("fa2", m) for m in (1, 16, 128, 256)}
    intensity = {name: work / hbm_bytes(SHAPE, algorithm, tiles=(tile, 128)) for name, (algorithm, tile) in ways.items()}
    return {
        "peak": H100.peak[SHAPE.dtype],
        "ridge": short(H100.ridge(SHAPE.dtype)),
        "intensity": {name: short(x) for name, x in intensity.items()},
        "attainable": {name: short(H100.attainable(x, SHAPE.dtype)) for name, x in intensity.items()},
        "A100": {"peak": A100.peak[SHAPE.dtype], "ridge": short(A100.ridge(SHAPE.dtype))},
    }


def draw_roofline(data: dict) -> str:
    labels = {
        "naive": ("three kernels, S and P in HBM", ORANGE, (8, -8)),
        "fa1": ("FA1, 128 keys", PURPLE, (8, -3)),
        "fa2 1": ("FA2, one query at a time", BLUE, (8, -4)),
        "fa2 16": ("FA2, 16 queries", BLUE, (8, -4)),
        "fa2 128": ("FA2, 128 queries", BLUE, (-100, 2)),
        "fa2 256": ("FA2, 256 queries", BLUE, (-100, 2)),
        "once": ("every operand once", GREEN, (-56, -16)),
    }

    def draw(figure) -> None:
        axes = figure.subplots()
        x = np.array([0.5, data["ridge"], 10000])
        axes.plot(x, np.minimum(x / data["ridge"], 1) * data["peak"] / 1e12, color=BLACK, linewidth=1.5)
        other = data["A100"]
        x = np.array([0.5, other["ridge"], 10000])
        axes.plot(x, np.minimum(x / other["ridge"], 1) * other["peak"] / 1e12, color="#888888", linewidth=1.2, linestyle="--")
        axes.annotate(
            f"A100, ridge {other['ridge']:.0f}", (2500, other["peak"] / 1e12), xytext=(0, -12), textcoords="offset points", fontsize=9
        )
        axes.axvline(data["ridge"], color="#999999", linewidth=1, linestyle=":")
        axes.annotate(f"ridge {data['ridge']:.0f}", (data["ridge"], 2), xytext=(4, 0), textcoords="offset points", fontsize=9)
        for name, (text, colour, offset) in labels.items():
            point = data["intensity"][name], data["attainable"][name] / 1e12
            axes.plot(*point, "o", color=colour)
            axes.annotate(text, point, xytext=offset, textcoords="offset points", fontsize=9)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set(xlabel="FLOP per byte of HBM traffic", ylabel="TFLOP/s at most", ylim=(1, 2000), xlim=(0.5, 20000))
        plain(axes)

    return svg(draw, (7.2, 4.2))


LATENCY = {
    "A100": (39, 210, 550),
    "H100": (40, 291, 700),
}  # clocks of L1, which is shared memory's, L2 and HBM: Dewing's AI_kernels (page 3), SXM
L2_RATE = {"A100": 5120 * 1.41e9, "H100": 8.1e12}  # bytes/s: the whitepaper's 5,120 a clock; what K4.2 draws (page 3)
CLOCK = {"A100": 1.41e9, "H100": 1.83e9}
MEMORY = {"A100": (40e6, 80e9), "H100": (50e6, 80e9)}  # bytes of L2 and HBM


def pyramid() -> dict:
    """Bytes, bytes/s and clocks of each level of memory, registers first: those are read each clock, and have 0 twice."""
    levels = {}
    for name, machine in (("A100", A100), ("H100", H100)):
        (l2, hbm), clocks = MEMORY[name], LATENCY[name]
        levels[name] = {
            "registers": [machine.sms * machine.registers * 4, 0, 0],
            "shared memory": [machine.sms * machine.smem_bytes, short(machine.sms * 128 * CLOCK[name]), clocks[0]],
            "L2": [l2, short(L2_RATE[name]), clocks[1]],
            "HBM": [hbm, machine.hbm_bandwidth, clocks[2]],
        }
    return levels


def draw_pyramid(data: dict) -> str:
    colours = (GREEN, SKY, YELLOW, ORANGE)

    def draw(figure) -> None:
        for axes, (name, levels) in zip(figure.subplots(1, 2), data.items(), strict=True):
            for row, (level, (count, rate, clocks)) in enumerate(levels.items()):
                above, below = 0.42 + 0.145 * row, 0.42 + 0.145 * (row + 1)
                corners = [(-above, row), (above, row), (below, row + 0.94), (-below, row + 0.94)]
                axes.add_patch(Polygon(corners, closed=True, facecolor=colours[row], edgecolor="white", alpha=0.7))
                size = f"{count / 1e9:.0f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
                facts = f"{size}, {rate / 1e12:.3g} TB/s, {clocks} clocks" if rate else f"{size}, each clock"
                axes.text(0, row + 0.33, level, ha="center", va="center", fontsize=10, fontweight="bold")
                axes.text(0, row + 0.66, facts, ha="center", va="center", fontsize=8)
            axes.set(xlim=(-1.02, 1.02), ylim=(len(levels), 0), xticks=[], yticks=[])
            axes.set_title(name, fontsize=11)
            axes.spines[:].set_visible(False)

    return svg(draw, (8.0, 3.6))


def block(width: int = 4096, heads: int = 32) -> dict:
    """FLOPs a token and bytes of a transformer block of 12 width^2 parameters, by sequence length."""
    lengths = [1 << n for n in range(10, 21)]
    return {
        "seqlen": lengths,
        "matrices": 24 * width**2,
        "attention": [4 * n * width for n in lengths],
        "weights": 2 * 12 * width**2,
        "activation": [2 * n * width for n in lengths],
        "scores": [4 * heads * n * n for n in lengths],
    }


def draw_block(data: dict) -> str:
    def draw(figure) -> None:
        left, right = figure.subplots(1, 2)
        left.plot(data["seqlen"], data["attention"], color=BLUE, marker="o", markersize=3, label="attention")
        left.axhline(data["matrices"], color=ORANGE, label="projections and MLP")
        left.set_ylabel("FLOPs a token")
        right.plot(data["seqlen"], data["scores"], color=BLUE, marker="o", markersize=3, label="S of all heads, fp32")
        right.plot(data["seqlen"], data["activation"], color=GREEN, marker="o", markersize=3, label="an activation, bf16")
        right.axhline(data["weights"], color=ORANGE, label="weights, bf16")
        right.axhline(80e9, color=BLACK, linewidth=1, linestyle="--", label="80 GB")
        right.set_ylabel("bytes")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(data["seqlen"][::2], [length(n) for n in data["seqlen"][::2]])
            axes.set_xlabel("sequence length")
            axes.legend(fontsize=8, loc="upper left")

    return svg(draw, (8.0, 3.4))


def traffic() -> dict:
    """HBM bytes of SHAPE's forward by the tile that decides them: tile_m for FA2, tile_n for FA1."""
    return {
        "tile": list(TILES),
        "fa2": [hbm_bytes(SHAPE, "fa2", tiles=(tile, 128)) for tile in TILES],
        "fa1": [hbm_bytes(SHAPE, "fa1", tiles=(128, tile)) for tile in TILES],
        "naive": hbm_bytes(SHAPE, "naive"),
        "once": hbm_bytes(SHAPE, "once"),
        "balance": short(flops(SHAPE) / H100.ridge(SHAPE.dtype)),
    }


def draw_traffic(data: dict) -> str:
    def draw(figure) -> None:
        axes = figure.subplots()
        axes.plot(data["tile"], np.array(data["fa1"]) / 1e6, color=PURPLE, marker="s", label="FA1, by tile_n")
        axes.plot(data["tile"], np.array(data["fa2"]) / 1e6, color=BLUE, marker="o", label="FA2, by tile_m")
        for key, text in (
            ("naive", "S and P through HBM"),
            ("balance", "what HBM moves while the products run"),
            ("once", "every operand once"),
        ):
            axes.axhline(data[key] / 1e6, color=BLACK, linewidth=1, linestyle="--")
            axes.annotate(text, (data["tile"][0], data[key] / 1e6), xytext=(0, 4), textcoords="offset points", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(data["tile"], map(str, data["tile"]))
        axes.set(xlabel="rows of the tile", ylabel="MB between HBM and chip")
        plain(axes.yaxis)
        axes.legend()

    return svg(draw, (6.8, 4.0))


def causal_tiles() -> dict:
    """What a causal mask makes of 768 queries against 1,024 keys in tiles of 128."""
    region = Causal().resolve(768, 1024)
    return dict(zip(("full", "partial", "skipped"), lower(region, 128, 128).tiles(), strict=True)) | {"pairs": region.pairs()}


def draw_causal_tiles(data: dict) -> str:
    return Causal().show(768, 1024, tile_m=128, tile_n=128, format="svg")


def walk(blocks: int = 6) -> dict:
    """The step at which a causal call visits each tile (0: never): FA1 in one thread block, FA2 in one a query tile, in both directions."""
    region = Causal().resolve(blocks, blocks)
    steps = {name: np.zeros((blocks, blocks), dtype=int) for name in ("fa1", "fa2", "fa2_reversed", "backward")}
    for order, (n_block, m_block) in enumerate(visits(region.transpose()), 1):
        steps["fa1"][m_block, n_block] = order
    for m_block in range(blocks):
        keys = [n_block for row, n_block in visits(region) if row == m_block]
        for order, n_block in enumerate(keys, 1):
            steps["fa2"][m_block, n_block] = order
            steps["fa2_reversed"][m_block, keys[-order]] = order
    for n_block in range(blocks):
        for order, m_block in enumerate([row for column, row in visits(region.transpose()) if column == n_block], 1):
            steps["backward"][m_block, n_block] = order
    return {name: grid.tolist() for name, grid in steps.items()}


def visits(region) -> list[tuple[int, int]]:
    runs = lower(region, 1, 1)
    return [(row, column) for row in range(runs.m_blocks) for run in runs.row(row) for column in range(runs.n0[run], runs.n1[run])]


def draw_walk(data: dict) -> str:
    titles = {
        "fa1": "FA1: keys outside,\none thread block",
        "fa2": "FA2: queries outside,\na thread block a row",
        "fa2_reversed": "FA2, right to left:\nthe partial tile first",
        "backward": "FA2, backward: keys outside,\na thread block a column",
    }

    def draw(figure) -> None:
        for axes, (name, title) in zip(figure.subplots(1, 4), titles.items(), strict=True):
            steps = np.array(data[name])
            for (row, column), step in np.ndenumerate(steps):
                colour = "#eeeeee" if not step else SKY if name == "fa1" else COLOURS[column if name == "backward" else row]
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", alpha=0.55))
                axes.text(column + 0.5, row + 0.5, str(step or ""), ha="center", va="center", fontsize=10)
            axes.set(xlim=(0, steps.shape[1]), ylim=(steps.shape[0], 0), xticks=[], yticks=[], aspect="equal", xlabel="key tile")
            axes.set_title(title, fontsize=10)
            axes.spines[:].set_visible(False)
        figure.axes[0].set_ylabel("query tile")

    return svg(draw, (9.6, 3.2))


def sms() -> dict:
    """Thread blocks of FA1 and FA2 on an A100, one an SM: 32 heads, 16,384 tokens, one sequence, 128 queries a tile."""
    shape = Shape(batch=1, seqlen_q=16384, seqlen_k=16384, heads_q=32, heads_k=32, head_dim=128)
    launches = {"FA1": fa1_blocks(shape), "FA2": fa2_blocks(shape, 128)}
    found = {name: Launch.of(blocks, A100) for name, blocks in launches.items()}
    return {name: {"blocks": each.blocks, "idle": each.idle_sms, "waves": each.waves, "sms": A100.sms} for name, each in found.items()}


def draw_sms(data: dict) -> str:
    def draw(figure) -> None:
        for axes, (name, launch) in zip(figure.subplots(1, 2), data.items(), strict=True):
            for sm in range(launch["sms"]):
                row, column = divmod(sm, 12)
                colour = BLUE if sm < launch["sms"] - launch["idle"] else "#dddddd"
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", alpha=0.7))
            axes.set(xlim=(0, 12), ylim=(9, 0), xticks=[], yticks=[], aspect="equal")
            waves = f"in {launch['waves']} wave{'s' * (launch['waves'] > 1)}"
            axes.set_title(f"{name}: {launch['blocks']:,} blocks {waves}, {launch['idle']} of {launch['sms']} SMs idle", fontsize=9)
            axes.spines[:].set_visible(False)

    return svg(draw, (7.2, 2.9))


def splits(tile_m: int = 128, tile_n: int = 128, head_dim: int = 128, steps: int = 4) -> dict:
    """Bytes a step through shared memory, and barriers, of both ways to share a tile among four warps: counted while they run."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, head_dim, generator=draw) for n in (tile_m, steps * tile_n, steps * tile_n))
    counted = {}
    for name, split in (("split-K", split_k), ("split-Q", split_q)):
        _, shared = split(q, k, v, tile_n=tile_n)
        counted[name] = {"bytes": {what: count / steps for what, count in shared.bytes.items()}, "barriers": shared.barriers / steps}
    return counted


def draw_splits(data: dict) -> str:
    colours = {"K and V": BLUE, "Q": SKY, "statistics": YELLOW, "partial O": ORANGE}

    def draw(figure) -> None:
        axes = figure.subplots()
        for row, counted in enumerate(data.values()):
            start = 0.0
            for what, colour in colours.items():
                width = counted["bytes"].get(what, 0) / 1024
                axes.barh(row, width, left=start, color=colour, alpha=0.8, label=what if row == 0 else None)
                start += width
            axes.annotate(
                f"{start:.0f} KB, {counted['barriers']:.0f} barriers", (start, row), xytext=(4, 0), textcoords="offset points", va="center"
            )
        axes.set(yticks=range(len(data)), ylim=(len(data) - 0.4, -0.6), xlim=(0, 1000), xlabel="KB through shared memory in a step")
        axes.set_yticklabels(data)
        axes.legend(fontsize=9, loc="lower right", ncols=2)

    return svg(draw, (7.2, 2.4))


def ring(tiles: int = 5, load: int = 2, compute: int = 3) -> dict:
    """When each tile is loaded and used, [start, end] by number of stages: a load waits for its stage, a use for its tile."""
    schedules = {}
    for stages in (1, 2, 5):
        loads, uses = [], []
        for tile in range(tiles):
            start = max(loads[-1][1] if loads else 0, uses[tile - stages][1] if tile >= stages else 0)
            loads.append([start, start + load])
            start = max(uses[-1][1] if uses else 0, loads[-1][1])
            uses.append([start, start + compute])
        schedules[str(stages)] = {"loads": loads, "uses": uses}
    return schedules


def draw_ring(data: dict) -> str:
    def draw(figure) -> None:
        last = max(end for schedule in data.values() for _, end in schedule["uses"])
        for axes, (stages, schedule) in zip(figure.subplots(len(data), 1, sharex=True), data.items(), strict=True):
            for row, (name, colour) in enumerate((("loads", SKY), ("uses", ORANGE))):
                for tile, (start, end) in enumerate(schedule[name]):
                    box(axes, start, end, row, f"{tile}", colour)
            axes.set(ylim=(2, 0), yticks=[0.5, 1.5], xticks=[], xlim=(0, last))
            axes.set_yticklabels(["TMA", "threads"])
            axes.set_title(f"{stages} stage{'s' * (stages != '1')}", fontsize=10, loc="left")
        figure.axes[-1].set_xlabel("time: tiles 0, 1, ... are loaded and used")

    return svg(draw, (7.2, 3.4))


def fragment(rows: int = 16, columns: int = 16) -> dict:
    """Thread and register of each number in the corner of a warpgroup's accumulator: the first warp's rows."""
    at = [[(row, column) for column in range(columns)] for row in range(rows)]
    return {
        "thread": [[row % 8 * 4 + column % 8 // 2 for row, column in line] for line in at],
        "register": [[column % 2 + row // 8 * 2 + column // 8 * 4 for row, column in line] for line in at],
    }


def draw_fragment(data: dict) -> str:
    quad = (SKY, ORANGE, GREEN, PURPLE)

    def draw(figure) -> None:
        axes = figure.subplots()
        for row, line in enumerate(data["thread"]):
            for column, thread in enumerate(line):
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=quad[thread % 4], edgecolor="white", alpha=0.55))
                axes.text(column + 0.5, row + 0.5, f"{thread}.{data['register'][row][column]}", ha="center", va="center", fontsize=7)
        size = len(data["thread"])
        axes.axhline(8, color=BLACK, linewidth=1)
        axes.axvline(8, color=BLACK, linewidth=1)
        axes.set(xlim=(0, size), ylim=(size, 0), xticks=[0.5, 7.5, 8.5, 15.5], yticks=[0.5, 7.5, 8.5, 15.5], xlabel="column", ylabel="row")
        axes.set_xticklabels([0, 7, 8, 15])
        axes.set_yticklabels([0, 7, 8, 15])

    return svg(draw, (6.4, 4.6))


def tv() -> dict:
    """Thread and value of each element of an 8 x 6 tile: C of a TiledMMA of 4 x 2 threads, and a TiledCopy that gives a thread three neighbours."""
    at = [[(row, column) for column in range(6)] for row in range(8)]
    return {
        "TiledMMA: C": {
            "thread": [[row % 4 * 2 + column % 2 for row, column in line] for line in at],
            "value": [[row // 4 + column // 2 * 2 for row, column in line] for line in at],
        },
        "TiledCopy": {
            "thread": [[row % 4 * 2 + column // 3 for row, column in line] for line in at],
            "value": [[column % 3 + row // 4 * 3 for row, column in line] for line in at],
        },
    }


def draw_tv(data: dict) -> str:
    colours = (*COLOURS[:6], "#999999", "#dddddd")

    def draw(figure) -> None:
        for axes, (title, grid) in zip(figure.subplots(1, len(data)), data.items(), strict=True):
            for row, line in enumerate(grid["thread"]):
                for column, thread in enumerate(line):
                    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colours[thread], edgecolor="white", alpha=0.55))
                    axes.text(column + 0.5, row + 0.5, f"{thread}.{grid['value'][row][column]}", ha="center", va="center", fontsize=9)
            axes.set(xlim=(0, 6), ylim=(8, 0), xticks=[x + 0.5 for x in range(6)], yticks=[y + 0.5 for y in range(8)], xlabel="column")
            axes.set_xticklabels(range(6))
            axes.set_yticklabels(range(8))
            axes.set_title(f"{title}, thread.value", fontsize=10)
        figure.axes[0].set_ylabel("row")

    return svg(draw, (7.2, 3.6))


def swizzle() -> dict:
    """Which 16-byte chunk of a row of 128 bytes lies in each group of four banks, by row: as written, and with the row's number XORed in."""
    return {"plain": [list(range(8)) for _ in range(8)], "swizzled": [[group ^ row for group in range(8)] for row in range(8)]}


def draw_swizzle(data: dict) -> str:
    def draw(figure) -> None:
        for axes, (name, grid) in zip(figure.subplots(1, 2), data.items(), strict=True):
            for row, line in enumerate(grid):
                for group, chunk in enumerate(line):
                    colour = ORANGE if chunk == 2 else "#e4e4e4"
                    axes.add_patch(Rectangle((group, row), 1, 1, facecolor=colour, edgecolor="white", alpha=0.7))
                    axes.text(group + 0.5, row + 0.5, str(chunk), ha="center", va="center", fontsize=9)
            ticks = [group + 0.5 for group in range(8)]
            axes.set(xlim=(0, 8), ylim=(8, 0), xticks=ticks, yticks=ticks, aspect="equal", xlabel="banks", ylabel="row")
            axes.set_xticklabels([f"{4 * group}-{4 * group + 3}" for group in range(8)], fontsize=7)
            axes.set_yticklabels(range(8), fontsize=8)
            axes.set_title(name, fontsize=10)

    return svg(draw, (7.2, 3.6))


def turns(tile_n: int = 128, head_dim: int = 128, tiles: int = 3) -> dict:
    """Two warpgroups of 64 rows, in clocks of an SM: [start, end, what, tile] of each. The units' rates are those of page 3."""
    product = 64 * tile_n * head_dim * 2 // 4096  # S, and as long again O += P V
    pairs = 64 * tile_n
    softmax = pairs // 16 + pairs // 64 + 2 * pairs // 128 + pairs // 128 + 64 * head_dim // 128  # exp2, max, scale and sum, to bf16, O
    step, turn = 2 * (2 * product + softmax), 2 * product  # in step: each at half its rate
    together = [
        part
        for i in range(tiles)
        for part in (
            [i * step, i * step + 2 * product, "S", i],
            [i * step + 2 * product, (i + 1) * step - 2 * product, "softmax", i],
            [(i + 1) * step - 2 * product, (i + 1) * step, "O", i],
        )
    ]
    apart = [
        [
            part
            for i in range(tiles + 1)
            for part in (
                *([[start + 2 * turn * i - product, start + 2 * turn * i, "O", i - 1]] if i else []),
                *([[start + 2 * turn * i, start + 2 * turn * i + product, "S", i]] if i < tiles else []),
                *([[start + 2 * turn * i + product, start + 2 * turn * i + product + softmax, "softmax", i]] if i < tiles else []),
            )
        ]
        for start in (0, turn)
    ]
    within, tensor = [[0, product, "S", 0], [product, product + softmax, "softmax", 0]], []
    for i in range(1, tiles + 1):
        start = within[-1][1]
        if i < tiles:
            tensor += [[start, start + product, "S", i], [start + product, start + 2 * product, "O", i - 1]]
            within.append([start + product, start + product + softmax, "softmax", i])
        else:
            tensor.append([start, start + product, "O", i - 1])
    tensor = [within.pop(0), *tensor]
    return {"in step": [together, together], "turns": apart, "overlap": [tensor, within]}


def draw_turns(data: dict) -> str:
    titles = {
        "in step": (("warpgroup 1", "warpgroup 2"), "k5 at worst: in step, both want the same unit at the same time"),
        "turns": (("warpgroup 1", "warpgroup 2"), "k6.1, turns: one multiplies under the other's softmax"),
        "overlap": (("its products", "its softmax"), "k6, overlap: one warpgroup alone"),
    }
    colours = {"S": SKY, "softmax": ORANGE, "O": GREEN}

    def draw(figure) -> None:
        last = max(end for lanes in data.values() for lane in lanes for _, end, *_ in lane)
        for axes, (name, lanes) in zip(figure.subplots(len(data), 1, sharex=True), data.items(), strict=True):
            for row, lane in enumerate(lanes):
                for start, end, what, tile in lane:
                    box(axes, start, end, row, f"{what} {tile}", colours[what])
            axes.set(ylim=(2, 0), yticks=[0.5, 1.5], xlim=(0, last))
            axes.set_yticklabels(titles[name][0])
            axes.set_title(titles[name][1], fontsize=10, loc="left")
        figure.axes[-1].set_xlabel("clocks of an SM")

    return svg(draw, (8.4, 4.4))


def ladder() -> dict:
    """TFLOP/s of every measured rung, variant and peer at the place where rungs are compared by one number, without and with causal mask."""
    found = at_place(row for path in sorted(RESULTS.glob("*.jsonl")) for row in load(path))
    shown = {name: masks for name, masks in found.items() if name in (*RUNGS, *VARIANTS, *PEERS) and "full" in masks}
    rates = {name: [short(masks[mask].flops_per_s / 1e12) for mask in ("full", "causal")] for name, masks in shown.items()}
    matmul = next(masks["full"].ceiling_flops_per_s for masks in shown.values())
    return {"rates": rates, "matmul": short(matmul / 1e12), "peak": short(H100.peak[SHAPE.dtype] / 1e12)}


def draw_ladder(data: dict) -> str:
    def draw(figure) -> None:
        axes = figure.subplots()
        for row, (name, (full, causal)) in enumerate(data["rates"].items()):
            colour = BLUE if name in RUNGS else SKY if name in VARIANTS else ORANGE
            axes.barh(row, full, color=colour, alpha=0.8)
            axes.plot(causal, row, "o", color=BLACK, markersize=4)
            axes.annotate(f"{full:.{0 if full >= 100 else 1}f}", (0.42, row), va="center", fontsize=9, color="white", fontweight="bold")
        for key, style in (("matmul", "--"), ("peak", ":")):
            axes.axvline(data[key], color=BLACK, linewidth=1, linestyle=style)
        axes.annotate(f"a large matmul {data['matmul']:.0f}, data sheet {data['peak']:.0f}", (data["matmul"], -0.9), ha="right", fontsize=9)
        axes.set_xscale("log")
        axes.set(xlim=(0.4, 1200), ylim=(len(data["rates"]) - 0.4, -1.4), xlabel="TFLOP/s; bars: without a mask, dots: causal")
        axes.set_yticks(range(len(data["rates"])), data["rates"])
        plain(axes.xaxis)

    return svg(draw, (7.2, 4.8))


def box(axes, start: float, end: float, row: int, text: str, colour: str) -> None:
    """One piece of work on a time line."""
    axes.add_patch(Rectangle((start, row + 0.08), end - start, 0.84, facecolor=colour, edgecolor="white", alpha=0.7))
    axes.text((start + end) / 2, row + 0.5, text, ha="center", va="center", fontsize=7)


FIGURES: dict[str, tuple[Callable[[], dict], Callable[[dict], str]]] = {
    "score-memory": (score_memory, draw_score_memory),
    "running-softmax": (running_softmax, draw_running_softmax),
    "roofline": (roofline, draw_roofline),
    "pyramid": (pyramid, draw_pyramid),
    "block": (block, draw_block),
    "traffic": (traffic, draw_traffic),
    "causal-tiles": (causal_tiles, draw_causal_tiles),
    "walk": (walk, draw_walk),
    "sms": (sms, draw_sms),
    "splits": (splits, draw_splits),
    "ring": (ring, draw_ring),
    "fragment": (fragment, draw_fragment),
    "tv": (tv, draw_tv),
    "swizzle": (swizzle, draw_swizzle),
    "turns": (turns, draw_turns),
    "ladder": (ladder, draw_ladder),
}


def short(x: float) -> float:
    """Six digits: what a picture can show, and the same on every machine."""
    return float(f"{x:.6g}")


def length(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k"


def plain(axes) -> None:
    """10 and 1,000 on logarithmic axes, not powers."""
    for axis in (axes.xaxis, axes.yaxis) if hasattr(axes, "xaxis") else (axes,):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def svg(draw: Callable[[Figure], None], figsize: tuple[float, float]) -> str:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=figsize, layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def drawn(name: str) -> str:
    """The figure as SVG, with the numbers it shows."""
    compute, draw = FIGURES[name]
    data = compute()
    start, rest = draw(data).split("<svg", 1)
    tag, rest = rest.split(">", 1)
    return f"{start}<svg{tag}>\n <desc>{html.escape(json.dumps(data), quote=False)}</desc>{rest}"


def shown(text: str) -> dict:
    """The numbers that an SVG made by `drawn` shows."""
    return json.loads(html.unescape(re.search(r"<desc>(.*?)</desc>", text, re.DOTALL)[1]))


def refresh(folder: Path = FOLDER, redraw: bool = False) -> list[Path]:
    """Write the figures whose numbers changed (all of them with `redraw`) into `folder`; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (compute, _) in FIGURES.items():
        path = folder / f"{name}.svg"
        if redraw or not path.exists() or shown(path.read_text(encoding="utf-8")) != compute():
            path.write_text(drawn(name), encoding="utf-8")
            written.append(path)
    return written


if __name__ == "__main__":
    for path in refresh(redraw="--redraw" in sys.argv[1:]):
        print(path)
