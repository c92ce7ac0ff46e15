"""Labelled texts: what a model is finetuned on, and judged by."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stages import UserError
from texts import glue
from texts.rows import Row, read_rows

if TYPE_CHECKING:
    from measures.metrics import Measure

MOST_SHOWN = 10  # labels
COLUMNS = (("text",), ("text2",), ("label",))  # of files of one's own
# Not all that float() takes: it also takes nan, inf and 1_0.
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
# How programs write a number that is missing, or is none.
_MISSING = {
    *("nan", "-nan", "inf", "-inf", "+inf", "infinity", "-infinity"),
    *("na", "n/a", "#n/a", "<na>", "null", "none", "nil"),
}


class Example(NamedTuple):
    """One text or a pair; the label is a number, that of the class unless it is a regression."""

    texts: tuple[str, ...]
    label: float


class Labelled(NamedTuple):
    """What a row says; `place` names it."""

    place: str
    texts: tuple[str, ...]
    label: str | float | Decimal


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
            names = (*task.texts, glue.LABELS)
            read[split] = texts_and_labels(source, kept, names, empty=True)
        paper = args.glue == "cola" and args.cola_metric == "paper"
        measure = metrics.accuracy_and_f1 if paper else getattr(metrics, task.measure)
        return _data(read, task.regression, measure, left_out)
    if not (args.train and args.dev):
        raise UserError("say what to train on: --train FILE and --dev FILE, or --glue TASK")
    read = {}
    for split in ("train", "dev", "test"):
        if (path := getattr(args, split)) is not None:
            read[split] = texts_and_labels(path, read_rows(path), COLUMNS)
    pairs = [split for split, found in read.items() if len(found[0].texts) == 2]
    if 0 < len(pairs) < len(read):
        raise UserError(f"text2 is a column of {', '.join(pairs)} only: it is in all files or none")
    return _data(
        read,
        args.regression,
        metrics.correlations if args.regression else metrics.accuracy_and_macro_f1,
    )


def texts_and_labels(
    source: Path | str,
    rows: Sequence[Row],
    columns: Iterable[Sequence[str]],
    *,
    empty: bool = False,
) -> list[Labelled]:
    """The texts and the label of each row. UserError if one has none.

    source: of all rows. columns: the names that each may have, the label's last; `text2` is there
    or not. empty: whether a text may be empty, as a few of QQP are.
    """
    present = {name for row in rows for name in row.cells}
    names = []
    for choices in columns:
        found = [name for name in choices if name in present]
        if found:
            names.append(found[0])
        elif "text2" not in choices:
            raise UserError(
                f"{source} has no column {choices[0]!r}: its columns are "
                f"{', '.join(sorted(present))}"
            )
    read = []
    for place, cells in rows:
        *texts, label = (cells.get(name) for name in names)
        for name, text in zip(names, texts, strict=False):
            if _is_missing(text) and not (empty and isinstance(text, str)):
                raise UserError(f"{place} lacks the {name}")
            _check_text(place, name, text)
        if _is_missing(label):
            raise UserError(f"{place} lacks the {names[-1]}")
        if isinstance(label, str):
            _check_text(place, names[-1], label)
        elif not isinstance(label, int | float | Decimal) or label in (math.inf, -math.inf):
            raise UserError(
                f"{place} has the {names[-1]} {label!r:.40}, which is neither a text nor a number"
            )
        read.append(Labelled(place, tuple(texts), label))
    return read


def _is_missing(value: Any) -> bool:
    """NaN is how tables of numbers say it; an empty cell, how CSV does."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def _check_text(place: str, name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise UserError(f"{place} has the {name} {text!r:.40}, which is no text")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{place} has a {name} with a NUL or half a character: {text!r:.40}")


def _data(
    read: dict[str, list[Labelled]], regression: bool, measure: Measure, left_out: int = 0
) -> Data:
    if regression:
        names = None
        label_of = _number
    else:
        for rows in read.values():
            _check_booleans(rows)
        _check_missing(read["train"])
        names = sorted({_name(row.label) for row in read["train"]}, key=_by_number)
        if len(names) < 2:
            raise UserError(f"all training texts have the same label, {names[0]!r}")
        ids = {name: float(number) for number, name in enumerate(names)}
        for split, rows in read.items():
            for row in rows:
                if (name := _name(row.label)) not in ids:
                    raise UserError(
                        f"{row.place}: label {name!r} is in the {split} texts, but not in the"
                        f" training texts: these have {_shown(names)}"
                    )

        def label_of(row: Labelled) -> float:
            return ids[_name(row.label)]

    splits = {
        split: [Example(row.texts, label_of(row)) for row in rows] for split, rows in read.items()
    }
    return Data(splits, names, measure, left_out)


def _check_booleans(rows: Sequence[Labelled]) -> None:
    """UserError where only some labels are booleans: nothing says whether true is another 1."""
    booleans = [isinstance(row.label, bool) for row in rows]
    if any(booleans) and not all(booleans):
        first, other = rows[booleans.index(True)], rows[booleans.index(False)]
        raise UserError(
            f"{first.place} has the label {first.label}, {other.place} has {other.label!r:.40}:"
            " use booleans for all or for none"
        )


def _check_missing(rows: Sequence[Labelled]) -> None:
    """UserError where one of the labels stands for a number that is missing, for all others are
    numbers. Among words it is one: "nan" is the code of a language, "none" an answer."""
    missing = [row for row in rows if str(row.label).strip().lower() in _MISSING]
    others = {_name(row.label) for row in rows} - {_name(row.label) for row in missing}
    if missing and all(_NUMBER.fullmatch(name) for name in others):
        raise UserError(
            f"{missing[0].place}: label {missing[0].label!r} is not a number, but all others are"
        )


def _shown(names: Sequence[str]) -> str:
    """The first ones, and what to do where they are numbers that can hardly be classes."""
    more = len(names) - MOST_SHOWN
    shown = ", ".join(names[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
    numbers = all(_NUMBER.fullmatch(name) for name in names)
    if numbers and (more > 0 or not all(re.fullmatch(r"-?[0-9]+", name) for name in names)):
        shown += "; numbers that are to be predicted need --regression"
    return shown


def _number(row: Labelled) -> float:
    number = math.nan
    text = str(row.label).strip()
    if not isinstance(row.label, bool) and _NUMBER.fullmatch(text):
        number = float(text)
    if not math.isfinite(number):
        raise UserError(
            f"{row.place}: label {row.label!r:.40} is not a number, which --regression needs"
        )
    return number


def _name(label: Any) -> str:
    """1, 1.0 and "1.0" are one label, as are 0 and -0.0."""
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    name = re.sub(r"^(-?[0-9]+)\.0+$", r"\1", str(label).strip())
    return "0" if name == "-0" else name


def _by_number(name: str) -> tuple[float, str]:
    """Numbers in their order, then words in theirs."""
    return float(name) if _NUMBER.fullmatch(name) else math.inf, name
