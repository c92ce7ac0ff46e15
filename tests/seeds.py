"""One seed for all that tests draw: `pytest --seed N` moves the seeds of all tests at once.

By default they are what the tests say, so that what passes goes on passing; other seeds show
whether it passes by luck. Drawn by torch, and by Hypothesis (conftest.py)."""

from __future__ import annotations

import os

import torch

_VARIABLE = "PARAMSHARE_TESTS_SEED"  # for the processes that tests start
_manual_seed = torch.manual_seed


def choose(run: int) -> None:
    os.environ[_VARIABLE] = str(run)


def moved(seed: int) -> int:
    return int(seed) + 1000 * int(os.environ.get(_VARIABLE, 0))


def generator(seed: int = 0) -> torch.Generator:
    """In place of `torch.Generator().manual_seed(seed)`, which cannot be moved."""
    return torch.Generator().manual_seed(moved(seed))


torch.manual_seed = lambda seed: _manual_seed(moved(seed))
