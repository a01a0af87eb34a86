"""Processes of one gloo group, for tests of what several ranks do: `run(function, world, ...)` calls function(rank, world, ...) in each.

torch is imported once, by a server from which they are forked.
"""

import json
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOADED = ["torch", "torch.distributed", "numpy"]
SECONDS = 120


def run(function: Callable, world: int, *args: Any, seconds: float = SECONDS, timeout: float = 60.0) -> list[Any]:
    """What function(rank, world, *args) returns in each of `world` processes, as JSON holds it; {"error": text} where it raised, None where it ended
    without a word. timeout: of the group's collectives.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="tilewise-ranks-") as folder:
        port = free_port()
        processes = [
            context.Process(target=_one, args=(function, rank, world, port, folder, timeout, args), daemon=True) for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        assert not hanging, f"ranks {hanging} of {world} had not ended after {seconds} s"
        files = [Path(folder, f"{rank}.json") for rank in range(world)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _one(function: Callable, rank: int, world: int, port: int, folder: str, timeout: float, args: tuple) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
        result = function(rank, world, *args)
    except Exception:
        result = {"error": traceback.format_exc()}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # without waiting for ranks that have gone
