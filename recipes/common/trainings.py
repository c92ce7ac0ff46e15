"""Several trainings at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def usual_jobs() -> int:
    """How many are made at once: one on a GPU, else one a core."""
    import torch

    if torch.cuda.is_available():
        return 1
    if hasattr(os, "sched_getaffinity"):  # of the process, which may be in a container
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def at_once(jobs: int, calls: Iterable[tuple[Any, ...]]) -> None:
    """Calls each (function, *arguments), so many at a time; the first error ends what has not
    begun, and is raised when the others are through."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(*call) for call in calls]
        try:
            for future in waiting:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
