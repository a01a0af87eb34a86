"""The benchmark harness: contenders of one kind, checked, then timed against each other, into rows that say where they come from.

rows = bench.run(bench.workloads_from({"seqlen": "512,1024", "mask": "causal"}), bench.find("tilewise,sdpa"), budget_s=1.0)
bench.append("results.jsonl", rows)
print(bench.markdown(rows, "time"))
"""

from tilewise.bench.hard_inputs import ON_A_CPU, hard_inputs
from tilewise.bench.hard_tables import hard_tables, hard_verdicts
from tilewise.bench.impls import Impl, find, known, ours
from tilewise.bench.ladder_tables import cells_of, ladder_table, verdicts
from tilewise.bench.markers import refresh
from tilewise.bench.memory import peak_extra_bytes
from tilewise.bench.model_tables import cells_of_models, models_table
from tilewise.bench.models import model_shapes
from tilewise.bench.report import markdown, table
from tilewise.bench.runner import Timing, run
from tilewise.bench.selectors import chosen, ladder_from, mask_from, workloads_from
from tilewise.bench.store import Row, append, latest, load, select
from tilewise.bench.workloads import Workload, cpu_sweep, ladder_cells, ladder_sweep, mask_shapes, paper_sweep

__all__ = [
    "ON_A_CPU",
    "Impl",
    "Row",
    "Timing",
    "Workload",
    "append",
    "cells_of",
    "cells_of_models",
    "chosen",
    "cpu_sweep",
    "find",
    "hard_inputs",
    "hard_tables",
    "hard_verdicts",
    "known",
    "ladder_cells",
    "ladder_from",
    "ladder_sweep",
    "ladder_table",
    "latest",
    "load",
    "markdown",
    "mask_from",
    "mask_shapes",
    "model_shapes",
    "models_table",
    "ours",
    "paper_sweep",
    "peak_extra_bytes",
    "refresh",
    "run",
    "select",
    "table",
    "verdicts",
    "workloads_from",
]
