"""The tasks of GLUE: their files, columns and measures.

A folder has the task's files itself or in a folder of the task's name, and these are the Parquet or
JSON lines that `datasets` writes (train, validation) or the TSV files of GLUE's own archives
(train.tsv, dev.tsv). MNLI is judged on its matched texts. The test sets have no labels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import metrics
from metrics import Measure
from rows import SUFFIXES, Row, read_rows
from script import check_installed
from stages import UserError

LABELS = ("label", "gold_label", "is_duplicate", "Quality", "score")
_COLA = ("source", "label", "star", "sentence")  # its TSV files have no header


class Task(NamedTuple):
    """`archive` is its folder in GLUE's archives; each text's column has one of several names."""

    archive: str
    texts: tuple[tuple[str, ...], ...]
    measure: Measure = metrics.accuracy_alone
    regression: bool = False


_PAIR = (("sentence1", "#1 String"), ("sentence2", "#2 String"))
TASKS = {
    "cola": Task("CoLA", (("sentence",),), metrics.matthews_alone),
    "sst2": Task("SST-2", (("sentence",),)),
    "mrpc": Task("MRPC", _PAIR, metrics.accuracy_and_f1),
    "stsb": Task("STS-B", _PAIR, metrics.correlations, regression=True),
    "qqp": Task("QQP", (("question1",), ("question2",)), metrics.accuracy_and_f1),
    "mnli": Task("MNLI", (("premise", "sentence1"), ("hypothesis", "sentence2"))),
    "qnli": Task("QNLI", (("question",), ("sentence",))),
    "rte": Task("RTE", _PAIR),
    "wnli": Task("WNLI", _PAIR),
}
_SPLITS = {
    "train": ("train",),
    "dev": ("validation_matched", "dev_matched", "validation", "dev"),
}


def find(name: str) -> Task:
    if name not in TASKS:
        raise UserError(f"GLUE has no task {name!r}: use one of {', '.join(TASKS)}")
    return TASKS[name]


def rows(name: str, folder: Path | None) -> dict[str, tuple[str, list[Row]]]:
    """Of train and dev, where the rows come from and the rows. UserError."""
    if folder is None:
        return _from_hub(name)
    if not folder.is_dir():
        raise UserError(f"--glue-dir {folder} is not a folder")
    places = (folder / name, folder / TASKS[name].archive, folder)
    read = {}
    for split, stems in _SPLITS.items():
        files = next(filter(None, (_files(place, stems) for place in places)), None)
        if files is None:
            raise UserError(f"{folder} has no {split} file of {name}: {' or '.join(stems)}.*")
        header = _COLA if name == "cola" and files[0].suffix == ".tsv" else None
        read[split] = str(files[0]), _whole(name, files, header)
    return read


def _files(place: Path, stems: Sequence[str]) -> list[Path] | None:
    for stem in stems:
        for suffix in SUFFIXES:
            if found := sorted([*place.glob(stem + suffix), *place.glob(f"{stem}-*{suffix}")]):
                return found
    return None


def _whole(name: str, files: Sequence[Path], header: Sequence[str] | None) -> list[Row]:
    found = [row for path in files for row in read_rows(path, header)]
    if name == "qqp":  # a few lines of its TSV files are cut off
        found = [row for row in found if row.get("is_duplicate", row.get("label")) is not None]
    return found


def _from_hub(name: str) -> dict[str, tuple[str, list[Row]]]:
    check_installed({"datasets": "datasets"})
    from datasets import load_dataset

    dev = "validation_matched" if name == "mnli" else "validation"
    data = load_dataset("nyu-mll/glue", name)
    return {"train": (name, list(data["train"])), "dev": (name, list(data[dev]))}
