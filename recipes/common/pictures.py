"""Pictures of results, as PNG files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple


class Trained(NamedTuple):
    """One row of a comparison, in the picture of plot_savings."""

    name: str
    family: int  # what has one colour
    marker: str
    stored: int
    scores: Sequence[float]  # one a seed
    twin: tuple[int, float] | None  # what its plain twin stores, and its mean score


def plot_savings(trained: Sequence[Trained], path: Path, score: str, title: str) -> None:
    """Scores against what is stored: a pale mark a seed, a large one at their mean, a line from
    twin to shared model."""
    figure, axes = new_figure(8, 4.5)
    for one in trained:
        look = {"color": f"C{one.family}", "marker": one.marker}
        axes.scatter([one.stored] * len(one.scores), one.scores, alpha=0.35, **look)
        axes.scatter(one.stored, mean(one.scores), s=90, label=one.name, **look)
        if one.twin:
            ends = zip(one.twin, (one.stored, mean(one.scores)), strict=True)
            axes.plot(*ends, color=look["color"], linewidth=1, alpha=0.6)
    axes.set_xscale("log")
    axes.set_xlabel("stored parameters")
    axes.set_ylabel(score)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, path)


def new_figure(width: float, height: float, *grid: int, **shared: str) -> tuple[Any, Any]:
    """(figure, axes, or an array of them in rows and columns); inches. Needs no display, and leaves
    matplotlib's state alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(*grid, **shared)


def save_figure(figure: Any, path: Path) -> None:
    part = path.with_name(f".{path.name}")
    figure.savefig(part, format="png", dpi=110)
    os.replace(part, path)
