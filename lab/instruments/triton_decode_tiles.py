"""Tiles of the Triton backend's decode next to those that ship, on cells of the set `decode`, in turns in one process, on a machine with a GPU.

    python lab/instruments/triton_decode_tiles.py "b16 8k 32:8 p64 q4; b16 latent-4k 16:1 p64 q1: 32,64,4,3 | 64,64,4,3,4" --out rows.jsonl

Each text has cells by their titles, and trials: rows, keys, warps and stages, and perhaps how many programs there are for a multiprocessor, and of
how many sequences a program shares out the keys by their lengths (0: all have as many parts); "-" is what ships. They are compiled ahead, side by
side, and their results compared with those of what ships. Microseconds of a call, medians of replays of a CUDA graph of calls on caches that do not
fit the L2 cache.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/shared"))

import torch
from triton_facts import measured

from tilewise.backends.triton import config as configs
from tilewise.backends.triton import decode
from tilewise.backends.triton.config import Config
from tilewise.bench.provenance import provenance
from tilewise.bench.sets.decode import Cell, Pool, decode_cells
from tilewise.bench.timing import interleave
from tilewise.masks import Causal
from tilewise.problem import DecodeCall

ABSENT = "cu_seqlens_q", "cache_batch_idx", "leftpad", "tree", "split"


@contextmanager
def chosen(trial: str) -> Iterator[None]:
    """Decode by the tiles of a trial; empty: what ships."""
    numbers = [each if each == "-" else int(each) for each in trial.split(",")] if trial else []
    numbers += ["-"] * (6 - len(numbers))
    programs = decode.PER_MULTIPROCESSOR if numbers[4] == "-" else numbers[4]
    sequences = decode.SEQUENCES if numbers[5] == "-" else (numbers[5],)
    tiles = configs.config_of_decode if numbers[0] == "-" else lambda *_: Config(*numbers[:4])
    with (
        mock.patch.object(decode, "PER_MULTIPROCESSOR", programs),
        mock.patch.object(decode, "SEQUENCES", sequences),
        mock.patch.object(configs, "config_of_decode", tiles),
    ):
        yield


def bound(cell: Cell, trial: str, pool: Pool) -> tuple[decode.Decoder, list[DecodeCall]]:
    """What computes the cell, and a problem for each copy of its caches."""
    caches = pool.caches(cell)
    shared = {"q": caches.q, "seqlens": caches.seqlens, "page_table": caches.table, "max_seqlen_q": cell.new, "shared_prefix": 0}
    shared |= {"mask": Causal(), "scale": cell.head_dim**-0.5, **dict.fromkeys(ABSENT)}
    problems = [DecodeCall(k_cache=k, v_cache=v, **shared) for k, v in caches.copies]
    with chosen(trial):
        return decode.Decoder(problems[0]), problems


def compile_all(job: tuple[Cell, str]) -> str:
    """What the kernels take, with and without parts, compiled into Triton's cache, or "not" and why."""
    cell, trial = job
    try:
        small = replace(cell, lengths=(256,)) if cell.page else replace(cell, lengths=(cell.longest,))
        found, _ = bound(small, trial, Pool(torch.device("cuda"), 0))
        with chosen(trial):
            sequences = next((most for most in decode.SEQUENCES if len(cell.lengths) <= most), 0)
        said = []
        for split, most in ((False, 0), (True, 0), *([(True, sequences)] if sequences else [])):
            found.constants |= {"SPLIT": split, "SEQUENCES": most}
            facts = measured(found.kernel(True, found.latent), found.target)
            said.append(f"{facts.registers} registers, {facts.stack} bytes of stack, {facts.shared} of shared memory")
        return "; ".join(said)
    except Exception as error:  # of the compiler, which has many
        return f"not {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="'CELLS: TRIALS'")
    parser.add_argument("--budget", type=float, default=0.05, metavar="SECONDS", help="to time one of them (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append the rows here, as JSON lines")
    arguments = parser.parse_args()
    known, groups = {each.title: each for each in decode_cells()}, []
    for text in arguments.groups:
        titles, _, trials = text.rpartition(": ")
        groups += [(known[title.strip()], ["", *(each.strip() for each in trials.split("|"))]) for title in titles.split(";")]
    todo = list(dict.fromkeys((cell, trial) for cell, trials in groups for trial in trials))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as executor:
        takes = dict(zip(todo, executor.map(compile_all, todo), strict=True))
    pool = Pool(torch.device("cuda"))
    for cell, trials in groups:
        runs = {}
        for trial in trials:
            if not takes[cell, trial].startswith("not "):
                decoder, problems = bound(cell, trial, pool)
                runs[trial] = [partial(decoder, each.tensors, each.seqlens) for each in problems]
        results = {trial: each[0]()[0].float() for trial, each in runs.items()}
        calls = {trial: partial(all_of, each) for trial, each in runs.items()}
        stats = interleave(calls, budget_s=arguments.budget, device="cuda", clock="graph", flush=False)
        for trial in trials:
            row = {"cell": cell.title, "tiles": trial or "ships", "takes": takes[cell, trial]}
            if trial in runs:
                row |= {"us": round(1e6 * stats[trial].median / len(runs[trial]), 2)}
                row |= {"apart": (results[trial] - results[trials[0]]).abs().max().item()}
            print(row, flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row | {"environment": provenance("cuda")}) + "\n")


def all_of(runs: list) -> None:
    for run in runs:
        run()


if __name__ == "__main__":
    main()
