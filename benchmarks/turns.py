"""Rivals take turns in one process, so that a busy machine slows all of them. Trust the ratios, not
the seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from math import inf
from typing import Any

from torch import Tensor, nn

from paramshare.plan import SharingPlan

SHORTEST = 0.1  # seconds of a turn; what is quicker is repeated in it


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """How long it takes, each of the repeats."""
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def take_turns(
    rivals: dict[str, Callable[[], Any]],
    baseline: Hashable,
    rounds: int,
    budget: float = inf,
    check: Callable[[dict[str, Any]], None] = lambda outputs: None,
) -> dict[str, list[float]]:
    """Each rival's time as a ratio to the baseline's, one a round.

    At most `rounds`, and no more than fit in `budget` seconds, but at least one. `check` is given
    what the rivals return when they warm up, before anything is timed.
    """
    outputs, repeats, estimate = {}, {}, 0.0
    for name, work in rivals.items():
        start = time.perf_counter()
        outputs[name] = work()
        took = time.perf_counter() - start
        repeats[name] = 1 + int(SHORTEST / took)
        estimate += took * repeats[name]
    check(outputs)
    outputs.clear()
    names = list(rivals)
    ratios: dict[str, list[float]] = {name: [] for name in names if name != baseline}
    for n in range(max(1, min(rounds, int(min(budget, 1e9) / estimate)))):
        # The order alternates, since a machine that slows down favours who comes first.
        order = names if n % 2 == 0 else names[::-1]
        took = {name: seconds(rivals[name], repeats[name]) for name in order}
        for name, history in ratios.items():
            history.append(took[name] / took[baseline])
        line = ", ".join(f"{name} / {baseline} = {h[-1]:.3f}" for name, h in ratios.items())
        print(f"round {n + 1}: {line}", flush=True)
    return ratios


def training_step(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def step() -> None:
        model.zero_grad()
        model(tokens).square().mean().backward()

    return step


def floor(plan: SharingPlan, tokens: int) -> float:
    """The least ratio that the operations allow: those of the dense products, and of generating
    the weights first, over those of the dense products."""
    generation = plan.tokens * plan.features * sum(group.columns for group in plan.groups)
    dense = sum(len(g.slots) * g.rows * g.cols for g in plan.groups) * tokens
    return 1 + generation / dense
