"""Labelled texts: what a model is finetuned on, and judged by."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stages import UserError
from texts import glue
from texts.rows import Row, read_rows

if TYPE_CHECKING:
    from measures.metrics import Measure

MOST_SHOWN = 10  # labels
COLUMNS = (("text",), ("text2",), ("label",))  # of files of one's own


class Example(NamedTuple):
    """One text or a pair; the label is a number, that of the class unless it is a regression."""

    texts: tuple[str, ...]
    label: float


@dataclass
class Data:
    """`splits` has train, dev and perhaps test; `names` are those of the classes, None where
    numbers are to be predicted; `measure` says how good predictions are; `left_out` counts rows
    without a label."""

    splits: dict[str, list[Example]]
    names: list[str] | None
    measure: Measure
    left_out: int = 0

    def describe(self) -> str:
        counts = ", ".join(f"{name} {len(split):,}" for name, split in self.splits.items())
        if self.left_out:
            counts += f" ({self.left_out:,} without a label are left out)"
        labels = [example.label for example in self.splits["train"]]
        if self.names is None:
            return f"{counts}; numbers from {min(labels):g} to {max(labels):g} are predicted"
        found = Counter(labels)
        said = [f"{name} ({found[n]:,})" for n, name in enumerate(self.names[:MOST_SHOWN])]
        more = len(self.names) - len(said)
        return f"{counts}; labels: {', '.join(said)}{f' and {more} more' * bool(more)}"


def add_options(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("data", "a GLUE task, or files of your own")
    files.add_argument("--glue", metavar="TASK", help=", ".join(glue.TASKS))
    files.add_argument(
        "--glue-dir",
        type=Path,
        metavar="DIR",
        help="where its files are; without it they come from the hub, through `datasets`",
    )
    files.add_argument(
        "--cola-metric",
        choices=("matthews", "paper"),
        default="matthews",
        help="paper: the mean of accuracy and F1, by which the paper's code scores CoLA; it is not"
        " comparable with other people's scores (default: %(default)s)",
    )
    for split in ("train", "dev", "test"):
        files.add_argument(
            f"--{split}",
            type=Path,
            metavar="FILE",
            help=".jsonl, .csv, .tsv or .parquet with the columns text, perhaps text2, and label",
        )
    files.add_argument(
        "--regression", action="store_true", help="labels are numbers that are to be predicted"
    )


def load(args: argparse.Namespace) -> Data:
    """What the options say. UserError."""
    # Not at the top of the file, so that --help needs nothing installed.
    from measures import metrics

    if args.glue is not None:
        if args.train or args.dev or args.test:
            raise UserError("--glue brings its own data: leave out --train, --dev and --test")
        task = glue.find(args.glue)
        rows = glue.rows(args.glue, args.glue_dir)
        read, left_out = {}, 0
        for split, (source, everything) in rows.items():
            kept = glue.labelled(args.glue, everything)
            if not kept:
                raise UserError(f"{source}: no row has a label")
            left_out += len(everything) - len(kept)
            read[split] = texts_and_labels(source, kept, (*task.texts, glue.LABELS))
        paper = args.glue == "cola" and args.cola_metric == "paper"
        measure = metrics.accuracy_and_f1 if paper else getattr(metrics, task.measure)
        return _data(read, task.regression, measure, left_out)
    if not (args.train and args.dev):
        raise UserError("say what to train on: --train FILE and --dev FILE, or --glue TASK")
    read = {}
    for split in ("train", "dev", "test"):
        if (path := getattr(args, split)) is not None:
            read[split] = texts_and_labels(path, read_rows(path), COLUMNS)
    pairs = [split for split, found in read.items() if len(found[0][0]) == 2]
    if 0 < len(pairs) < len(read):
        raise UserError(f"text2 is a column of {', '.join(pairs)} only: it is in all files or none")
    return _data(
        read,
        args.regression,
        metrics.correlations if args.regression else metrics.accuracy_and_macro_f1,
    )


def texts_and_labels(
    path: Path | str, rows: Sequence[Row], columns: Iterable[Sequence[str]]
) -> list[tuple[tuple[str, ...], Any]]:
    """The texts and the label of each row. UserError if one has none.

    columns: the names that each may have, the label's last; `text2` is there or not.
    """
    present = {name for row in rows for name in row}
    names = []
    for choices in columns:
        found = [name for name in choices if name in present]
        if found:
            names.append(found[0])
        elif "text2" not in choices:
            raise UserError(
                f"{path} has no column {choices[0]!r}: its columns are {', '.join(sorted(present))}"
            )
    read = []
    for number, row in enumerate(rows, 1):
        *texts, label = (row.get(name) for name in names)
        if None in texts or label is None or not str(label).strip():
            raise UserError(f"{path}: row {number} lacks one of {', '.join(names)}")
        for name, text in zip(names, texts, strict=False):
            if not isinstance(text, str):
                raise UserError(f"{path}: row {number} has the {name} {text!r}, which is no text")
        read.append((tuple(texts), label))
    return read


def _data(
    read: dict[str, list[tuple[tuple[str, ...], Any]]],
    regression: bool,
    measure: Measure,
    left_out: int = 0,
) -> Data:
    if regression:
        names = None
        label_of = _number
    else:
        names = sorted({_name(label) for _, label in read["train"]}, key=_by_number)
        if len(names) < 2:
            raise UserError(f"all training texts have the same label, {names[0]!r}")
        ids = {name: float(number) for number, name in enumerate(names)}
        for split, examples in read.items():
            if new := {_name(label) for _, label in examples} - set(names):
                raise UserError(
                    f"label {min(new)!r} is in the {split} texts, but not in the training texts:"
                    f" these have {_shown(names)}"
                )

        def label_of(label: Any) -> float:
            return ids[_name(label)]

    splits = {
        split: [Example(texts, label_of(label)) for texts, label in examples]
        for split, examples in read.items()
    }
    return Data(splits, names, measure, left_out)


def _shown(names: Sequence[str]) -> str:
    """The first ones, and what to do where they are numbers that can hardly be classes."""
    more = len(names) - MOST_SHOWN
    shown = ", ".join(names[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
    numbers = all(math.isfinite(_by_number(name)[0]) for name in names)
    if numbers and (more > 0 or not all(re.fullmatch(r"-?\d+", name) for name in names)):
        shown += "; numbers that are to be predicted need --regression"
    return shown


def _number(label: Any) -> float:
    try:
        number = float(label)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"label {label!r} is not a number, which --regression needs")
    return number


def _name(label: Any) -> str:
    """1, 1.0 and "1.0" are one label."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", str(label).strip())


def _by_number(name: str) -> tuple[float, str]:
    """Numbers in their order, then words in theirs."""
    try:
        return float(name), name
    except ValueError:
        return math.inf, name
