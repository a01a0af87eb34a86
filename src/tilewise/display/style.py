"""How every matplotlib figure of the project looks."""

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tilewise",  # the same rows give the same file
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}
