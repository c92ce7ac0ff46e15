"""What the benchmarks have in common: rivals take turns in one process, so that a busy machine
slows all of them. Trust the ratios, not the seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from statistics import median

from torch import Tensor, nn

from paramshare.plan import SharingPlan


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def take_turns(
    rivals: dict[str, Callable[[], object]], baseline: Hashable, rounds: int
) -> dict[str, float]:
    """The median over the rounds of each rival's time as a ratio to the baseline's."""
    names = list(rivals)
    for name in names:
        rivals[name]()  # warm-up
    ratios: dict[str, list[float]] = {name: [] for name in names if name != baseline}
    for n in range(rounds):
        # The order alternates, since a machine that slows down favours who comes first.
        took = {name: seconds(rivals[name]) for name in (names if n % 2 == 0 else names[::-1])}
        for name, history in ratios.items():
            history.append(took[name] / took[baseline])
        line = ", ".join(f"{name} / {baseline} = {h[-1]:.3f}" for name, h in ratios.items())
        print(f"round {n + 1}: {line}", flush=True)
    return {name: median(history) for name, history in ratios.items()}


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
