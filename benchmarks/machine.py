"""The machine that everything was measured on, and the rates that it reached."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import torch
from turns import seconds

ROUNDS = 5


def describe() -> dict[str, str | int | float]:
    """Names and sizes (`memory`: bytes), and the best of some rounds of `matmul`, GFLOP/s of a
    product of matrices, and of `copy`, GB/s read and written by a copy."""
    a, b = torch.randn(1024, 2048), torch.randn(2048, 2048)
    long = torch.randn(2**26)
    other = torch.empty_like(long)
    matmul = min(seconds(lambda: a @ b, 10) for _ in range(ROUNDS))
    copy = min(seconds(lambda: other.copy_(long)) for _ in range(ROUNDS))
    return {
        "cpu": _processor(),
        "cores": os.cpu_count() or 0,
        "caches": _caches(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "matmul": 2 * a.numel() * b.shape[1] / matmul / 1e9,
        "copy": 2 * long.nbytes / copy / 1e9,
    }


def _processor() -> str:
    """As Linux names it; elsewhere its kind."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", file.read_text() if file.exists() else "", re.M)
    return found[1] if found else platform.machine()


def _caches() -> str:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return ""
    found = re.findall(r"^(L\d\w?) cache:\s*(.+)$", lines, re.M)
    return ", ".join(f"{name} {size}" for name, size in found)
