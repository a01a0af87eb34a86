"""The benchmark harness: contenders of one kind, checked, then timed against each other, into rows that say where they come from.

rows = bench.run(bench.workloads_from({"seqlen": "512,1024", "mask": "causal"}), bench.find("tilewise,sdpa"), budget_s=1.0)
bench.append("results.jsonl", rows)
print(bench.markdown(rows, "time"))
"""

from tilewise.bench.memory import peak_extra_bytes
from tilewise.bench.peers import Impl, find, known, ours
from tilewise.bench.runner import Timing, run
from tilewise.bench.sets import (
    Workload,
    chosen,
    cpu_sweep,
    hard_inputs,
    ladder_cells,
    ladder_from,
    ladder_sweep,
    mask_from,
    mask_shapes,
    model_shapes,
    paper_sweep,
    workloads_from,
)
from tilewise.bench.store import Row, append, latest, load, select
from tilewise.bench.tables import (
    cells_of,
    cells_of_models,
    hard_tables,
    hard_verdicts,
    ladder_table,
    markdown,
    models_table,
    refresh,
    table,
    verdicts,
)

ON_A_CPU = {"seqlen": "512", "heads": "2"}  # the set hard-inputs, where it is to end

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
