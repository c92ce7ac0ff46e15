"""Two processes that talk to each other through gloo, for tests of what is distributed."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

WORLD = 2

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo here"
)


def in_two_processes(function: Callable[..., None], folder: Path, *arguments: object) -> None:
    """Calls `function(*arguments)` in two processes with a process group, and raises here what is
    raised in one of them. The function is found by its name."""
    # The server has imported what commands.py says.
    start_processes(
        _work, (function, str(folder), arguments), nprocs=WORLD, start_method="forkserver"
    )


def _work(
    rank: int, function: Callable[..., None], folder: str, arguments: tuple[object, ...]
) -> None:
    # As torchrun has them, for the tools that look for them.
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{function.__name__}.store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(minutes=10),  # a machine may be busy
    )
    try:
        function(*arguments)
    finally:
        dist.destroy_process_group()
