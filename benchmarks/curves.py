"""How time and memory of one layer scale along four axes, measured and predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from encoders import Encoder, Shape
from rivals import dense, ours
from speed import BASELINE, inference_of, some_tokens

from paramshare.inference import predict
from paramshare.trace import Allocations

LAYER = Shape(30528, 128, 2048, 4096, depth=1)
LENGTH = 128
AXES: dict[str, list[int]] = {
    "tokens": [4**n for n in range(8)],
    "vocabulary": [8192, 16384, 30528, 65536, 131072, 250000],
    "width": [256, 512, 1024, 2048, 4096],
    "blocks": list(range(1, LAYER.vocabulary // LAYER.feed_forward + 1)),
}
LABELS = {
    "tokens": "tokens (128 a sequence)",
    "vocabulary": "vocabulary",
    "width": "width (feed-forward twice that)",
    "blocks": "blocks: rows of a weight in a column, at most",
}
EXECUTIONS = ("factored", "blockwise", "materialized")


@dataclass(frozen=True)
class Point:
    """One layer of a shape, the tokens that it is given, and the rows in a column at most."""

    shape: Shape = LAYER
    tokens: int = LENGTH
    blocks: int | None = None


def point(axis: str, value: int) -> Point:
    if axis == "vocabulary":
        return Point(replace(LAYER, vocabulary=value))
    if axis == "width":
        return Point(replace(LAYER, width=value, feed_forward=2 * value))
    return replace(Point(), **{axis: value})


def measure(axis: str, value: int, rounds: int, budget: float) -> dict[str, Any]:
    """`ratios` and `operations` of factored to ordinary weights; `peaks` and `predicted`, bytes of
    each execution: what is stored, kept and alive at most."""
    at = point(axis, value)
    work = max(1, at.tokens // LENGTH), min(at.tokens, LENGTH)
    models = {execution: ours(at.shape, execution, at.blocks).eval() for execution in EXECUTIONS}
    tokens = some_tokens(at.shape, *work)
    peaks = {name: _peak(model, tokens) for name, model in models.items()}
    predicted = {name: predict(model, (tokens,)).peak_bytes for name, model in models.items()}
    rivals = {BASELINE: dense(at.shape, at.blocks).eval(), "factored": models["factored"]}
    found = inference_of(rivals, tokens, rounds, budget)
    return {
        "ratios": found["ratios"]["factored"],
        "operations": found["operations"]["factored"],
        "peaks": peaks,
        "predicted": predicted,
    }


@torch.no_grad()
def _peak(model: Encoder, tokens: torch.Tensor) -> int:
    stored = sum(parameter.nbytes for parameter in model.parameters())
    with Allocations() as trace:
        model(tokens)
    return stored + trace.peak


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Times above memory, a column an axis: dots are measured, lines predicted."""
    from matplotlib.ticker import LogLocator
    from pictures import new_figure, save_figure

    figure, panels = new_figure(15, 7, 2, len(AXES), sharex="col", sharey="row")
    for (axis, label), (times, memory) in zip(LABELS.items(), panels.T, strict=True):
        found = sorted((row for row in rows if row["axis"] == axis), key=lambda row: row["value"])
        values = [row["value"] for row in found]
        times.plot(values, [row["operations"] for row in found], "C3", label="operations")
        times.plot(values, [median(row["ratios"]) for row in found], "C3o", label="time")
        times.axhline(1, color="0.6", linewidth=0.8)
        for number, name in enumerate(EXECUTIONS):
            predicted, peaks = (
                [row[what][name] / 1e6 for row in found] for what in ("predicted", "peaks")
            )
            memory.plot(values, predicted, f"C{number}")
            memory.plot(values, peaks, f"C{number}o", label=name)
        memory.set_xlabel(label)
        memory.tick_params("x", labelsize=8)
        if axis != "blocks":
            memory.set_xscale("log", base=2)
            memory.xaxis.set_major_formatter("{x:,.0f}")
        for panel in (times, memory):
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("")
            panel.grid(alpha=0.3, which="both")
    panels[0, 0].set_ylabel("factored / ordinary weights")
    panels[1, 0].set_ylabel("peak, MB, what is stored included")
    for panel in panels[:, -1]:
        panel.legend()
    figure.suptitle("One layer, 128 tokens unless said otherwise: dots measured, lines predicted")
    save_figure(figure, path)
