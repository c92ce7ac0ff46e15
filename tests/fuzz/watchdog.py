"""Bounds on a case: seconds, and memory beyond what the process has already."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SECONDS = 10
BYTES = 1 << 30


class TooSlow(BaseException):
    """A case ran longer than it may. No Exception, which whoever is slow might catch."""


@contextmanager
def bounded(seconds: float = SECONDS, memory: int = BYTES) -> Iterator[None]:
    """Raises TooSlow after as many seconds of computing, however busy the machine is; allocations
    beyond the memory fail. Main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"it computed for {seconds} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_mapped() + memory, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _mapped() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
