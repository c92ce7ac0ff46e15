"""All measurements of benchmarks/README.md, in one command.

    python benchmarks/bench.py                # about 35 minutes on two idle cores
    python benchmarks/bench.py --quick DIR    # tiny encoders, one round, into DIR: a trial

Every finished measurement is a line of results.part.jsonl and is not repeated: after an
interruption the same command goes on from there. At the end that file becomes results.jsonl, and
the tables in README.md and curves.png are written from it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes" / "common"))
import curves
import fresh
import machine
import speed
from encoders import SHAPES, Shape
from results import Row, read_rows
from rivals import OURS, RIVALS
from script import check_installed, parser, run_script
from show import show

HERE = Path(__file__).resolve().parent

# What is measured, all of it but the numbers; and how.
Cell = tuple[Row, Callable[[], dict[str, Any]]]
LONGEST = "32x128"  # only few rivals are timed there
# Timed in training, and with the longest input.
FEWER = ("auto", "blockwise", "materialized")
LOADED = (*OURS, "reused", "dense")


@dataclass(frozen=True)
class Extent:
    """How much is measured. works: batch x tokens; huge: those at which the memory of few rivals is
    taken, of Small alone. At most `rounds`, and what fits in `budget` seconds, but one at least."""

    shapes: dict[str, Shape]
    works: tuple[str, ...]
    step: str
    memory: tuple[str, ...]
    huge: tuple[str, ...]
    loads: int
    axes: dict[str, list[int]]
    rounds: int
    budget: float


FULL = Extent(
    shapes=SHAPES,
    works=("1x1", "1x16", "1x128", "8x128", LONGEST),
    step="8x128",
    memory=("1x128", "8x128"),
    huge=("128x128",),
    loads=3,
    axes=curves.AXES,
    rounds=5,
    budget=135,
)
QUICK = Extent(
    shapes={"Small": Shape(512, 16, 64, 128, 2)},
    works=("1x1", LONGEST),
    step="1x16",
    memory=(),
    huge=("1x1",),
    loads=1,
    axes={axis: values[:2] for axis, values in curves.AXES.items()},
    rounds=1,
    budget=0,
)


def cells(extent: Extent) -> Iterator[Cell]:
    """All measurements, in order."""
    yield {"kind": "machine"}, machine.describe
    limits = {"rounds": extent.rounds, "budget": extent.budget}
    for name, shape in extent.shapes.items():
        about = {"shape": name, "sizes": asdict(shape)}
        for work in extent.works:
            rivals = timed(name, work)
            if not rivals:
                continue
            settings = {"kind": "inference", **about, "work": work, "rivals": rivals}
            measure = partial(speed.inference, shape, rivals, *numbers(work), **limits)
            yield settings, measure
        rivals = [*FEWER, *(["dense"] if name == "Small" else [])]
        settings = {"kind": "training", **about, "work": extent.step, "rivals": rivals}
        yield settings, partial(speed.training, shape, rivals, *numbers(extent.step), **limits)
        yield from memory_cells(extent, shape, about)
        settings = {"kind": "files", **about, "rounds": extent.loads}
        yield settings, partial(load, shape, extent.loads)
    for axis, values in extent.axes.items():
        for value in values:
            settings = {"kind": "curve", "axis": axis, "value": value}
            yield settings, partial(curves.measure, axis, value, **limits)


def timed(shape: str, work: str) -> list[str]:
    """The rivals that are worth their time."""
    if work == LONGEST:
        return [] if shape == "Base" else list(FEWER)
    return [name for name in RIVALS if name != speed.BASELINE] if shape == "Small" else list(OURS)


def memory_cells(extent: Extent, shape: Shape, about: Row) -> Iterator[Cell]:
    huge = extent.huge if about["shape"] == "Small" else ()
    for work in (*extent.memory, *huge):
        for rival in ("factored", "materialized", "dense") if work in huge else LOADED:
            settings = {"kind": "memory", **about, "work": work, "rival": rival}
            yield settings, partial(first_answer, shape, rival, *numbers(work))


def first_answer(shape: Shape, rival: str, batch: int, length: int) -> dict[str, float]:
    """Bytes of one fresh process; its seconds mean nothing alone."""
    (found,) = fresh.measure(shape, (rival,), batch, length)[rival]
    return {name: found[name] for name in ("stored", "resident", "traced", "largest")}


def load(shape: Shape, rounds: int) -> dict[str, Any]:
    """What ours and the dense one take from their files, in so many fresh processes each."""
    return {"processes": fresh.measure(shape, ("auto", "dense"), 1, 128, rounds)}


def numbers(work: str) -> tuple[int, int]:
    """Batch and tokens."""
    batch, length = map(int, work.split("x"))
    return batch, length


def run(extent: Extent, folder: Path) -> None:
    check_installed({"matplotlib": "matplotlib", "transformers": "transformers"})
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "results.part.jsonl"
    done = read_rows(part)
    todo = list(cells(extent))
    start = time.perf_counter()
    for number, (settings, measure) in enumerate(todo, 1):
        if any(settings.items() <= row.items() for row in done):
            continue
        says = [settings.get(x) for x in ("kind", "shape", "work", "rival", "axis", "value")]
        what = " ".join(str(word) for word in says if word is not None)
        print(f"[{number}/{len(todo)}, {time.perf_counter() - start:.0f} s] {what}", flush=True)
        done.append({**settings, **measure()})
        with part.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[-1]) + "\n")
    part.replace(folder / "results.jsonl")
    show(done, folder)


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--quick", type=Path, metavar="DIR", help="a trial, into this folder")
    quick = options.parse_args(arguments).quick
    work = partial(run, QUICK, quick) if quick else partial(run, FULL, HERE)
    return run_script("bench.py", work)


if __name__ == "__main__":
    sys.exit(main())
