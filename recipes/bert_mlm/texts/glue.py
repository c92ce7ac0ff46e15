"""The tasks of GLUE: their files, columns and measures.

A folder has the task's files itself or in a folder of the task's name, and these are the Parquet or
JSON lines that `datasets` writes (train, validation) or the TSV files of GLUE's own archives
(train.tsv, dev.tsv), both splits in one of them. MNLI is judged on its matched texts. The test sets
have no labels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from script import check_installed
from stages import UserError
from texts.rows import SUFFIXES, Row, read_rows

LABELS = ("label", "gold_label", "is_duplicate", "Quality", "score")
_COLA = ("source", "label", "star", "sentence")  # its TSV files have no header


class Task(NamedTuple):
    """`archive` is its folder in GLUE's archives; each text's column has one of several names;
    `measure` is the name of a function of metrics.py."""

    archive: str
    texts: tuple[tuple[str, ...], ...]
    measure: str = "accuracy_alone"
    regression: bool = False


_PAIR = (("sentence1", "#1 String"), ("sentence2", "#2 String"))
TASKS = {
    "cola": Task("CoLA", (("sentence",),), "matthews_alone"),
    "sst2": Task("SST-2", (("sentence",),)),
    "mrpc": Task("MRPC", _PAIR, "accuracy_and_f1"),
    "stsb": Task("STS-B", _PAIR, "correlations", regression=True),
    "qqp": Task("QQP", (("question1",), ("question2",)), "accuracy_and_f1"),
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
    read = {}
    for split, files in _find_files(name, folder).items():
        header = _COLA if name == "cola" and files[0].suffix == ".tsv" else None
        # A few lines of QQP are cut off.
        found = [row for path in files for row in read_rows(path, header, cut_off=name == "qqp")]
        read[split] = str(files[0]), found
    return read


def labelled(name: str, rows: Sequence[Row]) -> list[Row]:
    """Without those that have no label: lines of QQP's TSV files that are cut off."""
    if name != "qqp":
        return list(rows)
    labels = (row.cells.get("is_duplicate", row.cells.get("label")) for row in rows)
    return [row for row, label in zip(rows, labels, strict=True) if label not in (None, "")]


def _find_files(name: str, folder: Path) -> dict[str, list[Path]]:
    """Of train and dev, the files. UserError unless one place has both: files of two would be of
    two tasks, or name labels in two ways."""
    halves = []
    for place in (folder / name, folder / TASKS[name].archive, folder):
        found = {split: _files(place, stems) for split, stems in _SPLITS.items()}
        absent = [split for split, files in found.items() if not files]
        if not absent:
            return found
        if len(absent) == 1:
            halves.append((place, absent[0]))
    place, split = halves[0] if halves else (folder, "train")
    raise UserError(f"{place} has no {split} file of {name}: {' or '.join(_SPLITS[split])}.*")


def _files(place: Path, stems: Sequence[str]) -> list[Path]:
    for stem in stems:
        for suffix in SUFFIXES:
            if found := sorted([*place.glob(stem + suffix), *place.glob(f"{stem}-*{suffix}")]):
                return found
    return []


def _from_hub(name: str) -> dict[str, tuple[str, list[Row]]]:
    check_installed({"datasets": "datasets"})
    from datasets import load_dataset

    dev = "validation_matched" if name == "mnli" else "validation"
    data = load_dataset("nyu-mll/glue", name)
    return {
        split: (name, [Row(f"{name} {part}, row {n}", row) for n, row in enumerate(data[part], 1)])
        for split, part in (("train", "train"), ("dev", dev))
    }
