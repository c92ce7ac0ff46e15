"""Times of rivals as ratios to one ordinary layer used at every depth, and their operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
from encoders import Shape
from operations import inference_operations, training_operations
from rivals import build, check_same
from torch import Tensor, nn
from turns import take_turns, training_step

BASELINE = "reused"
Found = dict[str, dict[str, Any]]


def inference(
    shape: Shape, names: list[str], batch: int, length: int, rounds: int, budget: float = inf
) -> Found:
    """Of forward passes: `ratios`, one a round, and `operations`, of each named rival."""
    models = build(shape, [BASELINE, *names])
    return inference_of(models, some_tokens(shape, batch, length), rounds, budget)


@torch.no_grad()
def inference_of(models: dict[str, nn.Module], tokens: Tensor, rounds: int, budget: float) -> Found:
    """As `inference`, of models that are there, `BASELINE` among them."""
    runs = {name: partial(model, tokens) for name, model in models.items()}
    ratios = take_turns(runs, BASELINE, rounds, budget, check_same)
    return {"ratios": ratios, "operations": _relative(inference_operations, models, tokens)}


def training(
    shape: Shape, names: list[str], batch: int, length: int, rounds: int, budget: float = inf
) -> Found:
    """Of forward and backward passes, without the optimizer: as `inference`."""
    models, tokens = build(shape, [BASELINE, *names]), some_tokens(shape, batch, length)
    with torch.no_grad():
        check_same({name: model(tokens[:1]) for name, model in models.items()})
    steps = {name: training_step(model.train(), tokens) for name, model in models.items()}
    ratios = take_turns(steps, BASELINE, rounds, budget)
    return {"ratios": ratios, "operations": _relative(training_operations, models, tokens)}


def some_tokens(shape: Shape, batch: int, length: int) -> Tensor:
    """Random ids, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.vocabulary, (batch, length), generator=generator)


def _relative(
    count: Callable[[nn.Module, Tensor], int], models: dict[str, nn.Module], tokens: Tensor
) -> dict[str, float]:
    counts = {name: count(model, tokens) for name, model in models.items()}
    return {name: number / counts[BASELINE] for name, number in counts.items() if name != BASELINE}
